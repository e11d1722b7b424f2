"""From a configured model to a checkpoint and kernels that can be used: fetch, ingest, compile.

Idempotent.  One process does the work under a file lock; others wait for it and use its result.  A model that is
prepared already costs one read of its index.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType

from pipeline.config.schema import ModelConfig
from pipeline.config.user_home import expand_user
from pipeline.errors import ConfigError, ModelUnavailable
from pipeline.models import digests, store
from pipeline.models.conversion import Conversion
from pipeline.models.locks import lock
from shm.checkpoint import VERSION, Checkpoint, CheckpointError, Index, load_index
from stages.worker.adapters.prepared import ADAPTERS, Prepared, open_prepared, prepare_adapter
from stages.worker.checkpoint.directory_conversion import DirectoryConversion
from stages.worker.checkpoint.gguf import GgufError, GgufFile
from stages.worker.checkpoint.ingest import SourceChanged, check_source, ingest
from stages.worker.checkpoint.one_pass import prepare_file
from stages.worker.checkpoint.usable import is_usable, usable_version
from stages.worker.checkpoint.verify import migrate, verify, verify_once
from stages.worker.checkpoint.weights_memory import read_weights
from stages.worker.checkpoint.while_arriving import IngestWhileArriving
from stages.worker.kernels import stored_code
from stages.worker.kernels.background_build import BackgroundBuild

log = logging.getLogger("starling.checkpoint")


def prepare_checkpoint(
    model: ModelConfig,
    models_dir: Path,
    progress: store.Progress = store.no_progress,
    digest: str = "",
    allowed: Sequence[str] = ("*",),
    conversion: Conversion | None = None,
) -> Path:
    """Fetch and ingest the model as far as necessary; returns its `.idx`.

    digest: SHA-256 of the file that the checkpoint must be of, if one exists already; the configured file may have
        changed since.
    allowed: the patterns of sources that may be fetched (`registry.sources`).
    conversion: of a hub's repository of safetensors; None: one that compares no vocabulary with the tokenizer's own.

    Raises `StarlingError`, which says what is wrong and what to do.
    """
    if digest and _make_usable(index_path := models_dir / f"{digest}.idx", models_dir, progress):
        return index_path
    try:
        return _ingest_if_missing(model, models_dir, progress, allowed, conversion)
    except SourceChanged as error:
        # The file is not what its recorded digest says: perhaps another program has just written it.
        log.warning("model file has changed, reading it again", extra={"model": model.name, "reason": str(error)})
        digests.forget(store.gguf_path(model, models_dir), models_dir)
        return _ingest_if_missing(model, models_dir, progress, allowed, conversion)


def fetch_and_convert(
    model: ModelConfig,
    models_dir: Path,
    progress: store.Progress,
    allowed: Sequence[str],
    conversion: Conversion | None = None,
    note: Callable[[str], object] = lambda text: None,
) -> store.LocalModel:
    """The model, fetched if necessary: what is downloaded is converted meanwhile, safetensors when all are here.

    A file of this machine is not converted.  note: gets what a wait is for.  Raises `StarlingError`.
    """
    conversion = conversion or DirectoryConversion(models_dir, model.pretokenizer)
    with IngestWhileArriving(models_dir, model.pretokenizer, progress) as reader:
        return store.fetch(model, models_dir, progress, allowed, reader, conversion, note)


def _ingest_if_missing(
    model: ModelConfig,
    models_dir: Path,
    progress: store.Progress,
    allowed: Sequence[str],
    conversion: Conversion | None,
) -> Path:
    source = store.gguf_path(model, models_dir)
    if not store.is_checkpoint(model, models_dir) and source.is_file() and store.find_index(model, models_dir) is None:
        _convert_local(source, model, models_dir, progress)
    located = fetch_and_convert(model, models_dir, progress, allowed, conversion)
    index_path = models_dir / f"{located.digest}.idx"
    if not _make_usable(index_path, models_dir, progress):
        if store.is_checkpoint(model, models_dir):
            raise ConfigError(
                f"model {model.name!r}: {index_path} is of an older release, and its source is not here; "
                f"{store.checkpoint_remedy(model, models_dir)} (of a published model publish it again first, with "
                "this release and --replace)",
                "models.path",
            )
        with lock(models_dir, f"ingest-{located.digest[:16]}"):
            if usable_version(index_path) != VERSION:
                ingest(located.path, index_path, located.digest, progress, model.pretokenizer)
    return index_path


def _convert_local(source: Path, model: ModelConfig, models_dir: Path, progress: store.Progress) -> None:
    """Check a file that is here. Hash and convert it in one pass, unless its checkpoint may exist."""
    try:
        _check(source, model, models_dir, progress)
        if store.find(model, models_dir) is None and not _may_be_converted(source, model, models_dir):
            file = GgufFile(source)
            prepare_file(
                file, models_dir, model.pretokenizer, progress, check_digest=lambda: store.fetch(model, models_dir)
            )
    except GgufError as error:  # it was changed meanwhile
        raise ConfigError(str(error), param="model") from None
    except OSError as error:
        raise ModelUnavailable(str(error), param="model") from None


def _check(source: Path, model: ModelConfig, models_dir: Path, progress: store.Progress) -> None:
    """As `check_source`. A stored file that is refused and has been changed since raises `ModelDamaged`."""
    try:
        check_source(source, model.pretokenizer)
    except ConfigError:
        expected = store.stored_digest(model, models_dir)
        if expected and (found := _digest_of(source, model, models_dir, progress)) != expected:
            raise store.damaged(model, f"has SHA-256 {found}, expected {expected}") from None
        raise


def _digest_of(source: Path, model: ModelConfig, models_dir: Path, progress: store.Progress) -> str:
    """The file's digest: the one that is known while it does not change, so that it is read once at most."""
    if (known := store.find(model, models_dir)) is not None:
        return known.digest
    stamp = digests.compute(source, progress)
    digests.remember(model.name, source, stamp, models_dir)
    return stamp.sha256


