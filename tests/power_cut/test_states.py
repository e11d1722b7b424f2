"""Every state file after every power cut: what was synchronized is there, and nothing that was never written."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from pipeline.api.quota_file import Level, QuotaFile, bucket_key
from pipeline.files import make_directory, replace_file
from shm import checkpoint
from shm.checkpoint_writer import CheckpointWriter
from stages.gateway.requests.journal import Journal, RequestEnd
from stages.kv.sessions.session_files import SessionFiles
from stages.kv.sessions.session_store import SessionStore
from tests.gateway.journal_records import NOW, make_spec, open_journal, recovered
from tests.kv.disk_pages import PAGE_BYTES, open_store, page
from tests.kv.test_sessions import ROOTS, Time, open_sessions, raw
from tests.kv.world import PAGE_TOKENS
from tests.power_cut.recorder import Recorder


class Bench:
    """Records a scenario, then runs a check on everything that a power cut may leave of it."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._root = tmp_path
        (tmp_path / "live").mkdir()
        self.live = tmp_path / "live"
        self.recorder = Recorder(self.live, monkeypatch)

    def check(self, check: Callable[[Path, list[Any]], None]) -> int:
        """`check(directory, marks)` for each state. Returns their number."""
        count = 0
        for count, state in enumerate(self.recorder.states(), 1):
            directory = self._root / f"state-{count}"
            directory.mkdir()
            state.write(directory)
            try:
                check(directory, state.marks)
            except Exception as error:
                raise AssertionError(f"{state.label}; marks {state.marks}; {sorted(state.files)}") from error
        return count


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(tmp_path, monkeypatch)


def test_the_recorder_finds_the_missing_synchronization(bench: Bench) -> None:
    """Without `durable`, the new file may be empty or the old one; with it, neither, once the call has returned."""
    path = bench.live / "f"
    with bench.recorder as recorder:
        replace_file(path, b"one", durable=True)
        recorder.mark("one")
        replace_file(path, b"two")
        recorder.mark("two")
    found = set()

    def check(directory: Path, marks: list[str]) -> None:
        content = (directory / "f").read_bytes() if (directory / "f").exists() else None
        found.add((len(marks), content))
        later = (b"one", b"", b"two", bytes(3))
        assert content in ((None, b"", b"one") if not marks else later)

    bench.check(check)
    assert {(1, b"one"), (2, b""), (2, b"one"), (2, b"two")} <= found
    assert (0, b"") not in found
    assert (1, None) not in found


def sync(journal: Journal | QuotaFile) -> None:
    """As the thread of the gateway."""
    fd = journal.unsynced()
    if fd is not None:
        os.fdatasync(fd)
        os.close(fd)


def test_journal(bench: Bench) -> None:
    """A request that was synchronized and has not ended is recovered, through rewrites and restarts."""
    with bench.recorder as recorder:
        for start in range(2):
            journal = open_journal(bench.live / "state" / "journal", max_bytes=12_000)
            for i in range(9):
                name = f"req-{start}-{i}"
                assert journal.open(make_spec(name, bytes([i]) * 200))
                if i % 3 != 1:
                    sync(journal)
                    recorder.mark(("in flight", name))
                if i % 3 == 2:
                    recorder.mark(("ending", name))
                    journal.end(RequestEnd(name, NOW, "ABANDONED"), is_kept=False)
                if i % 3 == 0 and i:
                    recorder.mark(("ending", f"req-{start}-{i - 3}"))
                    journal.end(RequestEnd(f"req-{start}-{i - 3}", NOW), is_kept=True)
            journal.close()

    def check(directory: Path, marks: list[tuple[str, str]]) -> None:
        in_flight = {name for what, name in marks if what == "in flight"}
        in_flight -= {name for what, name in marks if what == "ending"}
        found = recovered(directory / "state" / "journal")
        assert {name for name in in_flight if name not in found or found[name] is not None} == set()
        assert recovered(directory / "state" / "journal") == found

    assert bench.check(check) > 150


