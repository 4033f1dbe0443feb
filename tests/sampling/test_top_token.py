"""The mask rule: span, spared tokens, cap and the mask's arithmetic through the kernels."""

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace.kernels import top_token_mask
from headrace.records import Prompt, Question, SampleRequest, SamplingParameters, TopTokenRule
from headrace.sampling.top_token import ReasoningSpans, spared_tokens


@dataclass
class Vocabulary:
    """Six tokens: a word, a digit, punctuation, the two tags, the end."""

    vocab_size: int = 6
    think_open: int | None = 3
    think_close: int | None = 4
    lexical: np.ndarray = field(default_factory=lambda: np.array([True, False, False, False, False, False]))


def request(prefilled: bool = True, mask: TopTokenRule | None = TopTokenRule()) -> SampleRequest:  # noqa: B008
    prompt = Prompt(Question(id="q", messages=(), answer=""), np.array([3, 4, 3]), prefilled)  # tags in the prompt's text never count
    return SampleRequest(prompt, 0, 0, SamplingParameters(max_tokens=64), mask)


def walk(spans: ReasoningSpans, tokens: list[int], above: list[bool], spared: list[bool]) -> list[int]:
    """Masked positions of row 0 when these tokens are drawn; `above`: p* exceeds the threshold; `spared`: the top token is spared."""
    row = np.array([0])
    masked = []
    for position, token in enumerate(tokens):
        fired = spans.eligible(row) & above[position] & (not spared[position])
        spans.advance(row, np.array([token]), fired, np.array([above[position]]))
        masked += [position] if fired[0] else []
    return masked


EXAMPLE = ["The", "dress", "is", "yellow", ",", "therefore", "A", "is", "</think>", "<answer>", "\\boxed", "{", "147", "}", "</answer>"]
EXAMPLE_PROBS = [0.5, 0.97, 0.99, 0.6, 0.96, 0.97, 0.98, 0.99, 0.999, 0.999, 0.999, 0.99, 0.97, 0.99, 0.99]


@pytest.mark.parametrize(
    ("prefilled", "token_filter", "expected"),
    [(True, "none", [1, 2, 4, 5, 6, 7]), (True, "lexical", [1, 2, 5, 6, 7]), (False, "none", [])],
)
def test_ex_4_5_positions(prefilled: bool, token_filter: str, expected: list[int]) -> None:
    words = list(dict.fromkeys(["<think>", *EXAMPLE, "other"]))
    lexical = np.array([any(c.isalpha() for c in word) and not word.startswith("<") for word in words])
    vocabulary = Vocabulary(len(words), words.index("<think>"), words.index("</think>"), lexical)
    spans = ReasoningSpans([request(prefilled)], vocabulary)
    spared = spared_tokens(vocabulary, token_filter)
    row, masked = np.array([0]), []
    for position, (word, prob) in enumerate(zip(EXAMPLE, EXAMPLE_PROBS, strict=True)):
        top = words.index(word)
        probs = torch.full((1, len(words)), (1 - prob) / (len(words) - 1), dtype=torch.float64)
        probs[0, top] = prob
        eligible = torch.from_numpy(spans.eligible(row) & ~spared[top])
        result = top_token_mask(probs.log(), eligible, 0.95)
        drawn = top if not result.fired[0] else words.index("other")
        spans.advance(row, np.array([drawn]), result.fired.numpy(), result.top_prob.numpy() > 0.95)
        masked += [position] if result.fired[0] else []
    assert masked == expected
    # Positions 0 to 8 are inside, the one that draws </think> included; seven of them are above 0.95.
    assert spans.examined[0] == (9 if prefilled else 0)
    assert spans.confident[0] == (7 if prefilled else 0)


def test_ex_4_2_mask() -> None:
    p = torch.tensor([[0.97, 0.014, 0.008, 0.005, 0.003]], dtype=torch.float64)
    logits = p.log()
    result = top_token_mask(logits, torch.tensor([True]), 0.95)
    q = logits.softmax(1)
    torch.testing.assert_close(q, torch.tensor([[0, 7 / 15, 4 / 15, 1 / 6, 0.1]], dtype=torch.float64))
    entropy = torch.distributions.Categorical
    assert entropy(p).entropy().item() == pytest.approx(0.171853, abs=1e-6)
    assert entropy(q[:, 1:]).entropy().item() == pytest.approx(1.237019, abs=1e-6)
    engine, policy = float(logits[0, 1] - result.masked_lse[0]), float(p[0, 1].log() - result.raw_lse[0])
    assert (engine, policy) == pytest.approx((-0.762140, -4.268698), abs=1e-6)
    assert np.exp(policy - engine) == pytest.approx(0.03)


