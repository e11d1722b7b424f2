"""How often a stage has been restarted: `RUN_DIR/STAGE.restarts`, so that the number outlives its supervisor.

The file has the number that the next start of the stage begins with, and behind it the id of the machine's boot unless
the last run has ended in order. It is written by the supervisor, or by the stage itself where systemd starts it again,
and removed when the whole server has stopped.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from pipeline.config import paths
from pipeline.config.schema import Config
from pipeline.errors import ConfigError
from pipeline.files import replace_file
from pipeline.runtime import run_dir
from pipeline.runtime.steady_clock import read_boot_id

RESTARTS_VARIABLE = "STARLING_RESTARTS"  # in the environment of a stage; its record has the number
MAX_BYTES = 100


class RestartCount:
    """Of one stage. A number that cannot be stored is lost with the supervisor; the stage runs all the same."""

    def __init__(self, path: Path | None = None) -> None:
        """`path`: None: it ends with the supervisor.

        `follows_death`: the stage has run since the machine was started, and did not end in order.
        """
        self._path = path
        self.number, self.follows_death = _read(path) if path is not None else (0, False)

    def started(self) -> None:
        """The stage starts: if it is killed with its supervisor, their successors begin with one more."""
        self._write(f"{self.number + 1} {read_boot_id()}")

    def restarted(self) -> None:
        """The stage is restarted."""
        self.number += 1

    def stopped(self) -> None:
        """The stage and its supervisor end in order: the next start is none that a failure has caused."""
        self._write(f"{self.number}")

    def _write(self, text: str) -> None:
        if self._path is not None:
            with contextlib.suppress(OSError):
                replace_file(self._path, text.encode())


def path_of(directory: Path, stage: str) -> Path:
    """The file of a stage in the run directory."""
    return directory / f"{stage}.restarts"


def open_count(config: Config, stage: str) -> RestartCount:
    """The count of a stage that is about to start."""
    with contextlib.suppress(ConfigError):  # the stage reports it
        run_dir.prepare(paths.run_dir(config))
    return RestartCount(path_of(paths.run_dir(config), stage))


def _read(path: Path) -> tuple[int, bool]:
    """The number in the file, and whether a run of this boot that wrote it has not ended in order."""
    try:
        with path.open("rb") as file:
            number, _, boot = file.read(MAX_BYTES).decode().partition(" ")
        return max(0, int(number)), boot == read_boot_id()
    except (OSError, ValueError):
        return 0, False
