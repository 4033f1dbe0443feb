"""One sampling step of the top-token mask inside a vLLM worker, the same for both of vLLM's runner interfaces.

The runners keep one `ROW` per request in their own order and tell, for each row of logits, whether its position lies in the reasoning
span and which response position it is. Here the banned ids go, the mask fires, its positions are counted towards the cap, and the report
is written. Nothing in here waits for the device.

A step may be computed again: each chunk of a prefill samples a token that is thrown away, and a preempted request may lose its
last token. So the count is not added up but kept with the position it belongs to, and a second visit starts from the same
number. It lives under a ticket, not under the row or slot, because a preempted request comes back in another one.
"""

from collections import OrderedDict
from collections.abc import Hashable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from headrace.kernels import TopTokenMask, top_token_mask
from headrace.records import Array
from headrace.sampling.vllm.channel import FILTERS, KEY, RequestArguments, Settings, encode, read_settings

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.config import VllmConfig

GREEDY_BELOW = 1e-5
"""vLLM draws greedily below this temperature and then divides by nothing."""

ROW = np.dtype(
    [
        ("threshold", np.float32),
        ("temperature", np.float32),
        ("top_p", np.float32),
        ("top_k", np.int32),  # 0 keeps all
        ("cap", np.int32),  # 0 draws freely
        ("ticket", np.int32),
        ("filter", np.int32),  # index into FILTERS
        ("reporting", np.int32),
        ("prefilled", np.int32),
    ]
)
"""What a step must know of one request; four bytes a field, so that a table of rows is one int32 matrix to the device."""


class Rows(NamedTuple):
    """A table of B rows on the device, and what the host knows of it as a whole."""

    threshold: Tensor
    temperature: Tensor
    top_p: Tensor
    top_k: Tensor
    cap: Tensor
    ticket: Tensor
    filter: Tensor
    reporting: Tensor
    prefilled: Tensor
    heated: bool
    """A temperature other than 1 occurs."""
    filters: tuple[int, ...]
    """Token filters of the rows that draw under the mask; empty when none does."""
    truncated: Tensor | None
    """Numbers of the rows with top-p or top-k, int64; None when there are none."""

    @classmethod
    def of(cls, table: Array, matrix: Tensor) -> "Rows":
        """Columns of ``matrix`` [B, fields] int32, which holds the same rows as the host's ``table``."""
        columns = matrix.t().contiguous()
        threshold, temperature, top_p = columns[:3].view(torch.float32)
        masked = table["cap"] > 0
        cut = np.flatnonzero((table["top_p"] < 1) | (table["top_k"] > 0))
        return cls(
            threshold,
            temperature,
            top_p,
            top_k=columns[3],
            cap=columns[4],
            ticket=columns[5].long(),
            filter=columns[6],
            reporting=columns[7].bool(),
            prefilled=columns[8].bool(),
            heated=bool((table["temperature"] != 1).any()),
            filters=tuple(number for number in range(len(FILTERS)) if bool((masked & (table["filter"] == number)).any())),
            truncated=upload(cut, matrix.device) if len(cut) else None,
        )


def upload(values: Array, device: torch.device) -> Tensor:
    """Values on the device, without waiting for it."""
    tensor = torch.from_numpy(values)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def new_row(params: "SamplingParams", ticket: int) -> tuple[float | int, ...]:
    """The `ROW` of a request. One from elsewhere, without our arguments, only loses the banned ids."""
    given = (params.extra_args or {}).get(KEY)
    arguments = RequestArguments() if given is None else RequestArguments.model_validate(given)
    greedy = params.temperature < GREEDY_BELOW
    return (
        arguments.threshold,
        1.0 if greedy else params.temperature,
        1.0 if greedy else arguments.top_p,
        0 if greedy else arguments.top_k,
        arguments.cap if arguments.mask else 0,
        ticket,
        FILTERS.index(arguments.filter),
        given is not None,
        arguments.inside,
    )


class Tickets:
    """Hands out a counter for each request and finds it again when a preempted request returns.

    Ticket 0 is nobody's. There are more tickets than requests can run at once, so that those of preempted requests survive; the one
    longest unused goes first.
    """

    def __init__(self, count: int) -> None:
        self._held: OrderedDict[Hashable, int] = OrderedDict()  # by key of the request, oldest first
        self._free = list(range(count - 1, 0, -1))

    def take(self, key: Hashable, resumed: bool, running: Iterable[int]) -> int:
        """The ticket of a request that enters the batch.

        Args:
            key: tells the request from all others that are alive.
            resumed: it has drawn tokens before and looks for its old ticket; where that is gone its count starts anew.
            running: tickets of the requests in the batch.
        """
        if resumed and key in self._held:
            self._held.move_to_end(key)
            return self._held[key]
        if self._free:
            ticket = self._free.pop()
        else:
            busy = set(running)
            oldest = next(held for held, number in self._held.items() if number not in busy)
            ticket = self._held.pop(oldest)
        former = self._held.pop(key, None)
        if former is not None:
            self._held[object()] = former  # its request may still run
        self._held[key] = ticket
        return ticket


