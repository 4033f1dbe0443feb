"""Pushes into a real vLLM engine: it must then be the learner, in every cache and every layer, or refuse."""

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoProcessor

from headrace.config import VLLMEngineConfig
from headrace.sync.push import WeightSync
from headrace.sync.servers import SyncError
from tests.sync import models
from tests.sync.models import Learner, OneRank

pytestmark = pytest.mark.vllm
EXACT = 1e-4  # nats; float32 against float32 measured 2e-5
PROMPTS = [[(7 * at + 3 * row) % 256 for at in range(length)] for row, length in enumerate((5, 20, 150))]


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    made = {}

    def directory(kind):
        if kind not in made:
            path = folder / kind
            made[kind] = models.vision(path, kind) if kind in models.FAMILIES else models.qwen3(path, tied=kind == "tied")
        return made[kind]

    return directory


@pytest.fixture
def start(engine, directories):
    """``start(kind)``: the engine with a model of that kind, a learner as on disk, and their sync with buckets of 40 kB."""
    opened = []

    def start(kind, dtype="float32"):
        engine.load(directories(kind), dtype)
        learner = Learner(directories(kind), getattr(torch, dtype))
        sync = connect(engine, learner)
        opened.append(sync)
        return learner, sync

    yield start
    for sync in opened:
        sync.close()


def connect(server, learner):
    sync = WeightSync(learner, lambda: [server], VLLMEngineConfig(kind="vllm"), OneRank(), learner.score, deadline=60)
    sync._transport.bucket_bytes = 40_000  # several buckets, and a fused layer that lies in two
    return sync


def disagreement(learner, prompt, answer, **inputs):
    """Largest difference of log-probs in nats; infinite unless every token is the learner's own greedy choice."""
    tokens, logprobs = answer[:2]
    found = learner.logprobs([*prompt, *tokens], **inputs)[len(prompt) - 1 : -1]
    if not torch.equal(found.argmax(-1), torch.tensor(tokens)):
        return float("inf")
    return float((found.max(-1).values - torch.tensor(logprobs)).abs().max())


@pytest.mark.parametrize("kind", ["tied", "untied"])
def test_the_engine_becomes_the_learner(engine, start, kind):
    learner, sync = start(kind)
    sync.push(2)
    for prompt, answer in zip(PROMPTS, engine.greedy(PROMPTS, 24), strict=True):
        assert disagreement(learner, prompt, answer) < EXACT
    assert engine.greedy(PROMPTS[2:], 2)[0][2] > 0, "the prefix cache is warm with the old weights"
    for version in (3, 4):
        learner.learn(version)
        stale = max(disagreement(learner, prompt, answer) for prompt, answer in zip(PROMPTS, engine.greedy(PROMPTS, 24), strict=True))
        assert stale > 0.1, "the change is too small to test anything"
        report = sync.push(version)
        assert engine.version() == str(version)
        assert report.canary_gap < 1e-5
        answers = engine.greedy(PROMPTS, 24)
        assert answers[2][2] == 0, "nothing is cached from before"
        for prompt, answer in zip(PROMPTS, answers, strict=True):
            assert disagreement(learner, prompt, answer) < EXACT
            assert answer[3] == [(str(version), 0, 24)]


