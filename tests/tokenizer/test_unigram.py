"""Unigram: ids of the definition and of llama.cpp, normalization, round trips, chunks, offsets, streams, and bounds."""

from __future__ import annotations

import re
import struct
import unicodedata
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.errors import ModelUnavailable
from pipeline.models.charsmap import LONGEST, Charsmap
from pipeline.models.vocabularies import SPACE
from stages.tokenizer import unigram
from stages.tokenizer.chunked_encode import RunTooLong
from stages.tokenizer.normalizer import Normalizer, Spaces
from stages.tokenizer.token_lower_bound import min_tokens
from stages.tokenizer.vocabulary import TokenizerSpec, TooManyTokens, Vocabulary
from tests.tokenizer.trained import CONTROL, REPLACED, USER_DEFINED, unigram_spec
from tools.charsmap_writer import write_charsmap
from tools.reference.lines import CASES, MARKS, SPACES, make_lines
from tools.reference.peer_vocabulary import PeerVocabulary, is_installed
from tools.vocabulary_gguf import write_vocabulary

# add_space_prefix, merges_spaces, charsmap, inner
KINDS = [(True, True, True, False), (True, False, True, False), (False, False, True, True), (False, True, False, True)]
SPECS = {kind: unigram_spec(*kind) for kind in KINDS}
VOCABULARIES = {kind: Vocabulary(spec) for kind, spec in SPECS.items()}
kinds = st.sampled_from(KINDS)
any_text = st.text(st.characters(exclude_categories=("Cs",)), max_size=40)
known_text = st.lists(
    st.sampled_from(
        [*"aabbé einx日本\n", "aaaa", "  ", SPACE, "the ", *CONTROL, *USER_DEFINED, *REPLACED, *SPACES, *MARKS, *CASES]
    ),
    max_size=40,
).map("".join)
texts = any_text | known_text


def normalized(spec: TokenizerSpec, text: str) -> str:
    """By the definition: the longest replacement at each place, then spaces."""
    replaced, at = "", 0
    rules = REPLACED if spec.charsmap else {}
    while at < len(text):
        found = [key for key in rules if text.startswith(key, at)]
        key = max(found, key=len, default=text[at])
        replaced += rules.get(key, key)
        at += len(key)
    if spec.merges_spaces:
        return "".join(SPACE + word for word in replaced.split(" ") if word)
    if spec.add_space_prefix:
        replaced = re.sub("^ *(?=[^ ])", lambda match: match[0] + " ", replaced)
    return replaced.replace(" ", SPACE)


def by_definition(spec: TokenizerSpec, text: str) -> list[int]:
    """The best tokens of every beginning of a text without names of special tokens."""
    text = normalized(spec, text)
    usable = {
        token: (i, 0.0 if kind == 4 else score)
        for i, (token, kind, score) in enumerate(zip(spec.tokens, spec.types, spec.scores, strict=True))
        if kind in (1, 4, 5)
    }
    unknown = min(score for score, kind in zip(spec.scores, spec.types, strict=True) if kind == 1) - 10
    best: list[tuple[float, list[int]]] = [(0.0, [])]
    for end in range(1, len(text) + 1):
        options = []
        for begin in range(end):
            token = usable.get(text[begin:end])
            if token is None and begin == end - 1:
                token = spec.unknown, unknown
            if token is not None:
                options.append((best[begin][0] + token[1], -begin, [*best[begin][1], token[0]]))
        total, _, ids = max(options)
        best.append((total, ids))
    ids = best[-1][1]
    return [token for at, token in enumerate(ids) if not (at and token == spec.unknown == ids[at - 1])]


def parts_of(vocabulary: Vocabulary, text: str) -> Iterator[tuple[str, bool]]:
    """The text between names of user-defined tokens, and these."""
    names = sorted(USER_DEFINED, key=len, reverse=True)
    for part in re.split("(" + "|".join(map(re.escape, names)) + ")", text):
        yield part, part in USER_DEFINED


@settings(deadline=None)
@given(kind=kinds, text=texts)
def test_ids_are_those_of_the_definition(kind: tuple[bool, ...], text: str) -> None:
    spec, expected = SPECS[kind], []
    for part, is_name in parts_of(VOCABULARIES[kind], text):
        expected += [spec.tokens.index(part)] if is_name else by_definition(spec, part)
    assert VOCABULARIES[kind].encode(text, False) == expected


