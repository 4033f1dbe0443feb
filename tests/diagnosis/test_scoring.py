"""A bank under checkpoints: the numbers of the slow way, real pictures, going on, every bad row by name, one page."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import headrace
from headrace.config import EasyVQASource, ScratchVisionModel, load_config
from headrace.credit.intervention import degraded
from headrace.diagnosis import scoring
from headrace.diagnosis.bank import Bank, Claim, Entry, Response, bank_row, read_bank, write_bank
from headrace.diagnosis.build import Plan, build
from headrace.diagnosis.points import find
from headrace.diagnosis.run import diagnose
from headrace.diagnosis.scoring import Settings, fixed_responses, score
from headrace.diagnosis.text_control import degraded_text
from headrace.encoding import Encoder
from headrace.evaluation.job import prepare
from headrace.policy.model import PackedRows, Policy
from headrace.policy.sources import materialise
from headrace.records import Media, Question
from headrace.streams import stream
from tests import runs

pytest.importorskip("easy_vqa")
from headrace.questions.tasks.easy_vqa import COLOURS, SHAPES, EasyVQA

SOURCE = EasyVQASource(kind="easy_vqa", hops=(1,), split="test", count=24)
RULES = f"^(?:<think>)?\\s*((?:{'|'.join(COLOURS)}) (?:{'|'.join(SHAPES)}))"
RUN = f"""
run: {{name: tiny, seed: 1, steps: 2, questions_per_step: 2, checkpoint_every: 1, keep_checkpoints: 5}}
model: {{source: {{kind: scratch_vision, hidden: 32, layers: 1, heads: 1, vision_hidden: 32, vision_layers: 1}}}}
questions:
  train: {{kind: easy_vqa, hops: [1], count: 8}}
  held_out: {{kind: easy_vqa, hops: [1], split: test, count: 24}}
sampling: {{group_size: 4, max_tokens: 8, think_prefill: false}}
journal: {{tensorboard: false}}
optimizer: {{learning_rate: 1.0e-2}}
credit: {{pacg: {{router: {{kind: rules, patterns: ['({"|".join(COLOURS + SHAPES)})']}}}}}}
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = ScratchVisionModel(kind="scratch_vision", hidden=32, layers=1, heads=1, vision_hidden=32, vision_layers=1)
    words = EasyVQA(EasyVQASource(kind="easy_vqa", hops=(1,), count=8), 0, "train").vocabulary()
    directory = materialise(source, tmp_path_factory.mktemp("cache"), 0, words)
    _strengthen(directory)
    return directory


def _strengthen(directory: Path) -> None:
    """Larger random weights, so that the picture moves the numbers."""
    import safetensors.torch

    path = directory / "model.safetensors"
    weights = safetensors.torch.load_file(path)
    generator = torch.Generator().manual_seed(0)
    for name, weight in weights.items():
        if weight.ndim > 1:
            weights[name] = weight + 0.2 * torch.randn(weight.shape, generator=generator)
    safetensors.torch.save_file(weights, path, {"format": "pt"})


def entries(count: int = 4) -> list[Entry]:
    """Gold traces of real pictures with their caption as a claim, and the same with a colour that is not there."""
    task, found = EasyVQA(SOURCE, 0, "held_out"), []
    for index in range(count):
        picture, trace = task.composed(index).picture, task.trace(index, stream(0, "trace"))
        wrong = COLOURS[(COLOURS.index(picture.colour) + 1) % len(COLOURS)]
        responses = []
        for colour in (picture.colour, wrong):
            caption = f"{colour} {picture.shape}"
            shown = task.supports(index, caption)
            label: Any = "supported" if shown else "unsupported"
            text = trace.replace(f"{picture.colour} {picture.shape}", caption, 1)
            responses.append(Response(text, claims=[Claim(caption, 1, label), Claim("purple", 1, "supported")]))
        found.append(Entry(task.question(index), tuple(responses)))
    return found


def bank_of(folder: Path, some: Sequence[Entry], name: str = "bank.jsonl") -> Path:
    write_bank(map(bank_row, some), folder / name)
    return folder / name


# ------------------------------------------------------------------------------------------------------ the numbers


def test_scores_are_those_of_the_slow_way(model: Path, tmp_path: Path) -> None:
    """δ and EFS of every claim from full distributions of one response at a time; a wrong sign, picture or token would differ."""
    bank = read_bank(bank_of(tmp_path, entries()))
    (point,) = find([model])
    rows = score(point, bank, Settings(tokens=200), tmp_path, lambda *_: None)
    encoder, policy = scoring._encoder(model, bank), point.load()
    fixed = [response for entry in bank.entries for response in fixed_responses(entry, encoder)]
    assert len(rows) == len(fixed) == 8
    for response, row in zip(fixed, rows, strict=True):
        question, ids = response.entry.question, response.token_ids
        clean, dark = (
            _full(policy, encoder, question, media, ids) for media in (question.media, degraded(question.id, question.media, "patches"))
        )
        hidden = _full(policy, encoder, degraded_text(question), question.media, ids)
        (claim,) = row["claims"]
        words = [encoder.token_text(int(index)).strip() for index in ids]
        place = [words.index(word) for word in response.entry.responses[response.number].claims[0].text.split()]  # type: ignore[index]
        rest = [k for k in range(len(ids)) if k not in place]
        for name, other in (("delta", dark), ("text", hidden)):
            shift = _of(other, ids) - _of(clean, ids)
            assert claim[name] == pytest.approx(shift[place].mean() - shift[rest].mean(), abs=2e-5), name
        drawn = np.isfinite(clean[0])  # banned tokens have no probability
        kl = (np.exp(clean[:, drawn]) * (clean[:, drawn] - dark[:, drawn])).sum(axis=1)
        assert claim["efs"] == pytest.approx(kl[place].mean(), abs=2e-5)
        assert claim["tokens"] == 2
    deltas = [row["claims"][0]["delta"] for row in rows]
    assert max(map(abs, deltas)) > 0.01


