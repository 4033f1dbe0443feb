"""The model side of drawing: every distinct prompt is run once, then each row takes one token per step."""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from headrace.kernels.gemm import logits_of, statistics_dtype
from headrace.records import Prompt
from headrace.sampling.attention import NAME as SHARED_ATTENTION
from headrace.sampling.attention import SharedPrompts, Sharing
from headrace.sampling.key_values import ResponseCache, prefill_cache

PREFILL_TOKENS = 16_384
"""Prompt tokens run in one pass; bounds the activations. A longer prompt gets a pass of its own."""
RESERVED_TOKENS = 512
"""Response columns allocated at first; longer responses make the buffers grow."""


class LocalPolicy(Protocol):
    """The weights to draw with. Implemented by ``policy.model.Policy``."""

    model: PreTrainedModel

    @property
    def head_weight(self) -> Tensor:
        """[V, D] rows of the head."""
        ...

    def prefill_inputs(self, prompts: Sequence[Prompt]) -> dict[str, Any]:
        """What the text model takes for packed prompts, beside the cache: ids or embeddings, positions, boundaries, pictures."""
        ...


class RowDecoder:
    """B rows, each a prompt followed by the tokens it is fed.

    `logits` [B, V] are those of the next position, in fp32 (float64 for a float64 model), fresh memory after every step.
    """

    def __init__(self, policy: LocalPolicy, prompts: Sequence[Prompt], owners: Sequence[int], new_tokens: int) -> None:
        """Run the prompts.

        Args:
            prompts: distinct prompts.
            owners: [B] prompt of each row; every prompt owns a row.
            new_tokens: most tokens that will be fed to any row.
        """
        self.decoder = policy.model.get_decoder()
        self.head = policy.head_weight
        self.device = self.head.device
        self.owners = list(owners)
        lengths = [len(prompt.token_ids) for prompt in prompts]
        longest = max(lengths)
        hidden, following, parts = [], [], []
        for first, stop in _passes(lengths):
            inputs = policy.prefill_inputs(prompts[first:stop])
            cache = prefill_cache()
            output = self.decoder(**inputs, past_key_values=cache, use_cache=True).last_hidden_state[0]  # [N, D]
            ends = torch.tensor(lengths[first:stop], device=self.device).cumsum(0)
            hidden.append(output[ends - 1])
            following += _next_positions(inputs["position_ids"], lengths[first:stop])
            columns = torch.arange(longest, device=self.device) + (ends - longest)[:, None]
            parts.append([(_padded(layer.keys, columns), _padded(layer.values, columns)) for layer in cache.layers])
        layers = [tuple(torch.cat(sides) for sides in zip(*layer, strict=True)) for layer in zip(*parts, strict=True)]
        mask = _padding_mask(lengths, layers[0][0].shape[1], self.device)
        self.prompts = SharedPrompts(layers, mask, Sharing.of(owners, len(prompts), self.device))
        self.cache = ResponseCache(layers, len(owners), min(new_tokens, RESERVED_TOKENS))
        owner = torch.tensor(owners, device=self.device)
        self.positions = torch.stack(following)[owner][:, None]  # [B, 1] of the next token
        self.logits = self._logits(torch.cat(hidden)).index_select(0, owner)

    def step(self, tokens: Tensor) -> None:
        """Feed one token to every row.

        Args:
            tokens: [B] int64.
        """
        config = self.decoder.config
        attention = config._attn_implementation
        config._attn_implementation = SHARED_ATTENTION
        try:
            output = self.decoder(
                input_ids=tokens[:, None], position_ids=self.positions, past_key_values=self.cache, use_cache=True, prompts=self.prompts
            )
        finally:
            config._attn_implementation = attention
        self.positions = self.positions + 1
        self.logits = self._logits(output.last_hidden_state[:, 0])

    def keep(self, rows: Sequence[int]) -> list[int]:
        """Go on with some of the rows; the last ones move into the places of those that leave, so that little is copied.

        Args:
            rows: ascending numbers of the rows to keep.

        Returns:
            the kept rows in their new order: row k is what row result[k] was.
        """
        staying = bisect_left(rows, len(rows))
        movers = list(rows[staying:])
        holes = sorted(set(range(len(rows))) - set(rows[:staying]))
        order = list(range(len(rows)))
        for hole, mover in zip(holes, movers, strict=True):
            order[hole] = mover
        index = torch.tensor(order, device=self.device)
        self.cache.keep(torch.tensor(holes, device=self.device), torch.tensor(movers, device=self.device), len(rows))
        self.owners = [self.owners[row] for row in order]
        self._keep_prompts()
        self.positions = self.positions[index]
        self.logits = self.logits[index]
        return order

    def _keep_prompts(self) -> None:
        """Forget prompts that no row needs."""
        layers, mask, count = self.prompts.layers, self.prompts.mask, self.prompts.sharing.prompts
        needed = sorted(set(self.owners))
        if len(needed) < count:
            index = torch.tensor(needed, device=self.device)
            layers = [(keys.index_select(0, index), values.index_select(0, index)) for keys, values in layers]
            mask = None if mask is None else mask.unflatten(0, (count, -1)).index_select(0, index).flatten(0, 1)
            self.owners = [bisect_left(needed, owner) for owner in self.owners]
        self.prompts = SharedPrompts(layers, mask, Sharing.of(self.owners, len(needed), self.device))

    def _logits(self, hidden: Tensor) -> Tensor:
        """[B, D] -> [B, V]."""
        out = torch.empty(len(hidden), len(self.head), dtype=statistics_dtype(hidden.dtype), device=self.device)
        return logits_of(hidden, self.head, out)


def _passes(lengths: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Cut prompts into runs of at most `PREFILL_TOKENS`, each at least one prompt."""
    first, total = 0, 0
    for number, length in enumerate(lengths):
        if number > first and total + length > PREFILL_TOKENS:
            yield first, number
            first, total = number, 0
        total += length
    yield first, len(lengths)


def _padded(packed: Tensor, columns: Tensor) -> Tensor:
    """[1, Hkv, N, d] -> [U, Hkv, P, d]: prompts aligned on the right; what lies left of a prompt is its neighbour or its first column.

    Args:
        columns: [U, P] packed position of each column, negative or a neighbour's in the padding.
    """
    picked = packed[0].index_select(1, columns.clamp(min=0).flatten()).unflatten(1, columns.shape)
    return picked.transpose(0, 1).contiguous()


def _padding_mask(lengths: Sequence[int], heads: int, device: torch.device) -> Tensor | None:
    """[U x heads, 1, P] additive mask that hides the columns left of each prompt."""
    longest = max(lengths)
    if min(lengths) == longest:
        return None
    padding = torch.arange(longest, device=device) < longest - torch.tensor(lengths, device=device)[:, None]
    return torch.zeros(padding.shape, device=device).masked_fill_(padding, -torch.inf).repeat_interleave(heads, 0)[:, None]


def _next_positions(position_ids: Tensor, lengths: Sequence[int]) -> list[Tensor]:
    """Rotary position of the token after each packed prompt: one past the largest of any axis.

    Args:
        position_ids: [1, N], or [3, 1, N] for time, height and width, or [4, 1, N] with the text's own axis before those.
    """
    if position_ids.dim() == 3:
        position_ids = position_ids[-3:].amax(0)
    return [part.max() + 1 for part in position_ids[0].split(list(lengths))]
