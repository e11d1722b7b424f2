"""Whether the attention factor of a GGUF file may be missing in its checkpoint, which an older release has made.

Cheap, for each start of a server: stages/worker/checkpoint/attention_factor.py then reads the file.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import msgspec

from pipeline.config.schema import ModelConfig
from pipeline.errors import ConfigError, ResourceError
from pipeline.models import digests, store
from shm.checkpoint import load_index


def may_be_missing(model: ModelConfig, index_path: Path) -> bool:
    """Whether the GGUF file of a prepared checkpoint is here, and its factor neither read nor compared.

    Raises as `load_index` does.
    """
    models_dir = index_path.parent
    located = store.find(model, models_dir)
    if located is None or located.digest != index_path.stem or store.is_checkpoint(model, models_dir):
        return False
    stamp = digests.read_all(models_dir).get(os.path.realpath(located.path))
    return not (stamp and stamp.is_factor_compared) and not load_index(index_path).hyper.is_factor_read


def remember_compared(model: ModelConfig, models_dir: Path) -> None:
    """The checkpoint has the factor of its file. The index stays: as published it is known by its bytes.

    In a directory that cannot be written it is compared at each start.
    """
    path = store.gguf_path(model, models_dir)
    stamp = digests.read_all(models_dir).get(os.path.realpath(path))
    if stamp is not None:
        with contextlib.suppress(OSError, ConfigError, ResourceError):
            stamp = msgspec.structs.replace(stamp, is_factor_compared=True)
            digests.remember(model.name, path, stamp, models_dir)
