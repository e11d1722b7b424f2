"""Which cores the control plane has, and that ranks are divided among the others."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.config import server_cores
from pipeline.config.load import resolve
from pipeline.config.schema import Config
from pipeline.errors import ConfigError
from pipeline.models import control_cores, worker_groups
from pipeline.supervise import base
from tests.emulated_machine import memory_nodes


def configured(control: int | str = "auto", groups: int | str = 1, **model: Any) -> Config:
    performance = {"control_cores": control, "worker_groups": groups}
    return resolve({"models": [{"name": "m", "path": "/m.gguf", **model}], "performance": performance}, {})


@pytest.fixture
def cores(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The cores that a server believes it has; the test's own ones are restored."""
    found: list[int] = []
    allowed = os.sched_getaffinity(0)
    monkeypatch.setattr(server_cores, "_before", found)
    yield found
    os.sched_setaffinity(0, allowed)


@pytest.mark.parametrize(("n", "expected"), [(1, 0), (2, 0), (3, 1), (16, 1), (17, 2), (32, 2), (64, 4), (65, 5)])
def test_a_server_with_more_than_two_cores_spares_one_of_sixteen(n: int, expected: int) -> None:
    assert control_cores.count(configured(), n) == expected


def test_one_core_is_left_for_ranks_wherever_a_stage_may_run() -> None:
    """A stage may start again in a control group that has got smaller."""
    assert [control_cores.count(configured(control=2), n) for n in (1, 2, 3, 4)] == [0, 1, 2, 2]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [1, 2, 3]),
        ({"ranks": 3}, [1, 2, 3]),
        ({"ranks": 4}, [0, 1, 2, 3]),  # as many as the configuration asks for
        ({"control": 0}, [0, 1, 2, 3]),
        ({"cpus": [3, 0]}, [3, 0]),
    ],
)
def test_the_cores_of_ranks(cores: list[int], settings: dict[str, Any], expected: list[int]) -> None:
    cores += [0, 1, 2, 3]
    config = configured(**settings)
    assert worker_groups.cpus_of_groups(config, config.models[0], "m") == [expected]


@pytest.mark.parametrize(
    ("groups", "ranks", "expected"),
    [(3, 1, [1, 1, 1]), (4, 0, [1, 1, 1, 1]), (2, 2, [2, 2]), (2, 0, [2, 2]), (2, 1, [1, 2])],
)
def test_groups_that_need_all_cores_have_them(
    cores: list[int], monkeypatch: pytest.MonkeyPatch, groups: int, ranks: int, expected: list[int]
) -> None:
    cores += [0, 1, 2, 3]
    monkeypatch.setattr(server_cores, "of", lambda config: cores)
    config = configured(groups=groups, ranks=ranks)
    assert [len(some) for some in worker_groups.cpus_of_groups(config, config.models[0], "m")] == expected


def test_a_stage_keeps_to_its_cores_and_counts_those_of_the_server(cores: list[int]) -> None:
    allowed = sorted(os.sched_getaffinity(0))
    if len(allowed) < 2:
        pytest.skip("ranks and control plane need a core each")
    config = configured(control=1)
    assert control_cores.keep(config) == allowed[:1]
    found: list[set[int]] = []
    thread = threading.Thread(target=lambda: found.append(os.sched_getaffinity(0)))
    thread.start()
    thread.join()
    assert found == [{allowed[0]}] == [os.sched_getaffinity(0)]
    assert server_cores.own() == allowed
    assert worker_groups.cpus_of_groups(config, config.models[0], "m") == [allowed[1:]]


@pytest.mark.parametrize(
    ("control", "groups", "ranks", "first", "sizes"),
    [
        ("auto", "auto", 0, 1, [7, 8]),
        ("auto", "auto", 7, 1, [7, 8]),
        ("auto", "auto", 8, 0, [8, 8]),  # two groups of 8 ranks, not one in all
        ("auto", "auto", 9, 1, [15]),  # one in all has 9 ranks wherever
        (8, "auto", 0, 0, [8, 8]),  # a node without cores would have no group
        ("auto", 2, 0, 0, [8, 8]),
        ("auto", 4, 0, 0, [4, 4, 4, 4]),
        (4, 4, 0, 0, [4, 4, 4, 4]),  # twelve would be 2, 2, 4, 4 on two nodes
        (4, 4, 2, 4, [2, 2, 4, 4]),
        (4, 4, 3, 0, [4, 4, 4, 4]),
    ],
)
def test_groups_on_two_memory_nodes(
    cores: list[int],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    control: int | str,
    groups: int | str,
    ranks: int,
    first: int,
    sizes: list[int],
) -> None:
    cores += range(16)
    monkeypatch.setattr(server_cores, "of", lambda config: cores)
    folder = memory_nodes(tmp_path / "nodes", {0: "0-7", 1: "8-15"})
    monkeypatch.setenv("STARLING_NODES", str(folder))
    config = configured(control, groups, ranks=ranks)
    divided = worker_groups.cpus_of_groups(config, config.models[0], "m")
    assert (divided[0][0], [len(some) for some in divided]) == (first, sizes)


