"""What Linux says of this machine's CPU, and whether matrix products may use AMX tiles on it.

Read by the kernels (stages/worker/kernels/features.py), which choose their instructions by it, and by what computes
the sizes of arenas, because the buffers of packed activations are only there where tiles may be used.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path

AMX_FLAGS = frozenset({"amx_tile", "amx_int8"})  # names of /proc/cpuinfo


@functools.cache
def fields() -> dict[str, str]:
    """The fields of the first processor in /proc/cpuinfo."""
    first = Path("/proc/cpuinfo").read_text().partition("\n\n")[0]
    pairs = (line.partition(":") for line in first.splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}


def may_use_tiles() -> bool:
    """Whether some product may use AMX tiles, or emulated ones: by the CPU and by STARLING_ISA, before any probe."""
    wanted = os.environ.get("STARLING_ISA") or "native"
    return wanted == "tiles" or (wanted in ("amx", "native") and set(fields().get("flags", "").split()) >= AMX_FLAGS)
