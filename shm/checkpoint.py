"""The checkpoint pair `DIGEST.idx` and `DIGEST.bin` that a model is loaded from. Independent of GGUF and kernels.

    DIGEST.idx   msgpack: [version, XXH3-64 of the next, msgpack of `Index`, XXH3-64 of the last, padding, tables]
    DIGEST.bin   the tensors in the layout that the kernels read, each 64-byte aligned, in the order of use;
                 then at least 64 zero bytes, to the end of a 4096-byte page

Ingest writes both once and places them by rename, `.bin` first: if an `.idx` exists, so does its `.bin`.  Mapped files
are immutable and never truncated; all processes share their memory.

`Index.pieces` are the XXH3-64 checksums of the `.bin`, one for each 8 MiB, so that all cores can verify it at the speed
of memory and a transfer can verify each piece as it arrives.  A tensor's own checksum names the tensor that a
damaged piece belongs to.

The tables of an `.idx` are the compiled vocabulary (pipeline/models/vocabulary_tables.py), 64-byte aligned: the
tokenizer maps them.  An `.idx` of version 2 has none, and one of version 1 is `Index` alone, without pieces: they are
read as they are, and the next preparation replaces them (stages/worker/checkpoint/verify.py).

`layout` of a tensor: "rows" is plain row-major f32; "groups" is interleaved by 16 rows as
`stages/worker/checkpoint/layout.py` draws it.  Tied embeddings are stored once.
"""

from __future__ import annotations

import functools
import hashlib
import mmap
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import msgspec
import numpy as np
import xxhash

from shm import huge_pages
from shm.decoding import DECODE_ERRORS
from shm.hyper import Hyper as Hyper
from shm.index_head import HEAD_BYTES, tables_begin
from shm.named_stripping import has_named_stripping
from shm.packed_arrays import pack, unpack
from shm.populate import read_mapped
from shm.tensor_checksum import has_checksum

VERSION = 3  # of the index; grows when its layout changes
# Still read, and migrated; files of other versions are ingested again.
VERSION_WITHOUT_TABLES, VERSION_WITHOUT_PIECES = 2, 1
VOCABULARY_REVISION = 1  # of `TokenizerData`; since 1, None says that a file does not state a flag
STRIPPING_REVISION = 2  # of those of models with tokens that take white space: since 2, these are listed
ALIGNMENT = 64
PIECE_BYTES = 8 << 20  # of the `.bin`, for each checksum


class CheckpointError(RuntimeError):
    """A checkpoint cannot be used; the message names the file, the field, its value and the remedy."""


class Tensor(msgspec.Struct, array_like=True, frozen=True):
    """Place and format of a tensor."""

    name: str  # as in the GGUF; "rope.*" for tables made at ingest
    rows: int
    columns: int  # K for a matrix; a vector has one row
    format: str  # GGML name: "Q4_1", "F32", ...
    layout: str  # "rows" or "groups"
    offset: int  # in `.bin`, bytes
    nbytes: int
    checksum: str  # of the bytes: "xxh3:" and XXH3-128, hex; of older releases BLAKE2b-128, hex


class TokenizerData(msgspec.Struct, array_like=True, frozen=True):
    """The `tokenizer.*` keys of a GGUF; a missing id is -1."""

    model: str
    pre: str
    tokens: list[str]
    types: list[int]
    merges: list[str]
    scores: list[float]
    bos: int
    eos: int
    eot: int
    unknown: int
    padding: int
    add_bos: bool | None  # None: the file does not say
    add_space_prefix: bool | None  # likewise
    chat_template: str
    revision: int = 0  # `VOCABULARY_REVISION` when it was written, or `STRIPPING_REVISION`
    fim: tuple[int, ...] = ()  # of fill in the middle: prefix, suffix, middle
    fim_ends: tuple[int, ...] = ()  # tokens that end what was filled in
    charsmap: bytes = b""  # of unigram vocabularies: SentencePiece's table of character replacements
    merges_spaces: bool | None = None  # None: the file does not say
    strips_right: tuple[int, ...] = ()  # special tokens that take the white space behind them,
    strips_left: tuple[int, ...] = ()  # and before them
    strips_unicode: bool | None = None  # that white space is Unicode's; None: it is ASCII's

    def packed(self) -> bytes:
        """As msgpack. Later fields are left out where they say nothing, so that the digests of older releases stay."""
        fields = list(msgspec.structs.astuple(self))
        while len(fields) > _FIRST_FIELDS and fields[-1] in ((), b"", None):
            fields.pop()
        return msgspec.msgpack.encode(fields)


