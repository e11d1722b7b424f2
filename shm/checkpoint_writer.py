"""Writes the checkpoint pair of `checkpoint.py`, tensor by tensor, and places it by rename.

Owns the temporary files. Knows nothing of where the tensors come from.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any, Protocol, Self

import msgspec
import numpy as np
import xxhash

from shm.arena import align
from shm.checkpoint import (
    ALIGNMENT,
    PIECE_BYTES,
    VERSION,
    Hyper,
    Index,
    Tensor,
    TokenizerData,
    bin_path,
    sync_directory,
    write_temporary_index,
)
from shm.chunked_file import ChunkedFile
from shm.tensor_checksum import TensorChecksum


class Partial(Protocol):
    """Keeps the files of an interrupted writer: shm/partial_checkpoint.py."""

    bin_path: Path

    def open(self) -> list[Tensor]: ...  # noqa: D102
    def add(self, tensor: Tensor) -> None: ...  # noqa: D102
    def close(self) -> None: ...  # noqa: D102
    def remove(self) -> None: ...  # noqa: D102


class CheckpointWriter:
    """Writes the pair: `add` tensors in the order of use, then `finish`. A context manager.

    Leaving the block without `finish` removes the partial file.  With `partial` (shm/partial_checkpoint.py) only an
    error does so: after an interruption the next writer goes on behind the tensors that are complete.  A writer
    that is killed loses the tensors of which some bytes were in its last chunk (shm/chunked_file.py).
    """

    def __init__(self, index_path: Path, partial: Partial | None = None) -> None:
        self.index_path, self._partial = index_path, partial  # the path may change until `finish`
        self._temporary = bin_path(index_path).with_name(f".{bin_path(index_path).name}.{os.getpid()}")
        if partial is not None:
            self._temporary = partial.bin_path
        self._file: IO[bytes] | None = None
        self._chunks: ChunkedFile | None = None  # appends to the file
        self._unlisted: list[Tensor] = []  # `partial` does not list these: some of their bytes are not written yet
        self._pieces: list[int] = []  # checksums of the complete pieces
        self._piece = xxhash.xxh3_64()  # of the bytes after them
        self.tensors: list[Tensor] = []

    def __enter__(self) -> Self:
        if self._partial is not None:
            self.tensors = self._partial.open()
        self._file = open(self._temporary, "r+b" if self.tensors else "wb", buffering=0)
        at = 0
        while chunk := self._file.read(PIECE_BYTES) if self.tensors else b"":
            self._sum_pieces(memoryview(chunk), at)
            at += len(chunk)
        self._chunks = ChunkedFile(self._file, at)
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: Any) -> None:
        is_kept = self._partial is not None and kind is not None and not issubclass(kind, Exception)
        if self._file is not None:
            if is_kept:
                with contextlib.suppress(OSError):  # what is not listed is converted again
                    self._flush()
            self._file.close()
            self._file = None
            if self._partial is None:
                self._temporary.unlink(missing_ok=True)
        if self._partial is not None:
            if is_kept:
                self._partial.close()
            else:
                self._partial.remove()

    def add(self, name: str, shape: tuple[int, int], fmt: str, layout: str, pieces: Iterable[np.ndarray]) -> Tensor:
        """Append a tensor whose bytes come in pieces, so that a large one is never in memory as a whole."""
        assert self._chunks is not None
        offset = align(self._chunks.end, ALIGNMENT)
        self._write(memoryview(bytes(offset - self._chunks.end)))
        digest, nbytes = TensorChecksum(), 0
        for piece in pieces:
            raw = np.ascontiguousarray(piece).data.cast("B")
            self._write(raw)
            digest.update(raw)
            nbytes += raw.nbytes
        tensor = Tensor(name, *shape, fmt, layout, offset, nbytes, digest.text)
        self.tensors.append(tensor)
        self._unlisted.append(tensor)
        self._list_written()
        return tensor

    def _write(self, raw: memoryview) -> None:
        assert self._chunks is not None
        at = self._chunks.end
        self._chunks.append(raw)
        self._sum_pieces(raw, at)

    def _flush(self) -> None:
        assert self._chunks is not None
        self._chunks.flush()
        self._list_written()

    def _list_written(self) -> None:
        assert self._chunks is not None
        while self._unlisted and self._unlisted[0].offset + self._unlisted[0].nbytes <= self._chunks.written:
            tensor = self._unlisted.pop(0)
            if self._partial is not None:
                self._partial.add(tensor)

    def _sum_pieces(self, raw: memoryview, at: int) -> None:
        room = PIECE_BYTES - at % PIECE_BYTES
        while raw:
            self._piece.update(raw[:room])
            if len(raw) >= room:
                self._pieces.append(self._piece.intdigest())
                self._piece.reset()
            raw, room = raw[room:], PIECE_BYTES

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
        pooling: str = "",
        adds_eos: bool = False,
        tables: Mapping[str, np.ndarray] = MappingProxyType({}),
        before_placing: Callable[[], object] = lambda: None,
    ) -> Index:
        """Write the index and place both files, `.bin` first. `tables`: the compiled vocabulary.

        before_placing: called directly before that; if it raises, no file is left.
        """
        assert self._file is not None and self._chunks is not None
        # Kernels read whole vectors and prefetch ahead: padding keeps these reads inside the file.
        bin_bytes = align(self._chunks.end + ALIGNMENT, 4096)
        self._write(memoryview(bytes(bin_bytes - self._chunks.end)))
        self._flush()
        os.fsync(self._file.fileno())
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
            msgspec.Raw(tokenizer.packed()),
            self.tensors,
            [*self._pieces, self._piece.intdigest()] if bin_bytes % PIECE_BYTES else self._pieces,
            pooling,
            adds_eos,
        )
        try:
            temporary = write_temporary_index(self.index_path, index, tables)
            try:
                before_placing()
                os.rename(self._temporary, bin_path(self.index_path))
                os.rename(temporary, self.index_path)
            except BaseException:
                temporary.unlink(missing_ok=True)
                raise
            sync_directory(self.index_path.parent)
        except BaseException:
            self._temporary.unlink(missing_ok=True)
            raise
        return index
