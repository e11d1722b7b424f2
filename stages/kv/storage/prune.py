"""Removes files of models and versions that are no longer served.

    saved and spilled pages   of other versions of a served model: all except the most recently used file;
                              of models that cannot be loaded any more: after a week without use
    sessions                  of other versions, and of models that are not loaded: after their time to live; of models
                              that cannot be loaded any more at most 30 days after the last turn; of a served model's
                              other versions likewise, and only the most recently used one is kept

Files in use are an argument and are not removed.  Files with other names are not Starling's and stay.  A file that
cannot be read or removed is logged and stays, and the others are removed all the same.
"""

from __future__ import annotations

import logging
import re
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

from stages.kv.sessions.session_files import SUFFIX, parse
from stages.kv.storage.persist import KEPT_VERSIONS, PAGE_FILE_NAME

log = logging.getLogger("starling.kv")

PAGES_S = 7 * 86_400  # without use, of a model that is not served
SESSION_S = 30 * 86_400  # after the last turn, of a session without a time to live
_DIRECTORY_NAME = re.compile(r"(?P<slug>.+)-[0-9a-f]{12}")


def prune_pages(folders: Iterable[Path], loadable: Iterable[str], now: float) -> Iterator[Path]:
    """Remove page files of models that are not `loadable` (slugs) and were not used for a week. Yields their paths."""
    slugs = set(loadable)
    for folder in set(folders):
        for path in sorted(folder.glob("*.pages")):
            name = PAGE_FILE_NAME.fullmatch(path.name)
            may_return = name is None or name["slug"] in slugs
            if not may_return and now - _last_use(path) >= PAGES_S and _remove(path):
                yield path


def prune_sessions(
    folder: Path, in_use: Iterable[Path], served: Iterable[str], loadable: Iterable[str], now: float
) -> Iterator[Path]:
    """Remove expired sessions of all versions except those `in_use`, then empty directories. Yields their paths.

    `served`, `loadable`: slugs of the models that are loaded, and of those that requests can have loaded.
    """
    kept, slugs = set(in_use), set(served)
    may_return = set(loadable) - slugs
    others: dict[str, list[Path]] = {}
    for directory in sorted(folder.iterdir()) if folder.is_dir() else ():
        name = _DIRECTORY_NAME.fullmatch(directory.name)
        if name is not None and directory.is_dir() and directory not in kept:
            others.setdefault(name["slug"], []).append(directory)
    for slug, directories in others.items():
        directories.sort(key=lambda path: (_last_use(path), path.name))
        spared = directories[-KEPT_VERSIONS:] if slug in slugs else directories
        for directory in directories:
            if directory not in spared:
                shutil.rmtree(directory, ignore_errors=True)
                if not directory.exists():
                    yield directory
                continue
            yield from _remove_expired(directory, now, float("inf") if slug in may_return else SESSION_S)
            try:
                if not any(directory.iterdir()):
                    directory.rmdir()
            except OSError as error:
                _complain(directory, error)


def _remove_expired(directory: Path, now: float, most_s: float) -> Iterator[Path]:
    """Remove the sessions whose time to live has passed, or `most_s` since the last turn."""
    for path in sorted(directory.glob("*" + SUFFIX)):
        try:
            session, _ = parse(path.read_bytes())
        except OSError as error:
            _complain(path, error)
            continue
        ttl_s = min(session.ttl_s or most_s, most_s) if session is not None else 0
        if (session is None or now - session.last_use >= ttl_s) and _remove(path):
            yield path


def _remove(path: Path) -> bool:
    """Remove a file; whether that was possible."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        _complain(path, error)
        return False
    return True


def _complain(path: Path, error: OSError) -> None:
    log.warning(
        "a file is of no use any more and cannot be removed",
        extra={"path": str(path), "reason": error.strerror or str(error)},
    )


def _last_use(path: Path) -> float:
    """Modification time, s since 1970; of a directory, that of its most recently used file."""
    try:
        files = [path, *path.iterdir()] if path.is_dir() else [path]
        return max(file.stat().st_mtime for file in files)
    except FileNotFoundError:
        return 0.0
    except OSError:
        return float("inf")  # unknown: not old
