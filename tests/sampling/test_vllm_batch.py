"""The first runner's interface, driven as vLLM drives it: requests that come, go, move, wait, and are computed twice."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from headrace.sampling.vllm.channel import Channel, decode, write_settings
from headrace.sampling.vllm.mask import Tickets
from headrace.sampling.vllm.runner_v1 import BatchRunner
from tests.sampling.tiny_policy import Tiny

SIZE = 64
SURE, UNSURE = 0.98, 0.6


class Batch:
    """vLLM's side of the interface, without vLLM."""

    def __init__(self, tiny: Tiny, folder: Path, rows: int = 4) -> None:
        path = folder / "settings.json"
        write_settings(tiny.encoder, path)
        config: Any = SimpleNamespace(
            model_config=SimpleNamespace(logprobs_mode="processed_logprobs", get_vocab_size=lambda: SIZE),
            speculative_config=None,
            additional_config={"headrace": str(path)},
            scheduler_config=SimpleNamespace(max_num_seqs=rows),
        )
        self.runner = BatchRunner(config, torch.device("cpu"))
        self.rows = list(self.runner.step.settings.spare_rows)
        self.banned = self.runner.step.settings.banned

    def update(
        self, added: Sequence[tuple[int, Any, list[int]]] = (), removed: Sequence[int] = (), moved: Sequence[tuple[int, int]] = ()
    ) -> None:
        update: Any = SimpleNamespace(
            batch_size=len(self.runner._outputs),
            removed=removed,
            added=[(row, params, [1, 2], output) for row, params, output in added],
            moved=[(*move, None) for move in moved],
        )
        self.runner.update_state(update)

    def step(self, tops: Sequence[int], probs: Sequence[float]) -> Channel:
        """One step in which the most likely token of each row is ``tops`` with probability ``probs``."""
        logits = torch.full((len(tops), SIZE), 0.0)
        logits[:, self.banned] = 50.0
        others = SIZE - len(self.banned) - 1
        for row, (top, prob) in enumerate(zip(tops, probs, strict=True)):
            logits[row, top] = float(np.log(prob / (1 - prob) * others))
        self.runner.apply(logits)
        assert (logits[:, [index for index in self.banned if index not in self.rows]] == -torch.inf).all()
        returned = logits.log_softmax(-1)[:, self.rows].numpy()
        channel = decode(returned[:, 0], returned[:, 1])
        assert (channel.top_ids == tops).all()
        assert (torch.isinf(logits[torch.arange(len(tops)), torch.tensor(tops)]).numpy() == channel.masked).all()
        return channel


def asking(**arguments: Any) -> Any:
    return SimpleNamespace(
        temperature=1.0, seed=None, extra_args={"headrace": {"threshold": 0.95, "mask": True, "inside": True} | arguments}
    )


@pytest.fixture
def batch(tiny: Tiny, tmp_path: Path) -> Batch:
    return Batch(tiny, tmp_path)


def test_ex_4_5_positions(tiny: Tiny, tmp_path: Path) -> None:
    """EX-4.5: masked at 1,2,4,5,6,7 without filter, 1,2,5,6,7 with the lexical one, nowhere without pre-fill; one batch draws all three."""
    batch = Batch(tiny, tmp_path)
    words = {
        name: number for number, name in enumerate(["The", "dress", "is", "yellow", "therefore", "A", "boxed"])
    }  # a-g, all with letters
    digits = tiny.encoder.tokenizer.convert_tokens_to_ids(["1", "4", "7", ",", ";", "?", "="])
    ids = {**words, "1": digits[0], ",": digits[3], "{": digits[4], "147": digits[0], "}": digits[5]}
    ids |= {tag: tiny.encoder.tokenizer.convert_tokens_to_ids(tag) for tag in ("<think>", "</think>", "<answer>", "</answer>")}
    text = ["The", "dress", "is", "yellow", ",", "therefore", "A", "is", "</think>", "<answer>", "boxed", "{", "147", "}", "</answer>"]
    probs = [0.5, 0.97, 0.99, 0.6, 0.96, 0.97, 0.98, 0.99, 0.999, 0.999, 0.999, 0.99, 0.97, 0.99, 0.99]
    outputs: list[list[int]] = [[], [], []]
    kinds = [asking(), asking(filter="lexical"), asking(inside=False)]
    batch.update([(row, kind, outputs[row]) for row, kind in enumerate(kinds)])
    masked = []
    for word, prob in zip(text, probs, strict=True):
        masked.append(batch.step([ids[word]] * 3, [prob] * 3).masked)
        for output in outputs:
            output.append(ids[word])  # at a masked position something else would be drawn; the tags decide
    columns = np.array(masked).T
    assert [np.flatnonzero(column).tolist() for column in columns] == [[1, 2, 4, 5, 6, 7], [1, 2, 5, 6, 7], []]


