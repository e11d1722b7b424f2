"""The encode queue: round-robin, bounded, and without results for clients that have disconnected."""

from __future__ import annotations

import threading
from collections.abc import Generator
from typing import Any

import pytest

from stages.tokenizer.encode_queue import EncodeQueue

WAIT_S = 600.0  # that only a failure reaches: this runs on what others leave of the cores


class Worker:
    """A queue and its thread. `finished` is released after each job."""

    def __init__(self, **bounds: int) -> None:
        self.finished = threading.Semaphore(0)
        self.queue: EncodeQueue[str] = EncodeQueue(self.finished.release, **bounds)
        self.thread = threading.Thread(target=self.queue.run)
        self.order: list[str] = []

    def job(self, name: str, steps: int) -> Generator[None, None, str]:
        for _ in range(steps):
            self.order.append(name)
            yield
        return name

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.queue.stop()
        if self.thread.ident is not None:
            self.thread.join(WAIT_S)
            assert not self.thread.is_alive()

    def wait(self, jobs: int) -> list[tuple[bytes, str]]:
        for _ in range(jobs):
            assert self.finished.acquire(timeout=WAIT_S)
        return self.queue.take_results()


def test_a_short_job_does_not_wait_for_long_ones() -> None:
    with Worker() as worker:
        for name, steps in (("long", 50), ("longer", 90), ("short", 2)):
            assert worker.queue.submit(b"a", 1, worker.job(name, steps))
        worker.thread.start()
        assert [answer for _, answer in worker.wait(3)] == ["short", "long", "longer"]
        assert worker.order[:6] == ["long", "longer", "short"] * 2
        assert not worker.queue.is_busy


def test_the_queue_is_bounded_in_jobs_and_characters_and_accepts_one_of_any_size() -> None:
    with Worker(max_jobs=3, max_characters=10) as worker:
        queue = worker.queue
        assert queue.submit(b"a", 1000, worker.job("huge", 1))
        assert not queue.submit(b"a", 1, worker.job("small", 1))
        queue.drop_client(b"a")
        assert [queue.submit(b"a", n, worker.job("x", 1)) for n in (4, 4, 4, 2, 0)] == [True, True, False, True, False]
        worker.thread.start()
        worker.wait(3)
        assert queue.submit(b"a", 9, worker.job("y", 1))


def test_a_tenant_leaves_a_quarter_of_the_queue_to_the_others() -> None:
    with Worker(max_jobs=8, max_characters=100) as worker:
        queue = worker.queue
        sizes = [40, 30, 10, 5]
        assert [queue.submit(b"a", n, worker.job("x", 1), "busy") for n in sizes] == [True, True, False, True]
        assert queue.submit(b"a", 20, worker.job("y", 1), "quiet")
        worker.thread.start()
        worker.wait(4)
        assert queue.submit(b"a", 75, worker.job("z", 1), "busy")
        worker.wait(1)
    with Worker(max_jobs=4, max_characters=100) as worker:
        queue = worker.queue
        assert [queue.submit(b"a", 1, worker.job("x", 1), "busy") for _ in range(4)] == [True, True, True, False]
        assert queue.submit(b"a", 1, worker.job("y", 1), "quiet")


def test_a_disconnected_client_gets_no_results_until_it_submits_again() -> None:
    with Worker() as worker:
        inside, go_on = threading.Event(), threading.Event()

        def held() -> Generator[None, None, str]:
            inside.set()
            assert go_on.wait(WAIT_S)
            return "held"
            yield

        worker.queue.submit(b"a", 1, held())
        worker.queue.submit(b"a", 1, worker.job("waiting", 1))
        worker.queue.submit(b"b", 1, worker.job("other", 1))
        worker.thread.start()
        assert inside.wait(WAIT_S)
        worker.queue.drop_client(b"a")
        worker.queue.submit(b"a", 1, worker.job("again", 1))
        go_on.set()
        assert worker.wait(3) == [(b"b", "other"), (b"a", "again")]
        assert not worker.queue.is_busy


def test_a_dropped_job_ends_with_its_step_and_leaves_room_for_others() -> None:
    with Worker(max_jobs=2) as worker:
        queue, inside, go_on = worker.queue, threading.Event(), threading.Event()

        def held() -> Generator[None, None, str]:
            inside.set()
            assert go_on.wait(WAIT_S)
            yield
            raise AssertionError("a step of a dropped job")

        queue.submit(b"a", 1, held(), "x", "first")
        queue.submit(b"a", 1, worker.job("waiting", 1), "x", "second")
        worker.thread.start()
        assert inside.wait(WAIT_S)
        for client, name in ((b"b", "first"), (b"a", "third")):  # none of these
            queue.drop(client, name)
        assert not queue.submit(b"a", 1, worker.job("too many", 1), "x", "third")
        for _ in range(2):
            queue.drop(b"a", "second")
            queue.drop(b"a", "first")
        queue.submit(b"a", 1, worker.job("again", 1), "x", "first")
        go_on.set()
        assert worker.wait(2) == [(b"a", "again")]
        assert not queue.is_busy and not queue._named
        queue.submit(b"a", 1, worker.job("later", 1), "x", "first")
        assert worker.wait(1) == [(b"a", "later")]


def test_the_queue_is_busy_until_the_last_result_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stage that drains ends as soon as it is not: it reads that at any moment, without the thread's lock."""
    with Worker() as worker:
        queue, remove = worker.queue, worker.queue._remove
        seen: list[bool] = []

        def removed(job: Any) -> None:
            seen.append(queue.is_busy)
            remove(job)
            seen.append(queue.is_busy)

        monkeypatch.setattr(queue, "_remove", removed)
        queue.submit(b"a", 1, worker.job("x", 1))
        worker.thread.start()
        assert worker.finished.acquire(timeout=WAIT_S)
        assert [*seen, queue.is_busy] == [True, True, True]
        assert queue.take_results() == [(b"a", "x")]
        assert not queue.is_busy


def test_stop_ends_after_the_step_in_progress() -> None:
    with Worker() as worker:
        begun = threading.Event()

        def endless() -> Generator[None, None, str]:
            while True:
                begun.set()
                yield

        worker.queue.submit(b"a", 1, endless())
        worker.thread.start()
        assert begun.wait(WAIT_S)
        worker.queue.stop()
        worker.thread.join(WAIT_S)
        assert not worker.thread.is_alive()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_exception_of_a_job_ends_the_thread_and_is_raised() -> None:
    def broken() -> Generator[None, None, str]:
        raise MemoryError
        yield

    with Worker() as worker:
        worker.queue.submit(b"a", 1, broken())
        with pytest.raises(MemoryError):
            worker.queue.run()
