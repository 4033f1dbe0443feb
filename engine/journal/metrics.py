"""Metrics of one step that follow from its groups alone (paper 000, Tables 7 and 10, Figures 5 and 7).

Every rate is logged with its numerator (``…_n``) and its denominator is among the counts, so that steps can be pooled
exactly. ``cge/*`` describes triggered groups whose second wave was masked, ``control/*`` the same rates for triggered
groups whose second wave was drawn without the mask: luck alone. A rate whose denominator is zero is left out.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from headrace.journal.mask import mask_metrics
from headrace.records import Array, Group, Rollout

Metrics = dict[str, float]

_ARM_DENOMINATORS = {
    "restored": "groups_n",
    "solves_new": "groups_n",
    "broke_all_correct": "all_correct_groups_n",
    "cracked_all_incorrect": "all_incorrect_groups_n",
}
DENOMINATORS = {
    **{f"{arm}/{name}": f"{arm}/{count}" for arm in ("cge", "control") for name, count in _ARM_DENOMINATORS.items()},
    **{f"cge/{name}": "group/n" for name in ("all_incorrect", "all_correct", "mixed", "intervened")},
    **{f"group/{name}": "group/n" for name in ("grad_first_wave", "grad_both", "pass_first_wave", "pass_all")},
    "cge/threshold_share": "cge/examined_n",
    "len/clipped_share": "reward/rollouts_n",
    **{f"degen/{name}": f"degen/{name}_groups_n" for name in ("natural", "assembled", "pilot", "after_paqm")},
    **{f"hsr/{name}": "hsr/groups_n" for name in ("quota_full", "created_degenerate")},
    **{f"hsr/{name}": "hsr/places_n" for name in ("dup_share", "donated_share")},
    "hsr/noise_share": "hsr/rollouts_n",
    **{f"paqm/{name}": "paqm/questions_n" for name in ("distillation", "trivial", "impossible")},
    **{f"paqm/{name}": "paqm/impossible_n" for name in ("perceptual", "cognitive", "reclaimed")},
    "paqm/trivial_kept": "paqm/trivial_n",
    "paqm/reclaimed_of_hinted": "paqm/hinted_n",
    "paqm/control_reclaimed": "paqm/control_n",
    "paqm/paired_reclaimed": "paqm/control_n",
    "mask/first_100": "mask/positions_n",
    "mask/beyond_400": "mask/positions_n",
    **{
        f"mask/{name}": "mask/traced_n"
        for name in ("top_prob_over_99", "runner_up_majority", "drawn_second", "drawn_second_or_third", "drawn_outside_8")
    },
}
"""Every rate's denominator; its numerator is the rate's own name with ``_n``."""


@dataclass(frozen=True)
class _Outcome:
    """What a group's scored rollouts say. Right means accuracy >= 1; variances are population variances."""

    group: Group
    wave1: Array  # [G1] accuracies
    wave2: Array  # [G2] accuracies
    everything: Array  # [G1 + G2]

    @property
    def masked(self) -> bool:
        return self.group.intervened and self.group.arm != "control"

    @property
    def control(self) -> bool:
        return self.group.intervened and self.group.arm == "control"

    @property
    def mixed(self) -> bool:
        return _varies(self.wave1)

    @property
    def all_correct(self) -> bool:
        return not self.mixed and _right(self.wave1)

    @property
    def all_incorrect(self) -> bool:
        return not self.mixed and not _right(self.wave1)

    @property
    def restored(self) -> bool:
        return _varies(self.everything)

    @property
    def broke(self) -> bool:
        return self.all_correct and bool((self.wave2 < 1).any())

    @property
    def cracked(self) -> bool:
        return self.all_incorrect and _right(self.wave2)

    @property
    def solves_new(self) -> bool:
        return _right(self.wave2) and not _right(self.wave1)

    @property
    def accuracy_delta(self) -> float:
        return float(self.wave2.mean() - self.wave1.mean())

    @property
    def variance_gain(self) -> float:
        """Variance of the group beyond what an unperturbed second wave leaves on average: Var(all) - p(1 - p)(G - 1)/G."""
        size = len(self.everything)
        return float(self.everything.var() - self.wave1.var() * (size - 1) / size)


