"""A model of a web server is converted while it arrives, and the checkpoint is the one of the complete file."""

from __future__ import annotations

import errno
import hashlib
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

from pipeline.config.schema import ModelConfig
from pipeline.errors import ModelUnavailable
from pipeline.models import download as downloads
from pipeline.models import pull as pulls
from pipeline.models import registry, sources
from pipeline.models.arriving import Abandoned, ArrivingFile
from shm import chunked_file
from stages.worker.checkpoint import while_arriving
from stages.worker.checkpoint.ingest import ingest
from stages.worker.checkpoint.prepare import prepare_checkpoint
from stages.worker.checkpoint.while_arriving import IngestWhileArriving
from tests.pipeline.file_server import FileServer
from tools.tiny_gguf import SHAPES, write_model

PIECE = 1 << 11
WAIT_S = 60.0


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(downloads, "PIECE_BYTES", PIECE)
    monkeypatch.setattr(downloads, "BACKOFF_S", 0.0)
    monkeypatch.setattr(chunked_file, "CHUNK_BYTES", 4096)


@pytest.fixture(scope="module")
def contents(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, bytes]:
    """Two models, each of many pieces."""
    folder = tmp_path_factory.mktemp("models")
    first, second = (write_model(folder / f"{seed}.gguf", SHAPES["small"], seed=seed).read_bytes() for seed in (1, 2))
    assert len(first) > 20 * PIECE
    return first, second


@pytest.fixture
def files(contents: tuple[bytes, bytes]) -> Iterator[FileServer]:
    with FileServer(contents[0]) as server:
        yield server


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def expected(content: bytes, folder: Path) -> tuple[bytes, bytes]:
    """Index and weights of the complete file."""
    folder.mkdir()
    (folder / "file.gguf").write_bytes(content)
    index = folder / f"{sha256(content)}.idx"
    ingest(folder / "file.gguf", index, sha256(content))
    return index.read_bytes(), index.with_suffix(".bin").read_bytes()


def pull(files: FileServer, models: Path, reader: IngestWhileArriving, **options: Any) -> registry.Record:
    models.mkdir(exist_ok=True)
    with reader:
        return pulls.pull(sources.parse(files.url), models, reader=reader, **options)


def left(models: Path) -> set[str]:
    """Files of checkpoints, and of unfinished conversions."""
    found = {path.name for path in models.iterdir() if path.suffix in (".idx", ".bin")}
    return found | {path.name for path in models.glob(".fetch/ingest-*")}


def check(models: Path, content: bytes, folder: Path) -> None:
    digest = sha256(content)
    assert left(models) == {f"{digest}.idx", f"{digest}.bin"}
    index, weights = expected(content, folder)
    assert (models / f"{digest}.idx").read_bytes() == index
    assert (models / f"{digest}.bin").read_bytes() == weights


def test_tensors_are_converted_before_the_file_is_complete(
    tmp_path: Path, files: FileServer, contents: tuple[bytes, bytes]
) -> None:
    """The server holds the last pieces back until a tensor has been written."""
    models = tmp_path / "models"
    seen, gave_up = threading.Event(), threading.Event()

    def has_tensor() -> bool:
        lists = list(models.glob(".fetch/ingest-*/tensors"))
        return bool(lists) and len(lists[0].read_bytes().splitlines()) > 1

    def before(server: FileServer, begin: int) -> None:
        if begin >= len(contents[0]) // PIECE * PIECE - 8 * PIECE:
            deadline = time.monotonic() + WAIT_S
            while not (seen.wait(0.01) or gave_up.is_set()):
                if has_tensor():
                    seen.set()
                elif time.monotonic() > deadline:
                    gave_up.set()

    files.before = before
    pull(files, models, IngestWhileArriving(models))
    assert seen.is_set()
    check(models, contents[0], tmp_path / "expected")


@pytest.mark.parametrize("has_tag", [True, False])
def test_a_file_that_changes_midway_gives_its_own_checkpoint_or_none(
    tmp_path: Path, files: FileServer, contents: tuple[bytes, bytes], has_tag: bool
) -> None:
    def before(server: FileServer, begin: int) -> None:
        if begin >= 12 * PIECE:  # whichever is first: before most of the others are asked for
            server.content, server.tag = contents[1], '"two"' if has_tag else ""

    files.before = before
    record = pull(files, tmp_path / "models", IngestWhileArriving(tmp_path / "models"))
    assert record.digest == sha256(contents[1])
    if has_tag:
        check(tmp_path / "models", contents[1], tmp_path / "expected")
    else:  # the second one came as one stream, which is not read before its end
        assert left(tmp_path / "models") == set()


def test_a_download_that_fails_or_is_not_the_wanted_one_leaves_no_checkpoint(tmp_path: Path, files: FileServer) -> None:
    models = tmp_path / "models"
    with pytest.raises(ModelUnavailable, match="--sha256 expects"):
        pull(files, models, IngestWhileArriving(models), sha256="1" * 64)
    assert left(models) == set()

    def before(server: FileServer, begin: int) -> None:
        server.status = 503 if begin >= 12 * PIECE else 0

    files.before = before
    with pytest.raises(ModelUnavailable, match="answers 503"):
        pull(files, models, IngestWhileArriving(models))
    assert left(models) == set()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("ingest")]
    files.before, files.status = (lambda server, begin: None), 0
    record = pull(files, models, IngestWhileArriving(models))  # which goes on, and converts all of it
    assert left(models) == {f"{record.digest}.idx", f"{record.digest}.bin"}


