"""Build of the distribution ``headrace``.

``engine/`` is the package ``headrace``, ``kernels/`` is ``headrace.kernels`` and ``bench/`` is
``headrace.bench``. The C++ kernels need pybind11 alone; without a compiler they are left out with one line
and the torch reference serves.
"""

import os
import shutil
import subprocess
import sys
from glob import glob

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext

OPENMP = "-fopenmp"
CUDA = "headrace.kernels._cuda"

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
            extra_compile_args=["-O3", "-ffp-contract=fast", "-Wno-psabi", "-Wno-maybe-uninitialized", OPENMP],
            extra_link_args=[OPENMP],
        )
    ]


def cuda_extensions() -> list:
    """The CUDA kernels for compute capability 9.0, or nothing where there is no nvcc; Triton then serves every GPU."""
    sources = sorted(glob("csrc/cuda/*.cu"))
    if not sources or os.environ.get("HEADRACE_SKIP_NATIVE"):
        return []
    if nvcc() is None:
        print("headrace: no nvcc, CUDA C++ kernels are skipped and Triton serves GPUs", file=sys.stderr)
        return []
    depends = [*glob("csrc/cuda/*.*h"), *glob("csrc/common/*.h")]
    return [Extension(CUDA, [*sources, "csrc/cuda/bindings.cpp"], include_dirs=["csrc"], depends=sorted(depends), optional=True)]


def nvcc() -> str | None:
    """The CUDA compiler: of CUDA_HOME, else on the path."""
    home = os.environ.get("CUDA_HOME")
    return shutil.which("nvcc", path=os.path.join(home, "bin")) if home else shutil.which("nvcc")


class OptionalBuild(build_ext):
    """Skips the C++ kernels with one clear line where they cannot be compiled."""

    def build_cuda(self, extension) -> None:
        """All of it by nvcc, which links the CUDA runtime statically: the result needs a driver only when it is used."""
        import pybind11

        target = self.get_ext_fullpath(extension.name)
        os.makedirs(os.path.dirname(os.path.abspath(target)), exist_ok=True)
        includes = [f"-I{path}" for path in [*extension.include_dirs, pybind11.get_include(), *self.include_dirs]]
        flags = ["-shared", "-std=c++17", "-O3", "-gencode", "arch=compute_90a,code=sm_90a", "-Xcompiler", "-fPIC,-fvisibility=hidden"]
        try:
            subprocess.run([nvcc(), *flags, *includes, *extension.sources, "-o", target], check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            print(f"headrace: CUDA C++ kernels are skipped and Triton serves GPUs ({error})", file=sys.stderr)

    def build_extension(self, extension) -> None:
        if extension.name == CUDA:
            return self.build_cuda(extension)
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
    ext_modules=native_extensions() + cuda_extensions(),
    cmdclass={"build_ext": OptionalBuild},
)
