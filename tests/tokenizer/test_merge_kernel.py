"""The compiled merges of words give the ids of the merges with NumPy, and a tokenizer works without them."""

from __future__ import annotations

import threading
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.config import paths
from pipeline.models.key_table import KeyTable, make_slots
from pipeline.native import object_file
from stages.tokenizer import byte_level
from stages.tokenizer.chunked_encode import WINDOW
from stages.tokenizer.kernels import compiled
from stages.tokenizer.kernels.compiled import KNOWN_BITS, KNOWN_SYMBOLS, LONGEST, WordMerger, compiling
from stages.tokenizer.pair_merger import PairMerger
from stages.tokenizer.vocabulary import TokenizerSpec, Vocabulary
from tests.tokenizer.test_pair_merger import N, Pairs, merged, pairs
from tests.tokenizer.trained import CONTROL, USER_DEFINED, byte_level_spec, sentencepiece_spec
from tools.reference.lines import CASES, MARKS, SPACES, make_lines

pytestmark = pytest.mark.slow

_PARTS = ["the ", "日本語", "aaaa", "    ", "\n\n\n", "12345", "é", "\u2581", *CONTROL, *USER_DEFINED]
texts = st.text(st.characters(exclude_categories=("Cs",)), max_size=60) | st.lists(
    st.sampled_from([*"ab \n1é日", *_PARTS, *SPACES, *MARKS, *CASES]), max_size=60
).map("".join)


def _with_holes() -> TokenizerSpec:
    """A byte-level vocabulary in which some bytes have no token, and some pieces are tokens that merges do not make."""
    spec = byte_level_spec("llama3")
    kept = [i for i, token in enumerate(spec.tokens) if token not in ("b", "q", "Ċ", "æ")]
    tokens = [*(spec.tokens[i] for i in kept), "Ġabcab", "xyxyx", "12q"]
    return spec._replace(tokens=tokens, types=[*(spec.types[i] for i in kept), 1, 1, 1])


def _without_bytes() -> TokenizerSpec:
    """A SentencePiece vocabulary in which most characters are unknown."""
    spec = sentencepiece_spec(True)
    types = [5 if kind == 6 else kind for kind in spec.types]
    return spec._replace(
        tokens=[f"x{token}" if kind == 5 else token for token, kind in zip(spec.tokens, types)], types=types
    )


SPECS = {
    "gpt-2": byte_level_spec("gpt-2"),
    "qwen2": byte_level_spec("qwen2"),
    "whole pieces and holes": _with_holes(),
    "sentencepiece": sentencepiece_spec(True),
    "without a space in front": sentencepiece_spec(False),
    "without bytes": _without_bytes(),
}


@pytest.fixture(scope="module", autouse=True)
def kernel() -> None:
    """The kernel is compiled, as before a start."""
    with compiling():
        pass
    assert compiled.load() is not None


@pytest.fixture(scope="module")
def both(kernel: None) -> dict[str, tuple[Vocabulary, Vocabulary]]:
    """By name, each vocabulary with the kernel and without it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PairMerger, "compiled", lambda self: None)
        plain = {name: Vocabulary(spec) for name, spec in SPECS.items()}
    return {name: (Vocabulary(spec), plain[name]) for name, spec in SPECS.items()}


def test_the_two_ways_are_two(both: dict[str, tuple[Vocabulary, Vocabulary]]) -> None:
    for one, other in both.values():
        assert (one._encoder._encoder.is_compiled, other._encoder._encoder.is_compiled) == (True, False)


def _kernel_of(ranks: Pairs) -> WordMerger:
    keys = np.array([left << 32 | right for left, right in ranks], np.uint64)
    found = WordMerger.find(
        KeyTable(keys, make_slots(keys)),
        np.array([symbol for _, symbol in ranks.values()], np.int32),
        np.array([rank for rank, _ in ranks.values()], np.int32),
    )
    assert found is not None
    return found


@settings(deadline=None)
@given(pairs, st.lists(st.lists(st.integers(-1, N - 1), max_size=2 * KNOWN_SYMBOLS), max_size=12))
def test_merges_are_those_of_the_definition(ranks: Pairs, words: list[list[int]]) -> None:
    found = _kernel_of(ranks)
    symbols = np.array([symbol for word in words for symbol in word], np.int32)
    ends = np.cumsum([len(word) for word in words], dtype=np.int64)
    expected = [merged(word, ranks) for word in words]
    for _ in range(2):  # the second time they are known
        out, out_ends = found.merge(symbols, ends)
        assert [part.tolist() for part in np.split(out, out_ends)[:-1]] == expected


@settings(deadline=None)
@given(pairs, st.lists(st.integers(-1, N - 1), min_size=1, max_size=60), st.sampled_from([1, 7, 1 << 16]))
def test_long_words_merge_as_short_ones(ranks: Pairs, word: list[int], steps: int) -> None:
    """In one call of the kernel and in many."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled, "LONG_STEPS", steps)
        calls = _kernel_of(ranks).merge_long(np.array(word, np.int32))
        n_steps = 0
        while True:
            try:
                next(calls)
            except StopIteration as done:
                found = done.value.tolist()
                break
            n_steps += 1
    assert found == merged(word, ranks)
    if steps == 1:
        assert n_steps >= len(word) - 1


