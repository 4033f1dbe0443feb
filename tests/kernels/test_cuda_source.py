"""The CUDA kernels without a GPU: their logic on emulated blocks against the reference, and the compiler's resource report."""

import importlib.util
import math
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch

from headrace import kernels as package
from headrace.kernels import PolicySpec, reference
from headrace.kernels.policy_spec import KL_KINDS, TokenStreams
from headrace.kernels.rows import entropies_of, kls_of, logprobs_of

pytest.importorskip("triton")
HERE = Path(__file__).parent
CSRC = HERE.parents[1] / "csrc"
SHARED_LIMIT = 227 << 10
INF = math.inf


@pytest.fixture(scope="module")
def cuda(tmp_path_factory):
    """`headrace.kernels.cuda` over an extension whose device is emulated by threads of the CPU."""
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    pybind11 = pytest.importorskip("pybind11")
    if compiler is None:
        pytest.skip("no C++ compiler")
    library = tmp_path_factory.mktemp("emulated") / f"_cuda{sysconfig.get_config_var('EXT_SUFFIX')}"
    includes = [CSRC, HERE / "emulation", pybind11.get_include(), sysconfig.get_path("include")]
    command = [compiler, "-std=c++20", "-O1", "-shared", "-fPIC", "-fvisibility=hidden", *(f"-I{path}" for path in includes)]
    sources = [CSRC / "cuda/bindings.cpp", HERE / "emulation/emulated_launch.cpp"]
    done = subprocess.run([*command, *map(str, sources), "-o", str(library)], capture_output=True, text=True)
    if done.returncode != 0 and re.search(r"unrecognized.*c\+\+20|fatal error: (ucontext.h|Python.h)|_Float16", done.stderr):
        pytest.skip("the compiler has no C++20, no half precision or no Python headers")
    assert done.returncode == 0, done.stderr
    return with_extension(library)


def with_extension(library: Path):
    """A private copy of the module that sees the emulated extension as its own."""
    spec = importlib.util.spec_from_file_location("headrace.kernels._cuda", library)
    assert spec is not None
    assert spec.loader is not None
    extension = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(extension)
    path = Path(package.__file__).with_name("cuda.py")
    module_spec = importlib.util.spec_from_file_location("emulated_cuda", path)
    assert module_spec is not None
    assert module_spec.loader is not None
    module = importlib.util.module_from_spec(module_spec)
    name = "headrace.kernels._cuda"
    before, attribute = sys.modules.get(name), getattr(package, "_cuda", None)
    sys.modules[name] = package._cuda = extension
    try:
        module_spec.loader.exec_module(module)
    finally:
        if before is None:
            del sys.modules[name], package._cuda
        else:
            sys.modules[name], package._cuda = before, attribute
    module.runs_on = lambda device: True
    return module


def streams_near(logprobs, spec):
    near = lambda: logprobs + torch.randn_like(logprobs) * 0.4  # noqa: E731
    rows = len(logprobs)
    return TokenStreams(
        near(),
        torch.randn(rows),
        torch.rand(rows),
        torch.rand(rows),
        torch.rand(rows) > 0.3,
        near() if spec.kl_coef else None,
        near() if spec.tis_cap else None,
    )


SPECS = [
    PolicySpec(),
    PolicySpec(dual_clip=1.3, tis_cap=1.1, kl_coef=0.1, entropy_coef=0.05, surprisal_coef=0.02),
    PolicySpec("cispo", tis_cap=1.5, entropy_coef=0.1),
    *(PolicySpec(kl_coef=0.5, kl_kind=kind) for kind in KL_KINDS),
]


