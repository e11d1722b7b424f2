"""Sessions of one model: who may take a turn, what is held, when it goes.

A session holds token ids, never pages: its pages are found by their names like anybody's, so memory
pressure can cost time but change no answer.  One turn at a time; a turn that is not committed leaves
nothing behind.  Closing and expiry drop the tokens; the names of pages that no other session has gather in
`freed`, so that these pages can be freed at once.

Turns are numbered, and a commit names its turn: after a restart of kv, which forgets whose turn is
under way, of two commits of the same number the first one wins and the second is a conflict.

Bounds: `max_sessions`, `max_tokens` each.  Raises the errors of pipeline/errors.py.
"""

from __future__ import annotations

import secrets
import time
from array import array
from collections import Counter
from collections.abc import Callable

import numpy as np

from pipeline.errors import Conflict, InvalidRequest, NotFound, Overloaded, ResourceError
from pipeline.protocol.messages import MAX_SESSION_ID
from stages.kv.pool import prefix_hash
from stages.kv.pool.prefix_hash import PageDigest, RootOf
from stages.kv.sessions.session import Session
from stages.kv.sessions.session_files import SessionFiles

EMPTY_S = 600  # a session without any turn is kept so long


def _new_id() -> str:
    return "sess-" + secrets.token_urlsafe(18)


