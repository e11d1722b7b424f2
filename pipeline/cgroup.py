"""Limits of this process's control groups, version 1 and 2: the least of each along the path to the root."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_LIMITING = frozenset({"cpu", "memory"})  # controllers of version 1 whose files are read here
_MOST_BYTES = 65536  # of a file
_NO_LIMIT = 1 << 60  # bytes; version 1 writes a number near 2^63 for "none"


class Limits(NamedTuple):
    """None: no limit."""

    cpus: float | None  # cores' worth of CPU time
    memory: int | None  # bytes
    memory_free: int | None  # bytes below the tightest limit


def read(proc: Path = Path("/proc"), root: Path = Path("/sys/fs/cgroup")) -> Limits:
    """The limits that hold for this process."""
    cpus: list[float] = []
    memory: list[tuple[int, int]] = []  # limit, free
    for folder in _folders(str(proc), str(root)):
        quota = _quota(folder)
        if quota is not None:
            cpus.append(quota)
        limit = _number(f"{folder}/memory.max") or _number(f"{folder}/memory.limit_in_bytes")
        if limit is not None and limit < _NO_LIMIT:
            used = _number(f"{folder}/memory.current") or _number(f"{folder}/memory.usage_in_bytes") or 0
            memory.append((limit, max(0, limit - used + _reclaimable(folder))))
    return Limits(
        min(cpus, default=None),
        min((limit for limit, _ in memory), default=None),
        min((free for _, free in memory), default=None),
    )


def _folders(proc: str, root: str) -> Iterator[str]:
    """This process's group in each hierarchy, and the groups above it."""
    for line in (_text(f"{proc}/self/cgroup") or "").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and not _LIMITING.intersection(controllers.split(",")):
            continue
        names = [""] if not controllers else [controllers, *controllers.split(",")]
        for hierarchy in dict.fromkeys(f"{root}/{name}" if name else root for name in names):
            # In a container the path may be that of the host, while the group itself is mounted at the root.
            folder = f"{hierarchy}/{path.strip('/')}".rstrip("/")
            while True:
                if os.path.isdir(folder):
                    yield folder
                if folder == hierarchy:
                    break
                folder = folder.rpartition("/")[0]


def _quota(folder: str) -> float | None:
    """CPU time per time of the group; None without a limit."""
    try:
        quota, period = (_text(f"{folder}/cpu.max") or "").split()
        return None if quota == "max" else int(quota) / int(period)
    except (ValueError, ZeroDivisionError):
        pass
    taken, period_us = _number(f"{folder}/cpu.cfs_quota_us"), _number(f"{folder}/cpu.cfs_period_us")
    return taken / period_us if taken is not None and taken > 0 and period_us else None


def _reclaimable(folder: str) -> int:
    """Bytes of files in the group's page cache that the kernel may drop."""
    try:
        lines = (_text(f"{folder}/memory.stat") or "").splitlines()
        fields = {name: int(value) for name, _, value in (line.partition(" ") for line in lines)}
    except ValueError:
        return 0
    names = (
        ("inactive_file", "active_file") if "inactive_file" in fields else ("total_inactive_file", "total_active_file")
    )
    return sum(fields.get(name, 0) for name in names)


def _number(file: str) -> int | None:
    try:
        return int(_text(file) or "")
    except ValueError:
        return None


def _text(file: str) -> str | None:
    """What the file holds; None if it cannot be read. As plain calls: a load reads some 40 files, most are missing."""
    try:
        fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return os.read(fd, _MOST_BYTES).decode()
    except (OSError, ValueError):
        return None
    finally:
        os.close(fd)
