"""Starts the supervisors of `starling up` as forks of its process, in which honcho runs (forked_program.py).

`child_of(command)` recognizes the lines of the project's Procfile; honcho starts any other line by a shell.
"""

from __future__ import annotations

import contextlib
import gc
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.config import server_cores
from pipeline.config.env import ALIAS_PREFIX, PREFIX
from pipeline.config.load import load
from pipeline.config.schema import Config
from pipeline.errors import ConfigError
from pipeline.runtime import process
from pipeline.runtime.paused_collector import paused_collector
from pipeline.runtime.process import PARENT_VARIABLE
from starling.cli.forked_program import ForkedProgram, can_fork
from starling.cli.run_command import run_command, run_program

GATEWAY = "gateway"
LONGEST = ("worker", "tokenizer", GATEWAY)  # take longest until they are ready, once all stages are imported
_read: tuple[object, Config] | None = None  # with the settings of the environment, and the directory, that it is for
_LINE = re.compile(r'(?:PATH="\$PATH:\$PWD/\.venv/bin" )?exec starling supervise ([a-z]+)')


def ensure_room() -> None:
    """Start this program again by its full path if its command line is too short to become that of a supervisor.

    That is the case of `python -m starling up`; without forks the server would take twice the memory. To be called
    before anything else.
    """
    from starling.cli.stage import STAGES

    longest = max(map(command_of, STAGES), key=process.command_bytes)
    again = [sys.executable, *sys.orig_argv[1:]]
    has_room = process.command_bytes(again) >= process.command_bytes(longest)
    if sys.executable and has_room and not process.fits_command(longest):
        os.execv(sys.executable, again)


def preload() -> None:
    """Import what every supervisor and stage needs, and keep its pages shared after a fork."""
    with paused_collector():
        from pipeline.ipc import poll_loop  # noqa: F401
        from shm import arena  # noqa: F401
        from starling.cli import stage  # noqa: F401

    gc.freeze()


def start_order(commands: Mapping[str, str]) -> list[str]:
    """The names of the lines of a Procfile in the order in which they are started: as they stand.

    If this process has imported all stages, those come first that then take longest.
    """
    from starling.cli.stage import STAGES

    names = list(commands)
    if not all(f"stages.{stage}.stage" in sys.modules for stage in STAGES):
        return names
    found = {name: _LINE.fullmatch(command.strip()) for name, command in commands.items()}
    stages = {name: line[1] for name, line in found.items() if line is not None}
    return sorted(names, key=lambda name: LONGEST.index(stages[name]) if stages.get(name) in LONGEST else len(LONGEST))


def child_of(command: str, env: Mapping[str, str] | None = None, cwd: str | None = None) -> Any:
    """Start a line of a Procfile: an object with `pid`, `stdout`, `wait` and `returncode`, as subprocess.Popen has.

    The supervisor of the gateway, which the Procfile names first, imports its stage while this process imports the
    other stages, one after the other: at the start both take as long.
    """
    found = _LINE.fullmatch(command.strip())
    if found is None:
        return _program(command, env, cwd)
    stage = found[1]
    if stage != GATEWAY:
        _import(stage)
    shown = command_of(stage)
    if not can_fork(shown):  # asked after the import, which may have started a thread
        return _program(command, env, cwd)
    env = os.environ if env is None else env
    config = _config_for(stage, env, cwd)
    env = {**env, PARENT_VARIABLE: str(os.getpid())}  # it may end before the child watches it
    return ForkedProgram(shown, lambda: _main(stage, config), env, cwd=cwd, is_piped=True, leads_session=True)


def _program(command: str, env: Mapping[str, str] | None, cwd: str | None) -> Any:
    from honcho.process import Popen

    with server_cores.left():
        return Popen(command, env=env, cwd=cwd)


def _config_for(stage: str, env: Mapping[str, str], cwd: str | None) -> Config | None:
    """The configuration for the supervisor of a stage; None: it reads its own, and reports what is wrong with it.

    It is read once for all of them: a process that reads it gets private copies of all pages that this touches, and the
    successor of a supervisor that was killed must not have another one than the other stages, should the file change.
    """
    from starling.cli.stage import STAGES

    global _read
    if stage not in STAGES:
        return None
    settings = {name: value for name, value in env.items() if name.startswith((PREFIX, ALIAS_PREFIX))}, cwd
    if _read is None or _read[0] != settings:
        with contextlib.suppress(ConfigError, OSError):
            _read = settings, load(env=env, cwd=Path(cwd) if cwd else None)
            gc.freeze()
    return _read[1] if _read is not None and _read[0] == settings else None


def _import(stage: str) -> None:
    """Import a stage's modules, which the forks share. Its supervisor, which imports them too, reports an error."""
    from starling.cli.stage import import_stage

    with paused_collector(), contextlib.suppress(Exception):
        import_stage(stage)
    gc.freeze()


def command_of(stage: str) -> list[str]:
    """The command line that a supervisor shows; `starling down` recognizes it."""
    return ["starling", "supervise", stage]


def _main(stage: str, config: Config | None) -> None:
    from starling.cli.stage import supervise, supervise_stage

    sys.argv = ["starling supervise", stage]
    if config is None:
        run_command(supervise, "starling supervise")
    else:
        run_program(lambda: supervise_stage(stage, "", config))
