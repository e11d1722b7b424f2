"""Faults at exact points, for tests: `STARLING_FAULTS`, read once; nothing of it runs without that.

    STARLING_FAULTS="worker:exit@step=17, kv:stop@page=3, wire:drop@gateway>scheduler:5, disk:enospc@spill"

    PLACE:ACTION@POINT=N     at the Nth event of that kind in the process (1 is the first): once
    wire:drop@FROM>TO:N      the Nth frame from one stage to another is lost: once
    disk:ACTION@POINT        every time

Actions: `exit` (code 1), `kill` (SIGKILL), `segv`, `stop` (SIGSTOP), `drop` (the caller drops the thing),
`enospc` and `eio` (an `OSError`).  A process that a supervisor has restarted reads the same plan: faults
that end a process happen only in its first incarnation (`STARLING_RESTARTS` is 0).

A caller asks for its hook once, and calls it only if there is one:

    hook = faultplan.hook("worker", "step")
    ...
    if hook is not None: hook(number)
"""

from __future__ import annotations

import errno
import os
import re
import signal
from collections.abc import Callable, Mapping
from typing import NamedTuple

from pipeline.errors import ConfigError

VARIABLE = "STARLING_FAULTS"
ACTIONS = ("exit", "kill", "segv", "stop", "drop", "enospc", "eio")
_FATAL = ("exit", "kill", "segv", "stop")
_PATTERN = re.compile(r"(\w+):(\w+)@([\w>]+)(?:[=:](\d+))?")

Hook = Callable[[int], bool]  # (number of the event) -> whether the caller is to drop the thing


class Fault(NamedTuple):
    place: str
    action: str
    point: str
    at: int  # 0: every time


def parse(text: str) -> list[Fault]:
    """The plan in `text`. Raises `ConfigError` naming the part that is wrong."""
    faults = []
    for part in filter(None, (p.strip() for p in text.split(","))):
        match = _PATTERN.fullmatch(part)
        if match is None or match[2] not in ACTIONS:
            raise ConfigError(
                f"{VARIABLE}: {part!r} is not PLACE:ACTION@POINT=N with an action of {', '.join(ACTIONS)}"
            )
        faults.append(Fault(match[1], match[2], match[3], int(match[4] or 0)))
    return faults


def hook(place: str, point: str, env: Mapping[str, str] = os.environ) -> Hook | None:
    """What to call at each event of `place:...@point`; None when the plan has nothing for it."""
    text = env.get(VARIABLE, "")
    if not text:
        return None
    restarted = env.get("STARLING_RESTARTS", "0") != "0"
    mine = [
        fault for fault in parse(text)
        if (fault.place, fault.point) == (place, point) and not (restarted and fault.action in _FATAL)
    ]  # fmt: skip
    if not mine:
        return None

    def strike(number: int) -> bool:
        return any(_do(fault.action) for fault in mine if fault.at in (0, number))

    return strike


def _do(action: str) -> bool:
    if action == "exit":
        os._exit(1)
    if action in ("kill", "segv", "stop"):
        os.kill(os.getpid(), {"kill": signal.SIGKILL, "segv": signal.SIGSEGV, "stop": signal.SIGSTOP}[action])
    if action in ("enospc", "eio"):
        number = errno.ENOSPC if action == "enospc" else errno.EIO
        raise OSError(number, os.strerror(number))
    return action == "drop"
