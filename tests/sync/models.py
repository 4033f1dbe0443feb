"""Tiny models that vLLM's CPU kernels take, and the learner's side of a test."""

from dataclasses import dataclass, field
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedTokenizerFast,
    Qwen2VLImageProcessor,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tests.policy.test_model_vision import FAMILIES, MEDIA


def qwen3(directory: Path, *, tied: bool, vocab: int = 300) -> Path:
    """A tiny Qwen3 whose vocabulary is no multiple of what vLLM pads to."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=vocab,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=tied,
        eos_token_id=None,
        bos_token_id=None,
        initializer_range=0.1,
    )
    Qwen3ForCausalLM(config).save_pretrained(directory)
    words().save_pretrained(directory)
    return directory


def words() -> PreTrainedTokenizerFast:
    """A byte tokenizer with the media tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE({character: i for i, character in enumerate(alphabet)}, []))
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    core.add_special_tokens([AddedToken(token, special=True) for token in ("<|im_start|>", "<|im_end|>", *MEDIA.values())])
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|im_end|>")


def vision(directory: Path, family: str) -> Path:
    """A tiny Qwen-VL with its processor; 16-pixel picture tokens."""
    config_class, model_class, processor_class, video_class = FAMILIES[family]
    tokenizer = words()
    text = {
        "vocab_size": 272,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "max_position_embeddings": 512,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [4, 6, 6]},
    }
    tower = {"depth": 3, "hidden_size": 64, "intermediate_size": 96, "num_heads": 2, "patch_size": 8, "out_hidden_size": 64}
    if family == "qwen3_vl":
        text["rope_parameters"]["mrope_interleaved"] = True
        tower |= {"deepstack_visual_indexes": [0, 1], "num_position_embeddings": 64}
    else:
        tower |= {"fullatt_block_indexes": [1], "window_size": 32}
    ids = {name: tokenizer.convert_tokens_to_ids(token) for name, token in MEDIA.items()}
    torch.manual_seed(0)
    model = model_class(config_class(text_config=text, vision_config=tower, tie_word_embeddings=True, **ids))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.1)
    model.save_pretrained(directory)
    sizes = {"patch_size": 8, "merge_size": 2, "temporal_patch_size": 2, "size": {"shortest_edge": 16 * 16, "longest_edge": 64 * 64 * 8}}
    processor_class(Qwen2VLImageProcessor(**sizes), tokenizer, video_class(**sizes)).save_pretrained(directory)
    return directory


class Learner(nn.Module):
    """The learner of a test: transformers' own forward pass."""

    def __init__(self, directory: Path, dtype: torch.dtype = torch.float32):
        super().__init__()
        visual = hasattr(AutoConfig.from_pretrained(directory), "vision_config")
        family = AutoModelForImageTextToText if visual else AutoModelForCausalLM
        self.model = family.from_pretrained(directory, dtype=dtype).eval()

    @torch.no_grad()
    def learn(self, seed: int, size: float = 0.05) -> None:
        """Change every weight."""
        noise = torch.Generator().manual_seed(seed)
        for parameter in self.model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=noise).to(parameter.dtype) * size)

    @torch.no_grad()
    def logprobs(self, token_ids, **inputs) -> torch.Tensor:
        """[L, V]: of what follows each token."""
        return self.model(input_ids=torch.tensor([list(token_ids)]), **inputs).logits[0].float().log_softmax(-1)

    def score(self, token_ids, **inputs) -> list[float]:
        """[L - 1] of the tokens after the first."""
        found = self.logprobs(token_ids, **inputs)[:-1]
        return found.gather(1, torch.tensor(list(token_ids))[1:, None])[:, 0].tolist()


@dataclass
class OneRank:
    """A learner without a process group."""

    is_main: bool = True
    sent: list = field(default_factory=list)

    def broadcast_json(self, value):
        self.sent.append(value)
        return value
