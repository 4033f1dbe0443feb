"""Shared-prompt attention equals attention of every row by itself."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.sampling.attention import SharedPrompts, Sharing, shared_attention
from headrace.sampling.key_values import GrowingLayer

WIDTH = 8


@given(
    owners=st.lists(st.integers(0, 3), min_size=1, max_size=9),
    lengths=st.lists(st.integers(1, 6), min_size=4, max_size=4),
    columns=st.integers(1, 5),
    groups=st.sampled_from([1, 2, 3]),
    dtype=st.sampled_from([torch.float64, torch.bfloat16]),
)
@settings(max_examples=60, deadline=None)
def test_it_is_each_rows_own_attention(owners: list[int], lengths: list[int], columns: int, groups: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    used = sorted(set(owners))  # every prompt owns a row
    owners = [used.index(owner) for owner in owners]
    lengths = [lengths[owner] for owner in used]
    rows, prompts, longest, heads = len(owners), len(used), max(lengths), 2
    query, key, value = draw(rows, heads * groups, 1, WIDTH), draw(rows, heads, columns, WIDTH), draw(rows, heads, columns, WIDTH)
    prompt_keys, prompt_values = draw(prompts, heads, longest, WIDTH), draw(prompts, heads, longest, WIDTH)
    mask = torch.zeros(prompts, heads, 1, longest)
    for number, length in enumerate(lengths):
        mask[number, ..., : longest - length] = -torch.inf
    mask = mask.flatten(0, 1)
    shared = SharedPrompts([(prompt_keys, prompt_values)], mask, Sharing.of(owners, prompts, torch.device("cpu")))
    output, _ = shared_attention(SimpleNamespace(layer_idx=0), query, key, value, None, prompts=shared)
    assert output.shape == (rows, 1, heads * groups, WIDTH)
    assert output.dtype == dtype
    for row, owner in enumerate(owners):
        keys = torch.cat((prompt_keys[owner, :, longest - lengths[owner] :], key[row]), dim=1)
        values = torch.cat((prompt_values[owner, :, longest - lengths[owner] :], value[row]), dim=1)
        for head in range(heads * groups):
            scores = keys[head // groups].double() @ query[row, head, 0].double() * WIDTH**-0.5
            expected = scores.softmax(0) @ values[head // groups].double()
            torch.testing.assert_close(output[row, 0, head].double(), expected, rtol=0, atol=1e-12 if dtype == torch.float64 else 3e-2)


def test_rows_in_prompt_order_are_not_moved() -> None:
    assert Sharing.of([0, 0, 1, 1], 2, torch.device("cpu")).row_of_slot is None
    ragged = Sharing.of([1, 0, 1], 2, torch.device("cpu"))
    assert (ragged.slots, ragged.row_of_slot.tolist(), ragged.slot_of_row.tolist()) == (2, [1, 0, 0, 2], [2, 0, 3])


def test_a_sliding_window_that_would_cut_is_refused() -> None:
    one = torch.zeros(1, 1, 4, WIDTH)
    shared = SharedPrompts([(one, one)], None, Sharing.of([0], 1, torch.device("cpu")))
    arguments = (SimpleNamespace(layer_idx=0), one[:, :, :1], one[:, :, :2], one[:, :, :2], None)
    shared_attention(*arguments, prompts=shared, sliding_window=6)
    with pytest.raises(ValueError, match="rows of 6 tokens exceed the model's sliding window of 5"):
        shared_attention(*arguments, prompts=shared, sliding_window=5)


def test_the_cache_grows_and_closes_gaps() -> None:
    prompt = torch.zeros(1, 2, 3, WIDTH)
    layer = GrowingLayer(prompt, prompt, rows=5, capacity=2)
    columns = [torch.randn(5, 2, 1, WIDTH) for _ in range(4)]
    for column in columns:
        keys, values = layer.update(column, -column)
    torch.testing.assert_close(keys, torch.cat(columns, dim=2))
    torch.testing.assert_close(values, -keys)
    layer.keep(torch.tensor([1]), torch.tensor([4]), 3)  # rows 1 and 3 leave, row 4 takes place 1
    order = [0, 4, 2]
    last = torch.randn(3, 2, 1, WIDTH)
    keys, _ = layer.update(last, last)
    torch.testing.assert_close(keys, torch.cat([*(column[order] for column in columns), last], dim=2))
    assert (layer.get_seq_length(), layer.get_max_length(), layer.get_mask_sizes(1)) == (5, -1, (6, 0))
