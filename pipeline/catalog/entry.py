"""One published model, and the keys of its blobs.

    catalog/SLUG.json                       the manifest, `Entry` as JSON: placed last, replaced atomically
    catalog.json                            all manifests, for stores that cannot list (contents.py)
    models/DIGEST/SHA256.idx                the index, named by its own SHA-256
    models/DIGEST/CHECKSUM-00000.bin ...    the `.bin` in parts of 32 MiB, named by the checksum of all its pieces

Blobs below `models/` are named by their contents and never replaced.  A manifest names its index by SHA-256, the index
has a checksum for each 8 MiB piece of the `.bin`: what a manifest leads to is either the published bytes or refused.
Parts make an interrupted publication resumable in every store, and each is placed by one request, atomically.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from pipeline.config.rules import check_name
from pipeline.errors import ConfigError
from shm.checkpoint import PIECE_BYTES, n_pieces
from shm.decoding import DECODE_ERRORS

FORMAT = 1  # of a manifest
PART_BYTES = 32 << 20
MAX_MANIFEST_BYTES = 16 << 10
MAX_INDEX_BYTES = 256 << 20
FOLDER = "catalog"
LISTING = "catalog.json"

Sha256 = Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z")]
Xxh128 = Annotated[str, Meta(pattern=r"\A[0-9a-f]{32}\Z")]
Text = Annotated[str, Meta(max_length=512)]
Bytes = Annotated[int, Meta(ge=0, le=1 << 46)]
Natural = Annotated[int, Meta(ge=0)]


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """The GGUF file that was prepared."""

    file: Text  # name, without its directory
    bytes: Bytes
    title: Text = ""  # `general.name`
    architecture: Text = ""
    parameters: Natural = 0


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """The manifest."""

    format: int = FORMAT
    name: str  # what requests ask for
    digest: Sha256  # of the GGUF file
    source: Source
    index_sha256: Sha256
    index_bytes: Annotated[int, Meta(ge=1, le=MAX_INDEX_BYTES)]
    weights_bytes: Annotated[int, Meta(ge=1, le=1 << 46)]
    weights_checksum: Xxh128  # `Index.pieces_digest`
    part_bytes: Annotated[int, Meta(ge=PIECE_BYTES, le=1 << 40, multiple_of=PIECE_BYTES)] = PART_BYTES
    published: Natural = 0  # s since 1970

    @property
    def nbytes(self) -> int:
        """What a machine receives to run the model."""
        return self.index_bytes + self.weights_bytes

    @property
    def folder(self) -> str:
        """Where its blobs are."""
        return models_folder(self.digest)

    @property
    def index_key(self) -> str:
        """Key of the index."""
        return f"{self.folder}/{self.index_sha256}.idx"

    @property
    def n_parts(self) -> int:
        """Number of parts of the `.bin`."""
        return -(-self.weights_bytes // self.part_bytes)

    @property
    def n_pieces(self) -> int:
        """Number of pieces of the `.bin`, each with a checksum in the index."""
        return n_pieces(self.weights_bytes)

    def part_key(self, part: int) -> str:
        """Key of a part of the `.bin`."""
        return f"{self.folder}/{self.weights_checksum}-{part:05d}.bin"

    def part_size(self, part: int) -> int:
        """Bytes of a part."""
        return min(self.part_bytes, self.weights_bytes - part * self.part_bytes)

    def part_of(self, key: str) -> int | None:
        """The part of the `.bin` that has this key; None if none has."""
        number = key.removeprefix(f"{self.folder}/{self.weights_checksum}-").removesuffix(".bin")
        part = int(number) if len(number) == 5 and number.isascii() and number.isdigit() else -1
        return part if 0 <= part < self.n_parts and key == self.part_key(part) else None

    def has(self, key: str) -> bool:
        """Whether it is the key of one of the blobs."""
        return key == self.index_key or self.part_of(key) is not None

    def blobs(self) -> dict[str, int]:
        """Key and size of everything that the manifest names."""
        parts = {self.part_key(part): self.part_size(part) for part in range(self.n_parts)}
        return {self.index_key: self.index_bytes, **parts}

    def same_model(self, other: Entry) -> bool:
        """Whether both name the same bytes."""
        mine = (self.digest, self.index_sha256, self.weights_checksum, self.weights_bytes, self.part_bytes)
        return mine == (
            other.digest,
            other.index_sha256,
            other.weights_checksum,
            other.weights_bytes,
            other.part_bytes,
        )


def models_folder(digest: str) -> str:
    """Folder of a model's blobs."""
    return f"models/{digest}"


def manifest_key(name: str) -> str:
    """Key of a name's manifest."""
    return f"{FOLDER}/{name.replace('/', '--')}.json"


def encode(entry: msgspec.Struct) -> bytes:
    """The bytes of a manifest, of a model or of an adapter."""
    return msgspec.json.format(msgspec.json.encode(entry), indent=2) + b"\n"


def decode(raw: bytes, where: str) -> Entry:
    """The manifest. Raises `ConfigError`, which begins with `where`."""
    try:
        entry = msgspec.json.decode(raw, type=Entry)
    except DECODE_ERRORS as error:
        raise ConfigError(
            f"{where} is not a manifest of a model ({error}); publish the model again with --replace"
        ) from None
    return checked(entry, where)


def checked(entry: Entry, where: str) -> Entry:
    """The entry, if this release can use it. Raises `ConfigError`."""
    if entry.format != FORMAT:
        raise ConfigError(f"{where}: format is {entry.format}, expected {FORMAT}; use the release that published it")
    if reason := check_name(entry.name):
        raise ConfigError(f"{where}: the name {entry.name[:80]!r} cannot be used: {reason}")
    if entry.n_parts > 99_999:
        raise ConfigError(f"{where}: {entry.n_parts:,} parts, expected at most 99,999; publish the model again")
    return entry