def test_sessions(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Turns that were synchronized stay, in order; a session whose removal was synchronized stays removed."""
    directory = bench.live / "state" / "sessions"

    def open_files(root: Path) -> SessionStore:
        files = SessionFiles(root)
        files._sync.request = lambda path, fd: os.fsync(fd)  # type: ignore[method-assign]
        return SessionStore(files, ROOTS, PAGE_TOKENS, open_sessions(root, clock).bounds, clock)

    clock = Time()
    with bench.recorder as recorder:
        sessions = open_files(directory)
        for turn in (1, 2, 3):
            for name in ("a", "b"):
                recorder.mark(("commit", name, turn))
                sessions.begin(b"g", "t", name, create=True)
                sessions.commit(b"g", "t", name, turn, turn - 1, raw(turn))
                recorder.mark(("turn", name, turn))
        recorder.mark(("close", "a", 0))
        sessions.close("t", "a")
        recorder.mark(("closed", "a", 0))

    def check(root: Path, marks: list[tuple[str, str, int]]) -> None:
        found = {s.id: list(s.tokens) for s in open_sessions(root / "state" / "sessions", clock).all()}
        for name in ("a", "b"):
            acknowledged = max((turn for what, n, turn in marks if (what, n) == ("turn", name)), default=0)
            begun = max((turn for what, n, turn in marks if (what, n) == ("commit", name)), default=0)
            if ("closed", name, 0) in marks:
                assert name not in found
            elif name in found:
                assert found[name] == list(range(1, len(found[name]) + 1))
                assert acknowledged <= len(found[name]) <= begun
            else:
                assert not acknowledged or ("close", name, 0) in marks

    assert bench.check(check) > 30


def test_quotas(bench: Bench) -> None:
    """A level is one that was stored, and not older than the last that was synchronized."""
    keys = [bucket_key("tokens", name) for name in "abc"]
    with bench.recorder as recorder:
        for start in range(2):
            quotas = QuotaFile(bench.live / "state" / "quotas" / "levels")
            for i in range(6):
                value = 10 * start + i
                recorder.mark(("put", i % 3, value))
                quotas.put(keys[i % 3], Level(600, float(value), NOW + value))
                if i % 2:
                    sync(quotas)
                    recorder.mark(("synced", -1, value))
            quotas.close()

    def check(directory: Path, marks: list[tuple[str, int, int]]) -> None:
        quotas = QuotaFile(directory / "state" / "quotas" / "levels")
        quotas.close()
        synced = max((value for what, _, value in marks if what == "synced"), default=-1)
        for i, key in enumerate(keys):
            puts = [value for what, n, value in marks if (what, n) == ("put", i)]
            level = quotas.level_of(key)
            allowed = [value for value in puts if value >= max((v for v in puts if v <= synced), default=-1)]
            assert level is None or level.level in allowed
            assert level is not None or not any(value <= synced for value in puts)

    assert bench.check(check) > 30


def test_page_file(bench: Bench) -> None:
    """A page in the file is the page that was saved, after any order of writes, removals and moves."""
    path = bench.live / "pages"
    with bench.recorder as recorder:
        store = open_store(path)
        for i in range(3):
            assert store.save(*page(i))
        store.remove(page(1)[0])
        assert store.save(*page(3))
        store.close()
        store = open_store(path)
        assert store.save(*page(4))
        store.close()
        recorder.mark("end")

    def check(directory: Path, _: list[str]) -> None:
        store = open_store(directory / "pages")
        for i in range(5):
            digest, _, content = page(i)
            out = np.zeros(PAGE_BYTES, np.uint8)
            if store.fetch(digest, out) is not None:
                assert out.tobytes() == content.tobytes()
        assert store.save(*page(9))
        store.close()

    assert bench.check(check) > 30


def test_checkpoint(bench: Bench) -> None:
    """An index that is there belongs to a whole file of weights; once `finish` has returned, both are there."""
    hyper = checkpoint.Hyper(1, 8, 1, 1, 8, 8, 8, 16, 1e-5, 8, "halves", "silu")
    tokens = checkpoint.TokenizerData("gpt2", "", [], [], [], [], 0, 0, -1, -1, -1, False, False, "")
    facts: dict[str, Any] = {"architecture": "llama", "name": "m", "parameters": 1, "source_bytes": 1}
    make_directory(bench.live)
    with bench.recorder as recorder:
        for i in range(2):
            with CheckpointWriter(bench.live / f"{i}.idx") as writer:
                writer.add("w", (4, 256), "f32", "plain", [np.full((4, 256), i + 1, np.float32)])
                writer.finish(digest="ab" * 32, hyper=hyper, tokenizer=tokens, **facts)
            recorder.mark(i)

    def check(directory: Path, marks: list[int]) -> None:
        for i in range(2):
            path = directory / f"{i}.idx"
            try:
                opened = checkpoint.Checkpoint(path)
                if any(map(opened.is_damaged, opened.index.tensors)):
                    raise checkpoint.CheckpointError("damaged")
            except (checkpoint.CheckpointError, OSError, msgspec.MsgspecError):
                assert i not in marks
                continue
            assert opened.view("w").tobytes() == np.full((4, 256), i + 1, np.float32).tobytes()

    assert bench.check(check) > 10
