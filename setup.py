"""Build of the distribution ``headrace``.

``engine/`` is the package ``headrace``, ``kernels/`` is ``headrace.kernels`` and ``bench/`` is
``headrace.bench``. The C++ kernels need pybind11 alone; without a compiler they are left out with one line
and the torch reference serves.
"""

import os
import sys
from glob import glob

from setuptools import find_packages, setup
from setuptools.command.build_ext import build_ext

OPENMP = "-fopenmp"

FOLDERS = {"headrace": "engine", "headrace.kernels": "kernels", "headrace.bench": "bench"}


def packages() -> list[str]:
    """Import names of every package below the mapped folders."""
    names = []
    for name, folder in FOLDERS.items():
        names += [name, *(f"{name}.{child}" for child in find_packages(folder))]
    return names


def native_extensions() -> list:
    """The C++ kernels, or nothing when pybind11 or the sources are missing."""
    sources = sorted(glob("csrc/*.cpp") + glob("csrc/cpu/*.cpp"))
    if not sources or os.environ.get("HEADRACE_SKIP_NATIVE"):
        return []
    try:
        from pybind11.setup_helpers import Pybind11Extension
    except ImportError:
        print("headrace: pybind11 is missing, C++ kernels are skipped", file=sys.stderr)
        return []
    return [
        Pybind11Extension(
            "headrace.kernels._native",
            sources,
            include_dirs=["csrc"],
            depends=sorted(glob("csrc/**/*.h", recursive=True)),
            cxx_std=17,
            extra_compile_args=["-O3", "-ffp-contract=fast", "-Wno-psabi", OPENMP],
            extra_link_args=[OPENMP],
        )
    ]


class OptionalBuild(build_ext):
    """Skips the C++ kernels with one clear line where they cannot be compiled."""

    def build_extension(self, extension) -> None:
        try:
            super().build_extension(extension)
        except Exception:  # a toolchain without OpenMP still builds single-threaded kernels
            for flags in (extension.extra_compile_args, extension.extra_link_args):
                if OPENMP in flags:
                    flags.remove(OPENMP)
            super().build_extension(extension)

    def run(self) -> None:
        try:
            super().run()
        except Exception as error:  # whatever the toolchain raises, the pure-Python install must go on
            self.extensions = []
            print(f"headrace: C++ kernels are skipped, the torch reference serves ({error})", file=sys.stderr)


setup(
    packages=packages(),
    package_dir=FOLDERS,
    ext_modules=native_extensions(),
    cmdclass={"build_ext": OptionalBuild},
)