class TokenizerHead(msgspec.Struct, array_like=True, frozen=True):
    """`TokenizerData` whose lists are not decoded."""

    model: str
    pre: str
    tokens: msgspec.Raw
    types: msgspec.Raw
    merges: msgspec.Raw
    scores: msgspec.Raw
    bos: int
    eos: int
    eot: int
    unknown: int
    padding: int
    add_bos: bool | None
    add_space_prefix: bool | None
    chat_template: str
    revision: int = 0
    fim: tuple[int, ...] = ()
    fim_ends: tuple[int, ...] = ()
    charsmap: bytes = b""
    merges_spaces: bool | None = None
    strips_right: tuple[int, ...] = ()
    strips_left: tuple[int, ...] = ()
    strips_unicode: bool | None = None


_FIRST_FIELDS = 15  # of `TokenizerData`, up to `revision`
# Since the last change of a file whose index is kept: a change within the same tick of the clock would not be seen.
SETTLED_NS = 1_000_000_000


class Index(msgspec.Struct, array_like=True, frozen=True, dict=True):
    """Everything of a model except its weights."""

    version: int
    digest: str  # SHA-256 of the source, hex
    architecture: str
    name: str
    parameters: int  # weights of the source, counted once
    source_bytes: int
    bin_bytes: int
    hyper: Hyper
    tokenizer_raw: msgspec.Raw  # msgpack of `TokenizerData`, decoded only on demand: ranks do not need it
    tensors: list[Tensor]
    pieces: list[int] = []  # XXH3-64 of each 8 MiB of the `.bin`, the last one shorter; empty in version 1
    pooling: str = ""  # of embeddings: "mean", "last" or "cls"; "rank": scores of pairs; "": the file does not say
    adds_eos: bool = False  # a text to be embedded ends with the EOS token

    @property
    def pieces_digest(self) -> str:
        """XXH3-128 (hex) of the checksums of all pieces: identifies the bytes that the `.bin` must have."""
        return xxhash.xxh3_128_hexdigest(b"".join(piece.to_bytes(8, "little") for piece in self.pieces))

    @property
    def quantization(self) -> str:
        """The format of most bytes of the weights, "Q4_K"; "" without tensors."""
        nbytes: Counter[str] = Counter()
        for tensor in self.tensors:
            nbytes[tensor.format] += tensor.nbytes
        return max(nbytes, key=nbytes.__getitem__, default="")

    @property
    def has_current_windows(self) -> bool:
        """Whether the layers with a RoPE of their own are known: older releases lost them where the window is large."""
        return self.architecture != "gemma3" or bool(self.hyper.windows)

    @property
    def tokenizer(self) -> TokenizerData:
        """Decode the tokenizer data, at every call. Raises `CheckpointError`."""
        try:
            return msgspec.msgpack.decode(self.tokenizer_raw, type=TokenizerData)
        except DECODE_ERRORS as error:
            raise CheckpointError(f"index of {self.name}: bad tokenizer data ({error}); ingest it again") from None

    @property
    def tokenizer_head(self) -> TokenizerHead:
        """The tokenizer data without its lists, which the tables stand for. Raises `CheckpointError`."""
        try:
            return msgspec.msgpack.decode(self.tokenizer_raw, type=TokenizerHead)
        except DECODE_ERRORS as error:
            raise CheckpointError(f"index of {self.name}: bad tokenizer data ({error}); ingest it again") from None

    @property
    def has_current_vocabulary(self) -> bool:
        """Whether the tokenizer data has all that its kind of vocabulary needs. Raises `CheckpointError`."""
        try:
            kind = msgspec.msgpack.decode(self.tokenizer_raw, type=_Kind)
        except DECODE_ERRORS as error:
            raise CheckpointError(f"index of {self.name}: bad tokenizer data ({error}); ingest it again") from None
        if kind.model != "none" and has_named_stripping(self.name, kind.pre):
            return self.tokenizer_head.revision >= STRIPPING_REVISION
        # Byte-level vocabularies of revision 0 are complete.
        return kind.model in ("gpt2", "none") or self.tokenizer_head.revision >= VOCABULARY_REVISION

    @property
    def is_current(self) -> bool:
        """Whether this release can use it; else it is made again. Raises `CheckpointError`."""
        return self.has_current_windows and self.has_current_vocabulary

    @property
    def revision(self) -> str:
        """What changed since older releases, which answer differently from the same file; "": nothing.

        Raises `CheckpointError`.
        """
        vocabulary = self.tokenizer_head.revision
        kv = f"-kv{self.hyper.kv_revision}" if self.hyper.kv_revision else ""
        return f"{kv}-vocabulary{vocabulary}" if vocabulary >= STRIPPING_REVISION else kv

    @functools.cached_property  # of megabytes
    def tokenizer_digest(self) -> str:
        """SHA-256 (hex) of vocabulary, merges, special ids and template: equal digests give ids the same meaning."""
        return hashlib.sha256(self.tokenizer_raw).hexdigest()

    @property
    def vocabulary_digest(self) -> str:
        """SHA-256 (hex) of the text pieces of the token ids. Raises `CheckpointError`."""
        try:
            pieces = msgspec.msgpack.decode(self.tokenizer_raw, type=_Pieces)
        except DECODE_ERRORS as error:
            raise CheckpointError(f"index of {self.name}: bad tokenizer data ({error}); ingest it again") from None
        return hashlib.sha256(msgspec.msgpack.encode([pieces.model, pieces.tokens])).hexdigest()

    def tensor(self, name: str) -> Tensor:
        """Return a tensor's description. Raises `KeyError` when the model has no such tensor."""
        for t in self.tensors:
            if t.name == name:
                return t
        raise KeyError(name)

    def tensors_in(self, piece: int) -> list[Tensor]:
        """The tensors of which bytes are in a piece of the `.bin`, in order."""
        begin, end = piece * PIECE_BYTES, (piece + 1) * PIECE_BYTES
        return [t for t in self.tensors if t.offset < end and t.offset + t.nbytes > begin]

    def has(self, name: str) -> bool:
        """Whether the model has a tensor of this name."""
        return any(t.name == name for t in self.tensors)

    @property
    def decode_bytes(self) -> int:
        """Bytes of the weights that a token's decode step reads.

        That is all but tables by position, an untied embedding, and experts that the token is not given to.
        """
        is_tied, h = self.head_name == "token_embd.weight", self.hyper
        return sum(
            t.nbytes * h.n_experts_used // h.n_experts if "_exps." in t.name else t.nbytes
            for t in self.tensors
            if not t.name.startswith(("rope.", "position_embd")) and (is_tied or t.name != "token_embd.weight")
        )

    @property
    def head_name(self) -> str:
        """Name of the output head: its own tensor, or the embedding when the two are tied."""
        return "output.weight" if self.has("output.weight") else "token_embd.weight"


