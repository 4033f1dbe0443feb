"""The question's text from its hops."""

from headrace.questions.hopchain.records import Hop, Specification
from headrace.questions.hopchain.render import render


def hop(kind: str, scenes: tuple[str, ...], fact: str, yes: int, no: int) -> Hop:
    return Hop(type=kind, scenes=scenes, segments=tuple(range(len(scenes))), fact=fact, yes=yes, no=no, value=yes)  # type: ignore[arg-type]


def test_the_papers_figure_2_reads_as_its_template() -> None:
    specification = Specification(
        video_id="cats",
        index=0,
        types=("spatial", "order", "attribute", "order"),
        link="chain",
        routes=((0, 2), (2, 3)),
        numbers=((63, 10), (22, 63), (64, 41), (73, 79)),
    )
    hops = [
        hop("spatial", ("the scene with a cat on a red chair",), "the tree is on the left side of the frame", 63, 10),
        hop("order", ("the firework", "the traffic lights"), "the firework is shown before the traffic lights", 22, 63),
        hop("attribute", ("the children's room", "the dog and the cat"), "the surface is green", 64, 41),
        hop("order", ("the dog's face", "the zoom", "the dog's head", "the rodent"), "the dog's face is shown before the zoom", 73, 79),
    ]
    assert render(specification, hops).splitlines() == [
        "In the scene with a cat on a red chair, if the tree is on the left side of the frame, let A be 63; otherwise let A be 10.",
        "Compare two moments: the firework, and the traffic lights. If the firework is shown before the traffic lights, let B be 22; "
        "otherwise let B be 63.",
        "Use check A to choose where to look: if the tree is on the left side of the frame, look at the children's room; otherwise look "
        "at the dog and the cat. There, if the surface is green, let C be 64; otherwise let C be 41.",
        "Use check C to choose which two moments to compare: if the surface is green, compare the dog's face and the zoom; otherwise "
        "compare the dog's head and the rodent. If the first-named moment is shown before the second, let D be 73; otherwise let D be 79.",
        "Report A + B + C + D as a single integer.",
    ]


def test_an_order_hop_routes_by_its_own_words() -> None:
    specification = Specification(
        video_id="v", index=0, types=("order", "order", "action"), link="chain", routes=((0, 1), (1, 2)), numbers=((1, 2), (3, 5), (9, 20))
    )
    hops = [
        hop("order", ("the sea", "the cave"), "the sea is shown before the cave", 1, 2),
        hop("order", ("a", "b", "c", "d"), "a is shown before b", 3, 5),
        hop("action", ("the sky", "the lava"), "the shape falls", 9, 20),
    ]
    _, second, third, last = render(specification, hops).splitlines()
    assert second.startswith("Use check A to choose which two moments to compare: if the sea is shown before the cave, compare a and b;")
    assert "if the first-named moment of check B is shown before its second, look at the sky; otherwise look at the lava" in third
    assert last == "Report A + B + C as a single integer."
