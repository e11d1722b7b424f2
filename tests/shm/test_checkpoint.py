"""The checkpoint pair: placed complete or not at all, checked when opened."""

from __future__ import annotations

import hashlib
import mmap
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.catalog.entry import Entry, Source
from pipeline.catalog.pulled import is_complete
from shm import checkpoint
from shm.checkpoint import (
    Checkpoint,
    CheckpointError,
    Index,
    Tensor,
    bin_path,
    load_index,
    load_tables,
    piece_checksum,
    write_index,
)
from shm.checkpoint_writer import CheckpointWriter
from shm.chunked_file import CHUNK_BYTES
from shm.partial_checkpoint import PartialCheckpoint
from shm.populate import read_mapped
from shm.tensor_checksum import TensorChecksum, has_checksum
from tests.shm.checkpoints import HYPER, TOKENIZER, finish

PIECE = 5000  # bytes, in tests of pieces
WAIT_S = 60.0  # that only a failure reaches


def write(path: Path) -> Index:
    with CheckpointWriter(path) as writer:
        writer.add("first", (2, 3), "F32", "rows", [np.arange(6, dtype=np.float32)])
        halves = [np.full(100, 7, np.uint8), np.full(28, 9, np.uint8)]
        writer.add("second", (16, 8), "F16", "groups", halves)
        return finish(writer)


def test_round_trip(tmp_path: Path) -> None:
    index = write(tmp_path / "m.idx")
    model = Checkpoint(tmp_path / "m.idx")
    assert not any(model.is_damaged(tensor) for tensor in model.index.tensors)
    assert model.index.pieces == [piece_checksum(model.piece(0).data)]
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


def test_an_unfinished_write_lists_only_tensors_that_are_in_the_file(tmp_path: Path) -> None:
    """A killed process leaves what the kernel has; one that is interrupted writes the rest before it ends."""
    partial = PartialCheckpoint(tmp_path / "part", "what")
    listed: list[int] = []

    def interrupted() -> None:
        with CheckpointWriter(tmp_path / "m.idx", partial) as writer:
            for i in range(9):
                values = np.full(CHUNK_BYTES // 4 // 4, i, np.float32)  # a quarter of a chunk
                writer.add(str(i), (1, values.size), "F32", "rows", [values])
                lines = (partial.directory / "tensors").read_bytes().splitlines()[1:]
                found = [msgspec.json.decode(line, type=Tensor) for line in lines]
                assert all(one.offset + one.nbytes <= partial.bin_path.stat().st_size for one in found)
                listed.append(len(found))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert listed == [0, 0, 0, 4, 4, 4, 4, 8, 8]
    again = PartialCheckpoint(tmp_path / "part", "what")
    with CheckpointWriter(tmp_path / "m.idx", again) as writer:
        assert [tensor.name for tensor in writer.tensors] == [str(i) for i in range(9)]
        writer.add("last", (1, 1), "F32", "rows", [np.ones(1, np.float32)])
        index = finish(writer)
    data = Checkpoint(tmp_path / "m.idx")
    assert [data.view(str(i))[0, 0] for i in range(9)] == list(range(9)) and data.view("last")[0, 0] == 1
    assert [piece_checksum(data.piece(i).data) for i in range(len(index.pieces))] == index.pieces


def test_damage_is_named(tmp_path: Path) -> None:
    path = tmp_path / "m.idx"
    index = write(path)
    raw = bytearray(bin_path(path).read_bytes())
    raw[70] ^= 1
    bin_path(path).write_bytes(raw)
    damaged = Checkpoint(path)
    assert [t.name for t in damaged.index.tensors if damaged.is_damaged(t)] == ["second"]
    assert piece_checksum(damaged.piece(0).data) != damaged.index.pieces[0]
    bin_path(path).write_bytes(raw[:100])
    with pytest.raises(CheckpointError, match=f"100 bytes, expected {index.bin_bytes}"):
        Checkpoint(path)
    path.write_bytes(b"nonsense")
    with pytest.raises(CheckpointError, match="not a checkpoint index"):
        Checkpoint(path)
    sound = encode_old(index)
    for nonsense in (sound.replace(b"\xa5llama", b"\xa5llam\xff"), sound[:2] + b"\x91" * 5000):  # no UTF-8; too deep
        path.write_bytes(nonsense)
        with pytest.raises(CheckpointError, match="not a checkpoint index"):
            Checkpoint(path)
    path.write_bytes(msgspec.msgpack.encode([99, "other"]))
    with pytest.raises(CheckpointError, match="version is 99, expected 3"):
        Checkpoint(path)
    outside = msgspec.structs.replace(index, tensors=[msgspec.structs.replace(index.tensors[0], offset=1 << 20)])
    write_index(path, outside)
    with pytest.raises(CheckpointError, match="tensor first lies at"):
        Checkpoint(path)
    write_index(path, msgspec.structs.replace(index, pieces=[]))
    with pytest.raises(CheckpointError, match="0 checksums, expected 1 for 4096 bytes"):
        Checkpoint(path)


def test_the_index_that_was_read_last_is_kept_until_its_file_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "SETTLED_NS", -1)
    path, other = tmp_path / "m.idx", tmp_path / "other.idx"
    write(path)
    first = load_index(path)
    assert load_index(path) is first
    write_index(other, msgspec.structs.replace(first, name="other"))
    os.rename(other, path)
    assert load_index(path).name == "other"
    path.unlink()
    with pytest.raises(FileNotFoundError):
        load_index(path)


