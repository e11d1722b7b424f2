"""The instruction sets that a test can run on this machine."""

from __future__ import annotations

import contextlib

from stages.worker.kernels import features


def available_isas() -> list[str]:
    """The values of STARLING_ISA that this CPU supports."""
    host, found = features.host_features(), []
    for isa in features.ISAS:
        with contextlib.suppress(features.UnsupportedCpu):
            features.choose_isa(host, isa)
            found.append(isa)
    return found
