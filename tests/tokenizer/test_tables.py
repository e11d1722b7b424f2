"""The compiled form of vocabularies: ids, the index that has it, and indexes of older releases."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tokenizers import Regex, Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split

from pipeline.models.pretokenizers import PRETOKENIZERS
from pipeline.models.vocabularies import SPACE
from pipeline.models.vocabulary_tables import byte_alphabet, make_tables
from shm import checkpoint, packed_arrays
from shm.checkpoint import VERSION, VERSION_WITHOUT_TABLES, CheckpointError, Index, TokenizerData, load_tables
from stages.tokenizer.opened_models import ModelSource, UnusableModel, build_model
from stages.tokenizer.vocabulary import TokenizerSpec, Vocabulary
from stages.worker.checkpoint.verify import migrate
from tests.tokenizer.trained import byte_level_spec, sentencepiece_spec, unigram_spec, wordpiece_spec
from tests.worker.mappings import mapping_of

SPECS: dict[str, Callable[[], TokenizerSpec]] = {
    "gpt2": byte_level_spec,
    "llama": sentencepiece_spec,
    "t5": unigram_spec,
    "bert": wordpiece_spec,
}
TEXT = "Grüße, <s>naïve  日本語 12345 \t'll [INST]\n\n" * 30


def write_index(path: Path, spec: TokenizerSpec, *, version: int = VERSION) -> Index:
    """An index with a vocabulary and without weights, as a release of that version writes it."""
    tokenizer = TokenizerData(
        spec.model,
        spec.pre,
        list(spec.tokens),
        list(spec.types),
        list(spec.merges),
        list(spec.scores),
        spec.bos,
        spec.eos,
        spec.eot,
        spec.unknown,
        -1,
        spec.add_bos,
        spec.add_space_prefix,
        "{{ messages[0].content }}",
        1,
        charsmap=spec.charsmap,
        merges_spaces=spec.merges_spaces,
    )
    hyper = checkpoint.Hyper(2, 64, 2, 2, 32, 64, 128, 4096, 1e-5, 32, "halves", "silu")
    index = Index(version, "ab" * 32, "llama", "m", 1, 68, 0, hyper, msgspec.Raw(tokenizer.packed()), [])
    path.with_suffix(".bin").write_bytes(b"")
    if version == VERSION:
        checkpoint.write_index(path, index, make_tables(tokenizer))
    else:
        payload = msgspec.msgpack.encode(index)
        path.write_bytes(msgspec.msgpack.encode([version, checkpoint.piece_checksum(payload), payload]))
    return index


@pytest.mark.parametrize("kind", SPECS)
def test_an_index_gives_the_ids_of_its_lists(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "m.idx"
    write_index(path, SPECS[kind]())
    monkeypatch.setattr(Index, "tokenizer", property(lambda index: pytest.fail("the lists are decoded")))
    opened, expected = build_model(ModelSource(path)).vocabulary, Vocabulary(SPECS[kind]())
    for parse in (False, True):
        ids = opened.encode(TEXT, parse)
        assert ids == expected.encode(TEXT, parse)
        assert opened.offsets(TEXT, ids, parse).tolist() == expected.offsets(TEXT, ids, parse).tolist()
        assert opened.decode(ids) == expected.decode(ids)
    for name in ("pieces", "eos_ids", "control", "control_names", "holes", "fill_in_middle", "size", "add_bos"):
        assert getattr(opened, name) == getattr(expected, name), name


@pytest.mark.parametrize("kind", SPECS)
def test_an_index_of_the_release_before_is_opened_and_migrated(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "m.idx"
    old = write_index(path, SPECS[kind](), version=VERSION_WITHOUT_TABLES)
    before = build_model(ModelSource(path))
    assert load_tables(path) == {}
    index = migrate(path, lambda phase, done, total: None)
    assert index.version == checkpoint.load_index(path).version == VERSION
    assert index.tokenizer_digest == old.tokenizer_digest
    after = build_model(ModelSource(path))
    assert after.vocabulary.encode(TEXT, True) == before.vocabulary.encode(TEXT, True)
    assert after.described.tokenizer == before.described.tokenizer
    assert load_tables(path).keys() == make_tables(SPECS[kind]()).keys()


@pytest.mark.parametrize("kind", SPECS)
def test_damaged_tables_are_refused(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "m.idx"
    write_index(path, SPECS[kind]())
    raw = path.read_bytes()
    begin = raw.index(load_tables(path)["pieces"].tobytes())
    for at in range(begin, len(raw), len(raw) // 10):
        damaged = bytearray(raw)
        damaged[at] ^= 1
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError, match="is damaged; remove it to ingest again"):
            load_tables(path)
        with pytest.raises(UnusableModel, match="is damaged"):
            build_model(ModelSource(path))
    for end in (begin, len(raw) - 1):
        path.write_bytes(raw[:end])
        with pytest.raises(UnusableModel, match="not a checkpoint index .* remove it to ingest again"):
            build_model(ModelSource(path))


def without_an_array(arrays: dict[str, NDArray[Any]], name: str) -> dict[str, NDArray[Any]]:
    return {other: array for other, array in arrays.items() if other != name}


@pytest.mark.parametrize("kind", SPECS)
def test_tables_that_do_not_fit_are_refused(kind: str, tmp_path: Path) -> None:
    """With a correct checksum: another program wrote them."""
    path = tmp_path / "m.idx"
    index, tables = write_index(path, SPECS[kind]()), make_tables(SPECS[kind]())
    slots = next(name for name in ("pair_slots", "trie_slots") if name in tables)
    wrong = {
        "another kind": make_tables(SPECS["gpt2" if kind != "gpt2" else "llama"]()),
        "an end behind all bytes": tables | {"ends": tables["ends"] + np.uint32(1 << 20)},
        "a slot behind all keys": tables | {slots: tables[slots] + np.int32(1 << 30)},
        "no slots": tables | {slots: tables[slots][:0]},
        "slots of another type": tables | {slots: tables[slots].astype("<i8")},
        "fewer types than names": tables | {"types": tables["types"][:1]},
        "no types": without_an_array(tables, "types"),
    }
    if "ranks" in tables:
        wrong |= {
            "keys of another type": tables | {"pairs": tables["pairs"].astype("<u4")},
            "ranks of another type": tables | {"ranks": tables["ranks"].astype("u1")},
        }
    if kind == "t5":
        wrong |= {
            "a score of no number": tables | {"scores": tables["scores"] * np.float32("nan")},
            "fewer nodes than keys": tables | {"trie_tokens": tables["trie_tokens"][:-1]},
            "no trie of replacements": tables | {"charsmap_trie": tables["charsmap_trie"][:0]},
        }
    for arrays in wrong.values():
        checkpoint.write_index(path, index, arrays)
        with pytest.raises(UnusableModel, match="its vocabulary cannot be used .* remove it to ingest again"):
            build_model(ModelSource(path))


@pytest.mark.parametrize("length", [1 << 40, -1])
def test_an_array_of_an_absurd_length_is_refused(length: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "m.idx"
    index = write_index(path, wordpiece_spec())
    entry = packed_arrays._Entry
    monkeypatch.setattr(packed_arrays, "_Entry", lambda name, kind, n, offset: entry(name, kind, length, offset))
    checkpoint.write_index(path, index, make_tables(wordpiece_spec()))
    monkeypatch.undo()
    with pytest.raises(UnusableModel, match="array 'pieces' .* remove it to ingest again"):
        build_model(ModelSource(path))


def test_arrays_are_mapped_where_they_are_aligned(tmp_path: Path) -> None:
    path = tmp_path / "m.idx"
    write_index(path, sentencepiece_spec())
    for name, array in load_tables(path).items():
        assert array.flags.aligned and not array.flags.owndata, name


def test_what_is_not_looked_up_takes_no_memory(tmp_path: Path) -> None:
    """The checksum reads all tables; the process of a tokenizer keeps what it needs of them."""
    path = tmp_path / "m.idx"
    tables = {"numbers": np.arange(1 << 20, dtype=np.int64)}
    checkpoint.write_index(path, write_index(path, sentencepiece_spec()), tables)
    array = load_tables(path)["numbers"]
    assert mapping_of(os.getpid(), array.ctypes.data)["Rss"] < 1024  # of 8,192 kB
    assert array.tolist() == list(range(1 << 20))


@cache
def library(pre: str) -> tuple[Tokenizer, Vocabulary]:
    """The `tokenizers` library and a vocabulary, of the same tokens and merges."""
    spec = byte_level_spec(pre)
    types = dict(zip(spec.tokens, spec.types, strict=True))
    ids = {text: i for i, text in enumerate(spec.tokens) if types[text] == 1 or text in byte_alphabet()}
    merges = [(left, right) for left, right in (line.split(" ") for line in spec.merges)]
    merges = [(left, right) for left, right in merges if {left, right, left + right} <= ids.keys()]
    tokenizer = Tokenizer(BPE(ids, merges, ignore_merges=PRETOKENIZERS[pre].whole_pieces))
    splits = [Split(Regex(pattern), "isolated") for pattern in PRETOKENIZERS[pre].patterns]
    tokenizer.pre_tokenizer = Sequence([*splits, ByteLevel(add_prefix_space=False, use_regex=False)])
    return tokenizer, Vocabulary(spec._replace(types=[1 if kind == 4 else kind for kind in spec.types]))


@pytest.mark.parametrize("kind", SPECS)
@settings(deadline=None, max_examples=40)
@given(st.text(max_size=60), st.lists(st.integers(0, 60), max_size=4))
def test_any_text_keeps_its_contracts_in_the_compiled_form(kind: str, text: str, cuts: list[int]) -> None:
    """Offsets are bytes and cover the text, streams decode as the whole, and nothing is lost that is not normalized."""
    opened = compiled(kind)
    ids = opened.encode(text, False)
    ends = [0, *(int(end) for _, end in opened.offsets(text, ids))]
    assert [int(begin) for begin, _ in opened.offsets(text, ids)] == ends[:-1]
    assert ends[-1] == (len(text.encode()) if ids else 0)
    decoder, parts, begin = opened.decoder(), [], 0
    for cut in [*sorted(cuts), len(ids)]:
        parts += decoder.push(ids[begin:cut])
        begin = max(begin, cut)
    assert b"".join(parts).decode("utf-8", "replace") == opened.decode(ids)
    if kind == "gpt2":
        assert opened.decode(ids) == text
    elif kind == "llama":
        assert opened.decode(ids) == text.replace(SPACE, " ")


@cache
def compiled(kind: str) -> Vocabulary:
    """As a model's vocabulary is opened: of packed tables, without lists."""
    tables = packed_arrays.unpack(memoryview(packed_arrays.pack(make_tables(SPECS[kind]()))))
    return Vocabulary(SPECS[kind]()._replace(tokens=(), types=(), merges=(), scores=(), charsmap=b""), tables)


@settings(deadline=None, max_examples=80)
@given(st.sampled_from(["gpt-2", "llama-bpe", "deepseek-llm", "tekken"]), st.text(min_size=1, max_size=60))
def test_ids_of_any_text_are_those_of_the_library(pre: str, text: str) -> None:
    tokenizer, vocabulary = library(pre)
    assert vocabulary.encode(text * 3, False) == tokenizer.encode(text * 3).ids
