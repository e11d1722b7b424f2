"""Ages survive every change of the system's clock and every restart; after a reboot no age is negative."""

from __future__ import annotations

import os
from pathlib import Path
from tempfile import TemporaryDirectory

from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.runtime import steady_clock
from pipeline.runtime.steady_clock import SteadyClock, clock_path, read_boot_id, read_ns

S = 1_000_000_000


class Machine:
    """A machine whose clocks belong to the test."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.wall = 1_700_000_000 * S
        self.since_boot = 100 * S
        self.boot = "boot-1"

    def start(self) -> SteadyClock:
        return SteadyClock(self.path, lambda: self.wall, lambda: self.since_boot, lambda: self.boot)

    def sleep(self, seconds: int) -> None:
        self.wall += seconds * S
        self.since_boot += seconds * S


Events = st.lists(
    st.one_of(
        st.tuples(st.just("jump"), st.integers(-(10**9), 10**9)),
        st.tuples(st.just("sleep"), st.integers(0, 10**6)),
        st.tuples(st.just("restart"), st.just(0)),
    ),
    max_size=20,
)


@settings(deadline=None, max_examples=60)
@given(Events)
def test_no_jump_and_no_restart_changes_an_age(events: list[tuple[str, int]]) -> None:
    with TemporaryDirectory() as name:
        machine = Machine(Path(name) / "clock" / "kv.json")
        clock = machine.start()
        begun, slept = clock.ns(), 0
        assert begun == machine.wall
        for kind, seconds in events:
            if kind == "jump":
                machine.wall += seconds * S
            elif kind == "sleep":
                machine.sleep(seconds)
                slept += seconds
            else:
                clock = machine.start()
            assert clock.ns() - begun == slept * S
            assert abs(clock.seconds() - clock.ns() / S) < 1e-3


def test_after_a_reboot_the_system_clock_counts_but_not_backwards(tmp_path: Path) -> None:
    machine = Machine(tmp_path / "kv.json")
    before = machine.start().ns()
    machine.boot, machine.since_boot = "boot-2", 5 * S
    machine.wall += 3600 * S  # it was off for an hour
    assert machine.start().ns() - before == 3600 * S
    machine.boot = "boot-3"
    machine.wall = 0  # a machine without a battery
    clock = machine.start()
    assert clock.ns() - before == 3600 * S
    machine.sleep(10)
    machine.wall = 1_900_000_000 * S  # set by NTP
    assert machine.start().ns() - before == 3610 * S


def test_a_damaged_or_missing_file_and_one_that_cannot_be_written(tmp_path: Path) -> None:
    machine = Machine(tmp_path / "d" / "kv.json")
    machine.start()
    for raw in (b"", b"{", b"\xff" * 5000, b'{"boot": 1}'):
        machine.path.write_bytes(raw)
        assert machine.start().ns() == machine.wall
    (tmp_path / "file").touch()
    machine.path = tmp_path / "file" / "kv.json"
    assert machine.start().ns() == machine.wall


def test_another_process_reads_the_time(tmp_path: Path) -> None:
    path = clock_path(tmp_path, "kv")
    assert abs(read_ns(path) - steady_clock.time.time_ns()) < 10 * S
    clock = SteadyClock(path, wall_ns=lambda: 5_000_000_000 * S)
    assert abs(read_ns(path) - clock.ns()) < 10 * S
    assert read_boot_id()
    assert os.listdir(path.parent) == ["kv.json"]
