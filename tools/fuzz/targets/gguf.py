"""GGUF files: header, metadata and tensor table, then everything that ingest derives from them before it writes.

byte 0   bit 0: the rest is a whole file. Otherwise it is metadata and a tensor table, and the counts are correct.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

import numpy as np

from stages.worker.checkpoint.gguf import GgufError, GgufFile
from stages.worker.checkpoint.ingest import _plan, _Reader
from stages.worker.checkpoint.vocabulary import read_vocabulary
from tools.charsmap_writer import write_charsmap
from tools.fuzz.parts import join, split, written
from tools.fuzz.target import Target

HEAD = b"GGUF" + struct.pack("<I", 3)
PADDING = bytes(4096)  # where the tensors lie


def run(data: bytes) -> None:
    """Open the file and read what ingest reads."""
    if data[:1] and data[0] & 1:
        file = GgufFile(written("model.gguf", data[1:]))
    else:
        keys, tensors = (*[split(part) for part in split(data[1:], 2)], [], [])[:2]
        counts = struct.pack("<QQ", len(tensors), len(keys))
        file = GgufFile(written("model.gguf", HEAD + counts + b"".join(keys) + b"".join(tensors) + PADDING))
    for info in file.tensors.values():
        assert file.rows(info).nbytes == info.nbytes
    reader = _Reader(file)
    hyper = reader.hyper()
    read_vocabulary(file)
    plan = list(_plan(file, reader, hyper))
    if hyper.context_length <= 1024 and hyper.n_rot <= 32:
        tables = reader.rope(hyper)
        assert all(np.isfinite(table).all() for table in tables.values())
    assert sum(part.nbytes for part in plan) <= file.size


def _text(value: str) -> bytes:
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw


def _key(name: str, kind: int, value: bytes) -> bytes:
    return _text(name) + struct.pack("<I", kind) + value


def _keys(architecture: str, **numbers: int) -> list[bytes]:
    tokens = [_text(chr(97 + i)) for i in range(8)]
    prefix = f"{architecture}."
    keys = [
        _key("general.architecture", 8, _text(architecture)),
        _key("general.alignment", 4, struct.pack("<I", 32)),
        _key(prefix + "attention.layer_norm_rms_epsilon", 6, struct.pack("<f", 1e-5)),
        _key(prefix + "rope.freq_base", 6, struct.pack("<f", 10000.0)),
        _key("tokenizer.ggml.model", 8, _text("gpt2")),
        _key("tokenizer.ggml.tokens", 9, struct.pack("<IQ", 8, len(tokens)) + b"".join(tokens)),
        _key("tokenizer.ggml.token_type", 9, struct.pack("<IQ8i", 5, 8, *[1] * 8)),
        _key("tokenizer.ggml.scores", 9, struct.pack("<IQ8f", 6, 8, *[0.5] * 8)),
        _key("tokenizer.ggml.bos_token_id", 4, struct.pack("<I", 0xFFFFFFFF)),
        _key("tokenizer.ggml.add_bos_token", 7, b"\1"),
        _key("tokenizer.chat_template", 8, _text("{{ messages }}")),
    ]
    return keys + [_key(prefix + name, 4, struct.pack("<I", value)) for name, value in numbers.items()]


def _tensor(name: str, shape: tuple[int, ...], kind: int, offset: int) -> bytes:
    dimensions = struct.pack(f"<I{len(shape)}Q", len(shape), *shape[::-1])
    return _text(name) + dimensions + struct.pack("<IQ", kind, offset)


def seeds() -> Iterator[bytes]:
    """A llama of one layer, others with windows, YaRN or wrong shapes, and the first one as a whole file."""
    numbers: dict[str, Any] = {
        "embedding_length": 32,
        "block_count": 1,
        "feed_forward_length": 32,
        "context_length": 64,
        "attention.head_count": 2,
        "attention.head_count_kv": 1,
        "attention.key_length": 16,
    }
    shapes = {
        "token_embd.weight": (8, 32),
        "blk.0.attn_norm.weight": (32,),
        "blk.0.attn_q.weight": (32, 32),
        "blk.0.attn_k.weight": (16, 32),
        "blk.0.attn_v.weight": (16, 32),
        "blk.0.attn_output.weight": (32, 32),
        "blk.0.ffn_norm.weight": (32,),
        "blk.0.ffn_gate.weight": (32, 32),
        "blk.0.ffn_up.weight": (32, 32),
        "blk.0.ffn_down.weight": (32, 32),
        "output_norm.weight": (32,),
    }
    tensors, offset = [], 0
    for name, shape in shapes.items():
        tensors.append(_tensor(name, shape, 2 if len(shape) == 2 else 0, offset))
        offset += shape[0] * 18 if len(shape) == 2 else 4 * shape[0]
    scaled = {**numbers, "rope.dimension_count": 8, "expert_count": 0, "attention.sliding_window": 64}
    llama = _keys("llama", **numbers)
    linear = _key("llama.rope.scaling.type", 8, _text("linear"))
    factor = _key("llama.rope.scaling.factor", 6, struct.pack("<f", 2.0))
    freqs = _tensor("rope_freqs.weight", (4,), 0, offset)
    yield b"\0" + join([join(llama), join(tensors)])
    yield b"\0" + join([join([*_keys("llama", **scaled), linear, factor]), join([*tensors, freqs])])
    yield b"\0" + join(
        [join(_keys("qwen2", **numbers)), join([*tensors, _tensor("blk.0.attn_q.bias", (32,), 1, offset)])]
    )
    windowed = {**numbers, "attention.sliding_window": 8, "attention.sliding_window_pattern": 2}
    yield b"\0" + join([join(_keys("gemma3", **windowed)), join(tensors)])
    replacements = write_charsmap({"A": "a", "e\u0301": "\u00e9"})
    unigram = [
        _key("tokenizer.ggml.model", 8, _text("t5")),
        _key("tokenizer.ggml.precompiled_charsmap", 9, struct.pack("<IQ", 0, len(replacements)) + replacements),
    ]
    yield b"\0" + join([join([key for key in llama if b"ggml.model" not in key] + unigram), join(tensors)])
    yarn = _key("phi3.rope.scaling.type", 8, _text("yarn")), _key("phi3.rope.scaling.factor", 6, struct.pack("<f", 4.0))
    yield b"\0" + join([join([*_keys("phi3", **numbers), *yarn]), join(tensors)])
    counts = struct.pack("<QQ", len(tensors), len(llama))
    yield b"\1" + HEAD + counts + b"".join(llama) + b"".join(tensors) + bytes(offset + 32)


TARGET = Target(
    run,
    seeds,
    errors=(GgufError,),
    modules=(
        "pipeline.models.charsmap",
        "stages.worker.checkpoint.gguf",
        "stages.worker.checkpoint.hyperparameters",
        "stages.worker.checkpoint.ingest",
        "stages.worker.rope",
    ),
    max_bytes=8192,
)
