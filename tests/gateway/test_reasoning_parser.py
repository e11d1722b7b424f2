"""Reasoning and answer in a text: the same for every division of the text, with the tokens that count as reasoning."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.api.requests.reasoning_fields import Reasoning
from stages.gateway.reasoning.reasoning_parser import MAX_SPACE, Kind, Part, ReasoningParser
from stages.gateway.requests.text_decoder import StreamDecoder

PAIRS = (("<think>", "</think>"), ("[T]", "[/T]"), ("Thought: ", "Reply: "), ("ab", "aab"))
PIECES = [*(mark for pair in PAIRS for mark in pair), *("a", "b", "<", "</thin", "ä", "🐦", " ", "\n")]
texts = st.lists(st.sampled_from(PIECES), max_size=14).map("".join)
reasonings = st.builds(
    lambda pair, is_open, keeps: Reasoning(*pair, is_open, keeps), st.sampled_from(PAIRS), st.booleans(), st.booleans()
)
sizes = st.lists(st.integers(0, 5), max_size=60)


def divided(text: str, reasoning: Reasoning) -> tuple[str, str]:
    """Reasoning and answer, by the definition; for less white space than the bound."""
    if not reasoning.is_open:
        begin = re.match(rf"[ \t\r\n]*{re.escape(reasoning.begin)}", text)
        if begin is None:
            return "", text
        text = text[begin.end() :]
    inner, end, rest = text.lstrip(" \t\r\n").partition(reasoning.end)
    if not end:
        return inner, ""
    return inner.rstrip(" \t\r\n"), rest if reasoning.keeps_space else rest.lstrip(" \t\r\n")


def cut(text: str | bytes, sizes: list[int]) -> list:  # type: ignore[type-arg]
    pieces, at = [], 0
    for size in sizes:
        pieces.append(text[at : at + size])
        at += size
    return [*pieces, text[at:]]


def parts_of(pieces: list[str], reasoning: Reasoning) -> list[Part]:
    parser = ReasoningParser(reasoning)
    return [part for piece in pieces for part in parser.feed(piece)] + parser.finish()


def of_kind(parts: list[Part], kind: Kind) -> str:
    return "".join(part.text for part in parts if part.kind is kind)


@given(texts, reasonings, sizes)
def test_any_division_of_the_text_gives_the_same(text: str, reasoning: Reasoning, sizes: list[int]) -> None:
    parts = parts_of(cut(text, sizes), reasoning)
    assert "".join(part.text for part in parts) == text
    assert (of_kind(parts, Kind.REASONING), of_kind(parts, Kind.ANSWER)) == divided(text, reasoning)
    assert all(part.text for part in parts)


@pytest.mark.parametrize("place", ["begin", "inner", "last", "rest"])
@pytest.mark.parametrize("step", [1, 7, 10_000])
def test_white_space_is_bounded(place: str, step: int) -> None:
    space = {place: " " * (MAX_SPACE + 3)}
    text = "{begin}<think>{inner}x{last}</think>{rest}y".format_map(
        {**dict.fromkeys(("begin", "inner", "last", "rest"), ""), **space}
    )
    parts = parts_of(cut(text, [step] * (len(text) // step)), Reasoning("<think>", "</think>"))
    found = of_kind(parts, Kind.REASONING), of_kind(parts, Kind.ANSWER)
    expected = {"begin": ("", text), "inner": ("   x", "y"), "last": ("x   ", "y"), "rest": ("x", "   y")}
    assert found == expected[place]


def test_what_is_certain_comes_out_at_once() -> None:
    parser = ReasoningParser(Reasoning("<think>", "</think>"))
    assert parser.feed(" <th") == []
    assert parser.feed("ink>\n") == [Part(Kind.MARK, " <think>"), Part(Kind.MARK, "\n")]
    assert parser.feed("a b </th") == [Part(Kind.REASONING, "a b")]
    assert parser.feed("e") == [Part(Kind.REASONING, " </the")]
    assert parser.feed("</think>\n\nA") == [
        Part(Kind.MARK, "</think>"),
        Part(Kind.MARK, "\n\n"),
        Part(Kind.ANSWER, "A"),
    ]
    assert parser.is_answer
    assert parser.feed("<think>") == [Part(Kind.ANSWER, "<think>")]


@given(texts, reasonings, st.lists(st.text("ab <>Rä\n", min_size=1, max_size=3), max_size=3), sizes)
def test_stop_strings_act_on_the_answer_alone(
    text: str, reasoning: Reasoning, stop: list[str], sizes: list[int]
) -> None:
    """Pieces of bytes stand for tokens. The text up to the answer is whole, with its marks."""
    decoder, shown = StreamDecoder(stop, reasoning), ""
    for piece in cut(text.encode(), sizes):
        shown += decoder.push(piece)
        if decoder.stop_string:
            break
    else:
        shown += decoder.finish()
    answer = divided(text, reasoning)[1]
    met = [answer.find(one) for one in stop if one in answer]
    assert bool(decoder.stop_string) == bool(met)
    assert shown == text[: len(text) - len(answer) + (min(met) if met else len(answer))]


@pytest.mark.parametrize(
    ("tokens", "is_open", "expected"),
    [
        (["<think>", "a", "b", "</think>", "\n\n", "A", "B"], False, 4),
        (["\n", "<thin", "k>a</think>A", "B"], False, 3),
        (["a", "</thin", "k>"], True, 3),
        (["</think>", "A"], True, 1),
        (["a", "b"], True, 2),
        ([" ", "<thin", "A"], False, 0),
        (["A", "</think>"], False, 0),
    ],
)
def test_tokens_up_to_the_end_of_the_reasoning_are_counted(tokens: list[str], is_open: bool, expected: int) -> None:
    decoder = StreamDecoder((), Reasoning("<think>", "</think>", is_open))
    text = "".join(decoder.push(token.encode()) for token in tokens) + decoder.finish()
    assert text == "".join(tokens)
    assert decoder.n_reasoning == expected
