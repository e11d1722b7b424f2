"""A worker pool whose members behave as their model's path says; for test_worker_pool.py.

python -m tests.pipeline.pool_process CONFIG_FILE
    stay     until SIGTERM
    exit:N   end with that code
    parent   start a process of its own in a group of its own, then stay

With STARLING_TEST_SPARE_AFTER_S there is a spare group, that many seconds after the start of a member.  A member that
was the spare has a real supervisor, and the line of the report is of its stage's process.  The first
STARLING_TEST_FAILED_FORKS forks of members fail, and as many of spares.  A spare's process prepares until the FIFO
STARLING_TEST_PREPARE has a writer.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from pipeline.config import paths
from pipeline.config.load import load
from pipeline.models.versions import ModelVersion
from pipeline.runtime import process
from pipeline.supervise.base import SIGNALS
from pipeline.supervise.spare_group import SpareGroup, fork_spare
from pipeline.supervise.worker_pool import RETRY_S, SPARE_AFTER_S, WorkerPool


def main() -> int:
    config = load(sys.argv[1])
    process.become_subreaper()
    report = paths.run_dir(config) / "report"

    failures = {kind: int(os.environ.get("STARLING_TEST_FAILED_FORKS", "0")) for kind in ("member", "spare")}

    def fail(kind: str) -> None:
        failures[kind] -= 1
        if failures[kind] >= 0:
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    def fork(version: ModelVersion) -> int:
        fail("member")
        parent = os.getpid()
        pid = os.fork()
        if pid:
            return pid
        process.die_with_parent(parent)
        for number in SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        return behave(version)

    def behave(version: ModelVersion) -> int:
        signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
        behaviour = Path(version.settings.path).name
        below = 0
        if behaviour == "parent" and not (below := os.fork()):
            os.setpgid(0, 0)
            while True:
                signal.pause()
        with report.open("a") as lines:
            lines.write(f"{version.id} {os.getpid()} {below}\n")
        if behaviour.startswith("exit:"):
            os._exit(int(behaviour.removeprefix("exit:")))
        while True:
            signal.pause()

    def run(version: ModelVersion) -> Callable[[], int]:
        return lambda: behave(version)

    def prepare(in_child: Callable[[], object], finish: Callable[[], object]) -> list[int]:
        if "STARLING_TEST_PREPARE" in os.environ:
            os.close(os.open(os.environ["STARLING_TEST_PREPARE"], os.O_RDONLY))
        return []

    def spare() -> SpareGroup | None:
        if "STARLING_TEST_SPARE_AFTER_S" not in os.environ:
            return None
        fail("spare")
        return fork_spare("worker", config, run, time.monotonic(), prepare)

    spare_after_s = float(os.environ.get("STARLING_TEST_SPARE_AFTER_S", SPARE_AFTER_S))
    retry_s = float(os.environ.get("STARLING_TEST_RETRY_S", RETRY_S))
    return WorkerPool(config, fork, [], retry_s=retry_s, fork_spare=spare, spare_after_s=spare_after_s).run()


if __name__ == "__main__":
    sys.exit(main())
