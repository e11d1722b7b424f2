"""Connections of clients that have left or do not read are ended; others are not."""

from __future__ import annotations

from pipeline.api.fair_shares import FairShares
from pipeline.ipc.tcp_transport import TcpState
from stages.gateway.http.connection_watch import (
    CHECK_S,
    MIN_BYTES,
    PROBE_AGAIN_S,
    PROBE_S,
    STALL_S,
    ConnectionWatch,
)
from stages.gateway.http.stream_backlogs import StreamBacklogs


class Wire:
    """A connection, its transport and its kernel state."""

    def __init__(self) -> None:
        self.is_half_closed = False
        self.is_busy = True
        self.n_probes = 0
        self.ended = ""
        self.n_waiting = 0
        self.state: TcpState | None = TcpState(False, 0)

    def probe(self) -> None:
        self.n_probes += 1

    def force_close(self) -> None:
        self.ended = "closed"

    def abort(self) -> None:
        self.ended = "aborted"

    def get_extra_info(self, name: str) -> None:
        return None

    def get_write_buffer_size(self) -> int:
        return self.n_waiting


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def watch_of(clock: Clock, *wires: Wire) -> ConnectionWatch:
    watch = ConnectionWatch(clock, lambda transport: transport.state)  # type: ignore[attr-defined]
    for wire in wires:
        watch.add(wire, wire)  # type: ignore[arg-type]
    return watch


def test_a_half_closed_connection_is_probed_until_its_answer_or_the_clients_reset() -> None:
    clock, waiting, left, done = Clock(), Wire(), Wire(), Wire()
    watch = watch_of(clock, waiting, left, done)
    for wire in (waiting, left, done):
        wire.is_half_closed = True
    done.is_busy = False
    watch.tick()
    assert [wire.ended for wire in (waiting, left, done)] == ["", "", "closed"]
    assert waiting.n_probes == 0
    clock.now += PROBE_S
    watch.tick()
    watch.tick()
    assert (waiting.n_probes, left.n_probes) == (1, 1)
    left.state = TcpState(True, 0)
    watch.tick()
    assert [wire.ended for wire in (waiting, left)] == ["", "aborted"]
    watch.remove(left)
    clock.now += PROBE_AGAIN_S
    waiting.state = None  # a kernel that does not report it
    watch.tick()
    assert (waiting.n_probes, waiting.ended) == (2, "")


def test_a_client_must_accept_some_bytes_in_time() -> None:
    clock, slow, stalled, idle = Clock(), Wire(), Wire(), Wire()
    watch = watch_of(clock, slow, stalled, idle)
    slow.n_waiting = stalled.n_waiting = 1000
    acknowledged = 0
    for _ in range(int(4 * STALL_S / CHECK_S)):
        clock.now += CHECK_S
        acknowledged += int(1.1 * MIN_BYTES / STALL_S * CHECK_S)
        slow.state = TcpState(False, acknowledged)
        watch.tick()
    assert [wire.ended for wire in (slow, stalled, idle)] == ["", "aborted", ""]


def test_without_kernel_state_the_waiting_bytes_decide() -> None:
    clock, shrinking, stalled = Clock(), Wire(), Wire()
    watch = watch_of(clock, shrinking, stalled)
    shrinking.state = stalled.state = None
    shrinking.n_waiting = stalled.n_waiting = 10 * MIN_BYTES
    watch.tick()
    clock.now += STALL_S + CHECK_S
    shrinking.n_waiting -= MIN_BYTES
    watch.tick()
    assert [wire.ended for wire in (shrinking, stalled)] == ["", "aborted"]


def test_a_connection_that_was_read_begins_again() -> None:
    clock, wire = Clock(), Wire()
    watch = watch_of(clock, wire)
    for _ in range(5):
        wire.n_waiting = 1000
        watch.tick()
        clock.now += STALL_S - CHECK_S
        watch.tick()
        wire.n_waiting = 0
        clock.now += CHECK_S
        watch.tick()
    assert wire.ended == ""


class Stream:
    def __init__(self, backlog: int) -> None:
        self.backlog = backlog
        self.reason = ""

    def drop(self, reason: str) -> None:
        self.reason = reason
        self.backlog = 0


def test_the_largest_backlogs_of_a_tenant_over_its_share_are_dropped() -> None:
    bounds = FairShares(100, 50, reserve=0)
    bounds.take("a", 10)  # a whole response
    backlogs = StreamBacklogs(bounds)
    mine, other = [Stream(n) for n in (5, 30, 20, 0)], Stream(40)
    contexts = [backlogs.counted(one, "a") for one in mine] + [backlogs.counted(other, "b")]
    for context in contexts:
        context.__enter__()
    backlogs.tick()
    assert [bool(one.reason) for one in mine] == [False, True, False, False]
    assert "server.response_buffer_mb" in mine[1].reason
    assert other.reason == ""
    other.backlog = 48
    bounds.take("c", 20)  # 10 + 5 + 20 + 48 + 20 > 100
    backlogs.tick()
    assert [bool(one.reason) for one in (*mine, other)] == [False, True, False, False, True]
    for context in contexts:
        context.__exit__(None, None, None)
    backlogs.tick()
