"""Each check tells a good machine, build or model from a bad one."""

import json
import shutil
import socket
from collections import namedtuple
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from headrace.cli import app
from headrace.config import Config, ScratchTextModel, ScratchVisionModel, load_config
from headrace.doctor import examine, machine, model, software
from headrace.doctor.check import Check
from headrace.policy.scratch import build_text, build_vision

WORDS = ["a", "b", "1", "2"]
Usage = namedtuple("Usage", "total used free")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "text"
    build_text(folder, ScratchTextModel(kind="scratch_text", hidden=16, layers=1, heads=2), WORDS, 0)
    return folder


def config_of(directory: Path, tmp_path: Path, *overrides: str) -> Config:
    path = tmp_path / "run.yaml"
    path.write_text(
        f"run: {{folder: {tmp_path}}}\nmodel: {{source: {{kind: directory, path: {directory}}}}}\n"
        "questions: {max_prompt_tokens: 64}\nsampling: {max_tokens: 64}\n"
    )
    return load_config(path, overrides)


def states(checks: list[Check]) -> dict[str, str]:
    return {check.name: check.state for check in checks}


def test_a_good_model_passes(directory: Path, tmp_path: Path) -> None:
    checks = list(model.configured(config_of(directory, tmp_path, "engine={kind: vllm, tensor_parallel: 2}")))
    assert set(states(checks).values()) == {"ok"}, checks
    assert {"model", "context", "checkpoints", "think tags", "vision", "spare rows", "tensor parallel"} == set(states(checks))


@pytest.mark.parametrize(
    ("overrides", "name", "words"),
    [
        (["sampling.max_tokens=4096"], "context", "prompt 64 + response 4,096 = 4,160 of 2,048 positions"),
        (["engine={kind: vllm, tensor_parallel: 3}"], "tensor parallel", "2 attention heads on 3 GPUs"),
        (["engine={kind: vllm, tensor_parallel: 2, rollout_ranks: 3}"], "topology", "3 rollout ranks"),
        (["questions.train={kind: rows, path: nowhere.jsonl}"], "questions.train", "nowhere.jsonl"),
        (["model.source.path=nowhere"], "model", "no config.json"),
    ],
)
def test_what_a_run_lacks_is_named(directory: Path, tmp_path: Path, overrides: list[str], name: str, words: str) -> None:
    checks = list(model.configured(config_of(directory, tmp_path, *overrides)))
    (found,) = [check for check in checks if check.name == name]
    assert (found.state, words in found.found) == ("fail", True), found
    assert found.advice


