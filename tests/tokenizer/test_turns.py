"""Long texts take turns: nobody waits for another one's end, what is queued is bounded, who is gone is forgotten."""

from __future__ import annotations

import threading
from collections.abc import Generator

import pytest

from stages.tokenizer.encode_queue import Turns


class Worker:
    """The thread of a `Turns`. `finished` is released for each text that is through."""

    def __init__(self, **bounds: int) -> None:
        self.finished = threading.Semaphore(0)
        self.turns: Turns[str] = Turns(self.finished.release, **bounds)
        self.thread = threading.Thread(target=self.turns.run)
        self.order: list[str] = []

    def work(self, name: str, turns: int) -> Generator[None, None, str]:
        for _ in range(turns):
            self.order.append(name)
            yield
        return name

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.turns.stop()
        if self.thread.ident is not None:
            self.thread.join(10)
            assert not self.thread.is_alive()

    def wait(self, texts: int) -> list[tuple[bytes, str]]:
        for _ in range(texts):
            assert self.finished.acquire(timeout=10)
        return self.turns.take()


def test_a_short_text_does_not_wait_for_long_ones() -> None:
    with Worker() as worker:
        for name, turns in (("long", 50), ("longer", 90), ("short", 2)):
            assert worker.turns.put(b"a", 1, worker.work(name, turns))
        worker.thread.start()
        assert [answer for _, answer in worker.wait(3)] == ["short", "long", "longer"]
        assert worker.order[:6] == ["long", "longer", "short"] * 2
        assert not worker.turns.is_busy


def test_what_waits_is_bounded_by_number_and_by_size_and_one_is_always_taken() -> None:
    with Worker(max_texts=3, max_characters=10) as worker:
        turns = worker.turns
        assert turns.put(b"a", 1000, worker.work("huge", 1))
        assert not turns.put(b"a", 1, worker.work("small", 1))
        turns.drop(b"a")
        assert [turns.put(b"a", n, worker.work("x", 1)) for n in (4, 4, 4, 2, 0)] == [True, True, False, True, False]
        worker.thread.start()
        worker.wait(3)
        assert turns.put(b"a", 9, worker.work("y", 1))


def test_who_is_gone_is_not_answered_and_who_comes_back_is() -> None:
    with Worker() as worker:
        inside, go_on = threading.Event(), threading.Event()

        def held() -> Generator[None, None, str]:
            inside.set()
            assert go_on.wait(10)
            return "held"
            yield

        worker.turns.put(b"a", 1, held())
        worker.turns.put(b"a", 1, worker.work("waiting", 1))
        worker.turns.put(b"b", 1, worker.work("other", 1))
        worker.thread.start()
        assert inside.wait(10)
        worker.turns.drop(b"a")
        worker.turns.put(b"a", 1, worker.work("again", 1))
        go_on.set()
        assert worker.wait(3) == [(b"b", "other"), (b"a", "again")]
        assert not worker.turns.is_busy


def test_a_stop_ends_after_the_turn_that_is_under_way() -> None:
    with Worker() as worker:
        begun = threading.Event()

        def endless() -> Generator[None, None, str]:
            while True:
                begun.set()
                yield

        worker.turns.put(b"a", 1, endless())
        worker.thread.start()
        assert begun.wait(10)
        worker.turns.stop()
        worker.thread.join(10)
        assert not worker.thread.is_alive()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_error_of_the_work_ends_the_thread_and_is_not_hidden() -> None:
    def broken() -> Generator[None, None, str]:
        raise MemoryError
        yield

    with Worker() as worker:
        worker.turns.put(b"a", 1, broken())
        with pytest.raises(MemoryError):
            worker.turns.run()
