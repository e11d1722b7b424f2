"""Which formats use AMX tiles, and from how many tokens on: configured, or measured once on this machine.

A verdict is what the probe (amx_probe.py) has measured.  It is stored with the kernel cache, as is a failure to get
one.  build.py asks for it when it has compiled the products: a compiler's process finds it (`find_verdict`), and that
of the build passes on what could not be stored (`pass_on`).  A group that starts uses what is known by then
(activations_arena.py), without a verdict no tiles.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from pipeline.runtime import process
from stages.worker.kernels.features import ALL_FORMATS, ALL_TILES, Thresholds, cache_dir, isa, named_thresholds

PROBED_TOKENS = (16, 32, 64, 240)  # of the products that the probe times
PROBE = ["-P", "-m", "stages.worker.kernels.amx_probe"]  # arguments of a Python that prints the speedups as JSON
PROBE_S = 60  # time limit of the probe, which takes some 5 s, and of waiting for another process's
POLL_S = 0.1  # between two tries to get the lock of the probe
# How Linux ends a process whose CPU does not run tiles that it reports: by #UD and #GP.
REFUSALS = (signal.SIGILL, signal.SIGSEGV)
STOPS = (signal.SIGINT, signal.SIGTERM)  # end a probe together with the server, and say nothing about the machine
PAUSES_S = (3600, 86400)  # after the first probe without a verdict, and after each later one
# The verdict of this process and of those that it starts where none is stored, as JSON.
PASSED_ON = "STARLING_AMX_VERDICT"
_VERDICT, _FAILURE = "amx-speedups.json", "amx-failure.json"  # in the kernel cache

log = logging.getLogger("starling.worker")


class Verdict(NamedTuple):
    """What the probe found on this machine."""

    speedups: dict[str, list[float]]  # by format, for each of PROBED_TOKENS: time of VNNI / time of AMX
    against: str  # why AMX is not used at all; "" if the probe compared it

    @property
    def thresholds(self) -> Thresholds:
        """The formats whose products AMX computes in less time, and from how many tokens on."""
        found = ((name, faster_from(speedups)) for name, speedups in sorted(self.speedups.items()))
        return tuple((name, tokens) for name, tokens in found if tokens)


class Found(NamedTuple):
    """What `find_verdict` has found."""

    verdict: Verdict | None  # None: there is none
    unkept: str  # why there is none, or why it could not be stored; "" if it is stored

    def encode(self) -> str:
        """As JSON, in one line."""
        return json.dumps([self.verdict._asdict() if self.verdict is not None else None, self.unkept])

    @staticmethod
    def decode(text: str) -> Found:
        """The reverse. Raises `ValueError` for anything else."""
        try:
            verdict, unkept = json.loads(text)
        except TypeError as error:
            raise ValueError(str(error)) from None
        return Found(None if verdict is None else _checked(verdict), str(unkept))


def faster_from(speedups: Sequence[float]) -> int:
    """The first of PROBED_TOKENS at which, as at all later ones, AMX takes less time; 0: at the last it does not."""
    found = 0
    for tokens, speedup in zip(reversed(PROBED_TOKENS), reversed(speedups), strict=True):
        if not speedup > 1:
            break
        found = tokens
    return found


def tile_thresholds() -> Thresholds:
    """The formats whose products use tiles in groups that start now, and from how many tokens on."""
    if isa() not in ("amx", "tiles"):
        return ()
    if named := named_thresholds():
        return named
    if os.environ.get("STARLING_ISA") in ("amx", "tiles"):
        return ALL_TILES
    verdict = amx_verdict()
    return verdict.thresholds if verdict is not None else ()


def needs_probe() -> bool:
    """Whether this process's kernels can use tiles, and whether they should is neither configured nor measured.

    False in the pause after a failed probe.
    """
    is_open = isa() == "amx" and (os.environ.get("STARLING_ISA") or "native") == "native" and not named_thresholds()
    failure = last_failure() if is_open else None
    return is_open and amx_verdict() is None and not (failure is not None and _is_paused(failure))


def choice() -> str:
    """Names what uses tiles in groups that start now; "": nothing does."""
    thresholds = tile_thresholds()
    return hashlib.sha256(repr(thresholds).encode()).hexdigest()[:8] if thresholds else ""


class ProbeFailed(RuntimeError):
    """The AMX probe has ended without a verdict, for a reason that may pass."""


class ProbeStopped(ProbeFailed):
    """The probe was ended together with the server."""


class Failure(NamedTuple):
    """Probes that have ended without a verdict."""

    number: int  # of them, at least 1
    at: float  # time of the last one, s since 1970
    reason: str  # why the last one gave none

    @property
    def until(self) -> float:
        """When the pause after it ends, s since 1970."""
        return self.at + PAUSES_S[min(self.number, len(PAUSES_S)) - 1]


def amx_verdict() -> Verdict | None:
    """The probe's verdict for this machine and these kernel sources; None: there is none yet."""
    with contextlib.suppress(KeyError, ValueError):
        return _parsed(os.environ[PASSED_ON])
    return _read_verdict(cache_dir() / _VERDICT)


