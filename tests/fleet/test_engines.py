"""Engines: what one leaves is ended, restarts have a bound, and files and metrics are read as they are."""

from __future__ import annotations

import asyncio
import itertools
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.catalog.entry import Entry, Source
from pipeline.config.load import resolve
from pipeline.config.schema import ModelConfig
from pipeline.errors import ConfigError, Conflict, ModelUnavailable
from pipeline.fleet.standby import MARK_VARIABLE
from stages.agent.cache.page_cache import resident_fraction
from stages.agent.engines.child import Child
from stages.agent.engines.fence import fence, processes_of, write_mark
from stages.agent.engines.interface import Capabilities, Engine, EngineDied, Queue
from stages.agent.engines.prometheus_text import values
from stages.agent.engines.starling_engine import engine_config
from stages.agent.placement import RESUME_S, Placement
from tests.fleet.coordination_stores import until

WAITING = "import signal, sys; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); sys.stdin.read()"


@pytest.fixture
def homes(tmp_path: Path) -> Iterator[dict[str, subprocess.Popen[str]]]:
    """A process of each of two homes, which ignores SIGTERM; one of the first is stopped."""
    begun = {}
    for name in ("mine", "stopped", "other"):
        home = tmp_path / ("home" if name != "other" else "home2")
        begun[name] = subprocess.Popen(
            [sys.executable, "-c", WAITING],
            env={**os.environ, "STARLING_HOME": str(home)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
    for process in begun.values():
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
    begun["stopped"].send_signal(signal.SIGSTOP)
    yield begun
    for process in begun.values():
        process.kill()
        process.communicate()


def test_what_a_home_has_left_is_killed_and_nothing_else(
    homes: dict[str, subprocess.Popen[str]], tmp_path: Path
) -> None:
    home = tmp_path / "home"
    mine = {homes["mine"].pid, homes["stopped"].pid}
    assert set(processes_of(home)) == mine
    arenas = tmp_path / "arenas"
    arenas.mkdir()
    (arenas / "m.kv").touch()
    assert fence(home, home / "run", arenas) == 2
    assert processes_of(home) == []
    assert not arenas.exists()
    assert homes["mine"].wait() == homes["stopped"].wait() == -signal.SIGKILL
    assert homes["other"].poll() is None
    assert fence(home, home / "run", arenas) == 0


def test_what_a_standby_engine_has_left_is_killed_by_its_mark(tmp_path: Path) -> None:
    home, marks = tmp_path / "home", (secrets.token_hex(16), secrets.token_hex(16))  # others run this test, too
    home.mkdir()
    code = "import sys; print('up', flush=True); sys.stdin.read()"
    begun = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            env={**os.environ, "STARLING_HOME": str(tmp_path), MARK_VARIABLE: mark},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        for mark in marks
    ]
    try:
        for process in begun:
            assert process.stdout is not None
            assert process.stdout.readline() == b"up\n"
        assert processes_of(home) == []
        write_mark(home, "")  # names no process
        assert processes_of(home) == []
        write_mark(home, marks[0])
        assert processes_of(home) == [begun[0].pid]
        assert fence(home, home / "run", tmp_path / "arenas") == 1
        assert begun[0].wait() == -signal.SIGKILL
        assert begun[1].poll() is None
    finally:
        for process in begun:
            process.kill()
            process.communicate()


async def test_a_child_that_ends_has_said_why(tmp_path: Path) -> None:
    code = "import sys; print('12:00 ERROR worker  no such file'); print('stopped'); print('x' * 100000); sys.exit(78)"
    child = Child((sys.executable, "-c", code), os.environ, tmp_path)
    await child.start()
    assert await child.wait() == 78
    assert await child.last_words_at_end() == "12:00 ERROR worker  no such file"
    await child.stop(1.0)


async def test_a_child_that_ignores_the_signal_is_killed(tmp_path: Path) -> None:
    child = Child((sys.executable, "-c", WAITING.replace("sys.stdin.read()", "signal.pause()")), os.environ, tmp_path)
    await child.start()
    await until(lambda: "up" in child.lines)
    assert child.is_running
    await child.stop(0.1)
    assert await child.wait() == -signal.SIGKILL
    await child.stop(0.1)


async def test_a_program_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="/nothing cannot be run"):
        await Child(("/nothing",), os.environ, tmp_path).start()


# ------------------------------------------------------------------ restarts


