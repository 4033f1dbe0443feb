"""Drawing ahead: slots, order, staleness bound, equality with drawing together, engine deaths, resume."""

import asyncio
from collections.abc import Sequence

import numpy as np
import pytest

from headrace.questions.ledger import Key, Ledger
from headrace.records import Completion, EngineDown, Group, Prompt, Question, Reward, Rollout
from headrace.rollout.groups import Ahead, Pace, Together

QUESTIONS = 50


class Questions:
    """Admission over numbered questions."""

    def __init__(self) -> None:
        self.ledger = Ledger(QUESTIONS, 0)

    def next(self) -> tuple[Key, Prompt]:
        key = self.ledger.admit()
        return key, Prompt(Question(f"{key[0]}-{key[1]}", (), "1"), np.array([1]))


class Engine:
    """Draws a group in a time of its own, with the version the engine has when the group is finished."""

    def __init__(self, seed: int = 0, deaths: int = 0, longest: int = 30) -> None:
        self.version = 0
        self.drawing: set[str] = set()
        self.most = 0
        self.drawn: list[str] = []
        self.deaths = deaths
        self.longest = longest
        self._rng = np.random.default_rng(seed)

    async def draw(self, keys: Sequence[Key], prompts: Sequence[Prompt]) -> list[Group]:
        began = self.version
        self.drawing |= {prompt.question.id for prompt in prompts}
        self.most = max(self.most, len(self.drawing))
        for _ in range(self._rng.integers(1, self.longest)):
            await asyncio.sleep(0)
        self.drawing -= {prompt.question.id for prompt in prompts}
        if self.deaths:
            self.deaths -= 1
            raise EngineDown("server 0 died")
        self.drawn += [prompt.question.id for prompt in prompts]
        return [group(prompt, began) for prompt in prompts]


def group(prompt: Prompt, version: int) -> Group:
    """Half of the questions have no variance."""
    accuracy = float(int(prompt.question.id.split("-")[1]) % 2)
    versions = np.array([version], np.int32)
    completion = Completion(np.array([5], np.int32), np.zeros(1, np.float32), np.zeros(1, bool), versions, "stop")
    rollouts = tuple(Rollout(i, 1, "free", completion, reward=Reward(a, a)) for i, a in enumerate((0.0, accuracy)))
    return Group(prompt, rollouts)


def varies(drawn: Group) -> bool:
    return drawn.rollouts[0].reward != drawn.rollouts[1].reward


def always(drawn: Group) -> bool:
    return True


async def train(source: Ahead, engine: Engine, wanted: int, interval: int, batches: int) -> tuple[list[str], int, int]:
    """Trained questions in order, largest lag of a trained token in versions, most questions admitted and not released."""
    trained: list[str] = []
    lag = most = released = 0
    for batch in range(batches):
        kept: list[Key] = []
        while len(kept) < wanted:
            for key, drawn in await source.take(wanted - len(kept)):
                if varies(drawn) or source._trains is always:
                    kept.append(key)
                    trained.append(drawn.prompt.question.id)
                    lag = max(lag, engine.version - int(drawn.rollouts[0].completion.versions.min()))
        source.trained(kept)
        if (batch + 1) % interval == 0:
            engine.version += 1
            released = len(trained)
            source.release()
        most = max(most, source._pace.slots - source.free_slots)
    assert released <= len(trained)
    return trained, lag, most


