"""Which implementation serves, and what the shared pieces promise."""

import pytest
import torch

from headrace.kernels import choose, raise_on_bad_labels
from headrace.kernels.dispatch import available
from headrace.kernels.labels import note
from headrace.kernels.rows import compacting_rows, merge_states

CPU = torch.device("cpu")


def name(*arguments):
    return choose(*arguments).__name__.rsplit(".", 1)[1]


def test_float64_is_always_served_by_the_reference(monkeypatch):
    assert name(CPU, torch.float64, "native") == "reference"
    monkeypatch.setenv("HEADRACE_KERNELS", "native")
    assert name(CPU, torch.float64) == "reference"


def test_device_then_environment_then_argument(monkeypatch):
    monkeypatch.delenv("HEADRACE_KERNELS", raising=False)
    assert name(CPU, torch.float32) == ("native" if available("native") else "reference")
    assert name(torch.device("meta"), torch.float32) == "reference"
    monkeypatch.setenv("HEADRACE_KERNELS", "reference")
    assert name(CPU, torch.float32) == "reference"
    if available("native"):
        assert name(CPU, torch.float32, "native") == "native"


def test_unknown_names_are_refused(monkeypatch):
    monkeypatch.setenv("HEADRACE_KERNELS", "fastest")
    with pytest.raises(ValueError, match="fastest"):
        choose(CPU, torch.float32)


def test_noted_labels_raise_once():
    """What a GPU step does instead of raising on the spot."""
    note(torch.tensor(False))
    raise_on_bad_labels()
    note(torch.tensor(False))
    note(torch.tensor(True))
    note(torch.tensor(False))
    with pytest.raises(ValueError, match="cpu"):
        raise_on_bad_labels()
    raise_on_bad_labels()


@pytest.mark.parametrize("active", ["", "1", "0", "1111", "0000", "0110", "1001", "00011", "11000", "0101010101"])
def test_compaction_never_overwrites_a_source(active):
    flags = torch.tensor([c == "1" for c in active], dtype=torch.bool)
    rows = compacting_rows(flags)
    assert sorted(rows.tolist()) == flags.nonzero().squeeze(1).tolist()
    assert all(source == row or source >= len(rows) for row, source in enumerate(rows.tolist()))


def test_parts_without_a_finite_logit_merge():
    empty, full = torch.tensor([[-torch.inf, 0, 0, -torch.inf]]), torch.tensor([[2.0, 1.5, -0.3, 1.0]])
    torch.testing.assert_close(merge_states(torch.stack([empty, full])), full)
    torch.testing.assert_close(merge_states(torch.stack([full, empty, empty])), full)
    assert merge_states(torch.stack([empty, empty])).tolist() == [[-torch.inf, 0, 0, -torch.inf]]
    broken = torch.tensor([[torch.nan] * 4])
    assert merge_states(torch.stack([full, broken]))[0, :3].isnan().all()


def test_a_gpu_is_served_by_what_was_built_for_it(monkeypatch):
    monkeypatch.delenv("HEADRACE_KERNELS", raising=False)
    served = name(torch.device("cuda"), torch.bfloat16)
    assert served == next((each for each in ("cuda", "triton") if available(each)), "reference")


@pytest.mark.parametrize(("implementation", "device"), [("native", "cuda"), ("triton", "cpu"), ("cuda", "cpu")])
def test_memory_that_an_implementation_cannot_read_is_refused(implementation, device, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match=f"{implementation}.*{device}"):
        choose(torch.device(device), torch.float32, implementation)
