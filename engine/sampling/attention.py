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

    def gather(self, rows: Tensor) -> Tensor:
        """[B, Hkv, g, x] -> [prompts, Hkv, slots x g, x]."""
        if self.row_of_slot is not None:
            rows = rows.index_select(0, self.row_of_slot)
        return rows.unflatten(0, (self.prompts, self.slots)).transpose(1, 2).flatten(2, 3)

    def scatter(self, shared: Tensor) -> Tensor:
        """[prompts, Hkv, slots x g, x] -> [B, Hkv, g, x]."""
        rows = shared.unflatten(2, (self.slots, -1)).transpose(1, 2).flatten(0, 1)
        return rows if self.slot_of_row is None else rows.index_select(0, self.slot_of_row)


@dataclass(frozen=True)
class SharedPrompts:
    """Keys and values of the prompts of a batch, [U, Hkv, P, d] in each layer, shorter prompts padded."""

    layers: list[tuple[Tensor, Tensor]]
    mask: Tensor | None  # [U, 1, 1, P] fp32, −inf at padding; None if there is none
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
    batch, heads, _, width = query.shape
    scale = width**-0.5 if scaling is None else scaling
    rows = (query * scale).reshape(batch, key.shape[1], heads // key.shape[1], width)  # [B, Hkv, g, d]
    sharing = prompts.sharing
    prompt_scores = _product(sharing.gather(rows), prompt_keys.transpose(2, 3))
    if prompts.mask is not None:
        prompt_scores += prompts.mask
    scores = torch.cat((sharing.scatter(prompt_scores), _product(rows, key.transpose(2, 3))), dim=3)  # [B, Hkv, g, P + T]
    weights = scores.softmax(3).to(value.dtype)
    output = sharing.scatter(_product(sharing.gather(weights[..., :columns]), prompt_values)) + _product(weights[..., columns:], value)
    return output.to(query.dtype).reshape(batch, 1, heads, width), None


def _product(left: Tensor, right: Tensor) -> Tensor:
    """Batched matrix product, half precision accumulated and returned in fp32."""
    if left.dtype in (torch.float32, torch.float64):
        return left @ right
    if left.is_cuda:
        product = torch.bmm(left.flatten(0, 1), right.flatten(0, 1), out_dtype=torch.float32)
        return product.unflatten(0, left.shape[:2])
    return left.float() @ right.float()


AttentionInterface.register(NAME, shared_attention)
