"""Whole runs with credit rules: claims reach the learner, an open gate is the parent to the bit; the papers' files state their numbers."""

import asyncio
import re
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

import headrace
from headrace.assembly import assemble
from headrace.config import Config, ConfigError, load_config
from headrace.policy.parallel import Parallel
from headrace.records import Question
from tests import runs

pytest.importorskip("easy_vqa")

CONFIGS = Path(__file__).parents[1] / "configs"
BARE = """
run: {name: bare, seed: 1, steps: 2, questions_per_step: 2}
model: {source: {kind: scratch_vision, hidden: 32, layers: 1, heads: 1, vision_hidden: 32, vision_layers: 1}}
questions: {train: {kind: easy_vqa, hops: [1], count: 8}}
sampling: {group_size: 4, max_tokens: 8}
learner: {updates_per_batch: 2}
journal: {tensorboard: false}
credit: {pacg: {router: {kind: rules, patterns: ['([a-z]+) [a-z0-9:;?=]+ [a-z0-9:;?=]+']}}}
"""
PAPER_003 = {
    "credit.pacg.margin": 0.05,
    "credit.pacg.alpha": 10.0,
    "credit.pacg.floor": 0.30,
    "credit.pacg.form": "A",
    "credit.pacg.claims": "routed",
    "credit.pacg.calibrate": True,
    "credit.pacg.positive_only": True,
    "credit.pacg.router.model": "Qwen3.6-35B-A3B",
    "credit.intervention": "patches",
    "loss.clip_low": 0.2,
    "loss.clip_high": 0.28,
    "loss.kl_coef": 0.01,
    "loss.surprisal_coef": 0.1,
    "loss.entropy_coef": 0.0,
    "loss.normalisation": "token_mean",
    "model.train_vision": True,
    "reward.contract": "boxed",
    "reward.format_term": False,
    "evaluation.samples": 8,
    "evaluation.temperature": 1.0,
    "run.steps": 200,
    "dynamic_sampling.max_rounds": 20,
    "schedule.staleness": 0.0,
}
VPPO_CODE = {
    "credit.vppo.fraction": 0.4,
    "credit.vppo.scale_floor": 0.9,
    "optimizer.learning_rate": 1e-6,
    "sampling.group_size": 8,
    "questions.max_prompt_tokens": 4096,
    "sampling.max_tokens": 2048,
}


def by_chance(question: Question, text: str) -> float:
    """A reward with variance, whatever an untrained policy says."""
    return float(zlib.crc32(text.encode()) % 2)


@pytest.fixture
def bare(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Config]:
    path = runs.write_config(tmp_path, tmp_path_factory.getbasetemp() / "credit_cache", BARE)
    return lambda *overrides: load_config(path, overrides)


def trained(config: Config) -> tuple[list[dict[str, Any]], bytes]:
    headrace.Trainer(config, reward=by_chance).train()
    return runs.rows(config.run_folder / "metrics.jsonl"), (config.run_folder / "model" / "model.safetensors").read_bytes()


def test_claims_and_gates_reach_the_update(bare: Callable[..., Config]) -> None:
    rows, gated = trained(bare())
    for row in rows:
        assert row["router/spans"] > 0
        assert row["router/unaligned_spans"] == 0
        assert row["pacg/routed_rollouts"] == 1
        assert row["learner/scored_rows"] > 0
        assert row["pacg/retention"] < 1
        assert row["pacg/positive_update_mass"] > 0
        assert {"time/counterfactual", "time/router_wait"} <= row.keys()
    parent_rows, parent = trained(bare("run.name=parent", "credit.pacg=null"))
    assert not any(name.startswith(("pacg/", "router/")) for row in parent_rows for name in row)
    assert parent_rows[0]["reward/mean"] == rows[0]["reward/mean"]  # the same batch
    assert gated != parent
    page = (bare().run_folder / "report.html").read_text(encoding="utf-8")
    assert 'id="credit"' in page


