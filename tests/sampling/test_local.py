"""The local engine on a real tiny model: exact log-probs and flags, whatever the batch, padding and stop rules."""

import asyncio
import copy
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import Qwen3ForCausalLM

from headrace.config import DirectoryModel, ModelConfig
from headrace.policy.model import Policy
from headrace.records import Completion, Prompt, SampleRequest, SamplingParameters, TopTokenRule
from headrace.sampling import local, trace
from headrace.sampling.local import LocalEngine
from tests.sampling.tiny_policy import ROUNDING, WORDS, Tiny

RULE = TopTokenRule(threshold=0.95, token_filter="none")


def requests(
    prompts: Sequence[Prompt], rollouts: int, mask: TopTokenRule | None = None, max_tokens: int = 24, **parameters: object
) -> list[SampleRequest]:
    return [
        SampleRequest(prompt, i, 1000 * number + i, SamplingParameters(max_tokens=max_tokens, **parameters), mask)
        for number, prompt in enumerate(prompts)
        for i in range(rollouts)
    ]


def sample(tiny: Tiny, wanted: Sequence[SampleRequest], **options: object) -> list[Completion]:
    return asyncio.run(LocalEngine(tiny.policy, tiny.encoder, **options).sample(wanted))


def raw_logits(tiny: Tiny, request: SampleRequest, completion: Completion) -> Tensor:
    """[L, V] of a teacher-forced forward of the whole row through transformers, banned ids at −inf."""
    ids = torch.from_numpy(np.concatenate([request.prompt.token_ids, completion.token_ids]))[None]
    with torch.no_grad():
        logits = tiny.policy.model(input_ids=ids).logits[0, len(request.prompt.token_ids) - 1 : -1].double()
    return logits.index_fill_(1, torch.tensor(tiny.encoder.banned_ids), -torch.inf)


def same(a: Completion, b: Completion) -> bool:
    return a.token_ids.tolist() == b.token_ids.tolist() and a.masked.tolist() == b.masked.tolist()


