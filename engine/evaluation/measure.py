"""Accuracy on held-out questions: greedy, sampled mean, majority vote."""

import asyncio
from collections import Counter, defaultdict
from collections.abc import Sequence
from math import comb
from typing import Any

import numpy as np

from headrace.config import Config, ConfigError, RewardConfig
from headrace.encoding import Encoder
from headrace.questions.sets import QuestionSet, stops_at_bad_rows
from headrace.records import Engine, Prompt, Rollout, SampleRequest, SamplingParameters, Scorer
from headrace.rewards import extract
from headrace.rewards.scoring import number
from headrace.streams import stream_seed


def majority(votes: Sequence[str | None]) -> int | None:
    """Position of the first vote for the winning answer; None when no vote is valid.

    Plurality wins; of tied answers the one whose first vote comes earliest. ``None`` votes are dropped.
    """
    counts = Counter(vote for vote in votes if vote is not None)
    if not counts:
        return None
    return votes.index(max(counts, key=lambda answer: counts[answer]))


def pass_at(right: int, total: int, k: int) -> float:
    """1 - C(n - c, k) / C(n, k): the chance that ``k`` of the ``total`` samples, drawn without replacement, hold a right one."""
    return 1 - comb(total - right, k) / comb(total, k)


def sizes(samples: int) -> list[int]:
    """The k of pass@k: powers of two up to the number of samples, and that number."""
    return sorted({2**power for power in range(samples.bit_length())} | {samples})


def held_out_prompts(questions: QuestionSet, encoder: Encoder, config: Config) -> tuple[list[Prompt], list[str]]:
    """The first ``evaluation.questions`` that can be put to the model, and why others before them cannot.

    Raises:
        ValueError: one cannot and bad rows are to stop the run, or none can.
    """
    prompts: list[Prompt] = []
    left_out: list[str] = []
    for index in range(len(questions)):
        if len(prompts) == config.evaluation.questions:
            break
        try:
            prompts.append(encoder.encode(questions.question(index)))
        except ValueError as error:
            if stops_at_bad_rows(config.questions.held_out):
                raise
            left_out.append(str(error))
    if not prompts:
        raise ConfigError(f"none of the {len(questions)} held-out questions can be put to the model; the first: {left_out[0]}")
    return prompts, left_out


def _room(prompt: Prompt, config: Config) -> int:
    """Response tokens; at least one, where the prompt itself fills the context."""
    evaluation = config.evaluation
    most = evaluation.max_tokens or config.sampling.max_tokens
    return most if evaluation.context is None else max(1, min(most, evaluation.context - len(prompt.token_ids)))


def _requests(prompt: Prompt, config: Config) -> list[SampleRequest]:
    """One greedy request, then the sampled ones; seeds do not depend on the step, so evaluations are paired."""
    sampling, evaluation = config.sampling, config.evaluation
    shared: dict[str, Any] = {"max_tokens": _room(prompt, config), "stop": sampling.stop, "stop_ids": sampling.stop_ids}
    greedy = SamplingParameters(temperature=0.0, **shared)
    sampled = SamplingParameters(temperature=evaluation.temperature, top_p=evaluation.top_p, top_k=evaluation.top_k, **shared)
    return [
        SampleRequest(
            prompt=prompt,
            index=index,
            seed=stream_seed(config.run.seed, "evaluation", 0, prompt.question.id, index),
            parameters=sampled if index else greedy,
        )
        for index in range(evaluation.samples + 1)
    ]


def _vote(text: str, rules: RewardConfig) -> str | None:
    """The answer a response gives, so that equal numbers are equal votes."""
    answer = extract(text, rules.contract, rules.mode)
    value = None if answer is None else number(answer)
    return answer if value is None else str(value.normalize() + 0)  # + 0 takes the sign off a zero


def _judge(prompt: Prompt, rollouts: Sequence[Rollout], rules: RewardConfig) -> dict[str, Any]:
    """Row of one question; an unscored response counts as wrong."""
    right = [int(rollout.reward is not None and rollout.reward.accuracy >= 1) for rollout in rollouts]
    sampled, extra = rollouts[1:], prompt.question.extra
    winner = majority([_vote(rollout.text, rules) for rollout in sampled])
    return {
        "id": prompt.question.id,
        "source": prompt.question.source,
        "hops": extra.get("hops"),
        "types": sorted(set(map(str, extra.get("hop_types") or ()))),
        "greedy": right[0],
        "samples": right[1:],
        "maj": 0 if winner is None else right[1 + winner],
        "format": float(np.mean([rollout.reward.format if rollout.reward else 0.0 for rollout in sampled])),
        "length": float(np.mean([len(rollout.completion.token_ids) for rollout in sampled])),
        "clipped": float(np.mean([rollout.completion.finish_reason == "length" for rollout in sampled])),
    }


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Rates over questions; ``pass_at`` maps k to pass@k."""
    samples = min(len(row["samples"]) for row in rows)
    return {
        "questions": len(rows),
        "mean_accuracy": float(np.mean([np.mean(row["samples"]) for row in rows])),
        "greedy_accuracy": float(np.mean([row["greedy"] for row in rows])),
        "maj_accuracy": float(np.mean([row["maj"] for row in rows])),
        "pass_at": {str(k): float(np.mean([pass_at(sum(row["samples"]), len(row["samples"]), k) for row in rows])) for k in sizes(samples)},
        "format_rate": float(np.mean([row["format"] for row in rows])),
        "length_mean": float(np.mean([row["length"] for row in rows])),
        "clipped_share": float(np.mean([row["clipped"] for row in rows])),
    }


async def answer(
    prompts: Sequence[Prompt], engine: Engine, scorer: Scorer, encoder: Encoder, config: Config, *, texts: bool = False
) -> list[dict[str, Any]]:
    """Answer and judge every question: one row each.

    ``samples`` holds 1 for every right sampled response, ``greedy`` and ``maj`` are 1 or 0; with ``texts`` the row also has all
    ``responses``, the greedy one first.
    """
    requests = [request for prompt in prompts for request in _requests(prompt, config)]
    completions = await engine.sample(requests)
    rollouts = [
        Rollout(
            index=request.index, wave=1, arm="free", completion=completion, text=encoder.response_text(request.prompt, completion.token_ids)
        )
        for request, completion in zip(requests, completions, strict=True)
    ]
    size = config.evaluation.samples + 1
    scored = await asyncio.gather(
        *(
            scorer.score(prompt.question, rollouts[start : start + size])
            for prompt, start in zip(prompts, range(0, len(rollouts), size), strict=True)
        )
    )
    rows = [_judge(prompt, group, config.reward) for prompt, group in zip(prompts, scored, strict=True)]
    if texts:
        rows = [{**row, "responses": [rollout.text for rollout in group]} for row, group in zip(rows, scored, strict=True)]
    return rows


async def evaluate(prompts: Sequence[Prompt], engine: Engine, scorer: Scorer, encoder: Encoder, config: Config) -> dict[str, Any]:
    """Evaluate the engine's present weights on ``prompts``.

    Returns: questions, mean_accuracy (over sampled responses), greedy_accuracy, maj_accuracy, pass_at, format_rate,
        length_mean (tokens), clipped_share, by_hops (the same per hop count) and per_question rows.
    """
    rows = await answer(prompts, engine, scorer, encoder, config)
    by_hops: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        if row["hops"] is not None:
            by_hops[str(row["hops"])].append(row)
    return {**summary(rows), "by_hops": {hops: summary(by_hops[hops]) for hops in sorted(by_hops)}, "per_question": rows}
