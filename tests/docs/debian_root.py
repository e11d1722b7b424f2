"""A minimal Debian in a directory, and a root shell in it whose processes end with it.

    make_root(folder, packages)     # raises Unavailable
    with RootShell(folder) as shell:
        code, output = shell.run("dpkg -i /starling.deb")

The shell has its own mounts and its own process table; it shares the network. Nothing outside of the directory is
changed.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType

MINUTES = 60
_ENTER = """
mount -t proc proc "$0/proc"
mount -t sysfs sysfs "$0/sys" || true
mount --rbind /dev "$0/dev"
mount -t tmpfs -o size=2g tmpfs "$0/dev/shm"
exec chroot "$0" /usr/bin/env -i HOME=/root LC_ALL=C.UTF-8 DEBIAN_FRONTEND=noninteractive \\
    PATH=/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin bash
"""
_MARK = "this command has ended with"


class Unavailable(Exception):
    """This machine cannot make or enter the directory; the message says why."""


def make_root(folder: Path, release: str, packages: Iterable[str]) -> None:
    """Install the essential packages of a Debian release, and others, below `folder`."""
    if not shutil.which("mmdebstrap"):
        raise Unavailable("not installed: mmdebstrap")
    command = ["mmdebstrap", "--quiet", "--variant=minbase", f"--include={','.join(packages)}", release, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=15 * MINUTES, check=False)
    if done.returncode:
        raise Unavailable(f"mmdebstrap failed: {done.stderr[-300:]}")


class RootShell:
    """bash as root in the directory. The first process of its process table: all others end with it."""

    def __init__(self, root: Path) -> None:
        command = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-euc", _ENTER, str(root)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def __enter__(self) -> RootShell:
        code, output = self.run("true")
        if code:
            self.close()
            raise Unavailable(f"the directory cannot be entered: {output}")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def run(self, text: str) -> tuple[int, str]:
        """Run commands in the shell itself. Returns the exit code of the last one and all output."""
        process = self._process
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        try:
            process.stdin.write(f"{{\n{text}\n}} 2>&1 </dev/null\necho '{_MARK}' $?\n")
            process.stdin.flush()
        except BrokenPipeError:
            return 1, process.stderr.read()
        output = []
        for line in process.stdout:
            before, mark, code = line.rpartition(_MARK)
            if mark:
                return int(code), "".join([*output, before])
            output.append(line)
        return 1, "".join(output) + process.stderr.read()

    def check(self, text: str) -> str:
        """Run commands that must succeed. Returns their output."""
        code, output = self.run(text)
        assert code == 0, f"{text}\n{output[-3000:]}"
        return output

    def close(self) -> None:
        """End the shell, and with it every process in the directory."""
        process = self._process
        for pipe in (process.stdin, process.stdout, process.stderr):
            assert pipe is not None
            pipe.close()
        process.kill()
        process.wait()