def _may_be_converted(source: Path, model: ModelConfig, models_dir: Path) -> bool:
    """Whether a checkpoint is there that is this file's, if only the file's times have changed."""
    stamp = digests.read_all(models_dir).get(os.path.realpath(source))
    is_same_size = stamp is not None and stamp.size == source.stat().st_size
    likely = (stamp.sha256 if stamp is not None and is_same_size else "", store.expected_digest(model, models_dir))
    return any(digest and is_usable(models_dir / f"{digest}.idx") for digest in likely)


def open_verified(
    index_path: Path,
    progress: store.Progress = store.no_progress,
    use_mmap: bool = True,
    open_checkpoint: Callable[[Path], Checkpoint] = Checkpoint,
) -> Checkpoint:
    """Map a prepared checkpoint, verified now or earlier; without `use_mmap` read it into memory, and verify that.

    open_checkpoint: maps it.
    Raises `ConfigError` when it is damaged (another attempt would not help), `ModelUnavailable` when it cannot be read,
    `ResourceError` when memory is too small to read it.
    """
    try:
        if use_mmap:
            checkpoint = open_checkpoint(index_path)
            verify_once(checkpoint, progress)
        else:
            checkpoint = Checkpoint(index_path, partial(read_weights, progress=progress))
            verify(checkpoint, progress)
    except CheckpointError as error:
        raise ConfigError(str(error), param="model") from None
    except OSError as error:
        raise ModelUnavailable(str(error), param="model") from None
    return checkpoint


def prepare(
    model: ModelConfig,
    models_dir: Path,
    progress: store.Progress = store.no_progress,
    digest: str = "",
    allowed: Sequence[str] = ("*",),
    conversion: Conversion | None = None,
    probe: bool = False,
) -> Path:
    """As `prepare_checkpoint`; meanwhile compile the kernels of the model's KV type into the cache.

    probe: as of `build.build`: wait for the AMX probe, also if the kernels are in the cache.
    Raises `StarlingError`, or `CompilerFailed` with the compiler's last output.
    """
    with BackgroundBuild(model.kv_type, probe=probe) as kernels:
        index_path = prepare_checkpoint(model, models_dir, progress, digest, allowed, conversion)
        kernels.wait(progress)
    # What the model's graph needs besides is known only now.
    extra = stored_code.extra_entries(load_index(index_path).hyper, bool(model.adapters))
    with BackgroundBuild(model.kv_type, extra=extra) as kernels:
        kernels.wait(progress)
    return index_path


def prepare_adapters(
    model: ModelConfig, index: Index, models_dir: Path, digests: Mapping[str, str] = MappingProxyType({})
) -> dict[str, Prepared]:
    """The prepared form of each of the model's adapters, by name. `digests`: of those that are known, by name.

    Raises `ConfigError`, which names the adapter's file and what is wrong with it, and `ResourceError`.
    """
    folder, found, left = models_dir / ADAPTERS, dict[str, Prepared](), model.adapters_mb << 20
    for adapter in model.adapters:
        prepared = open_prepared(folder, digests[adapter.name]) if adapter.name in digests else None
        if prepared is None:
            source = Path(os.path.abspath(expand_user(adapter.path)))
            prepared = prepare_adapter(source, index, folder, model.max_adapter_rank, left)
        found[adapter.name] = prepared
        left -= prepared.data.size
    return found


def _make_usable(index_path: Path, models_dir: Path, progress: store.Progress) -> bool:
    """Migrate a checkpoint of an older version; whether there is a usable one. Raises `StarlingError`."""
    found = usable_version(index_path)
    if found == 0 or found == VERSION:
        return found == VERSION
    with lock(models_dir, f"ingest-{index_path.stem[:16]}"):
        if usable_version(index_path) not in (0, VERSION):
            try:
                migrate(index_path, progress)
            except CheckpointError as error:
                raise ConfigError(str(error), param="model") from None
            except OSError as error:
                raise ModelUnavailable(str(error), param="model") from None
    return usable_version(index_path) == VERSION
