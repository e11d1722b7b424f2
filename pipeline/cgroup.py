"""Limits of this process's control groups, version 1 and 2: the least of each along the path to the root."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_LIMITING = frozenset({"cpu", "memory"})  # controllers of version 1 whose files are read here
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
    for folder in _folders(proc, root):
        quota = _quota(folder)
        if quota is not None:
            cpus.append(quota)
        limit = _number(folder / "memory.max") or _number(folder / "memory.limit_in_bytes")
        if limit is not None and limit < _NO_LIMIT:
            used = _number(folder / "memory.current") or _number(folder / "memory.usage_in_bytes") or 0
            memory.append((limit, max(0, limit - used + _reclaimable(folder))))
    return Limits(
        min(cpus, default=None),
        min((limit for limit, _ in memory), default=None),
        min((free for _, free in memory), default=None),
    )


def _folders(proc: Path, root: Path) -> Iterator[Path]:
    """This process's group in each hierarchy, and the groups above it."""
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and not _LIMITING.intersection(controllers.split(",")):
            continue
        hierarchies = [root] if not controllers else [root / controllers, *(root / c for c in controllers.split(","))]
        for hierarchy in hierarchies:
            # In a container the path may be that of the host, while the group itself is mounted at the root.
            folder = hierarchy / path.lstrip("/")
            while True:
                if folder.is_dir():
                    yield folder
                if folder == hierarchy:
                    break
                folder = folder.parent


def _quota(folder: Path) -> float | None:
    """CPU time per time of the group; None without a limit."""
    try:
        quota, period = (folder / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        pass
    taken, period_us = _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")
    return taken / period_us if taken is not None and taken > 0 and period_us else None


def _reclaimable(folder: Path) -> int:
    """Bytes of files in the group's page cache that the kernel may drop."""
    try:
        lines = (folder / "memory.stat").read_text().splitlines()
        fields = {name: int(value) for name, _, value in (line.partition(" ") for line in lines)}
    except (OSError, ValueError):
        return 0
    names = (
        ("inactive_file", "active_file") if "inactive_file" in fields else ("total_inactive_file", "total_active_file")
    )
    return sum(fields.get(name, 0) for name in names)


def _number(file: Path) -> int | None:
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None