def _full(policy: Policy, encoder: Encoder, question: Question, media: tuple[Media, ...], ids: np.ndarray) -> np.ndarray:
    """Log-distribution [L, V] of every response token."""
    prompt = encoder.encode(question).token_ids
    tokens = torch.from_numpy(np.concatenate([prompt, ids]).astype(np.int64))
    rows = PackedRows(tokens, torch.tensor([0, len(tokens)], dtype=torch.int32), len(tokens), media=(media,))
    with torch.no_grad():
        logits = policy(rows, lambda hidden, weight: hidden @ weight.T)
    logits[:, list(encoder.banned_ids)] = -torch.inf
    return logits.log_softmax(-1)[len(prompt) - 1 : -1].double().numpy()


def _of(distribution: np.ndarray, ids: np.ndarray) -> np.ndarray:
    return distribution[np.arange(len(ids)), ids]


def test_the_text_control_hides_words_and_never_the_picture() -> None:
    question = Question("q0001", ({"role": "system", "content": "be brief"}, {"role": "user", "content": "a <image> b c d\ne f g h"}), "")
    once = degraded_text(question)
    said = once.messages[1]["content"].split()
    assert once == degraded_text(question)
    assert once.messages[0] == question.messages[0]
    assert "<image>" in said
    assert 1 < len(said) < 9
    others = [degraded_text(Question(f"q{number}", question.messages, "")).messages[1]["content"] for number in range(200)]
    assert np.mean([len(text.split()) - 1 for text in others]) == pytest.approx(4.0, abs=0.4)


# ------------------------------------------------------------------------------------------------------ a diagnosis


def test_labels_are_joined_late_and_scores_are_gone_on_with(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flipping the labels of the bank exchanges supported and unsupported, without scoring anything again."""
    some = entries()
    first = diagnose(bank_of(tmp_path, some), [model], Settings(), tmp_path / "out")
    (scores,) = (tmp_path / "out" / "scores").iterdir()
    with scores.open("a") as file:
        file.write('{"question": "torn')
    monkeypatch.setattr(scoring, "_Scorer", lambda *_: pytest.fail("scored again"))
    flip: dict[Any, Any] = {"supported": "unsupported", "unsupported": "supported"}
    flipped = [
        Entry(
            entry.question,
            tuple(
                Response(response.text, claims=[Claim(claim.text, claim.occurrence, flip[claim.label]) for claim in response.claims or ()])
                for response in entry.responses
            ),
        )
        for entry in some
    ]
    second = diagnose(bank_of(tmp_path, flipped), [model], Settings(), tmp_path / "out")
    one, two = (json.loads((tmp_path / "out" / "diagnosis.json").read_text()) for _ in range(2))
    assert one == two
    before, after = (found.points[0].claims for found in (first, second))
    assert {key: seen.delta for key, seen in before.items()} == {key: seen.delta for key, seen in after.items()}
    assert all(flip[seen.label] == after[key].label for key, seen in before.items())
    level = one["checkpoints"][0]["delta"]
    assert level["supported"]["value"] == pytest.approx(np.mean([seen.delta for seen in before.values() if seen.label == "unsupported"]))
    assert level["supported"]["value"] != pytest.approx(level["unsupported"]["value"], abs=1e-4)
    assert one["checkpoints"][0]["left_out"] == {"nowhere in the response, or in its answer": 8}


def test_a_run_is_a_curve_from_its_start(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Its exported model scores as its last checkpoint does, its start as the model it began with; a bank is drawn at its start."""
    path = runs.write_config(tmp_path, tmp_path_factory.getbasetemp() / "diagnosis_cache", RUN)
    config = load_config(path)
    headrace.Trainer(config, reward=lambda question, text: float(len(text) % 2)).train()
    start = find([config.run_folder])[0].directory
    job = prepare(start, path, config=path, out=tmp_path / "work", credit=True)
    out = tmp_path / "bank.parquet"
    built = build(Plan(job, out, questions=6, responses=3))
    bank = read_bank(out)
    assert (len(bank.entries), built.counts["responses"]) == (6, 18)
    _check_labels(bank, built.counts)
    found = diagnose(out, [config.run_folder, config.run_folder / "model"], Settings(), tmp_path / "out")
    assert [each.point.name for each in found.points] == ["tiny, step 0", "tiny, step 1", "tiny, step 2", "tiny/model"]
    claims = [each.claims for each in found.points]
    assert all(_close(claims[2][key], seen) for key, seen in claims[3].items())
    assert not any(_close(claims[0][key], seen) for key, seen in claims[2].items())
    html = found.page.read_text()
    assert "Looking and taking back" in html
    assert "Changes since tiny, step 0" in html
    assert "<script" not in html
    assert "http" not in html.replace("http://www.w3.org", "")


def _close(one: Any, other: Any) -> bool:
    return bool(np.allclose([one.efs, one.delta, one.text], [other.efs, other.delta, other.text], atol=1e-5))


def _check_labels(bank: Bank, counts: Any) -> None:
    """Labels are those of the pictures, by their own answers; the bank does not hold the right answer."""
    task = EasyVQA(SOURCE, 1, "held_out")
    seen = 0
    for entry in bank.entries:
        picture = task.composed(int(entry.question.id.rsplit("/", 1)[1])).picture
        for response in entry.responses:
            for claim in response.claims or ():
                seen += 1
                assert claim.label == ("supported" if claim.text in (picture.colour, picture.shape) else "unsupported")
    assert seen == counts["claims"] > 0
    assert not any(entry.question.answer for entry in bank.entries)
