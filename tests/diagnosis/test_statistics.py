"""Means over claims by group, clustered by question, and what changed: EX-6.6 and EX-6.9, labels, signs, differences in differences."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.credit.pacg import corrected_persistence
from headrace.diagnosis import page
from headrace.diagnosis.bank import Bank, Claim, Entry, Response
from headrace.diagnosis.points import Point
from headrace.diagnosis.results import Measured, between_series, changes, compared, finding, measured, to_json
from headrace.diagnosis.scoring import Settings
from headrace.journal import intervals
from headrace.journal.intervals import clustered_mean
from headrace.records import Media, Question

EX_6_9 = {"q1": [-0.10, -0.20], "q2": [0.05], "q3": [-0.15, -0.05, -0.10]}
S, U = "supported", "unsupported"


def point(series: str = "run", step: int | None = 0) -> Point:
    return Point(series, step, Path(series), "float32", f"{series}{step}", lambda: pytest.fail("is not loaded"))


def bank(labels: dict[str, list[Any]]) -> Bank:
    """One response per question, with a claim per label."""
    media = (Media("image", "x.png"),)
    return Bank(
        Path("bank.jsonl"),
        tuple(
            Entry(Question(name, (), "", media), (Response("text", claims=[Claim(f"c{k}", 1, label) for k, label in enumerate(some)]),))
            for name, some in labels.items()
        ),
    )


def rows(deltas: Mapping[str, Sequence[float | None]], efs: float = 0.2, text: float | None = None) -> list[dict[str, Any]]:
    return [
        {
            "question": name,
            "response": 0,
            "retokenized": False,
            "unchanged": False,
            "claims": [{"claim": k, "tokens": 2, "efs": efs, "delta": delta, "text": text} for k, delta in enumerate(some)],
        }
        for name, some in deltas.items()
    ]


def of(deltas: Mapping[str, Sequence[float | None]], labels: dict[str, list[Any]], at: Point | None = None, **rest: Any) -> Measured:
    return measured(at or point(), bank(labels), rows(deltas, **rest))


# ------------------------------------------------------------------------------------------------------ the bootstrap


def test_ex_6_9_all_resamples_of_three_questions() -> None:
    """All 27 are taken, so that the interval is exact; the claim mean is the estimate, not the question mean."""
    found = finding(of(EX_6_9, {name: [U] * len(some) for name, some in EX_6_9.items()}))
    part = found.delta["unsupported"]
    assert (part.claims, part.questions) == (6, 3)
    assert part.value == pytest.approx(-0.091667, abs=5e-7)
    np.testing.assert_allclose(part.interval, [-0.136071, -0.008500], atol=5e-7)


def test_ex_6_9_spread() -> None:
    sums, counts = np.array([[-0.3, 0.05, -0.3]]), np.array([[2.0, 1.0, 3.0]])
    means = np.concatenate([intervals._pooled(sums, counts, picked) for picked in intervals._draws(3)])
    assert len(means) == 27
    assert means.std() == pytest.approx(0.039743, abs=5e-7)


def test_claims_of_a_question_are_no_independent_observations() -> None:
    """Ten equal claims per question carry as much as one: the interval stays that of the questions."""
    rng = np.random.default_rng(0)
    values = rng.normal(size=60)
    once = clustered_mean(values.tolist(), list(range(60)))
    ten_times = clustered_mean(np.repeat(values, 10).tolist(), np.repeat(np.arange(60), 10).tolist())
    np.testing.assert_allclose(once, ten_times)
    expected = values.mean() + np.array([-1.96, 1.96]) * values.std() / np.sqrt(60)
    np.testing.assert_allclose(once, expected, atol=0.03)
    assert clustered_mean(values.tolist(), list(range(60))) == once


def test_two_questions_are_the_least_for_an_interval() -> None:
    assert np.isnan(clustered_mean([0.1, 0.2], ["q", "q"])).all()
    assert np.isfinite(clustered_mean([0.1, 0.2], ["q", "r"])).all()


# ------------------------------------------------------------------------------------------------------ groups and signs


def test_ex_6_6_by_label() -> None:
    """The claim that persists is the unsupported one; labels the other way round give the other number."""
    logprobs = [-0.20, -0.50, -0.30, -0.10, -0.40, -0.05, -0.30, -0.20, -0.40, -0.60]
    degraded = [-0.25, -0.52, -0.31, -0.20, -1.30, -0.07, -0.33, -0.22, -0.45, -0.68]
    delta, _ = corrected_persistence(logprobs, degraded, [[1, 2], [2, 3, 4]])
    deltas = {"q": delta.tolist()}
    found, flipped = finding(of(deltas, {"q": [U, S]})), finding(of(deltas, {"q": [S, U]}))
    assert found.delta["unsupported"].value == pytest.approx(0.026667, abs=5e-7)
    assert found.delta["supported"].value == pytest.approx(-0.295, abs=5e-7)
    assert found.delta["overall"].value == pytest.approx((0.026667 - 0.295) / 2, abs=1e-6)
    assert found.gap.value == pytest.approx(0.321667, abs=1e-6)
    assert flipped.delta["unsupported"].value == pytest.approx(-0.295, abs=5e-7)
    assert flipped.gap.value == pytest.approx(-0.321667, abs=1e-6)


def test_unlabelled_claims_count_overall_alone() -> None:
    found = finding(of({"q": [0.1, 0.3], "r": [0.5]}, {"q": [None, U], "r": [None]}))
    assert [found.delta[group].claims for group in ("overall", "supported", "unsupported")] == [3, 0, 1]
    assert found.delta["overall"].value == pytest.approx(0.3)
    assert np.isnan(found.delta["supported"].value)


def test_invalid_claims_are_left_out_and_counted() -> None:
    found = of({"q": [None, 0.3]}, {"q": [U, U, S]})
    assert len(found.claims) == 1
    assert found.left_out == {"nothing to calibrate by": 1, "nowhere in the response, or in its answer": 1}


# ------------------------------------------------------------------------------------------------------ changes


LABELS = {"q": [S, U], "r": [U], "s": [S]}
BEFORE = {"q": [-0.2, -0.1], "r": [-0.1], "s": [-0.4]}
AFTER: dict[str, list[float | None]] = {"q": [-0.3, 0.0], "r": [0.2], "s": [None]}


def test_changes_are_paired_by_claim_and_after_minus_before() -> None:
    """Unsupported -.1 to .1 on average: +.2; the supported claim without a value afterwards is in neither mean."""
    found = compared(of(BEFORE, LABELS, efs=0.22), of(AFTER, LABELS, efs=0.31))
    assert found.delta["unsupported"].value == pytest.approx(0.2)
    assert found.delta["supported"].value == pytest.approx(-0.1)
    assert found.efs["overall"].value == pytest.approx(0.09)
    np.testing.assert_allclose(found.delta["unsupported"].interval, [0.1, 0.3], atol=0.03)


def test_difference_in_differences() -> None:
    """+.2 on the picture; the same claims rose by .15 when words were hidden: +.05 is the picture's own."""
    found = compared(of(BEFORE, LABELS, text=-0.5), of(AFTER, LABELS, text=-0.35))
    assert found.beyond["unsupported"].value == pytest.approx(0.05)
    assert found.beyond["supported"].value == pytest.approx(-0.25)
    assert compared(of(BEFORE, LABELS), of(AFTER, LABELS)).beyond["overall"].claims == 0


