"""Runs `starling` commands against a test server."""

from __future__ import annotations

import atexit
import functools
import os

from tests.e2e.server import Server
from tests.starling.command_runner import Commands


@functools.cache
def _commands() -> Commands:
    """One process for all servers: each command is a fork of it, with the environment of its server."""
    commands = Commands(os.environ)
    atexit.register(commands.__exit__, None, None, None)
    return commands


def starling(server: Server, *args: str, code: int = 0) -> str:
    """Run `starling ARGS` with the server's environment; return its stdout. Its exit code must be `code`.

    For one thread: a command begins when the one before it has ended.
    """
    done = _commands()(*args, environment=server.environment)
    assert done.code == code, (args, done)
    return done.output
