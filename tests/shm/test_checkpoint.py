"""The checkpoint pair: placed complete or not at all, checked when opened."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from shm.checkpoint import (
    Checkpoint,
    CheckpointError,
    CheckpointWriter,
    Hyper,
    Index,
    TokenizerData,
    bin_path,
)

HYPER = Hyper(1, 32, 1, 1, 32, 32, 4, 64, 1e-5, 32, "neighbours", "silu")
TOKENIZER = TokenizerData("gpt2", "x", ["a", "b"], [1, 1], [], [], -1, 1, -1, -1, -1, False, False, "")


def write(path: Path) -> Index:
    with CheckpointWriter(path) as writer:
        writer.add("first", (2, 3), "F32", "rows", [np.arange(6, dtype=np.float32)])
        halves = [np.full(100, 7, np.uint8), np.full(28, 9, np.uint8)]
        writer.add("second", (16, 8), "F16", "groups", halves)
        return writer.finish(
            digest="00" * 32,
            architecture="llama",
            name="n",
            parameters=134,
            source_bytes=1,
            hyper=HYPER,
            tokenizer=TOKENIZER,
        )


def test_round_trip(tmp_path: Path) -> None:
    index = write(tmp_path / "m.idx")
    model = Checkpoint(tmp_path / "m.idx")
    model.verify()
    assert model.view("first").tolist() == [[0, 1, 2], [3, 4, 5]]
    assert model.view("second").tolist() == [7] * 100 + [9] * 28
    assert model.index.tokenizer == TOKENIZER
    assert model.index.hyper == HYPER
    assert [t.offset for t in model.index.tensors] == [0, 64]
    assert model.data.size == index.bin_bytes
    assert model.data.size % 4096 == 0
    assert not model.data.flags.writeable
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m.bin", "m.idx"]


def test_an_interrupted_write_leaves_no_file(tmp_path: Path) -> None:
    def interrupted() -> Iterator[np.ndarray]:
        yield np.zeros(1, np.float32)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), CheckpointWriter(tmp_path / "m.idx") as writer:
        writer.add("first", (1, 1), "F32", "rows", interrupted())
    assert list(tmp_path.iterdir()) == []


def test_damage_is_named(tmp_path: Path) -> None:
    path = tmp_path / "m.idx"
    index = write(path)
    raw = bytearray(bin_path(path).read_bytes())
    raw[70] ^= 1
    bin_path(path).write_bytes(raw)
    with pytest.raises(CheckpointError, match="tensor second: checksum"):
        Checkpoint(path).verify()
    bin_path(path).write_bytes(raw[:100])
    with pytest.raises(CheckpointError, match=f"100 bytes, expected {index.bin_bytes}"):
        Checkpoint(path)
    path.write_bytes(b"nonsense")
    with pytest.raises(CheckpointError, match="not a checkpoint index"):
        Checkpoint(path)
    sound = msgspec.msgpack.encode(index)
    for nonsense in (sound.replace(b"\xa5llama", b"\xa5llam\xff"), sound[:2] + b"\x91" * 5000):  # no UTF-8; too deep
        path.write_bytes(nonsense)
        with pytest.raises(CheckpointError, match="not a checkpoint index"):
            Checkpoint(path)
    path.write_bytes(msgspec.msgpack.encode([99, "other"]))
    with pytest.raises(CheckpointError, match="version is 99, expected 1"):
        Checkpoint(path)
    outside = msgspec.structs.replace(index, tensors=[msgspec.structs.replace(index.tensors[0], offset=1 << 20)])
    path.write_bytes(msgspec.msgpack.encode(outside))
    with pytest.raises(CheckpointError, match="tensor first lies at"):
        Checkpoint(path)


SOUND = msgspec.msgpack.encode(TOKENIZER)


@pytest.mark.parametrize("raw", [SOUND.replace(b"\xa1a", b"\xa1\xff"), b"\x91" * 1020, b"\xc0"])
def test_damaged_tokenizer_data_is_an_error_where_it_is_used(tmp_path: Path, raw: bytes) -> None:
    index = msgspec.structs.replace(write(tmp_path / "m.idx"), tokenizer_raw=msgspec.Raw(raw))
    assert index.tokenizer_digest
    for name in ("tokenizer", "vocabulary_digest"):
        with pytest.raises(CheckpointError, match="bad tokenizer data"):
            getattr(index, name)
