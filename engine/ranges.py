"""Named ranges on a profiler's timeline: NVTX on a GPU, ``record_function`` under torch's profiler, nothing otherwise.

docs/profiling.md shows how to capture them. Names are stable, so that two traces can be compared:

===================  ==================================================================================================
``step``             one optimizer batch from drawing to writing its row; holds all below except evaluation and checkpoint
``sampling``         everything until the batch exists: ``wave 1`` and ``wave 2`` (or ``wave 1`` alone without CGE), each with
                     ``prefill``, one ``decode`` and one ``draw`` per position, then ``scoring``; after them ``packing``
``update``           ``counterfactual`` where credit rules compare with degraded media; ``proximal`` where ratios or gaps are
                     against the learner's own log-probs; per micro-batch ``inputs``
                     (with ``reference``), ``forward`` with ``head`` inside, ``backward``; then ``reduce`` (totals over
                     micro-batches and ranks, gradient norm) and ``optimizer``
``sync``             the engine gets the weights: nothing to do in one process, a gathered copy, or a push to servers
``evaluation``       held-out questions
``checkpoint``       a checkpoint, or the exported model
===================  ==================================================================================================

The gradients of head and loss are formed in the forward, so their time is in ``head`` and not in ``backward``.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

PREFIX = "headrace/"
"""Before every name, so that a trace's own ``forward`` or ``step`` is told apart."""


@contextmanager
def span(name: str) -> Iterator[None]:
    """Mark what runs inside; also a decorator, of plain functions. May span an ``await``. Two microseconds when nothing listens."""
    torch: Any = sys.modules.get("torch")  # a process that never needed torch has no profiler to tell
    recording = torch is not None and torch.autograd._profiler_enabled()
    on_gpu = torch is not None and torch.cuda.is_initialized()
    if not (recording or on_gpu):
        yield
        return
    handle = torch.cuda.nvtx.range_start(PREFIX + name) if on_gpu else None
    try:
        if recording:
            with torch.profiler.record_function(PREFIX + name):
                yield
        else:
            yield
    finally:
        if on_gpu:
            torch.cuda.nvtx.range_end(handle)
