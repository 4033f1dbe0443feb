"""The sampler's noise: Philox4x32-10 keyed by what is drawn, so a draw does not depend on its batch, device or history.

The 32 random bits of token v at a position, under a 63-bit seed, are word v mod 4 of

    Philox4x32-10(key = (seed low 32, seed high 32), counter = (v div 4, position low 32, position high 32, 0))

(Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011: multipliers 0xD2511F53 and 0xCD9E8D57, key increments
0x9E3779B9 and 0xBB67AE85). With k these bits, the Gumbel noise is

    u = min((k + 1/2) 2^-32, 1 − 2^-24);   gumbel = −log(−log1p(−u)),   at most 22.88

formed in fp32, or float64 where the logits are. log1p keeps all digits of a small u, and a small u is what lets a rare
token win; the other end is a loser's and may be coarse.
"""

import torch
from torch import Tensor

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
INCREMENTS = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10
LOW = 0xFFFFFFFF

LARGEST = 22.88
"""No noise is above this, so a logit that trails the leading perturbed one by more can be passed over."""


def philox(counter: tuple[Tensor, ...], key: tuple[Tensor, Tensor]) -> list[Tensor]:
    """Four words of 32 bits, in int64, from four counter words and two key words that broadcast."""
    a, b, c, d = counter
    key_low, key_high = key
    for _ in range(ROUNDS):
        first, second = a * MULTIPLIERS[0], c * MULTIPLIERS[1]
        # int64 products wrap modulo 2^64, which leaves both 32-bit halves right.
        a, b, c, d = (
            ((second >> 32) & LOW) ^ b ^ key_low,
            second & LOW,
            ((first >> 32) & LOW) ^ d ^ key_high,
            first & LOW,
        )
        key_low, key_high = (key_low + INCREMENTS[0]) & LOW, (key_high + INCREMENTS[1]) & LOW
    return [a, b, c, d]


def random_bits(seeds: Tensor, positions: Tensor, vocabulary: int) -> Tensor:
    """[B, V] int64 below 2^32 for int64 seeds [B] and positions [B]."""
    blocks = torch.arange((vocabulary + 3) // 4, device=seeds.device)[None]
    counter = (blocks, positions[:, None] & LOW, (positions[:, None] >> 32) & LOW, torch.zeros_like(blocks))
    words = philox(counter, (seeds[:, None] & LOW, (seeds[:, None] >> 32) & LOW))
    return torch.stack(words, dim=2).flatten(1)[:, :vocabulary]


def gumbel(seeds: Tensor, positions: Tensor, vocabulary: int, dtype: torch.dtype) -> Tensor:
    """[B, V] Gumbel noise."""
    uniform = ((random_bits(seeds, positions, vocabulary).to(dtype) + 0.5) * 2.0**-32).clamp_max(1 - 2.0**-24)
    return -(-(-uniform).log1p()).log()
