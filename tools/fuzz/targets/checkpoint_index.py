"""`.idx` files: the index, the vocabulary and the template in it, as the tokenizer and the worker open them.

byte 0   bit 0: the rest is the file. Otherwise it is two parts: an index, and the tokenizer data in it.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from pipeline.errors import StarlingError
from shm.checkpoint import VERSION, CheckpointError, Hyper, Index, Tensor, TokenizerData, load_index
from stages.tokenizer.opened_models import build_model
from tools.fuzz.parts import join, split, written
from tools.fuzz.target import Target


def run(data: bytes) -> None:
    """Load the index and build the vocabulary and the template."""
    raw = data[1:]
    if data[:1] and not data[0] & 1:
        before, tokenizer, after = ([*split(raw, 3), b"", b"", b""])[:3]
        raw = b"\x9a" + before + tokenizer + after  # a list of 10
    path = written("model.idx", raw)
    index = load_index(path)
    for tensor in index.tensors:
        assert 0 <= tensor.offset <= tensor.offset + tensor.nbytes <= index.bin_bytes
        index.tensor(tensor.name)
    index.tokenizer_digest, index.vocabulary_digest, index.head_name  # noqa: B018
    build_model(path)


def _index(tokenizer: TokenizerData) -> Index:
    hyper = Hyper(1, 32, 2, 1, 16, 32, 8, 64, 1e-5, 16, "neighbours", "silu")
    tensors = [
        Tensor("token_embd.weight", 8, 32, "F32", "rows", 0, 1024, "00"),
        Tensor("x", 1, 1, "F32", "rows", 1024, 4, ""),
    ]
    raw = msgspec.Raw(msgspec.msgpack.encode(tokenizer))
    return Index(VERSION, "ab" * 32, "llama", "m", 1000, 10, 4096, hyper, raw, tensors)


def seeds() -> Iterator[bytes]:
    """A small vocabulary, as a whole file and as parts."""
    words = ["<s>", "</s>", "<|x|>", "a", "b", "c", "ab", "abc"]
    for model, pre, template in (("gpt2", "gpt-2", ""), ("gpt2", "llama-bpe", "{{ messages[0].content }}<|x|>")):
        types, merges = [3, 3, 3, 1, 1, 1, 1, 1], ["a b", "ab c"]
        tokenizer = TokenizerData(model, pre, words, types, merges, [0.5], 0, 1, -1, -1, -1, True, False, template)
        index = _index(tokenizer)
        yield b"\1" + msgspec.msgpack.encode(index)
        fields = [msgspec.msgpack.encode(getattr(index, name)) for name in Index.__struct_fields__]
        yield b"\0" + join([b"".join(fields[:8]), fields[8], b"".join(fields[9:])])


TARGET = Target(
    run,
    seeds,
    errors=(CheckpointError, StarlingError),
    modules=("shm.checkpoint", "stages.tokenizer.vocabulary", "stages.tokenizer.template_marks"),
    memory_mb=64,
)
