"""White space that belongs to special tokens: ids of the definition, in pieces too; offsets, bounds and marks."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache, partial

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from stages.tokenizer import sentencepiece
from stages.tokenizer import vocabulary as vocabulary_module
from stages.tokenizer.chunked_encode import MarkedTokenFinder, RunTooLong, SpecialTokenFinder
from stages.tokenizer.stripping import _ASCII, _UNICODE, Stripping
from stages.tokenizer.token_lower_bound import min_tokens
from stages.tokenizer.vocabulary import TokenizerSpec, TooManyTokens, Vocabulary
from tests.tokenizer.trained import (
    CONTROL,
    USER_DEFINED,
    byte_level_spec,
    sentencepiece_spec,
    unigram_spec,
    wordpiece_spec,
)

RIGHT: tuple[str, ...] = ("</s>", "<|im_end|>", "[INST]")
LEFT: tuple[str, ...] = ("<|im_start|>", "<|im_end|>", "<tool>")


def without_spaces_of_two_bytes(spec: TokenizerSpec) -> TokenizerSpec:
    """Without the tokens of two bytes that white space has: encoding drops these."""
    return spec._replace(tokens=["ð" * 9 + t if t in ("\u010b", "\u0122") else t for t in spec.tokens])


SPECS: dict[str, Callable[[], TokenizerSpec]] = {
    "gpt-2": byte_level_spec,
    "llama3": partial(byte_level_spec, "llama3"),
    "byte-level with holes": lambda: without_spaces_of_two_bytes(byte_level_spec()),
    "llama": sentencepiece_spec,
    "llama without a prefix": partial(sentencepiece_spec, False),
    "t5": unigram_spec,
    "t5 with all spaces": partial(unigram_spec, True, False),
    "t5 without a prefix": partial(unigram_spec, False, False, False),
    "t5 with inner spaces": partial(unigram_spec, True, True, True, True),
    "bert": wordpiece_spec,
}


def stripping(spec: TokenizerSpec, is_unicode: bool) -> TokenizerSpec:
    """With tokens that take white space."""
    right, left = RIGHT, LEFT
    if spec.model == "bert":
        right, left = ("[SEP]",), ("[MASK]", "[CLS]")
    ids = [tuple(map(spec.tokens.index, names)) for names in (right, left)]
    return spec._replace(strips_right=ids[0], strips_left=ids[1], strips_unicode=is_unicode or None)


@cache
def plain(kind: str) -> Vocabulary:
    return Vocabulary(SPECS[kind]())


@cache
def stripped(kind: str, is_unicode: bool = False) -> Vocabulary:
    return Vocabulary(stripping(SPECS[kind](), is_unicode))


WORDS = [" ", "\n", "\t", "\v", "\u3000", "\x85", "\x1c", "  ", "\n\n", " " * 30, "a", "the ", "ab", "日", "12", "é"]
texts = st.lists(
    st.sampled_from([*WORDS, *CONTROL, *USER_DEFINED, "[MASK]", "[CLS]", "[SEP]", "<unk>"]), max_size=30
).map("".join)
kinds = st.sampled_from(list(SPECS))


def parts_of(vocabulary: Vocabulary, text: str, is_unicode: bool) -> list[tuple[str, int]]:
    """The texts between names (-1), and names with their white space: they make up the whole text."""
    spaces = re.escape(_UNICODE if is_unicode else _ASCII)
    named = vocabulary._named
    right = {name for name in named if named[name] in vocabulary._stripping._right}
    left = {name for name in named if named[name] in vocabulary._stripping._left}
    pattern = "|".join(
        (f"[{spaces}]*" if name in left else "") + f"({re.escape(name)})" + (f"[{spaces}]*" if name in right else "")
        for name in sorted(named, key=len, reverse=True)
    )
    parts, at = [], 0
    for match in re.finditer(pattern, text):
        parts += [(text[at : match.start()], -1), (match[0], named[match[match.lastindex or 0]])]
        at = match.end()
    return [part for part in [*parts, (text[at:], -1)] if part[0]]


@settings(deadline=None)
@given(kinds, texts, st.booleans())
@example("llama", "<|im_end|>\n", False)
@example("llama", "a \n<|im_start|>", False)
@example("gpt-2", "</s>\n\u3000a", False)
@example("gpt-2", "</s>\n\u3000a", True)
def test_ids_are_those_of_the_parts(kind: str, text: str, is_unicode: bool) -> None:
    ours, expected = stripped(kind, is_unicode), list[int]()
    for part, token in parts_of(ours, text, is_unicode):
        expected += [token] if token >= 0 else plain(kind).encode(part, False)
    assert ours.encode(text, True) == expected


@settings(deadline=None)
@given(kinds, texts, st.booleans(), st.sampled_from([1, 2, 3, 9, 16, 40]))
@example("llama", "ab \n\n<|im_start|>", False, 4)
@example("gpt-2", "a b c d e f g h i j k l m n o p q r s t   \n\n<|im_start|>", False, 42)
@example("t5 without a prefix", "abab \n\n<|im_start|>", False, 6)
def test_chunks_equal_the_whole(kind: str, text: str, is_unicode: bool, window: int) -> None:
    ours = stripped(kind, is_unicode)
    ids, end = list[int](), 0
    for now, new in ours._encoder.chunks(ours._specials, text, window):
        assert now >= end
        ids, end = ids + new, now
    assert ids == ours.encode(text, True)
    assert end == len(text)


@settings(deadline=None)
@given(kinds, texts, st.booleans(), st.booleans())
@example("gpt-2", " <s>", False, True)
@example("gpt-2", "ab <s>", False, True)
@example("byte-level with holes", "a\n\u3000 <|im_end|> \n\u3000b", True, False)
def test_a_special_token_covers_its_white_space(kind: str, text: str, is_unicode: bool, add_bos: bool) -> None:
    ours = stripped(kind, is_unicode)
    ours.add_bos = True
    ids = ours.encode(text, True, add_bos)
    n_added = len(ids) - len(ours.encode(text, True))
    ranges = ours.offsets(text, ids, True).tolist()
    data, holes = text.encode(), ours.holes
    at = 0
    for begin, end in ranges:  # no byte is covered twice, and only holes are not covered
        assert begin <= end and (begin >= at or begin == end)
        assert holes.issuperset(data[at:begin])
        at = max(at, end)
    assert holes.issuperset(data[at:]) or len(ids) == n_added
    named, found = [part for part in parts_of(ours, text, is_unicode) if part[1] >= 0], list[str]()
    if not holes and kind.startswith(("gpt", "llama")):
        special = {token for _, token in named}
        for token, (begin, end) in list(zip(ids, ranges, strict=True))[n_added:]:
            found += [data[begin:end].decode()] if token in special else []
        assert found == [part for part, _ in named]


@settings(deadline=None)
@given(kinds, texts, st.booleans())
def test_the_lower_bound_and_the_limit_leave_white_space_out(kind: str, text: str, is_unicode: bool) -> None:
    ours = stripped(kind, is_unicode)
    n = len(ours.encode(text, True))
    assert min_tokens(ours._lower_bound.weight(text)) <= n
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vocabulary_module, "WINDOW", 8)
        assert len(list(ours.encode_steps(text, True, token_limit=max(n, 1)))) >= 0
        if n > 1:
            with pytest.raises(TooManyTokens):
                list(ours.encode_steps(text, True, token_limit=n - 1))


@pytest.mark.parametrize("kind", ["gpt-2", "llama", "t5 with all spaces"])
def test_a_million_spaces_are_dropped_in_one_step(kind: str) -> None:
    ours = stripped(kind)
    text = "</s>" + " \n" * 500_000 + "<|im_start|>a"
    names = [ours.control_names["</s>"], ours.control_names["<|im_start|>"]]
    assert ours.encode(text, True)[:2] == names
    assert ours.encode("a" + text[4:], True)[-2] == names[1]
    assert len(list(ours.encode_steps(text, True, token_limit=9))) < 9


def test_only_marked_names_take_white_space() -> None:
    ours = stripped("llama")
    text = "</s>\n</s>\n a"
    marks = {0, 3}
    tail = plain("llama").encode("</s>\n a", False)
    assert ours.encode(text, True, marks=marks) == [ours.control_names["</s>"], *tail]


@given(
    st.lists(st.text("ab<\n", min_size=1, max_size=4), min_size=1, max_size=8, unique=True),
    st.text("ab<\n \t", max_size=40),
    st.integers(0, 9),
    st.sets(st.integers(0, 40)),
)
def test_all_names_are_those_found_one_by_one(names: list[str], text: str, begin: int, marks: set[int]) -> None:
    ids = {name: i for i, name in enumerate(names)}
    made = SpecialTokenFinder(ids, Stripping(range(0, 8, 2), range(0, 8, 3)))
    for finder in (made, MarkedTokenFinder(made, names[::2], marks)):
        expected, at, end = [], begin, max(begin, len(text) - 3)
        while at < end and (one := finder.find(text, at, end)) is not None:
            assert one[0] >= at and text[one[0] : one[1]].strip(" \n\t") in names[one[2]]
            expected.append(one)
            at = one[1]
        assert finder.find_all(text, begin, end) == expected


RUN = sentencepiece.MAX_RUN


@pytest.mark.parametrize("kind", ["llama", "llama without a prefix"])
@pytest.mark.parametrize(
    "text",
    [
        "a" + " " * (4 * RUN) + "b",
        "a" + " " * (4 * RUN),
        " " * RUN,
        " " * (RUN - 1),
        " " * RUN + "b",
        "a " * RUN + " " * (RUN // 2) + "b",
        "a" * (RUN // 2) + " " * (RUN // 2 + 1) + "b",
        "a" * RUN,
        "a" * RUN + "\n",
    ],
    ids=range(9),
)
def test_stripping_tokens_do_not_change_which_runs_are_accepted(kind: str, text: str) -> None:
    results: list[object] = []
    for vocabulary in (plain(kind), stripped(kind)):
        try:
            results.append(vocabulary.encode(text, True))
        except RunTooLong:
            results.append(None)
    assert results[0] == results[1]


def test_white_space_that_a_token_takes_is_no_run() -> None:
    text = "a" + " " * (2 * RUN)
    with pytest.raises(RunTooLong):
        stripped("llama").encode(text + "b", True)
    assert stripped("llama").encode(text + "<|im_start|>", True) == stripped("llama").encode("a<|im_start|>", True)