def test_bfloat16_servers_of_a_float32_learner_get_its_rounded_weights(engine, directories, start):
    _, first = start("tied", "bfloat16")
    first.close()
    learner = Learner(directories("tied"))
    learner.model.config.dtype = torch.bfloat16  # masters in float32, as FSDP2 keeps them
    learner.learn(1)
    sync = connect(engine, learner)
    report = sync.push(1)
    assert report.bytes < 2.1 * sum(parameter.numel() for parameter in learner.parameters())
    assert 0 < report.canary_gap < 0.1
    sync.close()


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl"])
def test_vision_language_models_forget_pictures_seen_with_old_weights(engine, directories, start, kind):
    learner, sync = start(kind)
    processor = AutoProcessor.from_pretrained(directories(kind))
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 255, (32, 48, 3), dtype=np.uint8))
    text = "what? <|vision_start|><|image_pad|><|vision_end|> a long tail of words behind it"
    given = dict(processor(images=[picture], text=[text], return_tensors="pt"))
    prompt = given.pop("input_ids")[0].tolist()
    kinds = given.pop("mm_token_type_ids")
    given.pop("attention_mask")
    request = (processor.tokenizer(text)["input_ids"], picture)

    def check():
        answer = engine.greedy([request], 12)[0]
        padded = torch.cat([kinds, torch.zeros(1, 12, dtype=kinds.dtype)], 1)
        return disagreement(learner, prompt, answer, mm_token_type_ids=padded, **given)

    assert check() < EXACT  # as loaded from disk
    learner.learn(1)
    assert check() > 0.01
    sync.push(1)
    assert check() < EXACT


def test_a_request_that_lives_through_an_update_is_exact_on_both_sides(engine, directories, start):
    learner, sync = start("tied")
    before = Learner(directories("tied"))
    sync.push(1)
    engine.begin(PROMPTS, 40)
    engine.steps(10)
    learner.learn(2)
    sync.push(2)
    for prompt, (tokens, logprobs, _, spans) in zip(PROMPTS, engine.steps(), strict=True):
        (first, start_1, switch), (second, start_2, end) = spans
        assert (first, start_1, second, end) == ("1", 0, "2", 40)
        assert 0 < switch == start_2 < 40
        behind = [*prompt, *tokens[:switch]]
        assert disagreement(before, prompt, (tokens[:switch], logprobs[:switch])) < EXACT
        assert disagreement(learner, behind, (tokens[switch:], logprobs[switch:])) < EXACT


class Meddler:
    """The engine, with hands in between."""

    def __init__(self, engine, **methods):
        self.engine = engine
        self.__dict__.update(methods)

    def __getattr__(self, name):
        return getattr(self.engine, name)


def refused(engine, learner, sync, message):
    """A push of changed weights fails with ``message``, leaves engine paused and version as it was; the next push mends all."""
    sync.push(1)
    learner.learn(2)
    servers, gather = sync.servers, sync.source._gather
    yield
    with pytest.raises(SyncError, match=message):
        sync.push(2)
    assert engine.paused()
    assert sync.version == 1
    yield
    sync.servers, sync.source._gather = servers, gather
    sync.push(3)
    assert sync.version == 3
    assert not engine.paused()
    for prompt, answer in zip(PROMPTS, engine.greedy(PROMPTS, 24), strict=True):
        assert disagreement(learner, prompt, answer) < EXACT
    yield


def test_a_corrupted_bucket_is_refused_by_its_checksum(engine, start):
    learner, sync = start("tied")
    act = refused(engine, learner, sync, r"in-process: loading bucket-\d+ failed .*checksum .* corrupted")
    next(act)
    count = 0

    def corrupt(info):
        nonlocal count
        count += 1
        if count == 3:
            with open(sync._transport._folder.path / info["file"], "r+b") as file:
                file.seek(1000)
                byte = file.read(1)[0]
                file.seek(1000)
                file.write(bytes([byte ^ 4]))
        engine.update_weights(info)

    sync.servers = lambda: [Meddler(engine, update_weights=corrupt)]
    next(act)
    assert engine.version() == "1"
    next(act)


def test_half_of_the_weights_are_refused(engine, start):
    learner, sync = start("untied")
    act = refused(engine, learner, sync, r"in-process: \d+ parameters of its model got no weights, or not all of them: .*weight")
    next(act)
    whole = sync.source._tensors
    sync.source._tensors = lambda merge: [item for item in whole(merge) if "k_proj" not in item[0]]
    next(act)
    assert engine.version() == "1"
    sync.source._tensors = whole
    next(act)