@settings(deadline=None)
@given(kind=kinds, text=texts)
def test_a_text_is_decoded_as_its_normalized_form(kind: tuple[bool, ...], text: str) -> None:
    """Each part without the space before it; a run of characters that no token has is the unknown token's name."""
    spec, vocabulary, expected = SPECS[kind], VOCABULARIES[kind], ""
    for part, is_name in parts_of(vocabulary, text):
        plain = part if is_name else normalized(spec, part).replace(SPACE, " ")
        has_prefix = not is_name and (spec.merges_spaces or spec.add_space_prefix)
        expected += plain.removeprefix(" ") if has_prefix else plain
    tokens = vocabulary.encode(text, False)
    pattern, decoder = "", vocabulary.decoder()
    for token in tokens:
        (shown,) = decoder.push([token])
        pattern += ".+" if token == spec.unknown else re.escape(shown.decode())
    assert re.fullmatch(pattern, expected, re.DOTALL)


@settings(deadline=None)
@given(text=st.text(alphabet="abehint ", max_size=60))
def test_normalized_text_comes_back(text: str) -> None:
    """The round trip without loss: all characters have tokens, and spaces are single ones."""
    text = " ".join(text.split())
    for vocabulary in VOCABULARIES.values():
        assert vocabulary.decode(vocabulary.encode(text, False)) == text


@settings(deadline=None)
@given(kind=kinds, text=texts, parse=st.booleans())
def test_offsets_cover_the_text(kind: tuple[bool, ...], text: str, parse: bool) -> None:
    vocabulary = VOCABULARIES[kind]
    for add_bos in (False, True):
        tokens = vocabulary.encode(text, parse, add_bos=add_bos)
        at = 0
        for begin, end in vocabulary.offsets(text, tokens, parse).tolist():
            assert begin == at <= end
            at = end
        has_any = len(vocabulary.encode(text, parse)) > 0
        assert at == (len(text.encode()) if has_any else 0)


def test_an_offset_ends_where_its_text_does() -> None:
    vocabulary = VOCABULARIES[KINDS[0]]
    text = "the  Ａ<s>ﬁn ☃☃a"
    tokens = vocabulary.encode(text, True)
    ranges = vocabulary.offsets(text, tokens, True).tolist()
    parts = [text.encode()[begin:end].decode() for begin, end in ranges]
    assert "".join(parts) == text
    assert "<s>" in parts and [end for _, end in ranges if end in (3, 8)] == [3, 8]
    assert parts[tokens.index(vocabulary._encoder._unknown)].endswith("☃☃")  # type: ignore[attr-defined]


@given(kinds, texts, st.lists(st.integers(0, 60)), st.booleans())
def test_any_split_of_the_tokens_decodes_as_the_whole(
    kind: tuple[bool, ...], text: str, cuts: list[int], skip: bool
) -> None:
    vocabulary = VOCABULARIES[kind]
    tokens = vocabulary.encode(text, True, add_bos=True)
    decoder, parts, begin = vocabulary.decoder(skip), [], 0
    for cut in [*sorted(cuts), len(tokens)]:
        parts += decoder.push(tokens[begin:cut])
        begin = max(begin, min(cut, len(tokens)))
    assert b"".join(parts).decode("utf-8", "replace") == vocabulary.decode(tokens, skip)


@settings(deadline=None)
@given(kind=kinds, text=texts.map(lambda text: text * 3), window=st.sampled_from([1, 2, 7, 40]))
def test_the_window_size_does_not_change_the_tokens(kind: tuple[bool, ...], text: str, window: int) -> None:
    vocabulary = VOCABULARIES[kind]
    chunks = list(vocabulary._encoder.chunks(vocabulary._specials, text, window))
    assert [token for _, new in chunks for token in new] == vocabulary.encode(text, True)
    ends = [end for end, _ in chunks]
    assert ends == sorted(ends) and (not text or ends[-1] == len(text))


@given(texts)
def test_a_text_has_no_fewer_tokens_than_its_lower_bound(text: str) -> None:
    for vocabulary in VOCABULARIES.values():
        assert len(vocabulary.encode(text, False)) >= min_tokens(vocabulary._lower_bound.weight(text))


