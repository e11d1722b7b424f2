"""Signals that ask for the end before a command waits for them.

Ctrl-C while the program still imports its modules: it ends by the signal, without a traceback.  SIGTERM and SIGHUP
while `starling up` prepares its start: they raise `Ended`.  Without a handler they would do nothing in the first
process of a container, for which the kernel has no default action.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from types import FrameType
from typing import NoReturn

EXIT_SIGNALLED = 128  # plus the signal's number, as shells report it
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


class Ended(SystemExit):
    """A signal has asked for the end. `signal`: which one."""

    def __init__(self, number: int) -> None:
        super().__init__(EXIT_SIGNALLED + number)
        self.signal = signal.Signals(number)


def raise_ended() -> None:
    """From now on SIGTERM and SIGHUP raise `Ended` in the main thread, unless they are ignored (`nohup`) or handled."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, _raise_ended)


def _raise_ended(number: int, _frame: FrameType | None) -> NoReturn:
    raise Ended(number)