def test_a_weight_that_the_server_does_not_know_is_refused(engine, start):
    learner, sync = start("untied")
    act = refused(engine, learner, sync, r"loading bucket-\d+ failed .*model.norm.bias")
    next(act)
    whole = sync.source._tensors
    sync.source._tensors = lambda merge: [*whole(merge), ("model.norm.bias", torch.zeros(64))]
    next(act)
    assert engine.version() == "1"
    sync.source._tensors = whole
    next(act)


def test_wrong_weights_under_right_checksums_are_refused_by_the_canary(engine, start):
    learner, sync = start("tied")
    act = refused(engine, learner, sync, r"log-probs of the canary differ by .* nats from the learner's, allowed are 0.001")
    next(act)
    gather = sync.source._gather

    def wrong():
        for name, tensor in gather():
            yield name, tensor + 0.01 * torch.randn_like(tensor) if name.endswith("1.mlp.down_proj.weight") else tensor

    sync.source._gather = wrong
    next(act)
    next(act)


def test_a_push_after_one_that_died_half_way_through_a_layer_mends_the_server(engine, start):
    learner, sync = start("tied")
    sync.push(1)
    learner.learn(2)
    source = sync.source
    engine.pause("keep")
    engine.start_weight_update()
    weights = iter(source)
    part = []
    for entry in source.entries():
        next(weights)
        part.append(entry)
        if entry.name.endswith("0.self_attn.q_proj.weight"):
            break  # k and v of the fused layer never come
    engine.update_weights(sync._transport._write(part, iter(source))[1])
    sync.close()  # its learner is gone; a new one finds the server as it was left
    again = connect(engine, learner)
    again.push(5)
    for prompt, answer in zip(PROMPTS, engine.greedy(PROMPTS, 24), strict=True):
        assert disagreement(learner, prompt, answer) < EXACT
    again.close()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"file": "../bucket-1"}, "no bucket's name"),
        ({"file": "bucket-99999"}, "No such file"),
        ({"size": 64}, "bytes, the learner wrote 64"),
        ({"offsets": [10**9]}, "outside the"),
        ({"dtype_names": ["load"]}, "type 'load', which torch does not know"),
    ],
)
def test_senseless_buckets_are_refused(engine, start, change, message):
    _, sync = start("tied")
    sync.push(1)
    path, info = sync._transport._write(sync.source.entries()[:1], iter(sync.source))
    engine.pause("keep")
    engine.start_weight_update()
    with pytest.raises(RuntimeError, match=message):
        engine.update_weights(info | change)
    path.unlink()


def test_folders_of_others_are_refused(engine, start, tmp_path):
    _, sync = start("tied")
    with pytest.raises(RuntimeError, match="no bucket folder"):
        engine.init_weight_transfer_engine({"folder": str(tmp_path)})
    with pytest.raises(RuntimeError, match="servers on the learner's machine"):
        engine.init_weight_transfer_engine({"folder": "/dev/shm/headrace-weights-elsewhere"})
    folder = sync._transport._folder.path
    folder.chmod(0o755)
    with pytest.raises(RuntimeError, match="not a folder of this user alone"):
        engine.init_weight_transfer_engine({"folder": str(folder)})


def test_a_server_that_takes_nothing_cannot_pass_its_trial(engine, start):
    """Contract 9: it agrees with the learner from the start, as if both had read the same disk."""
    learner, sync = start("tied")
    sync.push(0)
    sync = connect(engine, learner)
    idle = Meddler(
        engine,
        start_weight_update=lambda: None,
        update_weights=lambda info: None,
        finish_weight_update=lambda version: None,
        call_workers=lambda method: [{"missing": []}],
    )
    sync.servers = lambda: [idle]
    with pytest.raises(SyncError, match="weights 'trial': in-process: its log-probs of the canary differ"):
        sync.push(0)
    assert sync.version is None
