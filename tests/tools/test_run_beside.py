"""A command that runs on what another one leaves: its priority, its output, and who ends it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SHOWN = f'{sys.executable} -c "import os; print(os.sched_getscheduler(0), os.nice(0))"'
# IDLE waits until it is ended. COMMAND begins when IDLE runs: its pid is in the file.
WAITING = "mkfifo gate; echo $$ > pid.new; mv pid.new pid; cat gate"
HAS_BEGUN = "until [ -e pid ]; do sleep 0.02; done"  # what waits without a pause leaves IDLE no core
WAIT_S = 600  # that only a failure reaches: IDLE has what all others leave


def start(folder: Path, idle: str, command: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tools.run_beside", f"cd {folder}; {idle}", f"cd {folder}; {command}"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def result(folder: Path, idle: str, command: str) -> tuple[int, str]:
    process = start(folder, idle, command)
    output = process.communicate(timeout=WAIT_S)[0]
    return process.returncode, output


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_it_has_the_least_priority_and_is_shown_last(tmp_path: Path) -> None:
    code, output = result(
        tmp_path, f"{SHOWN}; touch done", f"until [ -e done ]; do sleep 0.02; done; {SHOWN}; echo end"
    )
    own = f"{os.sched_getscheduler(0)} {os.nice(0)}"
    assert (code, output.splitlines()) == (0, [own, "end", f"{os.SCHED_IDLE} 19"])


def test_it_ends_when_the_command_fails(tmp_path: Path) -> None:
    code, _ = result(tmp_path, WAITING, f"{HAS_BEGUN}; exit 3")
    assert code == 3
    assert not is_alive(int((tmp_path / "pid").read_text()))


@pytest.mark.parametrize(("ending", "code"), [("exit 4", 4), ("kill -9 $$", -9)])
def test_its_failure_is_that_of_both(tmp_path: Path, ending: str, code: int) -> None:
    found, output = result(tmp_path, f"echo words; {ending}", "true")
    assert found == code % 256
    assert output == "words\n"


def test_sigterm_ends_both(tmp_path: Path) -> None:
    process = start(tmp_path, WAITING, f"echo $$ > command; {HAS_BEGUN}; echo begun; read -r < gate")
    assert process.stdout is not None
    assert process.stdout.readline() == "begun\n"
    process.terminate()
    process.communicate(timeout=WAIT_S)
    assert process.returncode == 128 + signal.SIGTERM
    assert not any(is_alive(int((tmp_path / name).read_text())) for name in ("pid", "command"))
