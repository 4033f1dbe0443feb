"""The base policy of the difficulty filter, behind any engine."""

from collections.abc import Callable

from headrace.encoding import Encoder
from headrace.questions.hopchain.records import Candidate
from headrace.records import Engine, Question, SampleRequest, SamplingParameters
from headrace.streams import stream_seed


class EngineSolver:
    """Draws free answers to a question and reads the integer of each (``roles.Solver``)."""

    def __init__(
        self, engine: Engine, encoder: Encoder, read: Callable[[str], int | None], *, temperature: float, max_tokens: int, seed: int
    ) -> None:
        """Args:
        read: integer that a response answers with, None where it gives none.
        seed: root of the draws.
        """
        self.engine, self.encoder, self.read, self.seed = engine, encoder, read, seed
        self.parameters = SamplingParameters(max_tokens=max_tokens, temperature=temperature)

    async def solve(self, question: Question, candidate: Candidate, rollouts: int) -> list[int | None]:
        """Integers of the answers.

        Raises:
            ValueError: the prompt is too long, or the policy cannot take the clip.
        """
        prompt = self.encoder.encode(question)
        requests = [
            SampleRequest(prompt, index, stream_seed(self.seed, "hopchain/solve", 0, question.id, index), self.parameters)
            for index in range(rollouts)
        ]
        completions = await self.engine.sample(requests)
        return [
            self.read(self.encoder.response_text(prompt, completion.token_ids))
            for completion in completions
            if completion.finish_reason != "abort"
        ]
