"""The prepared form of an adapter: `models/adapters/DIGEST.lora`, named by the SHA-256 of its own bytes.

    8 bytes     "STARLORA"
    4 bytes     length of the header, u32 little-endian
    header      msgpack of `Header`
    data        from the next multiple of 64 bytes on: the matrices as kernels read them (checkpoint/layout.py)

The digest is that of everything that determines the adapter's effect on the model, so it identifies the adapter
wherever answers must be the same: in the journal, in the prefix cache, and after a restart.  Files are immutable and
placed by rename.  The same adapter as GGUF file and as PEFT directory has one digest.  A fleet publishes this form: it
is also a kind of file that a model's settings may name.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from pipeline.errors import ConfigError, ResourceError
from pipeline.files import replace_file
from shm.arena import align
from shm.checkpoint import Index
from shm.decoding import DECODE_ERRORS
from stages.worker.adapters.adapter import PARAM, Pair, pairs_of
from stages.worker.checkpoint.layout import pack

MAGIC = b"STARLORA"
VERSION = 1
ADAPTERS = "adapters"  # the folder in the models directory
_HEAD = len(MAGIC) + 4
MAX_HEADER = 1 << 24  # bytes


class PairPlace(msgspec.Struct, array_like=True, frozen=True):
    """A pair of matrices; offsets are bytes in the data, formats GGML's numbers."""

    layer: int
    target: int
    rank: int
    rows: int  # of B
    columns: int  # of A
    scale: float
    a_format: int
    a_offset: int
    b_format: int
    b_offset: int


class Header(msgspec.Struct, array_like=True, frozen=True):
    """What the data is. `n_layers`: of the model."""

    version: int
    n_layers: int
    nbytes: int
    pairs: list[PairPlace]


class Prepared(NamedTuple):
    """An adapter that can be loaded; `data` (n,) u8."""

    digest: str
    header: Header
    data: np.ndarray

    @property
    def max_rank(self) -> int:
        """The largest rank of its pairs."""
        return max(pair.rank for pair in self.header.pairs)


def prepare_adapter(source: Path, base: Index, folder: Path, max_rank: int, max_bytes: int) -> Prepared:
    """Read an adapter's file or directory for a model, and store its prepared form in `folder`.

    Raises `ConfigError`, `ResourceError`.
    """
    # Only workers with adapters import the readers.
    from stages.worker.adapters.gguf_adapter import read_gguf_adapter
    from stages.worker.adapters.peft_adapter import read_peft_adapter

    try:
        is_directory = source.is_dir()
        if not is_directory and source.exists() and not source.is_file():
            raise ConfigError(f"adapter {source} is not a regular file, nor a PEFT directory", PARAM)
        if not is_directory and is_prepared(source):
            return _checked(source, folder, base, max_rank, max_bytes)
        changes = read_peft_adapter(source, base) if is_directory else read_gguf_adapter(source, base.architecture)
        raw = encode(pairs_of(source, changes, base, max_rank), base.hyper.n_layers, max_bytes, str(source))
    except OSError as error:
        raise ConfigError(f"adapter {source} cannot be read: {error.strerror or error}", PARAM) from None
    return decode(_store(folder, raw), raw)


def is_prepared(path: Path) -> bool:
    """Whether a file begins as the prepared form does. Raises `OSError`."""
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def _checked(source: Path, folder: Path, base: Index, max_rank: int, max_bytes: int) -> Prepared:
    """A prepared adapter for a model, which is compared with its matrices when it is loaded. Raises `ConfigError`."""
    raw = source.read_bytes()
    found = decode(source, raw)
    if found.header.n_layers != base.hyper.n_layers:
        raise ConfigError(
            f"{source} is of a model of {found.header.n_layers} layers, and this one has {base.hyper.n_layers}: use an "
            f"adapter that was trained for this model",
            PARAM,
        )
    if found.max_rank > max_rank:
        raise ConfigError(
            f"{source}: rank is {found.max_rank}, expected 1 to {max_rank} (models.max_adapter_rank): raise that, or "
            f"use an adapter of a smaller rank",
            PARAM,
        )
    if found.data.size > max_bytes:
        raise ConfigError(
            f"{source} takes {found.data.size:,} bytes in memory, of which {max(0, max_bytes):,} are left "
            f"(models.adapters_mb): raise that, or use an adapter of a smaller rank",
            PARAM,
        )
    if len(source.stem) == 64 and source.stem != hashlib.sha256(raw).hexdigest():  # else its name says nothing
        raise ConfigError(f"{source} does not have the SHA-256 in its name: it is damaged; remove it", PARAM)
    return decode(_store(folder, raw), raw)


