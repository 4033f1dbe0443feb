"""Whole runs in this process: what a user embeds, and every fault a user meets; each gives one clear line."""

import asyncio
import json
import math
import os
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import headrace
from headrace.config import Config, ConfigError
from headrace.records import Question
from tests import runs

BARE = """
run: {name: bare, seed: 1, steps: 2, questions_per_step: 2}
model: {source: {kind: scratch_text, hidden: 32, layers: 1, heads: 2}}
questions: {train: {kind: multi_hop, hops: [1], objects: 2, max_value: 3, count: 8}}
sampling: {group_size: 4, max_tokens: 6, cge: {threshold: 0.9, token_filter: none}}
reward: {contract: answer_tag}
journal: {tensorboard: false}
"""


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def bare(tmp_path: Path, cache: Path) -> Callable[..., Config]:
    """The smallest run, without a warm start; takes overrides."""
    path = runs.write_config(tmp_path, cache, BARE)
    return lambda *overrides: headrace.load_config(path, overrides)


def by_chance(question: Question, text: str) -> float:
    """A reward with variance, whatever an untrained policy says."""
    return float(zlib.crc32(text.encode()) % 2)


def metrics(config: Config) -> list[dict[str, Any]]:
    return runs.rows(config.run_folder / "metrics.jsonl")


def samples(config: Config) -> list[dict[str, Any]]:
    return runs.rows(config.run_folder / "samples.jsonl")


def test_embedding_with_an_own_reward(bare: Callable[..., Config]) -> None:
    config = bare()
    result = headrace.Trainer(config, reward=by_chance).train()
    assert result.step == 2
    assert result.report == config.run_folder / "report.html"
    rows = metrics(config)
    assert [row["step"] for row in rows] == [1, 2]
    assert any(row["grad_norm"] > 0 for row in rows)
    assert all(row["questions/trained"] == 2 for row in rows)


def test_training_inside_an_event_loop(bare: Callable[..., Config]) -> None:
    """A notebook runs one already."""

    async def cell() -> headrace.TrainResult:
        return headrace.Trainer(bare("run.steps=1"), reward=by_chance).train()

    assert asyncio.run(cell()).step == 1


def test_own_questions(bare: Callable[..., Config]) -> None:
    questions = [Question(id=f"own{i}", messages=({"role": "user", "content": "ball > cone"},), answer="1") for i in range(3)]
    config = bare("run.steps=3")
    headrace.Trainer(config, reward=by_chance, questions=questions).train()
    seen = {row["question"] for row in samples(config)}
    assert seen <= {"own0", "own1", "own2"}
    assert len(seen) >= 2


def test_the_exported_model_loads_in_transformers(bare: Callable[..., Config]) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    config = bare()
    headrace.Trainer(config, reward=by_chance).train()
    folder = config.run_folder / "model"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert model(**tokenizer("ball > cone", return_tensors="pt")).logits.isfinite().all()


def test_an_unmasked_second_wave_is_the_parents(bare: Callable[..., Config]) -> None:
    """With every triggered group in the control arm the draws are those of plain GRPO; numbers differ by rounding alone,
    since the waves are drawn in batches of other sizes."""
    control = bare("run.name=control", "sampling.cge.control_share=1.0", "journal.samples_per_step=9")
    plain = bare("run.name=plain", "sampling.cge=null", "journal.samples_per_step=9")
    for config in (control, plain):
        headrace.Trainer(config, reward=by_chance).train()
    drawn = [
        {(row["step"], row["question"], rollout["index"]): rollout["pieces"] for row in samples(config) for rollout in row["rollouts"]}
        for config in (control, plain)
    ]
    assert drawn[0] == drawn[1]
    for key in ("loss", "grad_norm", "reward/mean", "policy/entropy", "len/mean"):
        assert [row[key] for row in metrics(control)] == pytest.approx([row[key] for row in metrics(plain)], abs=1e-6), key


# ------------------------------------------------------------------------------------------------------ faults


