"""A whole GRPO step, sampling, rewards and update: ours against TRL's ``GRPOTrainer`` on the same tiny model, in one process.

    python -m headrace.bench step [--prompts 16] [--rollouts 8] [--tokens 48] [--rounds 12]
    python -m headrace.bench step --credit pacg

TRL is no dependency: ``pip install trl`` brings it, or a folder of its own on PYTHONPATH:

    pip install --no-deps --target peers trl==1.16.0 datasets pandas pyarrow multiprocess dill xxhash
    PYTHONPATH=peers python -m headrace.bench step

Both sides start from the same weights and take the same questions, all equally long, with the same reward function, loss and optimizer;
no response ends before its last token. After two steps each that do not count, a round is one step of either. A step is everything
between two steps: data, logs and files too. Sampling is up to the rewards, included; update is the rest of the step. The ratio is the
median of the rounds' own ratios, so that a busy machine is either side's trouble alike.

With ``--credit`` instead a step with credit rules against one without (``credit_step``).
"""

import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import torch
import typer

from headrace.bench.credit_step import compare_credit
from headrace.bench.grpo_step import OwnStep, Setting, StepTime, make_setting
from headrace.bench.trl_step import run_trl

WARM_UP = 2
"""Rounds that do not count: first calls of everything."""
PARTS = ("whole", "sampling", "update")


def step(
    credit: Annotated[
        Literal["none", "pacg", "vppo", "all"], typer.Option(help="Credit rules to compare with a step without them")
    ] = "none",
    prompts: int = 16,
    rollouts: int = 8,
    tokens: int = 48,
    router: Annotated[float, typer.Option(help="Seconds until the claim router answers, in steps of the parent (--credit)")] = 0.34,
    rounds: int = 12,
) -> None:
    """A whole step: ours against TRL's on the same tiny model; or with credit rules against the same step without."""
    if credit != "none":
        compare_credit(credit, prompts, rollouts, tokens, router, rounds)
        return
    with tempfile.TemporaryDirectory() as folder:
        setting = make_setting(Path(folder), prompts, rollouts, tokens, rounds + WARM_UP)
        print(
            f"{setting.rows} rows x {tokens} tokens after {setting.prompt_tokens}, {setting.parameters / 1e6:.2f} M parameters, fp32, ",
            end="",
        )
        print(f"{torch.get_num_threads()} threads; medians of {rounds} rounds [quarter, three quarters]")
        ours, theirs, missing = _rounds(setting)
    print(_line("headrace", ours))
    if missing:
        print(f"not measured: TRL ({missing}); pip install trl")
        return
    print(_line("TRL", theirs))
    ratios = {part: [getattr(own, part) / getattr(their, part) for own, their in zip(ours, theirs, strict=True)] for part in PARTS}
    print(f"{'headrace / TRL':<16}" + "  ".join(f"{part} {_spread(ratios[part], '')}" for part in PARTS))


def _rounds(setting: Setting) -> tuple[list[StepTime], list[StepTime], str]:
    """Steps of ours and of TRL's, those that count, and why there are none of TRL's."""
    with OwnStep(setting) as own:
        ours: list[StepTime] = []
        try:
            theirs = run_trl(setting, lambda: ours.append(own()))
        except ImportError as error:
            ours = [own() for _ in range(setting.steps)]
            return ours[WARM_UP:], [], f"cannot be imported: {' '.join(str(error).split())[:200]}"
    return ours[WARM_UP:], theirs[WARM_UP:], ""


def _line(name: str, steps: Sequence[StepTime]) -> str:
    return f"{name:<16}" + "  ".join(f"{part} {_spread([getattr(each, part) for each in steps], ' s')}" for part in PARTS)


def _spread(values: Sequence[float], unit: str) -> str:
    """Median with the middle half of the values."""
    quarters = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
    return f"{quarters[1]:.3f}{unit} [{quarters[0]:.3f}, {quarters[2]:.3f}]"
