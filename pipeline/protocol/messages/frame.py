"""What all frames are, the two of every edge and both directions, and the version of the protocol."""

from __future__ import annotations

import msgspec

PROTOCOL_VERSION = 3


class Frame(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, frozen=True):
    """Base of all frames."""


class Hello(Frame, tag="H"):
    """First frame of a process to a peer, sent again when it has discarded its state about that peer."""

    stage: str
    epoch: int  # start of this process, ns since 1970; a larger epoch replaces a smaller one
    pid: int
    start_ticks: int  # /proc/PID/stat field 22; (pid, start_ticks) identifies the process uniquely
    protocol: int = PROTOCOL_VERSION
    contact: int = 0  # grows each time the sender has discarded the receiver, see pipeline/ipc/liveness.py


class Heartbeat(Frame, tag="B"):
    """Sent every `heartbeat_ms` on every edge; less often by an idle stage, see pipeline/ipc/liveness.py."""

    stage: str
    epoch: int
    progress: int  # grows while the stage works; a busy stage whose value does not change is stuck
    busy: bool  # it has work
    ready: bool  # it can take work
    reason: str = ""  # why it is not ready
    idle: bool = False  # no work for a while: the next heartbeats may come less often
    sent: int = -1  # frames sent to this peer since `Hello`, set by the endpoint; detects lost frames. -1: not set


def encode(frame: Frame, _encoder: msgspec.msgpack.Encoder = msgspec.msgpack.Encoder()) -> bytes:
    """One frame as msgpack bytes."""
    return _encoder.encode(frame)