def last_failure() -> Failure | None:
    """The last probe that has ended without a verdict; None: there is none, or its record is damaged."""
    return _read_failure(cache_dir() / _FAILURE)


def why_not() -> str:
    """Why groups that start now use no tiles, where they could."""
    verdict, failure = amx_verdict(), last_failure()
    if verdict is not None:
        return verdict.against or "it is not faster in any format"
    return _until(failure) if failure is not None else "it has not been compared; `starling prepare` and a start do so"


def pass_on(found: Found | None) -> None:
    """Where no verdict is stored, let this process and those that it starts use what has been found, and say why.

    None: the process that should have found one has ended.  Another process may have stored one meanwhile.
    """
    if found is None or found.verdict is None:
        verdict, failure = amx_verdict(), last_failure()
        if verdict is not None:
            found = Found(verdict, "")
        elif found is None:
            reason = "its probe has left no verdict; the next start tries again"
            found = Found(None, _until(failure) if failure is not None else reason)
    if found.unkept:
        if found.verdict is None:
            log.warning("AMX is not used", extra={"reason": found.unkept})
        else:
            log.warning("AMX is probed at each start", extra={"reason": found.unkept})
        os.environ[PASSED_ON] = json.dumps((found.verdict or Verdict({}, found.unkept))._asdict())


def find_verdict() -> Found:
    """The verdict, after a probe if there was none. It is stored with the kernel cache.

    A later build probes again where there is none, or none can be stored: after a pause (PAUSES_S) if the probe
    failed, as a probe may take PROBE_S.
    """
    verdict, directory = amx_verdict(), cache_dir()
    if verdict is not None:
        return Found(verdict, "")
    try:
        with _locked(directory):
            if (stored := _read_verdict(directory / _VERDICT)) is not None:
                return Found(stored, "")
            verdict = _probe_unless_paused(directory / _FAILURE)
            _replace(directory / _VERDICT, verdict._asdict())
            return Found(verdict, "")
    except ProbeFailed as error:
        return Found(None, str(error))
    except OSError as error:
        unkept = f"its probe's verdict cannot be kept in {directory}: {error.strerror}; make it writable or free space"
        return Found(verdict, unkept)


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Hold the lock of the probe, in the directory of its verdict.

    Raises `OSError` where that cannot be written, `ProbeFailed` if another process keeps it.
    """
    directory.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + PROBE_S
    with open(directory / "amx.lock", "w") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > end:
                    raise ProbeFailed("another process keeps the probe's lock; the next start tries again") from None
                time.sleep(POLL_S)
        yield


def _replace(path: Path, record: object) -> None:
    """Write a record as JSON. Raises `OSError`."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(record))
    part.rename(path)


