"""Fault plans: `STARLING_FAULTS` for tests, and the plan that `starling chaos` installs in a running server.

    STARLING_FAULTS="worker:exit@step=17, kv:stop@page=3, wire:drop@gateway>scheduler:5, disk:enospc@spill"

    PLACE:ACTION@POINT=N     at the Nth event of that kind in the process (1 is the first): once
    wire:drop@FROM>TO:N      the Nth frame from one stage to another is lost: once
    disk:ACTION@POINT        every time
    disk:slow@POINT=N        every time, N milliseconds
    PLACE:kill(PID.TICKS+...)@POINT=N    signals other processes at this process's event: once, of all processes

Points: `worker@step`, `kv@page`, `wire@FROM>TO`; of disks, for each kind of state file (`faults.STATE_FILES`) its
name for a write, and for its other operations NAME_open, NAME_read, NAME_sync, NAME_rename or NAME_unlink. The phases
of a request: `gateway@received` (admission follows), `gateway@admitted`, `gateway@journaled`, `scheduler@queued`,
`scheduler@finishing` and `gateway@finishing`, counted since the plan was installed; `scheduler@prefill` and
`scheduler@decode`, the prompt chunks and decode steps of each sequence, which the worker has just been given.
Actions: `exit` (code 1), `kill` (SIGKILL), `segv`, `stop` (SIGSTOP), `drop` (the caller drops the frame or record),
`enospc`, `eio`, `erofs` and `eacces` (an `OSError`; disks only), `slow`.  A restarted process reads the same plan:
faults of the environment that end a process happen only in its first run (`STARLING_RESTARTS` is 0).

A fault that names processes (by pid and start time) belongs to an installed plan. It removes that plan, and writes its
own record (`Strike`) to `RUN_DIR/faults.struck` before it sends the signals: to this process last.

Imported by pipeline/faults/points.py only when there is a plan.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from pipeline.errors import ConfigError
from pipeline.faults import STATE_FILES, VARIABLE
from pipeline.files import replace_file
from pipeline.protocol.topology import EDGES
from shm.arena import process_ticks

DISK_ERRORS = {"enospc": errno.ENOSPC, "eio": errno.EIO, "erofs": errno.EROFS, "eacces": errno.EACCES}
ACTIONS = ("exit", "kill", "segv", "stop", "drop", *DISK_ERRORS, "slow")
MAX_PLAN = 4096  # bytes of the plan file
TAKEN, STRUCK, ARMED = "faults.taken", "faults.struck", "faults.armed"  # beside the installed plan
POINTS = {
    "worker": ("step",),
    "kv": ("page",),
    "gateway": ("received", "admitted", "journaled", "finishing"),
    "scheduler": ("queued", "prefill", "decode", "finishing"),
    "wire": tuple(way for e in EDGES.values() for way in (f"{e.connector}>{e.binder}", f"{e.binder}>{e.connector}")),
    "disk": (*STATE_FILES, *(f"{name}_{done}" for name, operations in STATE_FILES.items() for done in operations)),
}
_ONLY = {"drop": "wire", **dict.fromkeys(DISK_ERRORS, "disk")}  # actions that have no meaning elsewhere
_FATAL = ("exit", "kill", "segv", "stop")
_SIGNALS = {"kill": signal.SIGKILL, "segv": signal.SIGSEGV, "stop": signal.SIGSTOP}
_PATTERN = re.compile(r"(\w+):(\w+)(?:\((\d+\.\d+(?:\+\d+\.\d+)*)\))?@([\w>]+)(?:[=:](\d+))?")


class Fault(NamedTuple):
    """One entry of a plan."""

    place: str
    action: str
    point: str
    at: int  # number of the event, 0: every one; for `slow`: milliseconds
    targets: tuple[tuple[int, int], ...] = ()  # (pid, start time in ticks) of other processes


class Strike(NamedTuple):
    """The record of a fault that has signalled other processes."""

    plan: str
    point: str  # PLACE@POINT
    number: int  # of the event
    detail: str  # what the point says of the event
    pid: int  # of the process that was at the point
    when_ns: int  # CLOCK_MONOTONIC, before the first signal


def parse(text: str) -> list[Fault]:
    """Parse a plan. Raises `ConfigError` for an entry that could never happen: a test with it would prove nothing."""
    faults = []
    for part in filter(None, (p.strip() for p in text.split(","))):
        match = _PATTERN.fullmatch(part)
        if match is None or match[2] not in ACTIONS:
            raise ConfigError(
                f"{VARIABLE}: {part!r} is not PLACE:ACTION@POINT=N with an action of {', '.join(ACTIONS)}"
            )
        pairs = [target.split(".") for target in (match[3] or "").split("+") if target]
        targets = tuple((int(pid), int(ticks)) for pid, ticks in pairs)
        fault = Fault(match[1], match[2], match[4], int(match[5] or 0), targets)
        if wrong := _wrong(fault, has_number=match[5] is not None):
            raise ConfigError(f"{VARIABLE}: {part!r}: {wrong}")
        faults.append(fault)
    return faults


def _wrong(fault: Fault, has_number: bool) -> str:
    """Why the fault could never happen as written; "" when it can."""
    if fault.place not in POINTS:
        return f"no place {fault.place!r}; there are {', '.join(POINTS)}"
    if fault.point not in POINTS[fault.place]:
        return f"{fault.place} has no point {fault.point!r}; it has {', '.join(POINTS[fault.place])}"
    if fault.targets and fault.action not in _SIGNALS:
        return f"{fault.action} is not an action on other processes; these are {', '.join(_SIGNALS)}"
    if _ONLY.get(fault.action, fault.place) != fault.place:
        return f"{fault.action} is an action of {_ONLY[fault.action]} only"
    if fault.action == "slow":
        return "" if fault.at else f"slow needs its milliseconds, from 1, as in {fault.place}:slow@{fault.point}=20"
    if has_number and not fault.at:
        return "events are counted from 1"
    if fault.place != "disk" and not has_number:
        return f"which one? {fault.place}:{fault.action}@{fault.point}=1 is the first"
    return ""


def build_trigger(
    place: str,
    point: str,
    planned: str,
    live: str = "",
    env: Mapping[str, str] = os.environ,
    sleep: Callable[[float], None] = time.sleep,
    installed: Path | None = None,
) -> Callable[..., bool] | None:
    """The function to call at each event of a point; None when neither plan has a fault for it.

    `installed`: the file of the plan `live`.
    """
    restarted = env.get("STARLING_RESTARTS", "0") != "0"
    faults = [fault for fault in parse(planned) if not (restarted and fault.action in _FATAL)] + parse(live)
    chosen = [fault for fault in faults if (fault.place, fault.point) == (place, point)]
    if not chosen:
        return None

    def trigger(number: int, detail: str = "") -> bool:
        """Perform the faults of event `number`; whether the caller must drop the frame or record."""
        is_dropped = False
        for fault in chosen:
            if fault.targets:
                if fault.at == number and installed is not None:
                    _strike(fault, Strike(live, f"{place}@{point}", number, detail, os.getpid(), 0), installed)
            elif fault.action == "slow":
                sleep(fault.at / 1000)
            elif fault.at in (0, number):
                is_dropped |= _perform(fault.action)
        return is_dropped

    return trigger


def _perform(action: str) -> bool:
    if action == "exit":
        os._exit(1)
    if action in _SIGNALS:
        os.kill(os.getpid(), _SIGNALS[action])
    if action in DISK_ERRORS:
        number = DISK_ERRORS[action]
        raise OSError(number, os.strerror(number))
    return action == "drop"


def _strike(fault: Fault, strike: Strike, installed: Path) -> None:
    """Signal the fault's targets, unless another process has taken the plan."""
    try:
        os.rename(installed, installed.with_name(TAKEN))
    except FileNotFoundError:
        return
    record = strike._replace(when_ns=time.monotonic_ns())
    replace_file(installed.with_name(STRUCK), json.dumps(record).encode())
    for pid, ticks in sorted(fault.targets, key=lambda target: target[0] == os.getpid()):
        # Ranks of one model end together: the first signal may have ended the second target.
        if process_ticks(pid) == ticks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, _SIGNALS[fault.action])


