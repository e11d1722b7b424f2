"""Sessions of one model and tokenizer: their turns, bounds and expiry.

A session stores token ids and no pages: its pages are found by their hashes, as those of any request, so memory
pressure can cost time but cannot change an answer.  A session has one turn at a time, and a turn that is not committed
leaves its tokens as they were; it counts as a use all the same.  Closing and expiry drop the tokens; the hashes of
pages that no other session has are collected in `freed`, so that the stage can free these pages at once.

Turns are numbered and a commit names its turn.  A restarted kv stage has no record of the turns in progress: of two
commits with the same number the first one wins and the second is a conflict.

Sessions move to other agents of a fleet: session_transfer.py.

Bounds: see session_bounds.py.  Raises the errors of pipeline/errors.py.
"""

from __future__ import annotations

import secrets
import time
from array import array
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from pipeline.errors import (
    Conflict,
    InvalidRequest,
    ModelUnavailable,
    NotFound,
    Overloaded,
    SessionMoved,
    StorageUnavailable,
)
from pipeline.protocol.messages import MAX_SESSION_ID
from shm.prefix_hash import PageHash, RootHasher, page_hashes
from stages.kv.sessions.session_bounds import SessionBounds
from stages.kv.sessions.session_files import Session, SessionFiles
from stages.kv.sessions.session_moves import ARRIVED, HELD, MOVED, SETTLED, TOMBSTONE_S

EMPTY_S = 600  # a session without any turn is kept for this time
# After a gateway or this process has died, its successor needs so long to say which turns are in progress: until then
# these sessions do not move and do not expire.
UNSURE_S = 30.0
LONGEST_TURN_S = 300.0  # the default of `server.request_timeout_ms`


class FreedPage(NamedTuple):
    """A page that no session has any more."""

    page_hash: PageHash
    turns: int  # of the last session that had it: as many sequences have held the page for it, at most


def _new_id() -> str:
    return "sess-" + secrets.token_urlsafe(18)


