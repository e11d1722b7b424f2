"""Sessions: one turn at a time, committed or absent, durable, bounded, removed when they are closed."""

from __future__ import annotations

import errno
import resource
from array import array
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.errors import Conflict, InvalidRequest, NotFound, Overloaded, StorageUnavailable
from shm import prefix_hash
from stages.kv.lease import Grant
from stages.kv.sessions.model_sessions import TAG_DIGITS, ModelSessions
from stages.kv.sessions.session_bounds import SessionBounds
from stages.kv.sessions.session_files import SUFFIX, SessionFiles, parse
from stages.kv.sessions.session_store import EMPTY_S, LONGEST_TURN_S, UNSURE_S, SessionStore
from tests.kv.world import DIGEST, GEOMETRY, PAGE_TOKENS, Clock, FakeRows, contents, manager, small_arena

ME, OTHER = b"gateway-1", b"gateway-2"
TAG = "a" * TAG_DIGITS
ROOTS = prefix_hash.root_hasher(DIGEST, GEOMETRY)


class Time:
    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


def raw(*tokens: int) -> bytes:
    return array("i", tokens).tobytes()


def open_sessions(directory: Path, clock: Time, max_sessions: int = 3, max_tokens: int = 100) -> SessionStore:
    ids = iter(f"sess-{i}" for i in range(100))
    return SessionStore(
        SessionFiles(directory), ROOTS, PAGE_TOKENS, SessionBounds(max_sessions, max_tokens), clock, lambda: next(ids)
    )


@pytest.fixture
def clock() -> Time:
    return Time()


@pytest.fixture
def sessions(tmp_path: Path, clock: Time) -> SessionStore:
    return open_sessions(tmp_path, clock)


def test_turns_append(sessions: SessionStore) -> None:
    s = sessions.begin(ME, "t", "", create=True)
    assert (s.id, s.turn, list(s.tokens)) == ("sess-0", 1, [])
    sessions.commit(ME, "t", s.id, 1, 0, raw(1, 2, 3))
    assert list(sessions.begin(ME, "t", s.id).tokens) == [1, 2, 3]
    sessions.commit(ME, "t", s.id, 2, 2, raw(7))  # the template has changed the last token
    assert list(s.tokens) == [1, 2, 7]
    assert sessions.begin(ME, "t", s.id).turn == 3


def test_two_turns_at_once_are_a_conflict(sessions: SessionStore) -> None:
    sessions.begin(ME, "t", "a", create=True)
    with pytest.raises(Conflict, match="turn under way"):
        sessions.begin(OTHER, "t", "a")
    with pytest.raises(Conflict):
        sessions.begin(ME, "t", "a")
    assert sessions.begin(ME, "t", "a", resume=1).turn == 1  # a repeated frame
    assert sessions.begin(ME, "t", "a", resume=-1).turn == 1
    with pytest.raises(Conflict):
        sessions.begin(OTHER, "t", "a", resume=-1)
    sessions.commit(ME, "t", "a", 1, 0, raw(1))
    assert sessions.begin(OTHER, "t", "a").turn == 2


def test_a_session_whose_first_turn_was_aborted_is_removed(sessions: SessionStore, clock: Time, tmp_path: Path) -> None:
    sessions.begin(ME, "t", "a", create=True)
    sessions.abort(ME, "t", "a", 1)
    with pytest.raises(NotFound):
        sessions.begin(ME, "t", "a")
    sessions.begin(ME, "t", "b", create=True)
    sessions.drop_holder(ME)  # killed: its successor may resume the turn
    clock.now += EMPTY_S - 1
    assert sessions.begin(OTHER, "t", "b", resume=1).turn == 1
    sessions.drop_holder(OTHER)
    clock.now += EMPTY_S - 1
    assert sessions.expire() == 0
    clock.now += 1
    assert sessions.expire() == 1
    assert list(tmp_path.glob("*" + SUFFIX)) == []


def test_a_cancelled_turn_leaves_no_trace(sessions: SessionStore, tmp_path: Path, clock: Time) -> None:
    sessions.begin(ME, "t", "a", create=True)
    sessions.commit(ME, "t", "a", 1, 0, raw(1, 2))
    sessions.begin(ME, "t", "a")
    sessions.abort(ME, "t", "a", 2)
    sessions.abort(ME, "t", "a", 2)  # late, repeated and unknown frames are ignored
    sessions.abort(ME, "t", "absent", 9)
    assert list(sessions.begin(ME, "t", "a").tokens) == [1, 2]
    sessions.drop_holder(ME)
    assert list(open_sessions(tmp_path, clock).begin(ME, "t", "a").tokens) == [1, 2]


