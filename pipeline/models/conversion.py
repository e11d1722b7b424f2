"""How a directory of safetensors becomes a checkpoint, as what fetches the directory sees it.

The worker implements it (stages/worker/checkpoint/directory_conversion.py); commands and stages pass it to
`store.fetch` and `pull`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from shm.checkpoint import CheckpointError, Index, load_index

Progress = Callable[[str, int, int], None]  # (what, done, total) in bytes; total 0: unknown


class Conversion(Protocol):
    """Makes a checkpoint of a directory of safetensors."""

    pretokenizer: str  # on which the result depends as well

    def note(self, text: str) -> None:
        """Say what will be done."""

    def check(self, directory: Path) -> None:
        """The directory has its small files and no weights yet. Raises `ConfigError` if it cannot be converted."""

    def convert(self, directory: Path, quant: str, progress: Progress, check_digest: Callable[[str], None]) -> Index:
        """The index of the checkpoint, which is made unless it is here. Raises `StarlingError`.

        check_digest: called with the checkpoint's digest before it is made.
        """


def is_complete(models_dir: Path, digest: str) -> bool:
    """Is the checkpoint of a digest here, as a whole, and can this release use it?"""
    path = models_dir / f"{digest}.idx"
    try:
        index = load_index(path)
        is_whole = path.with_suffix(".bin").stat().st_size == index.bin_bytes
        return is_whole and index.digest == digest and index.is_current
    except (OSError, CheckpointError):
        return False