class SessionStore:
    """All sessions. `clock`: s since 1970."""

    def __init__(
        self,
        files: SessionFiles,
        root_hash_of: RootHasher,
        page_tokens: int,
        bounds: SessionBounds,
        clock: Callable[[], float] = time.time,
        new_id: Callable[[], str] = _new_id,
        longest_turn_s: float = LONGEST_TURN_S,
    ) -> None:
        """`longest_turn_s`: a turn that began before has ended."""
        self.bounds = bounds
        self.files = files
        self._root_hash_of = root_hash_of
        self._page_tokens = page_tokens
        self.clock = clock
        self._new_id = new_id
        self._longest_turn_s = longest_turn_s
        self.freed: list[FreedPage] = []  # the caller frees these pages and clears the list
        self._sessions: dict[tuple[str, str], Session] = {}  # HELD and ARRIVED
        self.tombstones: dict[tuple[str, str], Session] = {}  # MOVED and SETTLED
        self._owners: Counter[PageHash] = Counter()  # number of sessions with a page of this hash
        self._count_of: Counter[str] = Counter()  # sessions of a tenant
        self._tokens_of: Counter[str] = Counter()  # tokens in a tenant's sessions
        for session in files.load():
            self._add_loaded(session)

    def __len__(self) -> int:
        return len(self._sessions)

    def serve(self, root_hash_of: RootHasher, page_tokens: int, bounds: SessionBounds) -> None:
        """Continue with another version of the model, whose pages have other hashes."""
        self._root_hash_of, self._page_tokens = root_hash_of, page_tokens
        self.bounds = bounds
        self._owners.clear()
        for session in self._sessions.values():
            session.page_hashes.clear()
            self._update_hashes(session)

    def holds(self, tenant: str, session_id: str) -> bool:
        """Whether the session is known and has not expired."""
        session = self._known(tenant, session_id)
        return session is not None and not self._is_expired(session, self.clock())

    @property
    def damaged(self) -> int:
        """Sessions that lost turns, or all of them, since the process started."""
        return self.files.damaged

    @property
    def disk_errors(self) -> int:
        """Failed operations on the sessions' files since the process started."""
        return self.files.errors.count

    def all(self) -> list[Session]:
        """Every session and tombstone, expired ones included."""
        return [*self._sessions.values(), *self.tombstones.values()]

    @property
    def n_moving(self) -> int:
        """Sessions whose move is not complete."""
        return sum(session.state in (ARRIVED, MOVED) for session in self.all())

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
        """Begin a turn of `holder`. Raises `NotFound`, `Conflict`, `Overloaded`, `StorageUnavailable`.

        `resume`: number of a turn that `holder` may have begun before, which does not begin again if it was committed;
        -1: the turn in progress.
        """
        session = self._known(tenant, session_id) if session_id else None
        if session is not None and self._is_expired(session, self.clock()):
            self.drop(session)
            session = None
        if session is not None and session.state == SETTLED and create:
            self.drop(session)  # orchestrators have found that it has ended at its other agent
            session = None
        self.check_here(session)
        if session is None:
            if session_id and self.files.is_unread(tenant, session_id):
                raise self._unreadable(session_id)
            if not create:
                raise self.unknown(session_id)
            session = self._create(tenant, session_id, ttl_s, salt)
        if resume > 0 and resume != session.turn:
            return session  # that turn was committed, and its answer was lost: no turn begins
        if session.holder and not (session.holder == holder and resume in (-1, session.turn)):
            raise Conflict(f"session {session.id!r} has a turn under way; wait for it", param="session_id")
        if not session.holder and resume <= 0:
            self._check_bytes(tenant)
        if session.lost_bytes and resume <= 0:
            self.files.cut(session)
            raise Conflict(
                f"session {session.id!r} has lost its latest turns, because its file was damaged: it holds "
                f"{session.turns} turns with {len(session.tokens)} tokens; send the turn again to continue from "
                "there, or close the session",
                param="session_id",
            )
        session.used = self.clock()
        session.holder = holder
        return session

    def commit(self, holder: bytes, tenant: str, session_id: str, turn: int, base: int, tokens: bytes) -> Session:
        """End a turn and keep its tokens. Raises `NotFound`, `Conflict`, `InvalidRequest`, `StorageUnavailable`."""
        session = self._known(tenant, session_id)
        self.check_here(session)
        if session is None:
            raise self.unknown(session_id)
        if turn == session.turns and self._is_last(session, base, tokens):
            return session  # a repeated frame
        if turn != session.turn or (session.holder and session.holder != holder):
            raise Conflict(
                f"turn {turn} of session {session_id!r} cannot be committed: the next turn is {session.turn}, because "
                "another request committed first",
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
        session.used = self.clock()
        if base + len(added) > self.bounds.max_tokens:
            raise InvalidRequest(
                f"session {session_id!r} would hold {base + len(added)} tokens, and at most {self.bounds.max_tokens} "
                "are kept",
                param="session_id",
                code="CONTEXT_LENGTH_EXCEEDED",
            )
        now = self.clock()
        try:
            self.files.append(session, base, added, now)
        except OSError as error:
            raise self._no_disk(error) from None
        before = len(session.tokens)
        session.append(base, tokens, now)
        self._count(session, 0, len(session.tokens) - before)
        self._update_hashes(session)
        return session

    def abort(self, holder: bytes, tenant: str, session_id: str, turn: int) -> None:
        """End a turn without tokens, and remove a session without any other turn. Ignores late and unknown ones."""
        session = self._sessions.get((tenant, session_id))
        if session is not None and session.holder == holder and session.turn == turn:
            session.holder = b""
            session.used = self.clock()
            if not session.turns:
                self.drop(session)

    def drop_holder(self, holder: bytes) -> None:
        """A peer is gone: its turns are no longer in progress."""
        for session in self._sessions.values():
            if session.holder == holder:
                session.holder = b""
                session.used = self.clock()
                session.unsure_until = session.used + UNSURE_S

    # -------------------------------------------------------------- closing and expiry

    def close(self, tenant: str, session_id: str) -> None:
        """Remove a session at once. A turn in progress cannot be committed afterwards. Raises `NotFound`."""
        session = self._known(tenant, session_id)
        is_expired = session is not None and self._is_expired(session, self.clock())
        if not is_expired:
            self.check_here(session)
        if session is not None:
            self.drop(session)
        if session is None or is_expired:
            raise self.unknown(session_id)

    def expire(self) -> int:
        """Remove expired sessions that have no turn in progress. Returns their number."""
        self.files.retry_removals()
        for session in self.files.load_unread():
            self._add_loaded(session)
        now = self.clock()
        expired = [session for session in self.all() if self._is_expired(session, now)]
        for session in expired:
            self.drop(session)
        return len(expired)

    def check(self) -> None:
        """Raises `AssertionError` when the owners of page hashes are miscounted."""
        held = Counter(page_hash for session in self._sessions.values() for page_hash in session.page_hashes)
        assert held == self._owners, "owners of page hashes are miscounted"
        assert Counter(session.tenant for session in self._sessions.values()) == self._count_of
        assert sum(len(session.tokens) for session in self._sessions.values()) == self._tokens_of.total()

    # -------------------------------------------------------------- parts of it that moves use (session_transfer.py)

    def find(self, tenant: str, session_id: str) -> Session | None:
        """A session or tombstone that has not expired. Raises `ModelUnavailable` if its file cannot be read."""
        session = self._known(tenant, session_id)
        if session is not None and self._is_expired(session, self.clock()):
            self.drop(session)
            return None
        if session is None and self.files.is_unread(tenant, session_id):
            raise self._unreadable(session_id)
        return session

    def add(self, session: Session) -> None:
        """Add a session that has a file."""
        if session.state in (MOVED, SETTLED):
            self.tombstones[session.tenant, session.id] = session
            return
        self._sessions[session.tenant, session.id] = session
        self._count(session, 1, len(session.tokens))
        self._update_hashes(session)

    def drop(self, session: Session) -> None:
        """Remove a session or tombstone."""
        self.forget(session)
        self.files.remove(session)

    def forget(self, session: Session) -> None:
        """Remove all but its file."""
        key = session.tenant, session.id
        if self.tombstones.pop(key, None) is not None:
            return
        del self._sessions[key]
        self._count(session, -1, -len(session.tokens))
        lost = [page_hash for page_hash in reversed(session.page_hashes) if self._release(page_hash)]
        self.freed += [FreedPage(page_hash, session.turns) for page_hash in lost]
        session.page_hashes.clear()

    def check_room(self, tenant: str) -> None:
        """Raises `Overloaded` if the tenant gets no further session."""
        if self._refusal(tenant):
            self.expire()
        if refusal := self._refusal(tenant):
            raise Overloaded(f"{refusal}; close a session or try again later", param="session_id")

    @staticmethod
    def check_here(session: Session | None) -> None:
        """Raises `SessionMoved` if another agent has the session."""
        if session is not None and session.state != HELD:
            error = SessionMoved(f"session {session.id!r} is at agent {session.agent!r} of the fleet", "session_id")
            error.moved_to = session.agent
            raise error

    # -------------------------------------------------------------- parts

    def _known(self, tenant: str, session_id: str) -> Session | None:
        """The session, or its tombstone."""
        key = tenant, session_id
        return self._sessions.get(key) or self.tombstones.get(key)

    def _add_loaded(self, session: Session) -> None:
        now = self.clock()
        # A turn began before the time to live ended.  Days later, when a request loads the model, none is in progress.
        if not self._is_expired(session, now - self._longest_turn_s):
            session.unsure_until = now + UNSURE_S
        self.add(session)

    def _create(self, tenant: str, session_id: str, ttl_s: int, salt: str) -> Session:
        self.check_room(tenant)
        if len(session_id) > MAX_SESSION_ID:
            raise InvalidRequest(
                f"session_id has {len(session_id)} characters, at most {MAX_SESSION_ID} are allowed",
                param="session_id",
            )
        now = self.clock()
        session = Session(session_id or self._new_id(), tenant, salt, ttl_s, now, now)
        try:
            self.files.create(session)
        except OSError as error:
            raise self._no_disk(error) from None
        self._sessions[tenant, session.id] = session
        self._count(session, 1, 0)
        return session

    def _refusal(self, tenant: str) -> str:
        """Why the tenant gets no further session; "" if it does."""
        if refusal := self.bounds.refuses_session(len(self._sessions), self._count_of[tenant]):
            return refusal
        return self._refuses_bytes(tenant)

    def _refuses_bytes(self, tenant: str) -> str:
        return self.bounds.refuses_bytes(4 * self._tokens_of.total(), 4 * self._tokens_of[tenant])

    def _check_bytes(self, tenant: str) -> None:
        if self._refuses_bytes(tenant):
            self.expire()
        if refusal := self._refuses_bytes(tenant):
            raise Overloaded(f"{refusal}; close a session or try again later", param="session_id")

    def _count(self, session: Session, sessions: int, tokens: int) -> None:
        self._count_of[session.tenant] += sessions
        self._tokens_of[session.tenant] += tokens
        if not self._count_of[session.tenant]:
            del self._count_of[session.tenant], self._tokens_of[session.tenant]

    def _update_hashes(self, session: Session) -> None:
        """Hash the session's full pages that its last turn changed."""
        same = min(len(session.page_hashes), session.last_base // self._page_tokens)
        parent = session.page_hashes[same - 1] if same else self._root_hash_of(session.salt)
        for page_hash in session.page_hashes[same:]:
            self._release(page_hash)
        del session.page_hashes[same:]
        rest = np.array(session.tokens[same * self._page_tokens :], np.int32)
        new = page_hashes(parent, rest, self._page_tokens)
        session.page_hashes += new
        self._owners.update(new)

    def _release(self, page_hash: PageHash) -> bool:
        """One session less has this page; True if it was the last one."""
        self._owners[page_hash] -= 1
        if self._owners[page_hash]:
            return False
        del self._owners[page_hash]
        return True

    @staticmethod
    def _is_expired(session: Session, now: float) -> bool:
        """A session without any turn, committed or in progress, remains when a gateway is killed: it expires sooner."""
        if session.state == SETTLED:
            return now - session.marked >= TOMBSTONE_S
        ttl_s = session.ttl_s if session.turns else min(session.ttl_s or EMPTY_S, EMPTY_S)
        is_in_use = bool(session.holder) or now < session.unsure_until
        return bool(ttl_s) and not is_in_use and now - max(session.last_use, session.used) >= ttl_s

    @staticmethod
    def _is_last(session: Session, base: int, tokens: bytes) -> bool:
        return session.last_base == base and session.tokens[base:].tobytes() == tokens

    @staticmethod
    def _unreadable(session_id: str) -> ModelUnavailable:
        return ModelUnavailable(
            f"session {session_id!r} cannot be read from the disk at present; try again later", param="session_id"
        )

    @staticmethod
    def unknown(session_id: str) -> NotFound:
        """The error for a session that does not exist."""
        return NotFound(f"there is no session {session_id!r} (any more)", param="session_id")

    @staticmethod
    def _no_disk(error: OSError) -> StorageUnavailable:
        return StorageUnavailable(
            f"the session cannot be saved: {error.strerror}; free space in server.state_dir",
            param="session_id",
        )