def test_the_cap_counts_a_position_once_however_often_it_is_computed(batch: Batch) -> None:
    """Chunks of a prefill compute response position 0 again and again; a token lost by a preemption is drawn again."""
    output: list[int] = []
    batch.update([(0, asking(cap=2), output)])
    for _ in range(5):
        assert batch.step([3], [SURE]).masked[0]
    output.append(4)
    assert batch.step([3], [SURE]).masked[0]
    assert batch.step([3], [SURE]).masked[0]
    output.append(4)
    assert not batch.step([3], [SURE]).masked[0]


def test_a_preempted_request_keeps_its_count_and_its_span(batch: Batch, tiny: Tiny) -> None:
    """Meanwhile another request takes the row; the old one returns in another row with another list."""
    first = asking(cap=2)
    output: list[int] = []
    batch.update([(0, first, output)])
    assert batch.step([3], [SURE]).masked[0]
    output.append(5)
    stranger: list[int] = []
    batch.update([(0, asking(), stranger)], removed=[])
    assert batch.step([3], [SURE]).masked[0]
    stranger.append(5)
    batch.update([(1, first, list(output))])
    channel = batch.step([3, 3], [SURE, SURE])
    assert channel.masked.all()
    stranger.append(5)
    batch.update([(1, first, [5, 6])], removed=[1])
    channel = batch.step([3, 3], [SURE, SURE])
    assert channel.masked.tolist() == [True, False]  # the stranger's cap is large, the first has masked twice
    assert channel.inside.all()
    batch.update([(1, first, [5, 6, tiny.encoder.think_close])], removed=[1])
    assert batch.step([3, 3], [SURE, SURE]).inside.tolist() == [True, False]


def test_rows_move_with_their_state(batch: Batch, tiny: Tiny) -> None:
    opened, closed = tiny.encoder.think_open, tiny.encoder.think_close
    assert opened is not None
    assert closed is not None
    outputs: list[list[int]] = [[], [], []]
    batch.update([(row, asking(inside=row == 0, cap=1 + row), output) for row, output in enumerate(outputs)])
    assert batch.step([3, 3, 3], [SURE] * 3).masked.tolist() == [True, False, False]
    for output, token in zip(outputs, (5, opened, 5), strict=True):
        output.append(token)
    batch.update(moved=[(0, 1)])
    channel = batch.step([3, 3, 3], [SURE] * 3)
    assert channel.inside.tolist() == [True, True, False]
    assert channel.masked.tolist() == [True, False, False]  # row 1 is the first request now: its cap is spent
    for output, token in zip(outputs, (closed, 5, opened), strict=True):
        output.append(token)
    batch.update(removed=[0], moved=[(2, 0)])
    channel = batch.step([3, 3], [SURE] * 2)
    assert channel.inside.tolist() == [True, False]
    assert channel.masked.tolist() == [True, False]


def test_a_request_from_elsewhere_loses_only_the_banned_ids(batch: Batch) -> None:
    batch.update([(0, SimpleNamespace(temperature=0.0, seed=None, extra_args=None), [])])
    logits = torch.zeros(1, SIZE)
    logits[0, 3] = 20.0
    batch.runner.apply(logits)
    assert (logits[0, batch.banned] == -torch.inf).all()
    assert logits[0, 3] == 20.0


def test_placeholders_are_an_error(batch: Batch) -> None:
    """A processor that vLLM loads as a plugin sees -1 instead of tokens; a span built on them would be wrong."""
    batch.update([(0, asking(), [-1])])
    with pytest.raises(RuntimeError, match="--logits-processors"):
        batch.step([3], [UNSURE])


def test_tickets_of_running_requests_are_never_given_away() -> None:
    tickets = Tickets(5)
    running = [tickets.take(key, False, []) for key in "ab"]
    seen = [tickets.take(number, False, running) for number in range(50)]
    assert not set(seen) & {0, *running}
    assert [tickets.take(key, True, running) for key in "ab"] == running
    again = tickets.take("a", False, running)
    assert again not in running
    assert tickets.take("a", True, running) == again
