"""Frames between the gateway and the process of a plugin, on its stdin and stdout.

frame    a length (`LENGTH`), and msgpack
in       `Start`, then calls (`Pre`, `Post`) and `Drop`
out      `Ready` or `Failed`, then one reply to each call, in their order
"""

from __future__ import annotations

import struct
from typing import Any

import msgspec

from stages.gateway.plugins.interface import InferenceRequest

LENGTH = struct.Struct("<I")
ERROR, REFUSED, WRONG = "error", "refused", "wrong"  # kinds of `Failed`


class Start(msgspec.Struct, tag="start", array_like=True):
    """Load the plugin."""

    target: str  # MODULE:CLASS
    options: dict[str, Any]
    memory_bytes: int


class Pre(msgspec.Struct, tag="pre", array_like=True):
    """Call `pre_inference`."""

    request: InferenceRequest


class Post(msgspec.Struct, tag="post", array_like=True):
    """Call `post_inference` with more text of a sequence."""

    key: int  # of the sequence
    text: str  # more of it
    is_final: bool
    finish_reason: str
    # With the first text that a process gets of a sequence, which is all text so far: request id, endpoint, model,
    # tenant, choice, and the output of the plugin so far.
    about: tuple[str, str, str, str, int, str] | None = None


class Drop(msgspec.Struct, tag="drop", array_like=True):
    """No more text of a sequence follows. It has no reply."""

    key: int


class Ready(msgspec.Struct, tag="ready", array_like=True):
    """The plugin is initialized."""

    version: str
    has_pre: bool
    has_post: bool
    streams: bool


class PreDone(msgspec.Struct, tag="pre", array_like=True):
    """The request, changed."""

    request: InferenceRequest


class PostDone(msgspec.Struct, tag="post", array_like=True):
    """What the output has more than before."""

    text: str


class Failed(msgspec.Struct, tag="failed", array_like=True):
    """The call raised, or returned something that cannot be used. `message` is for the client, `place` for the log."""

    kind: str
    message: str
    param: str = ""
    place: str = ""


Incoming = Start | Pre | Post | Drop
Reply = Ready | PreDone | PostDone | Failed
decode_incoming = msgspec.msgpack.Decoder(Incoming).decode
decode_reply = msgspec.msgpack.Decoder(Reply).decode


def frame(message: Incoming | Reply) -> bytes:
    """Return the bytes of a message. Raises what msgspec raises for values that msgpack cannot have."""
    content = msgspec.msgpack.encode(message)
    return LENGTH.pack(len(content)) + content
