"""Query mining: EX-5.1 to EX-5.1d of SPEC.md, and what it must not move."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.config import CGEConfig, PAQMConfig, SamplingConfig
from headrace.questions.hints import hints_for, load_hints
from headrace.records import Completion, Group, Hint, Media, Prompt, Question, Reward, Rollout, SampleRequest
from headrace.sampling.waves import draw_groups
from headrace.selection import paqm
from headrace.streams import stream_seed

PICTURE = Media("image", "scene.png")
SIZE = 16


class World:
    """Draws groups whose accuracies are told per question and prompt: plain, with a hint, or without the picture."""

    def __init__(self, **right: tuple[int, int, int]) -> None:
        """``right[id]``: right rollouts of a plain, a hinted and a text-only group; the second plain draw is as the first."""
        self.right = right
        self.calls: list[tuple[int, list[str], bool]] = []  # seed, questions, under CGE

    async def __call__(self, prompts: Sequence[Prompt], sampling: SamplingConfig, *, seed: int, epochs: Sequence[int]) -> list[Group]:
        self.calls.append((seed, [prompt.question.id for prompt in prompts], sampling.cge is not None))
        return [self._group(prompt, epoch) for prompt, epoch in zip(prompts, epochs, strict=True)]

    def _group(self, prompt: Prompt, epoch: int) -> Group:
        content = prompt.question.messages[-1]["content"]
        kind = 1 if "[Hint]" in content else 2 if "In place of" in content else 0
        right = self.right[prompt.question.id][kind]
        drawn = Completion(np.array([1]), np.array([-0.5]), np.array([False]), np.array([0]), "stop")
        rewards = [Reward(float(index < right), float(index < right)) for index in range(SIZE)]
        return Group(prompt, tuple(Rollout(index, 1, "free", drawn, reward=reward) for index, reward in enumerate(rewards)), epoch=epoch)


def question(name: str, media: tuple[Media, ...] = (PICTURE,), answer: str = "42", **extra: Any) -> Question:
    content = "".join(f"<{item.kind}> " for item in media) + f"What is {name}?"
    return Question(name, ({"role": "system", "content": "s"}, {"role": "user", "content": content}), answer, media, extra=extra)


def encode(asked: Question) -> Prompt:
    """One token per character; text that says so cannot be encoded."""
    content = asked.messages[-1]["content"]
    if "UNUSABLE" in content:
        raise ValueError("cannot be encoded")
    return Prompt(asked, np.frombuffer(content.encode(), dtype=np.uint8).astype(np.int64))


HINT = Hint(caption="a red square", visual="square at 1, 2", reasoning="add the sides")


def mine(
    world: World, questions: Sequence[Question], hints: dict[str, Hint] | None = None, epoch: int = 0, cge: bool = False, **config: Any
) -> list[Group]:
    sampling = SamplingConfig(group_size=SIZE, max_tokens=4, cge=CGEConfig() if cge else None)
    miner = paqm.Miner(PAQMConfig(**config), sampling, world, encode, hints or {}, seed=7)
    return asyncio.run(miner.draw([encode(each) for each in questions], [epoch] * len(questions)))


@pytest.mark.parametrize(("right", "expected"), [(16, "trivial"), (0, "impossible"), (1, "distillation"), (15, "distillation")])
def test_ex_5_1_zones(right: int, expected: str) -> None:
    assert paqm.zone([1.0] * right + [0.0] * (16 - right)) == expected
    (group,) = mine(World(q=(right, 0, 0)), [question("q")], keep_trivial=1.0)
    assert group.mining is not None
    assert (group.mining.zone, group.mining.kept, sum(group.mining.pilot)) == (expected, True, right)
    with pytest.raises(ValueError, match="at least one reward"):
        paqm.zone([])


@pytest.mark.parametrize(
    ("right", "share", "expected"), [(3, 0.0, "perceptual"), (3, 0.5, "cognitive"), (8, 0.5, "perceptual"), (0, 0.0, "cognitive")]
)
def test_ex_5_1b_diagnosis(right: int, share: float, expected: str) -> None:
    assert paqm.deficit([1.0] * right + [0.0] * (16 - right), share) == expected
    (group,) = mine(World(q=(0, 4, right)), [question("q")], {"q": HINT}, probe_share=share)
    assert group.mining is not None
    assert (group.mining.deficit, sum(group.mining.probe)) == (expected, right)
    hint = HINT.visual if expected == "perceptual" else HINT.reasoning
    content = group.prompt.question.messages[-1]["content"]
    assert content == f"<image> What is q?\n\n[Hint]\n{hint}\n[/Hint]"  # the hinted prompt is the one that trains
    assert (group.prompt.question.id, group.prompt.question.media) == ("q", (PICTURE,))


def test_ex_5_1b_a_miss_keeps_the_pilot_group() -> None:
    world = World(q=(0, 4, 0))
    (group,) = mine(world, [question("q")])
    assert group.mining is not None
    assert (group.mining.outcome, group.mining.extra_rollouts) == ("no_hint", 0)
    assert "[Hint]" not in group.prompt.question.messages[-1]["content"]
    assert len(world.calls) == 1
    assert paqm.metrics([group])["paqm/no_hint_n"] == 1


def test_multiple_choice_needs_a_majority() -> None:
    groups = mine(World(a=(0, 1, 7), b=(0, 1, 8), c=(0, 1, 7)), [question("a", answer="B"), question("b", answer="B"), question("c")],
                  dict.fromkeys("abc", HINT))  # fmt: skip
    assert [group.mining.deficit for group in groups if group.mining] == ["cognitive", "perceptual", "perceptual"]


def test_ex_5_1c_down_sampling() -> None:
    names = ["q17", "q18", "q19", "q20"]
    assert [paqm.keeps_trivial(name, 0, 0.1) for name in names] == [False] * 4
    assert [paqm.keeps_trivial(name, 0, 0.5) for name in names] == [False, True, False, False]
    assert paqm.keeps_trivial("q17", 0, 0.916635)
    assert not paqm.keeps_trivial("q17", 0, 0.916633)
    groups = mine(World(**dict.fromkeys(names, (16, 0, 0))), [question(name) for name in names], keep_trivial=0.5)
    assert [group.mining.kept for group in groups if group.mining] == [False, True, False, False]
    metrics = paqm.metrics(groups)
    assert (metrics["paqm/trivial_kept"], metrics["degen/pilot"], metrics["degen/after_paqm_groups_n"]) == (0.25, 1.0, 1.0)
    assert all(paqm.keeps_trivial(name, epoch, 1.0) and not paqm.keeps_trivial(name, epoch, 0.0) for name in names for epoch in range(9))


@pytest.mark.parametrize(("success", "expected"), [(0.01, 0.1485), (0.05, 0.5599), (0.1, 0.8147)])
def test_ex_5_1d_what_a_second_try_alone_reclaims(success: float, expected: float) -> None:
    """The control measures 1 - (1 - p)^16 on questions whose true success rate is p and whose pilot failed."""

    class Chance(World):
        def _group(self, prompt: Prompt, epoch: int) -> Group:
            group = super()._group(prompt, epoch)
            rng = np.random.default_rng([self.calls[-1][0] % 2**31, int(prompt.question.id)])
            right = (rng.random(SIZE) < success) & (len(self.calls) > 1)  # the pilot fails
            rewards = [Reward(float(each), float(each)) for each in right]
            return replace(
                group, rollouts=tuple(replace(drawn, reward=reward) for drawn, reward in zip(group.rollouts, rewards, strict=True))
            )

    count = 1500
    names = [str(number) for number in range(count)]
    world = Chance(**dict.fromkeys(names, (0, 0, 0)))
    groups = mine(world, [question(name, media=()) for name in names], dict.fromkeys(names, HINT), control_share=1.0)
    metrics = paqm.metrics(groups)
    assert metrics["paqm/control_n"] == count
    for name in ("control_reclaimed", "paired_reclaimed"):
        assert abs(metrics[f"paqm/{name}"] - expected) < 4 * np.sqrt(expected * (1 - expected) / count)


def test_hints_are_counted_against_a_second_try() -> None:
    names = "abcdefgh"
    world = World(**{name: (0, 5 if name in "abc" else 0, 0) for name in names})
    groups = mine(world, [question(name) for name in names], dict.fromkeys("abcdef", HINT), control_share=1.0)
    metrics = paqm.metrics(groups)
    assert (metrics["paqm/impossible_n"], metrics["paqm/hinted_n"], metrics["paqm/no_hint_n"]) == (8, 6, 2)
    assert (metrics["paqm/reclaimed"], metrics["paqm/reclaimed_of_hinted"]) == (3 / 8, 3 / 6)
    assert (metrics["paqm/control_n"], metrics["paqm/control_reclaimed"], metrics["paqm/paired_reclaimed"]) == (6, 0, 0.5)
    assert metrics["paqm/extra_rollouts_n"] == 6 * 3 * SIZE  # probe, hint, control
    assert (metrics["paqm/probed_n"], metrics["paqm/cognitive"], metrics["paqm/path_entropy_impossible"]) == (6, 6 / 8, 0.5)


def test_the_control_never_trains_and_moves_nothing() -> None:
    questions, hints = [question(name) for name in "abc"], dict.fromkeys("abc", HINT)
    plain, measured = World(a=(0, 3, 0), b=(0, 0, 0), c=(2, 0, 0)), World(a=(0, 3, 0), b=(0, 0, 0), c=(2, 0, 0))
    without, with_control = mine(plain, questions, hints), mine(measured, questions, hints, control_share=1.0)
    assert [seed for seed, *_ in measured.calls[:-1]] == [seed for seed, *_ in plain.calls]
    for before, after in zip(without, with_control, strict=True):
        assert before.rollouts == after.rollouts
        assert before.prompt.question == after.prompt.question


def test_every_draw_has_its_own_seed_and_the_probe_is_free() -> None:
    world = World(q=(0, 1, 0))
    mine(world, [question("q")], {"q": HINT}, cge=True, control_share=1.0)
    expected = [7, *(stream_seed(7, f"paqm/{purpose}") for purpose in ("probe", "hinted", "control"))]
    assert [seed for seed, *_ in world.calls] == expected
    assert [under_cge for *_, under_cge in world.calls] == [True, False, True, True]


@pytest.mark.parametrize(
    ("asked", "hint", "deficit", "outcome", "probed"),
    [
        (question("q", media=()), Hint(reasoning="r"), "cognitive", "hinted", False),
        (question("q", media=()), Hint(visual="v"), "cognitive", "no_hint", False),
        (question("q"), Hint(visual="v"), "perceptual", "hinted", False),  # no words for a probe
        (question("q"), Hint(reasoning="r"), "cognitive", "hinted", False),
        (question("q", caption="words of the row"), Hint(visual="v", reasoning="r"), "cognitive", "hinted", True),
        (question("q"), Hint(caption="UNUSABLE", visual="v", reasoning="r"), "cognitive", "hinted", False),
        (question("q"), Hint(caption="c", reasoning="UNUSABLE"), "cognitive", "unusable_hint", True),
        (question("q"), Hint(caption="c"), "", "no_hint", False),
    ],
)
def test_what_is_missing_is_told(asked: Question, hint: Hint, deficit: str, outcome: str, probed: bool) -> None:
    (group,) = mine(World(q=(0, 1, 0)), [asked], {"q": hint})
    assert group.mining is not None
    assert (group.mining.deficit, group.mining.outcome, bool(group.mining.probe)) == (deficit, outcome, probed)


def test_the_probe_has_words_in_place_of_every_picture() -> None:
    asked = replace(question("q"), media=(PICTURE, PICTURE), messages=({"role": "user", "content": "<image> and <image>: same?"},))
    probe = paqm.without_media(asked, "two squares")
    assert (probe.media, probe.messages[0]["content"]) == ((), "(In place of the image: two squares) and : same?")


def test_a_group_that_nobody_scored_is_not_mined() -> None:
    class Unscored(World):
        def _group(self, prompt: Prompt, epoch: int) -> Group:
            group = super()._group(prompt, epoch)
            return replace(group, rollouts=tuple(replace(drawn, reward=None, failure="error") for drawn in group.rollouts))

    (group,) = mine(Unscored(q=(0, 0, 0)), [question("q")])
    assert group.mining is None
    assert paqm.metrics([group])["paqm/questions_n"] == 0


def test_pilots_are_plain_samplings_own_rollouts() -> None:
    """Property 10.1: a question that mining leaves alone trains on the very rollouts that plain sampling draws."""

    class Engine:
        async def sample(self, requests: Sequence[SampleRequest]) -> list[Completion]:
            return [Completion(np.array([each.seed % 97]), np.array([-1.0]), np.array([False]), np.array([0]), "stop") for each in requests]

    class Scorer:
        async def score(self, asked: Question, rollouts: Sequence[Rollout]) -> list[Rollout]:
            return [replace(each, reward=Reward(float(each.index % 2), float(each.index % 2))) for each in rollouts]

    class Encoder:
        def response_text(self, prompt: Prompt, token_ids: np.ndarray) -> str:
            return ""

    sampling = SamplingConfig(group_size=4, max_tokens=4)
    prompts = [encode(question(name)) for name in "ab"]
    plain_draw = partial(draw_groups, encoder=Encoder())

    async def draw(prompts: Sequence[Prompt], sampling: SamplingConfig, *, seed: int, epochs: Sequence[int]) -> list[Group]:
        return await plain_draw(prompts, Engine(), Scorer(), sampling, seed=seed, epochs=epochs)

    plain = asyncio.run(draw(prompts, sampling, seed=3, epochs=[0, 1]))
    mined = asyncio.run(paqm.Miner(PAQMConfig(), sampling, draw, encode, {}, seed=3).draw(prompts, [0, 1]))
    for before, after in zip(plain, mined, strict=True):
        assert [int(drawn.completion.token_ids[0]) for drawn in before.rollouts] == [int(r.completion.token_ids[0]) for r in after.rollouts]
        assert after.mining is not None
        assert replace(after, mining=None, rollouts=()) == replace(before, rollouts=())


def test_hint_cache_reads_jsonl_and_parquet(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    rows = [{"id": "a", "visual": " v "}, {"id": 7, "caption": "c", "teacher": "t"}, {"id": "a", "reasoning": "r", "visual": ""}]
    (tmp_path / "hints.jsonl").write_text("".join(f"{row}\n" for row in rows).replace("'", '"'))
    expected = {"a": Hint(visual="v", reasoning="r"), "7": Hint(caption="c")}
    assert load_hints(tmp_path / "hints.jsonl") == expected
    table = pyarrow.Table.from_pylist([{"caption": None, "visual": None, "reasoning": None, **row, "id": str(row["id"])} for row in rows])
    pyarrow.parquet.write_table(table, tmp_path / "hints.parquet")
    assert load_hints(tmp_path / "hints.parquet") == expected


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"visual": "v"}', "id: expected the id"),
        ('{"id": "a", "visual": 3}', "visual: expected text"),
        ("[1]", "expected an object"),
        ("{", "JSON"),
    ],
)
def test_a_bad_hint_row_is_named(tmp_path: Path, line: str, words: str) -> None:
    path = tmp_path / "hints.jsonl"
    path.write_text('{"id": "ok"}\n' + line + "\n")
    with pytest.raises(ValueError, match=rf"hints\.jsonl:2: .*{words}"):
        load_hints(path)


def test_hints_of_a_run(tmp_path: Path) -> None:
    class Questions:
        def __len__(self) -> int:
            return 2

        def question(self, index: int) -> Question:
            return question(f"q{index}")

    class WithHints(Questions):
        def hint(self, index: int) -> Hint:
            return Hint(reasoning=f"step {index}")

    assert hints_for(None, Questions()) == {}
    assert hints_for("script", WithHints())["q1"].reasoning == "step 1"
    with pytest.raises(ValueError, match="do not hint at themselves"):
        hints_for("script", Questions())
    (tmp_path / "h.jsonl").write_text('{"id": "q0", "visual": "v"}\n')
    assert hints_for(tmp_path / "h.jsonl", Questions()) == {"q0": Hint(visual="v")}
    assert (PAQMConfig(hints="script").hints, PAQMConfig(hints="h.jsonl").hints) == ("script", Path("h.jsonl"))


def test_a_template_without_a_place_for_the_hint_is_refused() -> None:
    with pytest.raises(ValueError, match="hint_template"):
        PAQMConfig(hint_template="no place")
