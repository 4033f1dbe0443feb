"""The policy: a Hugging Face model that runs packed rows and hands its hidden states to a head that never makes a logits matrix."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from headrace.config import ModelConfig
from headrace.encoding import load_tokenizer
from headrace.media import MediaLoader, media_loader
from headrace.policy import attention
from headrace.policy.adapters import add_adapters
from headrace.policy.sharing import Sharing
from headrace.policy.vision import Vision
from headrace.records import Media, Prompt

T = TypeVar("T")
VISION_MODELS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")


@dataclass(frozen=True, eq=False)
class PackedRows:
    """B rows of tokens end to end, without padding."""

    token_ids: Tensor  # [N] int64
    cu_seqlens: Tensor  # [B + 1] int32, row boundaries
    max_length: int
    """Longest row."""
    media: tuple[tuple[Media, ...], ...] = ()
    """Per row, by reference, in the order of the placeholders; empty when no row has any."""
    prompts: Sequence[int] | np.ndarray | None = None
    """[B] which prompt a row starts with; rows of one prompt share positions. None: all differ."""
    sharing: Sharing = field(default_factory=Sharing)
    """What rows of one prompt have in common and run once; by default every token runs."""


class Policy(nn.Module):
    """A causal language model, with a vision tower or without.

    ``forward`` takes packed rows and the head as a function, so that hidden states and head weight meet inside it: under FSDP2 the
    root's parameters are whole only there. The model is kept in evaluation mode, and dropout is off: log-probs must repeat.
    """

    def __init__(self, model: PreTrainedModel, media: MediaLoader | None = None, *, train_vision: bool = False) -> None:
        super().__init__()
        self.model = model.eval()
        self.vision = None
        if hasattr(model.config, "vision_config"):
            assert media is not None, "a vision-language model has a processor"
            self.vision = Vision(model, media, frozen=not train_vision)
            model.model.visual.requires_grad_(train_vision)

    @classmethod
    def load(cls, directory: Path, config: ModelConfig, device: torch.device | str) -> "Policy":
        """Load a Hugging Face directory; rows for think tags that its tokenizer lacks are added and start at the mean embedding.

        Raises:
            ValueError: no such model, weights missing from the files, or an architecture that packed rows would compute wrongly.
            ConfigError: ``config.lora`` does not fit the model.
        """
        directory = Path(directory)
        _, added = load_tokenizer(directory)
        model: Any = _read_model(directory, getattr(torch, config.dtype))
        _check_packing(model, directory)
        add_rows(model, added)
        if config.lora is not None:
            add_adapters(model, config.lora)
        return cls(model.to(device), media_loader(directory), train_vision=config.train_vision)

    @property
    def head_weight(self) -> Tensor:
        """[V, D] rows of the head; the embedding itself where they are tied."""
        return self.model.get_output_embeddings().weight

    def forward(self, rows: PackedRows, head: Callable[[Tensor, Tensor], T]) -> T:
        """``head(hidden, head_weight)`` with hidden [N, D]: the state at position t predicts token t + 1."""
        inputs = _distinct(self._decoder_inputs(rows), rows.sharing)
        hidden = self.model.get_decoder()(**inputs, use_cache=False).last_hidden_state[0]
        return head(rows.sharing.spread(hidden), self.head_weight)

    @torch.no_grad()
    def prefill_inputs(self, prompts: Sequence[Prompt]) -> dict[str, Any]:
        """Keyword arguments of ``model.get_decoder()`` for prompts packed end to end; an empty cache may be passed beside them.

        ``input_ids`` [1, N] or ``inputs_embeds`` [1, N, D]; ``position_ids`` [1, N], or [3, 1, N] (time, height, width) of a
        vision-language model, where the token after a prompt has one more than its largest position on every axis.
        """
        lengths = torch.tensor([0, *(len(prompt.token_ids) for prompt in prompts)])
        return self._decoder_inputs(
            PackedRows(
                token_ids=torch.from_numpy(np.concatenate([prompt.token_ids for prompt in prompts])),
                cu_seqlens=lengths.cumsum(0).to(torch.int32),
                max_length=int(lengths.max()),
                media=tuple(prompt.question.media for prompt in prompts),
            )
        )

    def trainable_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Parameters with a gradient, by name; tied ones once, a frozen tower's not at all."""
        return [(name, parameter) for name, parameter in self.named_parameters() if parameter.requires_grad]

    def _decoder_inputs(self, rows: PackedRows) -> dict[str, Any]:
        device = self.head_weight.device
        token_ids = rows.token_ids.to(device)
        inputs: dict[str, Any] = {
            "cu_seqlens": rows.cu_seqlens.to(device),
            "max_length": rows.max_length,
            "buckets": None if attention.is_fused(device, self.head_weight.dtype) else attention.row_buckets(rows.cu_seqlens),
        }
        if self.vision is not None:
            return inputs | self.vision.decoder_inputs(rows, token_ids)
        bounds = inputs["cu_seqlens"]
        starts = torch.repeat_interleave(bounds[:-1], bounds.diff(), output_size=len(token_ids))
        return inputs | {"input_ids": token_ids[None], "position_ids": (torch.arange(len(token_ids), device=device) - starts)[None]}


