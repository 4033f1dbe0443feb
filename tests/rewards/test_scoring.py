"""Extraction, format and score: EX-2 in both modes, the contracts, numbers, letters, adversarial text."""

import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from headrace.rewards import extract, score
from headrace.rewards.extraction import boxes, format_score
from headrace.rewards.scoring import answers_match
from headrace.rewards.shaping import overlong_penalty

THINK = ("I add the numbers of the hops one by one. " * 4)[:138]


def respond(answer: str, think: str = THINK) -> str:
    return f"<think>{think}</think>\n<answer>{answer}</answer>"


EX_2 = {
    "R1": (respond(r"\boxed{199}"), (1, 1, 1.0), (1, 1, 1.0)),
    "R2": (respond(r"\boxed{209}"), (0, 1, 0.2), (0, 1, 0.2)),
    "R3": (respond("199"), (1, 0, 0.8), (1, 0.5, 0.9)),
    "R4": (respond(r"\boxed{199}", THINK[:15]), (1, 1, 1.0), (1, 0, 0.8)),
    "R5": (f"<think>{THINK}</think> It is \\boxed{{199}}", (1, 0, 0.8), (1, 0, 0.8)),
    "R6": (respond(r"\boxed{199}") + " done", (1, 0, 0.8), (1, 0, 0.8)),
    "R7": (respond(r"\boxed{209} \boxed{199}"), (1, 0, 0.8), (1, 0.5, 0.9)),
    "R8": (respond("", THINK[:126] + r"\boxed{199}"), (0, 0, 0.0), (1, 0, 0.8)),
    "R9": (respond(r"\boxed{199.0}"), (1, 1, 1.0), (1, 1, 1.0)),
    "R10": (respond(r"\boxed{198}"), (0, 1, 0.2), (0, 1, 0.2)),
    "R11": (f"<think>{THINK} \\boxed{{199}} and so", (0, 0, 0.0), (1, 0, 0.8)),
    "R12": (respond(r"\boxed{\text{199}}"), (1, 1, 1.0), (1, 1, 1.0)),
    "R13": ("So. " + respond(r"\boxed{199}"), (1, 0, 0.8), (1, 0, 0.8)),
}


@pytest.mark.parametrize("mode", ["strict", "code"])
@pytest.mark.parametrize("case", EX_2)
def test_ex_2(case: str, mode: str) -> None:
    text, strict, code = EX_2[case]
    accuracy, shape, total = strict if mode == "strict" else code
    reward = score(text, "199", "answer_boxed", mode)
    assert (reward.accuracy, reward.format) == (accuracy, shape)
    assert reward.total == total  # exactly: 0.8 + 0.1 == 0.9 in floats too


@pytest.mark.parametrize(
    ("text", "contract", "accuracy", "shape"),
    [
        (f"<think>{THINK}</think> The sum is \\boxed{{199}}.", "boxed", 1, 1),
        (f"<think>{THINK}</think> First \\boxed{{1}}, then \\boxed{{199}}.", "boxed", 1, 1),
        (f"<think>{THINK}</think> The sum is 199.", "boxed", 0, 0),
        (f"<think>{THINK}</think> The sum is \\boxed{{ }}.", "boxed", 0, 0),
        (f"<think>{THINK}</think></think> \\boxed{{199}}", "boxed", 1, 0),
        (f"<think> {THINK} </think> <answer> 199 </answer>", "answer_tag", 1, 1),
        (f"<think>{THINK}</think><answer>\\boxed{{199}}</answer>", "answer_tag", 1, 1),
        ("<think> </think><answer>199</answer>", "answer_tag", 1, 0),
        (f"<think>{THINK}</think><answer> </answer>", "answer_tag", 0, 0),
        (f"<think>{THINK}</think><answer>199</answer><answer>199</answer>", "answer_tag", 1, 0),
        (f"<think>{THINK}<answer>5</answer></think><answer>199</answer>", "answer_tag", 1, 0),
        (f"{THINK}</think><answer>199</answer>", "answer_tag", 1, 0),
        ("<answer>199</answer>", "answer_tag", 0, 0),
        ("", "answer_tag", 0, 0),
    ],
)
def test_contracts(text: str, contract: str, accuracy: float, shape: float) -> None:
    reward = score(text, 199, contract)
    assert (reward.accuracy, reward.format, reward.total) == (accuracy, shape, 0.8 * accuracy + 0.2 * shape)


