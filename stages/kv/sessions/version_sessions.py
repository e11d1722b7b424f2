"""The sessions of a model through all its versions: a store for each tokenizer that they were begun with.

    STATE_DIR/sessions/SLUG-XXXXXXXXXXXX/     the digits name the tokenizer (shm/checkpoint.py)

A session is token ids, so it goes on with any version of the model that means the same by them: the new
one computes its pages anew.  With another tokenizer its next turn is a conflict; it can still be closed, and
a turn that was under way when the version changed is kept where it began.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path

from pipeline.errors import Conflict
from pipeline.protocol import messages as m
from stages.kv.pool.prefix_hash import PageDigest, RootOf
from stages.kv.sessions.session_files import SessionFiles
from stages.kv.sessions.session_store import Sessions
from stages.kv.storage.persist import KEPT_VERSIONS

log = logging.getLogger("starling.kv")

TAG = 12  # hex digits of the tokenizer's digest in a directory's name


class Book:
    """Of one model, by its name's `slug`. `directory`: `STATE_DIR/sessions`."""

    def __init__(self, directory: Path, slug: str) -> None:
        self._directory = directory
        self._slug = slug
        self._stores: dict[str, Sessions] = {}  # by tag
        self._has_read = False

    def __len__(self) -> int:
        return sum(map(len, self._stores.values()))

    @property
    def directories(self) -> list[Path]:
        """That are in use: of the tokenizer that the model has, and of others that sessions were begun with."""
        return [self._directory / f"{self._slug}-{tag}" for tag in self._stores]

    def store(self, tokenizer: str) -> Sessions | None:
        """`tokenizer`: digest, hex. None: it has not been opened, or cannot be."""
        return self._stores.get(tokenizer[:TAG])

    def open(
        self, tokenizer: str, root_of: RootOf, page_tokens: int, max_sessions: int, max_tokens: int
    ) -> Sessions | None:
        """The sessions for a version of the model; those of other tokenizers are read too, once.

        The version that opens it last names the pages. None when its files cannot be used.
        """
        tags = [tokenizer[:TAG]]
        if not self._has_read:
            self._has_read = True
            name = re.compile(re.escape(self._slug) + rf"-([0-9a-f]{{{TAG}}})")
            found = [name.fullmatch(path.name) for path in self._directory.glob(f"{self._slug}-*")]
            tags += sorted({match[1] for match in found if match} - {tags[0]})
        for tag in tags:
            directory = self._directory / f"{self._slug}-{tag}"
            known = self._stores.get(tag)
            if known is not None:
                known.serve(root_of, page_tokens, max_sessions, max_tokens)
                continue
            try:
                self._stores[tag] = Sessions(SessionFiles(directory), root_of, page_tokens, max_sessions, max_tokens)
            except OSError as error:
                log.error("%s cannot be used, there are no sessions: %s", directory, error.strerror or error)
        self._forget_oldest(tags[0])
        return self._stores.get(tags[0])

    def _forget_oldest(self, tag: str) -> None:
        """Of the other tokenizers' sessions those are kept that were used last: for whoever goes back."""
        others = {other: store.all() for other, store in self._stores.items() if other != tag}
        for other, sessions in others.items():
            if not sessions:
                del self._stores[other]  # its directory goes when old files do, see prune.py
        ranked = sorted(
            (other for other, sessions in others.items() if sessions),
            key=lambda other: max(session.last_use for session in others[other]),
        )
        for other in ranked[:-KEPT_VERSIONS]:
            if not any(session.holder for session in others[other]):
                log.info("sessions of an older tokenizer are forgotten", extra={"sessions": len(others[other])})
                for session in others[other]:
                    self._stores[other].close(session.tenant, session.id)

    def choose(self, frame: m.Frame, tokenizer: str) -> Sessions | None:
        """Whose business `frame` is; `tokenizer` is that of the version it is for. Raises `Conflict`."""
        mine = self.store(tokenizer)
        if not isinstance(frame, m.SessionBegin | m.SessionCommit | m.SessionAbort | m.SessionClose):
            return mine
        where = [store for store in self._stores.values() if store.holds(frame.tenant, frame.session)]
        if not where or mine in where:
            return mine
        if isinstance(frame, m.SessionBegin) and frame.resume <= 0:
            raise Conflict(
                f"session {frame.session!r} was begun with another tokenizer than model {frame.model!r} has now, "
                f"and its tokens mean something else in this one: close it, or use another session_id",
                param="session_id",
            )
        return where[0]

    # -------------------------------------------------------------- now and then

    def drop_holder(self, holder: bytes) -> None:
        for store in self._stores.values():
            store.drop_holder(holder)

    def expire(self) -> None:
        for store in self._stores.values():
            store.expire()

    def take_freed(self) -> list[PageDigest]:
        """Names of pages that no session has any more, since the last call."""
        freed: list[PageDigest] = []
        for store in self._stores.values():
            freed += store.freed
            store.freed.clear()
        return freed
