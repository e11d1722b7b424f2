"""Run one command on what another one leaves of the processors: `python -m tools.run_beside IDLE COMMAND`.

Both are lines of bash. COMMAND runs as if it were alone: IDLE computes where COMMAND waits. What IDLE prints is shown
when both have ended. If COMMAND fails, IDLE is ended at once. The exit code is that of COMMAND, or, if that is 0, that
of IDLE.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from types import FrameType


def main(arguments: list[str]) -> int:
    """Run both and return the exit code."""
    if len(arguments) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, _end)  # make sends it to its commands when it gets it
    with tempfile.TemporaryFile() as output:
        # A session of its own: a terminal's Ctrl-C ends COMMAND, which decides.
        idle = subprocess.Popen(
            ["bash", "-c", arguments[0]],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_leave_processors,
        )
        try:
            code = _run(arguments[1])
            if not code:
                code = idle.wait()
        finally:
            has_ended = idle.poll() is not None
            with contextlib.suppress(ProcessLookupError):
                os.killpg(idle.pid, signal.SIGKILL)
            idle.wait()
            if has_ended:
                output.seek(0)
                shutil.copyfileobj(output, sys.stdout.buffer)
                sys.stdout.flush()
    return code


def _run(command: str) -> int:
    """Run a command in the foreground; its exit code, as a shell has it."""
    process = subprocess.Popen(["bash", "-c", command])
    try:
        code = process.wait()
    except KeyboardInterrupt:  # the terminal has sent it the signal, too
        process.wait()
        raise
    except SystemExit:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        process.wait()
        raise
    return code if code >= 0 else 128 - code


def _leave_processors() -> None:
    """Let this process run where no other one does. What is not allowed is left out."""
    os.nice(19)
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    # Where each session has a share of the processors: the least one.
    with contextlib.suppress(OSError), open("/proc/self/autogroup", "w") as group:
        group.write("19")


def _end(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
