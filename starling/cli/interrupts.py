"""Ctrl-C while the program still imports its modules: it ends by the signal, without a traceback."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

_PROGRAMS = ("starling", "starling/__main__.py")  # as a script, and by `python -m`


def end_silently() -> None:
    """Let SIGINT end the process until `raise_again`, if this process is the program and has the default handler."""
    program = Path(sys.argv[0])
    is_program = program.name in _PROGRAMS or "/".join(program.parts[-2:]) in _PROGRAMS
    if is_program and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def raise_again() -> None:
    """From now on SIGINT is a `KeyboardInterrupt` again, which commands handle."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
