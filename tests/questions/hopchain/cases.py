"""The paper's Figure 2 as specification and as a writer's reply, and small corpora."""

from typing import Any

from headrace.questions.hopchain.records import Specification

PAIRS = ((63, 10), (22, 63), (64, 41), (73, 79))
FIGURE_2 = Specification(
    video_id="cats", index=0, types=("spatial", "order", "attribute", "order"), link="chain", routes=((0, 2), (2, 3)), numbers=PAIRS
)
MOMENTS = (
    ("the table",),
    ("the firework", "the traffic lights"),
    ("the room", "the cats"),
    ("the dog", "the close-up", "the head", "the rodent"),
)


def rows(*values: Any) -> list[dict[str, Any]]:
    """Figure 2 as a writer gives it, its arithmetic row last."""
    hops = [
        {
            "type": kind,
            "scenes": list(scenes),
            "segments": list(range(len(scenes))),
            "mapping": f"if fact {number} holds then {yes} else {no}",
            "value": value,
            "quote": "as seen",
            "router": False,
        }
        for number, (kind, scenes, (yes, no), value) in enumerate(zip(FIGURE_2.types, MOMENTS, PAIRS, values, strict=True))
    ]
    return [*hops, {"type": "arithmetic", "mapping": "", "expression": "A + B + C + D"}]
