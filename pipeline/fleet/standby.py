"""Between an agent and an engine that waits for its model (`starling up --standby`)."""

from __future__ import annotations

import msgspec

WAITING = "standby: waiting for a home"  # the line on stdout once everything is imported
MARK_VARIABLE = "STARLING_STANDBY"  # in the environment: by it the processes of such an engine are found
MARK_FILE = "standby"  # in the home of an engine: the mark of the process that has got it


class Home(msgspec.Struct, frozen=True):
    """The line on stdin that makes it the engine of a model. Absolute paths."""

    home: str
    config: str
