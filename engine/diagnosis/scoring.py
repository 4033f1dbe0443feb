"""Teacher-forces a bank under one checkpoint: with the pictures, with degraded ones, and with degraded questions.

Scores go to a file per checkpoint, named by all they depend on, a row per response as it is done: what was stopped goes on.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from headrace.config import LossConfig, SamplingConfig
from headrace.credit.claims import Quote, TokenReader
from headrace.credit.pacg import corrected_persistence
from headrace.credit.responses import degraded_media, spans
from headrace.diagnosis.bank import Bank, Entry, Response, digest
from headrace.diagnosis.points import Point
from headrace.diagnosis.text_control import degraded_text
from headrace.encoding import Encoder
from headrace.files import whole_lines
from headrace.pixels import Kind
from headrace.policy.counterfactual import score_counterfactual
from headrace.policy.model import Policy
from headrace.policy.packing import build_batch
from headrace.policy.parallel import Parallel
from headrace.policy.score import score_batch
from headrace.records import Array, Completion, Group, Prompt, Reward, Rollout

FORMAT = 1
QUESTIONS = 16  # whose scores are written at once
ANY_LENGTH = 1 << 30

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Settings:
    intervention: Kind = "patches"
    text_control: bool = True
    tokens: int = 16_384
    """Of one forward pass."""


@dataclass(frozen=True, slots=True)
class Fixed:
    """A response as tokens of the checkpoint's tokenizer."""

    entry: Entry
    number: int
    """Among the question's responses."""
    token_ids: Array  # [L] int32
    claims: tuple[tuple[int, Array], ...]
    """Number of a claim and its token positions; claims that are nowhere in the response, or in its answer, are left out."""
    retokenized: bool
    """The bank's token ids do not spell the response here, or it has none."""


def score(point: Point, bank: Bank, settings: Settings, folder: Path, progress: Callable[[int, int], None]) -> list[Row]:
    """A row per response in the order of the bank.

    ``question``, ``response`` and ``claims``: per aligned claim its number, ``tokens``, ``efs`` (nats), ``delta`` and ``text`` (corrected
    persistence without the picture and without the words, nats); null where it cannot be told.

    Raises:
        ValueError: the model cannot be loaded, takes no pictures, or a question does not fit it.
    """
    key = [FORMAT, digest(bank.entries), point.fingerprint, point.dtype, settings.intervention, settings.text_control]
    path = folder / "scores" / f"{hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    done = _rows(path)
    waiting = [entry for entry in bank.entries if (entry.question.id, len(entry.responses) - 1) not in done]
    progress(len(bank.entries) - len(waiting), len(bank.entries))
    if waiting:
        scorer = _Scorer(point, bank, settings)
        with path.open("a", encoding="utf-8") as file:
            for start in range(0, len(waiting), QUESTIONS):
                for row in scorer.rows(waiting[start : start + QUESTIONS]):
                    file.write(json.dumps(row) + "\n")
                    done[row["question"], row["response"]] = row
                file.flush()
                os.fsync(file.fileno())
                progress(len(bank.entries) - len(waiting) + min(start + QUESTIONS, len(waiting)), len(bank.entries))
    return [done[entry.question.id, number] for entry in bank.entries for number in range(len(entry.responses))]


def _rows(path: Path) -> dict[tuple[str, int], Row]:
    """Rows by question and response; a torn last line of a killed process is cut off."""
    try:
        rows = [json.loads(line) for line in whole_lines(path)]
        return {(row["question"], row["response"]): row for row in rows}
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{path}: holds what no diagnosis writes; delete it") from None


