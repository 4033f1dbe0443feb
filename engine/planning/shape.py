"""Sizes of a model, counted on the meta device: no weight is loaded."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedConfig

from headrace.config import Config, ConfigError, DirectoryModel, GGUFModel, ModelConfig
from headrace.policy.sources import materialise
from headrace.questions.sets import TaskSet, load

PATCHES_PER_TOKEN = 4
"""Patches that the vision towers of the Qwen family merge into one token."""

_QWEN3_VL_8B = {
    "tie_word_embeddings": False,
    "text_config": {
        "vocab_size": 151_936,
        "hidden_size": 4096,
        "intermediate_size": 12_288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 262_144,
    },
    "vision_config": {"depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16, "out_hidden_size": 4096},
}
_QWEN25_VL_7B = {
    "tie_word_embeddings": False,
    "text_config": {
        "vocab_size": 152_064,
        "hidden_size": 3584,
        "intermediate_size": 18_944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "max_position_embeddings": 128_000,
    },
    "vision_config": {"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "out_hidden_size": 3584},
}
KNOWN: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-vl-8b": ("qwen3_vl", _QWEN3_VL_8B),
    "qwen2.5-vl-7b": ("qwen2_5_vl", _QWEN25_VL_7B),
}
"""Models whose sizes are known by the name of their folder, so that a run can be planned where they are not on disk."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Parameter counts and dimensions."""

    name: str
    parameters: int
    layer: int
    """Parameters of one decoder layer."""
    vision: int
    """Parameters of the vision tower; 0 for a text model."""
    head: int
    """Parameters of the output head, also where it is the embedding."""
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    context: int

    @property
    def language_work(self) -> int:
        """Parameters that every token of the language model is multiplied with: decoder layers and head."""
        return self.layers * self.layer + self.head

    @property
    def kv_bytes(self) -> int:
        """Bytes of key-value cache per token, bf16."""
        return 2 * self.layers * self.kv_heads * self.head_dim * 2


def trained_parameters(config: ModelConfig, shape: Shape) -> int:
    """Parameters that get gradients: all, all but a frozen vision tower, or the adapters'."""
    if config.lora is None:
        return shape.parameters - (0 if config.train_vision else shape.vision)
    inner, outer = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    sides = {"q_proj": shape.hidden + inner, "k_proj": shape.hidden + outer, "v_proj": shape.hidden + outer, "o_proj": inner + shape.hidden}
    sides |= dict.fromkeys(("gate_proj", "up_proj", "down_proj"), shape.hidden + shape.intermediate)
    chosen = config.lora.layers or tuple(sides)
    return shape.layers * config.lora.rank * sum(sides.get(name, 2 * shape.hidden) for name in chosen)


def shape_of(config: Config) -> Shape:
    """Sizes of the configured model.

    Raises:
        ConfigError: the directory is not there and no known model's name is part of its own; a GGUF model was never converted.
        ValueError: the directory is no model.
    """
    source = config.model.source
    if isinstance(source, DirectoryModel) and not source.path.exists():
        known = [entry for name, entry in KNOWN.items() if name in source.path.name.lower()]
        if not known:
            raise ConfigError(f"model.source.path: {source.path} is not there, and only {', '.join(KNOWN)} are known by name")
        kind, sizes = known[0]
        return count(AutoConfig.for_model(kind, **sizes), source.path.name)
    if isinstance(source, GGUFModel):
        folders = sorted((config.run.cache / "models").glob(f"*{Path(source.file).stem}"))
        if not folders:
            raise ConfigError(f"model.source: {source.file} was not converted yet; train it once, or plan for a model directory")
        directory = folders[-1]
    else:
        train = config.questions.train
        needs_words = not isinstance(source, DirectoryModel) and train is not None
        questions = load(train, config.run.seed, "train") if needs_words and train is not None else None
        vocabulary = questions.vocabulary() if isinstance(questions, TaskSet) else None
        directory = materialise(source, config.run.cache, config.run.seed, vocabulary)
    return count(AutoConfig.from_pretrained(directory), directory.name)


def count(config: PreTrainedConfig, name: str) -> Shape:
    """Count the parameters of an architecture without allocating them."""
    kind = AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM
    with torch.device("meta"):
        model: Any = kind.from_config(config)
    text: Any = config.get_text_config()
    layers = model.get_decoder().layers
    return Shape(
        name=name,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        layer=sum(parameter.numel() for parameter in layers[0].parameters()),
        vision=sum(parameter.numel() for key, parameter in model.named_parameters() if ".visual." in f".{key}"),
        head=model.get_output_embeddings().weight.numel(),
        layers=len(layers),
        hidden=text.hidden_size,
        intermediate=text.intermediate_size,
        heads=text.num_attention_heads,
        kv_heads=getattr(text, "num_key_value_heads", None) or text.num_attention_heads,
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads,
        vocabulary=model.get_output_embeddings().weight.shape[0],
        context=text.max_position_embeddings,
    )