def _varies(accuracies: Array) -> bool:
    return bool(len(accuracies)) and bool(accuracies.max() > accuracies.min())


def _right(accuracies: Array) -> bool:
    return bool((accuracies >= 1).any())


def _accuracies(rollouts: Iterable[Rollout]) -> Array:
    return np.array([rollout.reward.accuracy for rollout in rollouts if rollout.reward is not None], dtype=np.float64)


def _outcome(group: Group) -> _Outcome:
    wave1 = _accuracies(rollout for rollout in group.rollouts if rollout.wave == 1)
    wave2 = _accuracies(rollout for rollout in group.rollouts if rollout.wave == 2)
    return _Outcome(group, wave1, wave2, np.concatenate([wave1, wave2]))


def _rates(numerators: Mapping[str, int], denominator: int) -> Metrics:
    """``name_n`` counts, and ``name`` rates where the denominator allows one."""
    rates: Metrics = {}
    for name, count in numerators.items():
        rates[f"{name}_n"] = float(count)
        if denominator:
            rates[name] = count / denominator
    return rates


def _means(values: Mapping[str, Sequence[float] | Array]) -> Metrics:
    """Mean of every list that is not empty."""
    return {name: float(np.mean(items)) for name, items in values.items() if len(items)}


def _count(outcomes: Sequence[_Outcome], test: Callable[[_Outcome], bool]) -> int:
    return sum(test(outcome) for outcome in outcomes)


def _arm_metrics(prefix: str, outcomes: Sequence[_Outcome]) -> Metrics:
    """Rates of one arm over its triggered groups (paper 000, Table 7, middle block)."""
    everything = len(outcomes)
    correct = [outcome for outcome in outcomes if outcome.all_correct]
    incorrect = [outcome for outcome in outcomes if outcome.all_incorrect]
    scored = [outcome for outcome in outcomes if len(outcome.wave2)]
    return {
        **_rates(
            {
                f"{prefix}/restored": _count(outcomes, lambda outcome: outcome.restored),
                f"{prefix}/solves_new": _count(outcomes, lambda outcome: outcome.solves_new),
            },
            everything,
        ),
        **_rates({f"{prefix}/broke_all_correct": _count(correct, lambda outcome: outcome.broke)}, len(correct)),
        **_rates({f"{prefix}/cracked_all_incorrect": _count(incorrect, lambda outcome: outcome.cracked)}, len(incorrect)),
        f"{prefix}/groups_n": float(everything),
        f"{prefix}/all_correct_groups_n": float(len(correct)),
        f"{prefix}/all_incorrect_groups_n": float(len(incorrect)),
        **_means(
            {
                f"{prefix}/acc_delta": [outcome.accuracy_delta for outcome in scored],
                f"{prefix}/var_gain_intervened": [outcome.variance_gain for outcome in outcomes],
            }
        ),
    }


def _wave_metrics(outcomes: Sequence[_Outcome], rollouts: Sequence[Rollout]) -> Metrics:
    """Everything that compares the two waves; empty for a run that draws its groups in one."""
    if not any(rollout.wave == 2 for rollout in rollouts):
        return {}
    masked = [rollout for rollout in rollouts if rollout.arm == "masked"]
    examined = sum(rollout.completion.examined for rollout in masked)
    confident = sum(rollout.completion.confident for rollout in masked)
    left_alone = [outcome for outcome in outcomes if not outcome.group.intervened]
    return {
        **_rates(
            {
                "cge/all_incorrect": _count(outcomes, lambda outcome: outcome.all_incorrect),
                "cge/all_correct": _count(outcomes, lambda outcome: outcome.all_correct),
                "cge/mixed": _count(outcomes, lambda outcome: outcome.mixed),
                "cge/intervened": _count(outcomes, lambda outcome: outcome.group.intervened),
            },
            len(outcomes),
        ),
        **_arm_metrics("cge", [outcome for outcome in outcomes if outcome.masked]),
        **_arm_metrics("control", [outcome for outcome in outcomes if outcome.control]),
        "cge/left_alone_groups_n": float(len(left_alone)),
        **_rates({"cge/threshold_share": confident}, examined),
        "cge/examined_n": float(examined),
        **_means(
            {
                "cge/var_gain_left_alone": [outcome.variance_gain for outcome in left_alone],
                "cge/wave1_acc": _accuracies(rollout for rollout in rollouts if rollout.wave == 1),
                "cge/wave2_acc": _accuracies(rollout for rollout in rollouts if rollout.wave == 2),
                "len/wave1": _lengths(rollout for rollout in rollouts if rollout.wave == 1),
                "len/wave2": _lengths(rollout for rollout in rollouts if rollout.wave == 2),
                "len/wave2_intervened": _lengths(masked),
                "control/len_wave2": _lengths(rollout for rollout in rollouts if rollout.arm == "control"),
            }
        ),
    }


