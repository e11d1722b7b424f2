"""Which thread of an in-process engine computes, and the calls of `on_token` that this thread makes.

The owner is the thread that computes a step or calls callbacks.  It holds no lock meanwhile, so other threads submit,
poll and cancel.  One owner at a time makes the calls, so that those of a request are in order.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from starling.generation import LocalRequest


class StepOwner:
    """The ownership, and the engine's lock, which guards this object too.

    Not reentrant: a method whose docstring does not say otherwise takes the lock.
    """

    def __init__(self, on_failure: Callable[[LocalRequest, Exception], None]) -> None:
        """`on_failure`: called without the lock when a request's callback has raised an exception."""
        # Not the condition itself, whose `__enter__` is Python code: Ctrl-C in it would leave the lock taken.
        self.lock = threading.Lock()
        self._ending = threading.Condition(self.lock)  # notified when an ownership ends
        self._on_failure = on_failure
        self._thread = 0  # the owner; 0: there is none
        self._ended = 0  # ownerships
        self._due: deque[LocalRequest] = deque()  # that have deltas: at least one entry for each delta

    @property
    def is_this_thread(self) -> bool:
        """The calling thread is the owner. Needs no lock."""
        return self._thread == threading.get_ident()

    def refuse_in_callback(self, method: str) -> None:
        """Raises `RuntimeError` in a callback, where `method` would wait for itself. Needs no lock."""
        if self.is_this_thread:
            raise RuntimeError(f"on_token has called {method}, which waits until on_token has returned")

    def add_due(self, request: LocalRequest) -> None:
        """A request has a new delta. The caller has the lock, and calls `call_due` or `own` without it."""
        self._due.append(request)

    def call_due(self) -> None:
        """Make the calls that are due, unless there is an owner: it makes them."""
        if self._due:
            self.own(lambda: None, wait=False)

    def own(self, action: Callable[[], object], *, wait: bool) -> bool:
        """Call `action` as the owner, then make the calls that are due, also when `action` has raised an exception.

        False if there is an owner, with `wait` after its ownership has ended. Whatever Ctrl-C interrupts, the
        ownership ends, and the next owner makes the other calls.
        """
        if self.is_this_thread:  # in a callback
            return False
        try:
            if not self._begin(wait):
                return False
            self._act(action)
            return True
        finally:
            if self._thread == threading.get_ident():
                with self.lock:
                    self._end()

    def _begin(self, wait: bool) -> bool:
        with self.lock:
            if not self._thread:
                self._thread = threading.get_ident()
                return True
            if wait:
                ended = self._ended
                self._ending.wait_for(lambda: self._ended != ended)
            return False

    def _act(self, action: Callable[[], object]) -> None:
        try:
            action()
        finally:
            self._make_calls()

    def _make_calls(self) -> None:
        while (request := self._next_due()) is not None:
            try:
                request.call_back()
            except Exception as error:  # any of the caller's code
                self._on_failure(request, error)
            self._due.popleft()  # not before: Ctrl-C may come before the call

    def _next_due(self) -> LocalRequest | None:
        """None: no call is due, and the ownership has ended. At once: none can become due in between."""
        with self.lock:
            if self._due:
                return self._due[0]
            self._end()
            return None

    def _end(self) -> None:
        """The caller has the lock."""
        self._ending.notify_all()  # first: Ctrl-C in it leaves an ownership, which `own` ends
        self._ended += 1
        self._thread = 0