def test_of_two_commits_of_a_turn_the_first_wins(tmp_path: Path, clock: Time) -> None:
    sessions = open_sessions(tmp_path, clock)
    sessions.begin(ME, "t", "a", create=True)
    sessions = open_sessions(tmp_path, clock)  # kv restarts and has lost the turn in progress
    sessions.begin(OTHER, "t", "a")
    with pytest.raises(Conflict):
        sessions.commit(ME, "t", "a", 1, 0, raw(1))
    sessions.commit(OTHER, "t", "a", 1, 0, raw(2))
    sessions.commit(OTHER, "t", "a", 1, 0, raw(2))  # a repeated frame gets the same answer
    with pytest.raises(Conflict):
        sessions.commit(ME, "t", "a", 1, 0, raw(1))
    assert list(sessions.all()[0].tokens) == [2]


def test_tenants_do_not_see_each_other(sessions: SessionStore) -> None:
    sessions.begin(ME, "t", "a", create=True)
    with pytest.raises(NotFound):
        sessions.begin(ME, "u", "a")
    with pytest.raises(NotFound):
        sessions.close("u", "a")
    sessions.begin(ME, "u", "a", create=True)
    assert len(sessions) == 2


def test_bounds(sessions: SessionStore) -> None:
    for i in range(3):
        sessions.begin(ME, "t", f"s{i}", create=True)
    with pytest.raises(Overloaded, match="max_sessions"):
        sessions.begin(ME, "t", "s3", create=True)
    with pytest.raises(InvalidRequest) as error:
        sessions.commit(ME, "t", "s0", 1, 0, raw(*range(101)))
    assert error.value.code == "CONTEXT_LENGTH_EXCEEDED"
    assert list(sessions.begin(ME, "t", "s0").tokens) == []
    sessions.close("t", "s1")
    with pytest.raises(InvalidRequest, match="at most 128"):
        sessions.begin(ME, "t", "x" * 129, create=True)
    with pytest.raises(InvalidRequest):
        sessions.commit(ME, "t", "s2", 1, 5, raw(1))


def test_expired_sessions_do_not_count_against_the_bound(sessions: SessionStore, clock: Time) -> None:
    for i in range(3):
        sessions.begin(ME, "t", f"s{i}", create=True, ttl_s=10 + i)
        sessions.commit(ME, "t", f"s{i}", 1, 0, raw(1))
    clock.now += 10
    assert sessions.begin(ME, "t", "s3", create=True).id == "s3"
    assert sorted(session.id for session in sessions.all()) == ["s1", "s2", "s3"]
    with pytest.raises(Overloaded):
        sessions.begin(ME, "t", "s4", create=True)


def test_closed_and_expired_sessions_are_removed(sessions: SessionStore, clock: Time, tmp_path: Path) -> None:
    sessions.begin(ME, "t", "a", create=True, ttl_s=10)
    sessions.commit(ME, "t", "a", 1, 0, raw(1))
    sessions.begin(ME, "t", "b", create=True, ttl_s=10)
    clock.now += 11
    with pytest.raises(NotFound):
        sessions.begin(ME, "t", "a")
    assert sessions.expire() == 0  # a was removed by `begin`; b has a turn in progress
    sessions.commit(ME, "t", "b", 1, 0, raw(2))
    clock.now += 11
    assert sessions.expire() == 1
    sessions.begin(ME, "t", "d", create=True, ttl_s=10)
    sessions.commit(ME, "t", "d", 1, 0, raw(1))
    clock.now += 10
    with pytest.raises(NotFound):
        sessions.close("t", "d")  # expired, but not removed yet
    sessions.begin(ME, "t", "c", create=True)
    sessions.close("t", "c")
    with pytest.raises(NotFound):
        sessions.commit(ME, "t", "c", 1, 0, raw(1))
    with pytest.raises(NotFound):
        sessions.close("t", "c")
    assert list(tmp_path.glob("*" + SUFFIX)) == []


@pytest.mark.parametrize("who", ["this process", "its gateway"])
def test_a_turn_in_progress_past_the_time_to_live_survives_a_kill(tmp_path: Path, clock: Time, who: str) -> None:
    sessions = open_sessions(tmp_path, clock)
    sessions.begin(ME, "t", "a", create=True, ttl_s=3)
    sessions.commit(ME, "t", "a", 1, 0, raw(1, 2))
    clock.now += 2
    sessions.begin(ME, "t", "a")
    clock.now += 2
    if who == "this process":
        sessions = open_sessions(tmp_path, clock)
    else:
        sessions.drop_holder(ME)
    assert sessions.expire() == 0
    assert sessions.holds("t", "a")
    clock.now += UNSURE_S - 1  # within which the successor says that the turn goes on
    assert sessions.begin(OTHER, "t", "a", resume=2).turn == 2
    clock.now += 100
    assert sessions.expire() == 0
    sessions.commit(OTHER, "t", "a", 2, 2, raw(3))
    clock.now += 3
    assert sessions.expire() == 1


