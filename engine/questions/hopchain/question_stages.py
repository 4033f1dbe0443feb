"""From captions to questions: written and checked, judged and rewritten, filtered by the base policy."""

from collections.abc import Sequence

from headrace.questions.hopchain.checks import check
from headrace.questions.hopchain.judging import Fault, Trial, read_judgement, settle
from headrace.questions.hopchain.records import Candidate, Caption, Cost, Dropped, Specification, Video
from headrace.questions.hopchain.replies import Unparsable, json_object
from headrace.questions.hopchain.roles import Refused, Reply, ServerDown
from headrace.questions.hopchain.specification import draw_specification
from headrace.questions.hopchain.state import VideoStore
from headrace.questions.hopchain.workshop import Judged, Solved, Workshop, Written, gather, proxy_of


async def write(shop: Workshop, video: Video, captions: Sequence[Caption]) -> Written:
    """Draw specifications and have a question written for each."""
    draw = shop.config.draw
    specifications: list[Specification] = []
    trials: dict[int, Trial] = {}
    for index in range(draw.per_video):
        try:
            specifications.append(draw_specification(video.id, index, draw.drawn()))
        except ValueError as error:
            trials[index] = Trial(candidate=None, fate="specification", detail=str(error))
    cost = Cost()
    if specifications:
        try:
            reply = await shop.models.write(captions, specifications)
            cost = reply.cost
            trials |= {specification.index: _opened(reply, specification) for specification in specifications}
        except Refused as error:
            trials |= {
                specification.index: Trial(candidate=None, fate="refused", detail=str(error)[:400]) for specification in specifications
            }
    return Written(trials=tuple(trials[index] for index in sorted(trials)), specifications=tuple(specifications), cost=cost)


def _opened(reply: Reply, specification: Specification) -> Trial:
    """The trial of one question of a reply; dropped at once where it fails the checks."""
    try:
        return Trial(candidate=written_question(reply.text, specification))
    except Dropped as drop:
        return Trial(candidate=None, fate=drop.reason, detail=drop.detail)


def written_question(text: str, specification: Specification) -> Candidate:
    """The checked question that a writer's reply holds for a specification.

    Raises:
        Dropped: ``not_json``, ``skipped``, or a check failed.
    """
    try:
        questions = json_object(text).get("questions")
    except Unparsable as error:
        raise Dropped("not_json", str(error)) from None
    if not isinstance(questions, list):
        raise Dropped("not_json", "the reply has no list of questions")
    for question in questions:
        if isinstance(question, dict) and question.get("specification") == specification.index and not question.get("skip"):
            prose = question.get("prose")
            return check(question.get("hops"), specification, prose if isinstance(prose, str) else "")
    raise Dropped("skipped", "the writer left the specification out")


async def judge(shop: Workshop, store: VideoStore, captions: Sequence[Caption], written: Sequence[Trial]) -> Judged:
    """Take every question through the loop of judging and rewriting, kept after each step."""
    state = store.load("judge", Judged) or Judged(trials=tuple(written))
    trials, spent = list(state.trials), [state.cost]

    def save(complete: bool = False) -> Judged:
        record = Judged(trials=tuple(trials), cost=spent[0], complete=complete)
        store.save("judge", record)
        return record

    async def one(position: int) -> None:
        async def examine(candidate: Candidate, attempt: int) -> tuple[Fault, ...]:
            try:
                reply = await shop.models.judge(captions, candidate, attempt)
            except Refused as error:
                return (Fault(hop=0, kind="UNPARSABLE", why=str(error)[:300]),)
            spent[0] = spent[0] + reply.cost
            return read_judgement(reply.text, len(candidate.hops))

        async def write_again(candidate: Candidate, attempt: int, faults: tuple[Fault, ...]) -> Candidate:
            specification = candidate.specification
            try:
                reply = await shop.models.rewrite(captions, specification, attempt, faults if shop.config.draw.feedback else ())
            except Refused as error:
                raise Dropped("refused", str(error)) from None
            spent[0] = spent[0] + reply.cost
            return written_question(reply.text, specification)

        def keep(trial: Trial) -> None:
            trials[position] = trial
            save()

        await settle(trials[position], examine, write_again, keep)

    if not state.complete:
        await gather(*(one(position) for position, trial in enumerate(trials) if trial.fate == "open"))
        state = save(complete=True)
    shop.report("judge", "kept" if any(trial.fate == "kept" for trial in state.trials) else "dropped")
    return state


async def solve(shop: Workshop, store: VideoStore, trials: Sequence[Trial]) -> Solved:
    """Drop what the base policy solves too often."""
    candidates = [trial.candidate for trial in trials if trial.fate == "kept" and trial.candidate is not None]
    rules, details = shop.config.difficulty, list[str]()
    right: dict[str, int] = {}
    answered: dict[str, int] = {}
    fates: dict[str, str] = {}
    for candidate in candidates:
        identity = candidate.specification.question_id
        if rules is None or shop.solver is None:
            fates[identity] = "kept"
        else:
            try:
                answers = await shop.solver.solve(shop.question_of(candidate, proxy_of(shop, store)), candidate, rules.rollouts)
            except ServerDown:
                raise
            except ValueError as error:
                fates[identity], details = "unusable", [*details, str(error)]
                continue
            right[identity], answered[identity] = sum(answer == candidate.answer for answer in answers), len(answers)
            fates[identity] = "too_easy" if too_easy(right[identity], len(answers), rules.drop_from) else "kept"
    kept = tuple(identity for identity, fate in fates.items() if fate == "kept")
    return Solved(right=right, answered=answered, kept=kept, fates=fates, detail="; ".join(details)[:400])


def too_easy(right: int, answered: int, drop_from: float = 0.75) -> bool:
    """Whether the share of right answers is at least ``drop_from``; without an answer a question stays."""
    return answered > 0 and right / answered >= drop_from