class Failing(Engine):
    """An engine that ends as the test says."""

    adapter = "failing"
    capabilities = Capabilities("f16", 1)

    def __init__(self, error: EngineDied) -> None:
        self.error = error
        self.stops = 0

    async def start(self) -> None:
        self.url = "http://nowhere"

    async def ready(self) -> None:
        raise self.error

    async def ended(self) -> EngineDied:
        return self.error

    async def queue(self) -> Queue:
        return Queue()

    async def suspend(self) -> None:
        return

    async def resume(self) -> None:
        return

    async def stop(self, *, at_once: bool = False) -> None:
        self.stops += 1


ENTRY = Entry(
    name="m",
    digest="0" * 64,
    source=Source(file="m.gguf", bytes=1, title="m", architecture="llama", parameters=1),
    index_sha256="0" * 64,
    index_bytes=1,
    weights_bytes=1,
    weights_checksum="0" * 16,
    part_bytes=1 << 23,
    published=0,
)


@pytest.mark.parametrize(("is_final", "starts"), [(True, 1), (False, 16)])
async def test_an_engine_that_never_answers_is_given_up_with_the_reason(is_final: bool, starts: int) -> None:
    made: list[Failing] = []
    waits: list[float] = []

    async def bring(placement: Placement) -> None:
        return

    def make(entry: Entry, arriving: Path | None) -> Failing:
        made.append(Failing(EngineDied("no memory", is_final)))
        return made[-1]

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    placement = Placement(ENTRY, bring, make, lambda: True, sleep=sleep, jitter=lambda: 0.5)
    with pytest.raises(EngineDied, match="no memory"):
        await placement.wait()
    assert len(made) == starts
    assert all(one.stops == 1 for one in made)
    assert waits == sorted(waits)
    assert placement.state == "FAILED"
    await placement.stop()


class Busy(Failing):
    """An engine that is ready, and whose queue the test sets."""

    def __init__(self) -> None:
        super().__init__(EngineDied(""))
        self.has = Queue()

    async def ready(self) -> None:
        return

    async def ended(self) -> EngineDied:
        await asyncio.Event().wait()
        raise AssertionError

    async def queue(self) -> Queue:
        return self.has


async def test_a_model_with_requests_is_not_idle() -> None:
    engine = Busy()

    async def bring(placement: Placement) -> None:
        return

    placement = Placement(ENTRY, bring, lambda entry, arriving: engine, lambda: True)
    await placement.wait()
    await placement.check_idle()
    for engine.has in (Queue(running=1), Queue(waiting=2)):
        with pytest.raises(Conflict, match="has [12] requests"):
            await placement.check_idle()
    engine.has = Queue(submitted=7)
    await placement.check_idle()
    engine.queue = silent  # type: ignore[method-assign]
    with pytest.raises(Conflict, match="does not answer"):  # it may have some
        await placement.check_idle()
    await placement.stop()


async def silent() -> Queue:
    raise EngineDied("no answer")