def read_strike(run_dir: Path) -> Strike | None:
    """The record of the last fault that has signalled other processes, since a plan was installed."""
    try:
        return Strike(*json.loads((run_dir / STRUCK).read_bytes()))
    except FileNotFoundError:
        return None


# ------------------------------------------------------------------ the plan of a running server


def install(path: Path, plan: str) -> None:
    """Install `plan` while this process lives, or until `path` is removed. Raises `ConfigError`, `OSError`."""
    parse(plan)
    for name in (TAKEN, STRUCK, ARMED):
        path.with_name(name).unlink(missing_ok=True)
    replace_file(path, f"{os.getpid()} {process_ticks(os.getpid())}\n{plan}".encode())


def record_armed(path: Path) -> None:
    """Add this process to those that follow the installed plan, if the disk permits."""
    with contextlib.suppress(OSError), path.with_name(ARMED).open("a") as file:
        file.write(f"{os.getpid()}\n")


def read_armed(run_dir: Path) -> set[int]:
    """Pids of the processes that follow the installed plan."""
    try:
        return set(map(int, (run_dir / ARMED).read_text().split()))
    except FileNotFoundError:
        return set()


def read_installed(path: Path) -> str:
    """The installed plan; "" when there is none, it cannot be read, or the process that installed it has ended."""
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