def test_ex_4_4_masking_can_lower_entropy() -> None:
    p = torch.tensor([[0.96, 0.0399, 0.0001]], dtype=torch.float64)
    logits = p.log()
    top_token_mask(logits, torch.tensor([True]), 0.95)
    entropy = torch.distributions.Categorical
    assert entropy(p).entropy().item() == pytest.approx(0.168643, abs=1e-6)
    assert entropy(logits.softmax(1)[:, 1:]).entropy().item() == pytest.approx(0.017476, abs=1e-6)


@given(
    prefilled=st.booleans(),
    steps=st.lists(st.tuples(st.integers(0, 5), st.booleans(), st.integers(0, 5)), max_size=40),
    cap=st.integers(1, 5),
    token_filter=st.sampled_from(["none", "lexical"]),
)
def test_never_outside_the_span_never_on_a_tag_never_beyond_the_cap(
    prefilled: bool, steps: list[tuple[int, bool, int]], cap: int, token_filter: str
) -> None:
    vocabulary = Vocabulary()
    spared = spared_tokens(vocabulary, token_filter)
    spans = ReasoningSpans([request(prefilled, TopTokenRule(token_filter=token_filter, cap=cap))], vocabulary)
    tokens, above, tops = [s[0] for s in steps], [s[1] for s in steps], [s[2] for s in steps]
    masked = walk(spans, tokens, above, [bool(spared[top]) for top in tops])

    def inside(position: int) -> bool:
        tags = [token for token in ([3] if prefilled else []) + tokens[:position] if token in (3, 4)]
        return bool(tags) and tags[-1] == 3

    candidates = [
        i for i in range(len(tokens)) if inside(i) and above[i] and tops[i] not in (3, 4) and (token_filter == "none" or tops[i] == 0)
    ]
    assert masked == candidates[:cap]
    assert spans.cap_hit(0) == (len(candidates) >= cap)
    assert spans.examined[0] == sum(inside(i) for i in range(len(tokens)))
    assert spans.confident[0] == sum(inside(i) and above[i] for i in range(len(tokens)))


def test_a_free_row_is_counted_and_never_masked() -> None:
    spans = ReasoningSpans([request(mask=None)], Vocabulary())
    assert walk(spans, [0, 1, 4, 0], [True] * 4, [False] * 4) == []
    assert (spans.examined[0], spans.confident[0], spans.cap_hit(0)) == (3, 3, False)


def test_a_second_opening_tag_opens_the_span_again() -> None:
    spans = ReasoningSpans([request(prefilled=False)], Vocabulary())
    assert walk(spans, [0, 3, 0, 4, 0, 3, 0], [True] * 7, [False] * 7) == [2, 3, 6]


def test_rows_are_independent() -> None:
    spans = ReasoningSpans([request(), request(prefilled=False), request(mask=None)], Vocabulary())
    assert spans.eligible(np.array([2, 1, 0])).tolist() == [False, False, True]
    spans.advance(np.array([0, 2]), np.array([4, 0]), np.array([True, False]), np.array([True, True]))
    assert spans.masked.tolist() == [1, 0, 0]
    assert spans.inside.tolist() == [False, False, True]


def test_a_flag_outside_the_span_is_an_error() -> None:
    spans = ReasoningSpans([request(prefilled=False)], Vocabulary())
    with pytest.raises(AssertionError, match="outside a reasoning span"):
        spans.advance(np.array([0]), np.array([0]), np.array([True]), np.array([True]))


def test_a_tokenizer_without_tags_never_leaves_a_prefilled_span_and_never_enters_one() -> None:
    vocabulary = Vocabulary(think_open=None, think_close=None)
    spans = ReasoningSpans([request(), request(prefilled=False)], vocabulary)
    for _ in range(3):
        rows = np.array([0, 1])
        spans.advance(rows, np.array([3, 3]), spans.eligible(rows), np.array([True, True]))
    assert spans.masked.tolist() == [3, 0]
    assert not spared_tokens(vocabulary, "none").any()
