"""Reads a SentencePiece model file: pieces with scores and kinds, and how texts are normalized.

The file is a protocol buffer, of which some fields of three messages are needed:
https://github.com/google/sentencepiece/blob/master/src/sentencepiece_model.proto
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from stages.worker.huggingface.config import UNSUPPORTED, CheckpointDirectoryError

_MAX_BYTES = 1 << 26
_MAX_PIECES = 1 << 21
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5  # wire types
_UNIGRAM, _BPE = 1, 2  # TrainerSpec.model_type
_TRAINER_TYPE, _TRAINER_SUFFIX, _TRAINER_BYTES = 3, 24, 35  # model_type, treat_whitespace_as_suffix, byte_fallback
_CHARSMAP, _ADDS_SPACE, _MERGES_SPACES, _ESCAPES_SPACES = 2, 3, 4, 5  # of NormalizerSpec
_KINDS = range(1, 7)  # as the token types of GGUF files


class Piece(NamedTuple):
    """One token. `kind` is a token type of GGUF files, which took over these numbers."""

    text: str
    score: float
    kind: int


class SentencePieceModel(NamedTuple):
    """What is needed of the file."""

    pieces: list[Piece]
    adds_space: bool
    is_unigram: bool = False
    charsmap: bytes = b""
    merges_spaces: bool = True


def read(path: Path) -> SentencePieceModel:
    """Read a file. Raises `CheckpointDirectoryError`, `OSError`."""
    size = path.stat().st_size
    if size > _MAX_BYTES:
        raise CheckpointDirectoryError(f"{path} has {size:,} bytes, expected at most {_MAX_BYTES:,}")
    try:
        return parse(path.read_bytes())
    except ValueError as error:
        raise CheckpointDirectoryError(f"{path} is not a SentencePiece model that can be used: {error}") from None


def parse(data: bytes) -> SentencePieceModel:
    """Read the message `ModelProto`. Raises `ValueError`."""
    pieces: list[Piece] = []
    trainer: dict[int, Any] = {}
    rules: dict[int, Any] = {}
    for number, value in _fields(data):
        if number == 1 and isinstance(value, bytes):
            pieces.append(_piece(value))
            if len(pieces) > _MAX_PIECES:
                raise ValueError(f"more than {_MAX_PIECES:,} pieces")
        elif number in (2, 3) and isinstance(value, bytes):
            (trainer if number == 2 else rules).update(_fields(value))
    kind = trainer.get(_TRAINER_TYPE, _UNIGRAM)
    if kind not in (_UNIGRAM, _BPE):
        raise ValueError(f"model_type is {kind}, expected {_UNIGRAM} (unigram) or {_BPE} (BPE); {UNSUPPORTED}")
    if not pieces:
        raise ValueError("it has no pieces; fetch the file again")
    adds_space = rules.get(_ADDS_SPACE, 1) != 0
    if kind == _BPE:
        return SentencePieceModel(pieces, adds_space)
    for name, value, expected in (
        ("treat_whitespace_as_suffix", trainer.get(_TRAINER_SUFFIX, 0), 0),
        ("byte_fallback", trainer.get(_TRAINER_BYTES, 0), 0),
        ("escape_whitespaces", rules.get(_ESCAPES_SPACES, 1), 1),
    ):
        if value != expected:
            raise ValueError(f"{name} is {value}, expected {expected} in a unigram model; {UNSUPPORTED}")
    charsmap = rules.get(_CHARSMAP, b"")
    if not isinstance(charsmap, bytes):
        raise ValueError("precompiled_charsmap is not bytes; fetch the file again")
    return SentencePieceModel(pieces, adds_space, True, charsmap, rules.get(_MERGES_SPACES, 1) != 0)


def _piece(data: bytes) -> Piece:
    text, score, kind = "", 0.0, 1
    for number, value in _fields(data):
        if number == 1 and isinstance(value, bytes):
            text = value.decode("utf-8", "replace")
        elif number == 2 and isinstance(value, float):
            score = value
        elif number == 3 and isinstance(value, int):
            kind = value
    if kind not in _KINDS:
        raise ValueError(f"piece {text[:40]!r} is of type {kind}, expected 1 to 6; fetch the file again")
    return Piece(text, score, kind)


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """(number, value) of a message's fields: int, float (32 bits) or bytes."""
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        match tag & 7:
            case 0:
                value, at = _varint(data, at)
                yield tag >> 3, value
                continue
            case 1:
                length = 8
            case 2:
                length, at = _varint(data, at)
            case 5:
                length = 4
            case other:
                raise ValueError(f"wire type {other} at byte {at}; fetch the file again")
        raw = data[at : at + length]
        if len(raw) != length:
            raise ValueError(f"it ends within a field at byte {at}: truncated; fetch the file again")
        at += length
        yield tag >> 3, struct.unpack("<f", raw)[0] if tag & 7 == _FIXED32 else raw


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if at >= len(data) or shift > 63:
            raise ValueError(f"it ends within a number at byte {at}: truncated; fetch the file again")
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at