_last: tuple[tuple[int, ...], Index] | None = None  # the index that was read last, and the identity of its file


class _Kind(msgspec.Struct, array_like=True):
    """The first fields of `TokenizerData`."""

    model: str
    pre: str = ""


class _Pieces(msgspec.Struct, array_like=True):
    """The first fields of `TokenizerData`; the decoder skips the rest."""

    model: str
    pre: str
    tokens: list[str]


class _Head(msgspec.Struct, array_like=True):
    version: int


class _File(msgspec.Struct, array_like=True):
    """The `.idx` since version 2. Decoded, the bytes are views of the map."""

    version: int
    checksum: int  # XXH3-64 of `payload`
    payload: memoryview  # msgpack of `Index`
    # Since version 3.
    tables_checksum: int = 0  # XXH3-64 of `tables`
    padding: memoryview = memoryview(b"")  # aligns `tables`
    tables: memoryview = memoryview(b"")  # the compiled vocabulary, packed_arrays.py; empty for a kind that has none


def load_index(path: Path, *, is_fresh: bool = False) -> Index:
    """Read and check an `.idx`, all but its tables. Raises `FileNotFoundError`, `CheckpointError`.

    A process keeps the last one: a start needs it several times, and forks have that of their parent.  `is_fresh`: read
    it again, to find a file that a disk has damaged; nothing is kept, and a file that is gone is not kept either.
    """
    global _last
    last = _last  # other threads may replace it
    try:
        if not is_fresh and last is not None and last[0] == _identity(os.stat(path)):
            return last[1]
        raw, info = _map(path, has_tables=False)
    except FileNotFoundError:
        _last = None  # else it would keep the space of the file, which may be the one that is gone
        raise
    index = _decode_index(path, raw)
    if not is_fresh and time.time_ns() - info.st_ctime_ns > SETTLED_NS:
        _last = _identity(info), index
    return index


