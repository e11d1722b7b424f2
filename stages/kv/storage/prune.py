"""Files that nobody will ask for again: of models and versions that are not served any more.

    saved and spilled pages   of another version of a served model: the last used file is kept, for whoever
                              goes back; of a model that is not configured: until it was unused for a week
    sessions                  of other versions and models: until their time to live is over, at most 30 days
                              after the last turn; of a served model's other versions only the last used one's

What is served is given, and never touched.  Files of other names are not ours and stay.
"""

from __future__ import annotations

import logging
import re
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

from stages.kv.sessions.session_files import SUFFIX, parse
from stages.kv.storage.persist import KEPT_VERSIONS, PAGES_NAME

log = logging.getLogger("starling.kv")

PAGES_S = 7 * 86_400
SESSION_S = 30 * 86_400
_DIRECTORY = re.compile(r"(?P<slug>.+)-[0-9a-f]{12}")


def prune_pages(folders: Iterable[Path], served: Iterable[str], now: float) -> Iterator[Path]:
    """Remove files of pages of models that are not `served` (slugs) and were not used for a week."""
    slugs = set(served)
    for folder in set(folders):
        for path in sorted(folder.glob("*.pages")):
            name = PAGES_NAME.fullmatch(path.name)
            if name is not None and name["slug"] not in slugs and now - _last_use(path) >= PAGES_S:
                path.unlink(missing_ok=True)
                yield path


def prune_sessions(folder: Path, in_use: Iterable[Path], served: Iterable[str], now: float) -> Iterator[Path]:
    """Remove sessions that are over, of all versions but those `in_use`; then what is left empty."""
    ours, slugs = set(in_use), set(served)
    others: dict[str, list[Path]] = {}
    for directory in sorted(folder.iterdir()) if folder.is_dir() else ():
        name = _DIRECTORY.fullmatch(directory.name)
        if name is not None and directory.is_dir() and directory not in ours:
            others.setdefault(name["slug"], []).append(directory)
    for slug, directories in others.items():
        directories.sort(key=lambda path: (_last_use(path), path.name))
        spared = directories[-KEPT_VERSIONS:] if slug in slugs else directories
        for directory in directories:
            if directory not in spared:
                shutil.rmtree(directory, ignore_errors=True)
                yield directory
                continue
            yield from _over(directory, now)
            if not any(directory.iterdir()):
                directory.rmdir()


def _over(directory: Path, now: float) -> Iterator[Path]:
    for path in sorted(directory.glob("*" + SUFFIX)):
        session, _ = parse(path.read_bytes())
        ttl_s = min(session.ttl_s or SESSION_S, SESSION_S) if session is not None else 0
        if session is None or now - session.last_use >= ttl_s:
            path.unlink(missing_ok=True)
            yield path


def _last_use(path: Path) -> float:
    """s since 1970; of a directory, of the file in it that was used last."""
    try:
        files = [path, *path.iterdir()] if path.is_dir() else [path]
        return max(file.stat().st_mtime for file in files)
    except FileNotFoundError:
        return 0.0
