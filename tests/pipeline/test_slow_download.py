"""Servers that are slow, or that send nothing any more: a download ends within bounds, says why, and goes on later."""

from __future__ import annotations

import hashlib
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.errors import ModelUnavailable
from pipeline.models import download as downloads
from pipeline.models.download import no_progress
from tests.pipeline.file_server import WAIT_S, FileServer

PIECE = 1 << 12
CONTENT = random.Random(2).randbytes(5 * PIECE + 17)
DIGEST = hashlib.sha256(CONTENT).hexdigest()
FOREVER = 10**9


@pytest.fixture(autouse=True)
def short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(downloads, "PIECE_BYTES", PIECE)
    monkeypatch.setattr(downloads, "TIMEOUT_S", 1.0)


@pytest.fixture
def files() -> Iterator[FileServer]:
    with FileServer(CONTENT) as server:
        yield server


async def no_pause(seconds: float) -> None:
    assert seconds <= downloads.MAX_WAIT_S


def fetch(files: FileServer, part: Path, **options: Any) -> str:
    return downloads.download(files.url, part, no_progress, "m", pause=no_pause, **options)


def begins(files: FileServer) -> list[int]:
    """The first bytes of the requested ranges, without the one by which the length is known."""
    found = [one for one in files.ranges if one and one != "bytes=0-0"]
    return [int(one.removeprefix("bytes=").partition("-")[0]) for one in found]


@pytest.mark.parametrize("cut_at", [0, 1000])
def test_a_body_that_stalls_is_requested_again_from_there(tmp_path: Path, files: FileServer, cut_at: int) -> None:
    """The third piece; the connection stays open. Nothing that was received is requested again."""

    def before(server: FileServer, begin: int) -> None:
        server.stalls = 1 if begin == 2 * PIECE and begins(server).count(begin) == 1 else 0

    files.before, files.cut_at = before, cut_at
    assert fetch(files, tmp_path / "p", connections=1) == DIGEST
    assert (tmp_path / "p").read_bytes() == CONTENT
    assert set(begins(files)) == {*range(0, len(CONTENT), PIECE), 2 * PIECE + cut_at}
    assert len(begins(files)) > len(range(0, len(CONTENT), PIECE))


def test_a_server_that_stalls_for_good_is_given_up_and_continued_later(
    tmp_path: Path, files: FileServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def before(server: FileServer, begin: int) -> None:
        server.stalls = FOREVER if begin >= 2 * PIECE else 0

    files.before = before
    with pytest.raises(ModelUnavailable, match=r"no data for 1 s\); the received part is kept, try again"):
        fetch(files, tmp_path / "p", connections=1)
    assert set(begins(files)) == {0, PIECE, 2 * PIECE}
    assert begins(files).count(2 * PIECE) == downloads.ATTEMPTS
    monkeypatch.setattr(downloads, "TIMEOUT_S", WAIT_S)  # what a busy machine sends late is not requested twice
    files.before, files.stalls, files.ranges = (lambda server, begin: None), 0, []
    assert fetch(files, tmp_path / "p") == DIGEST
    assert sorted(begins(files)) == [at * PIECE for at in range(2, 6)]


def test_a_server_that_never_answers_is_given_up(tmp_path: Path, files: FileServer) -> None:
    files.before_answer = lambda: files.released.wait(WAIT_S)
    with pytest.raises(ModelUnavailable, match=r"no data for 1 s"):
        fetch(files, tmp_path / "p")
    assert files.ranges == ["bytes=0-0"] * downloads.ATTEMPTS
    assert not list(tmp_path.iterdir())


def test_a_slow_server_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Byte by byte, and for longer than it may send nothing."""
    content = CONTENT[:200]
    monkeypatch.setattr(downloads, "TIMEOUT_S", 0.8)
    monkeypatch.setattr(downloads, "PIECE_BYTES", 100)
    with FileServer(content) as files:
        files.trickles = True
        assert fetch(files, tmp_path / "p") == hashlib.sha256(content).hexdigest()
        assert {0, 100} <= set(begins(files))


@pytest.mark.parametrize("has_ranges", [True, False])
def test_a_server_that_hardly_sends_anything_is_given_up(
    tmp_path: Path, files: FileServer, monkeypatch: pytest.MonkeyPatch, has_ranges: bool
) -> None:
    """Though there is never a long time without data, and every attempt receives some."""
    monkeypatch.setattr(downloads, "SLOW_S", 0.2)
    monkeypatch.setattr(downloads, "TIMEOUT_S", 30.0)
    files.trickles, files.has_ranges = True, has_ranges
    later = "the received part is kept, try again" if has_ranges else "the server sends no ranges, so that another"
    with pytest.raises(ModelUnavailable, match=rf"only \d+ bytes in [\d.]+ s\); {later}"):
        fetch(files, tmp_path / "p", connections=1)
    if has_ranges:
        assert len(begins(files)) == downloads.ATTEMPTS
        # Each goes on where the one before ended, which a busy machine may not have sent a byte in its time.
        assert begins(files) == sorted(begins(files))
        assert len(set(begins(files))) > 1
    files.trickles, files.released = False, threading.Event()
    assert fetch(files, tmp_path / "p") == DIGEST
