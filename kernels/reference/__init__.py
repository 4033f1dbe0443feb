"""The row operations in plain torch: the definition that every other implementation is tested against.

Any float dtype and device; not fast. `headrace.kernels.rows` describes the interface.
"""

from headrace.kernels.reference.head_rows import gradient, statistics
from headrace.kernels.reference.loss_rows import token_loss
from headrace.kernels.reference.pair_rows import pair_divergences, pair_statistics
from headrace.kernels.reference.top_token_rows import top_token, top_token_sample

__all__ = [
    "gradient",
    "pair_divergences",
    "pair_statistics",
    "statistics",
    "token_loss",
    "top_token",
    "top_token_sample",
]
