"""WordPiece: ids of the definition and of llama.cpp, chunks, offsets, and bounds."""

from __future__ import annotations

import unicodedata
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.errors import ModelUnavailable
from pipeline.models.vocabularies import SPACE
from stages.tokenizer import wordpiece, wordpiece_characters
from stages.tokenizer.chunked_encode import RunTooLong
from stages.tokenizer.vocabulary import Vocabulary
from tests.tokenizer.trained import wordpiece_spec
from tools.reference.lines import make_lines
from tools.reference.peer_vocabulary import PeerVocabulary, is_installed
from tools.tiny_gguf import WORDPIECE_SPECIALS
from tools.vocabulary_gguf import write_vocabulary

SPEC = wordpiece_spec()
TOKENS = list(SPEC.tokens)
VOCABULARY = Vocabulary(SPEC)
known_parts = [*"aZé ßI\u0130日本!-$\t\n\u200b\u0301\ufffd\u00c5\u1e9b", "the ", "quick", "[CLS]", SPACE]
known_text = st.lists(st.sampled_from(known_parts), max_size=30).map("".join)
texts = st.text(st.characters(exclude_categories=("Cs", "Cn")), max_size=40) | known_text


def ids(*names: str) -> list[int]:
    return [TOKENS.index(name) for name in names]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("the Quick", ids(f"{SPACE}the", f"{SPACE}quick")),
        ("th\u00e9", ids(f"{SPACE}the")),
        ("a-b", ids(f"{SPACE}a", f"{SPACE}-", f"{SPACE}b")),
        ("a\u200bb", ids(f"{SPACE}a", "b")),
        ("日a日", ids(f"{SPACE}日", f"{SPACE}a", f"{SPACE}日")),
        ("a本 the", ids(f"{SPACE}a", "[UNK]", f"{SPACE}the")),
        ("aλ the", ids("[UNK]", f"{SPACE}the")),
        ("[CLS]", ids(f"{SPACE}[", f"{SPACE}c", "l", "s", f"{SPACE}]")),
        (" \t\n", []),
    ],
)
def test_by_hand(text: str, expected: list[int]) -> None:
    assert VOCABULARY.encode(text, False) == expected


def test_a_text_begins_with_its_own_token_and_names_count_if_wanted() -> None:
    for add_bos in (None, False):
        assert Vocabulary(SPEC._replace(add_bos=add_bos)).encode("the", False, True) == ids("[CLS]", f"{SPACE}the")
    assert VOCABULARY.encode("the[SEP]the", True) == ids(f"{SPACE}the", "[SEP]", f"{SPACE}the")
    assert VOCABULARY.decode(ids("[CLS]", f"{SPACE}the", f"{SPACE}a", "s"), skip_special=True) == "the as"


@settings(deadline=None)
@given(text=texts, parse_special=st.booleans())
def test_offsets_cover_the_text(text: str, parse_special: bool) -> None:
    tokens = VOCABULARY.encode(text, parse_special)
    at = 0
    for begin, end in VOCABULARY.offsets(text, tokens, parse_special).tolist():
        assert begin == at <= end
        at = end
    assert at == (len(text.encode()) if tokens else 0)


def test_an_offset_ends_where_its_word_does() -> None:
    text = "th\u00e9  a日[UNK]"
    ranges = VOCABULARY.offsets(text, VOCABULARY.encode(text, True), True).tolist()
    parts = [text.encode()[begin:end].decode() for begin, end in ranges]
    assert parts == ["th\u00e9", "  a", "日", "[UNK]"]


@settings(deadline=None)
@given(text=texts, size=st.integers(1, 20))
def test_windows_do_not_matter(text: str, size: int) -> None:
    chunks = VOCABULARY._encoder.chunks(VOCABULARY._always, text, size)
    assert [i for _, found in chunks for i in found] == VOCABULARY.encode(text, False)


def test_a_word_without_an_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wordpiece, "MAX_WORD", 10_000)
    assert VOCABULARY.encode("a" * 9000, False)[0] == TOKENS.index(f"{SPACE}a")
    with pytest.raises(RunTooLong, match="characters without white space"):
        VOCABULARY.encode("a" * 40_000, False)


