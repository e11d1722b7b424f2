"""A fence kills exactly the processes of a worker group."""

from __future__ import annotations

import signal
import subprocess
import sys

from shm.arena import process_ticks
from stages.scheduler.recovery.fencing import Fence


def test_a_fence_kills_exactly_the_given_processes():
    wait = "import signal; print(flush=True); signal.pause()"
    victim, bystander = (subprocess.Popen([sys.executable, "-c", wait], stdout=-1) for _ in range(2))
    for process in (victim, bystander):
        assert process.stdout is not None
        process.stdout.readline()
        process.stdout.close()
    # The bystander's pid with another start time: an earlier process with the same pid.
    old = (bystander.pid, process_ticks(bystander.pid) - 1)
    fence = Fence(((victim.pid, process_ticks(victim.pid)), old, (2**22 + 1, 5)))
    assert fence.wait(600)
    assert victim.wait() == -signal.SIGKILL
    assert bystander.poll() is None
    bystander.kill()
    bystander.wait()
