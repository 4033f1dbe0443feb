"""What the groups of a step say, by worked number."""

import math
from dataclasses import replace

import numpy as np
import pytest
from journal_builders import completion, group, rollout, trace

from headrace.journal.mask import MaskCounts, entropy_after, entropy_bounds, mask_counts, mask_metrics, printed_form
from headrace.journal.metrics import DENOMINATORS, group_metrics

EX_4_8 = [
    group([0, 0, 0, 0], [0, 1, 0, 1]),
    group([0, 0, 0, 0], [0, 0, 0, 0]),
    group([1, 1, 1, 1], [1, 0, 1, 1]),
    group([1, 0, 0, 1], [0, 0, 1, 0]),
]
EX_4_8_RATES = {
    "cge/all_incorrect": 0.5,
    "cge/all_correct": 0.25,
    "cge/mixed": 0.25,
    "cge/intervened": 0.75,
    "cge/restored": 2 / 3,
    "cge/broke_all_correct": 1.0,
    "cge/cracked_all_incorrect": 0.5,
    "cge/solves_new": 1 / 3,
    "cge/acc_delta": 1 / 12,
    "group/grad_first_wave": 0.25,
    "group/grad_both": 0.75,
    "group/pass_first_wave": 0.5,
    "group/pass_all": 0.75,
    "cge/var_gain_intervened": 0.098958,
    "cge/var_gain_left_alone": 0.015625,
}


def test_ex_4_8_every_rate_of_four_groups():
    measured = group_metrics(EX_4_8)
    assert {name: measured[name] for name in EX_4_8_RATES} == pytest.approx(EX_4_8_RATES, abs=5e-7)


def test_rates_are_their_numerator_over_their_denominator():
    measured = group_metrics(EX_4_8)
    checked = [name for name in DENOMINATORS if name in measured]
    assert all(measured[name] == measured[f"{name}_n"] / measured[DENOMINATORS[name]] for name in checked)
    assert len(checked) > 15


def test_a_control_group_moves_to_the_control_rates_and_nothing_else():
    groups = [*EX_4_8[:1], group([0, 0, 0, 0], [0, 0, 0, 0], "control"), group([1, 1, 1, 1], [1, 0, 1, 1], "control"), EX_4_8[3]]
    measured = group_metrics(groups)
    both = group_metrics(EX_4_8)
    assert (measured["cge/groups_n"], measured["control/groups_n"]) == (1, 2)
    assert (measured["cge/restored"], measured["control/restored"]) == (1.0, 0.5)
    assert measured["control/broke_all_correct"] == 1.0
    assert measured["control/cracked_all_incorrect"] == 0.0
    shared = [name for name in both if name.startswith("group/")] + ["cge/intervened", "cge/all_incorrect", "cge/var_gain_left_alone"]
    assert all(measured[name] == both[name] for name in shared)
    pooled = {name: measured[f"cge/{name}"] + measured[f"control/{name}"] for name in ("restored_n", "solves_new_n", "groups_n")}
    assert pooled == {name: both[f"cge/{name}"] for name in pooled}


@pytest.mark.parametrize(
    ("shares", "broke", "cracked", "expected"),
    [
        (
            (0.73, 0.03, 0.24),
            0.70,
            0.13,
            {"intervened": 0.76, "restored": 0.1525, "both": 0.354, "new": 0.1249, "pass4": 0.27, "pass8": 0.3649},
        ),
        (
            (0.64, 0.08, 0.28),
            0.61,
            0.15,
            {"intervened": 0.72, "restored": 0.2011, "both": 0.424, "new": 0.1333, "pass4": 0.36, "pass8": 0.456},
        ),
    ],
    ids=["early", "later"],
)
def test_ex_4_9_identities_of_table_7(shares, broke, cracked, expected):
    incorrect, correct, mixed = (round(10_000 * share) for share in shares)
    cracks, breaks = round(incorrect * cracked), round(correct * broke)
    prototypes = {
        "cracked": (group([0, 0], [0, 1]), cracks),
        "hopeless": (group([0, 0], [0, 0]), incorrect - cracks),
        "broken": (group([1, 1], [1, 0]), breaks),
        "easy": (group([1, 1], [1, 1]), correct - breaks),
        "mixed": (group([1, 0], [0, 1]), mixed),
    }
    thinned = [prototype for prototype, count in prototypes.values() for _ in range(round(count / 10))]
    measured = group_metrics(thinned)
    got = {
        "intervened": measured["cge/intervened"],
        "restored": measured["cge/restored"],
        "both": measured["group/grad_both"],
        "new": measured["cge/solves_new"],
        "pass4": measured["group/pass_first_wave"],
        "pass8": measured["group/pass_all"],
    }
    assert got == pytest.approx(expected, abs=2.5e-3)  # the printed shares, and so these products, are rounded to two digits
    # the identities themselves, exactly
    assert measured["cge/intervened"] == pytest.approx(1 - measured["cge/mixed"])
    assert measured["group/grad_both"] == pytest.approx(measured["cge/mixed"] + measured["cge/intervened"] * measured["cge/restored"])
    gained = measured["cge/all_incorrect"] * measured["cge/cracked_all_incorrect"]
    assert measured["group/pass_all"] == pytest.approx(measured["group/pass_first_wave"] + gained)


def test_plain_grpo_has_no_wave_metrics():
    measured = group_metrics([group([1, 0, 0, 0, 1, 0, 0, 0], []), group([0] * 8, [])])
    assert not [name for name in measured if name.startswith(("cge/", "control/", "mask/", "len/wave"))]
    assert measured["group/grad_both"] == measured["group/grad_first_wave"] == 0.5


