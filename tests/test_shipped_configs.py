"""The paper's run states the paper's table (that every file in configs/ loads is tests/test_configuration.py)."""

from pathlib import Path

from headrace.config import load_config
from headrace.schedule import questions_per_version, slots

CONFIGS = Path(__file__).parents[1] / "configs"
TABLE_3 = {
    "questions.max_prompt_tokens": 5376,
    "sampling.max_tokens": 16_384,
    "optimizer.learning_rate": 1e-6,
    "optimizer.warmup_steps": 25,
    "optimizer.weight_decay": 0.1,
    "advantage.normalise": True,
    "loss.kind": "ppo",
    "loss.clip_low": 0.2,
    "loss.clip_high": 0.3,
    "loss.kl_coef": 0.0,
    "loss.entropy_coef": 0.0,
    "loss.normalisation": "token_mean",
    "sampling.group_size": 8,
    "sampling.temperature": 1.0,
    "sampling.top_p": 1.0,
    "sampling.top_k": -1,
    "engine.kind": "vllm",
    "engine.tensor_parallel": 2,
    "engine.memory": 0.8,
    "engine.rollout_ranks": 16,
    "sampling.cge.first_wave_fraction": 0.5,
    "sampling.cge.max_mean": 1.0,
    "sampling.cge.threshold": 0.95,
    "sampling.cge.cap": 16_384,
    "schedule.staleness": 0.5,
    "schedule.sync_interval": 4,
}


def test_cge_qwen3vl_8b_is_table_3() -> None:
    config = load_config(CONFIGS / "cge_qwen3vl_8b.yaml")
    stated = {}
    for dotted in TABLE_3:
        value = config
        for name in dotted.split("."):
            value = getattr(value, name)
        stated[dotted] = value
    assert stated == TABLE_3


def test_cge_qwen3vl_8b_batches_as_released() -> None:
    """EX-3.8 from the file itself: 16 prompts an update, 8 updates a batch, 4 batches a version; full rows fit a micro-batch."""
    config = load_config(CONFIGS / "cge_qwen3vl_8b.yaml")
    assert config.run.questions_per_step / config.learner.updates_per_batch == 16
    assert (config.run.questions_per_step, questions_per_version(config), slots(config)) == (128, 512, 768)
    assert config.learner.micro_batch_tokens == max(21_504, config.questions.max_prompt_tokens + config.sampling.max_tokens) == 21_760
    assert config.run.steps == 4 * 22_550 // 128
