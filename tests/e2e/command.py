"""Runs `starling` commands against a test server."""

from __future__ import annotations

import subprocess
import sys

from tests.e2e.server import ROOT, Server


def starling(server: Server, *args: str, code: int = 0) -> str:
    """Run `starling ARGS` with the server's environment; return its stdout. Its exit code must be `code`."""
    done = subprocess.run(
        [sys.executable, "-m", "starling", *args],
        cwd=ROOT,
        env=server.environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == code, (args, done.returncode, done.stdout, done.stderr)
    return done.stdout