@pytest.fixture(scope="module")
def drawn(tiny: Tiny) -> list[tuple[SampleRequest, Completion]]:
    """Six prompts of different length, four rollouts each; every second prompt under the mask."""
    prompts = tiny.prompts([3, 17, 9, 9, 26, 1])
    wanted = [replace(r, mask=RULE) if number // 4 % 2 else r for number, r in enumerate(requests(prompts, 4))]
    return list(zip(wanted, sample(tiny, wanted), strict=True))


def teacher_forced(tiny: Tiny, request: SampleRequest, completion: Completion) -> Tensor:
    """[L] log-probs of a response under the distribution it was drawn from: without the top token where the mask fired."""
    logits = raw_logits(tiny, request, completion)
    masked = torch.from_numpy(completion.masked)
    logits[masked, logits.argmax(1)[masked]] = -torch.inf
    return logits.log_softmax(1).gather(1, torch.from_numpy(completion.token_ids).long()[:, None]).squeeze(1)


def test_logprobs_are_those_of_a_teacher_forced_forward(tiny: Tiny, drawn: list[tuple[SampleRequest, Completion]]) -> None:
    for request, completion in drawn:
        np.testing.assert_allclose(completion.logprobs, teacher_forced(tiny, request, completion), atol=ROUNDING)


def test_only_rounding_parts_them(tiny: Tiny) -> None:
    """In float64 a decoding step and a full forward agree to the last digit of the fp32 record."""
    exact = replace(tiny, policy=copy.deepcopy(tiny.policy).double())
    wanted = requests(tiny.prompts([3, 17, 9]), 4, RULE)
    for request, completion in zip(wanted, sample(exact, wanted), strict=True):
        np.testing.assert_allclose(completion.logprobs, teacher_forced(exact, request, completion), rtol=1e-6, atol=1e-9)


def test_a_policy_of_ordinary_scale_agrees_to_1e_5(tiny: Tiny) -> None:
    source = DirectoryModel(path=tiny.directory)
    ordinary = replace(tiny, policy=Policy.load(tiny.directory, ModelConfig(source=source), "cpu"))
    wanted = requests(tiny.prompts([3, 17, 9]), 4)
    for request, completion in zip(wanted, sample(ordinary, wanted), strict=True):
        np.testing.assert_allclose(completion.logprobs, teacher_forced(ordinary, request, completion), atol=1e-5)


def test_grouped_heads_share_keys_and_values(tiny: Tiny) -> None:
    config = copy.deepcopy(tiny.policy.model.config)
    config.update({"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Qwen3ForCausalLM(config)
    model.set_attn_implementation("headrace")
    for parameter in model.parameters():
        parameter.data *= 4.0
    grouped = replace(tiny, policy=Policy(model).double())
    wanted = requests(tiny.prompts([3, 17, 9]), 3, RULE)
    for request, completion in zip(wanted, sample(grouped, wanted), strict=True):
        np.testing.assert_allclose(completion.logprobs, teacher_forced(grouped, request, completion), rtol=1e-6, atol=1e-9)


def test_half_precision_is_fp32_from_the_head_on(tiny: Tiny) -> None:
    """The record keeps fp32 logits: bf16 ones would be off by 2^-9 of a logit near 15, 0.03 nats, at every other position."""
    half = replace(tiny, policy=copy.deepcopy(tiny.policy).bfloat16())
    seen: list[Tensor] = []
    hook = half.policy.model.get_decoder().norm.register_forward_hook(lambda _, inputs, output: seen.append(output[0, -1].double()))
    request = requests(tiny.prompts([9]), 1)[0]
    (completion,) = sample(half, [request])
    hook.remove()
    weight = half.policy.head_weight.detach().double()
    for hidden, token, logprob in zip(seen, completion.token_ids, completion.logprobs, strict=True):
        logits = (weight @ hidden).index_fill(0, torch.tensor(tiny.encoder.banned_ids), -torch.inf)
        assert logprob == pytest.approx(float(logits.log_softmax(0)[token]), abs=ROUNDING)


def test_flags_and_counts_are_the_rule(tiny: Tiny, drawn: list[tuple[SampleRequest, Completion]]) -> None:
    fired = 0
    for request, completion in drawn:
        probs = raw_logits(tiny, request, completion).softmax(1)
        inside, examined, confident = request.prompt.prefilled, 0, 0
        for position, token in enumerate(completion.token_ids):
            top, above = int(probs[position].argmax()), bool(probs[position].max() > 0.95)
            spared = top in (tiny.encoder.think_open, tiny.encoder.think_close)
            assert completion.masked[position] == (request.mask is not None and inside and above and not spared)
            assert not (completion.masked[position] and token == top)
            examined, confident = examined + inside, confident + (inside and above)
            inside = (inside and token != tiny.encoder.think_close) or token == tiny.encoder.think_open
        assert (completion.examined, completion.confident) == (examined, confident)
        fired += completion.masked.sum()
    assert fired > 20, "the example must exercise the mask"


def test_the_trace_describes_every_masked_position(tiny: Tiny, drawn: list[tuple[SampleRequest, Completion]]) -> None:
    for request, completion in drawn:
        if not completion.masked.any():
            assert completion.trace is None
            continue
        record = completion.trace
        assert record is not None
        assert record.positions.tolist() == np.flatnonzero(completion.masked).tolist()
        assert record.drawn_ids.tolist() == completion.token_ids[record.positions].tolist()
        logits = raw_logits(tiny, request, completion)[torch.from_numpy(record.positions).long()]
        ranked = logits.softmax(1).sort(dim=1, descending=True)
        assert record.removed_ids.tolist() == ranked.indices[:, 0].tolist()
        np.testing.assert_allclose(record.removed_probs, ranked.values[:, 0], atol=ROUNDING)
        np.testing.assert_allclose(record.runner_up_probs, ranked.values[:, 1], atol=ROUNDING)
        np.testing.assert_allclose(record.entropies, torch.distributions.Categorical(logits=logits).entropy(), atol=ROUNDING)
        ranks = [order.tolist().index(token) + 1 for order, token in zip(ranked.indices, record.drawn_ids, strict=True)]
        assert record.drawn_ranks.tolist() == [min(rank, 9) for rank in ranks]


def test_mask_statistics_of_a_known_row() -> None:
    probs = torch.tensor([[0.97, 0.014, 0.008, 0.005, 0.003]])
    runner_up, rank, entropy = trace.mask_statistics(probs.log(), torch.tensor([3])).squeeze(1).tolist()
    assert (runner_up, rank, entropy) == pytest.approx((0.014, 4, 0.171853), abs=1e-6)
    wide = torch.arange(20.0, 0.0, -1)[None]
    assert trace.mask_statistics(wide, torch.tensor([12]))[1].item() == 9
    certain = torch.full((1, 4), -torch.inf).index_fill(1, torch.tensor([0]), 0.0)
    assert trace.mask_statistics(certain, torch.tensor([0]))[2].item() == 0


def test_the_trace_stops_at_its_limit(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "TRACE_LIMIT", 10)
    completions = sample(tiny, requests(tiny.prompts([4, 6]), 6, RULE), batch_rows=6)
    assert sum(completion.masked.sum() for completion in completions) > 10
    assert sum(len(completion.trace.positions) for completion in completions if completion.trace) == 10


def test_the_same_requests_give_the_same_bits(tiny: Tiny) -> None:
    wanted = requests(tiny.prompts([5, 9, 14]), 3, RULE)
    for a, b in zip(sample(tiny, wanted), sample(tiny, wanted), strict=True):
        assert same(a, b)
        assert a.logprobs.tobytes() == b.logprobs.tobytes()


def test_a_draw_does_not_depend_on_its_batch(tiny: Tiny) -> None:
    wanted = requests(tiny.prompts([5, 31, 14, 2]), 3, RULE, max_tokens=16)
    together = sample(tiny, wanted)
    small, shuffled = sample(tiny, wanted, batch_rows=3), sample(tiny, wanted[::-1])[::-1]
    alone = [sample(tiny, [request])[0] for request in wanted]
    for others in (small, shuffled, alone):
        for a, b in zip(together, others, strict=True):
            assert same(a, b)
            np.testing.assert_allclose(a.logprobs, b.logprobs, atol=ROUNDING)


def test_greedy_output_is_the_argmax_whatever_the_padding(tiny: Tiny) -> None:
    wanted = requests(tiny.prompts([1, 40, 12]), 1, temperature=0.0)
    for request, completion in zip(wanted, sample(tiny, wanted), strict=True):
        assert completion.token_ids.tolist() == raw_logits(tiny, request, completion).argmax(1).tolist()
        assert not completion.logprobs.any()  # of a point mass


def test_sampled_and_greedy_requests_share_a_batch(tiny: Tiny) -> None:
    (prompt,) = tiny.prompts([8])
    mixed = [requests([prompt], 1, temperature=0.0)[0], requests([prompt], 2)[1], requests([prompt], 1, temperature=0.5)[0]]
    for a, request in zip(sample(tiny, mixed), mixed, strict=True):
        assert same(a, sample(tiny, [request])[0])


def test_masked_draws_follow_the_masked_distribution(tiny: Tiny) -> None:
    """χ² over the first token of many rollouts: the mask leaves p / (1 − p*) for the other tokens."""
    prompt = next(p for p in _first_position_confident(tiny))
    count = 4000
    wanted = [SampleRequest(prompt, i, i, SamplingParameters(max_tokens=1), RULE) for i in range(count)]
    completions = sample(tiny, wanted, batch_rows=4000)
    probs = raw_logits(tiny, wanted[0], completions[0])[0].softmax(0)
    probs[probs.argmax()] = 0
    expected = (probs / probs.sum() * count).numpy()
    seen = np.bincount([int(completion.token_ids[0]) for completion in completions], minlength=len(expected))
    assert all(completion.masked[0] for completion in completions)
    assert not seen[expected == 0].any()
    large = expected >= 5
    observed, wanted_counts = [*seen[large], seen[~large].sum()], [*expected[large], expected[~large].sum()]
    statistic = sum((o - e) ** 2 / e for o, e in zip(observed, wanted_counts, strict=True))
    degrees = len(observed) - 1
    assert degrees >= 5
    assert statistic < degrees + 4 * np.sqrt(2 * degrees)  # beyond four standard deviations of χ²


def _first_position_confident(tiny: Tiny) -> Iterator[Prompt]:
    for word in WORDS:
        prompt = tiny.prompt(word)
        (completion,) = sample(tiny, [SampleRequest(prompt, 0, 0, SamplingParameters(max_tokens=1))])
        if completion.confident:
            yield prompt


@pytest.mark.parametrize("parameters", [{"top_k": 3}, {"top_p": 0.7}, {"top_k": 4, "top_p": 0.8, "temperature": 2.0}])
def test_truncated_draws_report_the_truncated_distribution(tiny: Tiny, parameters: dict[str, float]) -> None:
    wanted = requests(tiny.prompts([4, 7]), 4, max_tokens=12, **parameters)
    for request, completion in zip(wanted, sample(tiny, wanted), strict=True):
        scores = raw_logits(tiny, request, completion) / parameters.get("temperature", 1.0)
        for row, token, logprob in zip(scores, completion.token_ids, completion.logprobs, strict=True):
            order = row.argsort(descending=True)[: parameters.get("top_k", len(row))]
            probs = row[order].softmax(0)
            kept = order[probs.cumsum(0) - probs < parameters.get("top_p", 1.0)]
            assert token in kept
            assert logprob == pytest.approx(float(row[token] - row[kept].logsumexp(0)), abs=ROUNDING)


def test_banned_ids_are_never_drawn_even_when_the_model_wants_them(tiny: Tiny) -> None:
    banned = tiny.encoder.banned_ids[0]
    with _boosted(tiny, banned, 100.0):
        completions = sample(tiny, requests(tiny.prompts([5]), 8))
    assert not any(np.isin(completion.token_ids, tiny.encoder.banned_ids).any() for completion in completions)


@contextmanager
def _boosted(tiny: Tiny, token: int, factor: float) -> Iterator[None]:
    """Make a token's head row larger, so that it is often the most likely."""
    weight = tiny.policy.head_weight
    before = weight[token].detach().clone()
    with torch.no_grad():
        weight[token] *= factor
    try:
        yield
    finally:
        with torch.no_grad():
            weight[token] = before


def test_the_end_token_ends_a_response_and_belongs_to_it(tiny: Tiny) -> None:
    with _boosted(tiny, tiny.encoder.eos_ids[0], 4.0):
        completions = sample(tiny, requests(tiny.prompts([5, 11]), 16))
    ended = [completion for completion in completions if completion.finish_reason == "stop"]
    assert ended
    assert len({len(completion.token_ids) for completion in completions}) > 2, "rows must leave the batch at different times"
    for completion in completions:
        places = np.flatnonzero(np.isin(completion.token_ids, tiny.encoder.eos_ids))
        assert places.tolist() == ([len(completion.token_ids) - 1] if completion.finish_reason == "stop" else [])
        lengths = {len(column) for column in (completion.logprobs, completion.masked, completion.versions, completion.token_ids)}
        assert len(lengths) == 1


def test_rows_that_leave_do_not_disturb_those_that_stay(tiny: Tiny) -> None:
    with _boosted(tiny, tiny.encoder.eos_ids[0], 4.0):
        wanted = requests(tiny.prompts([5, 11, 3]), 6, RULE, max_tokens=30)
        together, alone = sample(tiny, wanted), [sample(tiny, [request])[0] for request in wanted]
    for a, b in zip(together, alone, strict=True):
        assert same(a, b)
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=ROUNDING)


def test_an_end_token_as_the_first_one_is_a_response_of_one_token(tiny: Tiny) -> None:
    (prompt,) = tiny.prompts([5])
    first = sample(tiny, requests([prompt], 1, temperature=0.0))[0].token_ids[0]
    (completion,) = sample(tiny, requests([prompt], 1, temperature=0.0, stop_ids=(int(first),)))
    assert (completion.token_ids.tolist(), completion.finish_reason, completion.examined) == ([first], "stop", 1)


def test_stop_strings_end_a_response_where_they_first_appear(tiny: Tiny) -> None:
    (prompt,) = tiny.prompts([5])
    (free,) = sample(tiny, requests([prompt], 1))
    text = tiny.encoder.decode(free.token_ids)
    words = text.split()
    stop = " ".join(words[4:6])  # spans two tokens
    end = next(i for i in range(1, len(words) + 1) if stop in " ".join(words[:i]))
    (stopped,) = sample(tiny, requests([prompt], 1, stop=(stop, "never seen")))
    assert stopped.token_ids.tolist() == free.token_ids[:end].tolist()
    assert (stopped.finish_reason, free.finish_reason) == ("stop", "length")
    (prompt_has_it,) = sample(tiny, requests([tiny.prompt("z", "z", "z")], 1, stop=("z z z",), max_tokens=2))
    assert prompt_has_it.finish_reason == "length"


def test_token_limits_are_per_request(tiny: Tiny) -> None:
    (prompt,) = tiny.prompts([5])
    wanted = [SampleRequest(prompt, i, 7, SamplingParameters(max_tokens=limit)) for i, limit in enumerate((0, 1, 5, 9))]
    completions = sample(tiny, wanted)
    assert [len(completion.token_ids) for completion in completions] == [0, 1, 5, 9]
    assert {completion.finish_reason for completion in completions} == {"length"}
    assert completions[2].token_ids.tolist() == completions[3].token_ids[:5].tolist()


def test_the_cap_stops_the_mask(tiny: Tiny) -> None:
    wanted = requests(tiny.prompts([5, 9]), 8, replace(RULE, cap=2))
    free = sample(tiny, requests(tiny.prompts([5, 9]), 8, RULE))
    completions = sample(tiny, wanted)
    assert max(completion.masked.sum() for completion in completions) == 2
    assert any(completion.masked.sum() > 2 for completion in free)
    for completion in completions:
        assert completion.cap_hit == (completion.masked.sum() == 2)


def test_the_lexical_filter_spares_what_has_no_letter(tiny: Tiny) -> None:
    completions = sample(tiny, requests(tiny.prompts([5, 9, 13]), 8, replace(RULE, token_filter="lexical")))
    removed = Counter(int(token) for completion in completions if completion.trace for token in completion.trace.removed_ids)
    assert removed
    assert all(tiny.encoder.lexical[token] for token in removed)


def test_without_a_prefilled_tag_nothing_is_masked_until_the_policy_opens_one(tiny: Tiny) -> None:
    wanted = requests([tiny.prompt("a", "<think>", "b", prefilled=False)], 8, RULE)
    for completion in sample(tiny, wanted):
        opened = np.flatnonzero(completion.token_ids == tiny.encoder.think_open)
        first = opened[0] + 1 if len(opened) else len(completion.token_ids)
        assert not completion.masked[:first].any()


def test_each_prompt_is_run_once(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    original = tiny.policy.prefill_inputs
    monkeypatch.setattr(tiny.policy, "prefill_inputs", lambda prompts: seen.append(len(prompts)) or original(prompts))
    prompts = tiny.prompts([5, 9, 13])
    interleaved = [request for i in range(4) for request in requests(prompts, 4)[i::4]]
    sample(tiny, interleaved)
    assert seen == [3]
    seen.clear()
    sample(tiny, interleaved, batch_rows=5)  # two groups of four do not fit into one batch
    assert seen == [1, 1, 1]


def test_long_prompts_are_run_in_several_passes(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = requests(tiny.prompts([12, 20, 5, 7]), 2)
    whole = sample(tiny, wanted)
    monkeypatch.setattr("headrace.sampling.decoder.PREFILL_TOKENS", 21)
    assert all(same(a, b) for a, b in zip(whole, sample(tiny, wanted), strict=True))


def test_buffers_grow_past_what_was_reserved(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = requests(tiny.prompts([12, 5]), 2, RULE)
    whole = sample(tiny, wanted)
    monkeypatch.setattr("headrace.sampling.decoder.RESERVED_TOKENS", 2)
    assert all(same(a, b) for a, b in zip(whole, sample(tiny, wanted), strict=True))


def test_tokens_carry_the_version_and_the_engine_sees_new_weights(tiny: Tiny) -> None:
    version = [3]
    engine = LocalEngine(tiny.policy, tiny.encoder, version=lambda: version[0])
    wanted = requests(tiny.prompts([5]), 2)
    before = asyncio.run(engine.sample(wanted))
    version[0] = 4
    with _boosted(tiny, tiny.encoder.eos_ids[0], 100.0):
        after = asyncio.run(engine.sample(wanted))
    assert {int(v) for c in before for v in c.versions} == {3}
    assert {int(v) for c in after for v in c.versions} == {4}
    assert not all(same(a, b) for a, b in zip(before, after, strict=True))


def test_the_model_is_left_as_it_was(tiny: Tiny) -> None:
    model = tiny.policy.model
    model.train()
    model.model.norm.eval()
    try:
        sample(tiny, requests(tiny.prompts([5]), 1, max_tokens=2))
        assert model.training
        assert model.model.layers[0].training
        assert not model.model.norm.training
        assert model.get_decoder().config._attn_implementation == "headrace"
        assert all(parameter.requires_grad for parameter in model.parameters())
    finally:
        model.eval()


def test_a_prompt_that_leaves_no_room_is_refused(tiny: Tiny) -> None:
    context = tiny.policy.model.config.max_position_embeddings
    prompt = tiny.prompt(*["a"] * (context - 1), name="long")
    with pytest.raises(ValueError, match=rf"question long: the prompt has {context} tokens, the model's context is {context}"):
        sample(tiny, requests([prompt], 1))
    (completion,) = sample(tiny, requests([tiny.prompt(*["a"] * (context - 4))], 1))  # three tokens are left
    assert (len(completion.token_ids), completion.finish_reason) == (3, "length")


def test_an_empty_prompt_is_refused(tiny: Tiny) -> None:
    with pytest.raises(ValueError, match="question q: the prompt is empty"):
        sample(tiny, requests([tiny.prompt(prefilled=False)], 1))


def test_a_stop_id_that_is_no_token_is_refused(tiny: Tiny) -> None:
    with pytest.raises(ValueError, match=r"stop_ids = \[99999\]: expected ids below"):
        sample(tiny, requests([tiny.prompt("a")], 1, stop_ids=(99999,)))


def test_no_requests_give_no_completions(tiny: Tiny) -> None:
    assert sample(tiny, []) == []


def test_weights_that_are_not_finite_give_one_clear_line(tiny: Tiny) -> None:
    with (
        _boosted(tiny, tiny.encoder.tokenizer.convert_tokens_to_ids("a"), float("nan")),
        pytest.raises(ValueError, match=r"response position 0: .*the policy's weights are not finite"),
    ):
        sample(tiny, requests([tiny.prompt("a", "b")], 2))
