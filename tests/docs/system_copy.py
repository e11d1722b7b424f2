"""Runs commands that change the machine, as root would, on a copy of /etc and /var/lib that is thrown away.

The copy is an overlay in a mount namespace of its own. `systemctl` works on the files of the copy (SYSTEMD_OFFLINE): it
enables units, and starts none. `sudo` is left out: commands run as the test's user. When the commands have ended,
`systemd-analyze verify` reads each unit that is there and was not before, and each of them that a command enables is
looked up.
"""

from __future__ import annotations

import functools
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

from tests.e2e import small_disk

UNITS = Path("/etc/systemd/system")
OVERLAID = (Path("/etc"), Path("/var/lib"))
_SUDO = """#!/bin/sh
if [ "$1" = -u ]; then shift 2; fi
exec env "$@"
"""
# With --now it would ask the running systemd, if there is one, to start the unit.
_SYSTEMCTL = """#!/bin/bash
exec {real} "${{@/#--now/--no-block}}"
"""
_VERIFY = f"""
shopt -s nullglob
units=({UNITS}/starling*.service {UNITS}/starling*.target)
[ ${{#units[@]}} -gt 0 ]
systemd-analyze verify "${{units[@]}}"
links=({UNITS}/*.wants/starling*)
[ ${{#links[@]}} -gt 0 ]
systemctl is-enabled "${{links[@]##*/}}" >/dev/null
"""


def _mounted(folder: Path) -> str:
    """Shell commands that lay the copies over the directories; `folder` becomes a tmpfs."""
    lines = []
    for number, path in enumerate(OVERLAID):
        upper, work = folder / f"upper{number}", folder / f"work{number}"
        lines.append(f"mkdir {upper} {work}")
        lines.append(f"mount -t overlay overlay -o lowerdir={path},upperdir={upper},workdir={work} {path}")
    return "\n".join(lines)


def inside(text: str, folder: Path, environment: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    """The command and the environment that run `text` on the copy. The server's home is /var/lib/starling there."""
    programs, copy, home = folder / "programs", folder / "copy", environment["STARLING_HOME"]
    programs.mkdir(exist_ok=True)
    copy.mkdir(exist_ok=True)
    real = shutil.which("systemctl")
    for name, lines in (("sudo", _SUDO), ("systemctl", _SYSTEMCTL.format(real=real))):
        (programs / name).write_text(lines)
        (programs / name).chmod(0o755)
    state = "/var/lib/starling"
    script = f"{_mounted(copy)}\nmkdir -p {state}\nmount --bind {home} {state}\n{text}\n{_VERIFY}"
    command = [*small_disk.mounted(64 << 10, copy), "bash", "-euo", "pipefail", "-c", script]
    path = f"{programs}:{environment['PATH']}:/usr/sbin:/sbin"
    return command, {**environment, "PATH": path, "SYSTEMD_OFFLINE": "1"}


@functools.cache
def why_not() -> str:
    """Why this machine cannot have the copy; "" if it can."""
    for program in ("systemctl", "systemd-analyze"):
        found = subprocess.run(["which", program], stdout=subprocess.DEVNULL, check=False)
        if found.returncode:
            return f"{program} is not installed"
    with tempfile.TemporaryDirectory() as folder:
        command = [*small_disk.mounted(64, Path(folder)), "bash", "-euc", f"{_mounted(Path(folder))}\ntest -w /etc"]
        done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    return done.stderr.strip().rpartition("\n")[2] if done.returncode else ""