def test_runs_are_compared_at_their_ends() -> None:
    """Base, parent at 10 and 20, gated at 10 and 20: everything against the base, and the gated end against the parent's."""
    levels = {("parent", 0): -0.1, ("parent", 10): 0.0, ("parent", 20): 0.1, ("gated", 10): -0.1, ("gated", 20): -0.3}
    found = [of({"q": [level], "r": [level]}, {"q": [U], "r": [U]}, point(*where)) for where, level in levels.items()]
    since = changes(found)
    assert [round(each.delta["unsupported"].value, 6) for each in since] == [0.1, 0.2, 0.0, -0.2]
    (across,) = between_series(found)
    assert (across.before.name, across.after.name) == ("parent, step 20", "gated, step 20")
    assert across.delta["unsupported"].value == pytest.approx(-0.4)
    report = to_json(bank({"q": [U], "r": [U]}), [finding(each) for each in found], since, [across], Settings())
    assert report["checkpoints"][2]["delta"]["unsupported"]["value"] == pytest.approx(0.1)
    assert report["checkpoints"][2]["delta"]["supported"]["value"] is None
    assert report["between_series"][0]["delta"]["unsupported"]["value"] == pytest.approx(-0.4)


def test_the_page_says_which_way_it_went(tmp_path: Path) -> None:
    """EFS .22 to .31 while unsupported claims go from -.1 to .1: the decoupling of paper 003, in words, table and plot."""
    labels = {name: [S, U] for name in "abcdef"}
    held = bank(labels)
    before = measured(point(), held, rows({name: [-0.4, -0.1] for name in labels}, efs=0.22))
    after = measured(point(step=60), held, rows({name: [-0.5, 0.1 + 0.01 * k] for k, name in enumerate(labels)}, efs=0.31))
    written, lines = page.write(held, [before, after], Settings(), tmp_path)
    html = written.read_text()
    assert "EFS changes by +0.0900" in html
    assert "unsupported claims by +0.2250" in html
    assert "they are held on to more, though the policy looks more." in html
    assert "run: from EFS 0.22, persistence -0.1 to EFS 0.31, persistence 0.125" in html
    assert "δ unsupported +0.1250" in lines[1]
    assert "δ supported -0.5000" in lines[1]
    back, _ = page.write(held, [after, before], Settings(), tmp_path)
    assert "they are taken back more readily." in back.read_text()
