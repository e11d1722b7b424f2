"""The sessions of one model on a thread of their own, so that a slow disk delays no lease of any model.

    loop    queues frames, openings, expiry and the loss of a gateway; `poll` returns what is done
    thread  executes them in this order, one after the other, and alone uses the `ModelSessions`

A turn is answered when the thread has written its record.  While the disk is slow, turns of this model's sessions
wait for each other; the gateway gives up after its own time.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from pipeline.errors import InternalError, Overloaded, StarlingError
from pipeline.protocol import messages as m
from shm.prefix_hash import RootHasher
from stages.kv.sessions.model_sessions import ModelSessions, answer
from stages.kv.sessions.session_bounds import SessionBounds
from stages.kv.sessions.session_store import FreedPage

log = logging.getLogger("starling.kv")

MAX_JOBS = 1024  # frames that wait for the disk; one gateway has at most 512 without an answer


class SessionResult(NamedTuple):
    """What a job has led to."""

    holder: bytes  # peer that `reply` is for
    reply: m.Frame | None
    freed: list[FreedPage]  # pages that no session has any more
    finish: Callable[[], object] | None = None  # to be called in the loop


class SessionThread:
    """Owns `sessions`. `wake` ends the wait of the loop; the thread calls it."""

    def __init__(self, sessions: ModelSessions, wake: Callable[[], object] = lambda: None) -> None:
        self._sessions = sessions
        self._wake = wake
        self._jobs: queue.SimpleQueue[Callable[[], SessionResult | None] | None] = queue.SimpleQueue()
        self._results: deque[SessionResult] = deque()
        self._n_unfinished = 0  # jobs that were queued, less those in `_n_finished`
        self._n_finished = 0
        self._is_expiring = False
        self._thread = threading.Thread(target=self._run, name="sessions", daemon=True)
        self._thread.start()

    def __len__(self) -> int:
        return len(self._sessions)

    @property
    def is_missing(self) -> bool:
        """Whether some files could not be used: call `open` again."""
        return self._sessions.is_missing

    @property
    def is_complete(self) -> bool:
        """Whether `directories` has all that are in use."""
        return self._sessions.is_complete

    @property
    def directories(self) -> list[Path]:
        """Directories in use."""
        return self._sessions.directories

    @property
    def damaged(self) -> int:
        """Sessions that lost turns, or all of them, since the process started."""
        return self._sessions.damaged

    @property
    def disk_errors(self) -> int:
        """Failed operations on files since the process started."""
        return self._sessions.disk_errors

    @property
    def n_moving(self) -> int:
        """Sessions whose move to another agent is not complete."""
        return self._sessions.n_moving

    @property
    def is_busy(self) -> bool:
        """Whether jobs are unfinished or results wait for `poll`."""
        return self._n_unfinished > self._n_finished or bool(self._results)

    # -------------------------------------------------------------- the loop

    def open(self, tokenizer: str, root_hash_of: RootHasher, page_tokens: int, bounds: SessionBounds) -> None:
        """As `ModelSessions.open`; later frames are answered when it is done."""

        def open_files() -> None:
            self._sessions.open(tokenizer, root_hash_of, page_tokens, bounds)

        self._put(open_files)

    def handle(self, holder: bytes, frame: m.Frame, tokenizer: str) -> None:
        """Execute a gateway's frame for a version with this tokenizer; "": no version is loaded."""
        is_full = self._n_unfinished - self._n_finished >= MAX_JOBS
        if is_full and isinstance(frame, m.SessionBegin | m.SessionCommit | m.SessionClose):
            error = Overloaded(f"{MAX_JOBS} turns of sessions wait for the disk; try again", param="session_id")
            self._results.append(SessionResult(holder, _refusal(frame, error), []))
            self._wake()
            return
        self._put(lambda: self._handle(holder, frame, tokenizer))

    def _handle(self, holder: bytes, frame: m.Frame, tokenizer: str) -> SessionResult:
        # A turn and a session end also without a version.
        may_choose = tokenizer or isinstance(frame, m.SessionAbort | m.SessionClose)
        if isinstance(frame, m.SessionClose):
            self._sessions.read()
        try:
            store = self._sessions.choose(frame, tokenizer) if may_choose else None
        except StarlingError as error:
            return SessionResult(holder, _refusal(frame, error), [])
        reply = answer(store, holder, frame)
        return SessionResult(holder, reply, self._sessions.take_freed())

    def call(
        self,
        work: Callable[[ModelSessions], dict[str, Any]],
        finish: Callable[[dict[str, Any] | StarlingError], object],
    ) -> None:
        """Do `work` after the jobs before it; `finish` gets its result in the loop. Raises `Overloaded`."""
        if self._n_unfinished - self._n_finished >= MAX_JOBS:
            raise Overloaded(f"{MAX_JOBS} turns of sessions wait for the disk; try again", param="session_id")

        def run() -> SessionResult:
            result: dict[str, Any] | StarlingError
            try:
                result = work(self._sessions)
            except StarlingError as error:
                result = error
            except Exception:
                log.exception("an operation on a session failed")
                result = InternalError("the kv stage failed to handle the request; see its log")
            return SessionResult(b"", None, self._sessions.take_freed(), lambda: finish(result))

        self._put(run)

    def drop_holder(self, holder: bytes) -> None:
        """A gateway is gone: its turns are no longer in progress."""
        self._put(lambda: self._sessions.drop_holder(holder))

    def expire(self) -> None:
        """Remove expired sessions, unless that is under way."""
        if not self._is_expiring:
            self._is_expiring = True
            self._put(self._expire)

    def _expire(self) -> SessionResult:
        try:
            self._sessions.expire()
        finally:
            self._is_expiring = False
        return SessionResult(b"", None, self._sessions.take_freed())

    def poll(self) -> list[SessionResult]:
        """What was done since the last call, in order."""
        done = []
        while self._results:
            done.append(self._results.popleft())
        return done

    def close(self, timeout_s: float) -> None:
        """End the thread after its jobs, and wait for that at most `timeout_s`."""
        self._jobs.put(None)
        self._thread.join(timeout_s)

    def _put(self, job: Callable[[], SessionResult | None]) -> None:
        self._n_unfinished += 1
        self._jobs.put(job)

    # -------------------------------------------------------------- the thread

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                result = job()
                if result is not None and (result.reply is not None or result.freed or result.finish is not None):
                    self._results.append(result)
            except Exception:
                log.exception("a turn of a session failed")
            finally:
                self._n_finished += 1
                self._wake()


def _refusal(frame: m.Frame, error: StarlingError) -> m.SessionRefused:
    return m.SessionRefused(getattr(frame, "id", 0), error.code, error.message, error.param, error.moved_to)