@pytest.mark.parametrize("interval", [1, 3])
@pytest.mark.parametrize("staleness", [0.0, 0.25, 0.5, 1.0, 2.5])
@pytest.mark.parametrize("trains", [always, varies], ids=["plain", "filtered"])
def test_lag_and_slots_stay_within_their_bounds(staleness: float, interval: int, trains) -> None:
    wanted = 4
    version = wanted * interval  # P
    slots = int((1 + staleness) * version)
    pace = Pace(slots, wanted, interval, -(-slots // version) - 1)

    async def run(seed: int) -> tuple[list[str], int, int]:
        engine = Engine(seed, longest=60)
        source = Ahead(Questions(), engine.draw, trains, pace)
        outcome = await train(source, engine, wanted, interval, batches=12)
        await source.close()
        return outcome

    reached = 0
    for seed in range(10):
        trained, lag, most = asyncio.run(run(seed))
        assert lag <= pace.lag
        assert most <= slots
        assert len(set(trained)) == len(trained) == 12 * wanted
        reached = max(reached, lag)
    assert reached >= (pace.lag if trains is always else min(pace.lag, 1)), "the bound is not reached, so it is tested on nothing"


def test_a_long_response_is_passed_over_until_its_deadline() -> None:
    first = Questions().next()[1].question.id

    class Slow(Engine):
        async def draw(self, keys: Sequence[Key], prompts: Sequence[Prompt]) -> list[Group]:
            groups = await super().draw(keys, prompts)
            while prompts[0].question.id == first and not self.finish:
                await asyncio.sleep(0)
            return groups

        finish = False

    async def run() -> tuple[list[int], bool]:
        engine = Slow()
        source = Ahead(Questions(), engine.draw, always, Pace(8, 4, 1, 1))  # deadline of the first: batch 1
        sizes, waited = [], False
        for batch in range(3):
            taking = asyncio.create_task(source.take(4))
            for _ in range(200):
                await asyncio.sleep(0)
            if not taking.done():
                waited, engine.finish = batch == 1, True
            groups = await taking
            sizes.append(len(groups))
            assert (first in [drawn.prompt.question.id for _, drawn in groups]) == (batch == 1)
            source.trained([key for key, _ in groups])
            engine.version += 1
            source.release()
        await source.close()
        return sizes, waited

    assert asyncio.run(run()) == ([4, 4, 4], True)


@pytest.mark.parametrize("trains", [always, varies], ids=["plain", "filtered"])
def test_without_staleness_batches_are_those_of_drawing_together(trains) -> None:
    async def ahead() -> list[str]:
        engine = Engine(seed=3)
        source = Ahead(Questions(), engine.draw, trains, Pace(4, 4, 1, 0))
        trained, lag, _ = await train(source, engine, 4, 1, batches=10)
        assert lag == 0
        await source.close()
        return trained

    async def together() -> list[str]:
        source = Together(Questions(), Engine(seed=4).draw)
        trained: list[str] = []
        for _ in range(10):
            missing = 4
            while missing:
                kept = [drawn.prompt.question.id for _, drawn in await source.take(missing) if trains(drawn)]
                trained += kept
                missing -= len(kept)
        return trained

    assert asyncio.run(ahead()) == asyncio.run(together())


def test_a_dead_engine_costs_no_question(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.rollout.groups.RETRY_SECONDS", 0.0)

    async def run(deaths: int) -> tuple[list[str], float]:
        engine = Engine(seed=1, deaths=deaths)
        source = Ahead(Questions(), engine.draw, always, Pace(4, 4, 1, 0))
        trained, _, _ = await train(source, engine, 4, 1, batches=5)
        redrawn = source.metrics()["schedule/redrawn"]
        await source.close()
        return trained, redrawn

    (undisturbed, none), (disturbed, some) = asyncio.run(run(0)), asyncio.run(run(7))
    assert disturbed == undisturbed
    assert (none, some) == (0, 7)


def test_groups_that_do_not_train_do_not_pile_up() -> None:
    async def run() -> tuple[int, int]:
        source = Ahead(Questions(), Engine().draw, lambda drawn: False, Pace(4, 4, 1, 0))
        await source.take(4)
        for _ in range(3000):
            await asyncio.sleep(0)
        waiting = len(source.buffered())
        taken = [await source.take(4) for _ in range(10)]
        await source.close()
        return waiting, sum(map(len, taken))

    assert asyncio.run(run()) == (16, 40)


def test_an_engine_that_stays_down_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.rollout.groups.RETRY_SECONDS", 0.0)

    async def run() -> None:
        source = Ahead(Questions(), Engine(deaths=10**6).draw, always, Pace(4, 4, 1, 0))
        try:
            await asyncio.wait_for(source.take(4), 10)
        finally:
            await source.close()

    with pytest.raises(EngineDown):
        asyncio.run(run())


def test_drawn_groups_survive_a_restart() -> None:
    async def run() -> tuple[list[str], list[str], list[str]]:
        questions, engine = Questions(), Engine()
        source = Ahead(questions, engine.draw, always, Pace(12, 4, 1, 2))
        first = await source.take(4)
        for key, _ in first:
            questions.ledger.settle(key, "trained")
        source.trained([key for key, _ in first])
        while len(source.buffered()) < 8:
            await asyncio.sleep(0)
        saved, buffered = questions.ledger.state(), source.buffered()
        await source.close()
        questions, fresh = Questions(), Engine()
        questions.ledger.restore(saved)
        again = Ahead(questions, fresh.draw, always, Pace(12, 4, 1, 2), drawn=buffered, unreleased=[key for key, _ in first])
        assert again.free_slots == 8, "what has trained and is not released keeps its slot"
        taken = await again.take(8)
        await again.close()
        return [drawn.prompt.question.id for drawn in buffered.values()], [drawn.prompt.question.id for _, drawn in taken], fresh.drawn

    buffered, taken, drawn_again = asyncio.run(run())
    assert sorted(taken) == sorted(buffered)
    assert not set(drawn_again) & set(buffered)


def test_what_a_draw_raises_reaches_the_batch_that_waits_for_it() -> None:
    async def broken(keys: Sequence[Key], prompts: Sequence[Prompt]) -> list[Group]:
        raise ValueError("no finite logits")

    async def run() -> None:
        source = Ahead(Questions(), broken, always, Pace(4, 4, 1, 0))
        try:
            await source.take(1)
        finally:
            await source.close()

    with pytest.raises(ValueError, match="no finite logits"):
        asyncio.run(run())


def test_a_run_of_unusable_questions_ends() -> None:
    class Unusable(Questions):
        def next(self) -> tuple[Key, Prompt]:
            raise ValueError("row 3: has no answer")

    async def run() -> None:
        source = Ahead(Unusable(), Engine().draw, always, Pace(4, 4, 1, 0))
        try:
            await source.take(1)
        finally:
            await source.close()

    with pytest.raises(ValueError, match="row 3"):
        asyncio.run(run())
