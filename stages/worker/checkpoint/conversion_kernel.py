"""Whether a conversion uses one of its kernels, which need the compiler once for a machine.

A kernel is stored with the others (kernels/stored_code.py).  NumPy gives the same bytes, so a conversion never fails
for want of one.
"""

from __future__ import annotations

import logging

from pipeline.models.store import Progress
from stages.worker.kernels import compiled, stored_code

log = logging.getLogger("starling.checkpoint")
_REASON_CHARS = 500


def is_loaded(name: str, is_worth_compiling: bool, progress: Progress) -> bool:
    """Load a kernel of `stored_code.EXTRA_ENTRIES` that is stored, or is worth compiling; whether it can be called."""
    if not is_worth_compiling and not stored_code.symbol_path(name, "").exists():
        return False
    try:
        compiled.load_extra(name, progress)
    except (RuntimeError, OSError) as error:  # a compiler that was killed, a full disk
        log.warning(
            "weights are converted without a kernel", extra={"kernel": name, "reason": str(error)[-_REASON_CHARS:]}
        )
        return False
    return True
