"""JSON out of what a model replied, whatever it wrote around it."""

import json
import re
from typing import Any

_THINKING = re.compile(r"\A.*?</think>", re.DOTALL)


class Unparsable(ValueError):  # noqa: N818
    """A reply holds no JSON object."""


def json_object(text: str) -> dict[str, Any]:
    """The first JSON object of a reply: thoughts before it, code fences and remarks around it are passed over.

    Raises:
        Unparsable: there is none.
    """
    text = _THINKING.sub("", text)
    decoder = json.JSONDecoder()
    start = text.find("{")
    while start >= 0:
        try:
            value, _ = decoder.raw_decode(text, start)
        except (ValueError, RecursionError):
            start = text.find("{", start + 1)
            continue
        return value
    raise Unparsable(f"no JSON object in the reply {text[:80]!r}")
