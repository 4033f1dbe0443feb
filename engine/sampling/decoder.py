"""The model side of drawing: every distinct prompt is run once, then each row takes one token per step."""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from transformers import PreTrainedModel

from headrace.kernels.gemm import logits_of, statistics_dtype
from headrace.records import Prompt
from headrace.sampling.key_values import KeyValues, prefill_cache

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
            owners: [B] prompt of each row, ascending; every prompt owns a row.
            new_tokens: most tokens that will be fed to any row.
        """
        lengths = [len(prompt.token_ids) for prompt in prompts]
        self.decoder = policy.model.get_decoder()
        self.head = policy.head_weight
        self.device = self.head.device
        self.columns = max(lengths)
        owner = torch.tensor(owners, device=self.device)
        reserved = self.columns + min(new_tokens, RESERVED_TOKENS)
        self.cache: KeyValues | None = None
        hidden, following = [], []
        for first, stop in _passes(lengths):
            inputs = policy.prefill_inputs(prompts[first:stop])
            prefilled = prefill_cache()
            output = self.decoder(**inputs, past_key_values=prefilled, use_cache=True).last_hidden_state[0]  # [N, D]
            ends = torch.tensor(lengths[first:stop], device=self.device).cumsum(0)
            hidden.append(output[ends - 1])
            following += _next_positions(inputs["position_ids"], lengths[first:stop])
            row, last_row = bisect_left(owners, first), bisect_left(owners, stop)
            if self.cache is None:
                self.cache = KeyValues(prefilled, len(owners), reserved)
            self.cache.load(prefilled, row, self._columns_of(ends[owner[row:last_row] - first]))
        self.positions = torch.stack(following)[owner][:, None]  # [B, 1] of the next token
        self.hidden_columns = (
            self._hidden_columns(torch.tensor(lengths, device=self.device)[owner], reserved) if min(lengths) < self.columns else None
        )
        self.logits = self._logits(torch.cat(hidden)).index_select(0, owner)

    def step(self, tokens: Tensor) -> None:
        """Feed one token to every row.

        Args:
            tokens: [B] int64.
        """
        self.columns += 1
        output = self.decoder(
            input_ids=tokens[:, None],
            position_ids=self.positions,
            attention_mask=self._attention_mask(),
            past_key_values=self.cache,
            use_cache=True,
        )
        self.positions = self.positions + 1
        self.logits = self._logits(output.last_hidden_state[:, 0])

    def keep(self, rows: Sequence[int]) -> list[int]:
        """Go on with some of the rows; the last ones move into the places of those that leave, so that little is copied.

        Args:
            rows: ascending numbers of the rows to keep.

        Returns:
            the kept rows in their new order: row k is what row result[k] was.
        """
        staying, movers = (list(part) for part in (rows[: bisect_left(rows, len(rows))], rows[bisect_left(rows, len(rows)) :]))
        holes = sorted(set(range(len(rows))) - set(staying))
        order = list(range(len(rows)))
        for hole, mover in zip(holes, movers, strict=True):
            order[hole] = mover
        index = torch.tensor(order, device=self.device)
        assert self.cache is not None
        self.cache.keep(torch.tensor(holes, device=self.device), torch.tensor(movers, device=self.device), len(rows))
        self.positions = self.positions[index]
        if self.hidden_columns is not None:
            self.hidden_columns = self.hidden_columns[index]
        self.logits = self.logits[index]
        return order

    def _columns_of(self, ends: Tensor) -> Tensor:
        """[R, P] packed position behind each column of rows whose prompts end before `ends`; unused columns hold any."""
        return (ends[:, None] - self.columns + torch.arange(self.columns, device=self.device)).clamp_(min=0)

    def _hidden_columns(self, lengths: Tensor, reserved: int) -> Tensor:
        """[B, 1, 1, reserved] additive attention mask that hides the unused columns on the left."""
        unused = torch.arange(reserved, device=self.device) < (self.columns - lengths)[:, None]
        mask = torch.zeros(unused.shape, dtype=self.head.dtype, device=self.device).masked_fill_(unused, -torch.inf)
        return mask[:, None, None]

    def _attention_mask(self) -> Tensor | None:
        if self.hidden_columns is None:
            return None
        if self.columns > self.hidden_columns.shape[-1]:
            self.hidden_columns = F.pad(self.hidden_columns, (0, self.columns // 2))
        return self.hidden_columns[..., : self.columns]

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


def _next_positions(position_ids: Tensor, lengths: Sequence[int]) -> list[Tensor]:
    """Rotary position of the token after each packed prompt: one past the largest of any axis.

    Args:
        position_ids: [1, N], or [3, 1, N] for time, height and width, or [4, 1, N] with the text's own axis before those.
    """
    if position_ids.dim() == 3:
        position_ids = position_ids[-3:].amax(0)
    return [part.max() + 1 for part in position_ids[0].split(list(lengths))]