def _identity(info: os.stat_result) -> tuple[int, ...]:
    """Differs for another file, and for one that has been changed."""
    return info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns, info.st_ctime_ns


def _decode_index(path: Path, raw: memoryview) -> Index:
    try:
        # Check the version first: the rest of another version may have another shape.
        version = msgspec.msgpack.decode(raw, type=_Head).version
        if version in (VERSION, VERSION_WITHOUT_TABLES):
            file = msgspec.msgpack.decode(raw, type=_File)
            raw = _checked(path, file.payload, file.checksum)
        elif version != VERSION_WITHOUT_PIECES:
            raise CheckpointError(f"{path}: version is {version}, expected {VERSION}; remove it to ingest again")
        index = msgspec.msgpack.decode(raw, type=Index)
    except DECODE_ERRORS as error:
        raise CheckpointError(f"{path}: not a checkpoint index ({error}); remove it to ingest again") from None
    if index.version != version:
        raise CheckpointError(f"{path}: version is {version} and {index.version}; remove it to ingest again")
    for t in index.tensors:
        if t.offset % ALIGNMENT or t.offset < 0 or t.nbytes < 0 or t.offset + t.nbytes > index.bin_bytes:
            raise CheckpointError(
                f"{path}: tensor {t.name} lies at {t.offset}..{t.offset + t.nbytes} of "
                f"{index.bin_bytes} bytes; remove it to ingest again"
            )
    if version != VERSION_WITHOUT_PIECES and len(index.pieces) != n_pieces(index.bin_bytes):
        raise CheckpointError(
            f"{path}: {len(index.pieces)} checksums, expected {n_pieces(index.bin_bytes)} for {index.bin_bytes} bytes; "
            f"remove it to ingest again"
        )
    return index


def load_tables(path: Path) -> dict[str, np.ndarray]:
    """Map the compiled vocabulary of an `.idx`: views by name; none in an older one. Raises as `load_index` does."""
    raw, _ = _map(path, has_tables=True)
    try:
        if msgspec.msgpack.decode(raw, type=_Head).version != VERSION:
            return {}
        file = msgspec.msgpack.decode(raw, type=_File)
        if any(file.padding):
            raise CheckpointError(f"{path}: the padding is not zero: the file is damaged; remove it to ingest again")
        tables = unpack(_checked(path, file.tables, file.tables_checksum))
        cast(mmap.mmap, raw.obj).madvise(mmap.MADV_DONTNEED)  # read for the checksum; what is looked up comes back
        return tables
    except (*DECODE_ERRORS, ValueError) as error:
        raise CheckpointError(f"{path}: not a checkpoint index ({error}); remove it to ingest again") from None


def _map(path: Path, *, has_tables: bool) -> tuple[memoryview, os.stat_result]:
    """Map an `.idx`; all but the tables, or all, is in memory then. Raises `CheckpointError`, and as `open` does."""
    with open(path, "rb") as file:
        info = os.fstat(file.fileno())
        if not info.st_size:
            raise CheckpointError(f"{path}: the file is empty; remove it to ingest again")
        found = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        try:
            head = b"" if has_tables else os.pread(file.fileno(), HEAD_BYTES, 0)
            read_mapped(file.fileno(), found, tables_begin(head, info.st_size))
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error.strerror}; remove it to ingest again") from None
        return memoryview(found), info


