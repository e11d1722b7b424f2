"""Why a worker group could not start or go on, stored for the command that loads its version."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from pipeline.errors import InternalError, ModelUnavailable, StarlingError
from pipeline.models import versions
from shm.checkpoint import CheckpointError


@contextmanager
def stored_failure(run_dir: Path, stage: str) -> Iterator[Callable[[], None]]:
    """Store the error that ends the block, and raise it as a `StarlingError` where it is one.

    Any other `RuntimeError` is not stored: a group that is restarted may do better.  Yields what removes the stored
    error of an earlier start.
    """
    try:
        yield lambda: versions.failure_path(run_dir, stage).unlink(missing_ok=True)
    except CheckpointError as error:
        refused = ModelUnavailable(str(error), param="model")
        versions.write_failure(run_dir, stage, refused)
        raise refused from None
    except StarlingError as error:
        versions.write_failure(run_dir, stage, error)
        raise
    except RuntimeError:
        raise
    except Exception as error:  # perhaps an unforeseen model file: the command that loads it must get the reason
        problem = f"{type(error).__name__}: {error}; the worker's log has more (starling logs worker)"
        versions.write_failure(run_dir, stage, InternalError(problem))
        raise
