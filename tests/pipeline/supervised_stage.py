"""A supervisor and a stage for tests of failures (a program: `python -m tests.pipeline.supervised_stage ...`).

Each process of the stage writes one JSON line to the FIFO REPORT: pid, its helper's pid (a process of its
own, in a session of its own), restarts, pid of the supervisor.  BEHAVIOUR then is one of:

    wait      a `PollLoop`, until a stop is requested
    stubborn  ignores SIGTERM
    silent    after SIGUSR1 sends one keepalive, then does nothing
    crash     exits with code 3 at once
    config    exits with 78
    leave     exits with 0 at once
    segfault  dies of SIGSEGV
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

from pipeline.config.schema import Config, ModelConfig, ServerConfig
from pipeline.runtime import process
from pipeline.supervise.restart_policy import Limits
from pipeline.supervise.supervisor import supervise

HELPER = "import signal, sys; print(flush=True); signal.pause()"


def stage(report: str, behaviour: str, config: Config) -> int:
    from pipeline.ipc.poll_loop import PollLoop

    loop = None
    if behaviour == "wait":
        loop = PollLoop("kv", config)
        loop.ready = True
        loop.tick()  # the keepalive is sent before the report
    if behaviour == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if behaviour == "silent":
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    keepalive_fd = process.claim_keepalive_fd() if behaviour == "silent" else -1
    # Out of the group on purpose: only a subreaper finds it when the stage is gone.
    helper = subprocess.Popen([sys.executable, "-c", HELPER], stdout=subprocess.PIPE, start_new_session=True)
    assert helper.stdout is not None
    helper.stdout.readline()
    line = {
        "pid": os.getpid(),
        "helper": helper.pid,
        "restarts": int(os.environ["STARLING_RESTARTS"]),
        "parent": os.getppid(),
        "imported": "numpy" in sys.modules and os.environ.get("PRELOADED", "") == "yes",
    }
    with open(report, "wb", buffering=0) as pipe:
        pipe.write(json.dumps(line).encode() + b"\n")
    if behaviour == "crash":
        return 3
    if behaviour == "config":
        return process.EXIT_CONFIG
    if behaviour == "leave":
        return 0
    if behaviour == "segfault":
        signal.raise_signal(signal.SIGSEGV)
    if behaviour == "silent":
        signal.sigwait({signal.SIGUSR1})
        process.send_keepalive(keepalive_fd, process.KeepAlive(50, False))
    if loop is not None:
        return loop.run(lambda: None)
    while True:
        signal.pause()


def main(report: str, behaviour: str, how: str, run_dir: str) -> int:
    drain_ms = 300 if behaviour == "stubborn" else 60_000  # an end in order takes longer on a busy machine
    config = Config(
        models=(ModelConfig(name="m"),),
        server=ServerConfig(run_dir=run_dir, arena_dir=run_dir + "-arenas", drain_timeout_ms=drain_ms),
    )

    def preload() -> None:
        import numpy  # noqa: F401

        os.environ["PRELOADED"] = "yes"

    if how == "stage":
        return stage(report, behaviour, config)
    if how == "program":
        # A stage that cannot be preloaded is started as a program.
        def preload() -> None:
            raise ImportError("not here")

    command = [sys.executable, "-m", "tests.pipeline.supervised_stage", report, behaviour, "stage", run_dir]
    limits = Limits(immediate=2, most=4, base_s=0.001, longest_s=0.01)
    return supervise("kv", command, config, lambda: stage(report, behaviour, config), preload, limits)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
