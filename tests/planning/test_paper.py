"""The planner against paper 000's Table 11 (4 nodes of 8 H100s, 2 + 2).

Read from the paper, not fitted: 4,096 rollouts a version on 8 servers and 16 learner GPUs, mean responses of 708 tokens (plain) and of
923 and 696 (CGE's waves), verl's order of completion. Mean prompt: all tokens per version, 281 x 2,275 x 32, over 4,096, less the
response.

Fitted on the column of plain GRPO, two numbers: the learner's seconds per token, from the update time, and what a rollout costs a server
besides its tokens, from the step time. Predicted: every number of the column of CGE.
"""

from dataclasses import dataclass

import pytest

from headrace.planning.rates import Rates
from headrace.planning.setting import Setting
from headrace.planning.simulate import Simulation, simulate
from headrace.planning.workload import Workload

GPUS, LEARNER, SERVERS, ROLLOUTS = 32, 16, 8, 4096


@dataclass(frozen=True)
class Column:
    """One column of Table 11, and the mean lengths of Appendix K by wave."""

    step: float
    wait: float
    update: float
    rate: float
    idle: float
    first: float
    second: float

    @property
    def prompt(self) -> float:
        """Mean prompt tokens that all tokens per second leave for one rollout."""
        return self.rate * self.step * GPUS / ROLLOUTS - (self.first + self.second) / 2


PLAIN = Column(step=2275, wait=1097, update=1167, rate=281, idle=0.48, first=708, second=708)
CGE = Column(step=2285, wait=1084, update=1190, rate=285, idle=0.47, first=923, second=696)
TRAIN_TOKEN = PLAIN.update * LEARNER / (ROLLOUTS * (PLAIN.prompt + PLAIN.first))
PER_ROLLOUT = PLAIN.step / (ROLLOUTS / SERVERS)
DECODE = {"decode_step": 0.03, "decode_row": 2e-4, "prefill_token": 2e-5}  # eager decoding; what bounds the rollouts is not this


def run(workload: Workload, rates: Rates, first_wave: int) -> Simulation:
    setting = Setting(
        batch=128,
        sync_interval=4,
        slots=768,
        group_size=8,
        first_wave=first_wave,
        max_tokens=16_384,
        updates=8,
        micro_batch_tokens=21_504,
        servers=SERVERS,
        rows=256,
        ranks=LEARNER,
        rates=rates,
        workload=workload,
        order="completion",
    )
    return simulate(setting, versions=8, warm_up=3)


def costs(column: Column, per_rollout: float, spread: float = 0.6) -> Workload:
    return Workload(
        prompt_tokens=PLAIN.prompt,
        response_tokens=column.first,
        second_wave=column.second / column.first,
        spread=spread,
        media_seconds=per_rollout,
        media_per_rollout=True,
    )


def test_prompt_is_the_same_in_both_columns() -> None:
    """Tokens per second count all 32 GPUs and a step is a version of 4,096 rollouts: only then do both columns give one prompt length,
    and one that 70 frame pairs of 45 visual tokens with timestamps and a question fill."""
    assert pytest.approx(PLAIN.prompt, rel=0.01) == CGE.prompt
    assert 70 * 45 < PLAIN.prompt < 5376


def test_plain_column_follows_from_its_two_fitted_numbers() -> None:
    result = run(costs(PLAIN, PER_ROLLOUT), Rates(**DECODE, train_token=TRAIN_TOKEN), first_wave=8)
    assert result.version_seconds == pytest.approx(PLAIN.step, rel=0.01)
    assert result.update_seconds == pytest.approx(PLAIN.update, rel=0.01)
    assert result.wait_seconds == pytest.approx(PLAIN.wait, rel=0.02)
    assert result.learner_idle == pytest.approx(PLAIN.idle, abs=0.01)


def test_cge_column_is_predicted() -> None:
    """A second wave that waits for the first and 14 % longer responses: the step hardly changes, and 0.47 of the learner's time is idle."""
    result = run(costs(CGE, PER_ROLLOUT), Rates(**DECODE, train_token=TRAIN_TOKEN), first_wave=4)
    assert result.learner_idle == pytest.approx(CGE.idle, abs=0.01)
    assert result.version_seconds == pytest.approx(CGE.step, rel=0.01)
    assert result.update_seconds == pytest.approx(CGE.update, rel=0.01)
    assert result.wait_seconds == pytest.approx(CGE.wait, rel=0.02)
    assert result.all_tokens_per_second / GPUS == pytest.approx(CGE.rate, rel=0.01)


def test_rollouts_bound_by_their_tokens_would_contradict_the_paper() -> None:
    """The other explanation of a slow rollout side, a slow decoder fitted to the same step time, predicts idle above 0.52 under CGE.

    Equal lengths: a tail would only add to the waiting.
    """
    rates = Rates(decode_step=0.0, decode_row=PLAIN.step * SERVERS / (ROLLOUTS * PLAIN.first), train_token=TRAIN_TOKEN)
    plain, cge = run(costs(PLAIN, 0.0, spread=0.0), rates, first_wave=8), run(costs(CGE, 0.0, spread=0.0), rates, first_wave=4)
    assert plain.learner_idle == pytest.approx(PLAIN.idle, abs=0.02)
    assert cge.learner_idle > 0.52
    assert cge.version_seconds > 1.1 * CGE.step


def test_preparing_media_once_per_group_makes_the_learner_the_bound() -> None:
    """What this engine does instead: an eighth of the host's work. The learner is then busy nearly all the time."""
    workload = costs(CGE, PER_ROLLOUT).model_copy(update={"media_per_rollout": False})
    result = run(workload, Rates(**DECODE, train_token=TRAIN_TOKEN), first_wave=4)
    assert result.learner_idle < 0.02
    assert result.version_seconds == pytest.approx(CGE.update, rel=0.02)