class Sessions:
    """All sessions of a model. `clock`: s since 1970."""

    def __init__(
        self,
        files: SessionFiles,
        root_of: RootOf,
        page_tokens: int,
        max_sessions: int,
        max_tokens: int,
        clock: Callable[[], float] = time.time,
        new_id: Callable[[], str] = _new_id,
    ) -> None:
        self.max_sessions = max_sessions
        self.max_tokens = max_tokens
        self._files = files
        self._root_of = root_of
        self._page_tokens = page_tokens
        self._clock = clock
        self._new_id = new_id
        self.freed: list[PageDigest] = []  # whoever frees the pages empties it
        self._held: dict[tuple[str, str], Session] = {}
        self._owners: Counter[PageDigest] = Counter()  # by how many sessions a page is named
        for session in files.load():
            self._held[session.tenant, session.id] = session
            self._rename(session)

    def __len__(self) -> int:
        return len(self._held)

    def serve(self, root_of: RootOf, page_tokens: int, max_sessions: int, max_tokens: int) -> None:
        """For another version of the model from now on: its pages have other names."""
        self._root_of, self._page_tokens = root_of, page_tokens
        self.max_sessions, self.max_tokens = max_sessions, max_tokens
        self._owners.clear()
        for session in self._held.values():
            session.digests.clear()
            self._rename(session)

    def holds(self, tenant: str, session_id: str) -> bool:
        """Is that session here, and its time not over?"""
        session = self._held.get((tenant, session_id))
        return session is not None and not self._is_over(session, self._clock())

    def all(self) -> list[Session]:
        return list(self._held.values())

    # -------------------------------------------------------------- turns

    def begin(
        self,
        holder: bytes,
        tenant: str,
        session_id: str,
        create: bool = False,
        ttl_s: int = 0,
        salt: str = "",
        resume: int = 0,
    ) -> Session:
        """A turn of `holder` begins. Raises `NotFound`, `Conflict`, `Overloaded`, `ResourceError`.

        `resume`: the turn that `holder` may have begun before, which is not begun again if it is over; -1: whichever
        it is.
        """
        session = self._held.get((tenant, session_id)) if session_id else None
        if session is not None and self._is_over(session, self._clock()):
            self._drop(session)
            session = None
        if session is None:
            if not create:
                raise self._unknown(session_id)
            session = self._create(tenant, session_id, ttl_s, salt)
        if resume > 0 and resume != session.turn:
            return session  # that turn is over, and whoever held it has not heard so: nothing is under way
        if session.holder and not (session.holder == holder and resume in (-1, session.turn)):
            raise Conflict(f"session {session.id!r} has a turn under way; wait for it", param="session_id")
        session.holder = holder
        return session

    def commit(self, holder: bytes, tenant: str, session_id: str, turn: int, base: int, tokens: bytes) -> Session:
        """The turn is over. Raises `NotFound`, `Conflict`, `InvalidRequest`, `ResourceError`."""
        session = self._held.get((tenant, session_id))
        if session is None:
            raise self._unknown(session_id)
        if turn == session.turns and self._is_last(session, base, tokens):
            return session  # said twice
        if turn != session.turn or (session.holder and session.holder != holder):
            raise Conflict(
                f"turn {turn} of session {session_id!r} cannot be kept: turn {session.turn} is next, and "
                "another request was faster",
                param="session_id",
            )
        added = array("i")
        if len(tokens) % 4 or not 0 <= base <= len(session.tokens):
            raise InvalidRequest(
                f"a turn on {base} of {len(session.tokens)} tokens with {len(tokens)} bytes",
                param="session_id",
            )
        added.frombytes(tokens)
        session.holder = b""
        if base + len(added) > self.max_tokens:
            raise InvalidRequest(
                f"session {session_id!r} would hold {base + len(added)} tokens, and at most {self.max_tokens} are kept",
                param="session_id",
                code="CONTEXT_LENGTH_EXCEEDED",
            )
        now = self._clock()
        try:
            self._files.append(session, base, added, now)
        except OSError as error:
            raise self._no_room(error) from None
        session.append(base, tokens, now)
        self._rename(session)
        return session

    def abort(self, holder: bytes, tenant: str, session_id: str, turn: int) -> None:
        """The turn came to nothing, and a session with it that had no other. A late or unknown one is ignored."""
        session = self._held.get((tenant, session_id))
        if session is not None and session.holder == holder and session.turn == turn:
            session.holder = b""
            if not session.turns:
                self._drop(session)

    def drop_holder(self, holder: bytes) -> None:
        """Whoever holds turns is gone: none of them is under way any more."""
        for session in self._held.values():
            if session.holder == holder:
                session.holder = b""

    # -------------------------------------------------------------- the end

    def close(self, tenant: str, session_id: str) -> None:
        """Drop a session at once, a turn under way included: its commit will find nothing.

        Raises `NotFound`.
        """
        session = self._held.get((tenant, session_id))
        is_over = session is not None and self._is_over(session, self._clock())
        if session is not None:
            self._drop(session)
        if session is None or is_over:
            raise self._unknown(session_id)

    def expire(self) -> int:
        """Drop sessions whose time is over, but none with a turn under way. Returns how many."""
        now = self._clock()
        over = [session for session in self._held.values() if self._is_over(session, now)]
        for session in over:
            self._drop(session)
        return len(over)

    def check(self) -> None:
        """Raises `AssertionError` when names are not counted as they are held."""
        held = Counter(digest for session in self._held.values() for digest in session.digests)
        assert held == self._owners, "page names of sessions are miscounted"

    # -------------------------------------------------------------- pieces

    def _create(self, tenant: str, session_id: str, ttl_s: int, salt: str) -> Session:
        if len(self._held) >= self.max_sessions and not self.expire():
            raise Overloaded(
                f"{self.max_sessions} sessions are held (max_sessions); close one or try again later",
                param="session_id",
            )
        if len(session_id) > MAX_SESSION_ID:
            raise InvalidRequest(
                f"session_id has {len(session_id)} characters, at most {MAX_SESSION_ID} are allowed",
                param="session_id",
            )
        now = self._clock()
        session = Session(session_id or self._new_id(), tenant, salt, ttl_s, now, now)
        try:
            self._files.create(session)
        except OSError as error:
            raise self._no_room(error) from None
        self._held[tenant, session.id] = session
        return session

    def _drop(self, session: Session) -> None:
        del self._held[session.tenant, session.id]
        self._files.remove(session)
        self.freed += [digest for digest in reversed(session.digests) if self._release(digest)]

    def _rename(self, session: Session) -> None:
        """Name the session's full pages anew, as far as its last turn changed them."""
        same = min(len(session.digests), session.last_base // self._page_tokens)
        parent = session.digests[same - 1] if same else self._root_of(session.salt)
        for digest in session.digests[same:]:
            self._release(digest)
        del session.digests[same:]
        rest = np.array(session.tokens[same * self._page_tokens :], np.int32)
        fresh = prefix_hash.chain(parent, rest, self._page_tokens)
        session.digests += fresh
        self._owners.update(fresh)

    def _release(self, digest: PageDigest) -> bool:
        """One session fewer has this page; True if it was the last."""
        self._owners[digest] -= 1
        if self._owners[digest]:
            return False
        del self._owners[digest]
        return True

    @staticmethod
    def _is_over(session: Session, now: float) -> bool:
        """One without a turn, kept or under way, is what a gateway that was killed left behind."""
        ttl_s = session.ttl_s if session.turns else min(session.ttl_s or EMPTY_S, EMPTY_S)
        return bool(ttl_s) and not session.holder and now - session.last_use >= ttl_s

    @staticmethod
    def _is_last(session: Session, base: int, tokens: bytes) -> bool:
        return session.last_base == base and session.tokens[base:].tobytes() == tokens

    @staticmethod
    def _unknown(session_id: str) -> NotFound:
        return NotFound(f"there is no session {session_id!r} (any more)", param="session_id")

    @staticmethod
    def _no_room(error: OSError) -> ResourceError:
        return ResourceError(
            f"the session cannot be kept: {error.strerror}; free space in server.state_dir",
            param="session_id",
        )
