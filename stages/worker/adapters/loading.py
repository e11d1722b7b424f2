"""Loads the adapters of a version: those of the configuration, in the versions that this model version has used."""

from __future__ import annotations

import logging

from pipeline.config import paths
from pipeline.models.versions import ModelVersion
from shm.checkpoint import Index
from stages.worker.adapters.memory import AdapterMemory
from stages.worker.checkpoint.prepare import prepare_adapters

log = logging.getLogger("starling.worker")


def load_adapters(version: ModelVersion, index: Index) -> tuple[AdapterMemory, dict[str, str]]:
    """The memory that they are in, and the digest of each by its name. Raises as `prepare_adapters` does."""
    known = dict(version.adapters)
    prepared = prepare_adapters(version.model, index, paths.models_dir(), known)
    digests = {name: one.digest for name, one in prepared.items()}
    for name, digest in known.items():
        if digests.get(name, digest) != digest:
            log.warning("adapter was replaced", extra={"model": version.id, "adapter": name, "before": digest})
    return AdapterMemory(index, list(prepared.values())), digests
