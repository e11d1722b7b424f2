"""The home directory of the user, and paths that begin with `~`. Every path that a user gives passes through here.

Python takes an empty HOME for the root directory: `~/models` would be `/models`.
"""

from __future__ import annotations

import contextlib
import os
import pwd
from collections.abc import Mapping
from pathlib import Path

from pipeline.errors import ConfigError


def user_home(env: Mapping[str, str] = os.environ, remedy: str = "set HOME, or write the whole path") -> Path:
    """HOME; if it is not set or empty, what the user database says. Raises `ConfigError`, which names the remedy."""
    found = env.get("HOME", "")
    if not found:
        with contextlib.suppress(KeyError):
            found = pwd.getpwuid(os.getuid()).pw_dir
    if not found:
        raise ConfigError(f"the home directory of user {os.getuid()} is not known: {remedy}", "HOME")
    return Path(found)


def expand_user(path: str | Path, env: Mapping[str, str] = os.environ) -> Path:
    """The path with the home directory for its `~` or `~USER`; unchanged if the machine has no such user.

    Raises `ConfigError` if the home directory is not known.
    """
    text = str(path)
    if text == "~" or text.startswith("~/"):
        return user_home(env) / text[1:].lstrip("/")
    return Path(os.path.expanduser(text))
