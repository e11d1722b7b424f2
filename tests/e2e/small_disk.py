"""A file system of a few hundred KiB to a few MiB, on which the kernel really reports a full disk (ENOSPC).

    mounted(size_kib, path)   -> the command that a server is started with: it mounts a tmpfs at `path` in a mount
                                 namespace of its own, which ends with the last process in it
    why_not()                 -> why that cannot be here, "" when it can
    found(size_kib)           -> a new folder on a small file system that this machine has anyway, the rest of which
                                 is taken by a file in it; or None

Run as a program, it is that command: `small_disk.py SIZE_KIB PATH COMMAND...`. Root unshares only the mount namespace;
any other user also unshares a user namespace, in which the user's id is unchanged.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import tempfile
from pathlib import Path

CLONE_NEWNS, CLONE_NEWUSER = 0x00020000, 0x10000000  # linux/sched.h
MS_REC, MS_PRIVATE = 0x4000, 0x40000  # linux/mount.h
FOUND_KIB = 64 << 10  # the largest existing file system that counts as small


def mounted(size_kib: int, path: Path) -> list[str]:
    """The command that mounts the file system and then runs the arguments after it."""
    return [sys.executable, str(Path(__file__).resolve()), str(size_kib), str(path)]


def why_not() -> str:
    """Tries to mount one: the result depends on privileges, sysctls and security modules. "" if it works."""
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run([*mounted(64, Path(folder)), "true"], stderr=subprocess.PIPE, text=True, check=False)
    return done.stderr.strip().rpartition("\n")[2] if done.returncode else ""


def found(size_kib: int) -> Path | None:
    """A small file system that exists already, for example /run/lock of 5 MiB on Debian. The caller removes it."""
    for line in Path("/proc/self/mounts").read_text().splitlines():
        path, kind = line.split()[1:3]
        if kind == "tmpfs" and os.access(path, os.W_OK):
            room = os.statvfs(path)
            too_many = room.f_bavail * room.f_frsize - (size_kib << 10)
            if too_many > 0 and room.f_blocks * room.f_frsize <= FOUND_KIB << 10:
                folder = Path(tempfile.mkdtemp(dir=path))
                with open(folder / "filler", "wb") as filler:
                    os.posix_fallocate(filler.fileno(), 0, too_many)
                return folder
    return None


def _main() -> None:
    size_kib, path, *command = sys.argv[1:]
    libc = ctypes.CDLL(None, use_errno=True)

    def call(what: str, result: int) -> None:
        if result:
            sys.exit(f"{what}: {os.strerror(ctypes.get_errno())}")

    uid, gid = os.getuid(), os.getgid()
    call("unshare", libc.unshare(CLONE_NEWNS | (CLONE_NEWUSER if uid else 0)))
    if uid:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
        Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")
    call("mount: private", libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None))
    options = f"size={size_kib}k,mode=0700".encode()
    call(f"mount: tmpfs at {path}", libc.mount(b"tmpfs", os.fsencode(path), b"tmpfs", 0, options))
    os.execvp(command[0], command)


if __name__ == "__main__":
    _main()
