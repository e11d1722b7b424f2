"""Frames between the scheduler and its two helper processes, one of which vets grammars and one writes token masks.

A packet is a msgpack array of frames.  Tokens and masks stay in the step arena: frames say which row and how many.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from pipeline.protocol.messages import Constraint, Frame

MAX_PACKET = 96 << 10  # bytes after which a new packet begins; one frame has at most a constraint's text more


class Vocabulary(Frame, tag="v"):
    """The tokens of a model version, in a file with a `VocabularyFile`."""

    version: str
    path: str


class Rows(Frame, tag="r"):
    """A version has a new step arena."""

    version: str
    path: str


class Vet(Frame, tag="c"):
    """Compile a constraint, to see whether that works within the bounds. Answered by `Begun`, then `Vetted`."""

    id: int
    version: str
    constraint: Constraint


class Begun(Frame, tag="B"):
    """The compilation begins: the process has started, and has read the vocabulary."""

    id: int


class Vetted(Frame, tag="C"):
    """`error`: why the constraint cannot be used; "": it can."""

    id: int
    error: str


class Open(Frame, tag="o"):
    """A sequence with a constraint that was vetted; `Mask` follows."""

    sequence: str
    version: str
    tenant: str
    constraint: Constraint


class Mask(Frame, tag="m"):
    """Write the mask for the token after the `length` tokens that the row holds, under a tag of this epoch.

    With `drafts`, also those after each draft token that the constraint allows; answered by `Kept`.  If the row has
    another serial number (shm/step_ring.py) it belongs to another sequence by now, and no mask is wanted; 0: any.
    """

    sequence: str
    row: int
    prompt_len: int
    length: int
    epoch: int
    drafts: tuple[int, ...] = ()
    serial: int = 0


class Compiling(Frame, tag="b"):
    """The mask process begins to compile the constraint of a sequence. `id`: from 1 in each process."""

    id: int
    sequence: str


class Compiled(Frame, tag="e"):
    """That compilation has ended."""

    id: int


class Kept(Frame, tag="K"):
    """The first `count` draft tokens of the `Mask` with that epoch are allowed, and their masks are written."""

    sequence: str
    epoch: int
    count: int


class Failed(Frame, tag="F"):
    """No mask can be computed for the sequence. `code`: of pipeline/errors.py."""

    sequence: str
    reason: str
    code: str


class Close(Frame, tag="x"):
    """The sequence has ended."""

    sequence: str


class Forget(Frame, tag="f"):
    """The version is unloaded: its sequences have ended, and no frame about it follows."""

    version: str


class VocabularyFile(msgspec.Struct, array_like=True):
    """Content of a vocabulary's file; fields as in `messages.ModelVocabulary`."""

    pieces: bytes
    piece_ends: bytes
    control: bytes
    eos_ids: tuple[int, ...]


ToHelper = Vocabulary | Rows | Vet | Open | Mask | Close | Forget
FromHelper = Begun | Vetted | Compiling | Compiled | Kept | Failed

_encoder = msgspec.msgpack.Encoder()
decode_frames = msgspec.msgpack.Decoder(list[ToHelper]).decode  # a packet of the scheduler
decode_answers = msgspec.msgpack.Decoder(list[FromHelper]).decode  # a packet of a helper


def packets(frames: Iterable[Frame]) -> Iterator[bytes]:
    """The frames in packets of about `MAX_PACKET` bytes."""
    batch: list[msgspec.Raw] = []
    size = 0
    for frame in frames:
        data = _encoder.encode(frame)
        if batch and size + len(data) > MAX_PACKET:
            yield _encoder.encode(batch)
            batch, size = [], 0
        batch.append(msgspec.Raw(data))
        size += len(data)
    if batch:
        yield _encoder.encode(batch)
