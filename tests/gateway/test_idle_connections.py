"""Connections that never send a request are closed; those that have sent one are not."""

from __future__ import annotations

import math

from stages.gateway.http.idle_connections import HEAD_S, IdleConnections


class Connection:
    def __init__(self) -> None:
        self.is_open = True
        self.head_since = math.inf

    def force_close(self) -> None:
        self.is_open = False


def test_only_silent_connections_are_closed() -> None:
    now = 100.0
    connections = IdleConnections(lambda: now)
    silent, talking, late = Connection(), Connection(), Connection()
    connections.head_received(talking)
    assert connections.sweep([silent, talking]) == 0
    now += HEAD_S
    assert connections.sweep([silent, talking, late]) == 0
    now += 1.5
    assert connections.sweep([silent, talking, late]) == 1
    assert [silent.is_open, talking.is_open, late.is_open] == [False, True, True]
    connections.head_received(late)
    now += 10 * HEAD_S
    assert connections.sweep([talking, late]) == 0
    talking.head_since = now  # begins another head, and does not finish it
    now += HEAD_S
    assert connections.sweep([talking, late]) == 0
    now += 1.5
    assert connections.sweep([talking, late]) == 1
    assert [talking.is_open, late.is_open] == [False, True]


def test_closed_connections_are_forgotten_and_sweeps_are_rare() -> None:
    now = 100.0
    connections = IdleConnections(lambda: now)
    connections.head_received(Connection())
    connections.sweep([])
    assert not connections._since
    looked: list[int] = []
    now += 0.5

    def live() -> list[Connection]:
        looked.append(1)
        return []

    assert connections.sweep(iter(live() for _ in range(1))) == 0  # type: ignore[arg-type]
    assert not looked
