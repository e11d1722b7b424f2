"""A fault happens at its event and nowhere else; without a plan there is no trigger."""

import errno
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.errors import ConfigError
from pipeline.faults import plan, points
from pipeline.faults.plan import (
    POINTS,
    Fault,
    build_trigger,
    install,
    parse,
    read_armed,
    read_installed,
    read_strike,
)
from shm.arena import process_ticks


def test_the_documented_plan_is_parsed() -> None:
    text = "worker:exit@step=17, kv:stop@page=3, wire:drop@gateway>scheduler:5, disk:enospc@spill"
    assert parse(text) == [
        Fault("worker", "exit", "step", 17),
        Fault("kv", "stop", "page", 3),
        Fault("wire", "drop", "gateway>scheduler", 5),
        Fault("disk", "enospc", "spill", 0),
    ]


@pytest.mark.parametrize("text", ["worker", "worker:melt@step=1", "worker:exit@step=x", "a:exit@"])
def test_a_plan_that_cannot_be_read_names_the_part(text: str) -> None:
    with pytest.raises(ConfigError, match="STARLING_FAULTS"):
        parse(text)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("wurker:exit@step=1", "no place 'wurker'; there are worker, kv, gateway, scheduler, wire, disk"),
        ("worker:exit@stepp=1", "worker has no point 'stepp'; it has step"),
        ("disk:enospc@spil", "disk has no point 'spil'; it has spill, saved"),
        ("kv:exit@page=1, wire:drop@gateway>worker:5", "wire has no point 'gateway>worker'"),
        ("worker:exit@step=0", "events are counted from 1"),
        ("worker:exit@step", "which one"),
        ("wire:drop@gateway>scheduler", "which one"),
        ("disk:slow@spill", "milliseconds"),
        ("kv:drop@page=3", "drop is an action of wire only"),
        ("worker:enospc@step=3", "enospc is an action of disk only"),
        ("scheduler:exit(1.2)@queued=1", "exit is not an action on other processes"),
    ],
)
def test_a_fault_that_could_never_happen_is_refused(text: str, reason: str) -> None:
    """A test with such a plan would pass without having tested anything."""
    with pytest.raises(ConfigError) as refused:
        parse(text)
    assert reason in refused.value.message
    assert text.rpartition(", ")[2] in refused.value.message


def test_the_documented_points_exist_in_the_code() -> None:
    root = Path(points.__file__).parents[2]
    named = {("kv", "page")}
    for path in (path for part in ("pipeline", "stages") for path in (root / part).rglob("*.py")):
        source = path.read_text()
        named.update(re.findall(r'= points\.fault_point\("(\w+)", "(\w+)"\)', source))
        for argument in set(re.findall(r"points\.DiskPoints\((.+?)\)", source)):
            files = ("spill", "saved") if argument == "name" else (argument.strip('"'),)
            for operation in set(re.findall(r"\.(write|read|open|sync|rename|unlink)\.(?:hit|trigger)", source)):
                named.update(("disk", name if operation == "write" else f"{name}_{operation}") for name in files)
    known = {(place, point) for place, names in POINTS.items() if place != "wire" for point in names}
    assert named == known


def test_without_a_fault_there_is_no_trigger() -> None:
    assert build_trigger("worker", "step", "", env={}) is None
    assert build_trigger("worker", "step", "kv:exit@page=1", env={}) is None
    assert build_trigger("worker", "step", "worker:exit@step=1", env={"STARLING_RESTARTS": "2"}) is None


def test_drops_happen_once_and_disk_faults_always() -> None:
    drop = build_trigger("wire", "gateway>scheduler", "wire:drop@gateway>scheduler:2", env={})
    assert drop is not None
    assert [drop(n) for n in (1, 2, 3)] == [False, True, False]
    full = build_trigger("disk", "spill", "disk:enospc@spill", env={})
    assert full is not None
    for n in (1, 2):
        with pytest.raises(OSError) as caught:
            full(n)
        assert caught.value.errno == errno.ENOSPC