class _Scorer:
    """A loaded checkpoint with the bank in its tokens."""

    def __init__(self, point: Point, bank: Bank, settings: Settings) -> None:
        self.settings = settings
        self.encoder = _encoder(point.directory, bank)
        self.policy: Policy = point.load()
        if self.policy.vision is None:
            raise ValueError(f"{point.directory}: takes no pictures, so nothing can be taken from it")
        self.parallel = replace(Parallel(), device=self.policy.head_weight.device)

    def rows(self, entries: Sequence[Entry]) -> Iterator[Row]:
        """Score some questions."""
        fixed = [response for entry in entries for response in fixed_responses(entry, self.encoder)]
        batch = _batch(fixed, [self._prompt(entry, False) for entry in entries], entries)
        media = degraded_media(batch, np.ones(len(fixed), dtype=bool), self.settings.intervention)
        scores = score_counterfactual(self.policy, batch, media, self.encoder.banned_ids, self.settings.tokens, self.parallel)
        plain = [scores.logprobs[span] for span in spans(batch)]
        hidden = self._without_words(fixed, entries) if self.settings.text_control else [None] * len(fixed)
        for row, (response, span) in enumerate(zip(fixed, spans(batch), strict=True)):
            places = [place for _, place in response.claims]
            delta, _ = corrected_persistence(plain[row], scores.logprobs_cf[span], places)
            text = [np.nan] * len(places) if hidden[row] is None else corrected_persistence(plain[row], hidden[row], places)[0]
            changed = bool(scores.rows[row])
            yield {
                "question": response.entry.question.id,
                "response": response.number,
                "retokenized": response.retokenized,
                "unchanged": not changed,
                "claims": [
                    {
                        "claim": number,
                        "tokens": len(place),
                        "efs": _finite(scores.kl[span][place].mean(dtype=np.float64)) if changed and np.isfinite(delta[k]) else None,
                        "delta": _finite(delta[k]) if changed else None,
                        "text": _finite(text[k]),
                    }
                    for k, (number, place) in enumerate(response.claims)
                ],
            }

    def _without_words(self, fixed: Sequence[Fixed], entries: Sequence[Entry]) -> list[Array | None]:
        """Log-probs [L] of every response after its question with words hidden; None where none was hidden."""
        batch = _batch(fixed, [self._prompt(entry, True) for entry in entries], entries)
        scores = score_batch(self.policy, batch, self.encoder.banned_ids, self.settings.tokens, self.parallel.device)
        same = [degraded_text(response.entry.question) == response.entry.question for response in fixed]
        return [None if kept else scores.logprobs[span] for kept, span in zip(same, spans(batch), strict=True)]

    def _prompt(self, entry: Entry, hidden: bool) -> Prompt:
        return _encoded(entry, self.encoder, degraded_text(entry.question) if hidden else entry.question)


def _encoder(directory: Path, bank: Bank) -> Encoder:
    """The checkpoint's encoder; tokens that responses of the bank ended with end responses here, too."""
    ends = {response.token_ids[-1] for entry in bank.entries for response in entry.responses if response.token_ids and response.finished}
    return Encoder.load(directory, think_prefill=False, system_prompt=None, max_prompt_tokens=ANY_LENGTH, stop_ids=sorted(ends))


def _encoded(entry: Entry, encoder: Encoder, question: Any) -> Prompt:
    return replace(encoder, think_prefill=entry.think_prefill).encode(question)


def fixed_responses(entry: Entry, encoder: Encoder) -> list[Fixed]:
    """The responses of a question in the tokens of ``encoder``, with their claims.

    Raises:
        ValueError: the prompt does not fit the model, or a response has no token.
    """
    prompt = _encoded(entry, encoder, entry.question)
    reader = TokenReader(encoder)
    found = []
    for number, response in enumerate(entry.responses):
        token_ids, retokenized = _tokens(response, encoder)
        if not len(token_ids):
            raise ValueError(f"question {entry.question.id}: responses[{number}] has no token in this tokenizer")
        text = reader.read(prompt, token_ids)
        aligned = [(k, text.claims([Quote(claim.text, claim.occurrence)]).spans) for k, claim in enumerate(response.claims or ())]
        claims = tuple((k, np.arange(*places[0])) for k, places in aligned if places)
        found.append(Fixed(entry, number, token_ids, claims, retokenized))
    return found


def _tokens(response: Response, encoder: Encoder) -> tuple[Array, bool]:
    """Tokens of a response, and whether they had to be made anew."""
    ids = response.token_ids
    if ids and max(ids) < encoder.vocab_size and set(encoder.banned_ids).isdisjoint(ids):
        said = ids[:-1] if response.finished and ids[-1] in encoder.eos_ids else ids
        if encoder.decode(said) == response.text:
            return np.asarray(ids, dtype=np.int32), False
    made = encoder.tokenizer.encode(response.text, add_special_tokens=False)
    return np.asarray([*made, *encoder.eos_ids[:1]] if response.finished else made, dtype=np.int32), True


def _batch(fixed: Sequence[Fixed], prompts: Sequence[Prompt], entries: Sequence[Entry]) -> Any:
    """One row per response, in order; drawn at temperature 1."""
    groups = []
    for prompt, entry in zip(prompts, entries, strict=True):
        rollouts = tuple(_rollout(response) for response in fixed if response.entry is entry)
        groups.append(Group(prompt, rollouts, advantages=np.zeros(len(rollouts), dtype=np.float32)))
    return build_batch(groups, LossConfig(), SamplingConfig(max_tokens=1))


def _rollout(response: Fixed) -> Rollout:
    length = len(response.token_ids)
    zeros = np.zeros(length, dtype=np.float32)
    completion = Completion(response.token_ids, zeros, np.zeros(length, dtype=bool), np.zeros(length, dtype=np.int32), "stop")
    return Rollout(response.number, 1, "free", completion, reward=Reward(0.0, 0.0))


def _finite(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None
