"""The kernel bench: a wrong result is never timed, and what was measured is all there."""

import io
import json
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from headrace.bench import accuracy, memory, operations, peers, table, works
from headrace.bench.__main__ import app
from headrace.bench.cases import Inputs, Rows, Size
from headrace.bench.kernels import Plan, run
from headrace.bench.operations import OPERATIONS
from headrace.bench.peers import Peer
from headrace.bench.picture import draw
from headrace.bench.record import Record
from headrace.bench.timing import ROUNDS, interleaved
from headrace.kernels import gemm

CPU = torch.device("cpu")
SMALL = Size(40, 16, 300)


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("headrace.bench.kernels.BUDGETS", dict.fromkeys(("floor", "ours", "peer"), 0.0))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def measured(*names: str, **fields) -> Record:
    options = {"memory": False, "sizes": [SMALL], **fields}
    return run(Plan(CPU, [OPERATIONS[name] for name in names or OPERATIONS], **options), Console(file=io.StringIO()))


@pytest.fixture(scope="module")
def record() -> Record:
    """Every operation at two sizes, with the peers that need nothing but torch."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("headrace.bench.kernels.BUDGETS", dict.fromkeys(("floor", "ours", "peer"), 0.0))
        patch.setattr(works, "PEERS", [peer for peer in peers.PEERS if peer.name == "torch eager"])
        return measured(sizes=[SMALL, Size(64, 16, 500)])


def test_every_operation_is_measured_beside_its_floor(record: Record) -> None:
    for operation, rows in record.cases():
        for size in ("40x16x300", "64x16x500"):
            kinds = [row.kind for row in rows if row.size == size]
            assert kinds[0] == "floor"
            assert kinds.count("ours") == len(works.ours(CPU))
        served = next(row for row in rows if row.kind == "ours")
        assert served.goal == OPERATIONS[operation].goals.get("cpu")
        assert all(row.ratio > 0 and row.calls >= ROUNDS[0] for row in rows)
        assert all(row.errors for row in rows if row.kind != "floor")
    assert [operation for operation, _ in record.cases()] == list(OPERATIONS)


def test_json_holds_everything(record: Record, tmp_path: Path) -> None:
    record.write(tmp_path / "deep" / "bench.json")
    found = json.loads((tmp_path / "deep" / "bench.json").read_text())
    assert found["format"] == 1
    assert {"headrace", "torch", "processor", "device", "threads"} <= found.keys()
    assert len(found["measured"]) == len(record.measured)
    row = found["measured"][1]
    assert row["kind"] == "ours"
    assert row["best_s"] <= row["median_s"]
    assert {"operation", "tokens", "width", "vocabulary", "ratio", "ratio_median", "goal", "errors"} <= row.keys()


def test_the_table_fits_a_terminal_and_the_picture_is_drawn(record: Record, tmp_path: Path) -> None:
    screen = io.StringIO()
    table.show(record, Console(file=screen, width=80))
    text = screen.getvalue()
    assert "…" not in text
    assert all(name in text for name in ("3 GEMMs", "counterfactual_score+js+tv", "torch eager", "40x16x300"))
    draw(record, tmp_path / "bench.png")
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")


def test_a_wrong_log_prob_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = operations.linear_logprob
    monkeypatch.setattr(operations, "linear_logprob", lambda *a, **k: (right(*a, **k)[0] + 2e-4, right(*a, **k)[1]))
    with pytest.raises(accuracy.WrongResultError, match=r"linear_logprob 40x16x300 by \w+: logprobs is off by 2\.0\de-04"):
        measured("linear_logprob")
    answer = CliRunner().invoke(app, ["kernels", "--operation", "linear_logprob", "--sizes", "40x16x300", "--no-memory"])
    assert isinstance(answer.exception, accuracy.WrongResultError)


def test_a_wrong_weight_gradient_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """One chunk's share missing from the sum over tokens: every row-wise result is right."""
    right = gemm.add_weight_gradient
    monkeypatch.setattr(gemm, "add_weight_gradient", lambda total, gradient, hidden: right(total, gradient[:-1], hidden[:-1]))
    with pytest.raises(accuracy.WrongResultError, match="grad_weight"):
        measured("linear_policy_loss")


def test_nan_is_wrong() -> None:
    with pytest.raises(accuracy.WrongResultError, match="kl is off by nan"):
        accuracy.gate("x", {"kl": float("nan")}, torch.float32)


@pytest.mark.parametrize("name", OPERATIONS)
def test_peers_of_torch_agree_with_float64(name: str) -> None:
    made = works.make(OPERATIONS[name], Size(256, 16, 300), CPU)
    for peer in works.peers(OPERATIONS[name], compiled=False):
        if peer.name.startswith(("torch", "F.")):
            accuracy.gate(peer.name, accuracy.errors(made, peer.build(made)), torch.float32)


def test_a_peer_that_fails_is_named_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(_):
        raise ImportError("no module named absent")

    broken = Peer("absent", "linear_logprob", absent)
    huge = Peer("huge", "linear_logprob", absent, matrices=1 << 40)
    monkeypatch.setattr(works, "PEERS", [broken, huge])
    missing = {entry.name: entry.reason for entry in measured("linear_logprob").missing}
    assert missing["absent"] == "no module named absent"
    assert "would take" in missing["huge"]


def test_inputs_are_the_same_every_time() -> None:
    for make in (lambda: vars(Inputs(SMALL, CPU, torch.float32)), lambda: vars(Rows(SMALL, CPU))):
        first, second = make(), make()
        assert all(torch.equal(value, second[name]) for name, value in first.items() if isinstance(value, torch.Tensor))


def test_works_take_turns() -> None:
    calls: list[str] = []
    timings = interleaved({name: lambda name=name: calls.append(name) for name in "ab"}, {"a": 0.0, "b": 0.0}, CPU)
    assert "".join(calls) == "abbaab"
    assert all(timing.best <= timing.median and timing.calls == ROUNDS[0] for timing in timings.values())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["--sizes", "12x3"], "TOKENSxWIDTHxVOCABULARY"), (["--operation", "softmax"], "expected one of linear_logprob")],
)
def test_a_wrong_option_is_one_clear_line(arguments: list[str], words: str) -> None:
    answer = CliRunner().invoke(app, ["kernels", *arguments])
    assert isinstance(answer.exception, ValueError)
    assert words in str(answer.exception)


@pytest.mark.skipif(not memory.CLEAR.exists(), reason="needs Linux")
def test_peak_memory_sees_what_a_call_takes_and_gives_back() -> None:
    size = Size(512, 8, 4000)
    logits = 4 * size.logits
    tasks = [("linear_logprob", "torch eager", size), ("linear_policy_loss", works.ours(CPU)[0], size), ("linear_logprob", "nobody", size)]
    eager, ours, nobody = (extra for *_, extra in memory.measure(tasks, CPU, threads=1))
    assert isinstance(eager, int)
    assert isinstance(ours, int)
    assert 1.9 * logits < eager < 5 * logits
    assert 0.9 * logits < ours < 6 * logits  # one chunk holds all 512 rows of so small a vocabulary
    assert "nobody" in str(nobody)
