"""How a session moves to another agent: what each of the two engines does with it.

    export     source  what is sent; the session stays HELD there
    check      target  whether it would adopt it, which is asked before anything large is sent; changes nothing
    adopt      target  keeps a copy: ARRIVED
    give_up    source  if the session is still what was exported: MOVED, and only a tombstone is left
    activate   target  its copy is HELD
    settle     source  the target holds the session: SETTLED

`give_up` is the moment at which the session changes its agent: before it only the source serves turns, after it only
the target.  Each call leaves its result on the disk before it returns, and may be repeated.  If the calls end in
between, each agent still says in which state its part is, and `refuse` at the source decides how the move ends:

    it was given up    `activate`, `settle`
    it was not         it never will be by this move: `discard` at the target

Raises the errors of pipeline/errors.py.
"""

from __future__ import annotations

from array import array
from typing import NamedTuple

from pipeline.errors import Conflict, InvalidRequest, NotFound, Overloaded, StorageUnavailable
from stages.kv.sessions.session_files import Session
from stages.kv.sessions.session_moves import ARRIVED, HELD, MOVED, SETTLED, Mark, SentSession, State
from stages.kv.sessions.session_store import SessionStore


class Ends(NamedTuple):
    """Between what a session moves."""

    digest: str  # of the model file, hex: equal at both
    tokenizer: str  # digest, hex: likewise
    source: str  # agents
    target: str


def export(store: SessionStore, tenant: str, session_id: str, ends: Ends) -> SentSession:
    """What is sent. Raises `NotFound`, `SessionMoved`, `Conflict`."""
    return _sent(_movable(store, tenant, session_id), ends)


def check(store: SessionStore, tenant: str, session_id: str, move: str, source: str, n_tokens: int) -> None:
    """Whether `adopt` would keep this copy now, as far as that can be said without it.

    `n_tokens`: of the session; 0: not known.  Raises what `adopt` raises but for `StorageUnavailable`.
    """
    known = store.find(tenant, session_id)
    if known is not None and known.state in (HELD, ARRIVED) and known.move == move:
        return
    if known is not None and not _may_be_replaced(known, source):
        raise _not_replaced(known)
    _check_room(store, known, tenant, session_id, n_tokens)


def adopt(store: SessionStore, sent: SentSession) -> State:
    """Keep a copy, of which no turn begins before `activate`.

    Raises `Conflict` if a later version of the session was here, or another session of the name is; `Overloaded`,
    `InvalidRequest`, `StorageUnavailable`.
    """
    known = store.find(sent.tenant, sent.id)
    if known is not None and known.state in (HELD, ARRIVED) and known.move == sent.move:
        return known.state
    if known is not None and not _is_replaced(known, sent):
        raise _not_replaced(known)
    tokens = sent.token_ids
    _check_room(store, known, sent.tenant, sent.id, len(tokens))
    session = Session(sent.id, sent.tenant, sent.salt, sent.ttl_s, sent.created, sent.last_use)
    mark = Mark(ARRIVED, sent.source, sent.move, sent.turns, sent.changes, store.clock())
    _replace_file(store, session, tokens, mark)
    if known is not None:
        store.forget(known)
    session.tokens = tokens
    session.mark(mark)
    store.add(session)
    return ARRIVED


def give_up(store: SessionStore, tenant: str, session_id: str, move: str, ends: Ends) -> State:
    """The target has its copy. Raises `NotFound`; `Conflict` if the session has changed or has a turn in progress."""
    gone = store.tombstones.get((tenant, session_id))
    if gone is not None and gone.move == move:
        return gone.state
    session = _movable(store, tenant, session_id)
    if _sent(session, ends).move != move:
        raise Conflict(f"session {session_id!r} has changed since it was exported", "session_id")
    most = store.bounds.max_sessions
    if sum(one.state == MOVED for one in store.tombstones.values()) >= most:
        raise Overloaded(f"the moves of {most} sessions are not complete", "session_id")
    mark = Mark(MOVED, ends.target, move, session.turns, session.changes + 1, store.clock())
    _replace_file(store, session, array("i"), mark)
    store.forget(session)
    session.mark(mark)
    store.add(session)
    settled = [one for one in store.tombstones.values() if one.state == SETTLED]
    for one in settled[: max(0, len(settled) - most)]:
        store.drop(one)
    return MOVED


