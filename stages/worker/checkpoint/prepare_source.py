"""From a GGUF file or a Hugging Face directory to a checkpoint, without a stored GGUF file: `starling ingest`.

The checkpoint's digest is that of the GGUF file if its weights stay as they are.  Otherwise it is the SHA-256 of what
the bytes depend on: the digests of all files, the weight types, and `revision_of`.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import msgspec

from pipeline.errors import ConfigError, ModelUnavailable
from pipeline.models import digests, store
from pipeline.models.locks import lock
from shm.checkpoint import VOCABULARY_REVISION, Index, TokenizerData, load_index
from shm.partial_checkpoint import PartialCheckpoint
from stages.worker.checkpoint.fit_k_compiled import choose_fits
from stages.worker.checkpoint.gguf import GgufError, GgufFile
from stages.worker.checkpoint.ingest import check_head, convert
from stages.worker.checkpoint.one_pass import check_space, prepare_file, revision_of
from stages.worker.checkpoint.quantize_compiled import choose_quantizer
from stages.worker.checkpoint.requantized import Requantized
from stages.worker.checkpoint.source import Source
from stages.worker.checkpoint.usable import is_usable
from stages.worker.huggingface.config import CheckpointDirectoryError
from stages.worker.huggingface.source import HuggingFaceSource

CheckVocabulary = Callable[[TokenizerData, Path], None]


def accept_vocabulary(data: TokenizerData, path: Path) -> None:
    """A `CheckVocabulary` that accepts every one."""


def accept_digest(digest: str) -> None:
    """A `check_digest` that accepts every one."""


def prepare_source(
    path: Path,
    models_dir: Path,
    quant: str = "",
    pretokenizer: str = "",
    progress: store.Progress = store.no_progress,
    check_vocabulary: CheckVocabulary = accept_vocabulary,
    check_digest: Callable[[str], None] = accept_digest,
) -> Index:
    """The index of the checkpoint of a file or directory, which is made unless it exists.

    quant: a key of `requantized.QUANTS`; "": weights stay as they are.  check_vocabulary: called with a directory's
    vocabulary and its path before anything is hashed.  check_digest: called with the digest of a checkpoint of a
    directory, or of other weight types, before it is made.

    Raises `ConfigError`, `ModelUnavailable`, `ResourceError`.
    """
    with _reported(path):
        source = _open(path, quant, pretokenizer)
        tokenizer = check_head(source, pretokenizer)
        if path.is_dir():
            check_vocabulary(tokenizer, path)
        if isinstance(source, GgufFile):
            return prepare_file(source, models_dir, pretokenizer, progress)
        identity = source.identity()
        hashed = _hash_files(source, models_dir, progress)
        if source.identity() != identity:
            raise ConfigError(f"{path} was changed while it was hashed; run this again when it is complete", "model")
        digest = _digest(hashed, quant, tokenizer, revision_of(source))
        check_digest(digest)
        index_path = models_dir / f"{digest}.idx"
        tag = f"ingest-{digest[:16]}"
        if not is_usable(index_path):
            with lock(models_dir, tag):
                if not is_usable(index_path):
                    partial = PartialCheckpoint(models_dir / ".fetch" / tag, f"{digest} {identity}")
                    check_space(source, models_dir, partial)
                    if isinstance(source, Requantized):
                        if source.k_quantized_bytes:
                            source.fits = choose_fits(source.k_quantized_bytes, progress)
                        source.quantizer = choose_quantizer(source.simply_quantized_bytes, progress)
                    convert(source, index_path, digest, progress, pretokenizer, partial)
        return load_index(index_path)


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


def _digest(files: dict[str, str], quant: str, tokenizer: TokenizerData, revision: int) -> str:
    described: dict[str, object] = {
        "revision": revision,
        "files": dict(sorted(files.items())),
        "quant": quant,
        "pre": tokenizer.pre,
    }
    if tokenizer.revision > VOCABULARY_REVISION:  # otherwise the digests of older releases stay
        described["vocabulary"] = tokenizer.revision
    return hashlib.sha256(msgspec.json.encode(described)).hexdigest()
