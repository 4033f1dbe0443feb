"""The top-token mask on vLLM's second runner interface (GPUs): state per slot on the device, no wait for the device anywhere."""

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from headrace.records import Array
from headrace.sampling.vllm.mask import ROW, MaskStep, Rows, new_row, upload

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.config import VllmConfig
    from vllm.v1.worker.gpu.sample.logits_processor import LogitsContext, LogitsProcRequestState


class SlotRunner:
    """State of the request slots. A step's rows are slots in any order; tokens are only on the device."""

    def __init__(self, vllm_config: "VllmConfig", states: "LogitsProcRequestState") -> None:
        from vllm.v1.worker.gpu.buffer_utils import UvaBackedTensor  # the processor's module is imported without a GPU, too

        count = states.max_num_reqs
        self.step = MaskStep(vllm_config, states.device, count)
        settings = self.step.settings
        # No token has id -1, so that a tokenizer without tags opens and closes nothing.
        self._open = -1 if settings.think_open is None else settings.think_open
        self._close = -1 if settings.think_close is None else settings.think_close
        self._states = states
        self._matrix = UvaBackedTensor((count, len(ROW)), dtype=torch.int32)
        self._table: Array = self._matrix.np.view(ROW)[:, 0]
        self._changed = False
        self._unread = np.zeros(count, dtype=bool)  # slots whose tokens must be read from their history
        self._inside = torch.zeros(count, dtype=torch.bool, device=states.device)

    def add_request(self, slot: int, params: "SamplingParams") -> bool:
        """A request takes a slot, for the first time or after a preemption; whatever the slot held is gone."""
        resumed = bool(self._states.prefill_len.np[slot] > self._states.prompt_len.np[slot])
        self._table[slot]["ticket"] = 0
        # vLLM names no request here; a seed is one rollout's own. Without it a resumed request counts anew.
        ticket = self.step.tickets.take(object() if params.seed is None else params.seed, resumed, self._table["ticket"])
        self._table[slot] = new_row(params, ticket)
        self._unread[slot] = self._changed = True
        return True

    def apply_staged_writes(self) -> None:
        """Publish the rows of new requests."""
        if self._changed:
            self._matrix.copy_to_uva()
            self._changed = False

    def apply(self, logits: Tensor, context: "LogitsContext") -> Tensor:
        """Mask the step's rows, [B, V] fp32, in place."""
        slots_np, slots = context.idx_mapping_np, context.expanded_idx_mapping.long()
        rows = Rows.of(self._table[slots_np], self._matrix.gpu[slots])
        positions = (context.pos + 1 - self._states.prompt_len.gpu[slots]).long()
        final_np = context.seq_lens_upper_bound_np >= self._states.prefill_len.np[slots_np]
        final = None if final_np.all() else upload(final_np, slots.device)
        inside = self._follow(context, rows, slots, positions)
        self._inside[slots] = inside
        self.step.apply(logits, rows, inside, positions, final)
        self._unread[slots_np[final_np]] = False
        return logits

    def _follow(self, context: "LogitsContext", rows: Rows, slots: Tensor, positions: Tensor) -> Tensor:
        """[B] bool: the position to draw lies in the reasoning span."""
        token = context.input_ids
        inside = (self._inside[slots] & (token != self._close)) | (token == self._open)
        unread_np = np.flatnonzero(self._unread[context.idx_mapping_np])
        if not len(unread_np):
            return inside
        unread = upload(unread_np, slots.device)
        slot, count = slots[unread], positions[unread]  # tokens drawn so far, below 1 within the prompt
        state = rows.prefilled[unread]
        lengths = context.seq_lens_upper_bound_np[unread_np]
        drawn = int((lengths - self._states.prompt_len.np[context.idx_mapping_np[unread_np]]).max())
        if drawn > 0:  # resumed after a preemption: the last tag among what it had drawn
            place = torch.arange(drawn, device=slots.device)
            at = (self._states.prompt_len.gpu[slot].long()[:, None] + place).clamp_(max=self._states.all_token_ids.gpu.shape[1] - 1)
            history = self._states.all_token_ids.gpu[slot[:, None], at].masked_fill_(place >= count[:, None], -2)
            opened, closed = (torch.where(history == tag, place, -1).amax(1) for tag in (self._open, self._close))
            state = torch.where(opened == closed, state, opened > closed)  # equal: neither occurs
        return inside.index_copy_(0, unread, state)
