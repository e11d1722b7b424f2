"""How many worker groups a model has, which cores each has, and what a configuration of them may not say."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pipeline.config import server_cores
from pipeline.config.load import resolve
from pipeline.config.schema import Config
from pipeline.errors import ConfigError
from pipeline.models import arena_sizes, core_groups, worker_groups
from pipeline.models.versions import ModelVersion, initial
from shm.arena import HEADER_BYTES, align
from shm.checkpoint import Hyper
from shm.step_rings import RING_FIELDS, attach_ring, create_rings, ring_path
from stages.worker import activations_arena as act
from tests.emulated_machine import memory_nodes
from tests.stored_cores import stored_by_a_server


def configured(groups: int | str, *, draft: bool = False, **model: Any) -> Config:
    models = [{"name": "org/m", "path": "/m.gguf", **model}]
    if draft:
        models.append({"name": "large", "path": "/large.gguf", "draft_model": "org/m"})
    return resolve({"models": models, "performance": {"worker_groups": groups}}, {})


@pytest.mark.parametrize(
    ("by_node", "groups", "expected"),
    [
        ([[0, 1, 2, 3], [4, 5, 6, 7]], 2, [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ([[0, 2, 4, 6], [1, 3, 5, 7]], 4, [[0, 2], [4, 6], [1, 3], [5, 7]]),
        ([[0, 1, 2], [3, 4, 5, 6, 7]], 2, [[0, 1, 2], [3, 4, 5, 6, 7]]),
        ([[0, 1], [2, 3], [4, 5], [6, 7]], 2, [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ([[0, 1, 2, 3]], 3, [[0], [1], [2, 3]]),
        ([[0], [1, 2, 3]], 4, [[0], [1], [2], [3]]),
        ([[0]], 2, [[0], [0]]),
    ],
)
def test_cores_are_divided_within_nodes_where_that_is_possible(
    by_node: list[list[int]], groups: int, expected: list[list[int]]
) -> None:
    assert core_groups.divide(by_node, groups) == expected


def test_the_groups_of_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) < 2:
        pytest.skip("a node needs a CPU")
    lists = {0: ",".join(map(str, cpus[1:])), 1: str(cpus[0])}
    monkeypatch.setenv("STARLING_NODES", str(memory_nodes(tmp_path / "nodes", lists)))

    def of(config: Config) -> list[list[int]]:
        return worker_groups.cpus_of_groups(config, config.models[0], config.models[0].name)

    assert of(configured(1)) == [cpus], "the order of the cores of one group is that of the configuration"
    assert of(configured("auto")) == [cpus[1:], [cpus[0]]]
    assert of(configured("auto", cpus=[cpus[1]])) == [[cpus[1]]]
    assert of(configured("auto", ranks=2)) == [cpus], "a node has too few cores for the ranks of a group"
    assert of(configured("auto", draft=True)) == [cpus]
    assert sorted(map(len, of(configured(2)))) == sorted((len(cpus) - 1, 1))

    def of_ranks(config: Config) -> list[int]:
        return worker_groups.cores_of_ranks(config, config.models[0], config.models[0].name)

    assert sorted(of_ranks(configured(1))) == sorted(of_ranks(configured("auto"))) == cpus
    assert of_ranks(configured(1, cpus=[cpus[1]])) == [cpus[1]]
    assert of_ranks(configured(1, ranks=1)) == [cpus[0]]
    assert sorted(of_ranks(configured("auto", ranks=1))) == cpus[:2]
    if len(cpus) < 64:
        assert of_ranks(configured(1, ranks=64)) == cpus, "more ranks than cores are not pinned"


@pytest.mark.parametrize("groups", [2, "auto"])
def test_all_processes_of_a_server_count_the_same_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, groups: int | str
) -> None:
    """A scheduler that starts again with more cores would not wait for the group of its predecessor."""
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) < 2:
        pytest.skip("a node needs a CPU")
    lists = {0: str(cpus[0]), 1: ",".join(map(str, cpus[1:]))}
    monkeypatch.setenv("STARLING_NODES", str(memory_nodes(tmp_path / "nodes", lists)))
    many, few = tmp_path / "many", tmp_path / "few"

    def of(run_dir: Path) -> list[list[int]]:
        models = [{"name": "m", "path": "/m.gguf"}]
        server = {"run_dir": str(run_dir)}
        config = resolve({"models": models, "server": server, "performance": {"worker_groups": groups}}, {})
        server_cores.store(config)
        return worker_groups.cpus_of_groups(config, config.models[0], "m")

    begun = of(many)
    assert len(begun) == 2
    try:
        os.sched_setaffinity(0, {cpus[0]})
        assert of(many) == begun, "`taskset -c 0 starling status`"
        assert worker_groups.allowed(begun[0]) == worker_groups.allowed(begun[1]) == [cpus[0]]
        if groups == "auto":
            assert of(few) == [[cpus[0]]]
    finally:
        os.sched_setaffinity(0, cpus)
    if groups == "auto":
        assert of(few) == [[cpus[0]]]
    assert [path.name for path in many.iterdir()] == [server_cores.FILE]


def test_with_one_group_the_cores_are_stored_for_other_commands(tmp_path: Path) -> None:
    """`starling reload` then counts what another number of groups would mean for the server, not for its own cores."""
    models = [{"name": "m", "path": "/m.gguf"}]
    server = {"run_dir": str(tmp_path)}
    one = resolve({"models": models, "server": server}, {})
    server_cores.store(one)
    cpus = server_cores.own()
    try:
        os.sched_setaffinity(0, {cpus[0]})
        assert server_cores.of(one) == cpus
    finally:
        os.sched_setaffinity(0, cpus)


def test_one_group_needs_no_file(tmp_path: Path) -> None:
    """A disk that fails must not end a stage that divides no cores."""
    (tmp_path / "file").touch()
    server = {"run_dir": str(tmp_path / "file" / "run")}
    models = [{"name": "m", "path": "/m.gguf"}]
    server_cores.store(resolve({"models": models, "server": server}, {}))
    several = resolve({"models": models, "server": server, "performance": {"worker_groups": "auto"}}, {})
    with pytest.raises(OSError, match="Not a directory"):
        server_cores.store(several)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"groups": 64, "cpus": [0, 1]}, "org/m.* has 2: give at most 2"),
        ({"groups": 2, "cpus": [0, 1, 2], "ranks": 2}, r"models.0.ranks = 2 of each group .* cpus has 3"),
        ({"groups": 2, "cpus": [0, 1], "draft": True}, "drafts or has a draft_model.*set 1 or auto"),
    ],
)
def test_configurations_that_are_refused(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=r"performance\.worker_groups.*" + reason):
        configured(**settings)


@pytest.mark.parametrize("groups", [0, 65, "two", -1])
def test_values_that_are_refused(groups: Any) -> None:
    with pytest.raises(ConfigError, match=r"performance\.worker_groups"):
        configured(groups)


def test_only_a_start_is_refused_for_want_of_cores(tmp_path: Path) -> None:
    """Other commands may run on fewer cores than the server, and without one: they only read."""
    models = [{"name": "m", "path": "/m.gguf"}]
    raw = {"models": models, "server": {"run_dir": str(tmp_path)}, "performance": {"worker_groups": 64}}
    config = resolve(raw, {})
    cpus = server_cores.own()
    if len(cpus) < 64:
        for start in (lambda config: server_cores.check(config, cpus), server_cores.store):
            with pytest.raises(
                ConfigError, match=f"worker_groups = 64: .* 'm' has {len(cpus)}: give at most {len(cpus)}"
            ):
                start(config)
        assert not list(tmp_path.iterdir())
    with stored_by_a_server(tmp_path, range(64)):
        server_cores.check(config, server_cores.of(config))
        server_cores.store(config)
        assert len(worker_groups.cpus_of_groups(config, config.models[0], "m")) == 64


@pytest.mark.parametrize("groups", [1, 2, "auto"])
def test_what_a_killed_server_has_stored_is_ignored_and_replaced(tmp_path: Path, groups: int | str) -> None:
    models = [{"name": "m", "path": "/m.gguf"}]
    server, performance = {"run_dir": str(tmp_path)}, {"worker_groups": groups}
    config = resolve({"models": models, "server": server, "performance": performance}, {})
    cpus, stored = server_cores.own(), tmp_path / server_cores.FILE
    if groups == 2 and len(cpus) < 2:
        pytest.skip("each group takes a core")
    with stored_by_a_server(tmp_path, range(64)):
        assert server_cores.of(config) == list(range(64))
    assert server_cores.of(config) == cpus
    assert json.loads(stored.read_bytes()) == list(range(64)), "a command changes nothing"
    server_cores.store(config)
    assert json.loads(stored.read_bytes()) == server_cores.of(config) == cpus


def test_stages_that_start_at_once_have_the_cores_of_one_of_them(tmp_path: Path) -> None:
    """Real processes, each allowed other cores, behind a killed server's file; forked ones keep the lock."""
    server = {"run_dir": str(tmp_path)}
    config = resolve({"models": [{"name": "m", "path": "/m.gguf"}], "server": server}, {})
    cpus = server_cores.own()
    program = f"""
import os, sys
from pipeline.config import server_cores
from pipeline.config.load import resolve
server = {{"run_dir": {str(tmp_path)!r}}}
models = [{{"name": "m", "path": "/m.gguf"}}]
config = resolve({{"models": models, "server": server, "performance": {{"worker_groups": "auto"}}}}, {{}})
os.sched_setaffinity(0, {{int(sys.argv[1])}})
print("ready", flush=True)
sys.stdin.readline()
server_cores.store(config)
if os.fork():  # the lock is left to the child
    for fd in server_cores._joined.values():
        os.close(fd)
    os.wait()
    os._exit(0)
print(server_cores.of(config), flush=True)
sys.stdin.read()
"""
    with stored_by_a_server(tmp_path, range(64)):
        pass
    for _ in range(3):
        with contextlib.ExitStack() as stack:
            stages = []
            for number in range(6):
                command = [sys.executable, "-c", program, str(cpus[number % len(cpus)])]
                stages.append(
                    stack.enter_context(
                        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
                    )
                )
            assert {_line(stage) for stage in stages} == {"ready"}
            for stage in stages:
                assert stage.stdin is not None
                stage.stdin.write("\n")
                stage.stdin.flush()
            (found,) = {_line(stage) for stage in stages}
            assert json.loads(found) in [[cpu] for cpu in cpus]
            for stage in stages[1:]:
                assert stage.stdin is not None
                stage.stdin.close()
                assert stage.wait(120) == 0
            assert server_cores.of(config) == json.loads(found), "one process of the server is left"
        assert server_cores.of(config) == cpus


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    assert select.select([process.stdout], [], [], 120)[0]
    return process.stdout.readline().strip()


