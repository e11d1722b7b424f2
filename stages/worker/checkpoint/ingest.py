"""Converts a model to a checkpoint, once: checks all of it, then writes the tensors in the order of use.

A GGUF file is opened once: a thread hashes the same bytes meanwhile, and the checkpoint is placed only if they have the
SHA-256 that names it and the file has not changed in between.  Other sources (source.py) were hashed before, and must
still be the same files at the end.  All cores convert; no tensor is in memory as a whole.

architectures.py says which tensors each architecture has, hyperparameters.py reads the numbers.  Everything that the
forward pass relies on is checked before anything is written; a rank that maps a checkpoint checks nothing again.
Errors name the key or tensor, its value, the bound and a remedy.
"""

from __future__ import annotations

import errno
import hashlib
import math
import os
import shutil
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np

from pipeline.errors import ConfigError, ResourceError
from pipeline.models.vocabulary_tables import make_tables
from shm.checkpoint import Hyper, Index, TokenizerData
from shm.checkpoint_writer import CheckpointWriter
from shm.partial_checkpoint import PartialCheckpoint
from stages.worker.checkpoint.architectures import Sizes, tensors
from stages.worker.checkpoint.gguf import AGAIN, GgufError, GgufFile
from stages.worker.checkpoint.hyperparameters import ROPE_TENSORS, HyperReader
from stages.worker.checkpoint.pack_compiled import Packer, choose_packer
from stages.worker.checkpoint.source import Rows, Source, TensorInfo, vector
from stages.worker.checkpoint.vocabulary import read_vocabulary
from stages.worker.kernels.formats import GROUP, Format

Progress = Callable[[str, int, int], None]  # phase, done, total (bytes)
_HASHED_BYTES = 1 << 20  # at a time
_CONVERTED_VALUES = 1 << 19  # at a time: some 100 KB to 1 MB
_REPORTED_BYTES = 8 << 20  # between two calls of `progress` within a tensor


class SourceChanged(ConfigError):
    """The bytes of the source are not those that its digest was computed from."""


def check_source(source: Path, pretokenizer: str = "") -> Hyper:
    """Check all that can be checked of a GGUF file without its tensors' bytes; its sizes and switches.

    Raises `ConfigError`, `OSError`.
    """
    try:
        return _read_head(GgufFile(source), pretokenizer)[1]
    except GgufError as error:
        raise ConfigError(str(error), param="model") from None


def check_head(source: Source, pretokenizer: str = "") -> TokenizerData:
    """Check all that can be checked of a source without its tensors' bytes; its vocabulary. Raises `GgufError`."""
    return _read_head(source, pretokenizer)[2]


def ingest(
    source: Path,
    index_path: Path,
    digest: str,
    progress: Progress = lambda phase, done, total: None,
    pretokenizer: str = "",
    before_placing: Callable[[], object] = lambda: None,
) -> Index:
    """Write `index_path` and its `.bin` from the GGUF `source`, whose SHA-256 is `digest` (hex).

    pretokenizer: accepted in place of the file's; the index keeps the file's.
    before_placing: called directly before the files are placed; if it raises, the old ones stay.

    Raises `ConfigError` when the file cannot be used, `SourceChanged` when it has another digest, `ResourceError` when
    the disk is too small for the checkpoint.  After an error no file is left.
    """
    with _reported(source, index_path):
        file = GgufFile(source)
        return _convert(file, index_path, progress, pretokenizer, None, _SourceCheck(file, digest), before_placing)


def convert(
    source: Source,
    index_path: Path,
    digest: str,
    progress: Progress = lambda phase, done, total: None,
    pretokenizer: str = "",
    partial: PartialCheckpoint | None = None,
) -> Index:
    """Write `index_path` and its `.bin` from a source whose files were hashed; `digest` names the result (hex).

    partial: where an interrupted conversion is kept, which then goes on.

    Raises as `ingest` does.
    """
    with _reported(source.path, index_path):
        return _convert(source, index_path, progress, pretokenizer, partial, _IdentityCheck(source, digest))