def test_mode_code_has_its_length_floor_under_every_contract() -> None:
    for contract, tail in (("boxed", r"\boxed{1}"), ("answer_tag", "<answer>1</answer>")):
        assert format_score(f"<think>{'x' * 99} </think>{tail}", contract, "code") == 0
        assert format_score(f"<think>{'x' * 100}</think>{tail}", contract, "code") == 1


def test_format_term_can_be_dropped() -> None:
    assert score(EX_2["R2"][0], "199", format_term=False).total == 0
    assert score(EX_2["R6"][0], "199", format_term=False).total == 1


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"</think>\boxed{a{b}c}", "a{b}c"),
        (r"</think>\boxed{1} \boxed{2", "1"),
        (r"</think>\boxed{1 \boxed{2}", "2"),
        (r"</think>\boxed{\boxed{2}}", "2"),
        (r"</think>} \boxed{3}", "3"),
        (r"</think>\boxed{\{1,2\}}", r"\{1,2\}"),
        (r"</think>\boxed{\{1}", r"\{1"),
        (r"</think>\boxed{\text{a} + \text{b}}", r"\text{a} + \text{b}"),
        (r"</think>\boxed{\text{a{b}}}", "a{b}"),
        (r"<think></think>\boxed{1}</think>\boxed{2}", "2"),
        (r"</think><answer>7</answer> \boxed{8}", "7"),
        (r"</think><answer>7</answer><answer>8</answer>", "7"),
        (r"</think><answer>7", None),
        (r"</think><answer>\boxed{7}", "7"),
        (r"</think><answer>\boxed{}</answer>", None),
        (r"\boxed{7}", None),
        ("</think>\\boxed{７}", "７"),
    ],
)
def test_strict_extraction(text: str, expected: str | None) -> None:
    assert extract(text) == expected


@pytest.mark.parametrize(
    ("candidate", "answer", "same"),
    [
        ("199", "199.0", True),
        ("$1,234.", "1234", True),
        ("1 234", "1234", True),
        ("19 9", "199", False),
        ("1,99", "199", False),
        ("- 5", "-5", True),
        ("−5", "-5", True),
        ("199.000001", "199", True),
        ("199.00001", "199", False),
        (".5", "0.50", True),
        ("1e2", "100", True),
        ("1e9999", "1", False),
        ("1e-9999", "0", True),
        ("100000000000000000001", "100000000000000000000", False),
        ("9" * 401, "1", False),
        ("nan", "nan", True),
        ("nan", "1", False),
        ("inf", "1", False),
        ("1_99", "199", False),
        ("", "", False),
        ("b", "B", True),
        ("(B)", "B", True),
        ("B. the red one", "B", True),
        ("[b]", "B", True),
        ("B cat", "B", False),
        ("AB", "B", False),
        ("A", "B", False),
        ("yes", "yes", True),
        ("yes ", "yes", True),
        ("Yes", "yes", False),
    ],
)
def test_answers_match(candidate: str, answer: str, same: bool) -> None:
    assert answers_match(candidate, answer) is same


def test_tolerance_is_absolute_and_per_row() -> None:
    assert answers_match("9.9", "10", tolerance=0.1)
    assert not answers_match("9.89", "10", tolerance=0.1)
    assert not answers_match("200", "199")  # the release's 1 % fallback would accept it


@pytest.mark.parametrize(
    ("candidate", "answer", "same"),
    [
        (r"\frac{1}{2}", "0.5", True),
        ("1+x^2", "x^2+1", True),
        ("198", "199", False),
        ("der", "red", False),
        ("{" * 50, "x", False),
        ("x" * 3000, "x^2", False),
    ],
)
def test_math_verify_is_the_last_resort(candidate: str, answer: str, same: bool) -> None:
    assert answers_match(candidate, answer, verifier="math_verify") is same


