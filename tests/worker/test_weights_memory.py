"""`use_mmap: false`: the weights in one memory of huge pages, with the bytes of the file, shared by forked ranks."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
from pathlib import Path

import numpy as np
import pytest

from pipeline import procfs
from pipeline.config.load import resolve
from pipeline.errors import ConfigError, ResourceError
from pipeline.models import capacity
from pipeline.models.capacity import FreeMemory
from pipeline.models.store import no_progress
from shm.checkpoint import PIECE_BYTES, Checkpoint, CheckpointError, Index, bin_path, load_index
from shm.checkpoint_writer import CheckpointWriter
from stages.worker.checkpoint import weights_memory as wm
from stages.worker.checkpoint.prepare import open_verified, prepare_checkpoint
from tests.shm.checkpoints import finish
from tests.worker.mappings import mapping_of

TENSOR_BYTES = 21 << 20


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two tensors of 21 MiB: six pieces, the last one short."""
    path = tmp_path_factory.mktemp("large") / "m.idx"
    rng = np.random.default_rng(0)
    with CheckpointWriter(path) as writer:
        for i in range(2):
            writer.add(f"t{i}", (1, TENSOR_BYTES), "F16", "groups", [rng.integers(0, 256, TENSOR_BYTES, np.uint8)])
        finish(writer)
    return path