def test_a_session_whose_turn_no_process_continues_expires(tmp_path: Path, clock: Time) -> None:
    sessions = open_sessions(tmp_path, clock)
    sessions.begin(ME, "t", "a", create=True, ttl_s=3)
    sessions.commit(ME, "t", "a", 1, 0, raw(1, 2))
    sessions.begin(ME, "t", "a")
    sessions = open_sessions(tmp_path, clock)
    clock.now += UNSURE_S - 1
    assert sessions.expire() == 0
    clock.now += 1
    assert sessions.expire() == 1


@pytest.mark.parametrize("again", ["a start", "a load of the model"])
def test_a_session_that_ended_long_ago_is_gone_at_once(tmp_path: Path, clock: Time, again: str) -> None:
    """Its last turn, had it begun just before the end, has ended as well: nothing can be in progress."""
    sessions = open_sessions(tmp_path / f"m-{TAG}", clock)
    for name in ("one", "two", "daily"):
        sessions.begin(ME, "t", name, create=True, ttl_s=60)
        sessions.commit(ME, "t", name, 1, 0, raw(1, 2, 3))
    clock.now += 60 + LONGEST_TURN_S
    if again == "a start":
        sessions = open_sessions(tmp_path / f"m-{TAG}", clock)
    else:
        opened = ModelSessions(tmp_path, "m", clock).open(TAG, ROOTS, PAGE_TOKENS, SessionBounds(3, 100))
        assert opened is not None
        sessions = opened
    with pytest.raises(NotFound):
        sessions.begin(OTHER, "t", "two")
    s = sessions.begin(OTHER, "t", "daily", create=True)
    assert (s.turn, list(s.tokens)) == (1, [])
    for name in ("new", "newer"):  # the expired ones do not count among the most that are held
        assert sessions.begin(OTHER, "t", name, create=True).turn == 1


def test_a_turn_whose_commit_fails_is_a_use(
    sessions: SessionStore, clock: Time, monkeypatch: pytest.MonkeyPatch
) -> None:
    sessions.begin(ME, "t", "a", create=True, ttl_s=3)
    sessions.commit(ME, "t", "a", 1, 0, raw(1, 2))

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no space left on device")

    for added, error in ((raw(*range(100)), InvalidRequest), (raw(3), StorageUnavailable)):
        clock.now += 2
        sessions.begin(ME, "t", "a")
        clock.now += 4
        with monkeypatch.context() as patch:
            patch.setattr(sessions.files, "append", refuse)
            with pytest.raises(error):
                sessions.commit(ME, "t", "a", 2, 2, added)
        assert sessions.expire() == 0
    clock.now += 2
    assert list(sessions.begin(ME, "t", "a").tokens) == [1, 2]


def test_a_turn_that_fails_is_a_use(sessions: SessionStore, clock: Time) -> None:
    """The session is as it was before the turn, with its whole time to live."""
    sessions.begin(ME, "t", "a", create=True, ttl_s=60)
    sessions.commit(ME, "t", "a", 1, 0, raw(1, 2))
    clock.now += 59
    sessions.begin(ME, "t", "a")
    clock.now += 2
    sessions.abort(ME, "t", "a", 2)
    clock.now += 59
    assert sessions.expire() == 0
    clock.now += 1
    assert sessions.expire() == 1


def test_pages_that_other_sessions_have_are_not_freed(sessions: SessionStore) -> None:
    shared = [1] * PAGE_TOKENS
    for who, word in (("a", 2), ("b", 3)):
        sessions.begin(ME, "t", who, create=True)
        sessions.commit(ME, "t", who, 1, 0, raw(*shared, *[word] * PAGE_TOKENS, 9))
    sessions.check()
    sessions.close("t", "a")
    sessions.check()
    chain = prefix_hash.page_hashes(ROOTS(""), np.array(shared + [2] * PAGE_TOKENS, np.int32), PAGE_TOKENS)
    assert sessions.freed == [(chain[1], 1)]
    sessions.close("t", "b")
    assert sessions.freed[-1] == (chain[0], 1)
    sessions.check()


