"""The configuration of a run that systemd has started, kept in `RUN_DIR/NAME.config` until the run ends in order.

Operators may edit the file at any time, for the next start of the server.  When a process dies, its unit starts it
again beside stages that go on with the old configuration: it must have that one too.  So the file is there exactly
while a run has not ended in order, and a start that finds one of this boot continues that run.  `starling up` does not
need it: it keeps the configuration itself.

The file has API keys, as the configuration has: mode 0600, in a directory of mode 0700.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import msgspec

from pipeline.config import paths
from pipeline.config.load import load, resolve
from pipeline.config.schema import Config
from pipeline.errors import ConfigError
from pipeline.files import replace_file
from pipeline.runtime import run_dir
from pipeline.runtime.steady_clock import read_boot_id

SUFFIX = ".config"


class _Kept(msgspec.Struct, array_like=True):
    boot: str
    config: Config


class RunConfig:
    """Of one run. `config`: what it uses; `is_changed`: the file holds another one by now, or none that can be used."""

    def __init__(self, name: str) -> None:
        """Read the configuration. Raises `ConfigError` if no run continues and the file cannot be used."""
        failure: ConfigError | None = None
        try:
            self.config = load()
        except ConfigError as error:
            self.config, failure = resolve({}, {}), error  # where run directories are by default
        self._path = paths.run_dir(self.config) / f"{name}{SUFFIX}"
        kept = _read(self._path)
        if kept is None and failure is not None:
            raise failure
        self.is_changed = kept is not None and (failure is not None or kept != self.config)
        if kept is not None:
            self.config = kept
            return
        with contextlib.suppress(ConfigError, OSError):  # the stage reports it, or runs without
            run_dir.prepare(self._path.parent)
            replace_file(
                self._path, msgspec.msgpack.encode(_Kept(read_boot_id(), self.config)), of_run=True, mode=0o600
            )

    def ended(self) -> None:
        """The run has ended in order: the next start reads the file."""
        self._path.unlink(missing_ok=True)


def _read(path: Path) -> Config | None:
    """The configuration of a run of this boot that has not ended in order; None: there is none."""
    try:
        kept = msgspec.msgpack.decode(path.read_bytes(), type=_Kept)
    except (OSError, msgspec.DecodeError):
        return None
    return kept.config if kept.boot == read_boot_id() else None
