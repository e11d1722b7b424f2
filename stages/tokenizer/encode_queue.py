"""Long texts take turns on one background thread, a stretch each: a short one waits for no long one's end.

Owns the queue and the thread's loop; knows neither frames nor sockets.  `put`, `drop` and `take` are the stage's
thread's; the work itself runs on the other one only.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator
from typing import Generic, TypeVar

MAX_TEXTS = 2048  # waiting or under way; a gateway asks no more at once
MAX_CHARACTERS = 256 << 20  # of all of them; one text is always taken

Answer = TypeVar("Answer")


class _Text(Generic[Answer]):
    __slots__ = ("asker", "characters", "is_dropped", "work")

    def __init__(self, asker: bytes, characters: int, work: Generator[None, None, Answer]) -> None:
        self.asker = asker
        self.characters = characters
        self.work = work
        self.is_dropped = False


class Turns(Generic[Answer]):
    """`on_done()` is called by the thread that calls `run`, when it is through with a text, wanted or not."""

    def __init__(
        self, on_done: Callable[[], None], max_texts: int = MAX_TEXTS, max_characters: int = MAX_CHARACTERS
    ) -> None:
        self._on_done = on_done
        self._max_texts, self._max_characters = max_texts, max_characters
        self._changed = threading.Condition()
        self._waiting: deque[_Text[Answer]] = deque()
        self._open: set[_Text[Answer]] = set()  # waiting, or having its turn
        self._done: deque[tuple[bytes, Answer]] = deque()
        self._characters = 0  # of the open ones
        self._is_stopped = False

    @property
    def is_busy(self) -> bool:
        return bool(self._open or self._done)

    def put(self, asker: bytes, characters: int, work: Generator[None, None, Answer]) -> bool:
        """`work` returns the answer and must not raise. False: there are too many already."""
        with self._changed:
            is_full = len(self._open) >= self._max_texts or self._characters + characters > self._max_characters
            if is_full and self._open:
                return False
            text = _Text(asker, characters, work)
            self._open.add(text)
            self._waiting.append(text)
            self._characters += characters
            self._changed.notify()
        return True

    def drop(self, asker: bytes) -> None:
        """It is gone: nobody wants its answers any more."""
        with self._changed:
            for text in [text for text in self._open if text.asker == asker]:
                text.is_dropped = True
                if text in self._waiting:
                    self._waiting.remove(text)
                    self._close(text)

    def take(self) -> list[tuple[bytes, Answer]]:
        """(asker, answer) of what has come to its end."""
        with self._changed:
            done = list(self._done)
            self._done.clear()
        return done

    def stop(self) -> None:
        """End `run` after the turn that is under way; what is open is given up."""
        with self._changed:
            self._is_stopped = True
            self._changed.notify()

    def run(self) -> None:
        """Until `stop`. What `work` raises ends it."""
        while (text := self._next()) is not None:
            try:
                next(text.work)
                self._after(text)
            except StopIteration as end:
                self._after(text, end)
            del text  # until the next one comes, perhaps in hours, it would stay

    def _next(self) -> _Text[Answer] | None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._is_stopped)
            return None if self._is_stopped else self._waiting.popleft()

    def _after(self, text: _Text[Answer], end: StopIteration | None = None) -> None:
        with self._changed:
            if end is None and not text.is_dropped:
                self._waiting.append(text)
                return
            self._close(text)
            if end is not None and not text.is_dropped:
                self._done.append((text.asker, end.value))
        self._on_done()

    def _close(self, text: _Text[Answer]) -> None:
        self._open.discard(text)
        self._characters -= text.characters
