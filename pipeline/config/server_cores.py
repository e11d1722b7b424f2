"""The cores that a server may run on, as the first of its processes found them, for the number of its worker groups.

    RUN_DIR/server-cores   their numbers

All processes of a server divide its cores among the same worker groups, although each may be allowed others: a command
that runs under `taskset`, or a stage that starts again after the server's control group has got more of them.  An
orderly stop removes the file, and `starling up` that of a server that was killed.  With one worker group the file only
tells commands what another number would mean for the server.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from pipeline.config import paths
from pipeline.config.schema import Config
from pipeline.errors import ConfigError
from shm.decoding import DECODE_ERRORS

log = logging.getLogger("starling.stage")

FILE = "server-cores"

_before: list[int] = []  # the cores of this process, before it kept to some of them


def own() -> list[int]:
    """The cores that this process may run on, or might before it kept to some of them."""
    return _before or sorted(os.sched_getaffinity(0))


def keep_to(cores: list[int]) -> None:
    """Keep this thread, and those that it starts, to some of this process's cores. `own` stays as it is."""
    _before[:] = own()
    os.sched_setaffinity(0, cores)


def of(config: Config) -> list[int]:
    """The cores of the server; those of this process if none of the server's has stored them."""
    try:
        return msgspec.json.decode(_path(config).read_bytes(), type=list[int]) or own()
    except (OSError, *DECODE_ERRORS):
        return own()


def check(config: Config, cores: Sequence[int]) -> None:
    """Raise `ConfigError` if a server with these cores has too few for its worker groups or control plane.

    Of models with `cpus` the configuration's rules check it.  Commands that start nothing may run on fewer cores.
    """
    n_cores = len(cores)
    control, groups = config.performance.control_cores, config.performance.worker_groups
    if control != "auto" and control >= max(1, n_cores):
        reason = f"ranks need a core, and the server has {n_cores}: give at most {n_cores - 1}, or auto"
        raise _refused("control_cores", control, reason)
    if groups != "auto" and groups > n_cores:
        for model in config.models:
            if not model.cpus:
                raise _refused("worker_groups", groups, too_many_groups(model.name, n_cores))


def _refused(key: str, value: int, reason: str) -> ConfigError:
    return ConfigError(f"performance.{key} = {value}: {reason}", param=f"performance.{key}")


def too_many_groups(model: str, n_cores: int) -> str:
    """Why a model cannot have more worker groups than cores."""
    return f"each group takes a core, and model {model!r} has {n_cores}: give at most {n_cores}"


def store(config: Config) -> None:
    """Store the cores of this process for all others, unless another one has.

    With several worker groups it raises `OSError`, and as `check`.  One group divides no cores, and needs no file.
    """
    path = _path(config)
    if path.exists():
        return
    if config.performance.worker_groups != 1:
        check(config, own())
        _write(path)
        return
    try:
        _write(path)
    except OSError as error:
        log.warning("the cores of the server are not stored", extra={"path": str(path), "error": error.strerror})


def _write(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{FILE}.{os.getpid()}.new")
    try:
        new.write_bytes(msgspec.json.encode(own()))
        with contextlib.suppress(FileExistsError):  # of two that start together the first one decides
            os.link(new, path)
    finally:
        new.unlink(missing_ok=True)


def _path(config: Config) -> Path:
    return paths.run_dir(config) / FILE
