"""`.idx` files: the index, the vocabulary and the template in it, as the tokenizer and the worker open them.

byte 0   bit 0: the rest is an index. Otherwise it is two parts: an index, and the tokenizer data in it.
         bit 1: the index is in a file of the current version, with a correct checksum; otherwise it is the file
         bit 2: the rest is two parts: all this, and the compiled vocabulary of the file, with a correct checksum
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

import msgspec

from pipeline.errors import StarlingError
from pipeline.models.vocabulary_tables import make_tables
from shm.checkpoint import (
    VERSION,
    VERSION_WITHOUT_PIECES,
    VOCABULARY_REVISION,
    CheckpointError,
    Hyper,
    Index,
    Tensor,
    TokenizerData,
    load_index,
    piece_checksum,
)
from shm.packed_arrays import pack
from stages.tokenizer.chunked_encode import RunTooLong
from stages.tokenizer.opened_models import ModelSource, build_model
from tools.charsmap_writer import write_charsmap
from tools.fuzz.parts import join, split, written
from tools.fuzz.target import Target


def run(data: bytes) -> None:
    """Load the index and build the vocabulary and the template."""
    raw, tables = data[1:], b""
    if data[:1] and data[0] & 4:
        raw, tables = ([*split(raw, 2), b"", b""])[:2]
    if data[:1] and not data[0] & 1:
        before, tokenizer, after = ([*split(raw, 3), b"", b"", b""])[:3]
        raw = b"\x9b" + before + tokenizer + after  # a list of 11
    if data[:1] and data[0] & 2:
        raw = msgspec.msgpack.encode([VERSION, piece_checksum(raw), raw, piece_checksum(tables), b"", tables])
    path = written("model.idx", raw)
    index = load_index(path)
    for tensor in index.tensors:
        assert 0 <= tensor.offset <= tensor.offset + tensor.nbytes <= index.bin_bytes
        index.tensor(tensor.name)
    index.tokenizer_digest, index.vocabulary_digest, index.head_name  # noqa: B018
    vocabulary = build_model(ModelSource(path)).vocabulary
    with suppress(IndexError, KeyError, ValueError, RunTooLong):  # of tables that are not those of a vocabulary
        vocabulary.decode(vocabulary.encode("a<|x|> bc\u65e5", True))


def _index(tokenizer: TokenizerData) -> Index:
    hyper = Hyper(1, 32, 2, 1, 16, 32, 8, 64, 1e-5, 16, "neighbours", "silu")
    tensors = [
        Tensor("token_embd.weight", 8, 32, "F32", "rows", 0, 1024, "00"),
        Tensor("x", 1, 1, "F32", "rows", 1024, 4, ""),
    ]
    raw = msgspec.Raw(msgspec.msgpack.encode(tokenizer))
    return Index(VERSION, "ab" * 32, "llama", "m", 1000, 10, 4096, hyper, raw, tensors, [0])


def seeds() -> Iterator[bytes]:
    """Small vocabularies, as whole files and as parts."""
    words = ["<s>", "</s>", "<|x|>", "a", "b", "c", "ab", "abc"]
    for model, pre, template in (("gpt2", "gpt-2", ""), ("gpt2", "llama-bpe", "{{ messages[0].content }}<|x|>")):
        types, merges = [3, 3, 3, 1, 1, 1, 1, 1], ["a b", "ab c"]
        tokenizer = TokenizerData(model, pre, words, types, merges, [0.5], 0, 1, -1, -1, -1, True, False, template)
        index = _index(tokenizer)
        old = msgspec.structs.replace(index, version=VERSION_WITHOUT_PIECES, pieces=[])
        for flags, one in ((2, index), (0, old)):
            yield bytes([1 | flags]) + msgspec.msgpack.encode(one)
            if one is index:
                packed = pack(make_tables(tokenizer))
                yield bytes([1 | flags | 4]) + join([msgspec.msgpack.encode(one), packed])
            fields = [msgspec.msgpack.encode(getattr(one, name)) for name in Index.__struct_fields__]
            yield bytes([flags]) + join([b"".join(fields[:8]), fields[8], b"".join(fields[9:])])
    pieces = ["<unk>", "</s>", "<|x|>", "\u2581", "\u2581a", "b", "bc", "\u65e5"]
    types, scores = [2, 3, 3, 1, 1, 1, 1, 1], [0.0, 0.0, 0.0, -3.0, -1.0, -2.0, -2.5, -4.0]
    for model in ("llama", "t5", "bert"):
        charsmap = write_charsmap({"A": "a", "a\u0301": "b", "\n": " "}) if model == "t5" else b""
        tokenizer = TokenizerData(
            *(model, "", pieces, types, [], scores, -1, 1, -1, 0, -1, False, True, "", VOCABULARY_REVISION),
            charsmap=charsmap,
            merges_spaces=model == "t5",
        )
        packed = pack(make_tables(tokenizer))
        yield bytes([1 | 2 | 4]) + join([msgspec.msgpack.encode(_index(tokenizer)), packed])


TARGET = Target(
    run,
    seeds,
    errors=(CheckpointError, StarlingError),
    modules=(
        "shm.checkpoint",
        "shm.packed_arrays",
        "pipeline.models.charsmap",
        "pipeline.models.key_table",
        "pipeline.models.token_trie",
        "stages.tokenizer.normalizer",
        "stages.tokenizer.sentencepiece",
        "stages.tokenizer.template_marks",
        "stages.tokenizer.token_lattice",
        "stages.tokenizer.unigram",
        "stages.tokenizer.vocabulary",
        "stages.tokenizer.wordpiece",
    ),
    memory_mb=64,
)
