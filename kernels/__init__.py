"""The four fused operations of an RLVR training step, each with one contract and several implementations.

* `top_token_mask`, `top_token_sample`: a confidence gate on the sampler.
* `linear_logprob`: log-prob and entropy from hidden states.
* `policy_loss`, `linear_policy_loss`: the gated clipped loss, alone or fused with the head.
* `counterfactual_score`: one set of tokens under two hidden streams.

`rows` describes what an implementation provides, `dispatch` which one serves. Nothing here knows of the engine.
"""

from headrace.kernels.counterfactual import CounterfactualScore, counterfactual_score
from headrace.kernels.dispatch import choose
from headrace.kernels.labels import raise_on_bad_labels
from headrace.kernels.linear_logprob import linear_logprob
from headrace.kernels.linear_policy_loss import linear_policy_loss
from headrace.kernels.policy_loss import PolicyLoss, policy_loss
from headrace.kernels.policy_spec import Metric, PolicySpec, combine_metrics, empty_metrics, summarise_metrics
from headrace.kernels.top_token import TopTokenMask, TopTokenSample, top_token_mask, top_token_sample

__all__ = [
    "CounterfactualScore",
    "Metric",
    "PolicyLoss",
    "PolicySpec",
    "TopTokenMask",
    "TopTokenSample",
    "choose",
    "combine_metrics",
    "counterfactual_score",
    "empty_metrics",
    "linear_logprob",
    "linear_policy_loss",
    "policy_loss",
    "raise_on_bad_labels",
    "summarise_metrics",
    "top_token_mask",
    "top_token_sample",
]
