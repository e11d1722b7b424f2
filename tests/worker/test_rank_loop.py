"""A rank without work sleeps until an announcement wakes it, and kernels ring the scheduler's doorbell."""

from __future__ import annotations

import socket
import time
from pathlib import Path

import pytest

from shm import step_ring as sh
from shm import words
from stages.worker import activations_arena as act
from stages.worker.kernels import rank_loop
from tests.worker.conftest import Ingested, TinyGguf
from tools.step_runner import StepRunner

pytestmark = pytest.mark.slow


def test_an_idle_rank_sleeps_and_wakes_for_a_step(tiny_gguf: TinyGguf, ingested: Ingested, tmp_path: Path) -> None:
    slice_s = rank_loop.SLICE_NS / 1e9
    assert 0.5 <= slice_s < 1.0  # shorter would cost an idle server CPU time; a futex takes less than a second
    with StepRunner(ingested(tiny_gguf()), tmp_path, ranks=2, max_rows=1, max_tokens=64, step_tokens=8) as runner:
        runner.write_row(0, [1, 2, 3, 4])
        runner.prefill(0, 4, 4)
        sleeps = act.LINES + 8 + act.SLEEPS
        control = runner.activations.view(0, (act.CONTROL_WORDS,), "int64")
        took_s = []
        for i in range(20):
            while not words.load(control, sleeps):
                pass
            begun = time.monotonic()
            runner.run([(0, 4 + i, 1, 1)])
            took_s.append(time.monotonic() - begun)
        # A rank that no announcement wakes is late each time; one whose core the host takes away, once or twice.
        assert sum(one >= slice_s / 2 for one in took_s) < len(took_s) / 4, took_s


def test_the_doorbell_is_rung_between_two_steps(tiny_gguf: TinyGguf, ingested: Ingested, tmp_path: Path) -> None:
    """Steps go on after ringing; without a working doorbell they stop, and the caller wakes the scheduler."""
    receiver, doorbell = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    receiver.setblocking(False)
    with StepRunner(ingested(tiny_gguf()), tmp_path, ranks=2, max_rows=1, max_tokens=64, step_tokens=8) as runner:

        def follow(start: int, bell: int) -> list[list[int]]:
            words.store(runner.steps.control, sh.WAKE_AT, words.load(runner.steps.control, sh.DONE) + 2)
            return runner.run_all([[(0, start + i, 1, 1)] for i in range(3)], bell)

        runner.write_row(0, [1, 2, 3, 4])
        runner.prefill(0, 4, 4)
        assert len(follow(4, doorbell.fileno())) == 3
        assert receiver.recv(1) == b""
        with pytest.raises(BlockingIOError):
            receiver.recv(1)  # the last step needs no ring: the call returns
        with pytest.raises(RuntimeError, match="stopped after step 6 of 7: 0 entries"):
            follow(7, -1)
        receiver.close()
        with pytest.raises(RuntimeError, match="stopped after step 8 of 10: 0 entries"):
            follow(7, doorbell.fileno())
    doorbell.close()