def _store(folder: Path, raw: bytes) -> Path:
    """The path of the prepared form with these bytes, which are written unless they are there."""
    digest = hashlib.sha256(raw).hexdigest()
    path = folder / f"{digest}.lora"
    if not path.is_file():
        try:
            folder.mkdir(parents=True, exist_ok=True)
            replace_file(path, raw)
        except OSError as error:
            raise ResourceError(f"{path} cannot be written: {error.strerror}; free space there", param=PARAM) from None
    return path


def open_prepared(folder: Path, digest: str) -> Prepared | None:
    """The prepared adapter with that digest; None when it is not stored, or damaged."""
    path = folder / f"{digest}.lora"
    try:
        raw = path.read_bytes()
        return decode(path, raw) if hashlib.sha256(raw).hexdigest() == digest else None
    except (OSError, ConfigError):
        return None


def encode(pairs: Sequence[Pair], n_layers: int, max_bytes: int, label: str) -> bytes:
    """The bytes of the prepared form. Raises `ConfigError` when they are more than `max_bytes`."""
    places: list[PairPlace] = []
    parts: list[np.ndarray] = []
    at = 0

    def add(rows: np.ndarray, pair_format: int, packed: np.ndarray) -> int:
        nonlocal at
        begin, at = at, align(at + packed.size)
        if at > max_bytes:
            raise ConfigError(
                f"{label} takes more than {max_bytes:,} bytes in memory (models.adapters_mb): raise that, or use an "
                f"adapter of a smaller rank",
                PARAM,
            )
        parts.extend((packed, np.zeros(at - begin - packed.size, np.uint8)))
        return begin

    stored: dict[int, int] = {}  # A of fused matrices is stored once
    for pair in pairs:
        if id(pair.a.rows) not in stored:
            stored[id(pair.a.rows)] = add(pair.a.rows, pair.a.format.id, _packed(pair.a.rows, pair.a.format))
        b_offset = add(pair.b.rows, pair.b.format.id, _packed(pair.b.rows, pair.b.format))
        places.append(
            PairPlace(
                pair.layer,
                pair.target,
                pair.rank,
                pair.b.shape[0],
                pair.a.shape[1],
                float(np.float32(pair.scale)),
                pair.a.format.id,
                stored[id(pair.a.rows)],
                pair.b.format.id,
                b_offset,
            )
        )
    header = msgspec.msgpack.encode(Header(VERSION, n_layers, at, places))
    head = MAGIC + len(header).to_bytes(4, "little") + header
    return head + bytes(align(len(head)) - len(head)) + b"".join(part.tobytes() for part in parts)


def _packed(rows: np.ndarray, fmt: object) -> np.ndarray:
    return np.concatenate([piece.reshape(-1) for piece in pack(rows, fmt)])  # type: ignore[arg-type]


def decode(path: Path, raw: bytes) -> Prepared:
    """The prepared adapter with these bytes, those of the file at `path`. Raises `ConfigError`."""
    length = int.from_bytes(raw[len(MAGIC) : _HEAD], "little")
    try:
        if raw[: len(MAGIC)] != MAGIC or length > min(MAX_HEADER, len(raw) - _HEAD):
            raise ValueError("no header")
        header = msgspec.msgpack.decode(raw[_HEAD : _HEAD + length], type=Header)
        data = np.frombuffer(raw, np.uint8)[align(_HEAD + length) :]
        if header.version != VERSION or data.size != header.nbytes or not header.pairs:
            raise ValueError(f"version {header.version}, {data.size} bytes")
    except (ValueError, *DECODE_ERRORS) as error:
        raise ConfigError(f"{path} is not a prepared adapter ({error}); remove it", PARAM) from None
    return Prepared(path.stem, header, data)