def _distinct(inputs: dict[str, Any], sharing: Sharing) -> dict[str, Any]:
    """Inputs of the decoder for the distinct tokens."""
    kept = sharing.kept
    if kept is None:
        return inputs | {"sharing": sharing}
    found = inputs | {"sharing": sharing, "position_ids": inputs["position_ids"][..., kept]}
    for name in ("input_ids", "inputs_embeds", "visual_pos_masks"):
        if name in inputs:
            found[name] = inputs[name].index_select(1, kept)
    if "deepstack_visual_embeds" in inputs:
        runs = torch.zeros_like(inputs["visual_pos_masks"][0]).index_fill_(0, kept, True)
        visual = runs[inputs["visual_pos_masks"][0]]  # of the visual tokens, those that run
        found["deepstack_visual_embeds"] = [level[visual] for level in inputs["deepstack_visual_embeds"]]
    return found


# ------------------------------------------------------------------------------------------------------ loading


def _read_model(directory: Path, dtype: torch.dtype) -> PreTrainedModel:
    """The model with packed attention in its text part and torch's own in the vision tower; safetensors only."""
    disable_progress_bar()
    try:
        config = AutoConfig.from_pretrained(directory)
        visual = hasattr(config, "vision_config")
        if visual and config.model_type not in VISION_MODELS:
            raise ValueError(f"{config.model_type} is not among the vision-language models {', '.join(VISION_MODELS)}")
        family: Any = AutoModelForImageTextToText if visual else AutoModelForCausalLM
        implementation = {"text_config": attention.NAME, "vision_config": "sdpa"} if visual else attention.NAME
        model, report = family.from_pretrained(
            directory, dtype=dtype, attn_implementation=implementation, use_safetensors=True, output_loading_info=True
        )
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"{directory}: cannot be loaded as a model ({' '.join(str(error).split())[:300]})") from None
    if report["missing_keys"]:
        missing = sorted(report["missing_keys"])
        raise ValueError(f"{directory}: {len(missing)} weights are missing from the files, first {missing[0]}")
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.0
    return model


@torch.no_grad()
def add_rows(model: Any, added: Sequence[int]) -> None:
    """Give added tokens rows in embedding and head: the mean of the rows before them; in place."""
    if not added:
        return
    rows = model.get_input_embeddings().weight.shape[0]
    if max(added) >= rows:
        model.resize_token_embeddings(max(added) + 1, mean_resizing=False)
    for table in (model.get_input_embeddings(), model.get_output_embeddings()):
        table.weight[list(added)] = table.weight[: min(added)].float().mean(0).to(table.weight.dtype)


@torch.no_grad()
def _check_packing(model: PreTrainedModel, directory: Path) -> None:
    """Refuse an architecture whose packed rows are not its separate rows, or whose logits are not hidden states times the head.

    Recurrent and convolutional layers carry state across row boundaries; soft-capped, scaled or biased heads are no plain product.
    """
    config = model.config.get_text_config()
    if getattr(config, "final_logit_softcapping", None) is not None:
        raise ValueError(f"{directory}: {config.model_type} caps its logits, which is not supported")
    rows = [torch.arange(start, start + count) % config.vocab_size for start, count in ((3, 5), (11, 4))]
    bounds = torch.tensor([0, 5, 9], dtype=torch.int32)
    try:
        packed = model.get_decoder()(
            input_ids=torch.cat(rows)[None].to(model.device),
            position_ids=torch.cat([torch.arange(len(row)) for row in rows])[None].to(model.device),
            cu_seqlens=bounds.to(model.device),
            max_length=5,
            use_cache=False,
        ).last_hidden_state[0]
        separate = torch.cat([model(input_ids=row[None].to(model.device), use_cache=False).logits[0] for row in rows])
    except (TypeError, KeyError, RuntimeError) as error:
        raise ValueError(f"{directory}: {config.model_type} does not run packed rows ({' '.join(str(error).split())[:200]})") from None
    logits = packed @ model.get_output_embeddings().weight.T
    tolerance = (1e-3 if logits.dtype == torch.float32 else 0.1) * max(float(separate.float().std()), 1e-6)
    if not (logits.float() - separate.float()).abs().max() <= tolerance:
        raise ValueError(f"{directory}: {config.model_type} mixes rows that are packed together or transforms its logits; not supported")