@pytest.mark.parametrize(("n", "control", "first"), [(32, 1, 0), (33, 1, 1), (32, 4, 4)])
def test_cores_are_taken_if_the_others_divide_evenly(
    cores: list[int], monkeypatch: pytest.MonkeyPatch, n: int, control: int, first: int
) -> None:
    cores += range(n)
    monkeypatch.setattr(server_cores, "of", lambda config: cores)
    config = configured(control, 4)
    divided = worker_groups.cpus_of_groups(config, config.models[0], "m")
    assert divided[0][0] == first
    assert len({len(some) for some in divided}) == 1


@pytest.mark.parametrize("other", [{"cpus": [0, 1]}, {"cpus": [2, 3]}, {"cpus": [8, 9]}, {"ranks": 4}])
def test_one_model_that_leaves_no_core_decides_for_all(cores: list[int], other: dict[str, Any]) -> None:
    allowed = os.sched_getaffinity(0)
    cores += [0, 1, 2, 3]
    models = [{"name": "m", "path": "/m.gguf"}, {"name": "o", "path": "/o.gguf", **other}]
    config = resolve({"models": models}, {})
    assert worker_groups.cpus_of_groups(config, config.models[0], "m") == [cores]
    assert control_cores.keep(config) == []
    assert os.sched_getaffinity(0) == allowed


@pytest.mark.parametrize("settings", [{"control": 0}, {"cpus": [0]}])
def test_a_stage_runs_anywhere_where_models_compute_on_its_cores(cores: list[int], settings: dict[str, Any]) -> None:
    allowed = os.sched_getaffinity(0)
    cores += [0, 1, 2, 3]
    assert control_cores.keep(configured(**settings)) == []
    assert os.sched_getaffinity(0) == allowed


def test_cores_that_are_gone_leave_a_stage_where_it_is(cores: list[int], caplog: pytest.LogCaptureFixture) -> None:
    allowed = os.sched_getaffinity(0)
    cores += [4000, 4001, 4002]
    assert control_cores.keep(configured()) == []
    assert os.sched_getaffinity(0) == allowed
    assert [record.message for record in caplog.records] == ["the stage runs on any core"]


def seen_by_fork(allowed: set[int]) -> bool:
    """Whether a fork, as supervisors make it, may run on those cores, and believes that."""
    pid = base.fork(lambda: int(not (os.sched_getaffinity(0) == allowed == set(server_cores.own()))))
    return os.waitpid(pid, 0)[1] == 0


def test_what_a_parent_starts_may_run_where_it_might(cores: list[int]) -> None:
    """Forks and programs; the parent and its thread that writes the log keep to the first core."""
    allowed = os.sched_getaffinity(0)
    if len(allowed) < 2:
        pytest.skip("ranks and control plane need a core each")
    config, first = configured(control=1), {min(allowed)}
    ended = threading.Event()
    thread = threading.Thread(target=ended.wait)
    thread.start()
    try:
        control_cores.keep_parent(config)
        assert thread.native_id is not None
        assert os.sched_getaffinity(thread.native_id) == first == os.sched_getaffinity(0)
    finally:
        ended.set()
        thread.join()
    assert server_cores.own() == sorted(allowed)
    show = [sys.executable, "-c", "import os; print(len(os.sched_getaffinity(0)))"]
    with server_cores.left():
        assert int(subprocess.run(show, capture_output=True, check=True, timeout=60).stdout) == len(allowed)
    assert os.sched_getaffinity(0) == first
    for _ in range(2):  # a supervisor that was a spare does it twice
        control_cores.keep_parent(config)
        assert seen_by_fork(allowed)
    assert os.sched_getaffinity(0) == first


def test_a_parent_under_taskset_widens_nothing(cores: list[int]) -> None:
    """But one that was on all cores of its control group starts others on those that the group has now."""
    allowed = os.sched_getaffinity(0)
    if len(allowed) < 2:
        pytest.skip("one core is left out")
    last = {max(allowed)}
    os.sched_setaffinity(0, last)
    server_cores.keep_to(sorted(last))
    assert seen_by_fork(last)
    server_cores.leave()
    assert os.sched_getaffinity(0) == last
    os.sched_setaffinity(0, allowed)
    server_cores.keep_to(sorted(last))
    server_cores._before[:] = sorted(last)  # the group has grown since
    assert seen_by_fork(allowed)


def test_a_parent_keeps_to_no_core_that_it_lacks(cores: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The server's first core may be another one's: a supervisor that was started again under `taskset`."""
    here = os.sched_getaffinity(0)
    cores += [1, 2, 3]
    monkeypatch.setattr(server_cores, "of", lambda config: [0, 1, 2, 3])
    control_cores.keep_parent(configured(groups="auto"))
    assert os.sched_getaffinity(0) == here


@pytest.mark.parametrize(("setting", "reason"), [(64, "give at most"), (65, "65"), (-1, "")])
def test_settings_that_are_refused(setting: int, reason: str) -> None:
    with pytest.raises(ConfigError, match=rf"performance\.control_cores.*{reason}"):
        server_cores.check(configured(control=setting), [0, 1, 2])
