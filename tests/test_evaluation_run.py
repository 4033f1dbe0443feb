"""``headrace eval``: resumable, refuses to mix settings, compares question by question, writes JSON and a page."""

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.config import ConfigError, MultiHopSource, ScratchTextModel
from headrace.evaluation import page as evaluation_page
from headrace.evaluation import run as evaluation_run
from headrace.evaluation.job import prepare
from headrace.evaluation.measure import pass_at, sizes
from headrace.evaluation.run import Results, run
from headrace.policy.sources import materialise
from headrace.questions.tasks.multi_hop import MultiHop

SOURCE = MultiHopSource(kind="multi_hop", hops=(1, 2), objects=2, max_value=4, count=12)
FEW = ("sampling.max_tokens=6", "evaluation.samples=3", "reward.contract=answer_tag")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    words = MultiHop(SOURCE, 0, "train").vocabulary()
    source = ScratchTextModel(kind="scratch_text", hidden=16, layers=1, heads=2)
    return materialise(source, tmp_path_factory.mktemp("cache"), 0, words)


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "bench.jsonl"
    task = MultiHop(SOURCE, 0, "train")
    asked = [task.question(index) for index in range(12)]
    path.write_text(
        "".join(
            json.dumps({"id": each.id, "question": each.messages[0]["content"], "answer": each.answer, "extra_info": extra(index)}) + "\n"
            for index, each in enumerate(asked)
        )
    )
    return path


def extra(index: int) -> dict[str, Any]:
    return {"hops": 1 + index % 2, "hop_types": ["order", "order"] if index % 3 else ["order", "count"]}


def test_pass_at_k() -> None:
    assert pass_at(0, 8, 4) == 0
    assert pass_at(1, 8, 1) == pytest.approx(1 / 8)
    assert pass_at(2, 4, 2) == pytest.approx(1 - 1 / 6)
    assert pass_at(5, 8, 4) == 1
    assert (sizes(8), sizes(6), sizes(1)) == ([1, 2, 4, 8], [1, 2, 4, 6], [1])