@given(st.lists(st.sampled_from([*CONTROL, "<unk>", "<0x00>", "<", "s>", "＜s＞", " ", "a"])).map("".join))
def test_text_never_becomes_a_control_token(text: str) -> None:
    vocabulary = VOCABULARIES[KINDS[0]]
    allowed = {SPECS[KINDS[0]].tokens.index("<unk>"), SPECS[KINDS[0]].tokens.index("<unused>")}
    assert not (vocabulary.control - allowed) & set(vocabulary.encode(text, False))
    assert not (vocabulary.control - allowed) & set(vocabulary.encode(text, True, marks=frozenset()))


def test_words_are_encoded_as_they_are_written_only_where_they_end_at_spaces() -> None:
    cases = {
        (True, True): REPLACED,
        (True, False): REPLACED | {" x": "y"},
        (False, False): REPLACED | {"a b": "y"},
        (False, True): REPLACED | {"x": SPACE},
    }
    for (parted, pure), table in cases.items():
        spec = SPECS[KINDS[0]]._replace(charsmap=write_charsmap(table))
        assert Vocabulary(spec)._encoder._has_words == (parted and pure), table  # type: ignore[attr-defined]
    for kind in KINDS[1:]:
        assert not VOCABULARIES[kind]._encoder._has_words  # type: ignore[attr-defined]


@cache
def with_replacement(key: str) -> Vocabulary:
    return Vocabulary(SPECS[KINDS[0]]._replace(charsmap=write_charsmap(REPLACED | {key: "e"})))


@settings(deadline=None, max_examples=50)
@given(texts, st.sampled_from([" ", " x", "a b", "x\n", "\ta"]))
def test_replacements_with_spaces_count_across_words(text: str, key: str) -> None:
    text = f"{text}a{key}b {text}".translate({ord(c): "" for c in "<>[]"})
    replaced, at, table = "", 0, REPLACED | {key: "e"}
    while at < len(text):
        found = max((other for other in table if text.startswith(other, at)), key=len, default=text[at])
        replaced += table.get(found, found)
        at += len(found)
    expected = by_definition(SPECS[KINDS[0]]._replace(charsmap=b""), replaced)
    assert with_replacement(key).encode(text, False) == expected


# ------------------------------------------------------------------ the table of replacements


@settings(deadline=None)
@given(text=texts, cuts=st.lists(st.integers(0, 120), max_size=5))
def test_a_text_is_normalized_part_by_part(text: str, cuts: list[int]) -> None:
    for spec in SPECS.values():
        rules = Normalizer(Charsmap(spec.charsmap), bool(spec.add_space_prefix), bool(spec.merges_spaces))
        spaces, at, out = Spaces(rules), 0, ""
        for cut in [*sorted(cut for cut in cuts if cut < len(text)), len(text)]:
            if cut < at:
                continue
            replaced, n = rules.replaced(text[at:cut], cut == len(text))
            out += spaces.push(replaced)
            at += n
        assert out == normalized(spec, text)
        assert "".join(rules.aligned(text, True)[0]) == rules.replaced(text, True)[0]


replaceable = st.text(
    st.characters(exclude_categories=("Cs",), exclude_characters="\0") | st.sampled_from(" \n\t"),
    min_size=1,
    max_size=7,
)


@settings(deadline=None)
@given(st.dictionaries(replaceable, replaceable | st.just(""), min_size=1, max_size=20), texts)
def test_a_table_is_read_as_it_was_written(table: dict[str, str], text: str) -> None:
    charsmap = Charsmap(write_charsmap(table))
    assert charsmap.single == {key: to for key, to in table.items() if len(key) == 1}
    several = {key: to for key, to in table.items() if len(key) > 1}
    assert charsmap.starts == {key[0] for key in several} and charsmap.seconds == {key[1] for key in several}
    assert charsmap.apart == {space for space in " \t\n\r" if not any(space in key for key in several)}
    charsmap = Charsmap.of_tables(charsmap.tables())
    for searched in (text, *table, "".join(table)):
        for at in range(len(searched)):
            longest = max((key for key in several if searched.startswith(key, at)), key=len, default="")
            assert charsmap.find(searched, at) == ((at + len(longest), several[longest]) if longest else None)