@pytest.mark.parametrize("columns", [4, 60, 1000, 3004])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_loss_gradient(cuda, columns, dtype):
    for number, spec in enumerate(SPECS):
        torch.manual_seed(number)
        logits, targets, heat = torch.randn(6, columns) * 3, torch.randint(0, columns, (6,)), torch.rand(6) + 0.5
        logits[0, 0] = -INF
        targets[0] = 1
        logits[1] += 500
        targets[2] = columns + 7  # no such label: no score, no gradient at a column
        state = reference.statistics(logits.double(), targets, heat.double()).float()
        streams = streams_near(logprobs_of(state).nan_to_num(neginf=-3.0), spec)
        streams.mask[2] = False
        streams.advantages[3] = 0
        for stream in (streams.old_logprobs, streams.advantages, streams.gates):
            stream[~streams.mask] = torch.nan
        token = reference.token_loss(logprobs_of(state), entropies_of(state), streams, spec)
        expected = reference.gradient(logits, targets, heat, state, token.grad_logprobs, token.grad_entropies)
        buffer = logits.clone()
        got_state, got = cuda.loss_gradient(buffer, targets, heat, streams, spec, dtype=dtype)
        torch.testing.assert_close(got_state, state, rtol=1e-4, atol=1e-4)
        assert got.dtype == dtype
        assert got.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()
        tolerance = {torch.float32: 3e-5, torch.bfloat16: 5e-3, torch.float16: 1e-3}[dtype]
        torch.testing.assert_close(got.float(), expected, rtol=tolerance, atol=tolerance)
        assert got[~streams.mask].float().abs().sum() == 0


def test_loss_gradient_keeps_nan_to_its_row(cuda):
    logits, targets, heat = torch.randn(3, 1000), torch.randint(0, 1000, (3,)), torch.ones(3)
    streams = TokenStreams(torch.full((3,), -7.0), torch.ones(3), torch.ones(3))
    clean_state, clean = cuda.loss_gradient(logits.clone(), targets, heat, streams, PolicySpec())
    logits[1, 900] = torch.nan
    state, gradient = cuda.loss_gradient(logits, targets, heat, streams, PolicySpec())
    assert torch.equal(state[::2], clean_state[::2])
    assert torch.equal(gradient[::2], clean[::2])
    assert logprobs_of(state)[1].isnan()


@pytest.mark.parametrize("columns", [4, 60, 1000, 3004])
def test_pair_scores(cuda, columns):
    logits, targets, heat = torch.randn(6, columns) * 3, torch.randint(0, columns, (6,)), torch.rand(6) + 0.5
    other = logits + torch.randn_like(logits)
    logits[0, 0] = other[0, 0] = -INF  # banned in both
    targets[0] = 1
    other[1] = logits[1]
    logits[2] += 500
    heat[2] = 1
    targets[3] = columns
    logits[4, 1] = torch.nan
    state, divergences = cuda.pair_scores(logits, other, targets, heat)
    exact = reference.pair_statistics(logits.double(), other.double(), targets, heat.double())
    wanted = reference.pair_divergences(logits.double(), other.double(), heat.double(), exact)
    pairs = zip((*kls_of(state), *divergences), (*kls_of(exact), *wanted), strict=True)
    for part in (state, exact):
        assert logprobs_of(part)[4].isnan()
    for actual, expected in pairs:
        torch.testing.assert_close(actual, expected.float(), rtol=1e-5, atol=3e-5, equal_nan=True)
    for start in (0, 4):
        mine, theirs = state[:, start : start + 4], exact[:, start : start + 4].float()
        torch.testing.assert_close(logprobs_of(mine), logprobs_of(theirs), rtol=1e-5, atol=2e-4, equal_nan=True)
        torch.testing.assert_close(entropies_of(mine), entropies_of(theirs), rtol=1e-5, atol=2e-4, equal_nan=True)
    assert divergences[0][1] == divergences[1][1] == kls_of(state)[0][1] == 0


def test_rows_that_do_not_fit_are_left_to_triton(cuda):
    assert not cuda.fits(torch.empty(1, 1002))
    assert not cuda.fits(torch.empty(1, 1 << 20))
    assert not cuda.fits(torch.empty(1, 1001)[:, 1:])
    assert cuda.fits(torch.empty(1, 1000))


