"""Finds prepared GGUF files of which an older release ignored the attention factor, and prepares them again.

Such an index does not say whether its file has a factor, so the file is asked, once.  `starling prepare`, `up` and
`publish` call this before stages open the index: a worker that made it again would no longer fit the arenas that other
stages have made for it.  A checkpoint without its GGUF file stays as it is.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from pathlib import Path

from pipeline.config.schema import ModelConfig
from pipeline.errors import ConfigError
from pipeline.models import attention_factor, store
from pipeline.models.locks import lock
from shm.checkpoint import load_index
from stages.worker.checkpoint.gguf import GgufError, GgufFile
from stages.worker.checkpoint.hyperparameters import HyperReader
from stages.worker.checkpoint.ingest import ingest

log = logging.getLogger("starling.checkpoint")


class LoadedError(ConfigError):
    """A server has the model loaded, whose checkpoint lacks its attention factor."""

    def __init__(self, *names: str) -> None:
        """`names`: of models."""
        which, them = ("model", "it") if len(names) == 1 else ("models", "them")
        unload = ", ".join(f"`starling unload {name}`" for name in names)
        super().__init__(
            f"{which} {', '.join(map(repr, names))}: an older release, which ignored the attention factor, has "
            f"prepared {them}, and a server has {them} loaded: {unload} first, or stop the server, then run this again",
            "model",
        )
        self.models = names


def apply_factor(
    model: ModelConfig,
    index_path: Path,
    loaded: Callable[[], Collection[tuple[str, int]]],
    progress: store.Progress = store.no_progress,
) -> bool:
    """Prepare a model again if its checkpoint lacks the attention factor of its GGUF file; whether that was so.

    index_path: of its prepared checkpoint.  loaded: returns digest and `Hyper.kv_revision` of the models that a server
    has loaded, whose index must stay.  Raises as `ingest`, and `LoadedError` if a server has it loaded.
    """
    if not attention_factor.may_be_missing(model, index_path):
        return False
    models_dir, digest = index_path.parent, index_path.stem
    source = store.gguf_path(model, models_dir)
    try:
        revision = HyperReader(GgufFile(source)).kv_revision()
    except (GgufError, OSError) as error:
        facts = {"path": str(source), "reason": str(error)}
        log.warning("the attention factor cannot be read, keeping the checkpoint as it is", extra=facts)
        return False
    if load_index(index_path).hyper.kv_revision == revision:
        attention_factor.remember_compared(model, models_dir)
        return False
    with lock(models_dir, f"ingest-{digest[:16]}"):
        if load_index(index_path).hyper.kv_revision == revision:  # another process had the lock
            return False
        if any(name == digest and other != revision for name, other in loaded()):
            raise LoadedError(model.name)
        facts = {"model": model.name, "path": str(index_path)}
        log.warning("an older release ignored the attention factor of a model, ingesting it again", extra=facts)
        ingest(source, index_path, digest, progress, model.pretokenizer)
    return True
