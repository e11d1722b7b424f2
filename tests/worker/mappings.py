"""Sizes of a process's mappings, from smaps."""

from __future__ import annotations

import re
from pathlib import Path


def mapping_of(pid: int, address: int) -> dict[str, int]:
    """Sizes in kB of the mapping at an address, from smaps."""
    found: dict[str, int] = {}
    is_it = False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if head := re.match(r"([0-9a-f]+)-([0-9a-f]+) (\S+)", line):
            is_it = int(head[1], 16) <= address < int(head[2], 16)
            if is_it:
                found["writeable"] = int("w" in head[3])
        elif is_it and (size := re.match(r"(\w+): +(\d+) kB", line)):
            found[size[1]] = int(size[2])
    return found
