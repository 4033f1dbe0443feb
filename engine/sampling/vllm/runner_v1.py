"""The top-token mask on vLLM's first runner interface: rows follow the persistent batch, tokens are read on the host."""

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from headrace.records import Array
from headrace.sampling.vllm.mask import ROW, MaskStep, Rows, new_row, upload

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.sample.logits_processor import BatchUpdate


class BatchRunner:
    """State of the rows of the batch. vLLM tells which come, go and move before a step, and shares their growing output lists."""

    def __init__(self, vllm_config: "VllmConfig", device: torch.device) -> None:
        count = vllm_config.scheduler_config.max_num_seqs
        self.step = MaskStep(vllm_config, device, count)
        self._open, self._close = self.step.settings.think_open, self.step.settings.think_close
        self._table = np.zeros(count, dtype=ROW)
        self._outputs: list[list[int]] = [[] for _ in range(count)]  # vLLM's own lists
        self._seen = np.zeros(count, dtype=np.int64)  # how much of each output `_inside` knows
        self._inside = np.zeros(count, dtype=bool)
        self._rows: Rows | None = None  # of the present batch, on the device

    def update_state(self, update: "BatchUpdate | None") -> None:
        """Follow the batch. Outputs may still end in placeholders here: tokens are read in `apply`."""
        if update is None:
            return
        self._rows = None
        for row in (*update.removed, *(row for row, *_ in update.added)):
            self._table[row]["ticket"] = 0
        for row, params, _, outputs in update.added:
            # One object per request for as long as it lives, also while it is preempted. Only children of a request without a seed share
            # it, and only in the frontend's own process: a preempted child with a small cap may then go on with its sibling's count.
            ticket = self.step.tickets.take(id(params), bool(outputs), self._table["ticket"])
            if (self._table["ticket"] == ticket).any():
                ticket = self.step.tickets.take(id(params), False, self._table["ticket"])
            self._table[row] = new_row(params, ticket)
            self._outputs[row], self._seen[row], self._inside[row] = outputs, 0, self._table[row]["prefilled"]
        for source, target, _ in update.moved:
            self._swap(source, target)  # where only one moves, the other place was vacated before
        self._table["ticket"][update.batch_size :] = 0

    def apply(self, logits: Tensor) -> Tensor:
        """Mask the batch, [B, V] fp32, in place."""
        count = len(logits)
        lengths = self._read_tokens(count)
        if self._rows is None or len(self._rows.ticket) != count:
            table = self._table[:count].copy()
            self._rows = Rows.of(table, upload(table.view(np.int32).reshape(count, len(ROW)), logits.device))
        inside = upload(self._inside[:count].copy(), logits.device)
        self.step.apply(logits, self._rows, inside, upload(lengths, logits.device))
        return logits

    def _read_tokens(self, count: int) -> Array:
        """Move every row past its new tokens; returns the lengths of the outputs, [B]."""
        outputs = self._outputs[:count]
        lengths = np.fromiter(map(len, outputs), np.int64, count)
        grown = lengths - self._seen[:count]
        tokens = np.fromiter((output[-1] if output else 0 for output in outputs), np.int64, count)
        step, inside = grown == 1, self._inside[:count]
        # Where nothing was drawn since (a chunk of a prefill) the state stays; where output came or went otherwise it is read anew.
        inside[step] = (inside[step] & (tokens[step] != self._close)) | (tokens[step] == self._open)
        for row in np.flatnonzero((grown != 0) & ~step):
            inside[row] = self._scan(outputs[row], bool(self._table[row]["prefilled"]))
        if (tokens < 0).any():
            raise RuntimeError("vLLM shows placeholders instead of tokens: pass the processor by --logits-processors, not as a plugin")
        self._seen[:count] = lengths
        return lengths

    def _scan(self, output: list[int], inside: bool) -> bool:
        for token in reversed(output):
            if token in (self._open, self._close):
                return token == self._open
        return inside

    def _swap(self, first: int, second: int) -> None:
        for column in (self._table, self._seen, self._inside):
            column[[first, second]] = column[[second, first]]
        self._outputs[first], self._outputs[second] = self._outputs[second], self._outputs[first]
