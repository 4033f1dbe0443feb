"""The whole run, section by section."""

from pathlib import Path

from pydantic import Field, field_validator, model_validator

from headrace.config.base import Model
from headrace.config.credit import AdvantageConfig, CreditConfig
from headrace.config.policy import LearnerConfig, LossConfig, ModelConfig, OptimizerConfig, WarmStartConfig
from headrace.config.questions import QuestionsConfig
from headrace.config.rewards import RewardConfig
from headrace.config.sampling import EngineConfig, LocalEngineConfig, SamplingConfig, ScheduleConfig
from headrace.config.selection import DynamicSamplingConfig, HSRConfig, PAQMConfig


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


_HOTTEST = 2.0
"""Largest temperature that vLLM takes."""


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
    def _drawable(self) -> "Config":
        if self.engine.kind == "vllm":
            for section, temperature in (("sampling", self.sampling.temperature), ("evaluation", self.evaluation.temperature)):
                if temperature > _HOTTEST:
                    raise ValueError(f"{section}.temperature = {temperature:g}: vLLM draws at {_HOTTEST:g} at most")
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
