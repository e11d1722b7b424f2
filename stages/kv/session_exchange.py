"""Sessions that go to other agents of a fleet, and that come from them; by the control socket.

    {"op": "session", "do": ..., "model", "agent"}     `agent`: the one whose engine this is
        list       "after", "limit", "moving"          sessions after a (tenant, id), in order
        export     "tenant", "session", "target", "path", "inode"    write what is sent into a file
        check      "tenant", "session", "move", "target", "tokens"   whether `adopt` would keep a copy from "target"
        adopt      "path"                              keep the copy in a file
        give_up, activate, settle, refuse, discard     "tenant", "session", "move"; of the first and `refuse` "target"

stages/kv/sessions/session_transfer.py has what they do.  The thread of the model's sessions does it, and the answer
comes when it has: a slow disk delays no lease.  Files are the agent's, in memory: lines of the socket are short.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from typing import Any

import numpy as np

from pipeline.api.page_owner import owner_of
from pipeline.errors import Conflict, InvalidRequest, ModelUnavailable
from pipeline.files import write_all
from pipeline.ipc.control_poll import Later
from shm.pages import KvGeometry
from shm.prefix_hash import page_hashes, root_hash
from stages.kv.loaded_versions import LoadedVersions
from stages.kv.sessions import session_transfer as transfer
from stages.kv.sessions.model_sessions import ModelSessions
from stages.kv.sessions.session_files import Session
from stages.kv.sessions.session_moves import SETTLED, SentSession, decode_sent
from stages.kv.sessions.session_store import SessionStore
from stages.kv.sessions.session_transfer import Ends

MAX_LISTED = 64  # sessions in one answer
MAX_SENT_BYTES = 32 << 20  # of one session: 8 million tokens
MAX_TAILS = 32  # pages that are named: the last ones are evicted first

Work = Callable[[SessionStore, Ends], dict[str, Any]]


class SessionExchange:
    """One per stage."""

    def __init__(self, versions: LoadedVersions) -> None:
        self._versions = versions

    def answer(self, request: dict[str, Any]) -> Later:
        """Answer `session`. Raises `StarlingError`."""
        model, agent = _text(request, "model"), _text(request, "agent")
        work = self._work(request)
        loaded, sessions = self._versions.find(model, ""), self._versions.sessions.get(model)
        if loaded is None or sessions is None or not loaded.pages.tokenizer:
            # Also while it starts. NotFound would say that a session has ended.
            raise ModelUnavailable(f"model {model[:128]!r} has no sessions here (yet)", "model")
        digest, tokenizer = loaded.pages.digest, loaded.pages.tokenizer
        ends = Ends(digest, tokenizer, agent, str(request.get("target", "")))
        tenant, session = str(request.get("tenant", "")), str(request.get("session", ""))
        # A session may have been given up when the model had another tokenizer: a copy of it must not be refused.
        is_of_past = request.get("do") in ("refuse", "settle")

        def run(known: ModelSessions) -> dict[str, Any]:
            store = known.store_with(tokenizer, tenant, session) if is_of_past else known.store(tokenizer)
            if store is None:
                raise ModelUnavailable(f"sessions of model {model!r} are not available", "model")
            found = work(store, ends)
            if found.get("gone") and known.may_have_in_other(tokenizer, tenant, session):
                raise ModelUnavailable(f"session {session!r} may be here with another tokenizer", "session_id")
            return found

        later = Later()
        sessions.call(run, later.finish)
        return later

    def _work(self, request: dict[str, Any]) -> Work:
        do = request.get("do")
        if do == "list":
            return _lister(request)
        if do == "adopt":
            path = _text(request, "path")
            return lambda store, ends: _adopt(store, ends, path)
        tenant, session = str(request.get("tenant", "")), _text(request, "session")
        if do == "export":
            path, inode, _ = _text(request, "path"), _inode(request), _text(request, "target")
            geometry = self._geometry(request)
            return lambda store, ends: _export(store, tenant, session, ends, path, inode, geometry)
        move = _text(request, "move")
        if do == "check":
            source, n_tokens = _text(request, "target"), _count(request, "tokens")

            def look(store: SessionStore, ends: Ends) -> dict[str, Any]:
                transfer.check(store, tenant, session, move, source, n_tokens)
                return {}

            return look
        if do == "give_up":
            _text(request, "target")
            return lambda store, ends: {"state": transfer.give_up(store, tenant, session, move, ends)}
        if do == "activate":
            return lambda store, ends: {"gone": not transfer.activate(store, tenant, session, move)}
        if do == "refuse":
            _text(request, "target")
            return lambda store, ends: {"given_up": transfer.refuse(store, tenant, session, move, ends)}
        if do in ("settle", "discard"):
            return _without_answer(transfer.settle if do == "settle" else transfer.discard, tenant, session, move)
        raise InvalidRequest(f"unknown operation {str(do)[:40]!r} on sessions", "do")

    def _geometry(self, request: dict[str, Any]) -> KvGeometry | None:
        loaded = self._versions.find(_text(request, "model"), "")
        return loaded.pages.geometry if loaded is not None else None


def _without_answer(step: Callable[[SessionStore, str, str, str], None], *names: str) -> Work:
    def work(store: SessionStore, ends: Ends) -> dict[str, Any]:
        step(store, *names)
        return {}

    return work


def _text(request: dict[str, Any], name: str) -> str:
    value = request.get(name)
    if not isinstance(value, str) or not value:
        raise InvalidRequest(f"{name} is {str(value)[:80]!r}; expected a text", name)
    return value


def _count(request: dict[str, Any], name: str) -> int:
    value = request.get(name, 0)
    if type(value) is not int or value < 0:
        raise InvalidRequest(f"{name} is {str(value)[:80]!r}; expected a number of at least 0", name)
    return value


def _inode(request: dict[str, Any]) -> int:
    value = request.get("inode")
    if type(value) is not int or value <= 0:
        raise InvalidRequest(f"inode is {str(value)[:80]!r}; expected the number of the file", "inode")
    return value


def _lister(request: dict[str, Any]) -> Work:
    after, moving = request.get("after"), bool(request.get("moving"))
    if after is not None and not (
        isinstance(after, list) and len(after) == 2 and all(isinstance(x, str) for x in after)
    ):
        raise InvalidRequest(f"after is {str(after)[:80]!r}; expected a tenant and an id", "after")
    place = tuple(after) if after else None

    def work(store: SessionStore, ends: Ends) -> dict[str, Any]:
        known = [one for one in store.all() if one.state != SETTLED and not (moving and one.state == "held")]
        known.sort(key=_place)
        rest = [one for one in known if place is None or _place(one) > place]
        shown = [
            {
                "tenant": one.tenant,
                "session": one.id,
                "state": one.state,
                "agent": one.agent if one.state != "held" else "",
                "move": one.move if one.state != "held" else "",
                "busy": one.state == "held" and transfer.is_busy(store, one),
            }
            for one in rest[:MAX_LISTED]
        ]
        return {"sessions": shown, "more": len(rest) > MAX_LISTED}

    return work


def _place(session: Session) -> tuple[str, str]:
    return session.tenant, session.id


def _export(
    store: SessionStore,
    tenant: str,
    session: str,
    ends: Ends,
    path: str,
    inode: int,
    geometry: KvGeometry | None = None,
) -> dict[str, Any]:
    """`inode`: of the file, whose path may name another one if the agent does not wait for the answer any more."""
    sent = transfer.export(store, tenant, session, ends)
    raw = sent.encode()
    if len(raw) > MAX_SENT_BYTES:
        raise InvalidRequest(f"session {session!r} has {len(raw)} bytes; at most {MAX_SENT_BYTES} are sent", "session")
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            if os.fstat(fd).st_ino != inode:
                raise Conflict("the agent does not wait for the session any more", "inode")
            write_all(fd, raw, 0)
        finally:
            os.close(fd)
    except OSError as error:
        raise InvalidRequest(f"the session cannot be written: {error.strerror}", "path") from None
    return {
        "move": sent.move,
        "bytes": len(raw),
        "tokens": len(sent.tokens) // 4,
        "owner": owner_of(sent.salt),
        "tails": _tails(sent, geometry),
    }


def _tails(sent: SentSession, geometry: KvGeometry | None) -> list[str]:
    """The hashes of a session's last pages, the last one first: which of them are in the arena, its headers say.

    None of a model with several layer groups, whose pages `prefix_exchange.py` cannot keep.
    """
    if geometry is None or geometry.groups.n_groups > 1:
        return []
    root = root_hash(bytes.fromhex(sent.digest), geometry, sent.salt)
    tokens = np.frombuffer(sent.tokens, "<i4")[:-1]  # the last one is not computed before the next turn
    return [one.hex() for one in page_hashes(root, tokens, geometry.page_tokens)[::-1][:MAX_TAILS]]


def _adopt(store: SessionStore, ends: Ends, path: str) -> dict[str, Any]:
    sent = _read(path)
    if (sent.digest, sent.tokenizer) != (ends.digest, ends.tokenizer):
        raise InvalidRequest(
            f"session {sent.id!r} is of model file {sent.digest[:16]} with tokenizer {sent.tokenizer[:16]}; this "
            f"engine has {ends.digest[:16]} with {ends.tokenizer[:16]}",
            "record",
        )
    if sent.target != ends.source:
        raise InvalidRequest(f"session {sent.id!r} was sent to agent {sent.target!r}, not {ends.source!r}", "record")
    return {"state": transfer.adopt(store, sent), "tenant": sent.tenant, "session": sent.id, "move": sent.move}


def _read(path: str) -> SentSession:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            info = os.fstat(fd)
            if not stat.S_ISREG(info.st_mode) or info.st_size > MAX_SENT_BYTES:
                raise InvalidRequest(f"{info.st_size} bytes; at most {MAX_SENT_BYTES} of a file are read", "path")
            raw = os.pread(fd, info.st_size, 0)
        finally:
            os.close(fd)
    except OSError as error:
        raise InvalidRequest(f"the sent session cannot be read: {error.strerror}", "path") from None
    return decode_sent(raw)