def test_nan_reward_is_counted_and_leaves_the_group(bare: Callable[..., Config]) -> None:
    calls = iter(range(10**6))

    def reward(question: Question, text: str) -> float:
        return math.nan if next(calls) % 4 == 0 else float(len(text) % 2)

    config = bare("reward.workers=0")
    headrace.Trainer(config, reward=reward).train()
    assert sum(row["reward/failed_non_finite_n"] for row in metrics(config)) == 4
    assert all(np.isfinite(row["loss"]) for row in metrics(config) if "loss" in row)


def test_rewards_that_all_fail_leave_an_empty_batch(bare: Callable[..., Config]) -> None:
    def reward(question: Question, text: str) -> float:
        raise RuntimeError("the verifier is down")

    config = bare()
    headrace.Trainer(config, reward=reward).train()
    assert [row["questions/unscored"] for row in metrics(config)] == [2, 2]
    assert all("loss" not in row for row in metrics(config))


def test_failing_reward_stops_when_asked_to(bare: Callable[..., Config]) -> None:
    with pytest.raises(ValueError, match=r"multi_hop/train/\d+.*on_failure"):
        headrace.Trainer(bare("reward.on_failure=stop"), reward=lambda question, text: math.inf).train()


def test_all_filtered_batch_is_skipped_and_counted(bare: Callable[..., Config]) -> None:
    config = bare("dynamic_sampling.max_rounds=2", "run.steps=1")
    headrace.Trainer(config, reward=lambda question, text: 0.0).train()
    (row,) = metrics(config)
    assert row["questions/no_variance"] == 4
    assert row["learner/empty_batches"] == 1


def test_dynamic_sampling_fills_the_batch(bare: Callable[..., Config]) -> None:
    config = bare("dynamic_sampling.max_rounds=8", "run.steps=1", "journal.samples_per_step=99")
    headrace.Trainer(config, reward=by_chance).train()
    (row,) = metrics(config)
    assert row["questions/trained"] == 2
    kept = [group for group in samples(config) if len({rollout["reward"]["accuracy"] for rollout in group["rollouts"]}) > 1]
    assert len(kept) >= 2


def test_responses_of_one_token(bare: Callable[..., Config]) -> None:
    """Responses of one token: the shortest there are, since whatever ends a response is part of it."""
    config = bare("sampling.max_tokens=1")
    assert headrace.Trainer(config, reward=by_chance).train().step == 2


def test_another_configuration_does_not_go_on_in_the_same_folder(bare: Callable[..., Config]) -> None:
    headrace.Trainer(bare(), reward=by_chance).train()
    with pytest.raises(ConfigError, match=r"optimizer\.learning_rate = 1e-06.*0\.5.*--fresh"):
        headrace.Trainer(bare("optimizer.learning_rate=0.5"), reward=by_chance).train()
    assert headrace.Trainer(bare("run.steps=3"), reward=by_chance).train().step == 3
    assert headrace.Trainer(bare("optimizer.learning_rate=0.5"), reward=by_chance, fresh=True).train().step == 2


def test_checkpoint_of_another_model(bare: Callable[..., Config]) -> None:
    import shutil

    small, large = bare("run.name=small"), bare("run.name=large", "model.source.hidden=64", "run.steps=0")
    headrace.Trainer(small, reward=by_chance).train()
    headrace.Trainer(large, reward=by_chance).train()
    shutil.rmtree(large.run_folder / "checkpoints", ignore_errors=True)
    shutil.copytree(small.run_folder / "checkpoints", large.run_folder / "checkpoints")
    with pytest.raises(ValueError, match=r"belongs to another model: .* is \[\d+, 64\]") as caught:
        headrace.Trainer(large, reward=by_chance).train()
    assert "\n" not in str(caught.value)