def _checked(path: Path, data: memoryview, checksum: int) -> memoryview:
    if (found := xxhash.xxh3_64_intdigest(data)) != checksum:
        raise CheckpointError(
            f"{path}: checksum is {found:016x}, expected {checksum:016x}: the file is damaged; remove it to "
            f"ingest again"
        )
    return data


def write_index(path: Path, index: Index, tables: Mapping[str, np.ndarray] = MappingProxyType({})) -> None:
    """Replace an `.idx`: write it, synchronize it to the disk, rename it into place. Raises `OSError`."""
    os.rename(write_temporary_index(path, index, tables), path)
    sync_directory(path.parent)


def write_temporary_index(path: Path, index: Index, tables: Mapping[str, np.ndarray]) -> Path:
    """Write an `.idx` beside its place and synchronize it to the disk. Raises `OSError`."""
    payload, packed = msgspec.msgpack.encode(index), pack(tables)
    checksums = xxhash.xxh3_64_intdigest(payload), xxhash.xxh3_64_intdigest(packed)
    head = _File(VERSION, checksums[0], memoryview(payload), checksums[1], tables=memoryview(packed))
    start = len(msgspec.msgpack.encode(head)) - len(packed)
    padding, temporary = memoryview(bytes(-start % ALIGNMENT)), path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(temporary, "wb") as file:
            file.write(msgspec.msgpack.encode(msgspec.structs.replace(head, padding=padding)))
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return temporary


def n_pieces(nbytes: int) -> int:
    """Number of pieces of a `.bin`."""
    return -(-nbytes // PIECE_BYTES)


def piece_checksum(data: Any) -> int:
    """XXH3-64 of a piece (a buffer). Releases the interpreter lock."""
    return xxhash.xxh3_64_intdigest(data)


def bin_path(index_path: Path) -> Path:
    """Path of the `.bin` that belongs to an `.idx`."""
    return index_path.with_suffix(".bin")


def sync_directory(directory: Path) -> None:
    """The renamed files survive a power failure."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def map_file(fd: int, index: Index) -> np.ndarray:
    """The opened `.bin` as a map of the file, which all processes share; read-only uint8."""
    return np.frombuffer(huge_pages.map_to_read(fd, index.bin_bytes), np.uint8)


class Checkpoint:
    """A model's weights: `index`, and `data`, the whole `.bin` as read-only uint8.

    `load` returns the bytes of the opened `.bin`: by default a map of the file.
    """

    def __init__(self, index_path: Path, load: Callable[[int, Index], np.ndarray] = map_file) -> None:
        """Raises `FileNotFoundError`, `CheckpointError`, and what `load` raises."""
        self.index, self.index_path = load_index(index_path), index_path
        self.path = path = bin_path(index_path)
        with open(path, "rb") as file:
            self.info = os.fstat(file.fileno())  # identity of the mapped file
            size = self.info.st_size
            if size != self.index.bin_bytes:
                raise CheckpointError(
                    f"{path}: {size} bytes, expected {self.index.bin_bytes}; remove {index_path.name} to ingest again"
                )
            self.data = load(file.fileno(), self.index)

    def view(self, name: str) -> np.ndarray:
        """Return a tensor: f32 (rows, columns) for the "rows" layout, else u8 (nbytes,)."""
        t = self.index.tensor(name)
        raw = self.data[t.offset : t.offset + t.nbytes]
        return raw.view(np.float32).reshape(t.rows, t.columns) if t.layout == "rows" else raw

    def piece(self, number: int) -> np.ndarray:
        """A piece of the `.bin`, uint8."""
        return self.data[number * PIECE_BYTES : (number + 1) * PIECE_BYTES]

    def is_damaged(self, tensor: Tensor) -> bool:
        """Whether a tensor's bytes differ from its checksum."""
        data = self.data[tensor.offset : tensor.offset + tensor.nbytes]
        return not has_checksum(data.data, tensor.checksum)