def test_damage_that_leaves_the_times_of_a_file_is_found_by_reading_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by a disk: the file's identity stays."""
    monkeypatch.setattr(checkpoint, "SETTLED_NS", -1)
    monkeypatch.setattr(checkpoint, "_identity", lambda info: (1,))
    path = tmp_path / "m.idx"
    index = write(path)
    checksum, nbytes = index.pieces_digest, index.bin_bytes
    entry = Entry(
        name="m",
        digest="m",
        source=Source(file="m.gguf", bytes=1),
        index_sha256="",
        index_bytes=1,
        weights_bytes=nbytes,
        weights_checksum=checksum,
    )
    assert load_index(path, is_fresh=True) is not load_index(path)
    assert is_complete(tmp_path, entry)
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 3] ^= 1
    path.write_bytes(raw)
    load_index(path)  # the one that was kept
    with pytest.raises(CheckpointError):
        load_index(path, is_fresh=True)
    assert not is_complete(tmp_path, entry)


def test_an_index_whose_file_is_gone_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It maps the file, whose space on the disk would not become free."""
    monkeypatch.setattr(checkpoint, "SETTLED_NS", -1)
    path = tmp_path / "m.idx"
    write(path)
    load_index(path)
    assert checkpoint._last is not None
    path.unlink()
    with pytest.raises(FileNotFoundError):
        load_index(path, is_fresh=True)
    assert checkpoint._last is None


def test_the_index_of_a_file_that_has_just_been_written_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be changed again without another time."""
    monkeypatch.setattr(checkpoint, "SETTLED_NS", 3600 * 10**9)
    path = tmp_path / "m.idx"
    write(path)
    assert load_index(path) is not load_index(path)


CUT_SHORT = """
import mmap, os, sys
from pathlib import Path
from shm import checkpoint, populate

class CutShort(mmap.mmap):
    def __new__(cls, *arguments, **options):
        mapped = super().__new__(cls, *arguments, **options)
        os.truncate(sys.argv[1], int(sys.argv[4]))
        return mapped

mmap.mmap = CutShort
if sys.argv[2] == "old kernel":
    populate._MADV_POPULATE_READ = 99  # which no kernel has
try:
    getattr(checkpoint, sys.argv[3])(Path(sys.argv[1]))
except checkpoint.CheckpointError as error:
    print(error)
"""


@pytest.mark.parametrize("kernel", ["this kernel", "old kernel"])
@pytest.mark.parametrize("load", ["load_index", "load_tables"])
def test_an_index_that_cannot_be_read_is_an_error(tmp_path: Path, kernel: str, load: str) -> None:
    """A file that is cut short when it has been mapped stands for a damaged disk: an access to the map is a SIGBUS."""
    path = tmp_path / "m.idx"
    index = write(path)
    write_index(path, index, {"table": np.arange(100_000)})
    size = path.stat().st_size
    assert load_cut_short(path, kernel, load, 10) == (
        f"{path}: cannot be read: it ends after 10 of {size} bytes; remove it to ingest again\n"
    )


