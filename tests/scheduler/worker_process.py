"""The worker of peers.py as a process: RUN_DIR MODEL DIGEST POISON STALL.

The process kills itself when it computes the token POISON.  At the token STALL it makes no progress any more, but
only once: the file RUN_DIR/stalled records it.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
from pathlib import Path

from pipeline.ipc.endpoint import Link
from pipeline.protocol.messages import Attach, Detach, Heartbeat, Hello, StepDone, StepPublished, WorkerReady
from pipeline.protocol.topology import EDGES
from shm import step_ring as sh
from shm import words
from shm.arena import process_ticks
from shm.step_ring import attach_steps

from .peers import VOCAB, Pages, Poisoned, Worker

CONTEXT = 400


def main(run_dir: str, model: str, digest: str, poison: int, stall: int) -> None:
    """Connect to the scheduler and compute steps until the process is killed."""
    address = f"ipc://{run_dir}/scheduler-worker.sock"
    heartbeat_ms = int(os.environ["STARLING_SERVER__HEARTBEAT_MS"])  # as the scheduler's
    link = Link(EDGES["scheduler-worker"], address, f"worker:{model}", heartbeat_ms=heartbeat_ms)
    me = (os.getpid(), process_ticks(os.getpid()))
    ready = WorkerReady(model, digest, link.epoch, 1, (me,), VOCAB, CONTEXT)
    worker: Worker | None = None

    def on_up(hello: Hello) -> None:
        nonlocal worker
        worker = None  # attached by an earlier scheduler
        link.send(ready)

    link.on_up = on_up
    poll = select.poll()
    poll.register(link.fd, select.POLLIN)
    bell = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    stalled = Path(run_dir) / "stalled"
    generation = progress = 0
    while True:
        for frame in link.receive():
            if isinstance(frame, Attach):
                _, steps, geometry = attach_steps(Path(frame.steps_path))
                size = 16
                total = os.path.getsize(frame.kv_path) // (8 * size)
                worker = Worker(steps, geometry, Pages(total, size, frame.kv_path))
                worker.attach(frame.generation)
                words.store(worker.s.control, sh.WORKER_GENERATION, frame.generation)
                generation = frame.generation
                bell.connect(frame.doorbell)
                if poison >= 0:
                    worker.poison = {poison}
                if stall >= 0 and not stalled.exists():
                    worker.poison = {stall}
            elif isinstance(frame, Detach):
                worker = None
                link.send(ready)
            else:
                assert isinstance(frame, StepPublished)
        link.tick(Heartbeat("worker", link.epoch, progress, False, True))
        if worker is not None and worker.waiting:
            number = int(words.load(worker.s.control, sh.DONE)) + 1
            try:
                worker.compute(number)
            except Poisoned:
                if poison >= 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                stalled.touch()
                while True:
                    poll.poll(50)
                    link.receive()
                    link.tick(Heartbeat("worker", link.epoch, progress, True, True))
            progress += 1
            words.store(worker.s.control, sh.DONE, number)
            words.fence()
            if 0 < words.load(worker.s.control, sh.WAKE_AT) <= number:
                # Test both kinds of doorbell.
                if number % 2:
                    link.send(StepDone(generation, number))
                else:
                    bell.send(b"")
            continue
        if worker is not None:
            words.store(worker.s.control, sh.WORKER_SLEEPING, 1)
            words.fence()
            if worker.waiting:
                words.store(worker.s.control, sh.WORKER_SLEEPING, 0)
                continue
        poll.poll(20)
        if worker is not None:
            words.store(worker.s.control, sh.WORKER_SLEEPING, 0)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5]))