def test_a_vocabulary_without_words_is_refused() -> None:
    with pytest.raises(ModelUnavailable, match="no token that begins with"):
        Vocabulary(SPEC._replace(tokens=["[UNK]", "a"], types=[2, 1]))
    with pytest.raises(ModelUnavailable, match="unknown_token_id names no token"):
        Vocabulary(SPEC._replace(unknown=-1))


class _OtherUnicode:
    """`unicodedata` of a Python that says of every character but ASCII that it is an accent of "A", and a mark."""

    def __init__(self, category: str) -> None:
        self._category = category

    def normalize(self, form: str, character: str) -> str:
        return character if character.isascii() else "A" + character

    def category(self, character: str) -> str:
        return self._category


NEWER = {
    **dict.fromkeys("\U00011f00\u0cf3\U00013455\U0001e4ef", ""),  # marks of Unicode 15
    **{c: f" {c} " for c in "\U00011b00\U00011f4f"},  # punctuation
    **{c: c for c in "\u0897\u1c89\ua7cb\U00010d50\U00016d6a\U0001e5ff"},  # of Unicode 16
}


def test_the_python_that_runs_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    assert {c: wordpiece_characters.normalized(c) for c in NEWER} == NEWER
    monkeypatch.setattr(wordpiece_characters, "unicodedata", _OtherUnicode("Mn"))
    assert wordpiece_characters.normalized("\u00e9") == "", "it is another table"
    assert {c: wordpiece_characters.normalized(c) for c in NEWER} == NEWER


def test_characters_newer_than_the_tables_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    unassigned = "\U000105f5"
    assert wordpiece_characters.normalized(unassigned) == unassigned
    monkeypatch.setattr(unicodedata, "normalize", lambda form, character: character)
    for category in ("Lu", "Mn", "Po"):
        monkeypatch.setattr(unicodedata, "category", lambda character, category=category: category)
        assert wordpiece_characters.normalized(unassigned) == unassigned


@pytest.fixture(scope="module")
def peer(tmp_path_factory: pytest.TempPathFactory):  # type: ignore[no-untyped-def]
    if not is_installed():
        pytest.skip("llama.cpp is not installed; `make peers` does that")
    vocabulary = PeerVocabulary(write_vocabulary(tmp_path_factory.mktemp("peer") / "v.gguf", SPEC))
    yield vocabulary
    vocabulary.close()


def test_ids_are_those_of_llama_cpp(peer: PeerVocabulary) -> None:
    for line in make_lines(2000):
        assert VOCABULARY.encode(line, False) == peer.encode(line, False), line
    assert peer.encode("the", False, add_bos=True) == ids("[CLS]", f"{SPACE}the", "[SEP]")


@settings(deadline=None, max_examples=1000)
@given(text=texts)
def test_ids_of_any_text_are_those_of_llama_cpp(peer: PeerVocabulary, text: str) -> None:
    assert VOCABULARY.encode(text, False) == peer.encode(text, False)


@pytest.mark.skipif(not is_installed(), reason="needs xllamacpp: make peers")
def test_new_characters_are_those_of_llama_cpp(tmp_path: Path) -> None:
    others = [chr(code) for code in (*range(0x11F00, 0x11F5B), *range(0x10D40, 0x10D90), *range(0x13430, 0x13460))]
    characters = list(dict.fromkeys([*NEWER, *others]))
    tokens = [*WORDPIECE_SPECIALS, *(SPACE + c for c in characters)]
    spec = SPEC._replace(tokens=tokens, types=[3] * len(WORDPIECE_SPECIALS) + [1] * len(characters))
    vocabulary, other = Vocabulary(spec), PeerVocabulary(write_vocabulary(tmp_path / "v.gguf", spec))
    try:
        for character in characters:
            assert vocabulary.encode(character, False) == other.encode(character, False), hex(ord(character))
    finally:
        other.close()
