"""The judge's reply, and the loop of judging and rewriting."""

from collections.abc import Awaitable, Callable
from typing import Any, Literal

from headrace.questions.hopchain.records import Candidate, Dropped, Record
from headrace.questions.hopchain.replies import Unparsable, json_object

ATTEMPTS = 3
FaultKind = Literal["VALUE_WRONG", "NOT_SETTLED", "AMBIGUOUS_ANSWER", "ROUTE_BROKEN", "CIRCULAR", "UNPARSABLE"]
FAULTS: tuple[FaultKind, ...] = ("VALUE_WRONG", "NOT_SETTLED", "AMBIGUOUS_ANSWER", "ROUTE_BROKEN", "CIRCULAR")


class Fault(Record):
    """What the judge holds against one hop; hop 0 stands for a reply that nobody can read."""

    hop: int
    kind: FaultKind
    why: str = ""


class Trial(Record):
    """How far the loop of one question is: enough to go on after a kill at any moment."""

    candidate: Candidate | None
    """The question as last written; None once it is dropped."""
    judgements: int = 0
    rewrites: int = 0
    faults: tuple[tuple[Fault, ...], ...] = ()
    """Of every judgement, none where the question passed."""
    fate: str = "open"
    """``open``, ``kept``, or the reason why it was dropped."""
    detail: str = ""

    @property
    def judged(self) -> bool:
        """The present wording has been judged, and faulted."""
        return self.judgements > self.rewrites


def read_judgement(text: str, hops: int) -> tuple[Fault, ...]:
    """Faults in a judge's reply. An entry that is malformed is passed over; a reply without a single sound one is unparsable."""
    try:
        entries = json_object(text).get("hops")
    except Unparsable as error:
        return (Fault(hop=0, kind="UNPARSABLE", why=str(error)),)
    sound = [entry for entry in entries if _sound(entry, hops)] if isinstance(entries, list) else []
    if not sound:
        return (Fault(hop=0, kind="UNPARSABLE", why="the reply examines no hop"),)
    return tuple(
        Fault(hop=entry["hop"], kind=entry["fault"], why=str(entry.get("why", ""))[:300])
        for entry in sound
        if entry.get("fault") is not None
    )


def _sound(entry: Any, hops: int) -> bool:
    if not isinstance(entry, dict) or not isinstance(entry.get("hop"), int) or not 1 <= entry["hop"] <= hops:
        return False
    return entry.get("fault") is None or entry["fault"] in FAULTS


async def settle(
    trial: Trial,
    judge: Callable[[Candidate, int], Awaitable[tuple[Fault, ...]]],
    rewrite: Callable[[Candidate, int, tuple[Fault, ...]], Awaitable[Candidate]],
    keep: Callable[[Trial], None] = lambda trial: None,
) -> Trial:
    """Judge; keep what is not faulted, else write it again, at most three judgements and two rewrites in all.

    Args:
        judge: ``(candidate, attempt)`` to the faults found.
        rewrite: ``(candidate, attempt, faults)`` to the question written again and checked; raises Dropped.
        keep: is told of every step, so that it can be saved.
    """
    while trial.fate == "open":
        assert trial.candidate is not None
        if not trial.judged:
            faults = await judge(trial.candidate, trial.judgements + 1)
            changes: dict[str, Any] = {"judgements": trial.judgements + 1, "faults": (*trial.faults, faults)}
            if not faults:
                changes |= {"fate": "kept"}
            elif changes["judgements"] == ATTEMPTS:
                changes |= {"fate": "faulted", "candidate": None, "detail": ", ".join(f"{fault.hop}:{fault.kind}" for fault in faults)}
        else:
            try:
                rewritten = await rewrite(trial.candidate, trial.rewrites + 1, trial.faults[-1])
                changes = {"candidate": rewritten, "rewrites": trial.rewrites + 1}
            except Dropped as drop:
                changes = {"candidate": None, "rewrites": trial.rewrites + 1, "fate": f"rewrite_{drop.reason}", "detail": drop.detail}
        trial = trial.model_copy(update=changes)
        keep(trial)
    return trial
