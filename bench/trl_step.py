"""TRL's GRPO step, timed from inside its own training loop. Written for TRL 1.16; called as its documentation says."""

import time
from collections.abc import Callable
from typing import Any

from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback

from headrace.bench.grpo_step import Setting, StepTime, reward


def run_trl(setting: Setting, between: Callable[[], None]) -> list[StepTime]:
    """Train with TRL for all of the setting's steps.

    Args:
        between: called after every step, outside its time.

    Raises:
        ImportError: TRL is not installed.
        ValueError: it took other prompts or lengths than ours.
    """
    import datasets
    from trl import GRPOConfig, GRPOTrainer

    config, model = setting.config, setting.folder / "model"
    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    prompts = _prompts(setting, tokenizer)
    datasets.disable_progress_bars()
    clock = _Clock(between)

    def rewards(completions: list[str], completion_ids: list[list[int]], **_: object) -> list[float]:
        if any(len(ids) != config.sampling.max_tokens for ids in completion_ids):
            raise ValueError(f"step: TRL drew a response that is not {config.sampling.max_tokens} tokens long")
        return [reward(text) for text in completions]

    class Timed(GRPOTrainer):
        def _generate_and_score_completions(self, inputs: Any) -> Any:
            started = time.perf_counter()
            outputs = super()._generate_and_score_completions(inputs)
            clock.sampling = time.perf_counter() - started
            return outputs

    arguments = GRPOConfig(
        output_dir=str(setting.folder / "trl"),
        per_device_train_batch_size=setting.rows,
        num_generations=config.sampling.group_size,
        max_completion_length=config.sampling.max_tokens,
        generation_kwargs={"min_new_tokens": config.sampling.max_tokens},
        max_steps=setting.steps,
        learning_rate=config.optimizer.learning_rate,
        lr_scheduler_type="constant",
        weight_decay=config.optimizer.weight_decay,
        adam_beta1=config.optimizer.betas[0],
        adam_beta2=config.optimizer.betas[1],
        max_grad_norm=config.optimizer.clip_norm,
        optim="adamw_torch_fused",
        epsilon=config.loss.clip_low,
        epsilon_high=config.loss.clip_high,
        loss_type="dapo",  # the token mean
        beta=0.0,
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    policy = AutoModelForCausalLM.from_pretrained(model, dtype="float32")
    # With a fingerprint of our own the table is not hashed by pickling it, which dill 0.4 cannot do with pyarrow 26.
    data = datasets.Dataset(datasets.table.InMemoryTable.from_pydict({"prompt": prompts}), fingerprint="step")
    trainer = Timed(policy, rewards, arguments, data, processing_class=tokenizer, callbacks=[clock])
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return clock.steps


class _Clock(TrainerCallback):
    """Takes the time from the end of what happens between two steps to the next step's end."""

    def __init__(self, between: Callable[[], None]) -> None:
        self.between = between
        self.steps: list[StepTime] = []
        self.sampling = 0.0
        self.started = 0.0

    def on_train_begin(self, *_: object, **__: object) -> None:
        self.started = time.perf_counter()

    def on_step_end(self, *_: object, **__: object) -> None:
        self.steps.append(StepTime(time.perf_counter() - self.started, self.sampling))
        self.between()
        self.started = time.perf_counter()


def _prompts(setting: Setting, tokenizer: Any) -> list[str]:
    """Our prompts as text, which TRL tokenizes again."""
    ours = [setting.encoder.encode(question).token_ids.tolist() for question in setting.questions]
    texts = [tokenizer.decode(ids) for ids in ours]
    if tokenizer(text=texts)["input_ids"] != ours:
        raise ValueError("step: TRL would read other prompts than ours")
    return texts
