"""A model with two worker groups behind one scheduler: the bytes of one group, whatever dies.

Both groups compute; their ranks, the scheduler and both groups at once are killed in streams.  No page is lost, every
request ends once, and reloading and unloading include all groups.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.observe.status import read_all
from shm import words
from shm.step_ring import DONE, attach_steps
from shm.step_rings import ring_path
from starling.cli.reload import change, gone
from tests.e2e.command import starling
from tests.e2e.comparison import comparable
from tests.e2e.conftest import share_caches
from tests.e2e.resumable import wait_answering
from tests.e2e.server import Server, poll_until, wait_gone
from tests.e2e.traffic import Traffic
from tests.emulated_machine import memory_nodes
from tools.tiny_gguf import SHAPES, write_model

pytestmark = pytest.mark.slow

SMALL = SHAPES["small"]._replace(context_length=4096)
PROMPT = [5 + i % 90 for i in range(300)]
MIX: list[dict[str, Any]] = [
    {"prompt": PROMPT, "max_tokens": 200, "n": 3, "seed": 1, "temperature": 0.9, "logprobs": 2},
    {"prompt": [*PROMPT[:200], 7, 8], "max_tokens": 250, "seed": 2, "temperature": 0.7, "frequency_penalty": 0.5},
    {"prompt": [9], "max_tokens": 300, "n": 2, "seed": 3, "temperature": 1.1, "top_p": 0.9},
    {"prompt": PROMPT[:37], "max_tokens": 150, "seed": 4, "temperature": 0.0, "speculate": 4},
]
TOKENS = sum(body["max_tokens"] * body.get("n", 1) for body in MIX)
GROUPS = ("worker-tiny", "worker-tiny~1")


def server_of(home: Path, groups: int | str, ranks: int = 1, **environment: str) -> Server:
    share_caches(home)
    path = write_model(home / "tiny.gguf", SMALL, seed=1)
    model = {"name": "tiny", "path": str(path), "kv_cache_mb": 8, "ranks": ranks}
    performance = {"worker_groups": groups, "weight_copies": "always"}  # of one node none are made
    return Server(home, {"models": [model], "performance": performance}, environment)


def wait_groups(server: Server) -> None:
    """Until both groups are attached: the server is ready while one is."""
    server.wait_metrics("starling_stage_ready", lambda found: all(found.get(f'stage="{one}"') == 1.0 for one in GROUPS))


class Mix:
    """The streams of MIX at once. `seen` is set when half of their tokens have come."""

    def __init__(self, server: Server) -> None:
        self.half = threading.Event()
        self._server = server
        self._events: list[list[dict[str, Any]]] = [[] for _ in MIX]
        self._seen = 0
        self._threads = [threading.Thread(target=self._run, args=(place,), daemon=True) for place in range(len(MIX))]
        for thread in self._threads:
            thread.start()

    def _run(self, place: int) -> None:
        for event in self._server.stream("/v1/generate", ignore_eos=True, **MIX[place]):
            self._events[place].append(event)
            self._seen += len(event.get("tokens", ()))
            if self._seen >= TOKENS // 2:
                self.half.set()

    def result(self) -> list[str]:
        """What each client received; every choice has one end."""
        for thread in self._threads:
            thread.join(300)
            assert not thread.is_alive()
        return [comparable(events) for events in self._events]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Of a server with one group."""
    with server_of(tmp_path_factory.mktemp("one"), 1) as server:
        found = Mix(server).result()
        assert not (server.arenas / "tiny.groups").exists()
        server.stop()
        return found


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with server_of(tmp_path_factory.mktemp("two"), 2) as server:
        wait_groups(server)
        yield server
        server.stop()
        assert server.leftovers() == []
        assert server.pids() == {}


def steps_done(server: Server) -> list[int]:
    """Steps that each group has acknowledged since its ring was made."""
    found = []
    for ring in range(2):
        arena, steps, _ = attach_steps(ring_path(server.arenas / "tiny.steps", ring))
        found.append(int(words.load(steps.control, DONE)))
        arena.close()
    return found


def check_pages(server: Server) -> None:
    """No page is leased without a request, and none is lost."""
    server.wait_metrics("starling_kv_cache_pages", lambda found: found['model="tiny",state="leased"'] == 0)
    starling(server, "kv", "check")


