"""The instruction sets that a test can run on this machine."""

from __future__ import annotations

import contextlib

from stages.worker.kernels import features
from tests import amx_machine


def available_isas() -> list[str]:
    """The values of STARLING_ISA that this CPU supports."""
    host, found = features.host_features(), []
    for isa in features.ISAS:
        with contextlib.suppress(features.UnsupportedCpu):
            features.choose_isa(host, isa)
            found.append(isa)
    return found


def tile_isas() -> list[str]:
    """The values of STARLING_ISA with tiles that a process with `isa_environment` (conftest.py) supports.

    `amx` is among them where the machine with AMX can be emulated (tests/amx_machine).
    """
    return [isa for isa in available_isas() if isa in ("amx", "tiles")] + ["amx"] * amx_machine.is_possible()