def test_a_file_that_cannot_be_converted_is_downloaded(tmp_path: Path, contents: tuple[bytes, bytes]) -> None:
    content = contents[0].replace(b"general.architecture", b"general.architectura")
    with FileServer(content) as files:
        reader = IngestWhileArriving(tmp_path / "models")
        assert pull(files, tmp_path / "models", reader).digest == sha256(content)
    assert "general.architecture" in reader.problem
    assert left(tmp_path / "models") == set()


def test_a_configured_address_is_prepared_while_it_arrives(
    tmp_path: Path, files: FileServer, contents: tuple[bytes, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    models = tmp_path / "models"
    models.mkdir()
    seen: list[str] = []
    model = ModelConfig(name="m", path=files.url)
    index = prepare_checkpoint(model, models, lambda phase, done, total: seen.append(phase))
    assert index.name == f"{sha256(contents[0])}.idx"
    assert sorted(set(seen) - {"ingest"}) == ["download"]  # the complete file is not read again
    assert seen == sorted(seen)  # "ingest" is shown when "download" has ended
    check(models, contents[0], tmp_path / "expected")


@pytest.mark.parametrize("way", ["pull", "configured"])
def test_a_file_without_a_name_gives_the_checkpoint_of_the_complete_file(
    tmp_path: Path, contents: tuple[bytes, bytes], way: str
) -> None:
    models, content = tmp_path / "models", contents[0].replace(b"general.name", b"general.note")
    models.mkdir()
    index = models / f"{sha256(content)}.idx"
    with FileServer(content) as files:
        model = ModelConfig(name="m", path=files.url)
        if way == "pull":
            record = pull(files, models, IngestWhileArriving(models))
            model = ModelConfig(name="m", path=str(models / f"{record.digest}.gguf"))
        else:
            prepare_checkpoint(model, models)
        made = index.read_bytes()
        index.unlink()
        prepare_checkpoint(model, models)
    assert index.read_bytes() == made


def test_a_file_that_is_placed_before_its_conversion_begins_is_converted(
    tmp_path: Path, files: FileServer, contents: tuple[bytes, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that converts gets a core only when the file has left the place where it was downloaded."""
    models, lock = tmp_path / "models", while_arriving.lock
    placed = registry.blob_path(models, sha256(contents[0]))

    def lock_late(folder: Path, name: str) -> AbstractContextManager[None]:
        deadline = time.monotonic() + WAIT_S
        while not placed.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        return lock(folder, name)

    monkeypatch.setattr(while_arriving, "lock", lock_late)
    reader = IngestWhileArriving(models)
    pull(files, models, reader)
    assert (placed.exists(), reader.problem) == (True, "")
    check(models, contents[0], tmp_path / "expected")


def test_a_pull_is_recorded_before_its_conversion_ends(tmp_path: Path, files: FileServer) -> None:
    """What is not recorded would be downloaded again, and be removed by `gc`."""
    models, recorded = tmp_path / "models", list[str]()

    class Watched(IngestWhileArriving):
        def accepted(self, digest: str) -> None:
            recorded.extend(record.digest for record in registry.read_all(models))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pull(files, models, Watched(models))
    assert recorded == [sha256(files.content)]
    files.before = lambda server, begin: pytest.fail("downloaded again")
    assert pull(files, models, IngestWhileArriving(models), sha256=recorded[0]).digest == recorded[0]


def test_a_download_that_lacks_space_ends_the_conversion_first(
    tmp_path: Path, files: FileServer, contents: tuple[bytes, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    models, write, full = tmp_path / "models", downloads.write_all, list[bool]()

    def write_unless_full(fd: int, data: bytes, at: int) -> None:
        if at >= 8 * PIECE and (not full or list(models.glob(".fetch/ingest-*"))):
            full.append(True)
            raise OSError(errno.ENOSPC, "No space left on device")
        write(fd, data, at)

    monkeypatch.setattr(downloads, "write_all", write_unless_full)
    assert pull(files, models, IngestWhileArriving(models)).digest == sha256(contents[0])
    assert full == [True]
    assert left(models) == set()


class Observed(threading.Condition):
    """Reports each wait, when its thread is about to release the lock."""

    def __init__(self, events: SimpleQueue[str]) -> None:
        super().__init__()
        self._events = events

    def wait(self, timeout: float | None = None) -> bool:
        self._events.put("waits")
        return super().wait(timeout)


def test_a_reader_waits_for_its_bytes_alone(tmp_path: Path) -> None:
    file = ArrivingFile(tmp_path / "f", 10 * PIECE + 1, PIECE, {0, 3})
    file.wait(0, PIECE)
    file.wait(3 * PIECE, 4 * PIECE)
    assert file.missing_bytes == 9 * PIECE
    events: SimpleQueue[str] = SimpleQueue()
    file._changed = Observed(events)
    thread = threading.Thread(target=lambda: (file.wait(PIECE - 1, 2 * PIECE + 1), events.put("returned")))
    thread.start()
    assert events.get(timeout=WAIT_S) == "waits"
    file.add(1)
    assert events.get(timeout=WAIT_S) == "waits"  # again: half of its bytes are here
    file.add(2)
    assert events.get(timeout=WAIT_S) == "returned"
    thread.join()
    file.wait(0, 4 * PIECE)
    file.abandon()
    for wait in (lambda: file.wait(0, 1), file.wait_digest):
        with pytest.raises(Abandoned):
            wait()