@pytest.mark.parametrize("engine", ["local", "vllm"])
def test_the_learner_has_the_rules_whatever_draws(bare: Callable[..., Config], monkeypatch: pytest.MonkeyPatch, engine: str) -> None:
    async def nothing_started(*_: object) -> tuple[None, None]:
        return None, None

    async def rules() -> list[str]:
        async with assemble(bare(f"engine.kind={engine}", "credit.vppo={}"), Parallel(), None, None, fresh=False) as parts:
            return [type(rule).__name__ for rule in parts.learner.rules]

    monkeypatch.setattr("headrace.rollout.start.start_remote", nothing_started)
    assert asyncio.run(rules()) == ["VPPO", "PACG"]


@pytest.mark.parametrize("parent", [(), ("credit.vppo={}", "loss.surprisal_coef=0.1")])
def test_an_open_gate_is_the_parent_to_the_bit(bare: Callable[..., Config], parent: tuple[str, ...]) -> None:
    rows, ours = trained(bare("credit.pacg.alpha=0", *parent))
    alone, theirs = trained(bare("run.name=parent", "credit.pacg=null", *parent))
    assert ours == theirs
    for one, two in zip(alone, rows, strict=True):
        same = [name for name in one if not name.startswith(("time/", "machine/", "learner/scored_rows"))]
        assert {name: one[name] for name in same} == {name: two[name] for name in same}


# ------------------------------------------------------------------------------------------------------ configuration


def stated(config: Config, names: dict[str, Any]) -> dict[str, Any]:
    found = {}
    for dotted in names:
        value: Any = config
        for name in dotted.split("."):
            value = getattr(value, name)
        found[dotted] = value
    return found


@pytest.mark.parametrize("name", ["pacg_qwen25vl_7b", "pacg_qwen3vl_2b"])
def test_the_papers_runs_state_the_papers_numbers(name: str) -> None:
    config = load_config(CONFIGS / f"{name}.yaml", ["credit.vppo={}"])
    assert stated(config, PAPER_003) == PAPER_003
    assert (config.run.questions_per_step, config.run.questions_per_step / config.learner.updates_per_batch) == (384, 128)
    expected = VPPO_CODE | ({"sampling.max_tokens": 8192} if "2b" in name else {})
    assert stated(config, expected) == expected


def test_every_row_that_the_papers_file_names_loads() -> None:
    path = CONFIGS / "pacg_qwen25vl_7b.yaml"
    named = re.findall(r"^#   \S.*?  +(\S+=.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(named) == 7
    for line in named:
        config = load_config(path, line.split())
        for override in line.split():
            dotted, value = override.split("=")
            wanted = yaml.safe_load(value)
            if wanted != {}:
                assert stated(config, {dotted: wanted}) == {dotted: wanted}


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["credit.pacg.router=null"], ["credit.pacg", "claims = routed"]),
        (["credit.pacg.claims=every_token"], ["credit.pacg", "takes none"]),
        (["credit.pacg.floor=1.5"], ["credit.pacg.floor"]),
        (["credit.pacg.form=D"], ["credit.pacg.form"]),
        (["credit.pacg.router.patterns=['(']"], ["patterns", "no regular expression"]),
        (["credit.pacg.router.patterns=[]"], ["patterns"]),
        (["credit.pacg.router={kind: server, url: 'ftp://x', model: m}"], ["router.server.url"]),
        (["credit.vppo={fraction: 0}"], ["credit.vppo.fraction"]),
        (["credit.intervention=crop"], ["credit.intervention"]),
        (["loss.entropy_coef=0.01", "loss.surprisal_coef=0.1"], ["loss", "set one of the two"]),
    ],
)
def test_faults_name_the_field(bare: Callable[..., Config], overrides: list[str], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        bare(*overrides)
    assert all(word in str(caught.value) for word in words), caught.value
