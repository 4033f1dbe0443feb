"""The whole run as one typed configuration: a YAML file plus dotted overrides.

Unknown keys, wrong types and combinations that cannot work are refused with the file, the field and what is expected.
"""

from headrace.config.base import ConfigError, Model
from headrace.config.credit import (
    AdvantageConfig,
    CreditConfig,
    PACGConfig,
    RouterConfig,
    RulesRouterConfig,
    ServerRouterConfig,
    VPPOConfig,
)
from headrace.config.policy import (
    DirectoryModel,
    GGUFModel,
    LearnerConfig,
    LoRAConfig,
    LossConfig,
    ModelConfig,
    ModelSource,
    OptimizerConfig,
    ScratchTextModel,
    ScratchVisionModel,
    WarmStartConfig,
)
from headrace.config.questions import (
    EasyVQASource,
    HopchainSource,
    MultiHopSource,
    QuestionsConfig,
    QuestionSource,
    ReasoningGymSource,
    RowsSource,
)
from headrace.config.reading import build_model, load_config, load_model, read_tree
from headrace.config.rewards import OverlongConfig, RewardConfig
from headrace.config.run import Config, EvaluationConfig, JournalConfig, RunConfig
from headrace.config.sampling import CGEConfig, EngineConfig, LocalEngineConfig, SamplingConfig, ScheduleConfig, VLLMEngineConfig
from headrace.config.selection import DynamicSamplingConfig, HSRConfig, PAQMConfig

__all__ = [
    "AdvantageConfig",
    "CGEConfig",
    "Config",
    "ConfigError",
    "CreditConfig",
    "DirectoryModel",
    "DynamicSamplingConfig",
    "EasyVQASource",
    "EngineConfig",
    "EvaluationConfig",
    "GGUFModel",
    "HSRConfig",
    "HopchainSource",
    "JournalConfig",
    "LearnerConfig",
    "LoRAConfig",
    "LocalEngineConfig",
    "LossConfig",
    "Model",
    "ModelConfig",
    "ModelSource",
    "MultiHopSource",
    "OptimizerConfig",
    "OverlongConfig",
    "PACGConfig",
    "PAQMConfig",
    "QuestionSource",
    "QuestionsConfig",
    "ReasoningGymSource",
    "RewardConfig",
    "RouterConfig",
    "RowsSource",
    "RulesRouterConfig",
    "RunConfig",
    "SamplingConfig",
    "ScheduleConfig",
    "ScratchTextModel",
    "ScratchVisionModel",
    "ServerRouterConfig",
    "VLLMEngineConfig",
    "VPPOConfig",
    "WarmStartConfig",
    "build_model",
    "load_config",
    "load_model",
    "read_tree",
]