def test_unscored_rollouts_are_counted_and_left_out_of_every_rate():
    measured = group_metrics([group([None, 1, 0, None], [None, 1, 1, 1]), group([None] * 4, [None] * 4)])
    assert measured["group/n"] == 1
    assert measured["reward/unscored_n"] == measured["reward/failed_timeout_n"] == 11
    assert measured["cge/wave1_acc"] == 0.5
    assert measured["cge/wave2_acc"] == 1.0
    assert measured["reward/rollouts_n"] == 16


def test_empty_step_has_counts_only():
    measured = group_metrics([])
    assert measured["group/n"] == measured["len/tokens_n"] == 0
    assert all(math.isfinite(value) for value in measured.values())


def test_format_variance_alone_does_not_count_as_restored():
    """EX-3.4: accuracy variance decides, although such a group has a gradient."""
    base = group([0, 0], [0, 0])
    first = base.rollouts[0]
    assert first.reward is not None
    varied = replace(base, rollouts=(replace(first, reward=replace(first.reward, format=0.0, total=0.0)), *base.rollouts[1:]))
    assert group_metrics([varied])["cge/restored"] == 0


def test_lengths_by_wave_and_mean_advantage():
    base = group([0, 0], [1, 0])
    rollouts = [replace(item, completion=completion(length)) for item, length in zip(base.rollouts, (10, 20, 4, 6), strict=True)]
    varied = replace(base, rollouts=tuple(rollouts), advantages=np.array([-0.5, -0.5, 1.5, -0.5], dtype=np.float32))
    measured = group_metrics([varied])
    assert (measured["len/mean"], measured["len/wave1"], measured["len/wave2"], measured["len/wave2_intervened"]) == (10, 15, 5, 5)
    assert measured["adv/abs_mean"] == 0.75
    assert measured["len/tokens_n"] == 40


@pytest.mark.parametrize(
    ("top", "low", "high"), [(0.80, 0.5004, 2.8866), (0.90, 0.3251, 1.5182), (0.95, 0.1985, 0.7951), (0.99, 0.0560, 0.1753)]
)
def test_ex_4_7_entropy_bounds(top, low, high):
    assert entropy_bounds(top, 151_936) == pytest.approx((low, high), abs=6e-5)


def test_ex_4_7_an_entropy_of_half_a_nat_allows_a_wide_range():
    for top, inside in ((0.801, True), (0.969, True), (0.799, False), (0.971, False)):
        low, high = entropy_bounds(top, 151_936)
        assert (low <= 0.5 <= high) is inside, top


def test_ex_4_2_and_4_4_entropy_after_the_mask():
    after = entropy_after(np.array([0.171853, 0.168643, 0.01]), np.array([0.97, 0.96, 0.9995]))
    assert after[:2] == pytest.approx([1.237019, 0.017476], abs=3e-5)
    assert np.isnan(after[2])


def test_table_9_metrics_of_masked_positions():
    positions = [0, 50, 99, 100, 399, 400, 900]
    made = replace(
        completion(1000, positions, examined=990, confident=9),
        trace=replace(
            trace(positions),
            removed_probs=np.array([0.96, 0.97, 0.98, 0.991, 0.995, 0.999, 0.9999], dtype=np.float32),
            runner_up_probs=np.array([0.021, 0.01, 0.019, 0.001, 0.004, 0.0009, 0.00009], dtype=np.float32),
            drawn_ranks=np.array([2, 2, 2, 3, 9, 9, 4], dtype=np.int32),
        ),
    )
    measured = mask_metrics(
        [rollout(0, 2, "masked", 0.0, made), rollout(1, 2, "masked", 0.0, completion(5)), rollout(2, 2, "control", 0.0)]
    )
    assert measured["mask/position_median"] == 100
    assert measured["mask/first_100_n"] == 3
    assert measured["mask/beyond_400_n"] == 2
    assert measured["mask/top_prob_over_99_n"] == 4
    assert measured["mask/runner_up_majority_n"] == 5
    assert measured["mask/drawn_second"] == pytest.approx(3 / 7)
    assert measured["mask/drawn_second_or_third"] == pytest.approx(4 / 7)
    assert measured["mask/drawn_outside_8"] == pytest.approx(2 / 7)
    assert measured["mask/per_response"] == 3.5


def test_a_masked_position_that_drew_the_removed_token_is_a_fault():
    made = completion(10, (2,))
    broken = replace(made, trace=replace(trace((2,)), removed_ids=np.array([2], dtype=np.int32)))
    with pytest.raises(AssertionError, match="drew the token"):
        mask_metrics([rollout(0, 2, "masked", 0.0, broken)])


def test_figure_8_folds_word_boundaries_and_drops_pieces_of_characters():
    assert [printed_form(text) for text in (" the", "the", "Ġthe", "▁the", "\ufffd", "\n\n", "**", "")] == ["the"] * 4 + [
        None,
        "⏎⏎",
        "**",
        None,
    ]
    texts = {102: " the", 105: "the", 2: "\ufffd", 5: " a"}
    counts = mask_counts(group([0, 0], [1, 0]).rollouts, texts.__getitem__)
    assert counts.removed == {"the": 4}
    assert counts.drawn == {"a": 2}
    assert counts.pairs == {("the", "a"): 2}
    assert counts.positions == {2: 2, 5: 2}


def test_mask_counts_survive_a_row_and_add_up():
    counts = mask_counts(group([0, 0], [1, 0]).rollouts, str)
    assert MaskCounts.of_row(counts.row()) == counts
    total = MaskCounts.none()
    total.add(counts)
    total.add(counts)
    assert total.removed == {"102": 4, "105": 4}
    assert total.median_position() == 3.5
