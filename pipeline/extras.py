"""The packages of the optional extras, for messages about a missing one."""

from __future__ import annotations

import re
import shlex


def how_to_install(extra: str) -> str:
    """The command that installs an extra's packages into the environment of this process.

    It names the packages themselves: the project is installed from a wheel or a checkout, and its name is another
    project's on the public index.
    """
    from importlib import metadata

    try:
        required = metadata.requires("starling") or []
    except metadata.PackageNotFoundError:
        required = []
    mine = re.compile(rf"extra\s*==\s*['\"]{re.escape(extra)}['\"]")
    packages = [shlex.quote(one.partition(";")[0].strip()) for one in required if mine.search(one)]
    return f"pip install {' '.join(packages)}" if packages else f"install the packages of `{extra}` in pyproject.toml"
