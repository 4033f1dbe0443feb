"""From quotes to tokens: EX-6.1, byte-level BPE, words, repeated phrases, Unicode, the answer box."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from headrace.credit.claims import Claims, Quote, ResponseText, TokenReader, answer_regions, find
from headrace.records import Prompt, Question
from tests.credit.text_cases import encoder_of, word_encoder

QUESTION = Question("q", (), "")


@pytest.fixture(scope="module")
def bpe() -> Any:
    """Byte-level BPE with few merges, so that most characters outside ASCII take several tokens."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    text = ["The blue cube is left of the ball, so B. the the blue blue cube cube é é"]
    core.train_from_iterator(text, trainers.BpeTrainer(vocab_size=320, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    core.add_special_tokens([AddedToken("<|end|>", special=True)])
    core.add_tokens([AddedToken(tag, normalized=False) for tag in ("<think>", "</think>", "<answer>", "</answer>")])
    return encoder_of(PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|end|>"))


@pytest.fixture(scope="module")
def words() -> Any:
    return word_encoder()


def pieces(text: list[str]) -> ResponseText:
    ends = np.cumsum([len(piece) for piece in text])
    return ResponseText("".join(text), np.concatenate(([0], ends[:-1])), ends)


def read(encoder: Any, text: str, prefilled: bool = False) -> tuple[ResponseText, list[int]]:
    ids = encoder.tokenizer.encode(text, add_special_tokens=False)
    return TokenReader(encoder).read(Prompt(QUESTION, np.array([0]), prefilled), np.array(ids)), ids


def test_ex_6_1() -> None:
    response = pieces(["<think>", "The", " blue", " cube", " is", " left", " of", " the", " ball", ",", " so", " B", ".", "</think>"])
    assert response.claims([Quote("The blue cube is left of the ball")]) == Claims(((1, 9),))
    assert response.claims([Quote("the red ball")]) == Claims(unaligned=1)
    assert response.claims([Quote("the")]) == Claims(((7, 8),))


TEXTS = ["<think>The blue cube is left of the ball, so B.</think>", "naïve 北京 🧊🎨 café \n\t blue", "", " é", "a\u0301 b", "👨‍👩‍👧 two"]


@pytest.mark.parametrize("text", TEXTS)
def test_byte_level_text_is_the_tokenizers_own(bpe: Any, text: str) -> None:
    response, ids = read(bpe, text + "<|end|>")
    assert response.text == text
    assert len(response.starts) == len(response.ends) == len(ids)
    assert (np.diff(response.starts) >= 0).all()
    assert (np.diff(response.ends) >= 0).all()
    assert (response.starts <= response.ends).all()


@settings(max_examples=60, deadline=None)
@given(text=st.text(max_size=12), start=st.integers(0, 11), length=st.integers(1, 4))
def test_any_passage_gets_just_the_tokens_that_wrote_it(bpe: Any, text: str, start: int, length: int) -> None:
    text = text.encode("utf-8", "ignore").decode()
    response, ids = read(bpe, text)
    assert response.text == text
    span = response.tokens(start, start + length)
    if start >= len(text):
        assert span is None
        return
    bounds = np.cumsum([0, *(len(bpe.tokenizer.convert_ids_to_tokens(index)) for index in ids)])  # a character per byte
    begin, end = (len(text[:place].encode()) for place in (start, start + length))
    meeting = [i for i in range(len(ids)) if bounds[i] < end and bounds[i + 1] > begin]
    assert span == (meeting[0], meeting[-1] + 1)


@given(st.lists(st.integers(0, 319), max_size=10))
@settings(max_examples=60, deadline=None)
def test_tokens_that_are_no_text_do_not_confuse_the_reader(bpe: Any, ids: list[int]) -> None:
    ids = [index for index in ids if index not in bpe.eos_ids]
    response = TokenReader(bpe).read(Prompt(QUESTION, np.array([0])), ids)
    assert response.text == bpe.decode(ids)
    assert response.ends[-1:].tolist() == ([len(response.text)] if ids else [])


def test_a_character_of_several_tokens_belongs_to_all_of_them(bpe: Any) -> None:
    response, ids = read(bpe, "x🧊y")
    start, end = response.tokens(1, 2)  # type: ignore[misc]
    assert end - start == len(ids) - 2 >= 2


def test_a_prefilled_think_tag_is_read_but_no_response_token(bpe: Any) -> None:
    whole, _ = read(bpe, "<think>The blue cube</think>")
    rest, _ = read(bpe, "The blue cube</think>", prefilled=True)
    assert rest.text == whole.text
    ((first, last),) = whole.claims([Quote("blue")]).spans
    assert rest.claims([Quote("blue")]).spans == ((first - 1, last - 1),)
    assert rest.claims([Quote("<think>")]) == Claims(unaligned=1)


def test_words_that_a_tokenizer_joins_by_its_own_rules(words: Any) -> None:
    response, _ = read(words, "<think> blue circle ; red sum 9 </think> <answer> 9 </answer> <|end|>")
    assert response.text == "<think> blue circle ; red sum 9 </think> <answer> 9 </answer>"
    assert response.claims([Quote("blue circle"), Quote("red"), Quote("9")]).spans == ((1, 3), (4, 5), (6, 7))
    assert response.claims([Quote("9", 2)]) == Claims(in_answer=1)
    assert len(response.starts) == 12


def test_repeated_phrases_go_by_their_number() -> None:
    response = pieces(["the", " cube", " and", " the", " cube", "\n", "the", " cube"])
    assert [response.claims([Quote("the cube", n)]).spans for n in (1, 2, 3)] == [((0, 2),), ((3, 5),), ((6, 8),)]
    assert response.claims([Quote("the cube", 4), Quote("the cube", 10**12), Quote("")]).unaligned == 3


def test_white_space_and_accents_may_differ() -> None:
    assert find("a  blue\n\tcube", Quote("blue cube")) == (3, 13)
    assert find("caf\u0065\u0301 sign", Quote("café")) == (0, 5)
    assert find("café", Quote("cafe\u0301")) == (0, 4)
    assert find("a  b  a b", Quote("a b", 1)) == (6, 9)  # as it stands comes first
    assert find("cafe", Quote("café")) is None
    assert find("abc", Quote("   ")) is None


def test_quotes_overlap_and_repeat_once() -> None:
    response = pieces(["a", " b", " c"])
    assert response.claims([Quote("a b"), Quote("b c"), Quote("a b")]).spans == ((0, 2), (1, 3))


@pytest.mark.parametrize(
    ("text", "inside"),
    [
        (r"so <answer>\boxed{3}</answer>", r"<answer>\boxed{3}</answer>"),
        (r"so \boxed{\frac{1}{2}} done", r"\boxed{\frac{1}{2}}"),
        (r"so \boxed{a \} b} c", r"\boxed{a \} b}"),
        (r"first \boxed{1} last \boxed{2", r"\boxed{2"),
        ("<answer>1</answer> then <answer> 2", "<answer> 2"),
    ],
)
def test_the_final_answer_is_found(text: str, inside: str) -> None:
    assert any(text[start:end] == inside for start, end in answer_regions(text))


def test_quotes_of_the_final_answer_are_left_out() -> None:
    response = pieces(["three", " cubes", ",", " so", r" \boxed{", "three", "}"])
    assert response.claims([Quote("three"), Quote("three", 2), Quote(r"so \boxed{three}")]) == Claims(((0, 1), (3, 7)), 0, 1)
    assert answer_regions("no answer here") == []
