"""A language-model head that is never held whole: chunks of logits, scored and differentiated while they are there.

Where gradients are wanted the chunk is a block of tokens, since a gradient needs the whole row's statistics. Where they are
not, a CPU tiles the vocabulary instead: the tile stays in cache and the logits never reach memory.
"""

from bisect import bisect_left
from collections.abc import Iterator
from types import ModuleType

import torch
import torch.distributed as dist
from torch import Tensor

from headrace.kernels import gemm
from headrace.kernels.inputs import Banned, banned_ids
from headrace.kernels.labels import check_found
from headrace.kernels.rows import TARGET, compacting_rows, merge_states

CPU_CHUNK_ELEMENTS = 4 << 20
CPU_CHUNK_ROWS = (512, 16384)
"""Token chunks on a CPU: small vocabularies get more rows for fewer calls; 512 rows keep a GEMM at 1.1 × its full speed."""

GPU_CHUNK_ROWS = (4096, 8192)
"""Below and from 100 GB of device memory: 2.5 or 5 GB of fp32 logits at 151,936 tokens."""

TILE_ELEMENTS = 1 << 20
TILE_COLUMNS = (256, 8192)
"""Vocabulary tiles on a CPU: about 4 MB of logits are read back from cache, and are work enough that threads seldom wait for
each other."""

TILE_ROWS = 1024
"""Tokens scored together by vocabulary tiles; more would push the tile out of cache."""

KEPT_BYTES = 512 << 20
"""Scratch memory of at most this size is kept for the next call: a CPU pays for touching fresh pages."""

_kept: dict[torch.dtype, Tensor] = {}


