"""The arena directory: created private, under another name if another user has taken its own.

Its name follows from the run directory (pipeline/config/paths.py), and /dev/shm is writable for all users, so another
user could create the directory first.  Then the arenas go to a directory with a random name, which is recorded in the
run directory (0700, this user's), where every process of the server reads it.  The record is only replaced while the
directory that it names belongs to another user, and therefore no process of this server uses it.

If /dev/shm is too small, `starling up` records another directory to create it in; every command of this home reads it.
"""

from __future__ import annotations

import fcntl
import logging
import os
import secrets
from pathlib import Path

from pipeline.config import paths
from pipeline.config.schema import Config
from pipeline.errors import ConfigError
from pipeline.files import replace_file
from pipeline.runtime import run_dir

log = logging.getLogger("starling.runtime")

ATTEMPTS = 8  # names; more than one only if another user creates directories at the same time


def prepare(config: Config) -> Path:
    """Create the arena directory (0700), or check its owner and mode; the resolved path. Raises `ConfigError`."""
    for _ in range(ATTEMPTS):
        path = paths.arena_dir(config)
        try:
            return run_dir.prepare(path, "arena directory", "server.arena_dir")
        except ConfigError:
            owner = run_dir.foreign_owner(path)
            if owner is None:
                raise
        _choose_another(config, path, owner)
    raise ConfigError(
        f"arena directory {path} belongs to user {owner}, as did {ATTEMPTS - 1} others with random names: set "
        f"server.arena_dir to a directory that only you can write",
        "server.arena_dir",
    )


def record_parent(run: Path, parent: Path | None) -> None:
    """Let the arena directory be in `parent` unless the configuration names another one; None: in /dev/shm.

    For when no process of the server runs.  Raises `ConfigError`.
    """
    file = run / paths.ARENA_PARENT_FILE
    try:
        if parent is None:
            file.unlink(missing_ok=True)
        else:
            replace_file(file, os.fsencode(parent))
    except OSError as error:
        raise ConfigError(
            f"{file}: the place of the arenas cannot be recorded: {error.strerror}; free space in server.run_dir, or "
            f"give another one",
            "server.run_dir",
        ) from None


def _choose_another(config: Config, taken: Path, owner: int) -> None:
    """Record a random name, unless another process of this server has done so."""
    run = run_dir.prepare(paths.run_dir(config))
    fd = os.open(run, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        if paths.arena_dir(config) != taken:
            return
        name = f"starling-{os.getuid()}-{secrets.token_hex(16)}"
        replace_file(run / paths.ARENA_NAME_FILE, name.encode())
        log.warning(
            "the arena directory belongs to another user; the arenas go elsewhere",
            extra={"path": str(taken), "owner": owner, "arenas": str(taken.parent / name)},
        )
    except OSError as error:
        raise ConfigError(
            f"arena directory {taken} belongs to user {owner}, and no other name can be recorded in {run}: "
            f"{error.strerror}; set server.arena_dir to a directory of your own",
            "server.arena_dir",
        ) from None
    finally:
        os.close(fd)