class MaskStep:
    """Settings, constants on the device, and the counters."""

    def __init__(self, vllm_config: "VllmConfig", device: torch.device, max_requests: int) -> None:
        """Raises:
        ValueError: the server's configuration cannot carry the mask, or names no usable settings.
        """
        self.settings = load_settings(vllm_config)
        self.device = device
        count = 4 * max_requests + 1
        self.tickets = Tickets(count)
        self._banned = torch.tensor(self.settings.banned)
        self._spare_rows = torch.tensor(self.settings.spare_rows, device=device)
        self._spared = []
        for name in FILTERS:
            spared = torch.zeros(self.settings.vocab_size, dtype=torch.bool)
            spared[self.settings.spared[name]] = True
            self._spared.append(spared.to(device))
        self._counters = torch.zeros(count, 3, dtype=torch.int64, device=device)  # position, masked before it, masked up to it

    def apply(self, logits: Tensor, rows: Rows, inside: Tensor, positions: Tensor, final: Tensor | None = None) -> None:
        """Mask the logits in place and write the report.

        Args:
            logits: [B, V] fp32.
            rows: of the B requests.
            inside: [B] bool, the position to draw lies in the reasoning span.
            positions: [B] int64, its index in the response.
            final: [B] bool, False where the step's token will be thrown away whatever it is; None: not known, nothing is lost.
        """
        if logits.shape[1] != self.settings.vocab_size:
            raise ValueError(f"the model has {logits.shape[1]} logits, the top-token processor's settings name {self.settings.vocab_size}")
        if rows.filters:
            position, before, after = self._counters[rows.ticket].unbind(1)
            count = torch.where(positions > position, after, before).masked_fill_(positions == 0, 0)
            eligible = inside & (count < rows.cap)
            mask = self._mask(logits, eligible if final is None else eligible & final, rows)
            update = torch.stack((positions, count, count + mask.fired), 1)
            self._counters[rows.ticket] = update if final is None else torch.where(final[:, None], update, self._counters[rows.ticket])
        else:
            mask = self._mask(logits, torch.zeros_like(inside), rows)
        if rows.truncated is not None:
            truncate(logits, rows.truncated, rows)
        plain = not rows.heated and rows.truncated is None
        encode(logits, mask, inside, rows.reporting, None if plain else rows.temperature, self._spare_rows)

    def _mask(self, logits: Tensor, eligible: Tensor, rows: Rows) -> TopTokenMask:
        """`top_token_mask` with each row's own filter; requests of one run have the same, so the second call is rare."""
        first, *others = rows.filters or (0,)
        mine = eligible if not others else eligible & (rows.filter == first)
        mask = top_token_mask(logits, mine, rows.threshold, banned=self._banned, spared=self._spared[first])
        for number in others:
            mine = rows.filter == number
            other = top_token_mask(logits, eligible & mine, rows.threshold, spared=self._spared[number])
            mask = TopTokenMask(*(torch.where(mine, new, old) for new, old in zip(other, mask, strict=True)))
        return mask


def truncate(logits: Tensor, numbers: Tensor, rows: Rows) -> None:
    """Keep the k most likely tokens, then the smallest set of probability ≥ p, of the rows ``numbers``; after mask and temperature."""
    chosen = logits[numbers]
    top_p, top_k = rows.top_p[numbers, None], rows.top_k[numbers, None]
    ranked, order = (chosen / rows.temperature[numbers, None]).sort(dim=1, descending=True, stable=True)
    rank = torch.arange(ranked.shape[1], device=ranked.device)
    beyond = (top_k > 0) & (rank >= top_k)
    probs = ranked.masked_fill(beyond, -torch.inf).softmax(1)
    outside = beyond | ((top_p < 1) & (probs.cumsum(1) - probs >= top_p))
    logits[numbers] = chosen.masked_fill(torch.zeros_like(outside).scatter_(1, order, outside), -torch.inf)


def load_settings(vllm_config: "VllmConfig") -> Settings:
    """The settings file that the server was started with, checked against the server.

    Raises:
        ValueError: none was named or it does not fit; the server speculates, or returns log-probs of another mode.
    """
    if vllm_config.speculative_config is not None:
        raise ValueError("the top-token mask does not work with speculative decoding: start the server without --speculative-config")
    mode = str(vllm_config.model_config.logprobs_mode)
    if mode != "processed_logprobs":
        raise ValueError(f"the top-token processor needs --logprobs-mode processed_logprobs, the server has {mode}")
    additional = vllm_config.additional_config
    path = additional.get(KEY) if isinstance(additional, dict) else None
    if not isinstance(path, str):
        raise ValueError(f'the top-token processor needs --additional-config \'{{"{KEY}": "<settings file>"}}\'')
    settings = read_settings(Path(path))
    vocabulary = vllm_config.model_config.get_vocab_size()
    if settings.vocab_size != vocabulary:
        raise ValueError(f"{path}: made for a vocabulary of {settings.vocab_size}, the server's model has {vocabulary}")
    return settings