def test_results_are_written_and_gone_on_with(model: Path, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    plain = evaluation_run.answer

    async def counted(prompts: Any, *rest: Any, **options: Any) -> Any:
        calls.extend(prompt.question.id for prompt in prompts)
        return await plain(prompts, *rest, **options)

    monkeypatch.setattr(evaluation_run, "answer", counted)
    out = tmp_path / "out"
    first = run(prepare(model, rows, overrides=[*FEW, "sampling.batch_rows=8"], limit=5, out=out))
    assert (len(first.rows), len(calls)) == (5, 5)
    with (out / "rows.jsonl").open("a") as file:
        file.write('{"id": "torn')
    whole = run(prepare(model, rows, overrides=FEW, out=out))
    assert (len(whole.rows), len(calls)) == (12, 12)
    assert [row["id"] for row in whole.rows] == [json.loads(line)["id"] for line in rows.read_text().splitlines()]
    assert whole.rows[:5] == first.rows
    undisturbed = run(prepare(model, rows, overrides=FEW, out=tmp_path / "other"))
    assert undisturbed.rows == whole.rows
    data, page = evaluation_page.write(whole)
    found = json.loads(data.read_text())
    assert found["questions"] == 12
    assert set(found["by_hops"]) == {"1", "2"}
    assert {name: part["questions"] for name, part in found["by_types"].items()} == {"count": 4, "order": 12}
    assert all(low <= found[key] <= high for key, (low, high) in found["intervals"].items() if key in found)
    html = page.read_text()
    assert "By hop type" in html
    assert "pass@3" in html
    assert "<script" not in html


def test_other_settings_are_refused_and_fresh_starts_over(model: Path, rows: Path, tmp_path: Path) -> None:
    run(prepare(model, rows, overrides=FEW, limit=2, out=tmp_path / "out"))
    other = prepare(model, rows, overrides=[*FEW, "evaluation.temperature=0.5"], limit=2, out=tmp_path / "out")
    with pytest.raises(ConfigError, match=r"another temperature \(1\.0, now 0\.5\)"):
        run(other)
    assert len(run(other, fresh=True).rows) == 2
    rows.write_text(rows.read_text().replace("order", "place"))
    with pytest.raises(ConfigError, match="another rows"):
        run(other)


def results(job: Any, right: dict[str, list[int]], greedy: int = 1) -> Results:
    rows = [
        {
            "id": name, "source": "s", "hops": None, "types": [], "greedy": greedy, "samples": samples, "maj": int(sum(samples) > 2),
            "format": 1.0, "length": 5.0, "clipped": 0.0, "responses": ["a <b>", "c"],
        }
        for name, samples in right.items()
    ]  # fmt: skip
    return Results(job, rows)


def test_two_checkpoints_are_compared_on_the_questions_that_both_answered(model: Path, rows: Path, tmp_path: Path) -> None:
    job = prepare(model, rows, overrides=FEW, out=tmp_path / "out")
    job.folder.mkdir()
    old = results(job, {f"q{n}": [0, 0, 1, 1] for n in range(20)}, greedy=0)
    new = results(job, {f"q{n}": [0, 1, 1, 1] for n in range(10, 40)})
    tests = evaluation_page.comparisons(old, new)
    assert (tests["mean_accuracy"].questions, tests["mean_accuracy"].difference) == (10, 0.25)
    assert tests["mean_accuracy"].p_value == 2 / 2**10
    assert (tests["greedy_accuracy"].test, tests["greedy_accuracy"].better) == ("McNemar, exact", 10)
    data, page = evaluation_page.write(new, old)
    assert json.loads(data.read_text())["difference"]["maj_accuracy"]["better"] == 10
    html = page.read_text()
    assert "is better" in html
    assert "a &lt;b&gt;" in html
    with pytest.raises(ValueError, match="no question in common"):
        evaluation_page.comparisons(old, results(job, {"z": [1, 1, 1, 1]}))


def test_long_prompts_leave_less_room(model: Path, rows: Path, tmp_path: Path) -> None:
    """Register 12: max_new = min(limit, context - prompt)."""
    job = prepare(model, rows, overrides=[*FEW, "evaluation.context=20"], limit=4, out=tmp_path / "out")
    lengths = [row["length"] for row in run(job).rows]
    assert max(lengths) <= 6
    assert min(lengths) < 6  # prompts have 13 to 20 tokens and more


def test_what_is_no_checkpoint_or_data_set_is_named(model: Path, rows: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="neither a model directory"):
        prepare(tmp_path, rows)
    with pytest.raises(ConfigError, match="there is no such file"):
        prepare(model, rows, config=tmp_path / "none.yaml")
    (tmp_path / "empty.yaml").write_text("sampling: {max_tokens: 4}")
    with pytest.raises(ConfigError, match=r"questions\.held_out is empty"):
        prepare(model, tmp_path / "empty.yaml")
    with pytest.raises(ValueError, match=r"gone\.jsonl: cannot be read"):
        run(prepare(model, tmp_path / "gone.jsonl", out=tmp_path / "out"))


def test_settings_come_from_the_run_folder_and_questions_from_a_configuration(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "config.yaml").write_text(
        "run: {seed: 5}\nmodel: {source: {kind: scratch_text}, dtype: bfloat16}\nsampling: {max_tokens: 7, cge: {}}\n"
        "questions: {system_prompt: hello, train: {kind: multi_hop}}\nhsr: {}\n"
    )
    with pytest.raises(ConfigError, match="neither a model nor a checkpoint yet"):
        prepare(folder, _held_out(tmp_path))
    (folder / "model").symlink_to(model)
    job = prepare(folder, _held_out(tmp_path))
    assert (job.config.sampling.max_tokens, job.config.sampling.cge, job.config.hsr, job.config.model.dtype) == (7, None, None, "bfloat16")
    assert (job.config.run.seed, job.config.questions.system_prompt) == (9, "hello")  # generated questions keep their own seed
    assert job.directory == folder / "model"
    assert job.config.questions.held_out is not None


def _held_out(folder: Path) -> Path:
    path = folder / "other.yaml"
    path.write_text("run: {seed: 9}\nquestions: {held_out: {kind: multi_hop, hops: [1]}}\n")
    return path
