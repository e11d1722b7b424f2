"""The sessions of a model through all its versions: one store for each tokenizer that sessions began with.

    STATE_DIR/sessions/SLUG-XXXXXXXXXXXX/     the digits identify the tokenizer (shm/checkpoint.py)

A session is token ids, so it continues with any version of the model that gives ids the same meaning; the new version
computes its pages again.  With another tokenizer its next turn is a conflict.  It can still be closed, and a turn that
was in progress when the version changed is committed to the store where it began.
"""

from __future__ import annotations

import logging
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path

from pipeline.errors import Conflict, ModelUnavailable, StarlingError
from pipeline.files import DiskErrors
from pipeline.protocol import messages as m
from shm.prefix_hash import PageHash, RootHasher
from stages.kv.sessions.session_bounds import SessionBounds
from stages.kv.sessions.session_files import SessionFiles
from stages.kv.sessions.session_moves import MOVED
from stages.kv.sessions.session_store import LONGEST_TURN_S, FreedPage, SessionStore
from stages.kv.storage.persist import KEPT_VERSIONS

log = logging.getLogger("starling.kv")

TAG_DIGITS = 12  # hex digits of the tokenizer's digest in a directory's name
# For sessions that are read before a version serves: none begins, and they have no pages.
_NO_VERSION = (lambda salt: PageHash(b"")), sys.maxsize, SessionBounds(0, sys.maxsize)


class ModelSessions:
    """The sessions of the model with this `slug`. `directory`: `STATE_DIR/sessions`."""

    def __init__(
        self,
        directory: Path,
        slug: str,
        clock: Callable[[], float] = time.time,
        longest_turn_s: float = LONGEST_TURN_S,
    ) -> None:
        """`clock`: s since 1970, the same one after a restart. `longest_turn_s`: a turn that began before has ended."""
        self._clock = clock
        self._longest_turn_s = longest_turn_s
        self._directory = directory
        self._slug = slug
        self._stores: dict[str, SessionStore] = {}  # by tag: the first digits of the tokenizer's digest
        # Of the last version that served: how its pages are hashed, and its bounds. None: there has been none.
        self._version: tuple[RootHasher, int, SessionBounds] | None = None
        self._has_read = False
        self._unopened: set[str] = set()  # tags of directories that could not be opened
        self._errors = DiskErrors(log, "there are no sessions")
        self.is_missing = False  # some files could not be used: call `open` again

    @property
    def is_complete(self) -> bool:
        """Whether `directories` has all that are in use: until then no directory may be removed."""
        return self._has_read and not self._unopened

    def __len__(self) -> int:
        return sum(len(store) for store in list(self._stores.values()))  # a copy: a thread may change it

    @property
    def directories(self) -> list[Path]:
        """Directories in use: of the model's tokenizer, and of others that sessions began with."""
        return [self._directory / f"{self._slug}-{tag}" for tag in list(self._stores)]

    def store(self, tokenizer: str) -> SessionStore | None:
        """The store of a tokenizer (digest, hex); None before `open`, and when its files cannot be used."""
        return self._stores.get(tokenizer[:TAG_DIGITS]) if self._version is not None else None

    def store_with(self, tokenizer: str, tenant: str, session_id: str) -> SessionStore | None:
        """The store that has the session or its tombstone; if none has, that of the tokenizer.

        Raises `ModelUnavailable` while that cannot be known.
        """
        current = self.store(tokenizer)
        if current is None or current.find(tenant, session_id) is not None:
            return current
        found = [store for store in self._stores.values() if store.find(tenant, session_id) is not None]
        if not found and not self.is_complete:
            raise ModelUnavailable(f"session {session_id!r} may be here with another tokenizer", "session_id")
        return found[0] if found else current

    def may_have_in_other(self, tokenizer: str, tenant: str, session_id: str) -> bool:
        """Whether a store of another tokenizer than this has the session, or may have it."""
        current = self.store(tokenizer)
        others = [store for store in self._stores.values() if store is not current]
        return not self.is_complete or any(store.holds(tenant, session_id) for store in others)

    def open(
        self, tokenizer: str, root_hash_of: RootHasher, page_tokens: int, bounds: SessionBounds
    ) -> SessionStore | None:
        """Open the sessions for a version of the model; the first call also reads those of other tokenizers.

        The version of the last call determines the page hashes.  None when the files cannot be used.
        """
        tag = tokenizer[:TAG_DIGITS]
        self._version = root_hash_of, page_tokens, bounds
        self._open_stores(tag)
        self._close_old_tokenizers(tag)
        return self._stores.get(tag)

    def read(self) -> None:
        """Open the sessions though no version of the model is loaded: they can be closed, and expire."""
        if not self.is_complete:
            self._open_stores()

    def _open_stores(self, *own: str) -> None:
        """Open those with the tags `own`, those that could not be opened, and at the first call all that have files."""
        root_hash_of, page_tokens, bounds = self._version or _NO_VERSION
        tags = [*own, *sorted(self._unopened.difference(own))]
        has_read = self._has_read
        if not has_read:
            has_read = True
            name = re.compile(re.escape(self._slug) + rf"-([0-9a-f]{{{TAG_DIGITS}}})")
            try:
                found = [name.fullmatch(path.name) for path in self._directory.glob(f"{self._slug}-*")]
            except OSError as error:
                self._errors.failed("list", self._directory, error)
                has_read, found = False, []
            tags += sorted({match[1] for match in found if match} - set(tags))
        for tag in tags:
            directory = self._directory / f"{self._slug}-{tag}"
            known = self._stores.get(tag)
            if known is not None:
                known.serve(root_hash_of, page_tokens, bounds)
                continue
            try:
                files = SessionFiles(directory)
                self._stores[tag] = SessionStore(
                    files, root_hash_of, page_tokens, bounds, self._clock, longest_turn_s=self._longest_turn_s
                )
            except OSError as error:
                self._errors.failed("open", directory, error)
                self._unopened.add(tag)
            else:
                self._unopened.discard(tag)
                self._errors.worked("open")
        self._has_read = has_read
        self.is_missing = not self.is_complete

    def _close_old_tokenizers(self, current_tag: str) -> None:
        """Close the sessions of all other tokenizers except the most recently used one, which may return.

        A tombstone stays while the session's copy may not be active at the other agent, which asks for it.
        """
        others = {tag: store.all() for tag, store in self._stores.items() if tag != current_tag}
        for tag, sessions in others.items():
            if not sessions:
                del self._stores[tag]  # prune.py removes its directory
        ranked = sorted(
            (tag for tag, sessions in others.items() if sessions),
            key=lambda tag: max(session.last_use for session in others[tag]),
        )
        for tag in ranked[:-KEPT_VERSIONS]:
            closed = [session for session in others[tag] if session.state != MOVED]
            if closed and not any(session.holder for session in closed):
                log.info("closed the sessions of an old tokenizer", extra={"sessions": len(closed)})
                for session in closed:
                    self._stores[tag].drop(session)

    def choose(self, frame: m.Frame, tokenizer: str) -> SessionStore | None:
        """The store that `frame` is for; `tokenizer` is that of the frame's version. Raises `Conflict`, `NotFound`."""
        current = self.store(tokenizer)
        if isinstance(frame, m.SessionBegin) and self._version is None:
            return None
        if not isinstance(frame, m.SessionBegin | m.SessionCommit | m.SessionAbort | m.SessionClose):
            return current
        stores = [store for store in self._stores.values() if store.holds(frame.tenant, frame.session)]
        if not stores or current in stores:
            if current is None and self.is_complete and isinstance(frame, m.SessionClose):
                raise SessionStore.unknown(frame.session)
            return current
        if isinstance(frame, m.SessionBegin) and frame.resume <= 0:
            raise Conflict(
                f"session {frame.session!r} was begun with another tokenizer than model {frame.model!r} has now, "
                f"and its tokens mean something else in this one: close it, or use another session_id",
                param="session_id",
            )
        return stores[0]

    @property
    def damaged(self) -> int:
        """Sessions that lost turns, or all of them, since the process started."""
        return sum(store.damaged for store in list(self._stores.values()))

    @property
    def n_moving(self) -> int:
        """Sessions whose move to another agent is not complete."""
        return sum(store.n_moving for store in list(self._stores.values()))

    @property
    def disk_errors(self) -> int:
        """Failed operations on files since the process started."""
        return self._errors.count + sum(store.disk_errors for store in list(self._stores.values()))

    # -------------------------------------------------------------- events

    def drop_holder(self, holder: bytes) -> None:
        """A gateway is gone: its turns are no longer in progress."""
        for store in self._stores.values():
            store.drop_holder(holder)

    def expire(self) -> None:
        """Remove expired sessions."""
        for store in self._stores.values():
            store.expire()

    def take_freed(self) -> list[FreedPage]:
        """Pages that no session has any more, since the last call."""
        freed: list[FreedPage] = []
        for store in self._stores.values():
            freed += store.freed
            store.freed.clear()
        return freed


