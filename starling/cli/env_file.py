"""`.env` in the working directory: settings that a command has unless the environment has them.

Every command reads it (starling/cli/__init__.py), as every command reads `starling.yaml` there: those that ask a server
would otherwise look for another one than `starling up` has started. honcho_patch.py reads it where it is a program.
The form is honcho's: NAME=VALUE on a line, with the quotes of a shell, and `export` before it or not.

The file is often another program's. Only variables that Starling uses are taken from it, so that `PYTHONPATH` or
`LD_PRELOAD` of a project changes no process; other lines are not parsed.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, MutableMapping
from pathlib import Path

from pipeline.config.env import ALIAS_PREFIX, PREFIX
from pipeline.errors import ConfigError

ENV_FILE = ".env"
# Settings, and what libraries read by themselves: credentials of hubs and stores, and the exporter of traces.
USED_PREFIXES = (PREFIX, ALIAS_PREFIX, "HF_", "AWS_", "AZURE_", "GOOGLE_", "REDIS_", "OTEL_", "RAY_")
_PROXIES = ("ALL_PROXY", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")
USED_NAMES = frozenset(
    {
        "PORT",
        "NO_COLOR",
        "KUBECONFIG",
        "NETRC",
        "SSL_CERT_FILE",
        "SSL_CERT_DIR",
        "HUGGING_FACE_HUB_TOKEN",
        *_PROXIES,
        *map(str.lower, _PROXIES),
    }
)
_ASSIGNMENT = re.compile(rb"\s*(?:export\s+)?(([A-Za-z_][A-Za-z_0-9]*)\s*=.*)", re.DOTALL)
_EMPTY = re.compile(r"[^=]*=\s*(?:#.*)?", re.DOTALL)  # nothing behind the sign, or a comment


def is_used(name: str) -> bool:
    """Whether Starling, or a library of it that a user configures so, reads the variable."""
    return name.startswith(USED_PREFIXES) or name in USED_NAMES


def read(path: Path) -> dict[str, str]:
    """The variables of a file that Starling uses; none if there is no such file.

    Raises `ConfigError` with the file and the line, and no value, if a setting has none that can be parsed, and
    `OSError` if the file cannot be read. Other lines that cannot be parsed do not count.
    """
    try:
        data = path.read_bytes()
    except (FileNotFoundError, IsADirectoryError):  # some name a virtual environment so
        return {}
    found: dict[str, str] = {}
    for number, line in enumerate(re.split(rb"\r\n|\n|\r", data.removeprefix(codecs.BOM_UTF8)), 1):
        if not (match := _ASSIGNMENT.match(line)) or not is_used(name := match[2].decode()):
            continue
        try:
            found[name] = _value(name, match[1])
        except ValueError as error:
            if name.startswith(PREFIX):
                reason = "it is not UTF-8" if isinstance(error, UnicodeDecodeError) else str(error)
                raise ConfigError(f"{path}, line {number}: {reason}: expected NAME=VALUE, or quotes that end") from None
    return found


def _value(name: str, assignment: bytes) -> str:
    """The value that an assignment gives the variable. Raises `ValueError`."""
    from honcho import environ  # only for those that have a file

    if b"\0" in assignment:
        raise ValueError("a zero byte")
    text = assignment.decode()
    parsed: dict[str, str] = environ.parse(text)  # more characters end a line there, and empty values are left out
    if name in parsed:
        return parsed[name]
    if name.startswith(PREFIX) and _EMPTY.fullmatch(text):  # libraries would take an empty path or profile for one
        return ""
    raise ValueError("a control character")


def merge(environment: MutableMapping[str, str], warn: Callable[[str], object]) -> None:
    """Add what `.env` in the working directory has and the environment has not. Raises `ConfigError`.

    `warn` is called with a message if this user cannot read the file.
    """
    try:
        found = read(Path(ENV_FILE))
    except OSError as error:
        warn(f"{ENV_FILE}: cannot read it: {error.strerror}; its settings do not apply")
        return
    for name, value in found.items():
        environment.setdefault(name, value)