@pytest.mark.parametrize("kernel", ["this kernel", "old kernel"])
def test_an_index_is_read_without_its_tables(tmp_path: Path, kernel: str) -> None:
    """The scheduler uses none of these, and they are the greater part."""
    path = tmp_path / "m.idx"
    write_index(path, write(path), {"table": np.arange(100_000)})
    size = path.stat().st_size
    assert load_cut_short(path, kernel, "load_index", size // 2) == ""
    path.unlink()
    write_index(path, write(path), {"table": np.arange(100_000)})
    assert f"it ends after {size // 2} of {size} bytes" in load_cut_short(path, kernel, "load_tables", size // 2)


def load_cut_short(path: Path, kernel: str, load: str, nbytes: int) -> str:
    """The error of another process that loads the index, which has only `nbytes` as soon as it is mapped."""
    command = [sys.executable, "-c", CUT_SHORT, str(path), kernel, load, str(nbytes)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_other_threads_run_while_an_index_is_read(tmp_path: Path) -> None:
    """As long as no thread has to give the interpreter up, another one runs only while a call has released it."""
    path = tmp_path / "m"
    path.write_bytes(bytes(1 << 20))
    has_run = False

    def run() -> None:
        nonlocal has_run
        begin.wait()
        has_run = True

    begin, thread, interval = threading.Event(), threading.Thread(target=run), sys.getswitchinterval()
    thread.start()
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        sys.setswitchinterval(1000.0)
        try:
            begin.set()
            end = time.monotonic() + WAIT_S
            while not has_run and time.monotonic() < end:
                read_mapped(file.fileno(), mapped, len(mapped))
            ran_meanwhile = has_run
        finally:
            sys.setswitchinterval(interval)
    thread.join()
    assert ran_meanwhile


def load_all(path: Path) -> None:
    load_index(path)
    load_tables(path)


def test_every_damaged_byte_of_an_index_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "m.idx"
    write(path)
    raw = path.read_bytes()
    for at in range(len(raw)):
        changed = bytearray(raw)
        changed[at] ^= 1 << at % 8
        path.write_bytes(changed)
        with pytest.raises(CheckpointError, match="remove it to ingest again"):
            load_all(path)
    for size in range(len(raw)):
        path.write_bytes(raw[:size])
        with pytest.raises(CheckpointError):
            load_index(path)


def test_an_index_without_pieces_is_still_read(tmp_path: Path) -> None:
    """As the first releases wrote it: `Index` alone."""
    path = tmp_path / "m.idx"
    index = write(path)
    path.write_bytes(encode_old(index))
    assert load_index(path) == old(index)
    assert load_index(path).tokenizer_digest == index.tokenizer_digest


def test_fields_that_say_nothing_are_left_out() -> None:
    """So that the digest of any other vocabulary is the one that an older release computed."""
    fields = msgspec.msgpack.decode(TOKENIZER.packed())
    assert len(fields) == 15
    unigram = msgspec.structs.replace(TOKENIZER, model="t5", charsmap=b"table", merges_spaces=False)
    for data in (TOKENIZER, unigram):
        assert msgspec.msgpack.decode(data.packed(), type=type(data)) == data


def encode_old(index: Index) -> bytes:
    """The bytes of an index without pieces."""
    return msgspec.msgpack.encode([getattr(old(index), name) for name in index.__struct_fields__][:10])


def old(index: Index) -> Index:
    return msgspec.structs.replace(index, version=1, pieces=[])


@given(sizes=st.lists(st.integers(0, 3 * PIECE), max_size=6), cut=st.integers(1, 3 * PIECE))
@settings(deadline=None, max_examples=30)
def test_pieces_are_those_of_the_file_however_it_was_written(sizes: list[int], cut: int) -> None:
    with tempfile.TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as patch:
        patch.setattr("shm.checkpoint.PIECE_BYTES", PIECE)
        patch.setattr("shm.checkpoint_writer.PIECE_BYTES", PIECE)
        path = Path(directory) / "m.idx"
        rng = np.random.default_rng(cut)
        with CheckpointWriter(path) as writer:
            for i, size in enumerate(sizes):
                data = rng.integers(0, 256, size, np.uint8)
                writer.add(f"t{i}", (1, size), "F16", "groups", [data[:cut], data[cut:]])
            finish(writer)
        raw = bin_path(path).read_bytes()
        index = load_index(path)
        assert index.pieces == [piece_checksum(raw[at : at + PIECE]) for at in range(0, len(raw), PIECE)]
        for piece in range(len(index.pieces)):
            inside = {t.name for t in index.tensors if t.nbytes and t.offset < (piece + 1) * PIECE}
            inside &= {t.name for t in index.tensors if t.offset + t.nbytes > piece * PIECE}
            assert {t.name for t in index.tensors_in(piece) if t.nbytes} == inside


SOUND = msgspec.msgpack.encode(TOKENIZER)


@pytest.mark.parametrize("raw", [SOUND.replace(b"\xa1a", b"\xa1\xff"), b"\x91" * 1020, b"\xc0"])
def test_damaged_tokenizer_data_is_an_error_where_it_is_used(tmp_path: Path, raw: bytes) -> None:
    index = msgspec.structs.replace(write(tmp_path / "m.idx"), tokenizer_raw=msgspec.Raw(raw))
    assert index.tokenizer_digest
    for name in ("tokenizer", "vocabulary_digest"):
        with pytest.raises(CheckpointError, match="bad tokenizer data"):
            getattr(index, name)


def test_checksums_of_older_releases_are_understood() -> None:
    data = bytes(range(256)) * 9
    new = TensorChecksum()
    new.update(data[:100])
    new.update(data[100:])
    assert new.text.startswith("xxh3:")
    for expected in (new.text, hashlib.blake2b(data, digest_size=16).hexdigest()):
        assert has_checksum(data, expected)
        assert not has_checksum(data[:-1] + b"\0", expected)
