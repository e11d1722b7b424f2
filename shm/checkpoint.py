"""The checkpoint pair `DIGEST.idx` and `DIGEST.bin` that a model is loaded from. Independent of GGUF and kernels.

    DIGEST.idx   one msgpack document (`Index`)
    DIGEST.bin   the tensors in the layout that the kernels read, each 64-byte aligned, in the order of use;
                 then at least 64 zero bytes, to the end of a 4096-byte page

Ingest writes both once and places them by rename, `.bin` first: if an `.idx` exists, so does its `.bin`.  Mapped files
are immutable and never truncated; all processes share their memory.

`layout` of a tensor: "rows" is plain row-major f32; "groups" is interleaved by 16 rows as
`stages/worker/checkpoint/layout.py` draws it.  Tied embeddings are stored once.
"""

from __future__ import annotations

import hashlib
import mmap
import os
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any, Self

import msgspec
import numpy as np

from shm.arena import align
from shm.decoding import DECODE_ERRORS

VERSION = 1  # of both files; grows when a layout changes, and files of another version are ingested again
ALIGNMENT = 64


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
    checksum: str  # BLAKE2b-128 of the bytes, hex


class Hyper(msgspec.Struct, array_like=True, frozen=True):
    """Hyper-parameters of the graph; integers are counts."""

    n_layers: int
    width: int  # of the residual stream
    n_heads: int
    n_kv_heads: int
    head_dim: int
    ffn_width: int
    vocab_size: int
    context_length: int
    norm_eps: float  # f32 value
    n_rot: int  # leading values of a head that RoPE rotates
    rope_pairing: str  # "neighbours" (2i, 2i+1) or "halves" (i, i + n_rot/2)
    activation: str  # "silu" or "gelu"
    rope_base: float = 10000.0
    rope_scale: float = 1.0  # positions are divided by it
    attention_bias: bool = False  # q, k and v have biases


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
    add_bos: bool
    add_space_prefix: bool
    chat_template: str


class Index(msgspec.Struct, array_like=True, frozen=True):
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

    @property
    def tokenizer(self) -> TokenizerData:
        """Decode the tokenizer data, at every call. Raises `CheckpointError`."""
        try:
            return msgspec.msgpack.decode(self.tokenizer_raw, type=TokenizerData)
        except DECODE_ERRORS as error:
            raise CheckpointError(f"index of {self.name}: bad tokenizer data ({error}); ingest it again") from None

    @property
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

    def has(self, name: str) -> bool:
        """Whether the model has a tensor of this name."""
        return any(t.name == name for t in self.tensors)

    @property
    def head_name(self) -> str:
        """Name of the output head: its own tensor, or the embedding when the two are tied."""
        return "output.weight" if self.has("output.weight") else "token_embd.weight"


class _Pieces(msgspec.Struct, array_like=True):
    """The first fields of `TokenizerData`; the decoder skips the rest."""

    model: str
    pre: str
    tokens: list[str]


class _Head(msgspec.Struct, array_like=True):
    version: int


def load_index(path: Path) -> Index:
    """Read and check an `.idx`. Raises `FileNotFoundError`, `CheckpointError`."""
    raw = path.read_bytes()
    try:
        # Check the version first: the rest of another version may have another shape.
        version = msgspec.msgpack.decode(raw, type=_Head).version
        if version != VERSION:
            raise CheckpointError(f"{path}: version is {version}, expected {VERSION}; remove it to ingest again")
        index = msgspec.msgpack.decode(raw, type=Index)
    except DECODE_ERRORS as error:
        raise CheckpointError(f"{path}: not a checkpoint index ({error}); remove it to ingest again") from None
    for t in index.tensors:
        if t.offset % ALIGNMENT or t.offset < 0 or t.nbytes < 0 or t.offset + t.nbytes > index.bin_bytes:
            raise CheckpointError(
                f"{path}: tensor {t.name} lies at {t.offset}..{t.offset + t.nbytes} of "
                f"{index.bin_bytes} bytes; remove it to ingest again"
            )
    return index


def bin_path(index_path: Path) -> Path:
    """Path of the `.bin` that belongs to an `.idx`."""
    return index_path.with_suffix(".bin")