@pytest.mark.parametrize("name", ["qwen2", "sentencepiece"])
def test_long_words_are_merged_by_the_kernel(
    name: str, both: dict[str, tuple[Vocabulary, Vocabulary]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In steps, between which other texts are encoded."""
    one, other = both[name]
    text = "eses" * 1000
    expected = other.encode(text, False)
    monkeypatch.setattr(compiled, "LONG_STEPS", 1000)
    monkeypatch.setattr(PairMerger, "merge_long", lambda self, word: pytest.fail("merged without the kernel"))
    chunks = [ids for _, ids in one._encoder.chunks(one._specials, text, WINDOW)]
    assert list(chain.from_iterable(chunks)) == expected
    assert sum(not ids for ids in chunks) >= 2


@settings(deadline=None)
@pytest.mark.parametrize("name", SPECS)
@given(text=texts, parse_special=st.booleans())
def test_ids_are_the_same(
    name: str, text: str, parse_special: bool, both: dict[str, tuple[Vocabulary, Vocabulary]]
) -> None:
    one, other = both[name]
    assert one.encode(text, parse_special) == other.encode(text, parse_special)


@settings(deadline=None)
@pytest.mark.parametrize("name", ["gpt-2", "qwen2", "whole pieces and holes"])
@given(text=st.lists(texts | st.sampled_from([*CONTROL, *USER_DEFINED]), max_size=6).map("".join))
def test_names_between_words_of_one_call(name: str, text: str, both: dict[str, tuple[Vocabulary, Vocabulary]]) -> None:
    """The kernel gets all words of a window, and the names between them; without it they come one by one."""
    one, other = both[name]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(byte_level, "FEW_WORDS", 0)
        assert one.encode(text, True) == other.encode(text, True)


@pytest.mark.parametrize("name", ["whole pieces and holes", "sentencepiece"])
def test_ids_of_long_texts_are_the_same(name: str, both: dict[str, tuple[Vocabulary, Vocabulary]]) -> None:
    """More words than are remembered, words too long for the kernel, and windows that end in words and names."""
    lines = "\n".join(make_lines(100, 7))
    numbered = " ".join(f"w{i:x}y" for i in range(5 << KNOWN_BITS - 2))
    long = " ".join(f"{'ab' * n}{'日a' * n}" for n in (LONGEST // 4, LONGEST // 2 + 1))
    one, other = both[name]
    for text in (lines, numbered, long, "[INST]\n" * 3_000, f"{long}<tool>{long}{lines}"):
        assert one.encode(text, True) == other.encode(text, True)


def test_several_threads_get_the_ids_of_one(both: dict[str, tuple[Vocabulary, Vocabulary]]) -> None:
    one, other = both["qwen2"]
    lines = make_lines(60, 11)
    expected = [other.encode(line, False) for line in lines]
    wrong: list[str] = []

    def work(first: int) -> None:
        for i in range(first, first + len(lines)):
            if one.encode(lines[i % len(lines)], False) != expected[i % len(lines)]:
                wrong.append(lines[i % len(lines)])

    threads = [threading.Thread(target=work, args=(15 * i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_piece_becomes_the_token_that_no_merges_make(both: dict[str, tuple[Vocabulary, Vocabulary]]) -> None:
    one, other = both["whole pieces and holes"]
    tokens = SPECS["whole pieces and holes"].tokens
    ids = one.encode(" abcab12q", False)
    assert tokens[ids[0]] == "Ġabcab"
    assert ids == other.encode(" abcab12q", False)  # of q there is no byte


def test_without_the_kernel_the_tokenizer_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is missing, or damaged; and the next start compiles it again."""
    stored = compiled.directory()
    monkeypatch.setattr(paths, "cache_dir", lambda: tmp_path)
    monkeypatch.setattr(compiled, "_loaded", {})
    ids = Vocabulary(SPECS["gpt-2"]).encode("the end", False)
    place = compiled.directory()
    assert place.parent == tmp_path and place.name == stored.name
    place.mkdir()
    for path in stored.iterdir():
        (place / path.name).write_bytes(path.read_bytes())
    (place / "merge_words.o").write_bytes(b"damaged")
    assert compiled.load() is None
    assert Vocabulary(SPECS["gpt-2"]).encode("the end", False) == ids
    assert not object_file.symbol_path(place, compiled.MERGE_WORDS).exists()
    with compiling():
        pass
    assert compiled.load() is not None
    assert Vocabulary(SPECS["gpt-2"]).encode("the end", False) == ids


def test_a_compiler_that_fails_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(paths, "cache_dir", lambda: tmp_path)
    monkeypatch.setattr(compiled, "_COMPILER", {"NUMBA_CPU_NAME": "no-such-cpu", "PYTHONPATH": str(tmp_path)})
    (tmp_path / "numba.py").write_text("raise SystemExit('no numba')")
    with compiling():
        pass
    assert compiled.load() is None
