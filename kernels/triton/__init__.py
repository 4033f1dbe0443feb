"""The row operations in Triton, for GPUs; in Triton's interpreter (TRITON_INTERPRET=1) they also run on a CPU.

`headrace.kernels.rows` describes the interface, `headrace.kernels.reference` is the definition. Nothing here waits for the
host or uses atomics: launches are ordered by the stream alone, fit into a CUDA graph, and repeat bit for bit.
"""

from headrace.kernels.triton.fused_rows import loss_gradient
from headrace.kernels.triton.head_rows import gradient, statistics
from headrace.kernels.triton.loss_rows import token_loss
from headrace.kernels.triton.pair_rows import pair_divergences, pair_statistics
from headrace.kernels.triton.top_token_rows import top_token, top_token_sample

__all__ = [
    "gradient",
    "loss_gradient",
    "pair_divergences",
    "pair_statistics",
    "statistics",
    "token_loss",
    "top_token",
    "top_token_sample",
]
