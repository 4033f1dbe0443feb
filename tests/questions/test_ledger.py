"""The ledger: every question exactly once, whatever happens in between."""

import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.questions.ledger import Ledger


def test_an_epoch_hands_out_every_question_once_in_a_seeded_order() -> None:
    ledger = Ledger(100, seed=1)
    epochs = [[ledger.admit() for _ in range(100)] for _ in range(2)]
    for number, keys in enumerate(epochs):
        assert {epoch for epoch, _ in keys} == {number}
        assert sorted(index for _, index in keys) == list(range(100))
    orders = [[index for _, index in keys] for keys in epochs]
    assert orders[0] != orders[1] != list(range(100))
    again, other = Ledger(100, seed=1), Ledger(100, seed=2)
    assert [again.admit()[1] for _ in range(100)] == orders[0]
    assert [other.admit()[1] for _ in range(100)] != orders[0]


def test_requeued_questions_come_first_in_their_order() -> None:
    ledger = Ledger(10, seed=0)
    keys = [ledger.admit() for _ in range(4)]
    for key in (keys[2], keys[0]):
        ledger.requeue(key)
    assert [ledger.admit(), ledger.admit()] == [keys[0], keys[2]]
    assert ledger.admit() not in keys


def test_a_key_is_settled_once() -> None:
    ledger = Ledger(3, seed=0)
    key = ledger.admit()
    with pytest.raises(ValueError, match="a fate needs a name"):
        ledger.settle(key, "")
    ledger.settle(key, "trained")
    for again in (lambda: ledger.settle(key, "trained"), lambda: ledger.requeue(key), lambda: ledger.settle((7, 0), "trained")):
        with pytest.raises(ValueError, match="is not in flight"):
            again()
    assert ledger.counts == {"trained": 1}


def test_epochs_end() -> None:
    ledger = Ledger(2, seed=0, epochs=2)
    keys = [ledger.admit() for _ in range(4)]
    assert ledger.exhausted
    with pytest.raises(LookupError, match="all questions of 2 epochs"):
        ledger.admit()
    ledger.requeue(keys[1])
    assert ledger.admit() == keys[1]


@pytest.mark.parametrize(("size", "epochs"), [(0, None), (1, 0)])
def test_an_empty_ledger_is_refused(size: int, epochs: int | None) -> None:
    with pytest.raises(ValueError, match="expected at least 1"):
        Ledger(size, 0, epochs)


STEPS = st.lists(
    st.tuples(st.sampled_from(["admit", "admit", "train", "filter", "requeue", "save", "crash"]), st.integers(0, 99)), max_size=80
)


@given(st.integers(1, 7), st.integers(0, 3), STEPS)
@settings(max_examples=300, deadline=None)
def test_exactly_once_under_random_interleavings(size: int, seed: int, steps: list[tuple[str, int]]) -> None:
    """Against a model: sets of settled, open and requeued keys; a crash goes back to the last save."""
    ledger = Ledger(size, seed)
    settled: list[tuple[int, int]] = []
    flying: list[tuple[int, int]] = []
    waiting: set[tuple[int, int]] = set()
    saved, saved_model = ledger.state(), ([], set())

    def check() -> None:
        assert len(set(settled)) == len(settled)
        assert ledger.settled == len(settled)
        assert (ledger.in_flight, ledger.requeued) == (len(flying), len(waiting))
        assert ledger.admitted == len(settled) + len(flying) + len(waiting)

    for action, pick in steps:
        if action == "admit":
            key = ledger.admit()
            assert key in waiting if waiting else key not in settled + flying
            waiting.discard(key)
            flying.append(key)
        elif action == "save":
            saved, saved_model = json.loads(json.dumps(ledger.state())), (list(settled), waiting | set(flying))
        elif action == "crash":
            ledger = Ledger(size, seed)
            ledger.restore(saved)
            settled, waiting, flying = list(saved_model[0]), set(saved_model[1]), []
        elif flying:
            key = flying.pop(pick % len(flying))
            if action == "requeue":
                ledger.requeue(key)
                waiting.add(key)
            else:
                ledger.settle(key, "trained" if action == "train" else "no_variance")
                settled.append(key)
        check()

    while ledger.requeued or ledger.in_flight or ledger.admitted % size:
        if not flying:
            flying.append(ledger.admit())
        key = flying.pop()
        ledger.settle(key, "trained")
        settled.append(key)
    epochs = ledger.admitted // size
    assert sorted(settled) == [(epoch, index) for epoch in range(epochs) for index in range(size)]


def test_restored_and_uninterrupted_runs_go_on_alike() -> None:
    straight = Ledger(10, seed=3)
    for _ in range(17):
        straight.settle(straight.admit(), "trained")
    resumed = Ledger(10, seed=3)
    resumed.restore(json.loads(json.dumps(straight.state())))
    assert [resumed.admit() for _ in range(30)] == [straight.admit() for _ in range(30)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"size": 11}, "size = 11, this run has 10"),
        ({"seed": 4}, "seed = 4"),
        ({"version": None}, "version = None"),
        ({"cursor": "x"}, "cannot be read"),
        ({"open": [[0]]}, "cannot be read"),
        ({"open": None}, "cannot be read"),
        ({"counts": {"trained": 1}}, "handed out 3 questions but accounts for 1 settled and 1 open"),
        ({"cursor": 10}, "handed out"),
        ({"open": [[0, 3, 1]]}, "handed out"),
    ],
)
def test_a_foreign_state_is_refused(change: dict, message: str) -> None:
    ledger = Ledger(10, seed=3)
    keys = [ledger.admit() for _ in range(3)]
    for key in keys[:2]:
        ledger.settle(key, "trained")
    state = ledger.state()
    Ledger(10, seed=3).restore(state)
    with pytest.raises(ValueError, match=message):
        Ledger(10, seed=3).restore(state | change)


def test_a_million_questions_are_cheap() -> None:
    start = time.process_time()
    ledger = Ledger(1_000_000, seed=0)
    for _ in range(10_000):
        ledger.settle(ledger.admit(), "trained")
    flying = [ledger.admit() for _ in range(768)]
    state = json.dumps(ledger.state())
    ledger.restore(json.loads(state))
    assert ledger.requeued == len(flying)
    assert len(state) < 20_000
    assert time.process_time() - start < 2
