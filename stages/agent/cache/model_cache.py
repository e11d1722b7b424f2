"""The published models in the models directory: what is here, what may go, what a crash has left.

    MODELS_DIR/DIGEST.idx, .bin, .verified   a model, complete
    MODELS_DIR/catalog/SLUG.json             its names and last use (pipeline/catalog/pulled.py)
    MODELS_DIR/adapters/                     published adapters (pipeline/catalog/pulled_adapters.py)
    MODELS_DIR/.fetch/DIGEST.bin.part        an unfinished download; its process holds the lock `pull-DIGEST`

There is no list of the cache besides these files: after a crash they are read again.  Checkpoints without a record were
prepared on this machine and are not counted and not evicted.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from pipeline.catalog import pulled, pulled_adapters
from pipeline.catalog.adapter_entry import AdapterEntry
from pipeline.models.locks import lock
from stages.agent.cache.eviction import Bounds, Item, plan_eviction

log = logging.getLogger("starling.cache")

UNFINISHED = ".fetch"
_PART = ".bin.part"
_ADAPTER = ".lora"
_ADAPTER_PART = ".lora.part"


class ModelCache:
    """The models below `models_dir`. Several processes may use it: changes are made under its lock."""

    def __init__(
        self,
        models_dir: Path,
        bounds: Bounds,
        disk_free: Callable[[Path], int] = lambda path: shutil.disk_usage(path).free,
    ) -> None:
        """`disk_free`: free bytes of the file system of a directory."""
        self.models_dir = models_dir
        self._bounds = bounds
        self._disk_free = disk_free

    def part_path(self, digest: str) -> Path:
        """Where a download is while it is unfinished."""
        return self.models_dir / UNFINISHED / f"{digest}{_PART}"

    def items(self, pinned: Collection[str] = ()) -> list[Item]:
        """Models and unfinished downloads with their bytes on the disk. `pinned`: digests."""
        used: dict[str, float] = {}
        for record, at in pulled.read_all(self.models_dir):
            if record.is_owned:
                used[record.entry.digest] = max(at, used.get(record.entry.digest, 0.0))
        found = [
            Item(
                digest,
                sum(_allocated(path) for path in self._files(digest)),
                at,
                digest in pinned or self._is_downloading(digest),  # recorded, and its files get their places
            )
            for digest, at in used.items()
        ]
        folder = self.models_dir / UNFINISHED
        for path in sorted([*folder.glob(f"*{_PART}"), *folder.glob(f"*{_ADAPTER_PART}")]):
            digest = path.name.partition(".")[0]
            with contextlib.suppress(FileNotFoundError):
                is_busy = digest in pinned or self._is_downloading(digest)
                found.append(Item(path.name, _allocated(path), path.stat().st_mtime, is_busy))
        return found

    def adapters(self, pinned: Collection[str] = ()) -> list[Item]:
        """Adapters with their bytes on the disk. `pinned`: digests."""
        used: dict[str, float] = {}
        for entry, at in pulled_adapters.read_all(self.models_dir):
            used[entry.digest] = max(at, used.get(entry.digest, 0.0))
        return [
            Item(
                f"{digest}{_ADAPTER}",
                _allocated(pulled_adapters.file_path(self.models_dir, digest)),
                at,
                digest in pinned or self._is_downloading(digest),
            )
            for digest, at in used.items()
        ]

    def make_room_for_adapter(self, entry: AdapterEntry, pinned: Collection[str] = ()) -> list[str]:
        """Evict what must go for an adapter that is to be downloaded; the keys evicted. Raises `ResourceError`."""
        key = f"{entry.digest}{_ADAPTER}"
        return self._make_room(key, f"{entry.digest}{_ADAPTER_PART}", entry.bytes, entry.bytes, pinned)

    def make_room(self, digest: str, nbytes: int, pinned: Collection[str] = ()) -> list[str]:
        """Evict what must go for a download of `nbytes`, and reserve nothing; the keys evicted.

        Raises `ResourceError`, and then has evicted nothing.
        """
        part = self.part_path(digest)
        part.parent.mkdir(parents=True, exist_ok=True)
        return self._make_room(digest, part.name, nbytes, max(0, nbytes - _allocated(part)), pinned)

    def _make_room(self, key: str, part: str, nbytes: int, missing: int, pinned: Collection[str]) -> list[str]:
        with lock(self.models_dir, "cache"):
            items = [item for item in (*self.items(pinned), *self.adapters(pinned)) if item.key not in (key, part)]
            evicted = plan_eviction(items, nbytes, missing, self._disk_free(self.models_dir), self._bounds)
            for key in evicted:
                self._evict(key)
        return evicted

    def remove(self, digest: str) -> bool:
        """Remove a model and its unfinished download; false if it is no published model, or is not here."""
        with lock(self.models_dir, "cache"):
            keys = [item.key for item in self.items() if item.key in (digest, self.part_path(digest).name)]
            for key in keys:
                self._evict(key)
        return bool(keys)

    def remove_adapter(self, digest: str) -> None:
        """Remove a published adapter. Idempotent."""
        with lock(self.models_dir, "cache"):
            self._evict(f"{digest}{_ADAPTER}")

    def record_adapter(self, entry: AdapterEntry, pinned: Collection[str] = ()) -> None:
        """Record the use of an adapter. The file that its name had before goes unless something uses it.

        `pinned`: digests.  Raises `OSError`.
        """
        with lock(self.models_dir, "cache"):
            before = pulled_adapters.read(self.models_dir, entry.name)
            pulled_adapters.write(self.models_dir, entry)
            if before is None or before.digest in (entry.digest, *pinned):
                return
            if all(before.digest != other.digest for other, _ in pulled_adapters.read_all(self.models_dir)):
                self._evict(f"{before.digest}{_ADAPTER}")

    def _evict(self, key: str) -> None:
        log.info("file evicted from the cache", extra={"key": key})
        if key.endswith(_ADAPTER):
            pulled_adapters.remove(self.models_dir, key.removesuffix(_ADAPTER))
            return
        if key.endswith((_PART, _ADAPTER_PART)):
            (self.models_dir / UNFINISHED / key).unlink(missing_ok=True)
            return
        # The index first: without it the other files are not a model. A worker that maps the .bin keeps its map.
        for path in self._files(key):
            path.unlink(missing_ok=True)
        for record, _ in pulled.read_all(self.models_dir):
            if record.entry.digest == key:
                pulled.record_path(self.models_dir, record.entry.name).unlink(missing_ok=True)

    def _files(self, digest: str) -> Iterator[Path]:
        for suffix in (".idx", ".bin", ".verified"):
            yield self.models_dir / f"{digest}{suffix}"

    def _is_downloading(self, digest: str) -> bool:
        """Whether a process holds the lock of the download."""
        try:
            fd = os.open(lock_path(self.models_dir, digest), os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared: another process may look at the same time
        except BlockingIOError:
            return True
        finally:
            os.close(fd)
        return False


def lock_path(models_dir: Path, digest: str) -> Path:
    """The lock that one process at a time holds while it downloads a model."""
    return models_dir / f".pull-{digest[:16]}.lock"


def _allocated(path: Path) -> int:
    """Bytes that a file takes on the disk; 0 without one."""
    try:
        return path.stat().st_blocks * 512
    except OSError:
        return 0
