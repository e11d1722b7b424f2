"""The stage loop: what peers, the supervisor and systemd receive from it, and how it ends."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from pipeline import procfs
from pipeline.config import paths
from pipeline.config.schema import Config, ModelConfig, ServerConfig
from pipeline.errors import ConfigError
from pipeline.ipc.poll_loop import PollLoop
from pipeline.observe import status
from pipeline.observe.status import StageStatus
from pipeline.protocol import messages as m
from pipeline.runtime import directory_lock, process, timer_coalescing
from pipeline.runtime.stage_runtime import IDLE_AFTER_S, STALL_MS, STOP_HEARTBEATS_S, TICK_S


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return Config(
        models=(ModelConfig(name="m"),),
        server=ServerConfig(
            run_dir=str(tmp_path / "run"),
            arena_dir=str(tmp_path / "shm"),
            heartbeat_ms=20,
            drain_timeout_ms=200,
        ),
    )


@pytest.fixture
def loops(config: Config) -> Iterator[dict[str, PollLoop]]:
    server = msgspec.structs.replace(config.server, drain_timeout_ms=60_000)
    made = {name: PollLoop(name, msgspec.structs.replace(config, server=server)) for name in ("kv", "scheduler")}
    yield made
    for loop in reversed(made.values()):
        loop.close()


def record(config: Config, stage: str) -> StageStatus:
    return {found.stage: found for found in status.read_all(paths.run_dir(config))}[stage]


def test_frames_reach_handlers_and_heartbeats_reach_peers(loops: dict[str, PollLoop]) -> None:
    kv, scheduler = loops["kv"], loops["scheduler"]
    got: list[m.Frame] = []

    def answer(peer: bytes, frame: m.Frame) -> None:
        assert isinstance(frame, m.Extend)
        hub.send(peer, m.Granted(frame.id, frame.sequence, (1, 2)))

    hub = kv.bind("scheduler-kv", answer)
    link = scheduler.connect("scheduler-kv", got.append)
    link.on_up = lambda hello: scheduler.stop()
    kv.progress, kv.busy, kv.reason = 41, True, "warming up"

    def work() -> float | None:
        kv.poll(0)
        if link.peer is None:
            return 0.005
        if not got:
            link.send(m.Extend(7, "m", "s", 3))
        scheduler.busy = not got or link.last_heartbeat is None or link.last_heartbeat.progress != 41
        return 0.005

    assert scheduler.run(work) == 0
    assert got[0] == m.Granted(7, "s", (1, 2))
    assert link.last_heartbeat is None  # closed, and with it what it knew


def test_the_heartbeat_depends_on_ready_and_stopping(loops: dict[str, PollLoop]) -> None:
    loop = loops["kv"]
    assert (loop.heartbeat().ready, loop.heartbeat().reason) == (False, "starting")
    loop.ready = True
    assert (loop.heartbeat().ready, loop.heartbeat().reason) == (True, "")
    loop.stop()
    assert (loop.heartbeat().ready, loop.heartbeat().reason) == (False, "stopping")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_wait_and_the_loop(config: Config, number: signal.Signals) -> None:
    before = [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)]
    loop = PollLoop("kv", config)
    calls = 0

    def work() -> float | None:
        nonlocal calls
        calls += 1
        if calls == 2:
            os.kill(os.getpid(), number)
        return 60.0

    assert loop.run(work) == 0
    assert loop.stopping
    assert [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)] == before


def test_a_stage_that_becomes_ready_says_so_in_its_next_round(config: Config) -> None:
    loop = PollLoop("kv", config, clock=lambda: 1.0)
    ticks: list[bool] = []
    loop.on_tick.append(lambda: ticks.append(loop.ready))
    for ready in (False, False, True, True, False):
        loop.ready = ready
        loop.poll(0)
    assert ticks == [False, True, False]  # the clock stands still
    loop.close()


def test_what_a_tick_changes_is_sent_without_a_wait(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = PollLoop("kv", config, clock=lambda: 1.0)
    waits: list[float] = []

    class Poll:
        def poll(self, timeout_ms: float) -> list[tuple[int, int]]:
            waits.append(timeout_ms)
            return []

    loop.on_tick.append(lambda: setattr(loop, "ready", True))
    with monkeypatch.context() as patch:
        patch.setattr(loop, "_poll", Poll())
        for _ in range(2):
            loop.poll(60)
    assert waits[0] == 0
    assert waits[1] > 0
    loop.close()


def test_draining_is_bounded(config: Config) -> None:
    now = [0.0]
    loop = PollLoop("kv", config, clock=lambda: now[0])
    loop.busy = True
    loop.stop()
    seen = []

    def work() -> float | None:
        seen.append(now[0])
        now[0] += 0.05
        return 0.0

    assert loop.run(work) == 0
    assert seen == pytest.approx([0.0, 0.05, 0.1, 0.15])


def test_work_runs_once_more_after_a_signal(config: Config) -> None:
    loop = PollLoop("kv", config)
    told: list[bool] = []

    def work() -> float | None:
        told.append(loop.stopping)
        loop.busy = told == [False, True]  # others still need it, as it finds after the stop request
        if len(told) == 1:
            loop.stop()  # as a handler does at any moment: here when `busy` has been decided on
        return 0.0

    assert loop.run(work) == process.EXIT_OK
    assert told == [False, True, True]


def test_a_second_signal_does_not_wait(config: Config) -> None:
    loop = PollLoop("kv", config)
    loop.busy = True

    def work() -> float | None:
        os.kill(os.getpid(), signal.SIGTERM)
        return 0.0

    assert loop.run(work) == 0


def test_a_fatal_error_is_not_exit_code_0(config: Config, caplog: pytest.LogCaptureFixture) -> None:
    def work() -> float | None:
        raise RuntimeError("broken")

    assert PollLoop("kv", config).run(work) == process.EXIT_FATAL
    assert "fatal error" in caplog.text
    loop = PollLoop("kv", config)
    assert loop.run(lambda: loop.quit(7)) == 7


def test_the_status_record_exists_while_the_stage_runs(config: Config) -> None:
    loop = PollLoop("kv", config)
    loop.progress = 5
    loop.poll(0)
    found = record(config, "kv")
    assert (found.pid, found.progress, found.ready, found.reason) == (os.getpid(), 5, False, "starting")
    assert found.alive
    loop.ready = True
    loop.tick()  # a change of readiness is not held back
    assert record(config, "kv").ready
    loop.close()
    assert list(paths.run_dir(config).glob("*.status")) == []
    # The lock file must never be removed while another process may hold it; a successor continues the counters.
    left = sorted(path.name for path in paths.arena_dir(config).glob("*"))
    assert left == ["kv.metrics", directory_lock.FILE_NAME]


def test_the_status_record_of_a_dead_process_is_marked(config: Config) -> None:
    loop = PollLoop("kv", config)
    loop.poll(0)
    path = paths.run_dir(config) / "kv.status"
    path.write_bytes(path.read_bytes().replace(b'"ticks":', b'"ticks":1'))
    assert not record(config, "kv").alive
    (path.parent / "torn.status").write_bytes(b'{"stage": "t')
    assert [found.stage for found in status.read_all(path.parent)] == ["kv"]
    loop.close()


def test_a_second_process_of_a_stage_is_refused(config: Config) -> None:
    loop = PollLoop("kv", config)
    with pytest.raises(ConfigError, match="already runs"):
        PollLoop("kv", config)
    loop.close()


def test_the_supervisor_receives_keepalives_and_allowances(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    read_end, write_end = os.pipe2(os.O_NONBLOCK)
    monkeypatch.setenv(process.KEEPALIVE_FD_VARIABLE, str(write_end))
    loop = PollLoop("kv", config)
    assert process.KEEPALIVE_FD_VARIABLE not in os.environ
    assert process.read_keepalives(read_end) == (STALL_MS, False)
    with loop.allow_stall(90):
        assert process.read_keepalives(read_end) == (90_000, False)
    assert process.read_keepalives(read_end) == (STALL_MS, False)
    assert process.read_keepalives(read_end) is None
    for _ in range(100_000):  # a supervisor that does not read costs nothing
        process.send_keepalive(write_end, process.KeepAlive(1, False))
    loop.close()
    os.close(read_end)
    os.close(write_end)


def test_systemd_is_notified_of_readiness_and_liveness(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(address)
        systemd.setblocking(False)
        monkeypatch.setenv("NOTIFY_SOCKET", address)
        monkeypatch.setenv("WATCHDOG_USEC", "2000000")
        now = [0.0]
        loop = PollLoop("kv", config, clock=lambda: now[0])

        def heard() -> list[bytes]:
            found = []
            while True:
                try:
                    found.append(systemd.recv(100))
                except BlockingIOError:
                    return found

        loop.tick()
        assert heard() == [b"WATCHDOG=1"]
        loop.ready = True
        loop.tick()
        loop.tick()
        assert heard() == [b"READY=1"]
        now[0] = 1.0
        loop.tick()
        assert heard() == [b"WATCHDOG=1"]
        loop.stop()
        drain_us = config.server.drain_timeout_ms * 1000
        (stopping,) = heard()
        assert stopping.startswith(b"STOPPING=1\nEXTEND_TIMEOUT_USEC=")
        assert int(stopping.partition(b"USEC=")[2]) >= drain_us + 20_000_000
        loop.close()


def test_descriptors_added_by_the_stage(config: Config) -> None:
    loop = PollLoop("kv", config)
    read_end, write_end = os.pipe()
    got: list[bytes] = []

    def ready() -> None:
        got.append(os.read(read_end, 10))
        loop.remove_fd(read_end)
        loop.remove_fd(read_end)
        loop.stop()

    loop.add_fd(read_end, ready)
    os.write(write_end, b"x")
    assert loop.run(lambda: 60.0) == 0
    assert got == [b"x"]
    os.close(read_end)
    os.close(write_end)


def test_close_leaves_no_descriptor_open(config: Config) -> None:
    PollLoop("kv", config).close()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        loop = PollLoop("kv", config)
        loop.bind("scheduler-kv", lambda peer, frame: None)
        loop.poll(0)
        loop.close()
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("heartbeat_ms", [100, 250])
def test_a_stage_in_steady_work_ticks_at_common_moments(config: Config, heartbeat_ms: int) -> None:
    """Unless its peers expect more heartbeats, something waits for a tick, or it starts or stops."""
    now = 100.0
    server = msgspec.structs.replace(config.server, heartbeat_ms=heartbeat_ms)
    loop = PollLoop("kv", msgspec.structs.replace(config, server=server), clock=lambda: now)
    try:
        loop.busy = loop.is_steady = True
        assert loop.tick_s == TICK_S, "it is not ready"
        loop.ready, loop.reason = True, ""
        steady_s = timer_coalescing.STEADY_ALIGN_S
        is_rare = heartbeat_ms == 250
        for _ in range(4):
            now += 0.07
            loop.tick()
            expected_s = timer_coalescing.until_aligned(now, steady_s, steady_s) if is_rare else TICK_S
            assert loop.tick_s == expected_s
        hub = loop.bind("scheduler-kv", lambda peer, frame: None)
        loop.tick()
        assert hub.liveness.is_steady == is_rare
        loop.mark_active()
        loop.tick()
        assert not hub.liveness.is_steady, "peers look for the work that has arrived when a heartbeat wakes them"
        assert loop.tick_s == TICK_S
        assert loop.tick_s == TICK_S
        loop.is_steady = True
        loop.stop()
        loop.tick()
        assert loop.tick_s == TICK_S
        assert not hub.liveness.is_steady
    finally:
        loop.close()


@pytest.mark.parametrize("was", ["steady", "idle"])
def test_peers_learn_soon_that_a_stage_stops(config: Config, was: str) -> None:
    """Those that stop, too, wait only `STOP_HEARTBEATS_S` for that before they count it as a stage that runs on."""
    now = 100.03
    server = msgspec.structs.replace(config.server, heartbeat_ms=250)
    loop = PollLoop("kv", msgspec.structs.replace(config, server=server), clock=lambda: now)
    try:
        loop.ready, loop.reason, loop.is_steady = True, "", was == "steady"
        loop.tick()
        if was == "idle":
            now += IDLE_AFTER_S
            loop.tick()
        assert loop._next_tick - now > TICK_S
        os.kill(os.getpid(), signal.SIGTERM)
        assert loop.stopping
        assert loop._next_tick - now <= TICK_S
    finally:
        loop.close()


def test_a_stage_that_stops_waits_for_a_peer_that_no_core_lets_report(config: Config) -> None:
    """The whole server may end: the peer, or what passes the signal on to it, may not have run since."""
    now = 100.0
    kv, scheduler = PollLoop("kv", config, clock=lambda: now), PollLoop("scheduler", config)
    try:
        hub = kv.bind("scheduler-kv", lambda peer, frame: None)
        scheduler.connect("scheduler-kv", lambda frame: None)

        def until(holds: Callable[[], object]) -> None:
            while not holds():
                scheduler.poll(0.005)
                kv.poll(0)

        until(lambda: hub.peers)
        without_core: set[int] = set()
        hub.liveness.is_runnable = without_core.__contains__
        kv.stop()
        now += STOP_HEARTBEATS_S - 0.01
        assert kv.serves_stopping_clients(hub)
        now += 0.02
        assert not kv.serves_stopping_clients(hub)
        for pid in (os.getpid(), *procfs.ancestors(os.getpid(), 2)):
            without_core.add(pid)
            assert kv.serves_stopping_clients(hub)
            without_core.clear()
        without_core.add(os.getpid())
        heard = hub.heartbeats
        until(lambda: hub.heartbeats > heard)
        assert not kv.serves_stopping_clients(hub), "it reports that it goes on"
        scheduler.stop()
        until(lambda: kv.serves_stopping_clients(hub))
    finally:
        scheduler.close()
        kv.close()


def test_a_stage_without_work_is_idle_until_it_progresses(config: Config) -> None:
    now = 100.0
    loop = PollLoop("kv", config, clock=lambda: now)
    try:
        loop.ready, loop.reason = True, ""
        loop.tick()
        assert (loop.is_idle, loop.tick_s) == (False, TICK_S)
        now += IDLE_AFTER_S + 0.1
        loop.tick()
        assert loop.is_idle and loop.heartbeat().idle
        assert loop.tick_s == timer_coalescing.until_aligned(now, timer_coalescing.IDLE_HEARTBEAT_S)
        loop.bind("gateway-kv", lambda peer, frame: None)
        assert loop.tick_s == timer_coalescing.until_aligned(now, timer_coalescing.ALIGN_S), (
            "the gateway, which derives readiness, receives it in time"
        )
        loop.mark_active()
        assert not loop.is_idle
        now += IDLE_AFTER_S + 0.1
        loop.tick()
        assert loop.is_idle
        for change in ("progress", "busy", "reason"):
            setattr(loop, change, {"progress": 5, "busy": True, "reason": "x"}[change])
            loop.tick()
            assert not loop.is_idle, change
            loop.busy = False
            now += IDLE_AFTER_S + 0.1
            loop.tick()
            assert loop.is_idle
    finally:
        loop.close()