def answer(store: SessionStore | None, holder: bytes, frame: m.Frame) -> m.Frame | None:
    """Execute a gateway's frame; `holder` is its peer. None when the frame has no answer."""
    if isinstance(frame, m.SessionAbort):
        if store is not None:
            store.abort(holder, frame.tenant, frame.session, frame.turn)
        return None
    if not isinstance(frame, m.SessionBegin | m.SessionCommit | m.SessionClose):
        return None
    try:
        if store is None:
            raise ModelUnavailable(f"sessions of model {frame.model!r} are not available", param="session_id")
        return _execute(store, holder, frame)
    except StarlingError as error:
        return m.SessionRefused(frame.id, error.code, error.message, error.param, error.moved_to)


def _execute(store: SessionStore, holder: bytes, frame: m.SessionBegin | m.SessionCommit | m.SessionClose) -> m.Frame:
    if isinstance(frame, m.SessionBegin):
        session = store.begin(holder, frame.tenant, frame.session, frame.create, frame.ttl_s, frame.salt, frame.resume)
        return m.SessionHeld(frame.id, session.id, session.turn, session.tokens.tobytes(), session.salt)
    if isinstance(frame, m.SessionCommit):
        session = store.commit(holder, frame.tenant, frame.session, frame.turn, frame.base, frame.tokens)
        return m.SessionDone(frame.id, session.id, len(session.tokens))
    store.close(frame.tenant, frame.session)
    return m.SessionDone(frame.id, frame.session, 0)
