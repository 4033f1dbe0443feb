"""The hint cache is filled by a teacher or by script, goes on where it stopped, and gives no answer away."""

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from PIL import Image
from typer.testing import CliRunner

from headrace.cli import app
from headrace.config import ConfigError, EasyVQASource, MultiHopSource
from headrace.questions.hints import load_hints
from headrace.questions.hopchain.chat import Chat
from headrace.questions.hopchain.roles import ServerDown
from headrace.questions.hopchain.settings import ServerConfig
from headrace.questions.tasks.easy_vqa import EasyVQA
from headrace.questions.tasks.multi_hop import MultiHop
from headrace.questions.teacher import ask, gives_away, script
from headrace.records import Media, Question


@pytest.mark.parametrize(
    ("text", "answer", "expected"),
    [
        ("Use that the angles sum to 180.", "42", False),
        ("Then x is 42.", "42", True),
        ("x = 142 or 42.5", "42", False),
        ("Count the 4 triangles first", "4", False),
        ("so the answer is 4", "4", True),
        ("so the total is: (B)", "B", True),
        ("look at a corner", "A", False),
        ("It is Blue.", "blue", True),
        ("anything", "", False),
    ],
)
def test_gives_away(text: str, answer: str, expected: bool) -> None:
    assert gives_away(text, answer) is expected


class Teacher:
    """A server that answers by rule, dies after some calls, and keeps what it was sent."""

    def __init__(self, lives: int = 10**6) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.lives = lives

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if len(self.bodies) >= self.lives:
            return httpx.Response(503)
        body = json.loads(request.content)
        self.bodies.append(body)
        text = str(body["messages"])
        reply = "the answer is 42" if "leaky" in text and body["seed"] == 0 else "step" if "key step" in text else "seen"
        if "hopeless" in text:
            reply = "it is 42"
        return httpx.Response(
            200, json={"choices": [{"message": {"content": reply}}], "usage": {"prompt_tokens": 5, "completion_tokens": 2}}
        )

    def chat(self) -> Chat:
        config = ServerConfig(url="http://127.0.0.1:1/v1", model="teacher", concurrency=3, patience=0.0)
        return Chat(config, transport=httpx.MockTransport(self))


def question(name: str, *media: Media, text: str = "How many?") -> Question:
    content = "".join(f"<{item.kind}>\n" for item in media) + text
    return Question(name, ({"role": "system", "content": "Use tags."}, {"role": "user", "content": content}), "42", media)


def test_a_teacher_writes_what_each_question_can_use(tmp_path: Path) -> None:
    Image.new("RGB", (40, 30), "red").save(tmp_path / "red.png")
    teacher = Teacher()
    questions = [question("text"), question("seen", Media("image", str(tmp_path / "red.png"))), question("gone", Media("image", "no.png"))]
    filled = asyncio.run(ask(questions, tmp_path / "h.jsonl", teacher.chat()))
    hints = load_hints(tmp_path / "h.jsonl")
    assert (hints["text"].reasoning, hints["text"].visual) == ("step", "")
    assert (hints["seen"].caption, hints["seen"].visual, hints["seen"].reasoning) == ("seen", "seen", "step")
    assert hints["gone"].reasoning == ""
    assert filled.counts["unreadable media (visual)"] == 1
    assert (filled.cost.calls, filled.cost.prompt_tokens) == (4, 20)
    sent = [body["messages"][0]["content"] for body in teacher.bodies]
    assert not any("Use tags." in str(content) or "<image>" in str(content) for content in sent)
    assert sum(isinstance(content, list) and content[0]["image_url"]["url"].startswith("data:image/jpeg") for content in sent) == 3


def test_a_hint_that_gives_the_answer_away_is_asked_for_again_and_then_left_out(tmp_path: Path) -> None:
    filled = asyncio.run(ask([question("a", text="leaky"), question("b", text="hopeless")], tmp_path / "h.jsonl", Teacher().chat()))
    hints = load_hints(tmp_path / "h.jsonl")
    assert (hints["a"].reasoning, hints["b"].reasoning) == ("step", "")
    assert filled.counts == {"reasoning": 1, "gives the answer away (reasoning)": 1}
    assert filled.cost.calls == 4


def test_it_goes_on_where_the_teacher_died_and_where_a_kill_tore_a_line(tmp_path: Path) -> None:
    out, questions = tmp_path / "h.jsonl", [question(f"q{number}") for number in range(12)]
    with pytest.raises(ServerDown, match="what is done is kept"):
        asyncio.run(ask(questions, out, Teacher(lives=5).chat()))
    done = load_hints(out)
    assert 1 <= len(done) <= 5
    with out.open("a") as file:
        file.write('{"id": "q11", "reas')
    teacher = Teacher()
    filled = asyncio.run(ask(questions, out, teacher.chat()))
    assert (len(teacher.bodies), filled.done) == (12 - len(done), 12)
    assert set(load_hints(out)) == {each.id for each in questions}
    with pytest.raises(ValueError, match=r"expected a \.jsonl file"):
        asyncio.run(ask(questions, tmp_path / "h.parquet", teacher.chat()))


def test_generators_script_true_hints(tmp_path: Path) -> None:
    task = MultiHop(MultiHopSource(kind="multi_hop", hops=(1, 2, 3)), 0, "train")
    script(50, task.question, task.hint, tmp_path / "h.jsonl")
    hints = load_hints(tmp_path / "h.jsonl")
    words = set(task.vocabulary())
    for index in range(50):
        scene, hint = task.scene(index), hints[task.question(index).id]
        assert set(hint.reasoning.split()) <= words
        first = scene.hops[0]
        number = str(first.yes if scene.holds(first) else first.no)
        assert hint.reasoning.endswith(f" {number}") == (len(scene.hops) > 1)
    pictures = EasyVQA(EasyVQASource(kind="easy_vqa"), 0, "train")
    hint, composed = pictures.hint(3), pictures.composed(3)
    assert hint.visual == hint.caption == f"{composed.picture.colour} {composed.picture.shape}"


def test_the_command_scripts_goes_on_and_needs_a_models_name(tmp_path: Path) -> None:
    out = tmp_path / "hints.jsonl"
    config = str(Path(__file__).parents[2] / "configs" / "demo.yaml")
    for limit in (3, 5):
        result = CliRunner().invoke(app, ["questions", "hints", config, str(out), "--limit", str(limit)], catch_exceptions=False)
        assert f"{limit} questions in {out}" in result.output.replace("\n", "")
    assert len(load_hints(out)) == 5
    with pytest.raises(ConfigError, match="--model"):
        CliRunner().invoke(app, ["questions", "hints", config, str(out), "--url", "http://127.0.0.1:9/v1"], catch_exceptions=False)
