"""Programs of a launcher that are found in PATH and called: what they print, and why they fail."""

from __future__ import annotations

import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from pipeline.errors import ConfigError, StarlingError

SHOWN_CHARACTERS = 2000  # of what a program says about its failure


def find(program: str, launcher: str, env: Mapping[str, str]) -> str:
    """The path of a program that the launcher needs. Raises `ConfigError`."""
    path = shutil.which(program, path=env.get("PATH"))
    if path is None:
        raise ConfigError(
            f"the launcher {launcher} needs {program}, which is not in PATH: install it, or use another --launcher",
            "fleet.launcher",
        )
    return path


def call(
    command: Sequence[str], env: Mapping[str, str], timeout_s: float | None, hint: str = "", stdin: str = ""
) -> str:
    """What the program prints. Raises `StarlingError` with what it says of its failure. `hint`: for a timeout."""
    program = Path(command[0]).name
    try:
        done = subprocess.run(
            command, env=dict(env), input=stdin, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        raise StarlingError("INTERNAL", f"{program} has not ended within {timeout_s:g} s{hint}") from None
    if done.returncode:
        said = done.stderr.strip()[-SHOWN_CHARACTERS:] or f"exit code {done.returncode}"
        raise StarlingError("INTERNAL", f"{program} has failed: {said}")
    return done.stdout


def follow(command: Sequence[str], env: Mapping[str, str]) -> Iterator[str]:
    """The lines that the program prints, as they come, until it ends or the caller does."""
    with subprocess.Popen(
        command, env=dict(env), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                yield line.rstrip("\n")
        finally:
            process.send_signal(signal.SIGTERM)
