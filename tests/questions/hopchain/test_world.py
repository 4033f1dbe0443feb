"""The scripted world: what it shows is what its script says, its judge finds every fault that its writer builds in."""

import json
from pathlib import Path
from typing import get_args

import numpy as np
import pytest

from headrace.questions.hopchain import draw_specification, film
from headrace.questions.hopchain.judging import FaultKind, read_judgement
from headrace.questions.hopchain.question_stages import written_question
from headrace.questions.hopchain.records import Candidate, Caption, Dropped, Specification, Video
from headrace.questions.hopchain.served import judge_request, write_request
from headrace.questions.hopchain.settings import WorldConfig
from headrace.questions.hopchain.specification import Profile
from headrace.questions.hopchain.world import judge, language, writer
from headrace.questions.hopchain.world.films import Studio
from headrace.questions.hopchain.world.script import PLACES, Script, World


def world(shots: int = 20, **fields: object) -> World:
    return World(WorldConfig.model_validate({"kind": "scripted", "shots": shots, **fields}), seed=3)


def video(number: int, folder: Path = Path()) -> Video:
    return Video(id=f"scripted-{number:06d}", path=folder / f"{number}.mp4", source="scripted")


def captions(script: Script) -> list[Caption]:
    bounds = script.bounds
    return [Caption(shot=i, start=bounds[i], end=bounds[i + 1], text=scene.caption) for i, scene in enumerate(script.scenes)]


def test_detected_shots_are_those_of_the_script(tmp_path: Path) -> None:
    """Every pair of places is told apart, with the shapes in front of them."""
    made = world(shots=30, shot_seconds=(2.0, 2.5))
    clip = video(0, tmp_path)
    Studio(made).make(clip)
    script = made.script(clip)
    assert {scene.place for scene in script.scenes} == set(PLACES)
    scenes = film.find_scenes(clip.path)
    assert [start for start, _ in scenes] == pytest.approx(script.bounds[:-1], abs=1e-6)
    assert scenes[-1][1] == pytest.approx(script.bounds[-1], abs=1e-6)


def test_no_two_scenes_of_a_video_look_alike_and_no_place_comes_twice_in_a_row() -> None:
    script = world(shots=60).script(video(1))
    assert len({(scene.place, scene.shape) for scene in script.scenes}) == 60
    assert all(a.place != b.place for a, b in zip(script.scenes, script.scenes[1:], strict=False))
    assert script == world(shots=60).script(video(1))
    with pytest.raises(ValueError, match="at most 96"):
        World(WorldConfig.model_construct(shots=97), 0)


def write(number: int, flaw: writer.Flaw | None = None) -> tuple[list[Caption], Specification, str]:
    seen = captions(world().script(video(number)))
    specification = draw_specification(f"v{number}", profile=Profile({3: 1.0, 4: 2.0, 5: 1.0}))
    reply = writer.write(write_request(seen, [specification]), np.random.default_rng(number), {0: flaw} if flaw else None)
    return seen, specification, reply


def verdict(seen: list[Caption], candidate: Candidate) -> list[str]:
    return [fault.kind for fault in read_judgement(judge.judge(judge_request(seen, candidate)), len(candidate.hops))]


def test_an_honest_question_passes_checks_and_judge() -> None:
    answers = []
    for number in range(60):
        seen, specification, reply = write(number)
        candidate = written_question(reply, specification)
        assert verdict(seen, candidate) == []
        assert all(part in {caption.text for caption in seen} for hop in candidate.hops for part in hop.quote.split(" … "))
        answers += [hop.answer for hop in candidate.hops]
    assert np.mean(answers) == pytest.approx(0.5, abs=0.12)


def test_the_values_of_an_honest_question_are_the_truth_of_the_script() -> None:
    for number in range(30):
        _, specification, reply = write(number)
        script = world().script(video(number))
        candidate = written_question(reply, specification)
        for position, hop in enumerate(candidate.hops):
            router = specification.router_of(position)
            half = len(hop.segments) // 2
            taken = hop.segments if router is None else hop.segments[:half] if candidate.hops[router].answer else hop.segments[half:]
            if hop.type == "order":
                assert hop.answer == (taken[0] < taken[1])
            else:
                scene = script.scenes[taken[0]]
                kind, word = language.asked(hop.fact) or ("", "")
                assert hop.answer == (word == {"attribute": scene.colour, "spatial": scene.side, "action": scene.action}[kind])


@pytest.mark.parametrize("flaw", [kind for kind in get_args(FaultKind) if kind != "UNPARSABLE"])
def test_the_judge_finds_every_fault_and_calls_it_by_its_name(flaw: writer.Flaw) -> None:
    found = []
    for number in range(60):
        seen, specification, reply = write(number, flaw)
        try:
            candidate = written_question(reply, specification)
        except Dropped:
            continue  # a fault may also make a question one-sided
        faults = verdict(seen, candidate)
        assert faults
        found += faults
    assert flaw in found


@pytest.mark.parametrize("flaw", ["not_an_option", "mapping", "hop_count", "skip"])
def test_the_checks_find_the_others(flaw: writer.Flaw) -> None:
    for number in range(20):
        _, specification, reply = write(number, flaw)
        with pytest.raises(Dropped) as drop:
            written_question(reply, specification)
        assert drop.value.reason == {"skip": "skipped"}.get(flaw, flaw)


def test_a_timeline_that_cannot_carry_a_specification_is_left_out() -> None:
    seen = captions(world().script(video(0)))[:1]
    specification = draw_specification("v")
    assert json.loads(writer.write(write_request(seen, [specification]), np.random.default_rng(0))) == {"questions": []}
