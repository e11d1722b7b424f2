"""Connections that never send a request are closed; those that have sent one are not."""

from __future__ import annotations

from stages.gateway.http.idle_connections import FIRST_HEAD_S, IdleConnections


class Connection:
    def __init__(self) -> None:
        self.is_open = True

    def force_close(self) -> None:
        self.is_open = False


def test_only_silent_connections_are_closed() -> None:
    now = 100.0
    connections = IdleConnections(lambda: now)
    silent, talking, late = Connection(), Connection(), Connection()
    connections.head_received(talking)
    assert connections.sweep([silent, talking]) == 0
    now += FIRST_HEAD_S
    assert connections.sweep([silent, talking, late]) == 0
    now += 1.5
    assert connections.sweep([silent, talking, late]) == 1
    assert [silent.is_open, talking.is_open, late.is_open] == [False, True, True]
    connections.head_received(late)
    now += 10 * FIRST_HEAD_S
    assert connections.sweep([talking, late]) == 0


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
