"""A plan strikes at its event and nowhere else; without a plan there is no hook."""

import errno
import os
import signal
import subprocess
import sys

import pytest

from pipeline.errors import ConfigError
from pipeline.faultplan import Fault, hook, parse


def test_the_documented_plan_is_understood() -> None:
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


def test_no_plan_no_hook() -> None:
    assert hook("worker", "step", {}) is None
    assert hook("worker", "step", {"STARLING_FAULTS": "kv:exit@page=1"}) is None
    assert hook("worker", "step", {"STARLING_FAULTS": "worker:exit@step=1", "STARLING_RESTARTS": "2"}) is None


def test_drops_strike_once_and_disks_always() -> None:
    drop = hook("wire", "gateway>scheduler", {"STARLING_FAULTS": "wire:drop@gateway>scheduler:2"})
    assert drop is not None
    assert [drop(n) for n in (1, 2, 3)] == [False, True, False]
    full = hook("disk", "spill", {"STARLING_FAULTS": "disk:enospc@spill"})
    assert full is not None
    for n in (1, 2):
        with pytest.raises(OSError) as caught:
            full(n)
        assert caught.value.errno == errno.ENOSPC


@pytest.mark.parametrize(
    ("action", "code"), [("exit", 1), ("kill", -signal.SIGKILL), ("segv", -signal.SIGSEGV)]
)
def test_fatal_faults_end_the_process_at_their_event(action: str, code: int) -> None:
    script = (
        "from pipeline.faultplan import hook\n"
        "strike = hook('worker', 'step')\n"
        "for n in range(1, 4): print(n, flush=True); strike(n)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "STARLING_FAULTS": f"worker:{action}@step=2", "STARLING_RESTARTS": "0"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ended.returncode == code
    assert ended.stdout.split() == ["1", "2"]
