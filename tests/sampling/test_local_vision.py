"""The local engine on a tiny Qwen3-VL: pictures of different groups and plain text in one batch."""

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from headrace.config import ModelConfig, ScratchVisionModel
from headrace.encoding import Encoder
from headrace.policy.model import PackedRows, Policy
from headrace.policy.scratch import build_vision
from headrace.records import Completion, Media, Prompt, Question, SampleRequest, SamplingParameters, TopTokenRule
from headrace.sampling.local import LocalEngine
from tests.sampling.tiny_policy import ROUNDING, WORDS

RULE = TopTokenRule(threshold=0.95, token_filter="none")


@pytest.fixture(scope="module", params=[False, True], ids=["frozen", "trained"])
def seeing(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Policy, Encoder]:
    directory = tmp_path_factory.mktemp("seeing")
    source = ScratchVisionModel(kind="scratch_vision", hidden=32, layers=2, heads=2, vision_hidden=32, vision_layers=2)
    build_vision(directory, source, WORDS, seed=2)
    policy = Policy.load(directory, ModelConfig(source=source, train_vision=request.param), "cpu")
    for name, parameter in policy.model.named_parameters():
        if parameter.dim() >= 2 and "embed" not in name:
            parameter.data *= 6.0
    policy.model.get_decoder().norm.weight.data *= 50.0
    return policy, Encoder.load(directory, think_prefill=True, system_prompt=None, max_prompt_tokens=512)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> list[Media]:
    folder, rng = tmp_path_factory.mktemp("pictures"), np.random.default_rng(0)
    media = []
    for number, size in enumerate([(64, 64), (96, 64)]):
        path = folder / f"{number}.png"
        Image.fromarray(rng.integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)).save(path)
        media.append(Media("image", str(path)))
    return media


def prompts(encoder: Encoder, pictures: list[Media]) -> list[Prompt]:
    """A picture, another one with longer text, no picture, the first picture again with other words."""
    rows = [("<image> a b ?", (pictures[0],)), ("c d e f <image> g ?", (pictures[1],)), ("h i j ?", ()), ("<image> k ?", (pictures[0],))]
    return [
        encoder.encode(Question(id=f"q{number}", messages=({"role": "user", "content": text},), answer="", media=media))
        for number, (text, media) in enumerate(rows)
    ]


def sample(seeing: tuple[Policy, Encoder], wanted: list[SampleRequest]) -> list[Completion]:
    return asyncio.run(LocalEngine(*seeing).sample(wanted))


def requests(wanted: list[Prompt], rollouts: int = 3) -> list[SampleRequest]:
    parameters = SamplingParameters(max_tokens=12)
    return [SampleRequest(prompt, i, 10 * n + i, parameters, RULE) for n, prompt in enumerate(wanted) for i in range(rollouts)]


def teacher_forced(policy: Policy, encoder: Encoder, request: SampleRequest, completion: Completion) -> Tensor:
    ids = torch.from_numpy(np.concatenate([request.prompt.token_ids, completion.token_ids]))
    row = PackedRows(ids, torch.tensor([0, len(ids)], dtype=torch.int32), len(ids), (request.prompt.question.media,))
    with torch.no_grad():
        logits = policy(row, lambda hidden, weight: hidden @ weight.T)[len(request.prompt.token_ids) - 1 : -1].double()
    logits.index_fill_(1, torch.tensor(encoder.banned_ids), -torch.inf)
    masked = torch.from_numpy(completion.masked)
    logits[masked, logits.argmax(1)[masked]] = -torch.inf
    return logits.log_softmax(1).gather(1, torch.from_numpy(completion.token_ids).long()[:, None]).squeeze(1)


def test_logprobs_are_those_of_a_teacher_forced_forward(seeing: tuple[Policy, Encoder], pictures: list[Media]) -> None:
    policy, encoder = seeing
    wanted = requests(prompts(encoder, pictures))
    completions = sample(seeing, wanted)
    for request, completion in zip(wanted, completions, strict=True):
        np.testing.assert_allclose(completion.logprobs, teacher_forced(policy, encoder, request, completion), atol=ROUNDING)
        assert not np.isin(completion.token_ids, encoder.banned_ids).any()
    assert any(completion.masked.any() for completion in completions)


def test_the_picture_matters_and_the_company_does_not(seeing: tuple[Policy, Encoder], pictures: list[Media]) -> None:
    wanted = requests(prompts(seeing[1], pictures), rollouts=2)
    for together, request in zip(sample(seeing, wanted), wanted, strict=True):
        (alone,) = sample(seeing, [request])
        assert together.token_ids.tolist() == alone.token_ids.tolist()
    red = Path(pictures[0].path).with_name("red.png")
    Image.new("RGB", (64, 64), "red").save(red)
    swapped = Question(id="q0", messages=wanted[0].prompt.question.messages, answer="", media=(Media("image", str(red)),))
    first, other = sample(seeing, [wanted[0], SampleRequest(seeing[1].encode(swapped), 0, wanted[0].seed, wanted[0].parameters, RULE)])
    assert first.logprobs.tolist() != other.logprobs.tolist()


def test_a_picture_is_encoded_once_per_call(seeing: tuple[Policy, Encoder], pictures: list[Media]) -> None:
    policy, encoder = seeing
    wanted = requests(prompts(encoder, pictures), rollouts=4)
    seen: list[int] = []
    tower = policy.model.model.visual
    handle = tower.register_forward_pre_hook(lambda _, args, kwargs: seen.append(int(kwargs["grid_thw"].prod(-1).sum())), with_kwargs=True)
    try:
        sample(seeing, wanted)
    finally:
        handle.remove()
    assert sum(seen) in (0, 64 + 96)  # patches of the two pictures; none where a frozen tower remembers them