def test_closing_frees_the_pages() -> None:
    clock = Clock()
    rows = FakeRows()
    m = manager(small_arena(8), rows, clock_ns=clock)
    tokens = [1] * PAGE_TOKENS + [2] * PAGE_TOKENS + [3]
    answer = m.acquire("a", np.array(tokens, np.int32), 33, 0, rows.take(0, tokens))
    assert isinstance(answer, Grant)
    for i in range(2):
        m.pool.arena.pages[answer.pages[i]] = contents(tokens, i)
    m.commit("a", 33)
    names = prefix_hash.page_hashes(ROOTS(""), np.array(tokens, np.int32), PAGE_TOKENS)
    assert m.pool.remove(reversed(names)) == 0  # in use
    m.release("a", 33)
    assert m.pool.cached == 2
    assert m.pool.remove([*reversed(names), *names]) == 2
    m.check()
    assert (m.pool.free, m.pool.cached, m.pool.leased) == (8, 0, 0)


# ------------------------------------------------------------------ files


def test_sessions_survive_a_restart(tmp_path: Path, clock: Time) -> None:
    first = open_sessions(tmp_path, clock)
    first.begin(ME, "tenant", "ü / ../ \U0001f600", create=True, ttl_s=60, salt="salt")
    first.commit(ME, "tenant", "ü / ../ \U0001f600", 1, 0, raw(5, 6))
    clock.now += 30
    first.begin(ME, "tenant", "ü / ../ \U0001f600")
    first.commit(ME, "tenant", "ü / ../ \U0001f600", 2, 1, raw(*range(40)))
    (before,) = first.all()
    (after,) = open_sessions(tmp_path, clock).all()
    before.holder = b""
    assert after == before
    assert after.last_use == clock.now
    assert [path.stat().st_mode & 0o777 for path in tmp_path.iterdir()] == [0o600]


@settings(max_examples=60, deadline=None)
@given(cut=st.integers(0, 400), flip=st.none() | st.integers(0, 400))
def test_damage_at_the_end_is_cut_off(tmp_path_factory: pytest.TempPathFactory, cut: int, flip: int | None) -> None:
    directory = tmp_path_factory.mktemp("sessions")
    clock = Time()
    sessions = open_sessions(directory, clock)
    sessions.begin(ME, "t", "a", create=True)
    states: list[list[int]] = [[]]
    for turn in range(1, 4):
        sessions.commit(ME, "t", "a", turn, len(states[-1]), raw(turn, turn))
        states.append([*states[-1], turn, turn])
    (path,) = directory.iterdir()
    data = bytearray(path.read_bytes())
    if flip is not None:
        data[flip % len(data)] ^= 16
    path.write_bytes(data[:cut])
    again = open_sessions(directory, clock)
    for session in again.all():
        assert list(session.tokens) in states
        if session.lost_bytes:
            with pytest.raises(Conflict, match="has lost its latest turns"):
                again.begin(ME, "t", "a")
        again.begin(ME, "t", "a")
        again.commit(ME, "t", "a", session.turn, 0, raw(9))  # the session continues
        assert [list(s.tokens) for s in open_sessions(directory, clock).all()] == [[9]]
    if not again.all():
        assert list(directory.iterdir()) == []
    whole = parse(bytes(data))[1] == len(data)
    assert whole == (flip is None)


