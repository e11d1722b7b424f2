"""The journal: what stands before the damage is believed, what comes after it never is."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.gateway.requests.journal import FILE, FRESH, KEEP_S, MAGIC, Ended, Journal, Opened, parse
from tests.gateway.journal_records import NOW, found, journal, opened

Actions = st.lists(
    st.tuples(st.sampled_from(["open", "answered", "failed", "abandoned"]), st.integers(0, 7)), max_size=24
)


def expected(records: list[Opened | Ended]) -> dict[str, Ended | None]:
    state: dict[str, Ended | None] = {}
    for record in records:
        if isinstance(record, Opened):
            state.pop(record.id, None)
            state[record.id] = None
        elif record.code == "ABANDONED":
            state.pop(record.id, None)
        else:
            state[record.id] = record
    return state


def play(target: Journal, actions: list[tuple[str, int]]) -> list[Opened | Ended]:
    """What was written, in order."""
    written: list[Opened | Ended] = []
    live: set[str] = set()
    for action, number in actions:
        name = f"req-{number}"
        if action == "open":
            record = opened(name, bytes([number]) * 4 * number)
            assert target.open(record)
            written.append(record)
            live.add(name)
        elif name in live:
            live.discard(name)
            code = {"answered": "", "failed": "TIMEOUT", "abandoned": "ABANDONED"}[action]
            ended = Ended(name, NOW, code)
            target.end(ended, is_kept=action != "abandoned")
            written.append(ended)
    return written


@settings(deadline=None, max_examples=60)
@given(Actions, st.data())
def test_a_crash_at_any_byte_loses_only_what_was_being_written(
    actions: list[tuple[str, int]], data: st.DataObject
) -> None:
    with TemporaryDirectory() as name:
        directory = Path(name)
        target = journal(directory)
        written = play(target, actions)
        target.close()
        raw = target.path.read_bytes()
        ends = [len(MAGIC), *(end for _, _, end in parse(raw))]
        assert len(ends) == len(written) + 1
        cut = data.draw(st.integers(0, len(raw)))
        rest = data.draw(st.binary(max_size=40))
        target.path.write_bytes(raw[:cut] + rest)
        whole = sum(end <= cut for end in ends) - 1
        assert found(directory) == expected(written[: max(0, whole)])
        assert found(directory) == expected(written[: max(0, whole)])  # it was made whole


@settings(deadline=None, max_examples=60)
@given(Actions.filter(lambda a: any(kind == "open" for kind, _ in a)), st.data())
def test_a_flipped_bit_is_never_believed(actions: list[tuple[str, int]], data: st.DataObject) -> None:
    with TemporaryDirectory() as name:
        directory = Path(name)
        target = journal(directory)
        written = play(target, actions)
        target.close()
        raw = bytearray(target.path.read_bytes())
        ends = [len(MAGIC), *(end for _, _, end in parse(bytes(raw)))]
        at = data.draw(st.integers(0, len(raw) - 1))
        raw[at] ^= 1 << data.draw(st.integers(0, 7))
        target.path.write_bytes(raw)
        assert found(directory) == expected(written[: max(0, sum(end <= at for end in ends) - 1)])


def test_the_file_keeps_its_bound_and_the_living(tmp_path: Path) -> None:
    target = journal(tmp_path, max_bytes=8192)
    assert target.open(opened("req-0"))
    for number in range(1, 200):
        assert target.open(opened(f"req-{number}"))
        target.end(Ended(f"req-{number}", NOW, "ABANDONED"), is_kept=False)
        assert target.path.stat().st_size <= 8192
    target.close()
    assert found(tmp_path) == {"req-0": None}
    assert [path.name for path in tmp_path.iterdir()] == [FILE]


def test_what_does_not_fit_goes_on_without_it(tmp_path: Path) -> None:
    target = journal(tmp_path, max_bytes=4096)
    taken = [number for number in range(100) if target.open(opened(f"req-{number}"))]
    assert 0 < len(taken) < 100
    assert target.left_out == 100 - len(taken)
    for number in range(100):
        target.end(Ended(f"req-{number}", NOW, "ABANDONED"), is_kept=False)
    assert target.open(opened("req-7"))
    target.close()
    assert found(tmp_path) == {"req-7": None}


def test_ended_requests_are_kept_for_their_time(tmp_path: Path) -> None:
    target = journal(tmp_path)
    target.open(opened("req-a"))
    target.end(Ended("req-a", NOW), is_kept=True)
    target.close()
    assert found(tmp_path, lambda: NOW + KEEP_S - 1) == {"req-a": Ended("req-a", NOW)}
    assert found(tmp_path, lambda: NOW + KEEP_S + 1) == {}


def test_a_full_disk_is_not_fatal_and_leaves_no_half_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    target = journal(tmp_path)
    assert target.open(opened("req-a"))
    write = os.pwrite
    room = [100]

    def pwrite(fd: int, data: bytes, at: int) -> int:
        if not room[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        done = write(fd, data[: room[0]], at)
        room[0] -= done
        return done

    monkeypatch.setattr(os, "pwrite", pwrite)
    for _ in range(3):
        assert not target.open(opened("req-b"))
    target.end(Ended("req-a", NOW, "ABANDONED"), is_kept=False)
    assert target.left_out == 4
    assert len(caplog.records) == 1
    monkeypatch.undo()
    assert target.open(opened("req-c"))
    target.close()
    assert set(found(tmp_path)) == {"req-a", "req-c"}


def test_a_planned_fault_of_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STARLING_FAULTS", "disk:enospc@journal")
    target = journal(tmp_path)
    assert not target.open(opened("req-a"))
    target.close()
    assert found(tmp_path) == {}


def test_a_rewriting_that_was_cut_short_is_not_looked_at(tmp_path: Path) -> None:
    target = journal(tmp_path)
    target.open(opened("req-a"))
    target.close()
    (tmp_path / FRESH).write_bytes(MAGIC + b"half")
    assert found(tmp_path) == {"req-a": None}
    assert not (tmp_path / FRESH).exists()