def _probe_unless_paused(path: Path) -> Verdict:
    """`_probe`, unless one has failed a short time ago; `path` is the record of that. The caller holds the lock.

    Raises `ProbeFailed` with the reason, and when the next probe is.
    """
    failure = _read_failure(path)
    if failure is None or not _is_paused(failure):
        try:
            return _probe()
        except ProbeStopped as error:
            raise ProbeFailed(f"{error}; the next start tries again") from None
        except ProbeFailed as error:
            failure = Failure(failure.number + 1 if failure is not None else 1, time.time(), str(error))
        try:
            _replace(path, failure)
        except OSError as error:
            raise ProbeFailed(
                f"{failure.reason}; the next start tries again, as {path} cannot be written: {error.strerror}"
            ) from None
    raise ProbeFailed(_until(failure))


def _until(failure: Failure) -> str:
    """Why there is no verdict, and when the next probe is."""
    when = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(failure.until))
    return f"{failure.reason}; starts after {when} try again, or the next one if you remove {cache_dir() / _FAILURE}"


def _is_paused(failure: Failure) -> bool:
    return failure.at <= time.time() < failure.until


def _read_failure(path: Path) -> Failure | None:
    """The failure stored at `path`; None if there is none or it is damaged."""
    try:
        number, at, reason = json.loads(path.read_text())
        return Failure(max(1, int(number)), float(at), str(reason))
    except (OSError, ValueError, TypeError, OverflowError):
        return None


def _read_verdict(path: Path) -> Verdict | None:
    """The verdict stored at `path`; None if there is none or it is not of this version."""
    try:
        return _parsed(path.read_text())
    except (OSError, ValueError):
        return None


def _parsed(text: str) -> Verdict:
    """A verdict from its JSON. Raises `ValueError` for anything else."""
    return _checked(json.loads(text))


def _checked(found: object) -> Verdict:
    """A verdict from its fields. Raises `ValueError` for anything else."""
    if not isinstance(found, dict) or found.keys() != set(Verdict._fields):
        raise ValueError(f"expected an object with {', '.join(Verdict._fields)}")
    verdict = Verdict(**found)
    is_complete = isinstance(verdict.speedups, dict) and verdict.speedups.keys() in (ALL_FORMATS, frozenset())
    if not is_complete or not all(_are_speedups(numbers) for numbers in verdict.speedups.values()):
        raise ValueError(f"expected {len(PROBED_TOKENS)} numbers for each format")
    return verdict


def _are_speedups(numbers: object) -> bool:
    return (
        isinstance(numbers, list)
        and len(numbers) == len(PROBED_TOKENS)
        and all(isinstance(number, int | float) for number in numbers)
    )


def _probe() -> Verdict:
    """The verdict of a probe process: an instruction that is not implemented may kill it.

    Raises `ProbeFailed` if it ends for another reason, such as a lack of time or memory, `ProbeStopped` if it was
    ended.
    """
    environment = {**os.environ, "STARLING_ISA": "amx", "STARLING_AMX_FORMATS": ""}
    environment[process.PARENT_VARIABLE] = str(os.getpid())
    command = [sys.executable, *PROBE]
    try:
        done = subprocess.run(
            command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PROBE_S
        )
    except subprocess.TimeoutExpired:
        raise ProbeFailed(f"its probe did not end in {PROBE_S} s") from None
    except OSError as error:
        raise ProbeFailed(f"its probe cannot be started: {error.strerror}") from None
    words = (done.stdout + done.stderr).strip()[-500:]
    if -done.returncode in REFUSALS:
        return Verdict({}, f"its probe ended with {done.returncode}: {words}")
    if -done.returncode in STOPS:
        raise ProbeStopped(f"its probe was stopped by {signal.Signals(-done.returncode).name}")
    if done.returncode != 0:
        raise ProbeFailed(f"its probe ended with {done.returncode}: {words}")
    try:
        return _parsed(done.stdout)
    except ValueError as e:
        raise ProbeFailed(f"its probe printed {words!r}: {e}") from None
