"""New models are prepared in a child of `starling up`, whose imports and memory the server does not keep."""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline import procfs

ROOT = Path(__file__).resolve().parents[2]

# In a program of its own: that of the tests has threads. `colorsys` stands for what a download imports.
PREPARE = """
import os, signal, sys, time
from pathlib import Path
from pipeline.config.load import load
from pipeline.errors import NotFound
from starling.cli import interrupts, prepare_apart
from starling.cli.run_command import run_program

parent = os.getpid()

def prepare(config):
    where = "here" if os.getpid() == parent else "apart"
    # Not by print: a signal just after its system call leaves the line in the buffer, and it is written again.
    os.write(1, f"{where} {'colorsys' in sys.modules}\\n".encode())
    if where == "apart":
        import colorsys
        CHILD

def up():
    interrupts.raise_ended()
    prepare_apart.prepare_apart(load(), prepare)
    print("colorsys" in sys.modules)

run_program(up)
"""


def start(home: Path, child: str, *launcher: str) -> subprocess.Popen[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "STARLING_HOME": str(home)}
    return subprocess.Popen(
        [*launcher, sys.executable, "-c", PREPARE.replace("CHILD", child)],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize(
    ("child", "code", "output", "error"),
    [
        ("pass", 0, "apart False\nhere False\nFalse\n", ""),
        ("raise NotFound('no such model', param='name')", 2, "apart False\n", "starling: no such model"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 78, "apart False\n", "ended by SIGKILL"),
    ],
)
def test_a_new_model_is_prepared_apart(tmp_path: Path, child: str, code: int, output: str, error: str) -> None:
    program = start(tmp_path, child)
    found = program.communicate(timeout=120)
    assert (program.returncode, found[0]) == (code, output)
    assert error in found[1].replace("\n  ", " ") and found[1].count("starling:") <= 1


def test_ctrl_c_ends_the_preparation_and_is_reported_once(tmp_path: Path) -> None:
    program = start(tmp_path, "time.sleep(600)")
    assert program.stdout is not None and program.stdout.readline() == "apart False\n"
    program.send_signal(signal.SIGINT)  # to this process alone, as the terminal does to its process group
    output, error = program.communicate(timeout=120)
    assert (program.returncode, output) == (130, "")
    assert error.count("interrupted") == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_the_preparation_ends_on_request_in_the_first_process_of_a_container(
    tmp_path: Path, number: signal.Signals
) -> None:
    """The kernel ignores a signal without a handler there: `docker stop` waited until it could kill the container."""
    launcher = ("unshare", *(() if os.getuid() == 0 else ("--user",)), "--pid", "--fork", "--kill-child")
    if shutil.which("unshare") is None or subprocess.run([*launcher, "true"], capture_output=True).returncode:
        pytest.skip("no pid namespace can be made here")
    program = start(tmp_path, "time.sleep(600)", *launcher)
    assert program.stdout is not None and program.stdout.readline() == "apart False\n"
    [first] = procfs.children(program.pid)
    [child] = procfs.children(first)
    ended = os.pidfd_open(child)
    os.kill(first, number)
    output, error = program.communicate(timeout=120)
    assert (program.returncode, output) == (128 + number, "")
    assert error == f"starling: ended by {number.name}\n"
    assert select.select([ended], [], [], 120)[0]
    os.close(ended)


def test_a_signal_that_is_ignored_stays_ignored(tmp_path: Path) -> None:
    program = start(tmp_path, "time.sleep(600)", "sh", "-c", "trap '' HUP; exec \"$@\"", "sh")
    assert program.stdout is not None and program.stdout.readline() == "apart False\n"
    program.send_signal(signal.SIGHUP)
    program.send_signal(signal.SIGTERM)
    _, error = program.communicate(timeout=120)
    assert (program.returncode, error) == (143, "starling: ended by SIGTERM\n")
