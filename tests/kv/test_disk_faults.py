"""A real kv process whose state files fail: it goes on, and works again when the disk does."""

from __future__ import annotations

import os
import signal
import time
from array import array
from pathlib import Path

import pytest

from pipeline.protocol import messages as m
from stages.kv.sessions.session_files import SUFFIX
from tests.kv.process import PAGE_TOKENS, Gateway, KvProcess, configure, write_model
from tests.kv.process_peers import Peers, words

pytestmark = pytest.mark.slow

TURN = array("i", range(2 * PAGE_TOKENS)).tobytes()
FAULTS = ("eio", "erofs", "eacces", "enospc")


@pytest.fixture
def home(tmp_path: Path) -> Path:
    configure(tmp_path, spill_path=str(tmp_path / "spill"), spill_mb=8)
    return tmp_path


def session_files(home: Path) -> list[Path]:
    return sorted((home / "state" / "sessions").rglob("*" + SUFFIX))


def open_session(gateway: Gateway, name: str, ttl_s: int = 0) -> m.Frame:
    """A session with one committed turn."""
    held = gateway.ask(m.SessionBegin(1, "tiny", "t", name, create=True, ttl_s=ttl_s))
    if not isinstance(held, m.SessionHeld):
        return held
    return gateway.ask(m.SessionCommit(2, "tiny", "t", name, held.turn, len(held.tokens) // 4, TURN))


def check_serves(peers: Peers) -> None:
    """Check that the process serves sequences and sessions."""
    scheduler, gateway = peers.scheduler, peers.gateway
    peers.idle(0.1)
    name = f"x-{time.monotonic_ns()}"
    assert isinstance(open_session(gateway, name), m.SessionDone)
    assert isinstance(gateway.ask(m.SessionClose(3, "tiny", "t", name)), m.SessionDone)
    total = scheduler.wait_ready().pages
    for i in range(2):
        scheduler.run(f"{name}-{i}", words(1, 2, 3))
        assert isinstance(scheduler.acquire("flood", [5], ahead=total * PAGE_TOKENS - 1), m.Granted)
        scheduler.release("flood")


@pytest.mark.parametrize("fault", FAULTS)
def test_a_session_file_that_cannot_be_removed(home: Path, fault: str) -> None:
    """Close and expiry end the session all the same; its file goes when the disk works again."""
    digest = write_model(home)
    with KvProcess(home) as kv, Peers(home, digest) as peers:
        scheduler, gateway = peers.scheduler, peers.gateway
        peers.wait_up()
        peers.begin(f"disk:{fault}@sessions_unlink")  # before the expiry
        open_session(gateway, "closed")
        open_session(gateway, "expired", ttl_s=1)
        assert len(session_files(home)) == 2
        assert gateway.ask(m.SessionClose(3, "tiny", "t", "closed")) == m.SessionDone(3, "closed", 0)
        peers.idle(2.5)  # expiry, twice
        assert kv.process is not None
        assert kv.process.poll() is None, kv.log()
        for name in ("closed", "expired"):
            refused = gateway.ask(m.SessionBegin(4, "tiny", "t", name))
            assert isinstance(refused, m.SessionRefused)
            assert refused.code == "NOT_FOUND"
        assert len(session_files(home)) == 2
        peers.wait(lambda: scheduler.total("starling_state_file_errors_total") >= 2)
        peers.wait(lambda: "a state file failed" in kv.log())
        assert kv.log().count("a state file failed") == 1, kv.log()
        peers.end()
        peers.wait(lambda: not session_files(home))
        check_serves(peers)


def test_a_session_that_was_closed_on_a_failing_disk_stays_closed(home: Path) -> None:
    digest = write_model(home)
    with Peers(home, digest) as peers:
        gateway = peers.gateway
        with KvProcess(home, "disk:eacces@sessions_unlink") as kv:
            peers.wait_up()
            open_session(gateway, "a")
            gateway.ask(m.SessionClose(3, "tiny", "t", "a"))
            peers.wait(lambda: len(session_files(home)) == 1)  # the removal is retried every second
            kv.kill()
            peers.wait_down()
        with KvProcess(home):
            peers.wait_up()
            refused = gateway.ask(m.SessionBegin(4, "tiny", "t", "a"))
            assert isinstance(refused, m.SessionRefused)
            assert session_files(home) == []


POINTS = [
    *("sessions", "sessions_open", "sessions_sync", "sessions_unlink", "sessions_read"),
    *("spill", "spill_read", "spill_open", "saved", "saved_read", "saved_open"),
    *("logs", "logs_open", "logs_rename", "logs_unlink", "locks"),
]


ALL = [(point, fault) for point in POINTS for fault in ("eio", "erofs")]
CASES = ALL if os.environ.get("STARLING_DISK_FAULTS") == "all" else ALL[::4] + ALL[3::4]  # one of each point, in turn


@pytest.mark.parametrize(("point", "fault"), CASES)
def test_no_state_file_ends_the_process(home: Path, point: str, fault: str) -> None:
    """Each operation fails while the process serves, and from its start; it serves, and recovers when the disk does."""
    digest = write_model(home)
    with Peers(home, digest) as peers:
        scheduler, gateway = peers.scheduler, peers.gateway
        with KvProcess(home) as kv:
            peers.wait_up()
            assert isinstance(open_session(gateway, "kept"), m.SessionDone)
            peers.begin(f"disk:{fault}@{point}")
            opened = open_session(gateway, "other")
            assert isinstance(opened, m.SessionDone | m.SessionRefused)
            gateway.ask(m.SessionClose(3, "tiny", "t", "other"))
            total = scheduler.wait_ready().pages
            for i in range(3):
                scheduler.run(f"a{i}", words(1, 2, 3))
                assert isinstance(scheduler.acquire("flood", [5], ahead=total * PAGE_TOKENS - 1), m.Granted)
                scheduler.release("flood")
            assert kv.process is not None
            assert kv.process.poll() is None, kv.log()
            peers.end()
            check_serves(peers)
            kv.kill(signal.SIGKILL)
            peers.wait_down()
        peers.begin(f"disk:{fault}@{point}")
        with KvProcess(home):
            peers.wait_up()
            scheduler.run("b", words(1, 2, 3))
            refused = gateway.ask(m.SessionBegin(5, "tiny", "t", "kept"))
            if isinstance(refused, m.SessionRefused):
                assert refused.code == "MODEL_UNAVAILABLE"  # not 404: the session still exists
            else:
                gateway.link.send(m.SessionAbort("tiny", "t", "kept", 2))
            peers.end()

            def is_read() -> bool:
                return isinstance(gateway.ask(m.SessionBegin(6, "tiny", "t", "kept")), m.SessionHeld)

            peers.wait(is_read)  # at most a round of retries
            gateway.link.send(m.SessionAbort("tiny", "t", "kept", 2))
            check_serves(peers)
            peers.wait(lambda: len(session_files(home)) == 1)  # removals that failed are repeated


def test_a_failed_turn_is_not_read_back(home: Path) -> None:
    """The disk takes the record and fails to sync it: the turn was refused, so a restart must not contain it."""
    digest = write_model(home)
    with Peers(home, digest) as peers:
        gateway = peers.gateway
        with KvProcess(home) as kv:
            peers.wait_up()
            open_session(gateway, "a")
            size = os.stat(session_files(home)[0]).st_size
            peers.begin("disk:eio@sessions")
            held = gateway.ask(m.SessionBegin(1, "tiny", "t", "a"))
            assert isinstance(held, m.SessionHeld)
            refused = gateway.ask(m.SessionCommit(2, "tiny", "t", "a", 2, len(held.tokens) // 4, TURN))
            assert isinstance(refused, m.SessionRefused)
            peers.end()
            assert os.stat(session_files(home)[0]).st_size == size
            kv.kill()
            peers.wait_down()
        with KvProcess(home):
            peers.wait_up()
            held = gateway.ask(m.SessionBegin(1, "tiny", "t", "a"))
            assert isinstance(held, m.SessionHeld)
            assert held.turn == 2