def activate(store: SessionStore, tenant: str, session_id: str, move: str) -> bool:
    """The source has given the session up. False if the copy of this move is not here any more: it has ended."""
    session = store.find(tenant, session_id)
    if session is None or session.move != move or session.state not in (ARRIVED, HELD):
        return False
    if session.state == ARRIVED:
        _mark(store, session, Mark(HELD, session.agent, move, session.turns, session.changes + 1, store.clock()))
    return True


def settle(store: SessionStore, tenant: str, session_id: str, move: str) -> None:
    """The target holds the session: the tombstone goes after some time. Ignores others."""
    gone = store.tombstones.get((tenant, session_id))
    if gone is not None and gone.state == MOVED and gone.move == move:
        _mark(store, gone, Mark(SETTLED, gone.agent, move, gone.turns, gone.changes, store.clock()))


def refuse(store: SessionStore, tenant: str, session_id: str, move: str, ends: Ends) -> bool:
    """Whether the session was given up by this move and its copy is awaited; if not, it never will be.

    After SETTLED a copy of this move is one that came again, late: the session may have ended meanwhile.
    """
    session = store.find(tenant, session_id)
    if session is not None and session.state == MOVED:
        return session.move == move
    if session is not None and session.state == HELD and _sent(session, ends).move == move:
        changes = session.changes + 1  # with which its moves have other names
        _mark(store, session, Mark(HELD, session.agent, session.move, session.turns, changes, store.clock()))
    return False


def discard(store: SessionStore, tenant: str, session_id: str, move: str) -> None:
    """Drop a copy that the source will not give up. Ignores others."""
    session = store.find(tenant, session_id)
    if session is not None and session.state == ARRIVED and session.move == move:
        store.drop(session)


# ------------------------------------------------------------------ parts


def _movable(store: SessionStore, tenant: str, session_id: str) -> Session:
    session = store.find(tenant, session_id)
    if session is None:
        raise NotFound(f"there is no session {session_id!r} (any more)", "session_id")
    store.check_here(session)
    if is_busy(store, session):
        raise Conflict(f"session {session_id!r} has a turn in progress, or may have one", "session_id")
    return session


def is_busy(store: SessionStore, session: Session) -> bool:
    """Whether a turn is or may be in progress, or the client has yet to learn that turns were lost."""
    is_unsure = session.unsure_until > store.clock()
    return bool(session.holder) or is_unsure or bool(session.lost_bytes) or not session.turns


def _sent(session: Session, ends: Ends) -> SentSession:
    return SentSession(
        digest=ends.digest,
        tokenizer=ends.tokenizer,
        source=ends.source,
        target=ends.target,
        id=session.id,
        tenant=session.tenant,
        salt=session.salt,
        ttl_s=session.ttl_s,
        created=session.created,
        last_use=session.last_use,
        turns=session.turns,
        changes=session.changes,
        tokens=session.tokens.tobytes(),
    )


def _is_replaced(known: Session, sent: SentSession) -> bool:
    """Whether `sent` is later than what is known here, and replaces nothing that a source may have given up."""
    return _may_be_replaced(known, sent.source) and sent.version > (known.created, known.changes, known.turns)


def _may_be_replaced(known: Session, source: str) -> bool:
    """Whether a later version from `source` may replace what is known here."""
    return known.state != HELD and (known.state != ARRIVED or known.agent == source)


def _not_replaced(known: Session) -> Conflict:
    return Conflict(f"session {known.id!r} is {known.state} here, and this copy must not replace it", "session_id")


def _check_room(store: SessionStore, known: Session | None, tenant: str, session_id: str, n_tokens: int) -> None:
    """Raises `Overloaded`, `InvalidRequest`. `known`: what is here of the session."""
    if n_tokens > (most := store.bounds.max_tokens):
        raise InvalidRequest(f"session {session_id!r} has {n_tokens} tokens, at most {most} are kept", "session_id")
    if known is None or known.state != ARRIVED:
        store.check_room(tenant)


def _replace_file(store: SessionStore, session: Session, tokens: array[int], mark: Mark) -> None:
    try:
        store.files.replace(session, tokens, mark)
    except OSError as error:
        raise _no_disk(error) from None


def _mark(store: SessionStore, session: Session, mark: Mark) -> None:
    try:
        store.files.mark(session, mark)
    except OSError as error:
        raise _no_disk(error) from None
    session.mark(mark)


def _no_disk(error: OSError) -> StorageUnavailable:
    return StorageUnavailable(
        f"the session cannot be moved: {error.strerror}; free space in server.state_dir", "session_id"
    )