class Head:
    """One weight with all that a call fixes about it: banned ids, chunk size, row operations, and its part of the vocabulary."""

    def __init__(
        self,
        weight: Tensor,
        rows: ModuleType,
        *,
        banned: Banned = None,
        chunk: int | None = None,
        group: "dist.ProcessGroup | None" = None,
        offset: int | None = None,
    ):
        self.weight = weight.detach()
        self.rows = rows
        self.group = group
        self.vocabulary = len(weight)
        if offset is None:
            offset = 0 if group is None else dist.get_rank(group) * self.vocabulary
        self.offset = offset
        self.banned = banned_ids(banned, self.vocabulary, weight.device, offset)
        self.banned_list = [] if self.banned is None or weight.device.type != "cpu" else self.banned.tolist()
        self.dtype = gemm.statistics_dtype(weight.dtype)
        self.chunk = default_chunk(self.vocabulary, weight.device) if chunk is None else chunk
        self.scratch: Tensor | None = None

    def score(self, hidden: Tensor, targets: Tensor, inv_temperature: Tensor) -> Tensor:
        """Complete statistics [N, 4] of rows that need no gradient."""
        parts = [
            self.score_tiles(hidden[block], targets[block], inv_temperature[block])
            if self.weight.device.type == "cpu"
            else self.rows.statistics(self.logits(hidden[block]), targets[block], inv_temperature[block], None, self.offset)
            for block in blocks(len(hidden), self.scoring_rows)
        ]
        if not parts:
            return torch.empty(0, 4, dtype=self.dtype, device=hidden.device)
        return self.complete(torch.cat(parts) if len(parts) > 1 else parts[0])

    @property
    def scoring_rows(self) -> int:
        return TILE_ROWS if self.weight.device.type == "cpu" else self.chunk

    def score_tiles(self, hidden: Tensor, targets: Tensor, inv_temperature: Tensor) -> Tensor:
        state: Tensor | None = None
        for start, tile in self.tiles(hidden):
            state = self.rows.statistics(tile, targets, inv_temperature, state, self.offset + start)
        assert state is not None, "a head has columns"
        return state

    def tiles(self, hidden: Tensor) -> Iterator[tuple[int, Tensor]]:
        """First column and logits [N, C] of each vocabulary tile; a tile lives until the next one."""
        columns = tile_columns(len(hidden), self.vocabulary)
        storage = self.buffer(len(hidden) * columns)
        wide = hidden.to(self.dtype)
        for start in range(0, self.vocabulary, columns):
            part = self.weight[start : start + columns].to(self.dtype)
            tile = storage[: len(hidden) * len(part)].view(len(hidden), len(part))
            torch.mm(wide, part.t(), out=tile)
            low, high = (bisect_left(self.banned_list, edge) for edge in (start, start + len(part)))
            if low < high:
                tile.index_fill_(1, self.banned[low:high] - start, -torch.inf)
            yield start, tile

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [N, V] of one token chunk in a reused buffer."""
        storage = self.buffer(len(hidden) * self.vocabulary)
        out = gemm.logits_of(hidden, self.weight, storage[: len(hidden) * self.vocabulary].view(len(hidden), self.vocabulary))
        return out if self.banned is None else out.index_fill_(1, self.banned, -torch.inf)

    def buffer(self, elements: int) -> Tensor:
        """Scratch memory of this call, grown on demand; on a CPU that of an earlier call, if no other thread has it."""
        if self.scratch is None and self.weight.device.type == "cpu":
            self.scratch = _kept.pop(self.dtype, None)
        if self.scratch is None or len(self.scratch) < elements:
            self.scratch = torch.empty(elements, dtype=self.dtype, device=self.weight.device)
        return self.scratch

    def release(self) -> None:
        """End of the call: give the scratch memory up."""
        if self.scratch is not None and self.scratch.device.type == "cpu" and self.scratch.nbytes <= KEPT_BYTES:
            _kept[self.dtype] = self.scratch
        self.scratch = None

    def complete(self, state: Tensor) -> Tensor:
        """Statistics over the whole vocabulary: as they are, or one gather of 16 bytes per token and rank."""
        if self.group is None:
            return state
        state = state.contiguous()
        gathered = state.new_empty(dist.get_world_size(self.group), *state.shape)
        dist.all_gather(list(gathered.unbind(0)), state, group=self.group)
        merged = merge_states(gathered)
        check_found(merged[:, TARGET])
        return merged


class HeadGradients:
    """Collects d loss / d hidden and d loss / d weight chunk by chunk."""

    def __init__(self, head: Head, hidden: Tensor, wants_hidden: bool, wants_weight: bool):
        self.head = head
        self.hidden = torch.zeros_like(hidden, memory_format=torch.contiguous_format) if wants_hidden else None
        self.wants_weight = wants_weight
        self.weight: Tensor | None = None

    def add(
        self,
        logits: Tensor,  # [N, V], consumed
        hidden: Tensor,  # [N, D]
        index: Tensor | slice,  # where these rows stand in the full hidden
        targets: Tensor,
        inv_temperature: Tensor,
        state: Tensor,
        grad_logprobs: Tensor,
        grad_entropies: Tensor,
    ) -> None:
        """Rows whose coefficients are both zero are dropped before the two products (on a GPU they stay: counting would sync)."""
        rows = None
        if logits.device.type != "cuda":
            active = (grad_logprobs != 0) | (grad_entropies != 0)
            if not active.all():
                rows = compacting_rows(active)
                if len(rows) == 0:
                    return
                hidden = hidden[rows]
                index = rows + index.start if isinstance(index, slice) else index[rows]
        gradient = self.head.rows.gradient(
            logits,
            targets,
            inv_temperature,
            state,
            grad_logprobs,
            grad_entropies,
            rows=rows,
            offset=self.head.offset,
            dtype=gemm.gradient_dtype(hidden),
        )
        self.accumulate(gradient, hidden, index)

    def accumulate(self, gradient: Tensor, hidden: Tensor, index: Tensor | slice) -> None:
        """The two products of a chunk whose gradient of the logits [N, V] is there."""
        if self.hidden is not None:
            self.hidden[index] = gemm.hidden_gradient(gradient, self.head.weight).to(self.hidden.dtype)
        if self.wants_weight:
            self.weight = gemm.add_weight_gradient(self.weight, gradient, hidden)

    def finish(self) -> tuple[Tensor | None, Tensor | None]:
        """The gradient of hidden (summed over the group) and of the weight in fp32; None where not wanted."""
        if self.hidden is not None and self.head.group is not None:
            dist.all_reduce(self.hidden, group=self.head.group)
        if self.wants_weight and self.weight is None:
            self.weight = torch.zeros_like(self.head.weight, dtype=self.head.dtype)
        return self.hidden, self.weight


def blocks(rows: int, size: int) -> Iterator[slice]:
    for start in range(0, rows, size):
        yield slice(start, min(start + size, rows))


def default_chunk(vocabulary: int, device: torch.device) -> int:
    """Tokens whose logits exist at once."""
    if device.type == "cuda":
        small, large = GPU_CHUNK_ROWS
        return large if torch.cuda.get_device_properties(device).total_memory > 100e9 else small
    return min(max(CPU_CHUNK_ELEMENTS // vocabulary, CPU_CHUNK_ROWS[0]), CPU_CHUNK_ROWS[1])


def tile_columns(rows: int, vocabulary: int) -> int:
    """Vocabulary columns of a tile for so many tokens."""
    columns = TILE_ELEMENTS // max(rows, 1) // 64 * 64
    return min(max(columns, TILE_COLUMNS[0]), TILE_COLUMNS[1], vocabulary)
