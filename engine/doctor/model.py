"""What a configured run needs of its model, its questions and the disk."""

import importlib.util
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig

from headrace.config import Config, DirectoryModel, RowsSource, VLLMEngineConfig
from headrace.doctor.check import Check
from headrace.encoding import THINK_CLOSE, THINK_OPEN, Encoder, media_ids, single_token
from headrace.planning.shape import count, trained_parameters
from headrace.sampling.vllm.channel import spare_rows
from headrace.starting_model import encoder_of

_GIB = 2**30


def configured(config: Config) -> Iterator[Check]:
    """Every check that a configuration asks for."""
    yield from questions(config)
    yield from topology(config)
    source = config.model.source
    if not isinstance(source, DirectoryModel):
        yield Check("model", "ok", f"{source.kind}: made when the run starts")
        return
    if not (source.path / "config.json").is_file():
        yield Check("model", "fail", f"{source.path} has no config.json", "set model.source.path to a Hugging Face model directory")
        return
    yield weights(source.path)
    model = AutoConfig.from_pretrained(source.path)
    yield context(config, model)
    yield checkpoints(config, model)
    yield think_tags(config, source.path)
    try:
        encoder = encoder_of(source.path, config)
    except ValueError as error:
        yield Check("tokenizer", "fail", str(error), "the directory must hold its tokenizer, and processor if it sees")
        return
    yield media(encoder)
    if isinstance(config.engine, VLLMEngineConfig):
        yield spare(encoder)
        yield heads(config.engine, model)


def questions(config: Config) -> Iterator[Check]:
    """Files of rows that the configuration names are there."""
    for name, source in (("questions.train", config.questions.train), ("questions.held_out", config.questions.held_out)):
        if isinstance(source, RowsSource):
            yield Check.of(name, source.path.is_file(), str(source.path), f"no such file; set {name}.path (docs/data.md)")


def topology(config: Config) -> Iterator[Check]:
    """Rollout ranks make whole servers, and a server fits this machine."""
    engine = config.engine
    if isinstance(engine, VLLMEngineConfig) and engine.rollout_ranks:
        whole = engine.rollout_ranks % engine.tensor_parallel == 0
        found = f"{engine.rollout_ranks} rollout ranks, tensor_parallel {engine.tensor_parallel}"
        yield Check.of("topology", whole, found, "engine.rollout_ranks must be a multiple of engine.tensor_parallel")
    if isinstance(engine, VLLMEngineConfig) and torch.cuda.is_available() and not engine.urls:
        devices = torch.cuda.device_count()
        found = f"{devices} GPUs here, {engine.tensor_parallel} for a server"
        yield Check.of("GPUs of a server", engine.tensor_parallel <= devices, found, "lower engine.tensor_parallel")


def weights(directory: Path) -> Check:
    """All files that the index names, or a single one."""
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        files = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        absent = [name for name in files if not (directory / name).is_file()]
        found = f"{len(files)} files" if not absent else f"{len(absent)} of {len(files)} files are missing, {absent[0]} first"
        return Check.of("model", not absent, f"{directory}: {found}", "fetch the directory again")
    alone = (directory / "model.safetensors").is_file()
    found = f"{directory}: {'model.safetensors' if alone else 'no safetensors'}"
    return Check.of("model", alone, found, "weights must be safetensors files")


def context(config: Config, model: PreTrainedConfig) -> Check:
    """Prompt and response fit the model's positions."""
    limit = getattr(model.get_text_config(), "max_position_embeddings", None)
    prompt, response = config.questions.max_prompt_tokens, config.sampling.max_tokens
    wanted = prompt + response
    found = f"prompt {prompt:,} + response {response:,} = {wanted:,} of {'any number of' if limit is None else f'{limit:,}'} positions"
    return Check.of("context", limit is None or wanted <= limit, found, "lower questions.max_prompt_tokens or sampling.max_tokens")


def checkpoints(config: Config, model: PreTrainedConfig) -> Check:
    """Room for the checkpoints that are kept and the one being written: fp32 weights and two moments."""
    shape = count(model, "")
    moments = 8 if config.optimizer.moments == "float32" else 2
    size = 4 * shape.parameters + moments * trained_parameters(config.model, shape)
    wanted = size * (config.run.keep_checkpoints + 1)
    folder = config.run.folder.resolve()
    free = shutil.disk_usage(next(path for path in (folder, *folder.parents) if path.exists())).free
    found = f"{config.run.keep_checkpoints} kept and one being written take {wanted / _GIB:,.1f} GiB, {free / _GIB:,.0f} GiB are free"
    return Check.of("checkpoints", free > wanted, found, "free some, lower run.keep_checkpoints, or choose another run.folder")


def think_tags(config: Config, directory: Path) -> Check:
    """Both tags are single tokens of the tokenizer as it is; else they are added, and the policy has never seen them."""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    ids = [single_token(tokenizer, tag) for tag in (THINK_OPEN, THINK_CLOSE)]
    found = f"{THINK_OPEN} {ids[0]}, {THINK_CLOSE} {ids[1]}"
    needs = config.sampling.think_prefill or config.sampling.cge is not None
    advice = "they are added as new tokens that start at the mean embedding; warm-start the policy, or choose a model that knows them"
    return Check.of("think tags", None not in ids or not needs, found, advice, bad="warn")


def media(encoder: Encoder) -> Check:
    """Ids of a vision model's placeholders, its processor, and the libraries that read pictures and clips."""
    ids = media_ids(encoder.config)
    if not ids:
        return Check("vision", "ok", "a text model; rows with pictures are refused")
    found = ", ".join(f"{name.removesuffix('_token_id')} {index}" for name, index in ids.items())
    if encoder.processor is None:
        return Check("vision", "fail", f"{found}, but the directory has no processor", "copy preprocessor_config.json there")
    libraries = ("torchvision", "av")
    absent = [name for name in libraries if importlib.util.find_spec(name) is None]
    found += f"; {' and '.join(absent or libraries)} {'missing' if absent else 'installed'}"
    return Check.of("vision", not absent, found, "pip install 'headrace[vlm]'")


def spare(encoder: Encoder) -> Check:
    """Two vocabulary rows without a token, which carry the mask's flags out of vLLM."""
    try:
        rows = spare_rows(encoder)
    except ValueError as error:
        return Check("spare rows", "fail", "none", str(error))
    return Check("spare rows", "ok", f"ids {rows[0]} and {rows[1]} of {encoder.vocab_size:,}")


def heads(engine: VLLMEngineConfig, model: PreTrainedConfig) -> Check:
    """A server's GPUs share the attention heads."""
    count = model.get_text_config().num_attention_heads
    found = f"{count} attention heads on {engine.tensor_parallel} GPUs a server"
    return Check.of("tensor parallel", count % engine.tensor_parallel == 0, found, "engine.tensor_parallel must divide the heads")
