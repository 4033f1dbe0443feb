"""A tiny policy that is sure of itself often enough for the mask to fire, with its encoder and some prompts."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from headrace.config import ModelConfig, ScratchTextModel
from headrace.encoding import Encoder
from headrace.policy.model import Policy
from headrace.policy.scratch import build_text
from headrace.records import Prompt, Question

MIX, GAIN = 6.0, 50.0
"""Larger layers make the next token depend on all before it, a larger norm makes logits sharp: a fifth of the positions is above 0.95."""
WORDS = [*"abcdefghijklmnopqrstuvwxyz", *map(str, range(10)), *";,.?=>+"]


ROUNDING = 1e-4
"""Nats. Layers and logits this large amplify fp32 rounding; a test in float64 holds the same sums to 1e-6."""


@dataclass(frozen=True)
class Tiny:
    policy: Policy
    encoder: Encoder
    directory: Path

    def prompt(self, *words: str, name: str = "q", prefilled: bool = True) -> Prompt:
        ids = self.encoder.tokenizer.encode(" ".join(words), add_special_tokens=False)
        if prefilled:
            ids.append(self.encoder.think_open)
        return Prompt(Question(id=name, messages=(), answer=""), np.asarray(ids, dtype=np.int64), prefilled)

    def prompts(self, lengths: list[int]) -> list[Prompt]:
        rng = np.random.default_rng(3)
        return [self.prompt(*rng.choice(WORDS, length), name=f"q{number}") for number, length in enumerate(lengths)]


def build(directory: Path, mix: float = MIX, gain: float = GAIN) -> Tiny:
    source = ScratchTextModel(kind="scratch_text", hidden=32, layers=2, heads=2)
    build_text(directory, source, WORDS, seed=5)
    policy = Policy.load(directory, ModelConfig(source=source), "cpu")
    for name, parameter in policy.model.named_parameters():
        if "layers" in name and parameter.dim() == 2:
            parameter.data *= mix
    policy.model.model.norm.weight.data *= gain
    encoder = Encoder.load(directory, think_prefill=True, system_prompt=None, max_prompt_tokens=512)
    return Tiny(policy, encoder, directory)