class Mortal(Busy):
    """An engine that ends, and answers calls, when the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.dies, self.may_answer = asyncio.Event(), asyncio.Event()
        self.is_called = False

    async def ended(self) -> EngineDied:
        await self.dies.wait()
        return EngineDied("killed")

    async def queue(self) -> Queue:
        await self._call()
        return Queue(running=1)

    async def suspend(self) -> None:
        await self._call()
        raise EngineDied("it does not answer")

    async def _call(self) -> None:
        self.is_called = True
        await self.may_answer.wait()


async def replaced(call: Callable[[Placement], Awaitable[None]]) -> tuple[Placement, Mortal]:
    """A placement whose first engine has been asked by `call`, and answers when the second one is ready; both."""
    made: list[Mortal] = []

    async def bring(placement: Placement) -> None:
        return

    def make(entry: Entry, arriving: Path | None) -> Mortal:
        made.append(Mortal())
        return made[-1]

    placement = Placement(ENTRY, bring, make, lambda: True, jitter=lambda: 0.0)
    await placement.wait()
    caller = asyncio.create_task(call(placement))
    await until(lambda: made[0].is_called)
    made[0].dies.set()
    await until(lambda: len(made) == 2 and placement.state == "READY")
    made[0].may_answer.set()
    await caller
    return placement, made[1]


async def test_an_engine_that_could_not_be_suspended_is_ended_and_not_its_successor() -> None:
    placement, successor = await replaced(Placement.close)
    assert (placement.state, successor.stops) == ("READY", 0)
    await placement.stop()


class Late(Busy):
    """An engine for which the first calls to resume come late."""

    def __init__(self) -> None:
        super().__init__()
        self.resumes = 0

    async def resume(self) -> None:
        self.resumes += 1
        if self.resumes < 4:
            raise EngineDied("it does not answer")


@pytest.mark.parametrize("lasts", [True, False])
async def test_an_engine_that_is_slow_to_resume_is_ended_only_without_a_lease(lasts: bool) -> None:
    engine, is_valid = Late(), True

    async def bring(placement: Placement) -> None:
        return

    async def sleep(seconds: float) -> None:
        nonlocal is_valid
        is_valid = lasts

    placement = Placement(ENTRY, bring, lambda entry, arriving: engine, lambda: is_valid, sleep=sleep)
    await placement.wait()
    await placement.open()
    assert (engine.resumes, engine.stops) == ((4, 0) if lasts else (1, 1))
    await placement.stop()


async def test_an_engine_that_does_not_resume_is_ended_after_a_while() -> None:
    engine, now = Late(), [0.0]
    engine.resumes = -1000

    async def bring(placement: Placement) -> None:
        return

    async def sleep(seconds: float) -> None:
        now[0] += 1.0

    placement = Placement(ENTRY, bring, lambda entry, arriving: engine, lambda: True, sleep=sleep, clock=lambda: now[0])
    await placement.wait()
    await placement.open()
    assert (now[0], engine.stops) == (RESUME_S, 1)
    await placement.stop()


async def test_requests_of_an_engine_that_has_ended_do_not_count() -> None:
    placement, successor = await replaced(Placement.measure)
    assert placement.queue == Queue()
    successor.may_answer.set()
    await placement.measure()
    assert placement.queue == Queue(running=1)
    await placement.stop()


async def test_a_load_that_is_ended_tells_its_callers() -> None:
    begun = asyncio.Event()

    async def bring(placement: Placement) -> None:
        begun.set()
        await asyncio.Event().wait()

    placement = Placement(ENTRY, bring, lambda entry, arriving: Failing(EngineDied("")), lambda: True)
    caller = asyncio.create_task(placement.wait())
    await until(begun.is_set)
    await placement.stop()
    with pytest.raises(ModelUnavailable, match="unloaded meanwhile"):
        await caller
    await placement.stop()


# ------------------------------------------------------------------ parts


def test_an_engine_gets_the_agents_settings_and_no_secrets_of_others() -> None:
    config = resolve(
        {
            "server": {"port": 8080, "run_dir": "/somewhere", "max_body_mb": 2},
            "auth": {"api_keys": ["sk-of-a-client"]},
            "scheduler": {"tenant_weights": {"key-1": 2.0}},
            "fleet": {"agent": {"host": "127.0.0.2"}},
        },
        {},
    )
    engine = engine_config(config, ModelConfig(name="m", path="/x/y.idx"), Path("/run/e"), 4711, "sk-engine")
    assert (engine.server.host, engine.server.port, engine.server.run_dir) == ("127.0.0.2", 4711, "/run/e")
    assert engine.server.max_body_mb == 2
    assert [key.key for key in engine.auth.api_keys] == ["sk-engine"]
    assert [model.name for model in engine.models] == ["m"]


@pytest.mark.parametrize(("setting", "expected"), [("auto", 0), (2, 2)])
def test_an_engine_takes_no_core_from_ranks_unless_told_to(setting: int | str, expected: int) -> None:
    """The first core of the host may be another engine's."""
    config = resolve({"performance": {"control_cores": setting}}, {})
    engine = engine_config(config, ModelConfig(name="m", path="/x/y.idx"), Path("/run/e"), 4711, "sk-engine")
    assert engine.performance.control_cores == expected


def test_the_page_cache_is_asked_about_a_file(tmp_path: Path) -> None:
    path = tmp_path / "m.bin"
    path.write_bytes(b"x" * (9 << 20))
    assert resident_fraction(path) > 0.5
    path.write_bytes(b"")
    assert resident_fraction(path) == 0.0
    assert resident_fraction(tmp_path / "nothing") == 0.0


def test_values_of_metrics_are_added_up() -> None:
    text = '# HELP a A.\na{m="x y"} 1.5\na{m="z"} 2\nb 3\nbroken\nc nan\n{} 4\n'
    assert values(text) == {"a": 3.5, "b": 3.0}
    assert values('a{m="x\u2028y\x85 5"} 1.5\n') == {"a": 1.5}, "only a newline ends a line"


@given(st.text())
def test_any_text_has_values(text: str) -> None:
    assert all(isinstance(value, float) for value in values(text).values())


async def test_an_engine_of_a_model_that_is_placed_again_has_its_own_number() -> None:
    numbers = itertools.count(1).__next__

    async def bring(placement: Placement) -> None:
        return

    for number in (1, 2):
        placement = Placement(ENTRY, bring, lambda entry, arriving: Busy(), lambda: True, next_incarnation=numbers)
        await placement.wait()
        assert placement.incarnation == number
        await placement.stop()
