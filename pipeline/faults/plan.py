"""What a plan of faults says: `STARLING_FAULTS`, for tests, and what `starling chaos` gives a live server.

    STARLING_FAULTS="worker:exit@step=17, kv:stop@page=3, wire:drop@gateway>scheduler:5, disk:enospc@spill"

    PLACE:ACTION@POINT=N     at the Nth event of that kind in the process (1 is the first): once
    wire:drop@FROM>TO:N      the Nth frame from one stage to another is lost: once
    disk:ACTION@POINT        every time
    disk:slow@POINT=N        every time, N milliseconds

Points: `worker@step`, `kv@page`, `wire@FROM>TO`; of disks `spill`, `saved` and `sessions` (kv writes),
`spill_read`, `saved_read`, `journal` and `quotas` (the gateway writes) and `journal_sync`.
Actions: `exit` (code 1), `kill` (SIGKILL), `segv`, `stop` (SIGSTOP), `drop` (the caller drops the thing),
`enospc` and `eio` (an `OSError`; of a disk), `slow`.  A process that a supervisor has restarted reads the same plan:
faults of the environment that end a process happen only in its first incarnation (`STARLING_RESTARTS` is 0).

Imported when there is a plan, by pipeline/faults/points.py, and in no other run.
"""

from __future__ import annotations

import errno
import os
import re
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from pipeline.errors import ConfigError
from pipeline.faults.points import VARIABLE, Trigger
from pipeline.protocol.topology import EDGES
from shm.arena import process_ticks

ACTIONS = ("exit", "kill", "segv", "stop", "drop", "enospc", "eio", "slow")
MAX_PLAN = 4096  # bytes of a live server's plan
POINTS = {
    "worker": ("step",),
    "kv": ("page",),
    "wire": tuple(way for e in EDGES.values() for way in (f"{e.connector}>{e.binder}", f"{e.binder}>{e.connector}")),
    "disk": ("spill", "saved", "sessions", "spill_read", "saved_read", "journal", "journal_sync", "quotas"),
}
_ONLY = {"drop": "wire", "enospc": "disk", "eio": "disk"}  # actions that mean nothing elsewhere
_FATAL = ("exit", "kill", "segv", "stop")
_PATTERN = re.compile(r"(\w+):(\w+)@([\w>]+)(?:[=:](\d+))?")


class Fault(NamedTuple):
    place: str
    action: str
    point: str
    at: int  # 0: every time; of `slow`: milliseconds


def parse(text: str) -> list[Fault]:
    """The plan in `text`. Raises `ConfigError` naming the part that is wrong: one that never struck proves nothing."""
    faults = []
    for part in filter(None, (p.strip() for p in text.split(","))):
        match = _PATTERN.fullmatch(part)
        if match is None or match[2] not in ACTIONS:
            raise ConfigError(
                f"{VARIABLE}: {part!r} is not PLACE:ACTION@POINT=N with an action of {', '.join(ACTIONS)}"
            )
        fault = Fault(match[1], match[2], match[3], int(match[4] or 0))
        if wrong := _wrong(fault, has_number=match[4] is not None):
            raise ConfigError(f"{VARIABLE}: {part!r}: {wrong}")
        faults.append(fault)
    return faults


def _wrong(fault: Fault, has_number: bool) -> str:
    """Why it could never happen, or not as it is said; "" when it can."""
    if fault.place not in POINTS:
        return f"there is no place {fault.place!r}; there are {', '.join(POINTS)}"
    if fault.point not in POINTS[fault.place]:
        return f"{fault.place} has no point {fault.point!r}; it has {', '.join(POINTS[fault.place])}"
    if _ONLY.get(fault.action, fault.place) != fault.place:
        return f"{fault.action} is an action of {_ONLY[fault.action]} only"
    if fault.action == "slow":
        return "" if fault.at else f"slow needs its milliseconds, from 1, as in {fault.place}:slow@{fault.point}=20"
    if has_number and not fault.at:
        return "events are counted from 1"
    if fault.place != "disk" and not has_number:
        return f"which one? {fault.place}:{fault.action}@{fault.point}=1 is the first"
    return ""


def hook(
    place: str,
    point: str,
    planned: str,
    live: str = "",
    env: Mapping[str, str] = os.environ,
    sleep: Callable[[float], None] = time.sleep,
) -> Trigger | None:
    """What to call at each event of `place:...@point`; None when neither plan has anything for it."""
    restarted = env.get("STARLING_RESTARTS", "0") != "0"
    faults = [fault for fault in parse(planned) if not (restarted and fault.action in _FATAL)] + parse(live)
    mine = [fault for fault in faults if (fault.place, fault.point) == (place, point)]
    if not mine:
        return None

    def trigger(number: int) -> bool:
        is_dropped = False
        for fault in mine:
            if fault.action == "slow":
                sleep(fault.at / 1000)
            elif fault.at in (0, number):
                is_dropped |= _do(fault.action)
        return is_dropped

    return trigger


def _do(action: str) -> bool:
    if action == "exit":
        os._exit(1)
    if action in ("kill", "segv", "stop"):
        os.kill(os.getpid(), {"kill": signal.SIGKILL, "segv": signal.SIGSEGV, "stop": signal.SIGSTOP}[action])
    if action in ("enospc", "eio"):
        number = errno.ENOSPC if action == "enospc" else errno.EIO
        raise OSError(number, os.strerror(number))
    return action == "drop"


# ------------------------------------------------------------------ a live server's


def give(path: Path, plan: str) -> None:
    """Put `plan` in force while this process lives, or until `path` is removed. Raises `ConfigError`."""
    parse(plan)
    fresh = path.with_name(path.name + ".new")
    fresh.write_text(f"{os.getpid()} {process_ticks(os.getpid())}\n{plan}")
    os.replace(fresh, path)


def live(path: Path) -> str:
    """The plan in force; "" when there is none, it cannot be read, or its author has ended."""
    try:
        with open(path, "rb") as file:
            head, _, plan = file.read(MAX_PLAN).decode().partition("\n")
        pid, ticks = map(int, head.split())
        if process_ticks(pid) != ticks:
            path.unlink(missing_ok=True)
            return ""
        parse(plan)
    except (OSError, ValueError, ConfigError):
        return ""
    return plan
