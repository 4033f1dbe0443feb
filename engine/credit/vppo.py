"""How much a response looks at its picture, token by token, and what follows from it for the credit (VPPO).

The log-probs of a response are taken twice: with the picture, and with one whose patches are blackened.
"""

from collections.abc import Sequence
from dataclasses import replace
from math import ceil

import numpy as np

from headrace.config import VPPOConfig
from headrace.credit.responses import degraded_media, rows_where, spans
from headrace.pixels import Kind
from headrace.records import Array, CounterfactualScores, Media, StepBatch

LOG_RATIO_LIMIT, DEPENDENCY_LIMIT = 20.0, 10.0  # clamps of the public code
FLAT = 1e-6  # means whose range is no larger count as equal


def dependency(logprobs: Sequence[float] | Array, logprobs_cf: Sequence[float] | Array) -> Array:
    """S = exp(d) - d - 1 with d = log p(token | blackened) - log p(token | original), [T] float64 in nats, within [0, 10].

    The estimate k3 of KL(original || blackened) at the sampled token. It has no sign: a token that becomes likelier without the
    picture depends on it, too.

    Args:
        logprobs, logprobs_cf: [T] nats under the original and the blackened picture.
    """
    change = np.asarray(logprobs_cf, dtype=np.float64) - np.asarray(logprobs, dtype=np.float64)
    change = change.clip(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return (np.expm1(change) - change).clip(0, DEPENDENCY_LIMIT)


def select_tokens(dependencies: Sequence[float] | Array, fraction: float = 0.4) -> Array:
    """[T] bool: the ceil(fraction * T) tokens of one response that depend most, of equals the earlier ones.

    They alone enter the numerator of the loss; the denominator still counts every response token.
    """
    values = np.asarray(dependencies, dtype=np.float64)
    # Rounded first: 0.4 * 5 must not become 3 tokens by its last binary digit.
    count = ceil(round(fraction * len(values), 9))
    chosen = np.zeros(len(values), dtype=bool)
    chosen[np.argsort(-values, kind="stable")[:count]] = True
    return chosen


def trajectory_scale(means: Sequence[float] | Array, floor: float = 0.9) -> Array:
    """[N] factors on the advantages of N responses, from ``floor`` for the least dependent upwards, with mean 1.

    All 1 where the means are equal, or for a single response.

    Args:
        means: [N] mean dependency of every response of the optimizer step.
    """
    values = np.asarray(means, dtype=np.float64)
    if len(values) < 2 or np.ptp(values) <= FLAT:
        return np.ones(len(values))
    shares = (values - values.min()) / np.ptp(values)  # [N] in [0, 1]
    highest = floor + (1 - floor) / (shares.mean() + 1e-8)
    return floor + shares * (highest - floor)


class VPPO:
    """The credit rule: advantages scaled by response, numerator reduced to the tokens that depend most (``records.CreditRule``).

    Responses without a picture, and those without an advantage, stay as they are and enter no statistic. All others of the
    optimizer step share one scale, whichever ranks scored them.
    """

    def __init__(self, config: VPPOConfig, intervention: Kind) -> None:
        self.config, self.intervention = config, intervention

    def wanted(self, batch: StepBatch) -> list[tuple[Media, ...]]:
        """Every response with an advantage."""
        return degraded_media(batch, rows_where(batch, batch.response_mask & (batch.advantages != 0)), self.intervention)

    def refine(self, batch: StepBatch, scores: CounterfactualScores) -> StepBatch:
        """The batch with scaled advantages and a smaller ``loss_mask``; denominators stay."""
        every = dependency(scores.logprobs, scores.logprobs_cf)  # [N]
        scored = scores.rows & rows_where(batch, batch.response_mask & (batch.advantages != 0))
        places = [span for span, row in zip(spans(batch), scored, strict=True) if row and np.isfinite(every[span]).all()]
        if not places:
            return batch
        advantages, loss_mask = batch.advantages.copy(), batch.loss_mask.copy()
        selected, counted = (np.zeros(len(every), dtype=bool) for _ in range(2))
        scales = trajectory_scale([every[span].mean() for span in places], self.config.scale_floor)
        for span, scale in zip(places, scales, strict=True):
            selected[span] = select_tokens(every[span], self.config.fraction)
            counted[span] = True
            loss_mask[span] &= selected[span]
            advantages[span] *= np.float32(scale)
        measured = {
            "vppo/dependency": float(every[counted].mean()),
            "vppo/dependency_selected": float(every[selected].mean()),
            "vppo/scale_min": float(scales.min()),
            "vppo/scale_max": float(scales.max()),
        }
        if (counted & ~selected).any():
            measured["vppo/dependency_unselected"] = float(every[counted & ~selected].mean())
        return replace(batch, advantages=advantages, loss_mask=loss_mask, measured={**batch.measured, **measured})
