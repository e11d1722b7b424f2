"""Converts a GGUF file to a checkpoint, once: checks all of it, then writes the tensors in the order of use.

The file is opened once: a thread hashes the same mapped bytes meanwhile, and the checkpoint is placed only if they have
the SHA-256 that names it and the file has not changed in between.

architectures.py says which tensors each architecture has, hyperparameters.py reads the numbers.  Everything that the
forward pass relies on is checked before anything is written; a rank that maps a checkpoint checks nothing again.
Errors name the key or tensor, its value, the bound and a remedy.
"""

from __future__ import annotations

import errno
import hashlib
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np

from pipeline.errors import ConfigError, ResourceError
from shm.checkpoint import CheckpointWriter, Hyper, Index, TokenizerData
from stages.worker.checkpoint.architectures import Sizes, tensors
from stages.worker.checkpoint.gguf import AGAIN, GgufError, GgufFile, TensorInfo
from stages.worker.checkpoint.hyperparameters import ROPE_TENSORS, HyperReader, vector
from stages.worker.checkpoint.layout import pack
from stages.worker.checkpoint.vocabulary import read_vocabulary

Progress = Callable[[str, int, int], None]  # phase, done, total (bytes)
_HASHED_BYTES = 8 << 20  # at a time


class SourceChanged(ConfigError):
    """The bytes of the source are not those that its digest was computed from."""


def check_source(source: Path, pretokenizer: str = "") -> None:
    """Check all that can be checked of a GGUF file without its tensors' bytes. Raises `ConfigError`, `OSError`."""
    try:
        _read_head(GgufFile(source), pretokenizer)
    except GgufError as error:
        raise ConfigError(str(error), param="model") from None


def ingest(
    source: Path,
    index_path: Path,
    digest: str,
    progress: Progress = lambda phase, done, total: None,
    pretokenizer: str = "",
) -> Index:
    """Write `index_path` and its `.bin` from the GGUF `source`, whose SHA-256 is `digest` (hex).

    pretokenizer: accepted in place of the file's; the index keeps the file's.

    Raises `ConfigError` when the file cannot be used, `SourceChanged` when it has another digest, `ResourceError` when
    the disk is too small for the checkpoint.  After an error no file is left.
    """
    try:
        return _ingest(source, index_path, digest, progress, pretokenizer)
    except GgufError as error:
        raise ConfigError(str(error), param="model") from None
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        free = shutil.disk_usage(index_path.parent).free
        raise ResourceError(
            f"{index_path.parent}: no room for the checkpoint of {source} ({source.stat().st_size:,} bytes needed, "
            f"{free:,} free); free space there, or set STARLING_HOME to another disk"
        ) from None


def _read_head(file: GgufFile, pretokenizer: str) -> tuple[_Reader, Hyper, TokenizerData, list[Part]]:
    reader = _Reader(file)
    hyper = reader.hyper()
    return reader, hyper, read_vocabulary(file, pretokenizer), list(_plan(file, reader, hyper))


def _ingest(source: Path, index_path: Path, digest: str, progress: Progress, pretokenizer: str) -> Index:
    file = GgufFile(source)
    reader, hyper, tokenizer, plan = _read_head(file, pretokenizer)
    tables = reader.rope(hyper)
    total = sum(part.nbytes for part in plan)
    done = 0
    with CheckpointWriter(index_path) as writer, _SourceCheck(file, digest) as check:
        for name, table in tables.items():
            writer.add(name, (table.shape[0], table.shape[1]), "F32", "rows", [table])
        for part in plan:
            rows = slice(part.first, part.first + part.shape[0])
            if len(part.shape) == 1:
                writer.add(part.name, (1, part.shape[0]), "F32", "rows", [vector(file, part.info)[rows]])
            else:
                pieces = pack(file.rows(part.info)[rows], part.info.format)
                writer.add(part.name, (part.shape[0], part.shape[1]), part.info.format.name, "groups", pieces)
            done += part.nbytes
            progress("ingest", done, total)
        check.finish()
        return writer.finish(
            digest=digest,
            architecture=reader.architecture,
            name=reader.name(source.stem),
            parameters=sum(int(np.prod(part.shape, dtype=np.int64)) for part in plan),
            source_bytes=file.size,
            hyper=hyper,
            tokenizer=tokenizer,
            pooling=reader.pooling(),
            adds_eos=reader.adds_eos(),
        )


class _SourceCheck:
    """Hashes an opened file in a thread, while it is ingested."""

    def __init__(self, file: GgufFile, digest: str) -> None:
        self._file, self._expected = file, digest
        self._identity = file.identity()
        self._found = ""
        self._is_abandoned = False
        self._thread = threading.Thread(target=self._hash, name="sha256", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._is_abandoned = True
        self._thread.join()

    def _hash(self) -> None:
        sha256 = hashlib.sha256()
        for at in range(0, self._file.size, _HASHED_BYTES):
            if self._is_abandoned:
                return
            sha256.update(self._file.data[at : at + _HASHED_BYTES].data)
        self._found = sha256.hexdigest()

    def finish(self) -> None:
        """Wait for the digest. Raises `SourceChanged`."""
        self._thread.join()
        path = self._file.path
        if self._file.identity() != self._identity:
            raise SourceChanged(f"{path} was changed while it was read; run this again when it is complete", "model")
        if self._found != self._expected:
            raise SourceChanged(
                f"{path}: the bytes that were read have SHA-256 {self._found}, expected {self._expected}: the file has "
                f"changed since it was hashed; run this again, or fetch the file again",
                "model",
            )


# ------------------------------------------------------------------ tensors


class Part(NamedTuple):
    """A tensor of the checkpoint: rows `first` .. `first + rows - 1` (a vector: values) of a tensor of the file."""

    name: str
    shape: tuple[int, ...]
    info: TensorInfo
    first: int

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return self.info.nbytes // self.info.shape[0] * self.shape[0]


def _plan(file: GgufFile, reader: HyperReader, h: Hyper) -> Iterator[Part]:
    q, kv = h.n_heads * h.head_dim, h.n_kv_heads * h.head_dim
    sizes = Sizes(h.n_layers, h.width, q, kv, h.head_dim, h.ffn_width, h.vocab_size, h.context_length)
    known = set(ROPE_TENSORS)
    for needed in tensors(reader.row, sizes, frozenset(file.tensors)):
        known.add(needed.source)
        shape = (needed.of, *needed.shape[1:])
        info = file.tensors.get(needed.source)
        if info is None:
            if not needed.optional:
                raise GgufError(
                    f"{file.path}: tensor {needed.source!r} is missing, expected {list(shape)} (rows first); {AGAIN}"
                )
            continue
        if info.shape != shape:
            raise GgufError(
                f"{file.path}: tensor {needed.source!r} has shape {list(info.shape)}, expected {list(shape)} (rows "
                f"first); {AGAIN}"
            )
        if len(shape) == 1 and not info.format.dense:
            raise GgufError(
                f"{file.path}: tensor {needed.source!r} is {info.format.name}, expected F32, F16 or BF16; {AGAIN}"
            )
        yield Part(needed.name, needed.shape, info, needed.first)
    extra = sorted(file.tensors.keys() - known)
    if extra:
        raise GgufError(
            f"{file.path}: tensor {extra[0]!r} is not part of this architecture's graph ({len(extra)} such tensors), "
            "and outputs would be wrong without it; use another model"
        )


# ------------------------------------------------------------------ metadata


class _Reader(HyperReader):
    """The metadata of one file: hyper-parameters and name."""

    def name(self, default: str) -> str:
        value = self.metadata.get("general.name")
        return value if isinstance(value, str) else default
