"""A connection that says nothing is closed; one that has asked something never is."""

from __future__ import annotations

from stages.gateway.http.idle_connections import FIRST_HEAD_S, Connections


class Connection:
    def __init__(self) -> None:
        self.is_open = True

    def force_close(self) -> None:
        self.is_open = False


def test_only_the_silent_ones_are_closed() -> None:
    now = 100.0
    connections = Connections(lambda: now)
    silent, talking, late = Connection(), Connection(), Connection()
    connections.heard(talking)
    assert connections.sweep([silent, talking]) == 0
    now += FIRST_HEAD_S
    assert connections.sweep([silent, talking, late]) == 0
    now += 1.5
    assert connections.sweep([silent, talking, late]) == 1
    assert [silent.is_open, talking.is_open, late.is_open] == [False, True, True]
    connections.heard(late)
    now += 10 * FIRST_HEAD_S
    assert connections.sweep([talking, late]) == 0


def test_what_is_closed_is_forgotten_and_sweeps_are_rare() -> None:
    now = 100.0
    connections = Connections(lambda: now)
    connections.heard(Connection())
    connections.sweep([])
    assert not connections._since
    looked: list[int] = []
    now += 0.5

    def live() -> list[Connection]:
        looked.append(1)
        return []

    assert connections.sweep(iter(live() for _ in range(1))) == 0  # type: ignore[arg-type]
    assert not looked
