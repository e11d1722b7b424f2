"""Frames between gateway and kv: turns of sessions."""

from __future__ import annotations

from pipeline.errors import StarlingError
from pipeline.protocol.messages.frame import Frame, Heartbeat, Hello

MAX_SESSION_ID = 128  # characters of a session's id


class SessionBegin(Frame, tag="b"):
    """Begin a turn of a session; a session has one turn at a time. Answered by `SessionHeld` or `SessionRefused`.

    Sent again for a turn that has begun (the answer was lost, or `kv` has restarted), with `resume` the turn's
    number: the answer is the same.  `resume` -1: any turn that this sender may have begun before.
    """

    id: int  # correlates the answer; grows
    model: str
    tenant: str
    session: str = ""  # "" with `create`: `kv` generates the id
    create: bool = False  # create the session if it does not exist; otherwise NOT_FOUND
    ttl_s: int = 0  # of a new session: closed after this time without use; 0: never
    salt: str = ""  # of a new session: `Submit.cache_salt` of its turns
    resume: int = 0
    version: str = ""  # id of the model version that computes the turn; "": the serving one


class SessionCommit(Frame, tag="p"):
    """The turn has ended: the session now consists of its first `base` tokens followed by `tokens`.

    Idempotent.  The session is on the disk when the answer is sent.
    """

    id: int
    model: str
    tenant: str
    session: str
    turn: int
    base: int
    tokens: bytes  # int32 little-endian


class SessionAbort(Frame, tag="v"):
    """The turn was cancelled or failed: the session is as before, and removed if the turn created it. No answer."""

    model: str
    tenant: str
    session: str
    turn: int


class SessionClose(Frame, tag="z"):
    """Remove the session, its tokens and its pages; the model need not be loaded.

    Answered by `SessionDone`, or `SessionRefused` with NOT_FOUND.
    """

    id: int
    model: str
    tenant: str
    session: str


class SessionHeld(Frame, tag="h"):
    """The turn may begin. `tokens` are the session's tokens so far."""

    id: int
    session: str
    turn: int  # grows by one with each turn that is committed
    tokens: bytes  # int32 little-endian
    salt: str = ""


class SessionDone(Frame, tag="g"):
    """Committed or closed. `n_tokens` is the session's length now."""

    id: int
    session: str
    n_tokens: int


class SessionRefused(Frame, tag="u"):
    """Error answer. `code` and `param` as in pipeline/errors.py."""

    id: int
    code: str
    message: str
    param: str = ""
    moved_to: str = ""  # of SESSION_MOVED: the agent that has the session

    def to_error(self) -> StarlingError:
        """The error."""
        error = StarlingError(self.code, self.message, self.param)
        error.moved_to = self.moved_to
        return error


GatewayToKv = Hello | Heartbeat | SessionBegin | SessionCommit | SessionAbort | SessionClose
KvToGateway = Hello | Heartbeat | SessionHeld | SessionDone | SessionRefused
