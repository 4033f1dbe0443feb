"""The report page: complete in itself, honest about what is missing, safe with untrusted text."""

import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from journal_builders import config, group
from synthetic_run import evaluation, synthesise, synthetic_config

from headrace.commands.report import report
from headrace.journal import charts, scores, tables
from headrace.journal.intervals import bootstrap_mean, mean_interval, rate_difference, wilson
from headrace.journal.journal import Journal
from headrace.journal.report import build
from headrace.journal.run_data import read_run
from headrace.journal.store import JournalError, Table

STEPS = 24


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("runs")
    return synthesise(folder, "cge", STEPS, questions=6), synthesise(folder, "plain", STEPS, cge=False, seed=1, questions=6)


@pytest.fixture(scope="module")
def page(runs, tmp_path_factory) -> str:
    return build([runs[0]], tmp_path_factory.mktemp("out") / "report.html").read_text()


class _Checker(HTMLParser):
    """Finds unbalanced tags, duplicate identifiers and everything that would load from elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.targets: list[str] = []
        self.faults: list[str] = []

    def handle_starttag(self, tag, attributes):
        self._attributes(attributes)
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self._attributes(attributes)

    def _attributes(self, attributes):
        for name, value in attributes:
            if name == "id":
                self.ids.append(value)
            if name in ("src", "href", "xlink:href", "data", "action"):
                self.targets.append(value)
            if name.startswith("on"):
                self.faults.append(f"script attribute {name}")

    def handle_endtag(self, tag):
        if not self.open or self.open.pop() != tag:
            self.faults.append(f"unbalanced {tag}")


def checked(text: str) -> _Checker:
    checker = _Checker()
    checker.feed(text)
    assert not checker.faults, checker.faults[:3]
    assert not checker.open
    assert len(set(checker.ids)) == len(checker.ids), "identifiers repeat"
    return checker


def test_the_page_loads_nothing_and_is_well_formed(page):
    checker = checked(page)
    assert all(target.startswith(("#", "data:")) for target in checker.targets)
    assert not re.search(r"@import|url\((?!#)", page)
    assert "<script" not in page
    assert {target[1:] for target in checker.targets if target.startswith("#")} <= set(checker.ids), "a link leads nowhere"


def test_a_long_run_stays_below_two_megabytes(runs, tmp_path):
    folder = tmp_path / "long"
    folder.mkdir()
    for name in ("config.yaml", "samples.jsonl", "mask_tokens.jsonl", "evaluations.jsonl"):
        (folder / name).write_bytes((runs[0] / name).read_bytes())
    rows = list(Table(runs[0] / "metrics.jsonl").rows())
    table = Table(folder / "metrics.jsonl", durable=False)
    for step in range(1, 3001):
        table.append({**rows[step % len(rows)], "step": step})
    out = build([folder], folder / "report.html")
    assert out.stat().st_size < 1_000_000


def test_responses_and_prompts_are_escaped(page):
    assert "alert(&#39;no&#39;)" in page
    assert "<script>alert" not in page


def test_every_section_of_the_paper_is_there(page):
    for text in (
        "Variance restored",
        "Policy entropy",
        "Response length",
        "Positions above the threshold",
        "Variance the second wave adds",
        "Accuracy of each wave",
        "The signal the second wave recovers",
        "The masked positions",
        "What the update sees",
        "The cost of a step",
        "The mask against luck",
        "Tokens the mask removes",
        "Tokens drawn in their place",
        "Example rollouts",
        "Before and after training",
        "config.yaml",
    ):
        assert text in page, text


def test_charts_use_the_page_colours_and_real_text(page):
    drawn = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    assert len(drawn) >= 12
    for svg in drawn:
        assert not re.search(r"(fill|stroke): #", svg), "a colour that ignores the theme"
        assert "var(--series-" in svg
        assert "<text" in svg
        assert "training step" in svg
    assert "prefers-color-scheme: dark" in page
    assert "@media print" in page


def test_masked_positions_are_marked_with_what_was_removed(page):
    assert re.search(
        r'<mark title="position \d+: removed &ldquo;[^"]*&rdquo; \(p\* = 0\.9\d+\), drew (rank \d|a token outside the top 8)">', page
    )


def test_comparison_overlays_runs_and_shows_their_gap(runs, tmp_path):
    out = tmp_path / "comparison.html"
    report([runs[1], runs[0]], out)
    text = out.read_text()
    checked(text)
    assert "plain: accuracy" in text
    assert "cge: accuracy" in text
    assert "cge minus plain, after" in text
    assert "difference" in text
    report([runs[0]])
    assert (runs[0] / "report.html").exists()


def test_runs_of_one_name_are_told_apart_by_folder(runs, tmp_path):
    text = build([runs[0], runs[0]], tmp_path / "x.html").read_text()
    assert str(runs[0]) in text


@pytest.mark.parametrize(
    "missing", ["metrics.jsonl", "evaluations.jsonl", "samples.jsonl", "mask_tokens.jsonl", "about.json", "outcome.json", "config.yaml"]
)
def test_a_missing_file_leaves_the_rest(runs, tmp_path, missing):
    for path in runs[0].iterdir():
        if path.is_file() and path.name not in (missing, "report.html"):
            (tmp_path / path.name).write_bytes(path.read_bytes())
    checked(build([tmp_path], tmp_path / "report.html").read_text())


def test_a_run_before_its_first_step(tmp_path):
    journal = Journal(synthetic_config(tmp_path, "fresh", 10), 10, quiet=True)
    journal.start()
    text = build([journal.folder], tmp_path / "report.html").read_text()
    checked(text)
    assert "No training step is on record yet" in text
    assert "0 of 10 steps are on record" in text


def test_a_killed_run_with_one_step_and_torn_lines(tmp_path):
    journal = Journal(config(tmp_path), 10, quiet=True)
    journal.start()
    journal.log_evaluation(0, evaluation(np.random.default_rng(0), "before", 0.3, questions=5))
    journal.log(1, {}, [group([0, 0], [1, 0])], lambda tokens: "x" * len(tokens))
    for name in ("metrics", "samples", "evaluations"):
        with open(journal.folder / f"{name}.jsonl", "a") as file:
            file.write('{"step": 2, "po')
    text = build([journal.folder], tmp_path / "report.html").read_text()
    checked(text)
    assert "not finished: 1 of 100 steps" in text
    assert "before training" in text


def test_a_summary_evaluation_without_questions_still_shows(tmp_path):
    journal = Journal(config(tmp_path), 10, quiet=True)
    journal.start()
    for step, accuracy in ((0, 0.25), (10, 0.5)):
        summary = {"name": "held_out", "questions": 64, "mean_accuracy": accuracy, "by_hops": {"2": {"mean_accuracy": 0.75}, "3": 0.125}}
        journal.log_evaluation(step, summary)
    sheet = scores.evaluations([read_run(journal.folder)])
    texts = [cell.text for line in sheet.lines[1:4] for cell in line.cells]
    assert texts == ["0.250", "0.500", "+0.250", "0.750", "0.750", "+0.000", "0.125", "0.125", "+0.000"]


def test_not_a_run_folder_is_one_clear_line(tmp_path):
    with pytest.raises(JournalError, match=r"is not a run folder \(it has neither config\.yaml nor metrics\.jsonl\)$"):
        build([tmp_path / "nothing"], tmp_path / "report.html")
    with pytest.raises(JournalError, match="at least one run"):
        build([], tmp_path / "report.html")


def test_halves_are_pooled_over_groups_not_averaged_over_steps(tmp_path):
    journal = Journal(config(tmp_path), 4, quiet=True)
    journal.start()
    cracked, hopeless = group([0, 0], [1, 0]), group([0, 0], [0, 0])
    for step, groups in enumerate(([cracked], [hopeless] * 3, [cracked] * 2, [hopeless] * 2), start=1):
        journal.log(step, {}, groups)
    run = read_run(journal.folder)
    early, later, whole = (run.rate("cge/restored", part) for part in run.halves)
    assert ((early.count, early.total), (later.count, later.total), (whole.count, whole.total)) == ((1, 4), (2, 4), (3, 8))
    line = next(line for line in tables.signal([run]).lines if line.label == "variance restored")
    assert [cell.text for cell in line.cells] == ["0.250", "0.500"]
    assert line.cells[0].detail.startswith("1/4, ")


def test_the_verdict_tells_a_small_run_from_a_clear_one(tmp_path):
    journal = Journal(config(tmp_path), 1, quiet=True)
    journal.start()
    cracked, hopeless = group([0, 0], [1, 0]), group([0, 0], [0, 0])
    lucky, unlucky = group([0, 0], [1, 0], "control"), group([0, 0], [0, 0], "control")
    journal.log(1, {}, [cracked, hopeless, lucky, unlucky, unlucky])
    assert "cannot tell the mask from luck" in tables.verdict(read_run(journal.folder))
    journal.log(2, {}, [cracked] * 60 + [hopeless] * 40 + [lucky] * 5 + [unlucky] * 95)
    assert "the mask's own share is +0.54" in tables.verdict(read_run(journal.folder))


def test_intervals_by_known_numbers():
    assert wilson(15, 100) == pytest.approx((0.0931, 0.2328), abs=5e-5)
    assert wilson(0, 10) == pytest.approx((0.0, 0.2775), abs=5e-5)
    assert wilson(0, 0) == (0, 1)
    assert rate_difference(56, 70, 48, 80) == pytest.approx((0.0524, 0.3339), abs=5e-5)  # Newcombe 1998, method 10, example (a)
    values = np.linspace(0, 1, 101)
    low, high = bootstrap_mean(values.tolist())
    spread = values.std() / np.sqrt(101)
    assert (low, high) == pytest.approx((0.5 - 1.96 * spread, 0.5 + 1.96 * spread), abs=5e-3)
    assert bootstrap_mean(values.tolist()) == (low, high), "the same on every run"
    assert mean_interval([1.0] * 10) == wilson(10, 10), "a bootstrap of equal values would claim certainty"


def test_moving_sums_shrink_at_the_ends_and_skip_gaps():
    assert charts.moving(np.array([1.0, np.nan, 3.0, 4.0]), 3).tolist() == [1, 4, 7, 7]
    assert [charts.window_of(steps) for steps in (5, 12, 90, 200)] == [1, 3, 7, 17]


def test_the_same_run_gives_the_same_charts(runs, tmp_path):
    pages = [build([runs[0]], tmp_path / f"{number}.html").read_text() for number in range(2)]
    assert len({re.sub(r"Written [^.]*\.", "", text) for text in pages}) == 1


def test_pictures_are_embedded_small_and_missing_ones_are_named(tmp_path):
    from dataclasses import replace

    from PIL import Image

    from headrace.records import Media

    Image.effect_noise((800, 600), 50).save(tmp_path / "there.png")
    made = group([0, 0], [1, 0])
    media = tuple(Media("image", str(tmp_path / name)) for name in ("there.png", "gone.png"))
    question = replace(made.prompt.question, media=media)
    journal = Journal(config(tmp_path), 1, quiet=True)
    journal.start()
    journal.log(1, {}, [replace(made, prompt=replace(made.prompt, question=question))], lambda tokens: "x" * len(tokens))
    text = build([journal.folder], tmp_path / "report.html").read_text()
    assert text.count("data:image/webp;base64,") == 1
    assert "gone.png" in text
    assert len(text) < 400_000