def top_rows(columns):
    logits = torch.randn(9, columns) * 4
    logits[1, 2] = 70.0
    logits[2] += 500
    logits[3] = -INF
    logits[3, columns - 1] = 2.0
    logits[4, 1] = torch.nan
    logits[5] = -INF
    logits[6, 3] = logits[6, columns - 1] = 40.0
    logits[7, columns // 2] = 30.0
    return logits


@pytest.mark.parametrize(("columns", "pad"), [(6, 0), (37, 3), (2053, 0), (4096, 8)])
@pytest.mark.parametrize(("dtype", "barred"), [(torch.float32, True), (torch.float16, False), (torch.bfloat16, True)])
def test_top_token(cuda, columns, pad, dtype, barred):
    storage = torch.full((9, columns + pad), torch.nan, dtype=dtype)
    logits = storage[:, :columns]
    logits.copy_(top_rows(columns))
    eligible = torch.ones(9, dtype=torch.bool)
    eligible[8] = False
    threshold = torch.full((9,), 0.7)
    banned = torch.tensor([0, columns - 1]) if barred else None
    spared = torch.zeros(columns, dtype=torch.bool) if barred else None
    if barred:
        spared[columns // 2] = True
    ours = cuda.top_token(logits, eligible, threshold, banned, spared)
    theirs = reference.top_token(logits.double(), eligible, threshold.double(), banned, spared)
    compare(ours, theirs, 3e-5)
    seeds, positions = torch.randint(0, 2**62, (9,)), torch.arange(9) * 2**31
    heat = torch.tensor([1, 1, 0.7, 1, 1, 1, 1.5, 0, 0])
    ours = cuda.top_token_sample(logits, eligible, threshold, seeds, positions, heat, banned, spared)
    theirs = reference.top_token_sample(logits.float(), eligible, threshold, seeds, positions, heat, banned, spared)
    compare(ours, theirs, 3e-4)
    one = cuda.top_token_sample(logits[7:8], eligible[7:8], threshold[7:8], seeds[7:8], positions[7:8], heat[7:8], banned, spared)
    assert all(torch.equal(each[7:8], alone) for each, alone in zip(ours, one, strict=True))


def compare(ours, theirs, tolerance):
    for name, actual, expected in zip(ours._fields, ours, theirs, strict=True):
        if expected.is_floating_point():
            torch.testing.assert_close(
                actual, expected.float(), rtol=1e-5, atol=tolerance, equal_nan=True, msg=lambda m, n=name: f"{n} {m}"
            )
        else:
            assert actual.tolist() == expected.tolist(), name


def test_many_draws_are_the_references(cuda):
    logits = torch.randn(40, 333) * 2
    eligible, threshold = torch.rand(40) > 0.3, torch.full((40,), 0.3)
    seeds, positions, heat = torch.randint(0, 2**62, (40,)), torch.randint(0, 2**40, (40,)), torch.rand(40) * 2
    ours = cuda.top_token_sample(logits, eligible, threshold, seeds, positions, heat)
    theirs = reference.top_token_sample(logits, eligible, threshold, seeds, positions, heat)
    assert torch.equal(ours.token, theirs.token)
    assert torch.equal(ours.fired, theirs.fired)


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc")
@pytest.mark.parametrize("source", sorted(path.name for path in (CSRC / "cuda").glob("*.cu")))
def test_resources(source, tmp_path, record_property):
    """No spills, no stack, and as few registers as the wished-for blocks per multiprocessor leave."""
    command = ["nvcc", "-std=c++17", "-O3", f"-I{CSRC}", "-gencode", "arch=compute_90a,code=sm_90a", "-Xptxas", "-v"]
    done = subprocess.run([*command, "-c", str(CSRC / "cuda" / source), "-o", str(tmp_path / "object.o")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    reports = re.findall(
        r"Compiling entry function '(\w+)'.*?(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads.*?"
        r"Used (\d+) registers([^\n]*)",
        done.stderr,
        re.DOTALL,
    )
    assert reports, done.stderr
    for name, stack, stores, loads, registers, rest in reports:
        shared = re.search(r"(\d+) bytes smem", rest)
        record_property(name, {"registers": int(registers), "stack": int(stack), "spills": int(stores) + int(loads)})
        print(name, registers, "registers")
        assert (stack, stores, loads) == ("0", "0", "0"), name
        assert int(registers) <= (64 if "top_token" in name else 40), name
        assert shared is None or int(shared.group(1)) <= SHARED_LIMIT, name
    assert "warning" not in done.stderr, done.stderr
