"""The settings of a version that is to be loaded, and the checks of its file.

The checks run in the event loop, so they must not block: a FIFO, for example, is never opened for a blocking read.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

import msgspec

from pipeline.catalog.pulled import published_name
from pipeline.config import paths
from pipeline.config.rules import MAX_ADAPTERS, check_adapter_name, check_name
from pipeline.config.schema import AdapterConfig, ModelConfig
from pipeline.errors import Conflict, InvalidRequest, ModelDamaged, ModelNotFound, ModelUnavailable
from pipeline.models import store
from stages.gateway.versions import load_errors
from stages.gateway.versions.catalog import VersionCatalog


def load_settings(catalog: VersionCatalog, name: str, path: str, kv_cache_mb: int = 0) -> ModelConfig:
    """Return the settings of a new version of the model `name`.

    path: the GGUF file; "": the file of the serving version, or of the configuration, or the one that the name was
    pulled with last.  kv_cache_mb: 0: as before.  Raises `InvalidRequest` and `ModelNotFound`.
    """
    if path and not _is_usable_path(path):
        raise InvalidRequest(
            f"path is {path[:200]!r}; it must be the absolute path of a file on the server's machine, in UTF-8", "path"
        )
    try:
        settings = catalog.settings(name)
    except ModelNotFound:
        if not path:
            raise
        if reason := check_name(name):
            raise InvalidRequest(f"the name {name[:140]!r} cannot be used: {reason}", "target") from None
        settings = ModelConfig(name=name)
    check_slug(catalog, settings)
    if path:
        settings = msgspec.structs.replace(settings, path=os.path.normpath(path), sha256="")
    else:
        settings = _located(_renamed(catalog, settings))
    if kv_cache_mb:
        settings = msgspec.structs.replace(settings, kv_cache_mb=kv_cache_mb)
    _check_file(settings)
    return settings


def adapter_settings(catalog: VersionCatalog, op: str, name: str, path: str) -> ModelConfig:
    """Return the settings of a model with one adapter more (op `load`), read again (`reload`) or less (`unload`).

    name: MODEL:ADAPTER.  path: of the adapter's file or directory; "": with `reload`, the present one.
    Raises `InvalidRequest`, `ModelNotFound` and `Conflict`.
    """
    model, _, adapter = name.partition(":")
    if catalog.serving(model) is None:
        raise ModelNotFound(f"model {model!r} is not loaded; load it first", "target")
    if reason := check_adapter_name(adapter):
        raise InvalidRequest(f"the adapter's name {adapter[:100]!r} cannot be used: {reason}", "target")
    known = {one.name: one for one in catalog.settings(model).adapters}
    if op == "load" and adapter in known:
        raise Conflict(f"{name} is loaded already; `starling reload {name}` replaces it", "target")
    if op != "load" and adapter not in known:
        listed = ", ".join(f"{model}:{one}" for one in known) or "none"
        raise ModelNotFound(f"model {model!r} has no adapter {adapter!r}; it has: {listed}", "target")
    if op == "unload":
        del known[adapter]
    else:
        path = path or (known[adapter].path if adapter in known else "")
        if not path or not _is_usable_path(path) or not (os.path.isfile(path) or os.path.isdir(path)):
            raise InvalidRequest(
                f"path is {path[:200]!r}; it must be the absolute path of a GGUF file, or of a PEFT directory, on the "
                f"server's machine",
                "path",
            )
        known[adapter] = AdapterConfig(name=adapter, path=os.path.normpath(path))
    if len(known) > MAX_ADAPTERS:
        raise InvalidRequest(f"model {model!r} has {MAX_ADAPTERS} adapters, the most that it can have", "target")
    # The weights are those of the serving version, whatever its name has been given since.
    serving = catalog.settings(model)
    settings = _located(serving)
    _check_file(settings)
    return msgspec.structs.replace(settings, sha256=serving.sha256, adapters=tuple(known.values()))


def demand_settings(catalog: VersionCatalog, name: str) -> ModelConfig:
    """Return the settings of a version that requests wait for. Raises `StarlingError`; no text has a path."""
    configured = catalog.settings(name)
    path = store.gguf_path(configured, paths.models_dir())
    if not path.exists():
        raise ModelUnavailable(
            f"the file of model {name!r} is not on the server's machine; its operator fetches it with `starling "
            f"prepare {name}`",
            "model",
        )
    try:
        return load_settings(catalog, name, "")
    except (InvalidRequest, ModelDamaged) as error:
        raise load_errors.for_requests(name, error) from None


def known_digest(settings: ModelConfig) -> str:
    """Return the digest of a file that has been prepared and has not changed since; "" otherwise.

    With it every stage opens its part at once; without it they wait for the worker, which also refuses a file that is
    not the expected one.
    """
    folder = paths.models_dir()
    index = store.find_index(settings, folder)
    expected = store.expected_digest(settings, folder)
    return index.stem if index is not None and expected in ("", index.stem) else ""


def check_slug(catalog: VersionCatalog, settings: ModelConfig) -> None:
    """Raise `InvalidRequest` if a loaded model with another name would use the same file names."""
    for version in catalog.all:
        if version.settings.slug == settings.slug and version.name != settings.name:
            raise InvalidRequest(
                f"the name {settings.name!r} is too much like {version.name!r}, which is loaded: their sessions and "
                f"cached pages would be in the same files; use another name, or unload that model",
                "target",
            )


def _renamed(catalog: VersionCatalog, settings: ModelConfig) -> ModelConfig:
    """The settings with the path of the configuration if their file is a stored one, to which a name has led.

    A stored file never changes, but a later `starling pull` lets the name lead to another one.
    """
    path, named = Path(settings.path), catalog.loadable.settings(settings.name)
    is_stored = path.parent == paths.models_dir() and path.stem == settings.sha256
    if named is None or not is_stored:
        return settings
    return msgspec.structs.replace(settings, path=named.path, sha256=named.sha256)


def _located(settings: ModelConfig) -> ModelConfig:
    """The settings with the path of the file itself.

    Only the store can resolve the configured path (a URL, `~` or nothing), by the model's name. The path that it finds
    must lead to the file that was pulled, whose digest is known by that name as well.
    """
    folder = paths.models_dir()
    path, sha256 = store.gguf_path(settings, folder), store.expected_digest(settings, folder)
    if published_name(settings.path) and path.suffix == ".idx":
        sha256 = sha256 or path.stem
    return msgspec.structs.replace(settings, path=str(path), sha256=sha256)


def _is_usable_path(path: str) -> bool:
    """True for an absolute path that the version table can store."""
    try:
        return os.path.isabs(path) and b"\0" not in path.encode()
    except UnicodeEncodeError:
        return False


def _check_file(settings: ModelConfig) -> None:
    """Raise `InvalidRequest` unless the file is readable and starts like a GGUF file, or is a prepared model.

    A stored file that starts otherwise raises `ModelDamaged`.
    """
    path = Path(settings.path)
    if store.is_checkpoint(settings, paths.models_dir()):
        if store.find(settings, paths.models_dir()) is None:
            raise InvalidRequest(
                f"model {settings.name!r}: {path} is not a complete checkpoint in {paths.models_dir()}; run `starling "
                f"pull` for a published model, or give the path of a GGUF file",
                "path",
            )
        return
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            is_file = stat.S_ISREG(os.fstat(fd).st_mode)
            head = os.read(fd, len(store.MAGIC)) if is_file else b""
        finally:
            os.close(fd)
    except OSError as error:
        raise InvalidRequest(
            f"model {settings.name!r}: {path} cannot be read: {error.strerror}; path must be a GGUF file that the "
            f"server may read",
            "path",
        ) from None
    if not is_file:
        raise InvalidRequest(f"model {settings.name!r}: {path} is not a regular file; path must be a GGUF file", "path")
    if head != store.MAGIC:
        if store.stored_digest(settings, paths.models_dir()):
            raise store.damaged(settings, "is not a GGUF file")
        raise InvalidRequest(
            f"model {settings.name!r}: {path} is not a GGUF file (it starts with {head!r}, not {store.MAGIC!r})",
            "path",
        )