def test_the_bytes_are_those_of_the_file(large: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    seen: list[tuple[str, int, int]] = []
    checkpoint = open_verified(large, lambda *report: seen.append(report), use_mmap=False)
    assert checkpoint.data.tobytes() == bin_path(large).read_bytes()
    assert checkpoint.view("t1").tobytes() == Checkpoint(large).view("t1").tobytes()
    assert checkpoint.data.ctypes.data % 4096 == 0
    nbytes = checkpoint.index.bin_bytes
    assert [report for report in seen if report[0] == wm.PHASE][-1] == (wm.PHASE, nbytes, nbytes)
    facts = next(r.__dict__ for r in caplog.records if r.message == "weights read into memory")
    assert facts["bytes"] == nbytes
    mapping = mapping_of(os.getpid(), checkpoint.data.ctypes.data)
    assert not mapping["writeable"]
    if facts["pages"] == "transparent huge pages":
        # Only whole huge pages are; the kernel may have too few of them, but not none.
        assert 0 < mapping["AnonHugePages"] <= mapping["Rss"]


def test_the_page_cache_is_not_used(large: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With O_DIRECT: the file's pages do not appear in the page cache."""
    caplog.set_level(logging.INFO)
    with bin_path(large).open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        data = wm.read_weights(file.fileno(), load_index(large), no_progress)
        facts = next(r.__dict__ for r in caplog.records if r.message == "weights read into memory")
        cached = resident_bytes(bin_path(large))
        assert data.nbytes == load_index(large).bin_bytes
    if facts["direct"]:
        assert cached == 0
    else:
        assert "weights are read through the page cache" in caplog.text


def resident_bytes(path: Path) -> int:
    """Bytes of a file in the page cache, by mincore(2)."""
    view = np.memmap(path, np.uint8, "r")
    pages = -(-view.nbytes // 4096)
    states = (ctypes.c_ubyte * pages)()
    libc = ctypes.CDLL(None)
    assert libc.mincore(ctypes.c_void_p(view.ctypes.data), ctypes.c_size_t(view.nbytes), states) == 0
    return 4096 * sum(state & 1 for state in states)


def test_forked_ranks_share_the_pages_and_nothing_remains_of_killed_ones(large: Path) -> None:
    checkpoint = open_verified(large, use_mmap=False)
    address, expected = checkpoint.data.ctypes.data, int(checkpoint.data[::4096].sum())
    there, back = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        found = int(checkpoint.data[::4096].sum())  # touches every page
        os.write(back[1], str(found).encode())
        os.read(there[0], 1)
        os._exit(0)
    assert int(os.read(back[0], 64)) == expected
    mapping = mapping_of(pid, address)
    # Pss counts a page that two processes share as half.
    assert mapping["Pss"] < 0.6 * mapping["Rss"]
    assert mapping.get("Private_Dirty", 0) == 0
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert mapping_of(os.getpid(), address)["Private_Dirty"] >= 0.9 * mapping["Rss"], "they are this process's alone"
    for fd in (*there, *back):
        os.close(fd)


def test_a_write_to_the_weights_is_a_fault(large: Path) -> None:
    checkpoint = open_verified(large, use_mmap=False)
    with pytest.raises(ValueError, match="read-only"):
        checkpoint.data[0] = 1
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGSEGV, signal.SIG_DFL)
        ctypes.memset(checkpoint.data.ctypes.data, 0, 1)
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGSEGV


def test_a_file_system_without_direct_reads(large: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A memfd refuses O_DIRECT on older kernels; either way the bytes are the same."""
    caplog.set_level(logging.INFO)
    raw = bin_path(large).read_bytes()
    fd = os.memfd_create("weights")
    os.write(fd, raw)
    data = wm.read_weights(fd, load_index(large), no_progress)
    os.close(fd)
    assert data.tobytes() == raw
    facts = next(r.__dict__ for r in caplog.records if r.message == "weights read into memory")
    assert facts["direct"] != ("weights are read through the page cache" in caplog.text)


@pytest.mark.parametrize("state", ["always madvise [never]", None])
def test_a_machine_without_huge_pages(
    large: Path, tmp_path: Path, state: str | None, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "enabled"
    if state is not None:
        file.write_text(state)
    monkeypatch.setattr(wm, "THP_FILE", file)
    checkpoint = open_verified(large, use_mmap=False)
    assert checkpoint.data.tobytes() == bin_path(large).read_bytes()
    assert "weights are in ordinary pages: transparent huge pages are off" in caplog.text


def test_a_damaged_file_is_refused_whatever_was_recorded(large: Path, tmp_path: Path) -> None:
    path = tmp_path / "m.idx"
    path.write_bytes(large.read_bytes())
    raw = bytearray(bin_path(large).read_bytes())
    raw[PIECE_BYTES] ^= 1
    bin_path(path).write_bytes(raw)
    with pytest.raises(ConfigError, match="tensor t0: piece 1 .* has checksum"):
        open_verified(path, use_mmap=False)


def test_a_file_that_ends_early_is_an_error(large: Path) -> None:
    fd = os.memfd_create("short")
    os.ftruncate(fd, 2 * PIECE_BYTES)
    index = load_index(large)
    with pytest.raises(CheckpointError, match=r"piece \d \(of t[01](, t1)?\) cannot be read: the file has ended"):
        wm.read_weights(fd, index, no_progress)
    os.close(fd)


# ------------------------------------------------------------------ the plan


def test_weights_larger_than_memory_are_refused_with_the_numbers(large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(procfs, "available_memory", lambda: 1 << 20)
    size = load_index(large).bin_bytes
    with pytest.raises(ResourceError, match=f"weights of n need {size:,} bytes of memory, .* 1,048,576 available"):
        open_verified(large, use_mmap=False)
    open_verified(large)


def test_the_capacity_check_counts_weights_in_memory(
    tiny_gguf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setenv("STARLING_HOME", str(tmp_path))
    source = tiny_gguf("small", "Q8_0")
    raw = {"models": [{"name": "tiny", "path": str(source), "kv_cache_mb": 8}], "performance": {"use_mmap": False}}
    config = resolve(raw, {})
    model = config.models[0]
    assert capacity.weights_need(config, model) == source.stat().st_size, "as long as it is not ingested"
    index: Index = load_index(prepare_checkpoint(model, tmp_path / "models"))
    assert capacity.weights_need(config, model) == index.bin_bytes
    arenas = capacity.need(config, model)
    capacity.check(config, model, FreeMemory(arenas, arenas + index.bin_bytes))
    with pytest.raises(ResourceError, match=f"needs {index.bin_bytes:,} bytes for its weights and {arenas:,} for its"):
        capacity.check(config, model, FreeMemory(arenas, arenas + index.bin_bytes - 1))
    mapped = resolve({**raw, "performance": {}}, {})
    capacity.check(mapped, model, FreeMemory(arenas, arenas))