def test_missing_shards_are_counted(directory: Path, tmp_path: Path) -> None:
    broken = shutil.copytree(directory, tmp_path / "broken")
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors", "c": "model.safetensors"}}
    (broken / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "2 of 3 files are missing, model-1.safetensors first" in model.weights(broken).found
    assert model.weights(broken).state == "fail"


def test_tags_that_must_be_added_are_a_warning(directory: Path, tmp_path: Path) -> None:
    bare = shutil.copytree(directory, tmp_path / "bare")
    state = json.loads((bare / "tokenizer.json").read_text())
    state["added_tokens"] = [token for token in state["added_tokens"] if "think" not in token["content"]]
    state["model"]["vocab"] = {word: index for word, index in state["model"]["vocab"].items() if "think" not in word}
    (bare / "tokenizer.json").write_text(json.dumps(state))
    check = model.think_tags(config_of(bare, tmp_path), bare)
    assert check.state == "warn"
    assert model.think_tags(config_of(directory, tmp_path), directory).state == "ok"


def test_vision_ids_are_shown(tmp_path: Path) -> None:
    folder = tmp_path / "vision"
    source = ScratchVisionModel(kind="scratch_vision", hidden=32, layers=1, heads=2, vision_hidden=32, vision_layers=2)
    build_vision(folder, source, WORDS, 0)
    (check,) = [check for check in model.configured(config_of(folder, tmp_path)) if check.name == "vision"]
    assert check.state == "ok", check
    assert "image " in check.found


def test_checkpoints_that_do_not_fit_fail(directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model.shutil, "disk_usage", lambda path: Usage(0, 0, 1000))
    (check,) = [check for check in model.configured(config_of(directory, tmp_path)) if check.name == "checkpoints"]
    assert check.state == "fail"


@pytest.mark.parametrize(("free", "state"), [(64 << 20, "fail"), (700 << 20, "warn"), (2 << 30, "ok")])
def test_shared_memory(free: int, state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The 64 MiB of a container by default fail, with the option that mends it."""
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda path: Usage(free, 0, free))
    check = machine.shared_memory(None)
    assert check.state == state
    assert state == "ok" or "--shm-size" in check.advice


def test_servers_that_should_run_are_called(directory: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        config = config_of(directory, tmp_path, f"engine={{kind: vllm, urls: ['http://127.0.0.1:{port}']}}")
        assert states(list(machine.ports(config)))["engine.urls"] == "ok"
    assert states(list(machine.ports(config)))["engine.urls"] == "fail"


def test_too_many_threads_are_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.torch, "get_num_threads", lambda: 4096)
    assert machine.cores().state == "warn"
    assert "OMP_NUM_THREADS" in machine.cores().advice


def test_gpus_that_torch_cannot_use_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(machine.shutil, "which", lambda name: "/usr/bin/nvidia-smi")
    assert machine.gpus().state == "fail"
    monkeypatch.setattr(machine.shutil, "which", lambda name: None)
    assert machine.gpus().state == "ok"


def test_a_kernel_that_computes_wrongly_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """The right build agrees with the reference; one whose sums are a percent off does not."""
    assert software.kernel("reference", torch.device("cpu")).state == "ok"
    reference = software.load("reference")

    def statistics(*arguments: torch.Tensor) -> torch.Tensor:
        state = reference.statistics(*arguments)
        state[:, 1] *= 1.01
        return state

    wrong = SimpleNamespace(statistics=statistics, gradient=reference.gradient, top_token=reference.top_token)
    monkeypatch.setattr(software, "load", lambda name: reference if name == "reference" else wrong)
    check = software.kernel("native", torch.device("cpu"))
    assert check.state == "fail"
    assert "nat from the reference" in check.found


def test_native_kernels_here_are_right() -> None:
    assert software.kernel("native", torch.device("cpu")).state == "ok"


def test_dependencies_out_of_range_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert software.dependencies().state == "ok"
    monkeypatch.setattr(software.importlib.metadata, "requires", lambda name: ["numpy>=99", "absent-thing", "wandb; extra == 'wandb'"])
    check = software.dependencies()
    assert check.state == "fail"
    assert "numpy>=99 (here: 2" in check.found
    assert "absent-thing (here: none)" in check.found
    assert "wandb" not in check.found


def test_vllm_matters_only_to_runs_that_use_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(software.importlib.util, "find_spec", lambda name: None)
    assert [check.state for check in software.vllm(wanted=False)] == ["warn"]
    assert [check.state for check in software.vllm(wanted=True)] == ["fail"]


@pytest.mark.vllm
@pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM")
def test_our_parts_load_inside_vllm() -> None:
    assert states(list(software.vllm(wanted=True))) == {"vLLM: processor": "ok", "vLLM: weight transfer": "ok"}


def test_command_exits_with_1_on_a_failure(directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(software, "vllm", lambda wanted: iter(()))
    monkeypatch.setattr(examine, "software", software.software)
    config_of(directory, tmp_path)
    good = CliRunner().invoke(app, ["doctor", str(tmp_path / "run.yaml"), "--json"])
    assert good.exit_code == 0, good.output
    assert all(set(check) == {"name", "state", "found", "advice"} for check in json.loads(good.stdout))
    bad = CliRunner().invoke(app, ["doctor", str(tmp_path / "run.yaml"), "sampling.max_tokens=9999"])
    assert bad.exit_code == 1
    assert "1 failed" in bad.output
    assert "lower questions.max_prompt_tokens" in bad.output