def convert_and_hash(
    file: GgufFile,
    folder: Path,
    progress: Progress,
    pretokenizer: str,
    partial: PartialCheckpoint,
    on_digest: Callable[[str], None],
) -> Index:
    """Write the checkpoint of a file of unknown digest to `folder`: the file is read once.

    on_digest: called with the file's SHA-256 (hex) before the checkpoint is placed.  Raises as `ingest` does.
    """
    with _reported(file.path, folder / "checkpoint"):
        check = _SourceCheck(file, "", on_digest)
        return _convert(file, folder / "checkpoint.idx", progress, pretokenizer, partial, check)


def convert_arriving(
    file: GgufFile,
    folder: Path,
    progress: Progress,
    pretokenizer: str,
    partial: PartialCheckpoint,
    wait_digest: Callable[[], str],
) -> Index:
    """Write the checkpoint of a file that is being downloaded (while_arriving.py) to `folder`.

    wait_digest: returns the file's SHA-256 (hex), computed by the download, when the file is complete and accepted.
    Raises as `ingest` does.
    """
    with _reported(file.path, folder / "checkpoint"):
        return _convert(file, folder / "checkpoint.idx", progress, pretokenizer, partial, _ArrivalCheck(wait_digest))


@contextmanager
def _reported(source: Path, index_path: Path) -> Iterator[None]:
    try:
        yield
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


def _read_head(file: Source, pretokenizer: str) -> tuple[_Reader, Hyper, TokenizerData, list[Part]]:
    reader = _Reader(file)
    hyper = reader.hyper()
    reader.check_rope(hyper)
    return reader, hyper, read_vocabulary(file, pretokenizer), list(_plan(file, reader, hyper))


def _convert(
    file: Source,
    index_path: Path,
    progress: Progress,
    pretokenizer: str,
    partial: PartialCheckpoint | None,
    check: _SourceCheck | _IdentityCheck | _ArrivalCheck,
    before_placing: Callable[[], object] = lambda: None,
) -> Index:
    reader, hyper, tokenizer, plan = _read_head(file, pretokenizer)
    report = _Report(progress, sum(part.nbytes for part in plan))
    with (
        check,
        ThreadPoolExecutor(1, "vocabulary") as other,
        CheckpointWriter(index_path, partial) as writer,
        _Pool(
            choose_packer(sum(part.nbytes for part in plan if not part.info.format.dense), progress), check.core
        ) as pool,
    ):
        vocabulary = other.submit(make_tables, tokenizer)
        check.core.leave()
        written = {tensor.name for tensor in writer.tensors}
        for name, table in reader.rope(hyper).items():
            if name not in written:
                writer.add(name, (table.shape[0], table.shape[1]), "F32", "rows", [table])
        for part in plan:
            if part.name not in written:
                _write(writer, file, part, pool, report)
                file.release(part.info)
            report.finish_part(part.nbytes)
        digest = check.finish()
        writer.index_path = index_path if check.is_expected else index_path.with_name(f"{digest}.idx")
        return writer.finish(
            digest=digest,
            architecture=reader.architecture,
            name=reader.name(_stem(file.path, digest)),
            parameters=sum(int(np.prod(part.shape, dtype=np.int64)) for part in plan),
            source_bytes=file.size,
            hyper=hyper,
            tokenizer=tokenizer,
            pooling=reader.pooling(),
            adds_eos=reader.adds_eos(),
            tables=vocabulary.result(),
            before_placing=before_placing,
        )


def _stem(path: Path, digest: str) -> str:
    """The stem of a file's name, or of the name that it gets when its download is complete."""
    if path.name == "part":  # of pipeline/models/pull.py: it is named by its digest
        return digest
    return Path(path.stem).stem if path.suffix == ".part" else path.stem


def _write(writer: CheckpointWriter, file: Source, part: Part, pool: _Pool, report: _Report) -> None:
    if len(part.shape) == 1:
        values = vector(file, part.info)[part.first : part.first + part.shape[0]]
        writer.add(part.name, (1, part.shape[0]), "F32", "rows", [values])
        return
    pieces = pool.packed(file.rows(part.info), part, report)
    writer.add(part.name, (part.shape[0], part.shape[1]), part.info.format.name, "groups", pieces)


