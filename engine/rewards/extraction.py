"""What a response says its answer is, and whether it has the shape of its contract.

Every function is linear in the length of the text and never raises, whatever the text holds.
"""

import re
from typing import Literal, NamedTuple

Contract = Literal["answer_boxed", "boxed", "answer_tag"]
Mode = Literal["strict", "code"]

CONTRACTS: tuple[Contract, ...] = ("answer_boxed", "boxed", "answer_tag")
MODES: tuple[Mode, ...] = ("strict", "code")

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"
ANSWER_OPEN, ANSWER_CLOSE = "<answer>", "</answer>"
_BOX = "\\boxed{"
_BRACES = re.compile(r"\\boxed\{|\\(?!\\boxed\{).|\{+|\}+", re.DOTALL)  # steps over escaped braces; a run of braces is one token
_MIN_THINK = 100  # characters of reasoning below which mode `code` gives no format credit


class Box(NamedTuple):
    """A brace-balanced ``\\boxed{…}``: ``text[start:end]`` is its content."""

    start: int
    end: int


def boxes(text: str) -> list[Box]:
    """Every brace-balanced box, in the order in which they open; a box may lie inside another."""
    first = text.find(_BOX)
    if first < 0:
        return []
    depth = 0
    waiting: list[tuple[int, int]] = []  # (depth, start of the content) of boxes that are still open
    found: list[Box] = []
    for token in _BRACES.finditer(text, first):
        kind = token.group()
        if kind == _BOX:
            waiting.append((depth, token.end()))
            depth += 1
        elif kind[0] == "{":
            depth += len(kind)
        elif kind[0] == "}":
            floor = max(0, depth - len(kind))
            while waiting and waiting[-1][0] >= floor:
                outer, start = waiting.pop()
                found.append(Box(start, token.start() + depth - outer - 1))
            depth = floor
    return sorted(found)


def last_box(text: str) -> str | None:
    """Content of the last balanced box, or None without one."""
    found = boxes(text)
    return text[found[-1].start : found[-1].end] if found else None


def _without_text_command(content: str) -> str:
    r"""``\text{x}`` -> ``x`` where the command spans all of ``content``."""
    content = content.strip()
    if not (content.startswith("\\text{") and content.endswith("}")):
        return content
    inner = boxes(_BOX + content[len("\\text{") :])  # the same braces, so the box finder says where the first one closes
    spans_all = bool(inner) and inner[0] == Box(len(_BOX), len(content) + len(_BOX) - len("\\text{") - 1)
    return content[len("\\text{") : -1].strip() if spans_all else content


def answer_block(text: str) -> str | None:
    """Content of the first ``<answer>…</answer>``, or None without one."""
    start = text.find(ANSWER_OPEN)
    end = text.find(ANSWER_CLOSE, start + len(ANSWER_OPEN)) if start >= 0 else -1
    return text[start + len(ANSWER_OPEN) : end] if end >= 0 else None


def _candidate(region: str) -> str | None:
    """The answer in ``region``: last box of its first answer block, else that block's text, else the last box of the region."""
    block = answer_block(region)
    box = last_box(region if block is None else block)
    if box is not None:
        return _without_text_command(box) or None
    return None if block is None else block.strip() or None


def extract(text: str, contract: Contract = "answer_boxed", mode: Mode = "strict") -> str | None:
    """The answer a response gives, or None.

    The rule is the same under every contract: mode ``strict`` reads what follows the last ``</think>``, mode ``code``
    the whole response. The first answer block counts, its last box if it has one; without a block the last box.
    Mode ``code`` falls back to the last box anywhere, the think draft included, and takes a response with neither
    block nor box whole.

    Args:
        text: whole response, a pre-filled think tag included.
        contract: shape the response should have (docs/rewards.md).
        mode: ``strict`` or ``code`` (docs/rewards.md).

    Raises:
        ValueError: unknown contract or mode.
    """
    check(contract, mode)
    if mode == "code":
        return primary(text, mode) or draft(text)
    close = text.rfind(THINK_CLOSE)
    return _candidate(text[close + len(THINK_CLOSE) :]) if close >= 0 else None


def primary(text: str, mode: Mode) -> str | None:
    """``extract`` without the fallback of mode ``code`` to a box outside the answer block."""
    if mode == "strict":
        return extract(text)
    return _candidate(text) or (text.strip() or None if answer_block(text) is None else None)


def draft(text: str) -> str | None:
    """Last box anywhere in the response: the fallback of mode ``code``."""
    box = last_box(text)
    return None if box is None else _without_text_command(box) or None


def format_score(text: str, contract: Contract = "answer_boxed", mode: Mode = "strict") -> float:
    """Format term f: 0 or 1; in mode ``code`` the contract ``answer_boxed`` also knows 0.5.

    Mode ``code`` gives nothing for reasoning of fewer than 100 characters.

    Raises:
        ValueError: unknown contract or mode.
    """
    check(contract, mode)
    parts = _think_and_tail(text)
    if parts is None:
        return 0.0
    think, tail = parts
    if not think.strip() or (mode == "code" and len(think.strip()) < _MIN_THINK):
        return 0.0
    if contract == "boxed":
        return float(_filled_boxes(tail) >= 1)
    block = None if ANSWER_OPEN in think or ANSWER_CLOSE in think else _only_block(tail)
    if block is None or not block.strip():
        return 0.0
    if contract == "answer_tag" or _filled_boxes(block) == 1:
        return 1.0
    return 0.5 if mode == "code" else 0.0


def check(contract: str, mode: str) -> None:
    """Raise ValueError for a contract or mode that does not exist."""
    if contract not in CONTRACTS:
        raise ValueError(f"contract {contract!r}: expected one of {', '.join(CONTRACTS)}")
    if mode not in MODES:
        raise ValueError(f"mode {mode!r}: expected one of {', '.join(MODES)}")


def _think_and_tail(text: str) -> tuple[str, str] | None:
    """Parts of ``<think>X</think>tail`` with each think tag exactly once."""
    if not text.startswith(THINK_OPEN) or text.count(THINK_OPEN) != 1 or text.count(THINK_CLOSE) != 1:
        return None
    think, _, tail = text[len(THINK_OPEN) :].partition(THINK_CLOSE)
    return think, tail


def _only_block(tail: str) -> str | None:
    """Y of a tail that is ``<answer>Y</answer>`` and white space around it."""
    tail = tail.strip()
    if not (tail.startswith(ANSWER_OPEN) and tail.endswith(ANSWER_CLOSE)) or tail.count(ANSWER_OPEN) != 1 or tail.count(ANSWER_CLOSE) != 1:
        return None
    return tail[len(ANSWER_OPEN) : -len(ANSWER_CLOSE)]


def _filled_boxes(text: str) -> int:
    return sum(bool(text[box.start : box.end].strip()) for box in boxes(text))