def test_non_finite_loss_stops_before_the_step(bare: Callable[..., Config]) -> None:
    config = bare("optimizer.learning_rate=1.0e30", "optimizer.clip_norm=1.0e30", "run.steps=4")
    with pytest.raises(ValueError, match=r"not finite|no finite logit|non-finite|finite") as caught:
        headrace.Trainer(config, reward=by_chance).train()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ('{"question": "a"}', "answer"),
        ("{broken", "JSON"),
        ('{"question": "ball", "answer": "1", "images": ["nowhere.png"]}', "nowhere.png"),
    ],
)
def test_malformed_rows_stop_with_file_and_line(bare: Callable[..., Config], tmp_path: Path, row: str, words: str) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_text('{"question": "ball > cone", "answer": "1"}\n' + row + "\n")
    source = json.dumps({"kind": "rows", "path": str(data), "bad_rows": "stop"})
    with pytest.raises(ValueError, match=r"rows\.jsonl:2") as caught:
        headrace.Trainer(bare(f"questions.train={source}")).train()
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_rows_that_cannot_be_encoded_are_left_out_or_stop_the_run(bare: Callable[..., Config], tmp_path: Path) -> None:
    """A prompt that is too long shows when it is encoded; train and held-out rows go by their `bad_rows`."""
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps({"id": i, "question": "ball " * (1 + 90 * (i == 1)), "answer": "1"}) + "\n" for i in range(3)))
    questions = [Question(id=f"own{i}", messages=({"role": "user", "content": "ball"},), answer="1") for i in range(3)]
    short = ("questions.max_prompt_tokens=50", "evaluation.samples=1", "run.steps=1")
    skip, stop = (json.dumps({"kind": "rows", "path": str(data), "bad_rows": kind}) for kind in ("skip", "stop"))
    result = headrace.Trainer(bare(f"questions.held_out={skip}", *short), reward=by_chance, questions=questions).train()
    assert [row["questions"] for row in result.evaluations] == [2, 2]
    with pytest.raises(ValueError, match=r"question 1: the prompt has \d+ tokens"):
        headrace.Trainer(bare(f"questions.held_out={stop}", "run.name=held", *short), reward=by_chance, questions=questions).train()


def test_a_task_scorer_is_not_lent_to_other_questions(bare: Callable[..., Config]) -> None:
    with pytest.raises(ConfigError, match=r"questions\.train has no scorer"):
        headrace.Trainer(bare("reward.verifier=task")).train()


# ------------------------------------------------------------------------------------------------------ the command line


def command(*arguments: str, **kwargs: Any) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, "-m", "headrace", *arguments], capture_output=True, text=True, **kwargs)


def test_export_writes_the_newest_checkpoint(bare: Callable[..., Config], tmp_path: Path) -> None:
    config = bare()
    headrace.Trainer(config, reward=by_chance).train()
    done = command("export", str(config.run_folder), str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr
    assert "step 2" in done.stdout
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (config.run_folder / "model" / "model.safetensors").read_bytes()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").touch()
    refused = command("export", str(config.run_folder), str(tmp_path / "mine"))
    assert refused.returncode == 1
    assert "no model directory" in refused.stderr
    assert (tmp_path / "mine" / "thesis.txt").exists()


def test_faults_are_one_line_and_status_1(tmp_path: Path, cache: Path) -> None:
    path = runs.write_config(tmp_path, cache, BARE)
    done = command("train", str(path), "sampling.grop_size=3")
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "sampling.grop_size" in done.stderr


@pytest.mark.skipif(os.geteuid() == 0 and not Path("/proc/self").exists(), reason="needs a folder that cannot be written")
def test_unwritable_run_folder(bare: Callable[..., Config]) -> None:
    with pytest.raises((ValueError, OSError), match="/proc/headrace"):
        headrace.Trainer(bare("run.folder=/proc/headrace"), reward=by_chance).train()


def test_full_disk_at_a_checkpoint(tmp_path: Path, cache: Path) -> None:
    """A file-size limit stands in for a full disk: the run stops with one line and what was saved stays whole."""
    path = runs.write_config(tmp_path, cache, BARE)
    assert command("train", str(path), "run.steps=1").returncode == 0
    limited = f"ulimit -f 8; exec {sys.executable} -m headrace train {path} run.steps=3"
    done = subprocess.run(["bash", "-c", limited], capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("headrace:")]
    assert len(lines) == 1
    assert "cannot be written" in lines[0], done.stderr
    assert command("train", str(path), "run.steps=3").returncode == 0
