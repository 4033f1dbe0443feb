"""Rows of the samples table: a step's groups with prompt, responses, rewards and what the mask exchanged."""

from collections.abc import Callable, Sequence
from typing import Any

from headrace.records import Completion, Group, Question, Rollout

Decode = Callable[[Sequence[int]], str]
CONTEXT = 8
"""Tokens before a piece that are decoded along with it: enough for spaces and characters that span tokens."""
ARM_ORDER = {"masked": 0, "control": 1, "free": 2}


def chosen(groups: Sequence[Group], count: int) -> list[Group]:
    """The first groups of every arm in turn, masked ones first, so that a short table still shows each kind."""
    lanes = [[group for group in groups if group.arm == arm] for arm in ARM_ORDER]
    turns = [group for turn in range(len(groups)) for lane in lanes for group in lane[turn : turn + 1]]
    return turns[:count]


def sample_row(step: int, group: Group, decode: Decode) -> dict[str, Any]:
    """One group as a JSON row."""
    question = group.prompt.question
    return {
        "step": step,
        "question": question.id,
        "source": question.source,
        "prompt": prompt_text(question),
        "media": [media.path for media in question.media],
        "answer": question.answer,
        "arm": group.arm,
        "intervened": group.intervened,
        "rollouts": [_rollout_row(group, position, rollout, decode) for position, rollout in enumerate(group.rollouts)],
    }


def prompt_text(question: Question) -> str:
    """The conversation as text; media keep their placeholders."""
    turns = []
    for message in question.messages:
        content = message["content"]
        if not isinstance(content, str):
            content = "".join(part.get("text", f"<{part.get('type', 'media')}>") for part in content)
        turns.append(f"{message['role']}: {content}")
    return "\n".join(turns)


def _rollout_row(group: Group, position: int, rollout: Rollout, decode: Decode) -> dict[str, Any]:
    reward = rollout.reward
    return {
        "index": rollout.index,
        "wave": rollout.wave,
        "arm": rollout.arm,
        "reward": None if reward is None else {"total": reward.total, "accuracy": reward.accuracy, "format": reward.format},
        "failure": rollout.failure,
        "advantage": None if group.advantages is None else float(group.advantages[position]),
        "length": len(rollout.completion.token_ids),
        "finish": rollout.completion.finish_reason,
        "prefilled": group.prompt.prefilled,
        "pieces": _pieces(rollout.completion, decode),
    }


def _pieces(completion: Completion, decode: Decode) -> list[Any]:
    """The response in order: text the policy drew freely, and one object per masked position."""
    tokens, trace = completion.token_ids.tolist(), completion.trace
    traced = {} if trace is None else {int(position): row for row, position in enumerate(trace.positions)}
    pieces: list[Any] = []
    start = 0
    for position in [index for index, masked in enumerate(completion.masked) if masked]:
        if position > start:
            pieces.append(_text_between(tokens, start, position, decode))
        piece: dict[str, Any] = {"position": position, "drawn": _text_between(tokens, position, position + 1, decode)}
        if trace is not None and position in traced:
            row = traced[position]
            piece |= {
                "removed": decode([int(trace.removed_ids[row])]),
                "top_prob": float(trace.removed_probs[row]),
                "rank": int(trace.drawn_ranks[row]),
            }
        pieces.append(piece)
        start = position + 1
    if start < len(tokens):
        pieces.append(_text_between(tokens, start, len(tokens), decode))
    return pieces


def _text_between(tokens: list[int], start: int, end: int, decode: Decode) -> str:
    """What the tokens add to the text before them: tokenizers put spaces between words, so pieces are not decoded alone."""
    context = max(0, start - CONTEXT)
    before, through = decode(tokens[context:start]) if start else "", decode(tokens[context:end])
    return through[len(before) :] if through.startswith(before) else decode(tokens[start:end])
