"""The index of a version that is loaded is read beside the scheduler's loop: a disk that hangs stops no model."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from pipeline.config import paths
from pipeline.config.schema import Config
from pipeline.models import versions
from pipeline.models.versions import ModelVersion
from shm.checkpoint import Index, load_index
from stages.scheduler import index_reader
from stages.scheduler.index_reader import IndexReader
from stages.scheduler.stage import SchedulerStage
from tests.kv.process import configure, load_config, write_model

WAIT_S = 600.0  # that only a failure reaches


class Disk:
    """Lets `load_index` wait until `answers` is set."""

    def __init__(self) -> None:
        self.answers = threading.Event()
        self.reads = 0

    def load_index(self, path: Path) -> Index:
        self.reads += 1
        assert self.answers.wait(WAIT_S)
        return load_index(path)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    disk = Disk()
    monkeypatch.setattr(index_reader, "load_index", disk.load_index)
    yield disk
    disk.answers.set()


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    configure(tmp_path)
    monkeypatch.setenv("STARLING_HOME", str(tmp_path))
    return tmp_path


def store_loading(config: Config, digest: str) -> ModelVersion:
    """Write a table with a version that serves, and the same one being loaded; returns the latter."""
    paths.run_dir(config).mkdir(0o700, parents=True, exist_ok=True)
    table = versions.initial(config)
    loading = msgspec.structs.replace(table.versions[0], serial=1, state="loading", digest=digest)
    versions.write(config, msgspec.structs.replace(table, serial=1, versions=(*table.versions, loading)))
    return loading


def test_a_disk_that_hangs_keeps_neither_a_start_nor_another_model_waiting(home: Path, disk: Disk) -> None:
    digest = write_model(home)
    config = load_config(home)
    loading = store_loading(config, digest)
    stage = SchedulerStage(config)
    try:
        stage.work()
        stage._tick()
        runner = stage.runners[loading.id]
        assert not runner.steps_path.exists()
        disk.answers.set()
        while not runner.steps_path.exists():  # the thread ends the wait
            stage.loop.poll(WAIT_S)
            stage.work()
        assert runner.digest == digest
    finally:
        stage.loop.quit(0)
        assert stage.run() == 0


def test_one_index_is_read_at_a_time(home: Path, disk: Disk) -> None:
    """A disk that hangs must not take a thread more for each load."""
    loading = store_loading(load_config(home), write_model(home))
    woken = threading.Event()
    reader = IndexReader(home / "models", woken.set)
    reader.begin(loading)
    reader.begin(msgspec.structs.replace(loading, serial=2))
    disk.answers.set()
    assert woken.wait(WAIT_S)
    assert disk.reads == 1
    read = reader.take()
    assert read is not None
    assert (read[0], read[1].digest) == (loading.id, loading.digest)
    assert reader.take() is None


def test_a_file_that_cannot_be_read_keeps_no_other_from_being_read(home: Path) -> None:
    digest = write_model(home)
    loading = store_loading(load_config(home), digest)
    damaged = msgspec.structs.replace(loading, serial=2, digest="cd" * 32)
    (home / "models" / f"{damaged.digest}.idx").write_bytes(b"\xc1")
    woken = threading.Semaphore(0)
    reader = IndexReader(home / "models", woken.release)
    for version in (damaged, loading):
        reader.begin(version)
        assert woken.acquire(timeout=WAIT_S)
        read = reader.take()
        assert (read is not None) == (version is loading)


def test_a_thread_that_cannot_be_started_is_started_for_the_next_version(
    home: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    write_model(home)
    woken = threading.Event()
    reader = IndexReader(paths.models_dir(), woken.set)
    (version,) = versions.initial(load_config(home)).versions
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail)
        reader.begin(version)
    disk.answers.set()
    reader.begin(version)
    assert woken.wait(WAIT_S)
    assert reader.take() is not None
