"""Standard streams that the process was started without, as by `<&-` or a daemon: they are /dev/null from the start.

Without it Python has None for each. The next file that is opened would have its number, and the children as well, which
inherit it.
"""

from __future__ import annotations

import os
import sys


def open_missing() -> None:
    """Open /dev/null for each standard stream that is missing, also for children."""
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is not None:
            continue
        fd = os.open(os.devnull, os.O_RDONLY if mode == "r" else os.O_WRONLY)  # the lowest number that is free
        os.set_inheritable(fd, fd == number)
        setattr(sys, name, open(fd, mode, encoding="utf-8", errors="replace"))  # noqa: SIM115