def test_names_of_a_versions_groups() -> None:
    config = configured(1)
    (version,) = initial(config).versions
    second = version.of_group(1)
    assert (version.stage, second.stage) == ("worker-org--m", "worker-org--m~1")
    assert (version.group_id, second.group_id) == ("org/m", "org/m~1")
    assert second.id == version.id
    table = initial(config)
    assert table.find_group("org/m") == version
    assert table.find_group("org/m~1") == second
    assert [table.find_group(name) for name in ("other", "org/m~", "org/m~x", "org/m~-1", "~1", "")] == [None] * 6
    reloaded = ModelVersion(name="m", serial=3, settings=config.models[0])
    assert reloaded.of_group(2).stage == "worker-m@3~2"


def test_arenas_of_several_groups_have_the_computed_sizes(tmp_path: Path) -> None:
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) < 2:
        pytest.skip("a group needs a CPU")
    h = Hyper(2, 128, 4, 2, 32, 256, 1000, 512, 1e-5, 32, "neighbours", "silu")
    one, two = configured(1, max_batch_size=4), configured(2, max_batch_size=4, ranks=1)
    steps = arena_sizes.version_steps_geometry(two, two.models[0], "org/m", h)
    assert steps == arena_sizes.version_steps_geometry(one, one.models[0], "org/m", h)
    found = arena_sizes.arena_sizes(two, two.models[0], h)
    arenas, views = create_rings(tmp_path / "m.steps", steps, bytes(32), 2)
    assert found.steps == sum(arena.path.stat().st_size for arena in arenas)
    each = HEADER_BYTES + align(act.activations_bytes(act.geometry_for(steps, h, 512, 1), h), 4096)
    assert found.activations == 2 * each
    assert found.kv == arena_sizes.arena_sizes(one, one.models[0], h).kv, "they share it"

    assert [path.name for path in (ring_path(tmp_path / "m.steps", ring) for ring in range(2))] == [
        "m.steps",
        "m~1.steps",
    ]
    for ring in range(2):
        attached, steps_of_ring, _ = attach_ring(tmp_path / "m.steps", ring, bytes(32))
        for name, mine in views[ring]._asdict().items():
            mine[...] = 1 + ring  # in both rings the same rows
            assert (getattr(steps_of_ring, name) == 1 + ring).all(), name
        for arena in attached:
            arena.close()
    assert all((getattr(views[0], name) == 1).all() for name in RING_FIELDS if getattr(views[0], name).size)
    assert (views[0].tokens == 2).all()
    for arena in arenas:
        arena.close()
