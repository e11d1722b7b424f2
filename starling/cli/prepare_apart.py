"""Prepares new models of `starling up` in a process of its own.

A download and a conversion import modules and take memory, of which much is not given back.  All processes of a server
are forks of `starling up` (forked_program.py), and would keep it for as long as the server runs.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable

from pipeline.config import paths
from pipeline.config.schema import Config, ModelConfig
from pipeline.errors import ResourceError, StarlingError
from pipeline.models import attention_factor, store
from shm.checkpoint import CheckpointError
from starling.cli.forked_program import ForkedProgram, can_fork
from starling.cli.interrupts import Ended
from starling.cli.run_command import run_program

COMMAND = ["starling", "prepare"]  # what `ps` shows


def prepare_apart(config: Config, prepare: Callable[[Config], None]) -> None:
    """Call `prepare` in a child if a model is new, and here, where it has nothing left to do then.

    Ends this program with the child's exit code if that is not 0: the child has said why. Raises `ResourceError` if a
    signal has ended the child, and what `prepare` raises.
    """
    if any(_is_new(model) for model in config.models) and can_fork(COMMAND):
        child = ForkedProgram(COMMAND, lambda: run_program(lambda: prepare(config)), os.environ, dies_with_parent=True)
        code = _wait(child)
        if code < 0:
            raise ResourceError(
                f"the process that prepares the models was ended by {signal.Signals(-code).name}; the kernel sends "
                f"SIGKILL where memory is short: end other programs, or prepare one model at a time (`starling "
                f"prepare NAME`)"
            )
        if code:
            sys.exit(code)
    prepare(config)


def _is_new(model: ModelConfig) -> bool:
    """Also one that an older release has prepared: its GGUF file is read, and it may be prepared again."""
    folder = paths.models_dir()
    try:
        index_path = store.find_index(model, folder)
        return index_path is None or attention_factor.may_be_missing(model, index_path)
    except (StarlingError, OSError, CheckpointError):  # `prepare` reports it
        return True


def _wait(child: ForkedProgram) -> int:
    """The child's exit code. Signals do not reach the child's process group: they are passed on."""
    while True:
        try:
            return child.wait()
        except KeyboardInterrupt:
            os.kill(child.pid, signal.SIGINT)
        except Ended as end:
            os.kill(child.pid, end.signal)
            child.wait()  # a second signal ends this process, and the child with it
            raise
