"""From a GGUF file or a Hugging Face directory to a checkpoint, without a stored GGUF file: `starling ingest`.

The checkpoint's digest is that of the GGUF file if its weights stay as they are.  Otherwise it is the SHA-256 of what
the bytes depend on: the digests of all files, the weight types, and `REVISION`.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import msgspec

from pipeline.errors import ConfigError, ModelUnavailable, ResourceError
from pipeline.models import digests, store
from pipeline.models.locks import lock
from shm.checkpoint import Index, TokenizerData, load_index
from shm.partial_checkpoint import PartialCheckpoint
from stages.worker.checkpoint.gguf import GgufError, GgufFile
from stages.worker.checkpoint.ingest import check_head, convert, convert_and_hash
from stages.worker.checkpoint.prepare import is_usable
from stages.worker.checkpoint.requantized import Requantized
from stages.worker.checkpoint.source import Source
from stages.worker.huggingface.config import CheckpointDirectoryError
from stages.worker.huggingface.source import HuggingFaceSource

REVISION = 1  # grows when the same files give other bytes

CheckVocabulary = Callable[[TokenizerData, Path], None]


def prepare_source(
    path: Path,
    models_dir: Path,
    quant: str = "",
    pretokenizer: str = "",
    progress: store.Progress = store.no_progress,
    check_vocabulary: CheckVocabulary = lambda data, path: None,
) -> Index:
    """The index of the checkpoint of a file or directory, which is made unless it exists.

    quant: a key of `requantized.QUANTS`; "": weights stay as they are.  check_vocabulary: called with a directory's
    vocabulary and its path before anything is hashed.

    Raises `ConfigError`, `ModelUnavailable`, `ResourceError`.
    """
    with _reported(path):
        source = _open(path, quant, pretokenizer)
        tokenizer = check_head(source, pretokenizer)
        if path.is_dir():
            check_vocabulary(tokenizer, path)
        if isinstance(source, GgufFile):
            return _prepare_file(source, models_dir, pretokenizer, progress)
        identity = source.identity()
        hashed = _hash_files(source, models_dir, progress)
        if source.identity() != identity:
            raise ConfigError(f"{path} was changed while it was hashed; run this again when it is complete", "model")
        digest = _digest(hashed, quant, tokenizer)
        index_path = models_dir / f"{digest}.idx"
        tag = f"ingest-{digest[:16]}"
        if not is_usable(index_path):
            with lock(models_dir, tag):
                if not is_usable(index_path):
                    partial = PartialCheckpoint(models_dir / ".fetch" / tag, f"{digest} {identity}")
                    _check_space(source, models_dir, partial)
                    convert(source, index_path, digest, progress, pretokenizer, partial)
        return load_index(index_path)


def _prepare_file(file: GgufFile, models_dir: Path, pretokenizer: str, progress: store.Progress) -> Index:
    """Of a GGUF file whose weights stay as they are: it is hashed while it is converted, unless its digest is known."""
    info = file.path.stat()
    known = digests.read_all(models_dir).get(os.path.realpath(file.path))
    if known is not None and digests.identity_of(known) == digests.identity(info):
        index_path = models_dir / f"{known.sha256}.idx"
        if is_usable(index_path):
            return load_index(index_path)
    identity = f"{os.path.realpath(file.path)} {digests.identity(info)} {pretokenizer}"
    tag = f"ingest-{hashlib.sha256(identity.encode()).hexdigest()[:16]}"

    def remember(digest: str) -> None:
        if file.identity() != digests.identity(info)[:2]:
            return  # the path names another file by now
        digests.remember(file.path.name, file.path, digests.Stamp(*digests.identity(info), digest), models_dir)

    with lock(models_dir, tag):
        partial = PartialCheckpoint(models_dir / ".fetch" / tag, f"{identity} {REVISION}")
        _check_space(file, models_dir, partial)
        return convert_and_hash(file, models_dir, progress, pretokenizer, partial, remember)


def _open(path: Path, quant: str, pretokenizer: str) -> Source:
    source: Source = HuggingFaceSource(path, pretokenizer) if path.is_dir() else GgufFile(path)
    return Requantized(source, quant) if quant else source


@contextmanager
def _reported(path: Path) -> Iterator[None]:
    try:
        yield
    except (GgufError, CheckpointDirectoryError) as error:
        raise ConfigError(str(error), param="model") from None
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist; expected a GGUF file or a directory", "model") from None
    except OSError as error:
        raise ModelUnavailable(f"{path} cannot be read: {error.strerror or error}", param="model") from None


def _files(source: Source) -> list[Path]:
    while isinstance(source, Requantized):
        source = source.source
    if isinstance(source, HuggingFaceSource):
        return [*(file.path for file in source.directory.files), *source.directory.small_files]
    return [source.path]


def _hash_files(source: Source, models_dir: Path, progress: store.Progress) -> dict[str, str]:
    """The SHA-256 of every file by its name; known ones are not read again."""
    paths = _files(source)
    known = digests.read_all(models_dir)
    total = sum(path.stat().st_size for path in paths)
    done: dict[Path, int] = {}

    def compute(path: Path) -> str:
        stamp = known.get(os.path.realpath(path))
        if stamp is None or digests.identity_of(stamp) != digests.identity(path.stat()):

            def report(phase: str, so_far: int, of: int) -> None:
                done[path] = so_far
                progress(phase, sum(done.copy().values()), total)

            stamp = digests.compute(path, report)
            digests.remember(path.name, path, stamp, models_dir)
        return stamp.sha256

    with ThreadPoolExecutor(len(os.sched_getaffinity(0)), "sha256") as pool:
        # Names are relative: a directory has a file of the same name as one within it.
        names = [str(path.relative_to(source.path)) if source.path.is_dir() else path.name for path in paths]
        return dict(zip(names, pool.map(compute, paths), strict=True))


def _digest(files: dict[str, str], quant: str, tokenizer: TokenizerData) -> str:
    described = {"revision": REVISION, "files": dict(sorted(files.items())), "quant": quant, "pre": tokenizer.pre}
    return hashlib.sha256(msgspec.json.encode(described)).hexdigest()


def _check_space(source: Source, models_dir: Path, partial: PartialCheckpoint) -> None:
    """Raise `ResourceError` if the disk is too small for the checkpoint."""
    stat = os.statvfs(models_dir)
    here = partial.bin_path.stat().st_size if partial.bin_path.exists() else 0
    needed, free = sum(info.nbytes for info in source.tensors.values()) - here, stat.f_bavail * stat.f_frsize
    if needed > free:
        raise ResourceError(
            f"{source.path}: its checkpoint needs {needed:,} bytes in {models_dir}, which has {free:,} free; free "
            f"some, set STARLING_HOME to another disk, or take a smaller --quant"
        )
