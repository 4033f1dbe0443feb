"""Servers that run already are accepted as we start them, and refused with what to start them with otherwise."""

from typing import Any

import pytest

from headrace.config import ConfigError
from headrace.sampling.vllm import check
from headrace.sampling.vllm.check import check_servers
from headrace.sampling.vllm.launch import free_port
from tests.vllm.conftest import Served

pytestmark = pytest.mark.vllm

FAULTS: list[tuple[tuple[str, ...], Any, str]] = [
    (("speculative_config",), {"method": "ngram"}, "decodes speculatively"),
    (("model_config", "logits_processors"), None, "start it with --logits-processors headrace.sampling.vllm.processor:TopTokenProcessor"),
    (("model_config", "logprobs_mode"), "raw_logprobs", "start it with --logprobs-mode processed_logprobs"),
    (("weight_transfer_config",), None, "takes weights by no transfer; start it with --weight-transfer-config"),
    (("parallel_config", "worker_extension_cls"), "", "start it with --worker-extension-cls headrace.sync.worker.Extension"),
]


@pytest.fixture(scope="module")
def started(served: Served) -> dict[str, Any]:
    return served.control.info()


def test_a_server_of_ours_passes(served: Served) -> None:
    check_servers([served.server.url], served.tiny.encoder, served.config)


@pytest.mark.parametrize(("where", "value", "message"), FAULTS, ids=[fault[0][-1] for fault in FAULTS])
def test_each_fault_says_what_to_start_it_with(
    served: Served, started: dict[str, Any], monkeypatch: pytest.MonkeyPatch, where: tuple[str, ...], value: Any, message: str
) -> None:
    changed = {name: dict(part) if isinstance(part, dict) else part for name, part in started.items()}
    section = changed
    for name in where[:-1]:
        section = section[name]
    section[where[-1]] = value
    monkeypatch.setattr(check.Control, "info", lambda self: changed)
    with pytest.raises(ConfigError) as caught:
        check_servers([served.server.url], served.tiny.encoder, served.config)
    [line] = str(caught.value).splitlines()
    assert line.startswith(f"engine.urls: {served.server.url}: ")
    assert message in line


def test_an_older_vllm_and_a_missing_server_are_told_together(
    served: Served, started: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = f"http://127.0.0.1:{free_port('127.0.0.1')}"
    monkeypatch.setattr(check, "OLDEST", (99, 1))
    monkeypatch.setattr(check.Control, "info", lambda self: started)
    with pytest.raises(ConfigError) as caught:
        check_servers([served.server.url, missing], served.tiny.encoder, served.config)
    first, second = str(caught.value).splitlines()
    assert "runs vLLM 0." in first
    assert first.endswith("expected 99.1 or newer")
    assert second.startswith(f"engine.urls: {missing}: /version failed")


def test_another_model_is_told_by_what_differs(served: Served, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("other")
    (folder / "config.json").write_text(
        '{"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 65, "hidden_size": 32}'
    )
    fault = check._other_model(folder, served.tiny.directory)
    assert fault is not None
    assert fault.endswith("in vocab_size")
    assert check._other_model(served.tiny.directory, served.tiny.directory) is None
