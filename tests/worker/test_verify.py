"""Checkpoints are read and compared with their checksums before they are used, and again when anything has changed."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import numpy as np
import pytest

from pipeline.config.schema import ModelConfig
from pipeline.errors import ConfigError
from pipeline.models import digests, store
from pipeline.models.store import no_progress
from shm.checkpoint import PIECE_BYTES, VERSION, Checkpoint, CheckpointError, bin_path, load_index
from shm.checkpoint_writer import CheckpointWriter
from stages.worker.checkpoint import verify as v
from stages.worker.checkpoint.prepare import open_verified, prepare_checkpoint
from tests.shm.checkpoints import finish

TENSOR_BYTES = 5 << 20


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """Four tensors of 5 MiB: three pieces."""
    path = tmp_path / "m.idx"
    rng = np.random.default_rng(0)
    with CheckpointWriter(path) as writer:
        for i in range(4):
            data = rng.integers(0, 256, TENSOR_BYTES, np.uint8)
            writer.add(f"t{i}", (1, TENSOR_BYTES), "F16", "groups", [data])
        finish(writer)
    assert len(load_index(path).pieces) == 3
    return path


def flip(path: Path, at: int) -> None:
    """Change a bit of a file in place."""
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))


def decay(path: Path, at: int) -> None:
    """As `flip`, but the file's identity stays, as if the medium had changed. Returns with the record renewed."""
    flip(path, at)
    info, record = path.stat(), v.record_path(path)
    known = msgspec.json.decode(record.read_bytes(), type=v.Record)
    known = msgspec.structs.replace(known, mtime_ns=info.st_mtime_ns, ctime_ns=info.st_ctime_ns)
    record.write_bytes(msgspec.json.encode(known))


