"""A real kv process on a slow disk: frames that need no disk are answered at once."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec
import pytest

from pipeline.observe.metrics import Snapshot
from pipeline.protocol import messages as m
from stages.kv.model import OPEN_WAIT_S
from stages.kv.page_ins import WAIT_S
from tests.e2e.core_waits import own_run_queue_delay_s, run_queue_delay_s
from tests.kv.process import PAGE_TOKENS, KvProcess, configure, write_model
from tests.kv.process_peers import Peers, words

pytestmark = pytest.mark.slow

DELAY_MS = 3000  # of each access
ANSWER_S = 2.5  # less than one access: an answer that needs no disk
LONG_S = 60.0  # that only a failure reaches


@pytest.fixture
def home(tmp_path: Path) -> Path:
    configure(tmp_path, spill_path=str(tmp_path / "spill"), spill_mb=8)
    return tmp_path


def spill(peers: Peers) -> None:
    """Fill the arena with other pages, so that those of before are in the spill file."""
    scheduler = peers.scheduler
    total = scheduler.wait_ready().pages
    assert isinstance(scheduler.acquire("flood", [5], ahead=total * PAGE_TOKENS - 1), m.Granted)
    scheduler.release("flood")


def open_files(peers: Peers) -> set[str]:
    """Kinds of page files that the process has open, by its metrics."""
    raw = (peers.scheduler.steps_path.parent / "kv.metrics").read_bytes()
    families = msgspec.msgpack.decode(raw, type=Snapshot).families
    return {series.labels[-1] for series in families.get("starling_kv_cache_fragmentation_ratio", [])}


def runnable_s(kv: KvProcess) -> float:
    """Time of the clock, in s, but for what this process and kv have waited for a core."""
    assert kv.process is not None
    return time.monotonic() - own_run_queue_delay_s() - run_queue_delay_s(kv.process.pid)


def slowest_extend(kv: KvProcess, peers: Peers, seconds: float, answers: list[m.Frame] | None = None) -> float:
    """Extend a running sequence again and again; the longest time to an answer, in s, without waits for a core.

    `answers` gets the frames for the gateway; when it has one, this function ends early.
    """
    scheduler, slowest = peers.scheduler, 0.0
    end = time.monotonic() + seconds
    ready = scheduler.wait_ready()
    number = 10_000
    while time.monotonic() < end and not answers:
        number += 1
        if answers is not None:
            answers += peers.gateway.turn()
        begin = runnable_s(kv)
        scheduler.link.send(m.Extend(number, ready.model, "running", 2 * PAGE_TOKENS))
        scheduler.take(m.Granted, id=number)
        slowest = max(slowest, runnable_s(kv) - begin)
    return slowest


@pytest.mark.parametrize("points", [("spill_read", "saved_read"), ("spill", "saved")])
def test_running_sequences_do_not_wait_for_pages_of_others(home: Path, points: tuple[str, ...]) -> None:
    digest = write_model(home)
    with KvProcess(home, read_wait_s=WAIT_S) as kv, Peers(home, digest) as peers:
        scheduler = peers.scheduler
        peers.wait_up()
        scheduler.run("first", words(1, 2, 3))
        spill(peers)
        scheduler.wait_total("starling_kv_cache_spilled_pages_total", 3)
        peers.begin(", ".join(f"disk:slow@{point}={DELAY_MS}" for point in points))
        assert isinstance(scheduler.acquire("running", [7, 8]), m.Granted)
        # A sequence whose pages are on the disk, or that evicts pages to it.
        scheduler.ask("waits", words(1, 2, 3))
        assert slowest_extend(kv, peers, 4.0) < ANSWER_S
        answered = scheduler.answer("waits")
        assert isinstance(answered, m.Granted)
        scheduler.check("waits", answered.cached_tokens)
        peers.end()


def test_a_grant_waits_for_the_disk_for_a_bounded_time(home: Path) -> None:
    digest = write_model(home)
    with KvProcess(home, read_wait_s=WAIT_S), Peers(home, digest) as peers:
        scheduler = peers.scheduler
        peers.wait_up()
        scheduler.run("first", words(1, 2, 3))
        spill(peers)
        scheduler.wait_total("starling_kv_cache_spilled_pages_total", 3)
        peers.begin("disk:slow@spill_read=5000")
        begin = time.monotonic()
        granted = scheduler.acquire("a", words(1, 2, 3))
        assert time.monotonic() - begin > WAIT_S * 0.9
        assert isinstance(granted, m.Granted)
        assert granted.cached_tokens == 0  # the disk had not answered
        scheduler.release("a")
        peers.end()


def test_released_and_repeated_while_it_waits(home: Path) -> None:
    """A release ends the wait; the same sequence again gets one answer, and pages with its own contents."""
    digest = write_model(home)
    with KvProcess(home), Peers(home, digest) as peers:
        scheduler = peers.scheduler
        peers.wait_up()
        scheduler.run("first", words(1, 2, 3))
        spill(peers)
        scheduler.wait_total("starling_kv_cache_spilled_pages_total", 3)
        peers.begin("disk:slow@spill_read=1000")  # not all three are read before the releases come
        for _ in range(3):
            scheduler.ask("a", words(1, 2, 3))
            scheduler.release("a")
        assert scheduler.run("b", words(1, 2, 3)).cached_tokens == 3 * PAGE_TOKENS
        assert not [frame for frame in scheduler.frames if getattr(frame, "sequence", "") == "a"]
        assert scheduler.state().leased == 0
        peers.end()


def test_sequences_that_wait_for_the_same_pages_share_them(home: Path) -> None:
    digest = write_model(home)
    with KvProcess(home), Peers(home, digest) as peers:
        scheduler = peers.scheduler
        peers.wait_up()
        scheduler.run("first", words(1, 2, 3))
        spill(peers)
        scheduler.wait_total("starling_kv_cache_spilled_pages_total", 3)
        peers.begin("disk:slow@spill_read=90")
        for i in range(3):
            scheduler.ask(f"s{i}", words(1, 2, 3))
        tables = [scheduler.answer(f"s{i}").pages for i in range(3)]
        assert len({pages[:3] for pages in tables}) == 1
        scheduler.wait_total("starling_kv_cache_restored_pages_total", 3)
        peers.end()


def test_a_turn_is_acknowledged_before_it_is_synchronized(home: Path) -> None:
    digest = write_model(home)
    with KvProcess(home) as kv, Peers(home, digest) as peers:
        peers.wait_up()
        peers.begin(f"disk:slow@sessions_sync={DELAY_MS}")
        begin = time.monotonic()
        for i in range(8):
            assert isinstance(peers.gateway.ask(m.SessionBegin(1, "tiny", "t", f"s{i}", create=True)), m.SessionHeld)
            done = peers.gateway.ask(m.SessionCommit(2, "tiny", "t", f"s{i}", 1, 0, bytes(64)))
            assert isinstance(done, m.SessionDone)
        assert time.monotonic() - begin < 4 * DELAY_MS / 1000  # of the 8 that as many synchronizations take
        kv.kill()
        peers.wait_down()
        kv.start()
        peers.wait_up()
        for i in range(8):
            held = peers.gateway.ask(m.SessionBegin(1, "tiny", "t", f"s{i}"))
            assert isinstance(held, m.SessionHeld)
            assert held.turn == 2


@pytest.mark.parametrize("point", ["sessions", "sessions_open", "sessions_sync"])
def test_a_turn_on_a_slow_disk_delays_no_lease(home: Path, point: str) -> None:
    digest = write_model(home)
    with KvProcess(home) as kv, Peers(home, digest) as peers:
        scheduler, gateway = peers.scheduler, peers.gateway
        peers.wait_up()
        assert isinstance(gateway.ask(m.SessionBegin(1, "tiny", "t", "a", create=True)), m.SessionHeld)
        assert isinstance(scheduler.acquire("running", [7, 8]), m.Granted)
        peers.begin(f"disk:slow@{point}={DELAY_MS}")
        answers: list[m.Frame] = []
        begin, runnable_begin = time.monotonic(), runnable_s(kv)
        gateway.link.send(m.SessionCommit(2, "tiny", "t", "a", 1, 0, bytes(64)))
        assert slowest_extend(kv, peers, LONG_S, answers) < ANSWER_S
        assert answers == [m.SessionDone(2, "a", 16)]
        if point == "sessions_sync":  # acknowledged after its record is written
            assert runnable_s(kv) - runnable_begin < DELAY_MS / 1000
        else:
            assert time.monotonic() - begin >= DELAY_MS / 1000
        # Closing, too: the file is removed by the same thread.
        peers.begin(f"disk:slow@sessions_unlink={DELAY_MS}")
        answers.clear()
        gateway.link.send(m.SessionClose(3, "tiny", "t", "a"))
        assert slowest_extend(kv, peers, LONG_S, answers) < ANSWER_S
        assert answers == [m.SessionDone(3, "a", 0)]
        peers.end()


def test_a_stage_starts_while_its_files_open_slowly(home: Path) -> None:
    """Leases do not wait for page files and sessions; sessions and pages are there when the disk has answered."""
    digest = write_model(home)
    with Peers(home, digest) as peers:
        scheduler, gateway = peers.scheduler, peers.gateway
        with KvProcess(home) as kv:
            peers.wait_up()
            scheduler.run("first", words(1, 2, 3))
            spill(peers)
            scheduler.wait_total("starling_kv_cache_spilled_pages_total", 3)
            assert isinstance(gateway.ask(m.SessionBegin(1, "tiny", "t", "a", create=True)), m.SessionHeld)
            kv.kill()
            peers.wait_down()
        peers.begin(", ".join(f"disk:slow@{name}=8000" for name in ("spill_open", "saved_open", "sessions_open")))
        begin = time.monotonic()
        with KvProcess(home, open_wait_s=OPEN_WAIT_S) as kv:
            peers.wait_up()
            peers.idle(0.5)  # greetings that were sent meanwhile
            assert isinstance(scheduler.acquire("running", [7, 8]), m.Granted)
            answers: list[m.Frame] = []
            gateway.link.send(m.SessionBegin(2, "tiny", "t", "a"))
            assert slowest_extend(kv, peers, LONG_S, answers) < ANSWER_S
            assert time.monotonic() - begin > 8
            assert isinstance(answers[0], m.SessionHeld)
            scheduler.release("running")
            peers.end()
            peers.wait(lambda: "spilled" in open_files(peers))
            assert scheduler.run("again", words(1, 2, 3)).cached_tokens == 3 * PAGE_TOKENS
