"""The sampler's noise on the device: bit for bit the integers of `kernels/reference/noise.py`, whose header defines them."""

import triton
import triton.language as tl


@triton.jit
def philox_words(seed, position, block):
    """The four words of 32 random bits of vocabulary ids 4·block … 4·block + 3; seed and position are int64 scalars."""
    low = (position & 0xFFFFFFFF).to(tl.uint32)
    high = ((position >> 32) & 0xFFFFFFFF).to(tl.uint32)
    counter = block.to(tl.uint32)
    zero = counter & 0
    return tl.philox(seed, counter, zero + low, zero + high, zero)


@triton.jit
def random_bits(seed, position, start, BLOCK: tl.constexpr):
    """The 32 random bits of vocabulary ids start … start + BLOCK − 1, where 4 divides start."""
    first, second, third, fourth = philox_words(seed, position, start // 4 + tl.arange(0, BLOCK // 4))
    return tl.interleave(tl.interleave(first, third), tl.interleave(second, fourth))


@triton.jit
def gumbel_of(bits):
    """Gumbel noise from 32 random bits: −log(−log1p(−u)), u = (bits + 1/2) 2^−32 short of 1."""
    uniform = tl.minimum((bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 1.0 - 5.9604644775390625e-08)
    # log1p(−u) = log(w) · (−u) / (w − 1) with w = 1 − u rounded: the rounding of w cancels.
    rounded = 1.0 - uniform
    exponential = tl.where(rounded == 1.0, uniform, -tl.log(rounded) * uniform / (1.0 - rounded))
    return -tl.log(exponential)
