"""Sampling on vLLM servers: starts them and the process that asks them, and connects both with the learner."""

from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from headrace.config import Config, ConfigError, VLLMEngineConfig
from headrace.encoding import Encoder
from headrace.journal.journal import Journal
from headrace.policy.model import Policy
from headrace.policy.parallel import Parallel
from headrace.policy.score import score_sequence
from headrace.records import Question
from headrace.rewards.judge import resolve
from headrace.rollout.messages import Setup
from headrace.rollout.pushed_weights import PushedWeights
from headrace.rollout.remote import RemoteRollouts
from headrace.rollout.servers import Servers, start_servers
from headrace.rollout.side import RewardFunction


@dataclass(frozen=True, slots=True)
class OwnParts:
    """What the user gave to the trainer, in a form that another process understands."""

    reward: str | None
    questions: tuple[Question, ...] | None


def transferable(reward: RewardFunction | str | None, questions: Sequence[Question] | None) -> OwnParts:
    """The user's reward by its name, and all questions.

    Raises:
        ConfigError: the reward cannot be found again by a name.
    """
    name = reward if isinstance(reward, str) or reward is None else _name(reward)
    return OwnParts(name, None if questions is None else tuple(questions[index] for index in range(len(questions))))


def _name(reward: RewardFunction) -> str:
    name = f"{getattr(reward, '__module__', '')}:{getattr(reward, '__qualname__', '')}"
    try:
        if not name.startswith("__main__") and resolve(name) is reward:
            return name
    except ValueError:
        pass
    raise ConfigError(
        "reward: with engine.kind = vllm responses are scored in a process of their own, which cannot import this function; "
        "put it into a module and give its name, module:function"
    )


async def start_remote(
    config: Config,
    engine: VLLMEngineConfig,
    parallel: Parallel,
    journal: Journal,
    encoder: Encoder,
    policy: Policy,
    model: Path,
    given: OwnParts,
    closing: AsyncExitStack,
) -> tuple[PushedWeights, RemoteRollouts | None]:
    """The servers' weights, and on rank 0 the rollout process. Collective.

    Args:
        model: directory of the starting policy, which the servers load.
        closing: ends what was started.

    Raises:
        EngineDown: a server does not start.
        ValueError: questions or reward cannot be used.
    """
    started: list[Servers] = []

    def start() -> None:
        if not engine.urls:
            journal.say(f"starting vLLM servers, which takes a minute or more; their logs are in {config.run_folder / 'servers'}")
        with journal.phase("starting servers"):
            started.append(start_servers(config, engine, model, encoder, parallel.store))

    parallel.run_on_main(start)
    servers = started[0] if started else None
    if servers is not None:
        closing.callback(servers.close)
    weights = PushedWeights(
        policy,
        engine,
        config.schedule.sync_interval,
        parallel,
        servers,
        lambda token_ids: score_sequence(policy, token_ids, parallel.device),
    )
    closing.callback(weights.close)
    if servers is None:
        return weights, None
    setup = Setup(config.model_dump(mode="json"), str(model), tuple(servers.urls), given.reward, given.questions)
    rollouts = RemoteRollouts(setup, max_restarts=engine.max_restarts)
    await rollouts.start()
    return weights, rollouts
