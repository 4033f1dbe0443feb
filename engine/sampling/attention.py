"""Attention of a decoding step in which the rows of one prompt read its keys and values together.

A decoding step is bound by reading keys and values. A group's rollouts share their prompt, so its part is kept once per prompt and
read once per step, by all its rows in one product; each row adds the columns of its own response. All rows are at one response
position, so no mask is needed but for prompts of different length.

The scaled dot-product attention of torch takes one query row per sequence at a time on a CPU, at two to three times the cost of the
products below. In half precision scores and softmax are fp32, like a fused kernel's.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

NAME = "headrace_shared_prompts"


@dataclass(frozen=True)
class Sharing:
    """Which rows share which prompt.

    Products with prompts see `slots` rows per prompt; prompts with fewer rows have idle slots.
    """

    prompts: int
    slots: int
    row_of_slot: Tensor | None  # [prompts x slots] int64, any row in an idle slot; None if row k sits in slot k
    slot_of_row: Tensor | None  # [B] int64

    @classmethod
    def of(cls, owners: Sequence[int], prompts: int, device: torch.device) -> "Sharing":
        """From the prompt of each row."""
        rows: list[list[int]] = [[] for _ in range(prompts)]
        for row, owner in enumerate(owners):
            rows[owner].append(row)
        slots = max(map(len, rows))
        row_of_slot = [row for members in rows for row in [*members, *[0] * (slots - len(members))]]
        if row_of_slot == list(range(len(owners))):
            return cls(prompts, slots, None, None)
        slot_of_row = [0] * len(owners)
        for owner, members in enumerate(rows):
            for place, row in enumerate(members):
                slot_of_row[row] = owner * slots + place
        return cls(prompts, slots, torch.tensor(row_of_slot, device=device), torch.tensor(slot_of_row, device=device))

    def gather(self, rows: Tensor, heads: int) -> Tensor:
        """[B x heads, g, x] -> [prompts x heads, slots x g, x]."""
        g, x = rows.shape[1:]
        if self.row_of_slot is not None:
            rows = rows.view(-1, heads, g, x).index_select(0, self.row_of_slot)
        return rows.view(self.prompts, self.slots, heads, g, x).transpose(1, 2).reshape(-1, self.slots * g, x)

    def scatter(self, shared: Tensor, heads: int) -> Tensor:
        """[prompts x heads, slots x g, x] -> [B x heads, g, x]."""
        g, x = shared.shape[1] // self.slots, shared.shape[2]
        rows = shared.view(self.prompts, heads, self.slots, g, x).transpose(1, 2)
        if self.slot_of_row is not None:
            rows = rows.reshape(-1, heads, g, x).index_select(0, self.slot_of_row)
        return rows.reshape(-1, g, x)


@dataclass(frozen=True)
class SharedPrompts:
    """Keys and values of the prompts of a batch, [U, Hkv, P, d] in each layer, shorter prompts padded."""

    layers: list[tuple[Tensor, Tensor]]
    mask: Tensor | None  # [U x Hkv, 1, P] fp32, −inf at padding; None if there is none
    sharing: Sharing


def shared_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    prompts: SharedPrompts,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """The function transformers calls in every layer of a decoding step.

    Args:
        query: [B, H, 1, d].
        key, value: [B, Hkv, T, d] of the responses so far, this token included.
        prompts: passed through the model's call.

    Returns:
        [B, 1, H, d] and no attention weights.
    """
    prompt_keys, prompt_values = prompts.layers[module.layer_idx]  # type: ignore[index]
    columns = prompt_keys.shape[2]
    if sliding_window is not None and columns + key.shape[2] > sliding_window:
        raise ValueError(
            f"rows of {columns + key.shape[2]} tokens exceed the model's sliding window of {sliding_window}, which is not supported"
        )
    batch, heads, width = query.shape[0], key.shape[1], query.shape[3]
    scale = width**-0.5 if scaling is None else scaling
    rows = (query * scale).reshape(batch * heads, -1, width)  # [B x Hkv, g, d]
    sharing = prompts.sharing
    prompt_scores = _product(sharing.gather(rows, heads), prompt_keys.flatten(0, 1).transpose(1, 2))
    if prompts.mask is not None:
        prompt_scores += prompts.mask
    scores = torch.cat((sharing.scatter(prompt_scores, heads), _product(rows, key.flatten(0, 1).transpose(1, 2))), dim=2)
    weights = scores.softmax(2).to(value.dtype)  # [B x Hkv, g, P + T]
    prompt_output = _product(sharing.gather(weights[:, :, :columns], heads), prompt_values.flatten(0, 1))
    output = sharing.scatter(prompt_output, heads) + _product(weights[:, :, columns:], value.flatten(0, 1))
    return output.to(query.dtype).view(batch, 1, -1, width), None


def _product(left: Tensor, right: Tensor) -> Tensor:
    """Batched matrix product, half precision accumulated and returned in fp32."""
    if left.dtype in (torch.float32, torch.float64):
        return torch.bmm(left, right)
    if left.is_cuda:
        return torch.bmm(left, right, out_dtype=torch.float32)
    return torch.bmm(left.float(), right.float())


AttentionInterface.register(NAME, shared_attention)