@pytest.mark.parametrize(("action", "code"), [("exit", 1), ("kill", -signal.SIGKILL), ("segv", -signal.SIGSEGV)])
def test_fatal_faults_end_the_process_at_their_event(action: str, code: int) -> None:
    script = (
        "from pipeline.faults.points import fault_point\n"
        "fault = fault_point('worker', 'step')\n"
        "for n in range(1, 4): print(n, flush=True); fault.trigger(n)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "STARLING_FAULTS": f"worker:{action}@step=2", "STARLING_RESTARTS": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == code
    assert ended.stdout.split() == ["1", "2"]


def test_a_slow_disk_waits_and_works() -> None:
    slept: list[float] = []
    slow = build_trigger("disk", "spill_read", "disk:slow@spill_read=250", env={}, sleep=slept.append)
    assert slow is not None
    assert [slow(1), slow(2)] == [False, False]
    assert slept == [0.25, 0.25]


def test_a_running_server_follows_the_plan_while_its_installer_lives(tmp_path: Path) -> None:
    path = tmp_path / points.FILE
    follower = points.LivePlanFollower(tmp_path)
    point = points.fault_point("disk", "quotas")
    try:
        follower.poll()
        assert point.trigger is None
        install(path, "disk:enospc@quotas")
        follower.poll()
        assert point.trigger is not None
        with pytest.raises(OSError, match="No space left"):
            point.trigger(1)
        # A point that is created meanwhile follows the plan, too.
        assert points.fault_point("disk", "other").trigger is None
        path.unlink()
        follower.poll()
        assert point.trigger is None
        # When the process that installed the plan has ended, the fault and the file are removed.
        author = (
            "from pathlib import Path; from pipeline.faults.plan import install; install(Path({!r}), 'disk:eio@spill')"
        )
        subprocess.run([sys.executable, "-c", author.format(str(path))], check=True)
        assert path.exists()
        follower.poll()
        assert point.trigger is None
        assert not path.exists()
    finally:
        path.unlink(missing_ok=True)
        follower.poll()


def test_a_fault_that_names_processes_happens_once_and_leaves_its_record(tmp_path: Path) -> None:
    path = tmp_path / points.FILE
    follower = points.LivePlanFollower(tmp_path)
    queued, prefill = (points.fault_point("scheduler", name) for name in ("queued", "prefill"))
    script = "import sys; sys.stdin.read()"
    victims = [subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE) for _ in range(3)]
    named = [f"{victim.pid}.{process_ticks(victim.pid)}" for victim in victims]
    recycled = f"{victims[2].pid}.1"  # a pid that now is another process's
    plan = f"scheduler:kill({named[0]}+{named[1]}+{recycled})@prefill=2"
    try:
        install(path, plan)
        assert (read_armed(tmp_path), read_strike(tmp_path)) == (set(), None)
        follower.poll()
        assert read_armed(tmp_path) == {os.getpid()}
        queued.count("a", "x")
        prefill.count("a", "first")
        prefill.count("b", "another sequence has its own numbers")
        assert [victim.poll() for victim in victims] == [None, None, None]
        prefill.count("a", "second")
        assert [victim.wait(60) for victim in victims[:2]] == [-signal.SIGKILL, -signal.SIGKILL]
        assert victims[2].poll() is None
        strike = read_strike(tmp_path)
        assert strike is not None
        assert strike[:5] == (plan, "scheduler@prefill", 2, "second", os.getpid())
        assert not path.exists()
        prefill.count("b")
        assert read_strike(tmp_path) == strike
        # A process that still follows the plan when another one has performed it.
        assert prefill.trigger is not None
        follower.poll()
        assert prefill.trigger is None
        install(path, f"scheduler:kill({named[2]})@prefill=1")
        assert read_strike(tmp_path) is None
        follower.poll()
        path.unlink()
        prefill.count("c")
        assert victims[2].poll() is None
    finally:
        path.unlink(missing_ok=True)
        follower.poll()
        for victim in victims:
            victim.kill()
            victim.communicate()


def test_an_invalid_installed_plan_is_ignored(tmp_path: Path) -> None:
    path = tmp_path / points.FILE
    for raw in (b"", b"x", b"1", b"\xff\xfe\n", f"{os.getpid()} 1\ndisk:enospc@spill".encode()):
        path.write_bytes(raw)
        assert read_installed(path) == ""
    with pytest.raises(ConfigError):
        install(path, "disk:melt@spill")


def test_without_a_plan_the_plan_module_is_not_imported() -> None:
    script = (
        "import sys\n"
        "import pipeline.ipc.endpoint, pipeline.runtime.stage_runtime\n"
        "import stages.kv.stage, stages.gateway.stage, stages.worker.stage\n"
        "from pathlib import Path\n"
        "from pipeline.faults import points\n"
        "assert points.fault_point('disk', 'spill').trigger is None\n"
        "points.LivePlanFollower(Path('/nonexistent')).poll()\n"
        "sys.exit('pipeline.faults.plan' in sys.modules)\n"
    )
    env = {name: value for name, value in os.environ.items() if name != "STARLING_FAULTS"}
    assert subprocess.run([sys.executable, "-c", script], env=env, check=False).returncode == 0


def test_a_target_that_ends_with_the_one_before_it_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends after its start time was read: the process that strikes answers a request, and goes on."""
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait(60)
    monkeypatch.setattr(plan, "process_ticks", lambda pid: 7)
    path, follower = tmp_path / points.FILE, points.LivePlanFollower(tmp_path)
    point = points.fault_point("scheduler", "queued")
    try:
        install(path, f"scheduler:kill({gone.pid}.7)@queued=1")
        follower.poll()
        point.count("a", "x")
        assert read_strike(tmp_path) is not None
    finally:
        path.unlink(missing_ok=True)
        follower.poll()
