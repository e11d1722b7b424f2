"""A hub's repository of safetensors, without a GGUF file: it is fetched as a directory, which is converted once.

    .fetch/hf-FILES/parts/NAME ──> SHA-256 ──> .fetch/hf-FILES/REPO/NAME ──> DIGEST.idx, DIGEST.bin ──> names/SLUG.json

Only the files that the conversion reads are fetched: the small ones first, so that a model that cannot be served is
refused before its weights arrive.  FILES stands for their contents, as far as the hub announces them.  What has
arrived stays after an interruption; it is removed when the model has its record.  One process at a time fetches and
converts them.

How a directory becomes a checkpoint is passed in (conversion.py).
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from pipeline.errors import ConfigError, InvalidRequest, ModelUnavailable, ResourceError
from pipeline.files import sync_directory
from pipeline.models import digests, hub, model_directory, registry
from pipeline.models.conversion import Conversion, is_complete
from pipeline.models.download import Progress, discard
from pipeline.models.hub import HubFile, Repository
from pipeline.models.locks import lock
from pipeline.models.model_directory import CONFIG, DEFAULT_QUANT, INDEX, MAX_SMALL_BYTES, QUANTS
from pipeline.models.registry import Record
from pipeline.models.sources import HubSource
from shm.decoding import DECODE_ERRORS

_BLOCK_BYTES = 512  # of `st_blocks`
_VALUE_BYTES = {"float16": 2, "bfloat16": 2}  # by the type that config.json tells; other types have more


def pull_directory(
    source: HubSource,
    repository: Repository,
    models_dir: Path,
    name: str,
    quant: str,
    sha256: str,
    allowed: Sequence[str],
    progress: Progress,
    conversion: Conversion | None,
    save: Callable[[Record], None],
) -> Record:
    """The record of the converted repository, which `save` has stored. Idempotent; interruptions are continued.

    name: by default the repository's, with `quant`.  quant: a key of `QUANTS`; "": `DEFAULT_QUANT`.  sha256: the digest
    that the checkpoint must have.  Raises `ConfigError`, `InvalidRequest`, `ModelUnavailable`, `ResourceError`.
    """
    names = {one.name: one for one in repository.files}
    quant, chosen = quant.lower() or DEFAULT_QUANT, bool(quant)
    _check(source, names, quant, conversion)
    assert conversion is not None
    files = _identity(repository, names)
    origin = hashlib.sha256(f"{files} {quant} {conversion.pretokenizer}".encode()).hexdigest()
    title = repository.name.partition("/")[2]
    tag = f"hf-{files[:16]}"
    folder = models_dir / ".fetch" / tag

    def check_digest(digest: str) -> None:
        if sha256 and digest != sha256:
            raise ModelUnavailable(
                f"{source}: converted to {quant} the model has the digest {digest}, expected {sha256}; correct it, "
                f"take another --quant, or check the source"
            )

    with lock(models_dir, tag):  # by which `starling gc` knows that the folder is in use
        known = _converted(models_dir, origin)
        if known is not None:
            check_digest(known.digest)
            record = msgspec.structs.replace(
                known, name=name or f"{title}-{quant}", source=str(source), revision=repository.commit
            )
            save(record)
            return record
        how = "--quant has others" if chosen else f"the default; --quant takes {', '.join(QUANTS)}"
        conversion.note(f"{source} has safetensors and no GGUF file: converting them to {quant} ({how})")
        download = _Download(source, repository, folder, models_dir, allowed, progress)
        directory = download.run(folder / title, quant, conversion)
        # What is wrong with the small files was refused before. The weights stay: another attempt may need them.
        index = conversion.convert(directory, quant, progress, check_digest)
        record = Record(
            name or f"{title}-{quant}",
            index.digest,
            index.bin_bytes,
            str(source),
            download.weights[0],
            repository.commit,
            time.time(),
            architecture=index.architecture,
            quantization=index.quantization,
            context_length=index.hyper.context_length,
            is_checkpoint=True,
            origin=origin,
        )
        save(record)
        shutil.rmtree(folder, ignore_errors=True)
    return record


def _check(source: HubSource, names: dict[str, HubFile], quant: str, conversion: Conversion | None) -> None:
    """Raise `InvalidRequest` for what the names already tell."""
    if quant not in QUANTS:
        raise InvalidRequest(
            f"{source} has safetensors and no GGUF file: --quant {quant} is none of the types that they can be "
            f"converted to: {', '.join(QUANTS)}",
            "quantization",
        )
    if absent := model_directory.missing(names):
        hint = "; an adapter is named in models[].adapters" if "adapter_config.json" in names else ""
        raise InvalidRequest(f"{source} has safetensors and no {absent}: it cannot be converted{hint}", "source")
    for name in (*model_directory.small_files(names), *([INDEX] if INDEX in names else [])):
        if names[name].nbytes > MAX_SMALL_BYTES:
            raise InvalidRequest(
                f"{source}/{name} has {names[name].nbytes:,} bytes, expected at most {MAX_SMALL_BYTES:,}; use another "
                f"model",
                "source",
            )
    if conversion is None:
        raise InvalidRequest(
            f"{source} has safetensors and no GGUF file; `starling pull {source}` fetches and converts them", "source"
        )


def _identity(repository: Repository, names: dict[str, HubFile]) -> str:
    """What the hub announces of the contents of all files that may be needed, hashed."""
    weights = [name for name in names if name.endswith(model_directory.SAFETENSORS) and "/" not in name]
    wanted = sorted({*weights, *model_directory.small_files(names), *([INDEX] if INDEX in names else [])})
    contents = [(name, names[name].nbytes, names[name].sha256 or names[name].blob) for name in wanted]
    commit = "" if all(one[2] for one in contents) else repository.commit
    return hashlib.sha256(msgspec.json.encode((repository.name, commit, contents))).hexdigest()


def _converted(models_dir: Path, origin: str) -> Record | None:
    """A checkpoint of the same files, made in the same way, that is here."""
    for record in registry.read_all(models_dir):
        if record.is_checkpoint and record.origin == origin and is_complete(models_dir, record.digest):
            return record
    return None


@contextlib.contextmanager
def _removed_if_refused(folder: Path) -> Iterator[None]:
    """Remove the files if they cannot be converted: they would be refused again."""
    try:
        yield
    except ConfigError:
        shutil.rmtree(folder, ignore_errors=True)
        raise


class _Index(msgspec.Struct):
    """What is read of `model.safetensors.index.json`."""

    weight_map: dict[str, str]  # file by tensor


class _Download:
    """Brings the files of one repository into `folder`."""

    def __init__(
        self,
        source: HubSource,
        repository: Repository,
        folder: Path,
        models_dir: Path,
        allowed: Sequence[str],
        progress: Progress,
    ) -> None:
        self._source, self._repository, self._folder = source, repository, folder
        self._models_dir, self._allowed, self._progress = models_dir, allowed, progress
        self._names = {one.name: one for one in repository.files}
        self._done = self._total = 0  # bytes
        self.weights: list[str] = []  # names of the files of the weights

    def run(self, directory: Path, quant: str, conversion: Conversion) -> Path:
        """Bring all files; `directory`. Raises `ConfigError`, `ModelUnavailable`, `ResourceError`."""
        self._folder.mkdir(parents=True, exist_ok=True)
        has_index = INDEX in self._names
        small = model_directory.small_files(self._names) + ([INDEX] if has_index else [])
        possible = [name for name in self._names if name.endswith(model_directory.SAFETENSORS) and "/" not in name]
        self._total = sum(self._names[name].nbytes for name in (*small, *([] if has_index else possible)))
        for name in small:
            self._bring(name, directory)
        with _removed_if_refused(self._folder):
            conversion.check(directory)
            self.weights = self._choose_weights(self._read_index(directory / INDEX) if has_index else set())
        self._total = sum(self._names[name].nbytes for name in (*small, *self.weights))
        self._check_space(directory, quant)
        for name in self.weights:
            self._bring(name, directory)
        return directory

    def _choose_weights(self, listed: set[str]) -> list[str]:
        try:
            return model_directory.weight_files(self._names, listed)
        except ValueError as error:
            raise ConfigError(f"{self._source}: {error}; use another repository", "source") from None

    def _read_index(self, path: Path) -> set[str]:
        try:
            listed = set(msgspec.json.decode(path.read_bytes(), type=_Index).weight_map.values())
        except DECODE_ERRORS as error:
            raise ConfigError(f"{self._source}/{INDEX} cannot be read ({error}); use another repository") from None
        if not listed:
            raise ConfigError(f"{self._source}/{INDEX}: weight_map lists no file; use another repository", "source")
        return listed

    def _bring(self, name: str, directory: Path) -> None:
        """Download a file unless it is here, check it, and move it to its place."""
        file, path = self._names[name], directory / name
        if not self._is_here(file, path):
            part = self._part(name)
            part.parent.mkdir(parents=True, exist_ok=True)
            before = self._done

            def report(what: str, done: int, total: int) -> None:
                self._progress(what, before + done, max(self._total, before + total))

            digest = hub.fetch(self._source, self._repository, file, part, report, self._allowed)
            if file.sha256 and digest != file.sha256:
                discard(part)
                raise ModelUnavailable(
                    f"{self._source}: {name} has SHA-256 {digest}, the hub announces {file.sha256}; it was removed. "
                    f"Try again, or check the source"
                )
            path.parent.mkdir(parents=True, exist_ok=True)
            with part.open("rb") as opened:
                os.fsync(opened.fileno())
            part.rename(path)
            sync_directory(path.parent)
            digests.remember(name, path, digests.Stamp(*digests.identity(path.stat()), digest), self._models_dir)
            discard(part)
        self._done += file.nbytes

    def _part(self, name: str) -> Path:
        return self._folder / "parts" / name.replace("/", "--")

    def _is_here(self, file: HubFile, path: Path) -> bool:
        """Was the file placed by an earlier attempt, and is it unchanged?"""
        try:
            identity = digests.identity(path.stat())
        except OSError:
            return False
        stamp = digests.read_all(self._models_dir).get(os.path.realpath(path))
        is_same = stamp is not None and digests.identity_of(stamp) == identity
        return is_same and (not file.sha256 or (stamp is not None and stamp.sha256 == file.sha256))

    def _check_space(self, directory: Path, quant: str) -> None:
        """Raise `ResourceError` unless the disk has room for what is missing and for the converted model."""
        missing = 0
        for name in self.weights:
            file = self._names[name]
            if not self._is_here(file, directory / name):
                missing += max(0, file.nbytes - _stored_bytes(self._part(name)))
        weight_bytes = sum(self._names[name].nbytes for name in self.weights)
        converted = model_directory.expected_bytes(weight_bytes, _value_bytes(directory / CONFIG), quant)
        free = shutil.disk_usage(self._folder).free
        if missing + converted > free:
            raise ResourceError(
                f"{self._source}: its weights need {missing:,} bytes more and the model that is converted from them "
                f"about {converted:,} in {self._models_dir}, which has {free:,} free; free some, move STARLING_HOME, "
                f"or take a smaller --quant"
            )


def _stored_bytes(path: Path) -> int:
    """Bytes that a partial file takes on the disk."""
    try:
        return path.stat().st_blocks * _BLOCK_BYTES
    except OSError:
        return 0


def _value_bytes(config: Path) -> int:
    """Bytes of a value of the weights as the configuration tells; 4, if it does not: then least is expected."""
    fields: dict[str, Any] = msgspec.json.decode(config.read_bytes())
    kind = fields.get("torch_dtype") or fields.get("dtype")
    return _VALUE_BYTES.get(kind, 4) if isinstance(kind, str) else 4
