"""Offsets of tokens are those of their definition, for any window; and long texts take many steps."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from pipeline.models.token_trie import TokenTrie
from pipeline.models.vocabularies import SPACE
from pipeline.protocol import messages as m
from stages.tokenizer import byte_level, sentencepiece, unigram, vocabulary, wordpiece
from stages.tokenizer.byte_level import ByteLevelEncoder
from stages.tokenizer.kernels.word_cutter import WordCutter
from stages.tokenizer.normalizer import Normalizer, Spaces
from stages.tokenizer.service import TokenizerModel, TokenizerService
from stages.tokenizer.steps import result_of
from stages.tokenizer.vocabulary import Vocabulary
from tests.tokenizer.offset_definition import offsets
from tests.tokenizer.test_stripping import SPECS, plain, stripped
from tests.tokenizer.trained import CONTROL, REPLACED, USER_DEFINED
from tools.reference.lines import CASES, MARKS, SPACES, make_lines

NAMES = [*CONTROL, *USER_DEFINED, "[MASK]", "[CLS]", "[SEP]", "[UNK]", "<unk>"]
WRITTEN = [*"aabbé einx日本\n\t-!☃☃", "aaaa", "   ", " " * 30, "the ", "quick", SPACE, "\u200b", "\u0301", "\u2000"]
any_text = st.text(st.characters(exclude_categories=("Cs",)), max_size=40)
known_text = st.lists(st.sampled_from([*WRITTEN, *NAMES, *REPLACED, *SPACES, *MARKS, *CASES]), max_size=60).map("".join)
texts = any_text | known_text | st.lists(st.sampled_from([*WRITTEN, *NAMES]), max_size=40).map("".join)
kinds = st.sampled_from(list(SPECS))
written = st.lists(st.sampled_from(["", " ", "a", "b", " a", "a ", "a  b", SPACE]), max_size=20)
STEP = 16_384 * 4  # characters that a step may read


def vocabularies(kind: str) -> list[Vocabulary]:
    return [plain(kind), stripped(kind), stripped(kind, True)]


def with_window(patch: pytest.MonkeyPatch, window: int) -> None:
    for module in (sentencepiece, unigram, wordpiece):
        patch.setattr(module, "_WINDOW", window)
    for module in (byte_level, vocabulary):
        patch.setattr(module, "WINDOW", window)
    patch.setattr(sentencepiece, "_MEASURED", window)


@settings(deadline=None)
@given(kinds, texts, st.sampled_from([1, 2, 3, 7, 16, 50, 16_384]), st.booleans(), st.booleans())
def test_offsets_are_those_of_the_definition(
    kind: str, text: str, window: int, parse_special: bool, add_bos: bool
) -> None:
    for one in vocabularies(kind):
        tokens = one.encode(text, parse_special, add_bos)
        expected = offsets(one, text, tokens, parse_special)
        with pytest.MonkeyPatch.context() as patch:
            with_window(patch, window)
            assert one.offsets(text, tokens, parse_special).tolist() == expected


@pytest.mark.parametrize("kind", SPECS)
def test_offsets_of_long_texts_are_those_of_the_definition(kind: str) -> None:
    """Windows that end within words, names and white space."""
    lines = make_lines(100, 7)
    names = [name for name in NAMES if name in plain(kind)._named]
    named = "".join([line + names[i % len(names)] for i, line in enumerate(lines)])
    for text in ("\n".join(lines), named, "☃" * 9000 + " a", "日本the quick" * 2000, "a" + " " * 9000 + names[-1]):
        for one in vocabularies(kind):
            tokens = one.encode(text, True)
            with pytest.MonkeyPatch.context() as patch:
                with_window(patch, 1000)
                assert one.offsets(text, tokens, True).tolist() == offsets(one, text, tokens, True)


@settings(deadline=None)
@given(written, st.booleans(), st.booleans())
def test_parts_are_written_as_one_by_one(parts: list[str], adds_space: bool, merges_spaces: bool) -> None:
    rules = Normalizer(plain("t5")._encoder._rules._charsmap, adds_space, merges_spaces)  # type: ignore[attr-defined]
    spaces, others = Spaces(rules), Spaces(rules)
    assert spaces.push_each(parts) == [others.push(part) for part in parts]
    assert spaces.is_in_word == others.is_in_word


def service(kind: str) -> TokenizerService:
    described = m.Described("", "m", "", plain(kind).size, 9, (), False)
    return TokenizerService(lambda _: TokenizerModel(plain(kind), None, described))


def n_steps(frame: m.Encode, kind: str) -> int:
    """The steps of a text that is encoded."""
    replies: list[m.Frame] = []

    def run() -> Iterator[None]:
        replies.append((yield from service(kind).reply_steps(frame)))

    n = sum(1 for _ in run())
    (reply,) = replies
    assert isinstance(reply, m.Encoded) and reply.tokens
    return n


@pytest.mark.parametrize("kind", SPECS)
def test_offsets_of_a_long_text_take_many_steps(kind: str) -> None:
    """Of short words, of names, and of U+2581, which SentencePiece's vocabularies count."""
    name = next(iter(plain(kind)._named))
    for unit in ("a ", f"a{name}", f"{SPACE}a "):
        text = unit * (200_000 // len(unit))
        frame = m.Encode("1", "m", text, parse_special=True)
        more = n_steps(msgspec.structs.replace(frame, offsets=True), kind) - n_steps(frame, kind)
        # The bytes of a byte-level token are those of its text.
        assert plain(kind)._encoder.__class__ is ByteLevelEncoder or more >= len(text) // STEP, (unit, more)


def test_words_of_a_window_are_cut_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the kernel is not stored."""
    monkeypatch.setattr(WordCutter, "find", classmethod(lambda cls, *given, **named: None))
    one, text = Vocabulary(SPECS["bert"]()), "the quick a " * 4000
    tokens = one.encode(text, False)
    n_calls, matches = [0], TokenTrie.matches

    def counted(self: TokenTrie, codes: NDArray[np.uint64]) -> Iterator[object]:
        n_calls[0] += 1
        return matches(self, codes)

    monkeypatch.setattr(TokenTrie, "matches", counted)
    steps = one.offset_steps(text, tokens)
    n = 0
    for _ in steps:
        n += 1
        assert n_calls[0] <= 4 * n
    assert n >= len(text) // STEP
    assert result_of(one.offset_steps("the quick", one.encode("the quick", False))).tolist() == [[0, 3], [3, 9]]
