"""Weights are copied to each memory node: the file's bytes, read-only, shared by forked ranks, if memory allows it."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from pipeline.config import paths
from pipeline.config.load import resolve
from pipeline.errors import ResourceError
from pipeline.models import capacity, weight_copies
from pipeline.models.versions import ModelVersion
from shm.checkpoint import CheckpointError, bin_path
from shm.checkpoint_writer import CheckpointWriter
from stages.worker.checkpoint import weight_copies as wc
from stages.worker.checkpoint.prepare import open_verified
from stages.worker.memory_check import check_memory, memory_left
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


def two_nodes() -> list[list[int]]:
    cpus = sorted(os.sched_getaffinity(0))
    return [[cpus[0]], [cpus[-1]]]


@pytest.mark.parametrize("use_mmap", [True, False])
def test_each_node_has_the_bytes_of_the_file(large: Path, use_mmap: bool, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    checkpoint = open_verified(large, use_mmap=use_mmap)
    seen: list[tuple[str, int, int]] = []
    copies = wc.copy_weights(checkpoint, two_nodes(), lambda *report: seen.append(report))
    expected, total = bin_path(large).read_bytes(), 2 * checkpoint.index.bin_bytes
    assert [one.tobytes() == expected for one in copies] == [True, True]
    addresses = {one.ctypes.data for one in (*copies, checkpoint.data)}
    assert len(addresses) == 3
    assert all(address % 4096 == 0 for address in addresses)
    assert seen[0] == (wc.PHASE, 0, total)
    assert seen[-1] == (wc.PHASE, total, total)
    assert [done for _, done, _ in seen] == sorted(done for _, done, _ in seen)
    for one in copies:
        assert not mapping_of(os.getpid(), one.ctypes.data)["writeable"]
        with pytest.raises(ValueError, match="read-only"):
            one[0] = 1
    facts = next(r.__dict__ for r in caplog.records if r.message == "weights are copied to each memory node")
    assert (facts["nodes"], facts["bytes"]) == (2, total)


def test_threads_beside_the_node_touch_its_copy_first(large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, set[int]]] = []
    real = wc.read_in

    def read_in(checkpoint: object, piece: int, data: np.ndarray) -> None:
        seen.append((threading.get_ident(), os.sched_getaffinity(0)))
        real(checkpoint, piece, data)  # type: ignore[arg-type]

    monkeypatch.setattr(wc, "read_in", read_in)
    nodes, before = two_nodes(), os.sched_getaffinity(0)
    wc.copy_weights(open_verified(large), nodes, lambda *report: None)
    pieces = len(seen) // 2
    assert [allowed for _, allowed in seen] == [set(nodes[0])] * pieces + [set(nodes[1])] * pieces
    assert os.sched_getaffinity(0) == before
    assert threading.get_ident() not in {thread for thread, _ in seen}


def test_forked_ranks_share_the_copies_and_nothing_remains_of_killed_ones(large: Path) -> None:
    copies = wc.copy_weights(open_verified(large), two_nodes(), lambda *report: None)
    there, back = os.pipe(), os.pipe()
    expected = sum(int(one[::4096].sum()) for one in copies)
    pid = os.fork()
    if pid == 0:
        found = sum(int(one[::4096].sum()) for one in copies)  # touches every page
        os.write(back[1], str(found).encode())
        os.read(there[0], 1)
        os._exit(0)
    assert int(os.read(back[0], 64)) == expected
    for one in copies:
        mapping = mapping_of(pid, one.ctypes.data)
        assert mapping["Pss"] < 0.6 * mapping["Rss"], "each of two processes has half of every page"
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    for one in copies:
        mapping = mapping_of(os.getpid(), one.ctypes.data)
        assert mapping["Private_Dirty"] >= 0.9 * mapping["Rss"], "they are this process's alone"
    for fd in (*there, *back):
        os.close(fd)


def test_a_piece_that_cannot_be_read_is_an_error_that_names_it(large: Path, tmp_path: Path) -> None:
    path = tmp_path / "m.idx"
    path.write_bytes(large.read_bytes())
    bin_path(path).write_bytes(bin_path(large).read_bytes())
    checkpoint = open_verified(path)
    os.truncate(bin_path(path), 9 << 20)  # an access to what is behind it would be a SIGBUS, as on a damaged disk
    with pytest.raises(CheckpointError, match=r"piece \d .* cannot be read"):
        wc.copy_weights(checkpoint, two_nodes(), lambda *report: None)


@pytest.mark.parametrize(
    ("setting", "n_nodes", "left", "expected"),
    [
        ("auto", 1, 1 << 40, False),
        ("auto", 2, 400, True),
        ("auto", 2, 399, False),  # more than half of it
        ("auto", 4, 799, False),
        ("never", 2, 1 << 40, False),
        ("always", 2, 200, True),
        ("always", 1, 0, False),
    ],
)
def test_when_weights_are_copied(
    setting: str, n_nodes: int, left: int, expected: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert wc.reserve_copies(tmp_path, "worker-m", setting, "m", 100, n_nodes, lambda: left) == expected
    promised = n_nodes * 100 if expected else 0
    assert weight_copies.totals(tmp_path) == (0, promised)
    is_refused = setting == "auto" and n_nodes > 1 and not expected
    assert ("they would take too much memory" in caplog.text) == is_refused


def test_the_copies_of_all_versions_take_half_of_the_memory_at_most(tmp_path: Path) -> None:
    """Of 1,000 bytes, of which those of two versions are taken as they are made."""

    def reserve(stage: str, left: int) -> bool:
        return wc.reserve_copies(tmp_path, stage, "auto", stage, 100, 2, lambda: left)

    assert reserve("worker-a", 1000)
    assert reserve("worker-b", 800), "what is promised to the first one is not left"
    weight_copies.record(tmp_path, "worker-a", 200, is_made=True)
    assert not reserve("worker-c", 600)
    assert reserve("worker-b", 600), "its own record of before does not count"
    weight_copies.remove(tmp_path, "worker-a")
    assert reserve("worker-c", 800)


def test_versions_that_start_together_look_at_the_memory_one_after_the_other(tmp_path: Path) -> None:
    begun, looked = threading.Event(), threading.Event()
    found: list[bool] = []

    def second() -> None:
        begun.set()
        found.append(wc.reserve_copies(tmp_path, "worker-b", "always", "b", 100, 2, left_of_second))

    def left_of_second() -> int:
        looked.set()
        return 350 - weight_copies.totals(tmp_path).promised

    def left_of_first() -> int:
        thread.start()
        assert begun.wait(60)
        assert not looked.wait(0.2), "it would find memory that the first one takes"
        return 350

    thread = threading.Thread(target=lambda: found.append(_is_refused(second)))
    assert wc.reserve_copies(tmp_path, "worker-a", "always", "a", 100, 2, left_of_first)
    thread.join()
    assert found == [True], "the machine has 150 bytes for it"


def _is_refused(reserve: Callable[[], None]) -> bool:
    try:
        reserve()
    except ResourceError:
        return True
    return False


def test_copies_that_cannot_be_recorded_are_not_made_unless_they_must_be(tmp_path: Path) -> None:
    nowhere = tmp_path / "nowhere"
    assert not wc.reserve_copies(nowhere, "worker-m", "auto", "m", 100, 2, lambda: 1 << 40)
    with pytest.raises(FileNotFoundError):
        wc.reserve_copies(nowhere, "worker-m", "always", "m", 100, 2, lambda: 1 << 40)


def test_copies_that_must_be_and_do_not_fit_are_refused_with_the_numbers() -> None:
    message = "weights of m need 2,000 bytes of memory for 2 memory nodes, and the machine has 1,999 left"
    with pytest.raises(ResourceError, match=message) as caught:
        wc.should_copy("always", "m", 2000, 2, 1999, 0)
    assert caught.value.param == "performance.weight_copies"


def test_memory_beside_the_arenas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STARLING_HOME", str(tmp_path))
    config = resolve(
        {
            "models": [{"name": "m", "path": str(tmp_path / "m.gguf"), "kv_cache_mb": 8}],
            "server": {"arena_dir": str(tmp_path / "arenas")},
        },
        {},
    )
    version = ModelVersion(name="m", serial=0, settings=config.models[0])
    free = capacity.FreeMemory(1 << 40, 1 << 30)
    needed = capacity.need(config, version.settings)
    assert needed > 8 << 20
    assert memory_left(config, version, lambda _: free) == (1 << 30) - needed
    assert memory_left(config, version, lambda _: capacity.FreeMemory(1 << 40, needed - 1)) == 0


@pytest.mark.parametrize("name", ["m.kv", ".m.kv.123"])
def test_an_arena_that_is_created_while_memory_is_measured_is_not_counted_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """kv creates it as soon as the version is converted, under another name at first."""
    monkeypatch.setenv("STARLING_HOME", str(tmp_path))
    config = resolve({"models": [{"name": "m", "path": "m.gguf"}], "server": {"arena_dir": str(tmp_path)}}, {})
    version = ModelVersion(name="m", serial=0, settings=config.models[0])

    def measure(_: object) -> capacity.FreeMemory:
        paths.arena_dir(config).mkdir()
        (paths.arena_dir(config) / name).touch()
        return capacity.FreeMemory(0, 1 << 40)

    check_memory(config, version, measure)
    (paths.arena_dir(config) / name).unlink()
    with pytest.raises(ResourceError, match="0 free"):
        check_memory(config, version, lambda _: capacity.FreeMemory(0, 1 << 40))