def test_own_comparison_replaces_the_rules() -> None:
    reward = score(respond(r"\boxed{x}"), "ignored", verify=lambda answer: 0.25 if answer == "x" else 0)
    assert (reward.accuracy, reward.format, reward.total) == (0, 1, 0.8 * 0.25 + 0.2)
    assert score(respond(""), "1", verify=lambda answer: 1.0).accuracy == 0  # no answer is not asked about
    with pytest.raises(ValueError, match=r"returned 2.0, expected a score in \[0, 1\]"):
        score(respond("1"), "1", verify=lambda answer: 2)


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match="contract 'box': expected one of"):
        extract("x", "box")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="mode 'lax': expected one of"):
        score("x", "1", mode="lax")  # type: ignore[arg-type]


def test_ex_7_5_overlong() -> None:
    lengths = [10_000, 16_384, 16_385, 18_432, 20_480, 21_000]
    assert [round(overlong_penalty(n, 20_480, 4_096), 6) for n in lengths] == [0, 0, -0.000244, -0.5, -1, -1]


PIECES = [
    "<think>",
    "</think>",
    "<answer>",
    "</answer>",
    r"\boxed{",
    "{",
    "}",
    "\\",
    r"\text{",
    "199",
    " ",
    "\x00",
    "\ud800",
    "é",
    ",",
    "$",
    "a" * 120,
]
ANY_RESPONSE = st.lists(st.sampled_from(PIECES), max_size=25).map("".join) | st.text(max_size=60)


@given(ANY_RESPONSE, st.sampled_from(["answer_boxed", "boxed", "answer_tag"]))
@example("<think>x</think><answer>\\boxed{199}</answer>", "answer_boxed")
@settings(max_examples=400, deadline=None)
def test_property_11_rewards_are_four_values(text: str, contract: str) -> None:
    assert score(text, "199", contract).total in {0, 0.2, 0.8, 1}
    assert score(text, "199", contract, "code").total in {0, 0.1, 0.2, 0.8, 0.9, 1}


@given(st.lists(st.sampled_from([r"\boxed{", "{", "}", r"\{", r"\}", "x", "\\"]), max_size=20).map("".join))
@settings(max_examples=400, deadline=None)
def test_boxes_are_those_of_a_naive_scan(text: str) -> None:
    """Each opening looks for its own end, quadratically."""

    def escaped(i: int) -> bool:
        count = 0
        while i - count > 0 and text[i - count - 1] == "\\":
            count += 1
        return count % 2 == 1

    expected = []
    start = text.find(r"\boxed{")
    while start >= 0:
        depth, i = 1, start + len(r"\boxed{")
        while i < len(text) and depth:
            if text.startswith(r"\boxed{", i):
                depth, i = depth + 1, i + len(r"\boxed{")
                continue
            if text[i] in "{}" and not escaped(i):
                depth += 1 if text[i] == "{" else -1
            i += 1
        if not depth:
            expected.append((start + len(r"\boxed{"), i - 1))
        start = text.find(r"\boxed{", start + 1)
    assert [(box.start, box.end) for box in boxes(text)] == expected


@pytest.mark.parametrize(
    "piece", [r"\boxed{", "{", "}", "<answer>", "<think>", "</think>", "\\", r"\boxed{}", r"\text{", "\x00", "9", " ", "1,"]
)
def test_megabytes_of_anything_take_linear_time(piece: str) -> None:
    text = "<think>x</think><answer>\\boxed{" + piece * (500_000 // len(piece)) + "</answer>"
    start = time.process_time()
    for mode in ("strict", "code"):
        score(text, "199", "answer_boxed", mode)
    assert time.process_time() - start < 4


def test_megabytes_of_nested_boxes() -> None:
    start = time.process_time()
    assert score("</think>" + r"\boxed{" * 200_000 + "199" + "}" * 200_000, "199").accuracy == 1
    assert time.process_time() - start < 5
