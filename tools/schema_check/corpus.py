"""The schemas that are checked: of a folder, or generated ones."""

from __future__ import annotations

import json
import random
from collections import defaultdict
from pathlib import Path
from typing import Any

from tools.schema_check.generated import generated

SHUFFLE_SEED = 15  # the same sample on every machine


def from_folder(folder: Path, most: int) -> dict[str, dict[str, Any]]:
    """Up to `most` schemas of a folder and those below it, by name; as many of each folder.

    A file is a schema, or an object that has one as `schema` or `json_schema`.
    """
    groups: dict[Path, list[Path]] = defaultdict(list)
    for path in sorted(folder.rglob("*.json")):
        groups[path.parent].append(path)
    rng = random.Random(SHUFFLE_SEED)
    for paths in groups.values():
        rng.shuffle(paths)
    found: dict[str, dict[str, Any]] = {}
    while len(found) < most and any(groups.values()):
        for _, paths in sorted(groups.items()):
            if paths and len(found) < most:
                path = paths.pop()
                schema = _schema(path)
                if schema is not None:
                    found[str(path.relative_to(folder))] = schema
    return found


def _schema(path: Path) -> dict[str, Any] | None:
    try:
        value = json.loads(path.read_bytes())
    except ValueError:
        return None
    if not isinstance(value, dict):
        return None
    for name in ("schema", "json_schema"):
        if isinstance(value.get(name), dict) and "type" not in value:
            return dict(value[name])
    return value


def made(most: int) -> dict[str, dict[str, Any]]:
    """The first `most` generated schemas."""
    return {f"generated {number}": generated(number) for number in range(most)}