def test_a_full_disk_refuses_the_turn_and_keeps_the_session(
    sessions: SessionStore, tmp_path: Path, clock: Time
) -> None:
    sessions.begin(ME, "t", "a", create=True)
    sessions.commit(ME, "t", "a", 1, 0, raw(1, 2))
    sessions.begin(ME, "t", "a")
    (path,) = tmp_path.iterdir()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 10, hard))
    try:
        with pytest.raises(StorageUnavailable, match="free space in server.state_dir"):
            sessions.commit(ME, "t", "a", 2, 2, raw(*range(50)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(open_sessions(tmp_path, clock).all()[0].tokens) == [1, 2]
    assert list(sessions.begin(ME, "t", "a").tokens) == [1, 2]


def test_a_tenant_leaves_room_for_the_others(tmp_path: Path, clock: Time) -> None:
    ids = iter(f"sess-{i}" for i in range(100))
    bounds = SessionBounds(16, 100, per_tenant=14, n_tenants=4)
    sessions = SessionStore(SessionFiles(tmp_path), ROOTS, PAGE_TOKENS, bounds, clock, lambda: next(ids))

    def open_until_refused(tenant: str) -> int:
        for count in range(20):
            try:
                sessions.begin(ME, tenant, "", create=True)
            except Overloaded:
                return count
        raise AssertionError("never refused")

    assert open_until_refused("a") == 12  # the last quarter is reserved for tenants with fewer than 16 / 4
    assert open_until_refused("b") == 4
    with pytest.raises(Overloaded, match="max_sessions"):
        sessions.begin(ME, "c", "", create=True)
    for session in sessions.all()[:6]:
        sessions.close(session.tenant, session.id)
    sessions.check()
    assert open_until_refused("c") == 4
    sessions.check()


def test_the_bytes_of_a_tenants_sessions_are_bounded(tmp_path: Path, clock: Time) -> None:
    bounds = SessionBounds(16, 100, n_tenants=2, max_bytes=400)
    sessions = SessionStore(SessionFiles(tmp_path), ROOTS, PAGE_TOKENS, bounds, clock)
    for tenant, tokens in (("a", 50), ("a", 40), ("b", 9)):
        session = sessions.begin(ME, tenant, "", create=True, ttl_s=60)
        sessions.commit(ME, tenant, session.id, 1, 0, raw(*range(tokens)))
        sessions.check()
    with pytest.raises(Overloaded, match="cache.session_mb"):
        sessions.begin(ME, "a", "", create=True)
    with pytest.raises(Overloaded, match="cache.session_mb"):
        sessions.begin(ME, "a", sessions.all()[0].id)
    turn = sessions.begin(ME, "b", session.id)
    sessions.abort(ME, "b", turn.id, turn.turn)
    sessions = SessionStore(SessionFiles(tmp_path), ROOTS, PAGE_TOKENS, bounds, clock)
    with pytest.raises(Overloaded, match="cache.session_mb"):
        sessions.begin(ME, "a", "", create=True)
    clock.now += 61
    sessions.begin(ME, "a", "", create=True)
    sessions.check()


def three_turns(directory: Path, clock: Time) -> Path:
    """A session "a" of three turns; returns its file."""
    sessions = open_sessions(directory, clock)
    for turn in (1, 2, 3):
        sessions.begin(ME, "t", "a", create=True)
        sessions.commit(ME, "t", "a", turn, turn - 1, raw(turn))
    (path,) = directory.glob("*" + SUFFIX)
    return path


@pytest.mark.parametrize("damage", ["flip", "cut"])
@pytest.mark.parametrize("turn", [2, 3])
def test_a_lost_turn_is_reported_once_and_earlier_turns_stay(
    tmp_path: Path, clock: Time, damage: str, turn: int, caplog: pytest.LogCaptureFixture
) -> None:
    path = three_turns(tmp_path, clock)
    content = bytearray(path.read_bytes())
    size = 16 + 12 + 4  # of a turn with one token
    at = len(content) - (4 - turn) * size + 20
    if damage == "flip":
        content[at] ^= 1
    path.write_bytes(content if damage == "flip" else content[:at])
    for _ in range(2):  # until a client has received it, a restart does not end it
        sessions = open_sessions(tmp_path, clock)
        assert sessions.damaged == 1
    assert "a session has lost turns" in caplog.text
    with pytest.raises(Conflict, match=f"holds {turn - 1} turns with {turn - 1} tokens"):
        sessions.begin(ME, "t", "a", resume=-1)
    session = sessions.begin(ME, "t", "a")
    assert (session.turn, list(session.tokens)) == (turn, list(range(1, turn)))
    sessions.commit(ME, "t", "a", turn, turn - 1, raw(9))
    again = open_sessions(tmp_path, clock)
    assert again.damaged == 0
    assert list(again.begin(ME, "t", "a").tokens) == [*range(1, turn), 9]


def test_a_turn_that_was_being_written_when_kv_died_is_committed_again(tmp_path: Path, clock: Time) -> None:
    """Its gateway begins it again and repeats the commit: nothing is lost, so nothing is reported."""
    path = three_turns(tmp_path, clock)
    path.write_bytes(path.read_bytes()[:-3])
    sessions = open_sessions(tmp_path, clock)
    sessions.begin(ME, "t", "a", resume=3)
    sessions.commit(ME, "t", "a", 3, 2, raw(3))
    assert list(sessions.begin(ME, "t", "a").tokens) == [1, 2, 3]
    sessions.abort(ME, "t", "a", 4)
    assert list(open_sessions(tmp_path, clock).begin(ME, "t", "a").tokens) == [1, 2, 3]


def test_a_session_whose_first_record_is_damaged_is_counted(tmp_path: Path, clock: Time) -> None:
    path = three_turns(tmp_path, clock)
    path.write_bytes(b"x" + path.read_bytes()[1:])
    sessions = open_sessions(tmp_path, clock)
    assert (len(sessions), sessions.damaged, path.exists()) == (0, 1, False)
