"""Every model that this home knows: configured, pulled, and loaded into the running server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from pipeline.config import paths
from pipeline.config.schema import Config, ModelConfig
from pipeline.errors import StarlingError
from pipeline.ipc import control
from pipeline.models import registry, store, versions
from pipeline.observe import status
from shm.checkpoint import CheckpointError, Index, load_index


class Row(msgspec.Struct):
    """One model. Unknown texts are "", unknown numbers 0."""

    name: str
    state: (
        str  # loaded, loading, unloading, ready (the next load needs no preparation), fetched, changed, to be fetched
    )
    path: str
    present: bool  # the file exists
    ingested: bool  # its checkpoint exists
    configured: bool
    digest: str = ""
    bytes: int = 0
    architecture: str = ""
    quantization: str = ""
    context_length: int = 0
    parameters: int = 0
    source: str = ""  # where it was pulled from
    pulled: float = 0.0  # s since 1970
    last_used: float = 0.0  # s since 1970: when the server used it last, or its weights were last loaded
    expires_in_s: float | None = None  # until the server unloads it, if it is not used; None: no end, or not loaded


def known(config: Config) -> tuple[ModelConfig, ...]:
    """The configured models, then the pulled ones that are not configured."""
    names = {model.name for model in config.models}
    pulled = [ModelConfig(name=one.name) for one in registry.pulled(paths.models_dir()) if one.name not in names]
    return (*config.models, *pulled)


def rows(config: Config) -> list[Row]:
    """A row for each known model and each that is loaded besides."""
    loaded = loaded_versions(config)
    use = _use(config) if loaded else {}
    found = [_row(config, model, loaded, use) for model in known(config)]
    names = {row.name for row in found}
    return found + [_row(config, version.settings, loaded, use) for version in loaded if version.name not in names]


def _use(config: Config) -> dict[str, dict[str, Any]]:
    """What the gateway reports of the loaded models, by name; nothing if it does not answer."""
    try:
        return dict(control.call(paths.run_dir(config), "gateway", {"op": "state"}).get("use", {}))
    except StarlingError:
        return {}


def loaded_versions(config: Config) -> list[versions.ModelVersion]:
    """The versions that the running server serves or loads; none without a server."""
    if not any(record.alive for record in status.read_all(paths.run_dir(config))):
        return []
    return list(versions.read(config).versions)


def _row(
    config: Config, model: ModelConfig, loaded: list[versions.ModelVersion], use: dict[str, dict[str, Any]]
) -> Row:
    folder = paths.models_dir()
    path = store.gguf_path(model, folder)
    record = store.record_of(model, folder)
    located = store.find(model, folder)
    index = _index(folder, located.digest) if located is not None else None
    is_known = located is not None and (record is None or located.digest == record.digest)
    is_changed = record is not None and not is_known
    state = "changed" if is_changed else "ready" if index is not None else "fetched"
    if not path.is_file():
        state = "to be fetched"
    elif any(version.name == model.name for version in loaded):
        state = use.get(model.name, {}).get("state", "loaded")
    row = Row(model.name, state, str(path), path.is_file(), index is not None, config.model(model.name) is not None)
    if record is not None:
        row.digest, row.bytes, row.source, row.pulled = record.digest, record.nbytes, record.source, record.pulled
        row.architecture, row.quantization = record.architecture, record.quantization
        row.context_length = record.context_length
    if located is not None:
        row.digest, row.bytes = located.digest, located.nbytes
    if index is not None:
        row.architecture, row.parameters = index.architecture, index.parameters
        row.context_length = index.hyper.context_length
        row.quantization = row.quantization or index.quantization
    row.last_used = store.last_used(folder, row.digest) if row.digest else 0.0
    if known_use := use.get(model.name):
        row.last_used = max(row.last_used, known_use["last_used"] or 0.0)
        row.expires_in_s = known_use["expires_in_s"]
    return row


def _index(folder: Path, digest: str) -> Index | None:
    try:
        return load_index(folder / f"{digest}.idx")
    except (OSError, CheckpointError):
        return None
