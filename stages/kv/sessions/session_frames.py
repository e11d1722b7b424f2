"""What the gateway says of sessions, as calls; and the answers, as frames. No sockets."""

from __future__ import annotations

from pipeline.errors import ModelUnavailable, StarlingError
from pipeline.protocol import messages as m
from stages.kv.sessions.session_store import Sessions


def answer(sessions: Sessions | None, holder: bytes, frame: m.Frame) -> m.Frame | None:
    """Do what `frame` asks for `holder`; None where there is nothing to say."""
    if isinstance(frame, m.SessionAbort):
        if sessions is not None:
            sessions.abort(holder, frame.tenant, frame.session, frame.turn)
        return None
    if not isinstance(frame, m.SessionBegin | m.SessionCommit | m.SessionClose):
        return None
    try:
        if sessions is None:
            raise ModelUnavailable(f"sessions of model {frame.model!r} are not available", param="session_id")
        return _do(sessions, holder, frame)
    except StarlingError as error:
        return m.SessionRefused(frame.id, error.code, error.message, error.param)


def _do(sessions: Sessions, holder: bytes, frame: m.SessionBegin | m.SessionCommit | m.SessionClose) -> m.Frame:
    if isinstance(frame, m.SessionBegin):
        session = sessions.begin(
            holder, frame.tenant, frame.session, frame.create, frame.ttl_s, frame.salt, frame.resume
        )
        return m.SessionHeld(frame.id, session.id, session.turn, session.tokens.tobytes(), session.salt)
    if isinstance(frame, m.SessionCommit):
        session = sessions.commit(holder, frame.tenant, frame.session, frame.turn, frame.base, frame.tokens)
        return m.SessionDone(frame.id, session.id, len(session.tokens))
    sessions.close(frame.tenant, frame.session)
    return m.SessionDone(frame.id, frame.session, 0)
