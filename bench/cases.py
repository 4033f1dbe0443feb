"""Sizes to measure at, and the inputs of a size."""

import re
from dataclasses import dataclass, field

import torch
from torch import Tensor

from headrace.kernels import PolicySpec

SPEC = PolicySpec(kind="ppo", clip_low=0.2, clip_high=0.28)
"""The loss that is timed: gated, asymmetrically clipped, without KL or entropy term."""
THRESHOLD = 0.95
"""τ of the top-token mask."""
PEAKS = 6
"""Tokens of a nearly certain row, each 25 nats above the next, so that the mask still finds one after it has removed some."""
SPREAD = 3.0
"""Standard deviation of the logits: an entropy of about 7 nats over 151,936 tokens."""


@dataclass(frozen=True, order=True)
class Size:
    """T tokens, hidden width D, V vocabulary entries."""

    tokens: int
    width: int
    vocabulary: int

    @classmethod
    def parse(cls, text: str) -> "Size":
        """From ``TxDxV``, e.g. ``256x512x32000``."""
        match = re.fullmatch(r"(\d+)x(\d+)x(\d+)", text.strip())
        if match is None or "0" in match.groups():
            raise ValueError(f"--sizes: expected TOKENSxWIDTHxVOCABULARY such as 256x512x32000, got {text!r}")
        return cls(*map(int, match.groups()))

    def __str__(self) -> str:
        return f"{self.tokens}x{self.width}x{self.vocabulary}"

    @property
    def logits(self) -> int:
        """Elements of the whole logits matrix."""
        return self.tokens * self.vocabulary

    @property
    def gemm_flops(self) -> int:
        return 2 * self.tokens * self.width * self.vocabulary


CPU_SIZES = (Size(256, 512, 32_000), Size(1024, 512, 32_000), Size(256, 512, 151_936))
CPU_FULL = tuple(
    Size(tokens, width, vocabulary) for vocabulary in (32_000, 151_936) for width in (512, 1024, 2048) for tokens in (256, 1024, 4096)
)
GPU_SIZES = (Size(4096, 4096, 151_936), Size(21_504, 4096, 151_936))
GPU_FULL = tuple(Size(tokens, width, 151_936) for width in (1024, 2048, 4096) for tokens in (1024, 4096, 8192, 21_504))


@dataclass
class Inputs:
    """Random inputs of one size; a spread as a trained head's, log-ratios small enough that few tokens are clipped."""

    size: Size
    device: torch.device
    dtype: torch.dtype
    seed: int = 0
    hidden: Tensor = field(init=False)  # [T, D]
    hidden_cf: Tensor = field(init=False)  # [T, D]
    weight: Tensor = field(init=False)  # [V, D]
    targets: Tensor = field(init=False)  # [T]
    advantages: Tensor = field(init=False)  # [T], never 0, equal within blocks of 128 tokens
    gates: Tensor = field(init=False)  # [T]
    loss_weights: Tensor = field(init=False)  # [T]
    old_logprobs: Tensor = field(init=False)  # [T]

    def __post_init__(self) -> None:
        generator = torch.Generator(self.device).manual_seed(self.seed)
        tokens, width, vocabulary = self.size.tokens, self.size.width, self.size.vocabulary

        def normal(*shape: int, scale: float = 1.0) -> Tensor:
            return torch.randn(*shape, generator=generator, device=self.device, dtype=self.dtype).mul_(scale)

        self.hidden = normal(tokens, width)
        self.hidden_cf = normal(tokens, width, scale=0.3).add_(self.hidden)
        self.weight = normal(vocabulary, width, scale=SPREAD / width**0.5)
        self.targets = torch.randint(vocabulary, (tokens,), generator=generator, device=self.device)
        blocks = torch.rand(-(-tokens // 128), generator=generator, device=self.device) + 0.5
        signs = 1.0 - 2.0 * (torch.arange(len(blocks), device=self.device) % 2)
        self.advantages = (blocks * signs).repeat_interleave(128)[:tokens].contiguous()
        self.gates = torch.ones(tokens, device=self.device)
        self.loss_weights = torch.full((tokens,), 1.0 / tokens, device=self.device)
        noise = torch.randn(tokens, generator=generator, device=self.device)
        self.old_logprobs = 0.02 * noise + torch.cat(
            [
                (hidden.float() @ self.weight.float().t()).log_softmax(1).gather(1, targets[:, None]).squeeze(1)
                for hidden, targets in zip(self.hidden.split(128), self.targets.split(128), strict=True)
            ]
        )


@dataclass
class Rows:
    """Logits [B, V] fp32 for the mask, half of the rows nearly certain of one token; B is the size's T."""

    size: Size
    device: torch.device
    seed: int = 0
    logits: Tensor = field(init=False)
    eligible: Tensor = field(init=False)
    seeds: Tensor = field(init=False)
    positions: Tensor = field(init=False)

    def __post_init__(self) -> None:
        generator = torch.Generator(self.device).manual_seed(self.seed)
        rows, vocabulary = self.size.tokens, self.size.vocabulary
        self.logits = torch.randn(rows, vocabulary, generator=generator, device=self.device).mul_(SPREAD)
        certain = torch.arange(0, rows, 2, device=self.device)
        for rank in range(1, PEAKS + 1):
            self.logits[certain, torch.randint(vocabulary, (len(certain),), generator=generator, device=self.device)] += 25.0 * rank
        self.eligible = torch.ones(rows, dtype=torch.bool, device=self.device)
        self.seeds = torch.arange(rows, device=self.device)
        self.positions = torch.zeros(rows, dtype=torch.int64, device=self.device)