def _lengths(rollouts: Iterable[Rollout]) -> Array:
    return np.array([len(rollout.completion.token_ids) for rollout in rollouts], dtype=np.float64)


def _rollout_metrics(rollouts: Sequence[Rollout]) -> Metrics:
    """Rewards and response lengths over all rollouts."""
    rewards = [rollout.reward for rollout in rollouts if rollout.reward is not None]
    lengths = _lengths(rollouts)
    clipped = sum(rollout.completion.finish_reason == "length" for rollout in rollouts)
    failures = {f"reward/failed_{reason}_n": 0.0 for reason in ("timeout", "error", "non_finite")}
    for rollout in rollouts:
        if rollout.failure:
            failures[f"reward/failed_{rollout.failure}_n"] = failures.get(f"reward/failed_{rollout.failure}_n", 0.0) + 1
    return {
        **_means(
            {
                "reward/mean": [reward.total for reward in rewards],
                "reward/accuracy": [reward.accuracy for reward in rewards],
                "reward/format": [reward.format for reward in rewards],
                "len/mean": lengths,
                "policy/path_entropy": _path_entropies(rollouts),
            }
        ),
        **_rates({"len/clipped_share": clipped}, len(rollouts)),
        **failures,
        "len/max": float(lengths.max(initial=0)),
        "len/tokens_n": float(lengths.sum()),
        "reward/rollouts_n": float(len(rollouts)),
        "reward/unscored_n": float(len(rollouts) - len(rewards)),
    }


def _path_entropies(rollouts: Iterable[Rollout]) -> list[float]:
    """Length-normalised surprisal of every rollout that has one (paper 001, Eq. 1)."""
    return [entropy for rollout in rollouts if (entropy := rollout.completion.path_entropy) is not None]


def _advantages(groups: Sequence[Group]) -> list[float]:
    """|A| of every scored rollout of the groups that carry advantages."""
    return [
        abs(float(advantage))
        for group in groups
        if group.advantages is not None
        for rollout, advantage in zip(group.rollouts, group.advantages, strict=True)
        if rollout.reward is not None
    ]


def group_metrics(groups: Sequence[Group]) -> Metrics:
    """Every metric that the groups of one step determine.

    Groups without a scored first-wave rollout count in lengths and failures only. Shares are in [0, 1], lengths in
    tokens, entropies in nats.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    outcomes = [outcome for outcome in map(_outcome, groups) if len(outcome.wave1)]
    return {
        "group/n": float(len(outcomes)),
        **_rates(
            {
                "group/grad_first_wave": _count(outcomes, lambda outcome: outcome.mixed),
                "group/grad_both": _count(outcomes, lambda outcome: outcome.restored),
                "group/pass_first_wave": _count(outcomes, lambda outcome: _right(outcome.wave1)),
                "group/pass_all": _count(outcomes, lambda outcome: _right(outcome.everything)),
            },
            len(outcomes),
        ),
        **_wave_metrics(outcomes, rollouts),
        **_rollout_metrics(rollouts),
        **_means({"adv/abs_mean": _advantages(groups)}),
        **mask_metrics(rollouts),
    }