class Checkpoint:
    """A mapped model: `index`, and `data`, the whole `.bin` as read-only uint8."""

    def __init__(self, index_path: Path) -> None:
        """Raises `FileNotFoundError`, `CheckpointError`."""
        self.index = load_index(index_path)
        path = bin_path(index_path)
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size != self.index.bin_bytes:
                raise CheckpointError(
                    f"{path}: {size} bytes, expected {self.index.bin_bytes}; remove {index_path.name} to ingest again"
                )
            self._map = mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ, flags=mmap.MAP_SHARED)
        self.data: np.ndarray = np.frombuffer(self._map, np.uint8)

    def view(self, name: str) -> np.ndarray:
        """Return a tensor: f32 (rows, columns) for the "rows" layout, else u8 (nbytes,)."""
        t = self.index.tensor(name)
        raw = self.data[t.offset : t.offset + t.nbytes]
        return raw.view(np.float32).reshape(t.rows, t.columns) if t.layout == "rows" else raw

    def verify(self) -> None:
        """Hash every tensor. Raises `CheckpointError` naming the first one that differs."""
        for t in self.index.tensors:
            found = checksum(self.data[t.offset : t.offset + t.nbytes])
            if found != t.checksum:
                raise CheckpointError(
                    f"tensor {t.name}: checksum is {found}, expected {t.checksum}; remove the .idx to ingest again"
                )


def checksum(data: Any) -> str:
    """BLAKE2b-128 of a buffer, hex."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


class CheckpointWriter:
    """Writes the pair: `add` tensors in the order of use, then `finish`. A context manager.

    Leaving the block without `finish` removes the partial file.
    """

    def __init__(self, index_path: Path) -> None:
        self._index_path = index_path
        self._temporary = bin_path(index_path).with_name(f".{bin_path(index_path).name}.{os.getpid()}")
        self._file: IO[bytes] | None = None
        self.tensors: list[Tensor] = []

    def __enter__(self) -> Self:
        self._file = open(self._temporary, "wb")
        return self

    def __exit__(self, *exception: Any) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
            self._temporary.unlink(missing_ok=True)

    def add(self, name: str, shape: tuple[int, int], fmt: str, layout: str, pieces: Iterable[np.ndarray]) -> Tensor:
        """Append a tensor whose bytes come in pieces, so that a large one is never in memory as a whole."""
        assert self._file is not None
        offset = align(self._file.tell(), ALIGNMENT)
        self._file.write(bytes(offset - self._file.tell()))
        digest, nbytes = hashlib.blake2b(digest_size=16), 0
        for piece in pieces:
            raw = np.ascontiguousarray(piece).data.cast("B")
            self._file.write(raw)
            digest.update(raw)
            nbytes += raw.nbytes
        tensor = Tensor(name, *shape, fmt, layout, offset, nbytes, digest.hexdigest())
        self.tensors.append(tensor)
        return tensor

    def finish(
        self,
        *,
        digest: str,
        architecture: str,
        name: str,
        parameters: int,
        source_bytes: int,
        hyper: Hyper,
        tokenizer: TokenizerData,
    ) -> Index:
        """Write the index and place both files, `.bin` first."""
        assert self._file is not None
        # Kernels read whole vectors and prefetch ahead: padding keeps these reads inside the file.
        self._file.write(bytes(align(self._file.tell() + ALIGNMENT, 4096) - self._file.tell()))
        self._file.flush()
        os.fsync(self._file.fileno())
        bin_bytes = self._file.tell()
        self._file.close()
        self._file = None
        index = Index(
            VERSION,
            digest,
            architecture,
            name,
            parameters,
            source_bytes,
            bin_bytes,
            hyper,
            msgspec.Raw(msgspec.msgpack.encode(tokenizer)),
            self.tensors,
        )
        temporary = self._index_path.with_name(f".{self._index_path.name}.{os.getpid()}")
        try:
            with open(temporary, "wb") as file:
                file.write(msgspec.msgpack.encode(index))
                file.flush()
                os.fsync(file.fileno())
            os.rename(self._temporary, bin_path(self._index_path))
            os.rename(temporary, self._index_path)
        except BaseException:
            self._temporary.unlink(missing_ok=True)
            temporary.unlink(missing_ok=True)
            raise
        return index