def test_two_groups_give_the_bytes_of_one(server: Server, expected: list[str]) -> None:
    before = steps_done(server)
    assert Mix(server).result() == expected
    assert all(done > begun for done, begun in zip(steps_done(server), before, strict=True)), "both groups compute"
    check_pages(server)
    lines = starling(server, "status").splitlines()
    assert [line.split()[0] for line in lines if line.startswith("worker")] == list(GROUPS)
    wait_groups(server)


@pytest.mark.parametrize("killed", [GROUPS[:1], GROUPS[1:], GROUPS, ("scheduler",), ("scheduler", GROUPS[1])])
def test_a_death_in_the_streams_changes_no_byte(server: Server, expected: list[str], killed: tuple[str, ...]) -> None:
    pids = [server.pid_of(stage) for stage in killed]
    mix = Mix(server)
    assert mix.half.wait(300)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    assert mix.result() == expected
    assert all(wait_gone(pid) for pid in pids)
    for stage in killed:
        server.pid_of(stage)
    wait_answering(server)
    check_pages(server)
    assert Mix(server).result() == expected


def test_a_stopped_group_is_killed_before_a_new_scheduler_gives_its_pages_to_others(
    server: Server, expected: list[str]
) -> None:
    """The group cannot say whether it is in a step: nothing is granted before it has ended."""
    mix = Mix(server)
    assert mix.half.wait(300)
    stopped, scheduler = server.pid_of(GROUPS[1]), server.pid_of("scheduler")
    since = len(server.output)
    os.kill(stopped, signal.SIGSTOP)
    os.kill(scheduler, signal.SIGKILL)
    assert mix.result() == expected
    assert wait_gone(stopped)
    server.wait_output("worker group is fenced", since=since)
    check_pages(server)


def workers(server: Server) -> set[str]:
    return {one.stage for one in read_all(server.home / "run") if one.stage.startswith("worker") and one.alive}


def test_reload_and_unload_with_two_groups(server: Server) -> None:
    run = server.home / "run"
    with Traffic(server, 3) as traffic:
        state = change(run, "reload", "tiny", 180.0, path="")
        gone(run, state, float("inf"))
    assert not traffic.faults
    assert traffic.streams
    poll_until(lambda: workers(server) == {"worker-tiny@1", "worker-tiny@1~1"})
    kinds = ("kv", "steps", "act", "groups")
    expected = {*(f"tiny@1.{kind}" for kind in kinds), "tiny@1~1.steps", "tiny@1~1.act"}

    def names() -> set[str]:
        return {path.name for path in server.arenas.iterdir() if path.name.rpartition(".")[2] in kinds}

    # The version serves as soon as one group is attached; the arenas of the other one may come later.
    poll_until(lambda: names() == expected, names)
    gone(run, change(run, "unload", "tiny", 180.0, path=""), float("inf"))
    poll_until(lambda: not workers(server))
    poll_until(lambda: not [path.name for path in server.arenas.iterdir() if path.name.startswith("tiny")])
    poll_until(lambda: not [path.name for path in run.iterdir() if path.name.startswith("worker-tiny")])


def test_a_group_for_each_memory_node_with_more_ranks_than_cores(tmp_path: Path, expected: list[str]) -> None:
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) < 2:
        pytest.skip("a node needs a CPU")
    nodes = memory_nodes(tmp_path / "nodes", {0: str(cpus[0]), 1: ",".join(map(str, cpus[1:]))})
    with server_of(tmp_path, "auto", ranks=1, STARLING_NODES=str(nodes)) as server:
        wait_groups(server)
        affinities = [os.sched_getaffinity(server.pid_of(stage)) for stage in GROUPS]
        assert affinities[0] == {cpus[0]}
        assert affinities[1] == {cpus[1]}
        for stage in GROUPS:
            maps = Path(f"/proc/{server.pid_of(stage)}/maps").read_text()
            assert ".bin" not in maps, "each has a copy of the weights on its node"
        assert Mix(server).result() == expected
        server.stop()
    (tmp_path / "more").mkdir()
    with server_of(tmp_path / "more", 2, ranks=3) as server:
        wait_groups(server)
        rank = server.pid_of(f"{GROUPS[1]}/2")
        mix = Mix(server)
        assert mix.half.wait(300)
        os.kill(rank, signal.SIGKILL)
        assert mix.result() == expected
        check_pages(server)
        server.stop()
        assert server.leftovers() == []