def test_an_intact_file_is_read_once(large: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    checkpoint = Checkpoint(large)
    assert v.verify_once(checkpoint, lambda *report: seen.append(report))
    size = checkpoint.index.bin_bytes
    assert seen[0] == ("verify", 0, size)
    assert seen[-1] == ("verify", size, size)
    assert not v.verify_once(Checkpoint(large), no_progress)
    assert sorted(path.name for path in large.parent.iterdir()) == ["m.bin", "m.idx", "m.verified"]


def touch(path: Path) -> None:
    os.utime(path)


def restore(path: Path) -> None:
    """From a backup, with the old times."""
    info = path.stat()
    copy = path.with_name("copy")
    copy.write_bytes(path.read_bytes())
    os.utime(copy, ns=(info.st_atime_ns, info.st_mtime_ns))
    copy.rename(path)


def write_with_old_times(path: Path) -> None:
    info = path.stat()
    raw = path.read_bytes()
    with path.open("r+b") as file:
        file.write(raw)
    os.utime(path, ns=(info.st_atime_ns, info.st_mtime_ns))


def damage_record(path: Path) -> None:
    v.record_path(path).write_bytes(b"{")


@pytest.mark.parametrize("change", [touch, restore, write_with_old_times, damage_record])
def test_a_file_that_may_have_changed_is_read_again(large: Path, change) -> None:  # type: ignore[no-untyped-def]
    v.verify(Checkpoint(large), no_progress)
    change(bin_path(large))
    assert v.verify_once(Checkpoint(large), no_progress)


@pytest.mark.parametrize(
    ("at", "tensor", "piece"),
    [(0, "t0", 0), (TENSOR_BYTES, "t1", 0), (PIECE_BYTES - 1, "t1", 0), (PIECE_BYTES, "t1", 1), (17 << 20, "t3", 2)],
)
def test_damage_is_named_by_file_tensor_and_piece(large: Path, at: int, tensor: str, piece: int) -> None:
    v.verify(Checkpoint(large), no_progress)
    flip(bin_path(large), at)
    with pytest.raises(ConfigError) as caught:
        open_verified(large)
    begin, end = piece * PIECE_BYTES, min((piece + 1) * PIECE_BYTES, load_index(large).bin_bytes)
    message = str(caught.value)
    assert message.startswith(f"{bin_path(large)}: tensor {tensor}: piece {piece} (bytes {begin}..{end}) has checksum ")
    assert f"expected {load_index(large).pieces[piece]:016x}; 1 of 3 pieces are damaged" in message
    assert message.endswith(f"check the disk, then remove {large} to ingest the model again")
    assert not v.record_path(large).exists()


def test_all_damaged_tensors_are_counted(large: Path) -> None:
    for at in (0, TENSOR_BYTES, 2 * TENSOR_BYTES, 3 * TENSOR_BYTES):
        flip(bin_path(large), at)
    with pytest.raises(CheckpointError, match=r"tensor t0, t1, t2 and 1 more: piece 0 .*2 of 3 pieces are damaged"):
        v.verify(Checkpoint(large), no_progress)


def test_damage_in_the_padding_is_noticed(large: Path) -> None:
    flip(bin_path(large), load_index(large).bin_bytes - 1)
    with pytest.raises(CheckpointError, match=r"tensor none \(padding\): piece 2"):
        v.verify(Checkpoint(large), no_progress)


def test_decay_of_the_medium_is_found_only_by_reading(large: Path) -> None:
    v.verify(Checkpoint(large), no_progress)
    decay(bin_path(large), 100)
    assert not v.verify_once(Checkpoint(large), no_progress)
    with pytest.raises(CheckpointError, match="tensor t0"):
        v.verify(Checkpoint(large), no_progress)
    with pytest.raises(CheckpointError, match="tensor t0"):
        v.verify_once(Checkpoint(large), no_progress)


def test_a_truncated_map_is_an_error_and_no_signal(large: Path) -> None:
    """As a disk that cannot be read: the pages cannot be mapped."""
    checkpoint = Checkpoint(large)
    os.truncate(bin_path(large), 2 * PIECE_BYTES)
    with pytest.raises(
        CheckpointError, match=r"piece 2 \(bytes 16777216..20975616, of t3\) cannot be read: an I/O error"
    ):
        v.verify(checkpoint, no_progress)


def test_a_record_that_cannot_be_written_costs_only_time(large: Path, caplog: pytest.LogCaptureFixture) -> None:
    v.record_path(large).mkdir()
    assert v.verify_once(Checkpoint(large), no_progress)
    assert v.verify_once(Checkpoint(large), no_progress)
    lines = [vars(record) for record in caplog.records if record.message.startswith("verification is not recorded")]
    assert {line["reason"] for line in lines} == {"Is a directory"}
    assert sorted(path.name for path in large.parent.iterdir()) == ["m.bin", "m.idx", "m.verified"]


# ------------------------------------------------------------------ checkpoints of the first releases


def make_old(path: Path) -> bytes:
    """Rewrite an index as version 1, which is `Index` alone, without pieces. Returns its bytes."""
    index = msgspec.structs.replace(load_index(path), version=1, pieces=[])
    raw = msgspec.msgpack.encode([getattr(index, name) for name in index.__struct_fields__][:10])
    path.write_bytes(raw)
    return raw


def test_an_old_index_is_migrated_once(tiny_gguf, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    model = ModelConfig(name="tiny", path=str(tiny_gguf("small", "Q8_0")))
    path = prepare_checkpoint(model, tmp_path)
    before, inode = path.read_bytes(), bin_path(path).stat().st_ino
    make_old(path)
    assert prepare_checkpoint(model, tmp_path) == path
    assert path.read_bytes() == before
    assert bin_path(path).stat().st_ino == inode, "the weights stay"
    stamp = path.stat()
    prepare_checkpoint(model, tmp_path)
    assert path.stat().st_mtime_ns == stamp.st_mtime_ns


def test_an_old_index_is_migrated_without_its_source(tiny_gguf, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """As for a version that was loaded from a file that has changed since."""
    source = tmp_path / "m.gguf"
    source.write_bytes(tiny_gguf("small", "Q8_0").read_bytes())
    model = ModelConfig(name="tiny", path=str(source))
    path = prepare_checkpoint(model, tmp_path)
    make_old(path)
    source.write_bytes(b"GGUF, no more")
    assert prepare_checkpoint(model, tmp_path, digest=path.stem) == path
    assert load_index(path).version == VERSION


def test_damage_of_an_old_checkpoint_is_found_by_the_migration(tiny_gguf, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    model = ModelConfig(name="tiny", path=str(tiny_gguf("small", "Q8_0")))
    path = prepare_checkpoint(model, tmp_path)
    old = make_old(path)
    tensor = load_index(path).tensor("blk.0.ffn_up.weight")
    flip(bin_path(path), tensor.offset + tensor.nbytes - 1)
    with pytest.raises(ConfigError, match=r"tensor blk.0.ffn_up.weight differs .*remove .*\.idx to ingest"):
        prepare_checkpoint(model, tmp_path)
    assert path.read_bytes() == old
    path.unlink()
    open_verified(prepare_checkpoint(model, tmp_path))


# ------------------------------------------------------------------ sources that change


def test_a_source_that_is_not_what_its_record_says_is_hashed_again(tiny_gguf, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """Replaced with equal size and times: the recorded digest is that of the old bytes."""
    source, models = tmp_path / "m.gguf", tmp_path / "models"
    source.write_bytes(tiny_gguf("small", "Q8_0", 1).read_bytes())
    model = ModelConfig(name="tiny", path=str(source))
    located = store.fetch(model, models)
    info = source.stat()
    with source.open("r+b") as file:
        file.write(tiny_gguf("small", "Q8_0", 2).read_bytes())
    os.utime(source, ns=(info.st_atime_ns, info.st_mtime_ns))
    assert store.find(model, models) == located, "the record cannot tell"
    path = prepare_checkpoint(model, models)
    assert path.stem == digests.compute(source, no_progress).sha256 != located.digest
    assert sorted(one.suffix for one in models.iterdir() if not one.name.startswith(".")) == [".bin", ".idx", ".json"]


def test_a_file_that_grows_while_it_is_hashed_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "m.gguf"
    source.write_bytes(b"GGUF" + bytes(3 << 20))

    def grow(what: str, done: int, total: int) -> None:
        with source.open("ab") as file:
            file.write(b"more")

    with pytest.raises(ConfigError, match=r"m.gguf was changed while it was hashed; try again when it is complete"):
        digests.compute(source, grow)
