"""Finds prepared GGUF files of which an older release ignored the attention factor, and prepares them again.

Such an index does not say whether its file has a factor, so the file is read, once.  `starling prepare`, `up`,
`publish` and `Embedded` call `apply_factor` before stages open the index.  A worker keeps the index, which fits the
arenas that other stages have made for it, and calls `warn_if_ignored`: stages of systemd, and models that are loaded on
demand, have no `starling up` that prepares them.  A checkpoint without its GGUF file stays as it is.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection
from pathlib import Path

from pipeline.config.schema import ModelConfig
from pipeline.errors import ConfigError, StarlingError
from pipeline.models import attention_factor, store
from pipeline.models.locks import lock
from shm.checkpoint import CheckpointError, load_index
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
    has loaded, whose index must stay.  It is called before the work, and again before the index is replaced.

    Raises as `ingest`, and `LoadedError` if a server has it loaded.
    """
    revision = _ignored_revision(model, index_path)
    if revision is None:
        return False
    models_dir, digest = index_path.parent, index_path.stem
    source = store.gguf_path(model, models_dir)

    def check_loaded() -> None:
        if any(name == digest and other != revision for name, other in loaded()):
            raise LoadedError(model.name)

    with lock(models_dir, f"ingest-{digest[:16]}"):
        if load_index(index_path).hyper.kv_revision == revision:  # another process had the lock
            return False
        check_loaded()
        facts = {"model": model.name, "path": str(index_path)}
        log.warning("an older release ignored the attention factor of a model, ingesting it again", extra=facts)
        ingest(source, index_path, digest, progress, model.pretokenizer, check_loaded)
    return True


def warn_if_ignored(model: ModelConfig, index_path: Path) -> None:
    """Log the remedy if the prepared checkpoint of a model lacks the attention factor of its GGUF file.

    May read the head of that file: for a thread beside the steps.  Raises nothing: the model is served as it is.
    """
    with contextlib.suppress(StarlingError, OSError, CheckpointError):
        if _ignored_revision(model, index_path) is not None:
            log.warning(
                "an older release ignored the attention factor of a model, using its checkpoint as it is",
                extra={
                    "model": model.name,
                    "path": str(index_path),
                    "remedy": f"unload it or stop the server, run `starling prepare {model.name}`, then start it again",
                },
            )


def _ignored_revision(model: ModelConfig, index_path: Path) -> int | None:
    """`Hyper.kv_revision` of the GGUF file, if that of the prepared checkpoint is another one.

    If they are the same that is remembered, and the file is not read again.
    """
    if not attention_factor.may_be_missing(model, index_path):
        return None
    source = store.gguf_path(model, index_path.parent)
    try:
        revision = HyperReader(GgufFile(source)).kv_revision()
    except (GgufError, OSError) as error:
        facts = {"path": str(source), "reason": str(error)}
        log.warning("the attention factor cannot be read, keeping the checkpoint as it is", extra=facts)
        return None
    if load_index(index_path).hyper.kv_revision == revision:
        attention_factor.remember_compared(model, index_path.parent)
        return None
    return revision
