"""Scores of prompts: stored in any pieces, and formatted with the offsets of each vocabulary's text."""

from __future__ import annotations

import struct
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import InvalidRequest
from stages.gateway.admission.lengths import MAX_PROMPT_LOGPROBS, check_prompt_logprobs
from stages.gateway.endpoints.prompt_logprobs import ScoredPrompt
from stages.gateway.requests.prompt_scores import PromptScores, TokenScore
from tests.gateway.vocabularies import vocabulary_of


def packed(index: int, top: int) -> bytes:
    pairs = [(index, -0.5 * index), *((i, -0.25 * i) for i in range(top))]
    return b"".join(struct.pack("<if", *pair) for pair in pairs)


@given(st.integers(1, 40), st.integers(0, 3), st.lists(st.tuples(st.integers(1, 45), st.integers(0, 9)), max_size=30))
def test_pieces_may_repeat_and_a_missing_one_is_noticed(n_tokens: int, top: int, pieces: list[tuple[int, int]]) -> None:
    scores, known = PromptScores(top, n_tokens), 1
    for start, n in [*pieces, (1, n_tokens - 1)]:
        end = min(n_tokens, start + n)
        data = b"".join(packed(index, top) for index in range(start, end))
        assert scores.add(start, data) == (start <= known)
        if start <= known:
            known = max(known, end)
        assert scores.known == known
        assert scores.is_complete == (known >= n_tokens)
    assert scores[0] is None
    for index in range(1, n_tokens):
        assert scores[index] == TokenScore(index, -0.5 * index, tuple((i, -0.25 * i) for i in range(top)))


def test_pieces_of_another_size_are_not_stored() -> None:
    assert not PromptScores(1, 9).add(1, packed(1, 2))


@pytest.mark.parametrize(
    ("tokens", "text", "offsets"),
    [
        ((1, 2, 3), " the light", [0, 4, 8]),
        ((0, 1, 2, 3), " the light", [0, 0, 4, 8]),  # BOS is not in the text
        ((0, 1, 2, 3), "<s> the light", [0, 3, 7, 11]),  # it is: the client gave ids
        ((0, 1, 2, 3), "the light", [0, 0, 3, 7]),  # SentencePiece puts a space before the first word
        ((4, 5, 1), "\u4e00 the", [0, 0, 1]),  # half a character has no place of its own
    ],
)
def test_offsets_are_those_of_the_text(tokens: tuple[int, ...], text: str, offsets: list[int]) -> None:
    vocabulary = vocabulary_of([b"<s>", b" the", b" lig", b"ht", b"\xe4\xb8", b"\x80"], (0,))
    prompt = ScoredPrompt(array("i", tokens), PromptScores(0, len(tokens)), vocabulary)
    assert prompt.offsets(text) == offsets


def test_the_number_of_values_is_bounded() -> None:
    check_prompt_logprobs(MAX_PROMPT_LOGPROBS // 2, 1, "logprobs")
    with pytest.raises(InvalidRequest, match="logprobs asks for 3 values") as caught:
        check_prompt_logprobs(MAX_PROMPT_LOGPROBS // 2, 2, "logprobs")
    assert caught.value.param == "logprobs"
