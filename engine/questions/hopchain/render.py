"""The question's text, from its hop records alone: judge, difficulty filter and row read the same words."""

from collections.abc import Sequence

from headrace.questions.hopchain.records import LETTERS, Hop, Specification


def render(specification: Specification, hops: Sequence[Hop]) -> str:
    """The question, one line a hop and the sum last."""
    lines = [_hop(specification, hops, i) for i in range(len(hops))]
    letters = " + ".join(LETTERS[: len(hops)])
    return "\n".join([*lines, f"Report {letters} as a single integer."])


def condition(specification: Specification, hops: Sequence[Hop], number: int) -> str:
    """What must hold for the hop to answer yes, as the line of a hop that it routes says it."""
    hop = hops[number]
    if hop.type != "order":
        return hop.fact
    if specification.router_of(number) is not None:
        return f"the first-named moment of check {LETTERS[number]} is shown before its second"
    return f"{hop.scenes[0]} is shown before {hop.scenes[1]}"


def _hop(specification: Specification, hops: Sequence[Hop], number: int) -> str:
    hop, router = hops[number], specification.router_of(number)
    yields = f"let {LETTERS[number]} be {hop.yes}; otherwise let {LETTERS[number]} be {hop.no}."
    if router is None:
        fact = condition(specification, hops, number)
        if hop.type == "order":
            return f"Compare two moments: {hop.scenes[0]}, and {hop.scenes[1]}. If {fact}, {yields}"
        return f"In {hop.scenes[0]}, if {fact}, {yields}"
    use, holds = f"Use check {LETTERS[router]} to choose", condition(specification, hops, router)
    if hop.type == "order":
        first, second, third, fourth = hop.scenes
        return (
            f"{use} which two moments to compare: if {holds}, compare {first} and {second}; otherwise compare {third} and {fourth}. "
            f"If the first-named moment is shown before the second, {yields}"
        )
    return f"{use} where to look: if {holds}, look at {hop.scenes[0]}; otherwise look at {hop.scenes[1]}. There, if {hop.fact}, {yields}"
