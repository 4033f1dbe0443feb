"""Whether servers that somebody else started can do what a run needs; each fault is one line that says how to start them."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from headrace.config import ConfigError, VLLMEngineConfig
from headrace.encoding import Encoder
from headrace.records import EngineDown, Prompt, Question, SampleRequest, SamplingParameters
from headrace.sampling.vllm.channel import PROCESSOR, spare_rows
from headrace.sampling.vllm.control import Control
from headrace.sampling.vllm.exchange import AnswerError, Reader, sampling_params
from headrace.sampling.vllm.launch import WORKER_EXTENSION, transport

OLDEST = (0, 32)


def check_servers(urls: Sequence[str], encoder: Encoder, config: VLLMEngineConfig) -> None:
    """Raise `ConfigError` with every fault of the servers at ``urls``, one line each. Takes seconds a server.

    Args:
        encoder: of the policy; the servers must serve the same model.
        config: tells the weight transfer.
    """
    faults: list[str] = []
    for url in urls:
        control = Control(url, timeout=60.0)
        try:
            found = list(_faults(control, encoder, config)) or list(_faulty_draw(control, encoder))
            faults += [f"engine.urls: {control.name}: {fault}" for fault in found]
        except EngineDown as error:
            faults.append(f"engine.urls: {error}")
        finally:
            control.close()
    if faults:
        raise ConfigError("\n".join(faults))


def _faults(control: Control, encoder: Encoder, config: VLLMEngineConfig) -> Iterator[str]:
    """What is wrong with how a server was started."""
    version = control.version()
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST:
        yield f"runs vLLM {version}; expected {'.'.join(map(str, OLDEST))} or newer"
    try:
        started = control.info()
    except EngineDown as error:
        if "404" not in str(error):
            raise
        yield "has no routes for weights; start it with VLLM_SERVER_DEV_MODE=1 in its environment"
        return
    model = started["model_config"]
    if started.get("speculative_config"):
        yield "decodes speculatively, beside which a logits processor cannot work; start it without --speculative-config"
    if PROCESSOR not in (model.get("logits_processors") or []):
        yield f"runs without the top-token processor; start it with --logits-processors {PROCESSOR} where headrace is installed"
    if model.get("logprobs_mode") != "processed_logprobs":
        yield f"returns {model.get('logprobs_mode')}; start it with --logprobs-mode processed_logprobs"
    backend, wanted = (started.get("weight_transfer_config") or {}).get("backend"), transport(config)
    if backend != wanted:
        yield f'takes weights by {backend or "no transfer"}; start it with --weight-transfer-config \'{{"backend": "{wanted}"}}\''
    if (started.get("parallel_config") or {}).get("worker_extension_cls") != WORKER_EXTENSION:
        yield f"its workers lack the transfer's checks; start it with --worker-extension-cls {WORKER_EXTENSION}"
    pictures = model.get("multimodal_config") or {}
    if encoder.media is not None and not pictures.get("mm_processor_cache_gb"):
        yield "remembers no pictures; start it with --mm-processor-cache-gb 4"
    if encoder.media is not None and pictures.get("mm_device_do_normalize"):
        yield "would normalise pictures once more; start it with --no-mm-device-do-normalize"
    if fault := _other_model(Path(str(model["model"])), encoder.directory):
        yield fault


def _other_model(served: Path, ours: Path) -> str | None:
    """What differs between the server's model and ours, where its directory can be read from here."""
    try:
        one, other = (json.loads((folder / "config.json").read_text(encoding="utf-8")) for folder in (served, ours))
    except (OSError, ValueError):
        return None
    names = [
        name for name in ("architectures", "model_type", "vocab_size", "hidden_size", "text_config") if one.get(name) != other.get(name)
    ]
    return f"serves {served}, whose config.json differs from that of {ours} in {', '.join(names)}" if names else None


def _faulty_draw(control: Control, encoder: Encoder) -> Iterator[str]:
    """What goes wrong when it draws two tokens."""
    rows = spare_rows(encoder)
    token = next(index for index in range(encoder.vocab_size) if index not in {*encoder.banned_ids, *encoder.eos_ids})
    prompt = Prompt(Question("check", (), ""), np.array([token, token]))
    request = SampleRequest(prompt, 0, 1, SamplingParameters(2))
    body: dict[str, Any] = {"token_ids": [token, token], "sampling_params": sampling_params(request, 2, encoder, rows)}
    try:
        Reader(encoder, rows).read(control.generate(body), request)
    except EngineDown as error:
        forbidden = "403" in str(error)
        yield "has no token route; start it with --enable-scale-out" if forbidden else f"does not draw ({error})"
    except AnswerError as error:
        yield str(error)
