"""`.env` in the working directory: variables that a command has unless the environment has them.

Every command reads it (starling/cli/__init__.py), as every command reads `starling.yaml` there: those that ask a server
would otherwise look for another one than `starling up` has started. honcho_patch.py reads it where it is a program.
The form is honcho's: NAME=VALUE on a line, with the quotes of a shell; other lines do not count.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from pathlib import Path

from pipeline.errors import ConfigError

ENV_FILE = ".env"


def read(path: Path) -> dict[str, str]:
    """The variables; none if there is no such file. Raises `ConfigError` with the file and the line, and no value."""
    try:
        data = path.read_bytes()
    except (FileNotFoundError, IsADirectoryError):  # some name a virtual environment so
        return {}
    except OSError as error:
        raise ConfigError(f"{path}: cannot read it: {error.strerror}") from None
    from honcho import environ  # only for those that have a file

    found: dict[str, str] = {}
    for number, line in enumerate(data.split(b"\n"), 1):
        try:
            if b"\0" in line:
                raise ValueError("a zero byte")
            found.update(environ.parse(line.decode()))
        except ValueError as error:
            reason = "it is not UTF-8" if isinstance(error, UnicodeDecodeError) else str(error)
            raise ConfigError(f"{path}, line {number}: {reason}: expected NAME=VALUE, or quotes that end") from None
    return found


def merge(environment: MutableMapping[str, str]) -> None:
    """Add what `.env` in the working directory has and the environment has not. Raises `ConfigError`."""
    for name, value in read(Path(ENV_FILE)).items():
        environment.setdefault(name, value)