@settings(deadline=None)
@given(st.binary(max_size=300) | st.binary(max_size=60).map(lambda data: write_charsmap({"ab": "c", "d": "é"}) + data))
def test_damaged_tables_are_refused(data: bytes) -> None:
    try:
        charsmap = Charsmap(data)
    except ValueError:
        return
    for at in range(4):
        try:
            charsmap.find("abé日", at)
        except ValueError:
            pass


def test_what_is_wrong_with_a_table_is_said() -> None:
    good = write_charsmap({"ab": "c", "d": "e"})
    for data, message in (
        (b"abc", "its trie has 0 bytes"),
        (struct.pack("<I", len(good)) + good[4:], "expected a multiple of 4 below"),
        (good[:-1], "last replacement has no end"),
        (good[:-2] + b"\xff\0", "are not UTF-8"),
        (write_charsmap({"a": "b" * 300}), "a replacement has 300 bytes"),
    ):
        with pytest.raises(ValueError, match=message):
            Charsmap(data)


def test_longer_texts_than_can_be_looked_up_are_left_alone() -> None:
    assert Charsmap(write_charsmap({"a" * (LONGEST + 1): "b"})).find("a" * 99, 0) is None


# ------------------------------------------------------------------ bounds


@pytest.mark.parametrize("unit", ["a", "ab", "日本", " ", "☃"])
def test_long_runs_equal_their_definition(unit: str) -> None:
    for kind in KINDS:
        assert VOCABULARIES[kind].encode(unit * 300, False) == by_definition(SPECS[kind], unit * 300)


def test_a_run_that_is_too_long_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unigram, "MAX_RUN", 10_000)
    vocabulary = VOCABULARIES[KINDS[0]]
    assert len(vocabulary.encode("☃" * 50_000, False)) == 2  # U+2581, and one unknown token
    with pytest.raises(RunTooLong, match="characters without a border"):
        vocabulary.encode("a" * 50_000, False)


def test_a_text_over_the_limit_stops_early() -> None:
    steps = VOCABULARIES[KINDS[0]].encode_steps("words of a text " * 100_000, False, token_limit=100)
    with pytest.raises(TooManyTokens) as many:
        list(steps)
    assert not many.value.is_exact


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scores": []}, "tokenizer.ggml.scores has 0 entries"),
        ({"scores": [float("inf")] * len(SPECS[KINDS[0]].tokens)}, "has an infinite value"),
        ({"unknown": -1}, "unknown_token_id names no token"),
        ({"types": [3] * len(SPECS[KINDS[0]].tokens)}, "has no normal token"),
        ({"charsmap": b"abc"}, "tokenizer.ggml.precompiled_charsmap cannot be used: its trie has 0 bytes"),
    ],
)
def test_incomplete_vocabularies_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelUnavailable, match=re.escape(message)):
        Vocabulary(SPECS[KINDS[0]]._replace(**changes))


# ------------------------------------------------------------------ llama.cpp


def unicode_table() -> dict[str, str]:
    """NFKC of single characters and of letters with one mark, as the published table has them."""
    table = {}
    for code in [*range(0x20, 0x2800), *range(0x3000, 0x3400), *range(0xF900, 0x10000)]:
        c = chr(code)
        if unicodedata.category(c) not in ("Cs", "Cn") and (to := unicodedata.normalize("NFKC", c)) != c:
            table[c] = to
        for mark in ("\u0301", "\u0308") if code < 0x500 else ():
            if len(both := unicodedata.normalize("NFKC", c + mark)) == 1:
                table[c + mark] = both
    return table


@pytest.mark.skipif(not is_installed(), reason="needs xllamacpp: make peers")
def test_ids_with_unicodes_table_are_those_of_llama_cpp(tmp_path_factory: pytest.TempPathFactory) -> None:
    spec = SPECS[KINDS[0]]._replace(charsmap=write_charsmap(unicode_table()))
    vocabulary = Vocabulary(spec)
    peer = PeerVocabulary(write_vocabulary(tmp_path_factory.mktemp("peer") / "v.gguf", spec))
    try:
        for line in make_lines(2000, 11):
            assert vocabulary.encode(line, False) == peer.encode(line, False), line

        @settings(deadline=None, max_examples=200)
        @given(texts)
        def same(text: str) -> None:
            assert vocabulary.encode(text, False) == peer.encode(text, False)

        same()
        assert peer.encode("a", False, add_bos=True) == [*vocabulary.encode("a", False, add_bos=True), spec.eos]
    finally:
        peer.close()