class _Report:
    """Calls `progress` after every tensor, and within large ones."""

    def __init__(self, progress: Progress, total: int) -> None:
        self._progress, self._total = progress, total
        self._finished = self._reported = 0

    def within_part(self, nbytes: int) -> None:
        """`nbytes` of the current tensor are done."""
        if self._finished + nbytes - self._reported >= _REPORTED_BYTES:
            self._reported = self._finished + nbytes
            self._progress("ingest", self._reported, self._total)

    def finish_part(self, nbytes: int) -> None:
        """All `nbytes` of a tensor are done."""
        self._finished += nbytes
        self._reported = self._finished
        self._progress("ingest", self._finished, self._total)


class _Pool:
    """Packs pieces of a matrix on all cores, in order; a few are ready ahead."""

    def __init__(self, pack: Packer, core: _HashingCore) -> None:
        self._pack = pack
        self._n_cores = len(os.sched_getaffinity(0))
        self._threads = ThreadPoolExecutor(self._n_cores, "ingest", core.leave)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._threads.shutdown(cancel_futures=True)

    def packed(self, rows: Rows, part: Part, report: _Report) -> Iterator[np.ndarray]:
        """The bytes of the tensor in the checkpoint."""
        n, columns = part.shape
        step = max(1, _CONVERTED_VALUES // (columns * GROUP)) * GROUP
        ahead: deque[Future[list[np.ndarray]]] = deque()
        done = 0
        for first in range(0, n, step):
            chunk = slice(part.first + first, part.first + min(first + step, n))
            ahead.append(self._threads.submit(self._pack_chunk, rows, chunk, part.info.format))
            if len(ahead) > 2 * self._n_cores:
                done += step
                yield from ahead.popleft().result()
                report.within_part(part.nbytes * done // n)
        while ahead:
            yield from ahead.popleft().result()

    def _pack_chunk(self, rows: Rows, chunk: slice, fmt: Format) -> list[np.ndarray]:
        return self._pack(rows[chunk], fmt)


class _HashingCore:
    """A core that the threads of a conversion leave to the one that hashes, until it has finished.

    Without instructions for SHA-256 hashing takes longer than the rest, and on two cores it would compete with the
    pool and the writer.  A lower priority of the pool helps less: the writer competes as well, and cannot raise its own
    again; beside other load the pool then starves.
    """

    def __init__(self, is_needed: bool) -> None:
        self._cores = os.sched_getaffinity(0)
        self._is_needed = is_needed and len(self._cores) > 1
        self._lock = threading.Lock()
        self._left_by: list[int] = []  # threads

    def leave(self) -> None:
        """Called by a thread that converts. It keeps its cores where the system lets no thread choose them."""
        with self._lock, suppress(OSError):
            # Another thread that had left the core may have started this one, which then has its cores.
            os.sched_setaffinity(0, self._cores - {max(self._cores)} if self._is_needed else self._cores)
            self._left_by.append(threading.get_native_id())

    def release(self) -> None:
        """All cores are there for all threads again."""
        with self._lock:
            self._is_needed = False
            for thread in self._left_by:
                if os.path.exists(f"/proc/self/task/{thread}"):  # otherwise another process may have its number by now
                    with suppress(OSError):  # it has just ended
                        os.sched_setaffinity(thread, self._cores)


class _IdentityCheck:
    """Checks that the opened files did not change while they were read."""

    is_expected = True  # the digest is known

    def __init__(self, source: Source, digest: str) -> None:
        self.core = _HashingCore(False)
        self._source, self._identity, self._digest = source, source.identity(), digest

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        return

    def finish(self) -> str:
        """The digest. Raises `SourceChanged`."""
        if self._source.identity() != self._identity:
            raise SourceChanged(
                f"{self._source.path} was changed while it was read; run this again when it is complete", "model"
            )
        return self._digest


class _ArrivalCheck:
    """Waits for the digest that the download computes from the same bytes. `finish` may raise what `wait` raises."""

    is_expected = False

    def __init__(self, wait: Callable[[], str]) -> None:
        self.core = _HashingCore(False)
        self._wait = wait

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        return

    def finish(self) -> str:
        """The digest."""
        return self._wait()


class _SourceCheck:
    """Hashes an opened file in a thread, while it is ingested. `digest`: as expected; "": any."""

    def __init__(self, file: GgufFile, digest: str, on_digest: Callable[[str], None] = lambda digest: None) -> None:
        self._file, self._expected, self._on_digest = file, digest, on_digest
        self.is_expected = bool(digest)
        self._identity = file.identity()
        self._found = ""
        self._error: OSError | None = None
        self._is_abandoned = False
        self.core = _HashingCore(True)
        self._thread = threading.Thread(target=self._hash, name="sha256", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._is_abandoned = True
        self._thread.join()

    def _hash(self) -> None:
        try:
            self._hash_file()
        except OSError as error:
            self._error = error
        finally:
            self.core.release()

    def _hash_file(self) -> None:
        sha256 = hashlib.sha256()
        for at in range(0, self._file.size, _HASHED_BYTES):
            if self._is_abandoned:
                return
            sha256.update(self._file.read(at, _HASHED_BYTES))
        self._found = sha256.hexdigest()

    def finish(self) -> str:
        """Wait for the digest. Raises `SourceChanged`, or the error of the thread."""
        self._thread.join()
        path = self._file.path
        if self._file.identity() != self._identity:
            raise SourceChanged(f"{path} was changed while it was read; run this again when it is complete", "model")
        if self._error is not None:
            raise self._error
        if self._expected and self._found != self._expected:
            raise SourceChanged(
                f"{path}: the bytes that were read have SHA-256 {self._found}, expected {self._expected}: the file has "
                f"changed since it was hashed; run this again, or fetch the file again",
                "model",
            )
        self._on_digest(self._found)
        return self._found


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
        return self.info.nbytes * math.prod(self.shape) // math.prod(self.info.shape)


def _plan(file: Source, reader: HyperReader, h: Hyper) -> Iterator[Part]:
    q, kv = h.n_heads * h.head_dim, h.n_kv_heads * h.head_dim
    sizes = Sizes(
        h.n_layers,
        h.width,
        q,
        kv,
        h.head_dim,
        h.ffn_width,
        h.vocab_size,
        h.context_length,
        h.n_experts,
        h.shared_ffn_width,
        reader.token_types(),
        reader.scores_pairs(),
    )
    known = set(ROPE_TENSORS)
    for needed in tensors(reader.row, sizes, frozenset(file.tensors)):
        known.add(needed.source)
        shape = needed.source_shape
        info, label = file.tensors.get(needed.source), file.label(needed.source)
        if info is None:
            if not needed.optional:
                raise GgufError(f"{file.path}: tensor {label} is missing, expected {list(shape)} (rows first); {AGAIN}")
            continue
        # Files have a matrix of one row as such, or as a vector.
        has_row = info.shape == needed.shape == (1, *shape)
        if info.shape != shape and not has_row:
            raise GgufError(
                f"{file.path}: tensor {label} has shape {list(info.shape)}, expected {list(shape)} (rows "
                f"first); {AGAIN}"
            )
        if min(len(shape), len(needed.shape)) == 1 and not info.format.dense:
            raise GgufError(f"{file.path}: tensor {label} is {info.format.name}, expected F32, F16 or BF16; {AGAIN}")
        yield Part(needed.name, needed.shape, info, needed.first)
    extra = sorted(file.tensors.keys() - known)
    if extra:
        raise GgufError(
            f"{file.path}: tensor {file.label(extra[0])} is not part of this architecture's graph ({len(extra)} such "
            "tensors), and outputs would be wrong without it; use another model"
        )


# ------------------------------------------------------------------ metadata


class _Reader(HyperReader):
    """The metadata of one file: hyper-parameters and name."""

    def name(self, default: str) -> str:
        value = self.metadata.get("general.name")
        return value if isinstance(value, str) else default
