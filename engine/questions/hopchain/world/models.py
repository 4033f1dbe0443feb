"""The roles of the generator played by code that knows the script or reads the captions."""

from collections.abc import Sequence
from typing import cast

import numpy as np

from headrace.questions.hopchain.judging import Fault
from headrace.questions.hopchain.records import Candidate, Caption, Cost, Shot, Specification, Video
from headrace.questions.hopchain.roles import Reply
from headrace.questions.hopchain.served import judge_request, write_request
from headrace.questions.hopchain.world import judge as by_rule
from headrace.questions.hopchain.world import writer
from headrace.questions.hopchain.world.script import World
from headrace.records import Question
from headrace.streams import stream

_CALL = Cost(calls=1)


class ScriptedModels:
    """Captions from the script; questions and judgements by rule, with the faults that the configuration asks for.

    Every reply depends on what is asked and the world's seed alone, so a run that was killed gets the same ones again.
    """

    def __init__(self, world: World) -> None:
        self.world = world

    async def caption(self, video: Video, shot: Shot, frames: Sequence[bytes]) -> Reply:
        if self._stream("caption", video.id, int(1000 * shot.start)).random() < self.world.config.bad_captions:
            return Reply(" ", _CALL)
        return Reply(self.world.script(video).at((shot.start + shot.end) / 2).caption, _CALL)

    async def write(self, captions: Sequence[Caption], specifications: Sequence[Specification]) -> Reply:
        return self._written(captions, specifications, 0)

    async def rewrite(self, captions: Sequence[Caption], specification: Specification, attempt: int, faults: Sequence[Fault]) -> Reply:
        return self._written(captions, [specification], attempt)

    async def judge(self, captions: Sequence[Caption], candidate: Candidate, attempt: int) -> Reply:
        if self._stream("judge", candidate.specification.question_id, attempt).random() < self.world.config.judge_slips:
            return Reply("I looked at every hop and they seem fine to me.", _CALL)
        return Reply(by_rule.judge(judge_request(captions, candidate)), _CALL)

    def _written(self, captions: Sequence[Caption], specifications: Sequence[Specification], attempt: int) -> Reply:
        first = specifications[0]
        rng = self._stream("write", first.question_id, attempt)
        flaws = {}
        for specification in specifications:
            chance = self._stream("flaw", specification.question_id, attempt)
            if chance.random() < self.world.config.faults:
                flaws[specification.index] = cast(writer.Flaw, str(chance.choice(writer.FLAWS)))
        return Reply(writer.write(write_request(captions, specifications), rng, flaws), _CALL)

    def _stream(self, purpose: str, query: str, index: int) -> np.random.Generator:
        return stream(self.world.seed, f"hopchain/{purpose}", query_id=query, index=index)


class ScriptedSolver:
    """A base policy that settles each hop rightly with a fixed probability and adds without fault."""

    def __init__(self, skill: float, seed: int) -> None:
        self.skill, self.seed = skill, seed

    async def solve(self, question: Question, candidate: Candidate, rollouts: int) -> list[int | None]:
        rng = stream(self.seed, "hopchain/solve", query_id=question.id)
        return [
            sum(hop.value if rng.random() < self.skill else hop.yes + hop.no - hop.value for hop in candidate.hops) for _ in range(rollouts)
        ]
