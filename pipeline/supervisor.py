"""Keeps one stage alive: `starling supervise STAGE`.

    supervisor (this process, one thread)
    └── stage (process group of its own, SIGKILL at our death)
        └── ranks, ...

The stage is forked from a process that has imported its modules already, so that a restart costs no
imports; where that is not safe (threads are alive) or not possible, it is started as a new program.

It is restarted when it dies, when it or a process below it is stopped, and when its beats cease for
longer than it allowed itself.  Fencing is death: before a successor starts, the whole group has got
SIGKILL, and every descendant has been waited for (we are their subreaper).

Ends: SIGTERM or SIGINT, or the death of a guardian (kinship.py), lets the stage finish, for at most its
drain time; a second signal kills it.  SIGHUP restarts the stage in order.  Too many deaths: exit code 1;
78 when the stage says at its first start that a restart cannot help.

Knows nothing of what stages do; imports nothing heavy itself.
"""

from __future__ import annotations

import gc
import logging
import os
import random
import select
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from types import FrameType
from typing import NamedTuple

from pipeline import kinship, listening, logs, process
from pipeline.config_schema import Config
from pipeline.errors import ConfigError, ResourceError, StarlingError
from pipeline.restarts import Limits, RestartPolicy

log = logging.getLogger("starling.supervisor")

TICK_S = 0.25  # between looks at what tells nobody: processes below the stage, and its beats
LONE_TICK_S = 1.0  # beats alone: they may fail to come for many seconds. Its own stop or death wakes us
FIRST_BEAT_S = 120.0  # from the start of the process; imports on a cold disk included
GRACE_S = 0.3  # beyond the drain time, for the stage's own end
SAME_SIGNAL_S = 0.5  # honcho and a terminal may both send one: not a second wish
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD)

Start = Callable[[int, int], int]  # (write end of the beat pipe, restarts so far) -> pid


class Ended(NamedTuple):
    """How a stage ended."""

    code: int  # exit code, or -signal
    reason: str
    ran_s: float


def supervise(
    stage: str,
    command: list[str],
    config: Config,
    run: Callable[[], int] | None = None,
    preload: Callable[[], object] | None = None,
    limits: Limits = Limits(),  # noqa: B008
) -> int:
    """Until told to stop, or giving up; the exit code.

    `command` starts the stage as a new program.  With `run` (what the program would do), it is forked
    instead, after `preload` has imported what it needs: that must start no thread and open nothing.
    """
    process.become_subreaper()
    # numpy's BLAS would start threads when it is imported, and a forked child would not have them.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    logs.setup(f"{stage}-supervisor", config)
    guardians = open_guardians()
    start = start_program(command)
    if run is not None and preloaded(preload):
        start = start_fork(run, stage, config)
    policy = RestartPolicy(random.SystemRandom().random, limits)
    drain_s = config.server.drain_timeout_ms / 1000 + GRACE_S
    return Supervisor(stage, start, policy, guardians, drain_s).run()


def preloaded(preload: Callable[[], object] | None) -> bool:
    """Call it. False: this process cannot be forked as a stage (its modules fail, or start threads)."""
    try:
        if preload is not None:
            preload()
    except Exception:
        # Not ours to judge: the stage will say the same, and be restarted or given up.
        log.exception("cannot import the stage beforehand")
        return False
    threads = len(os.listdir("/proc/self/task"))
    if threads > 1:
        log.warning("its modules start threads: restarts pay for imports", extra={"threads": threads})
        return False
    gc.collect()
    gc.freeze()  # what is shared with every child stays untouched by its collector
    return True


def open_guardians() -> list[int]:
    """Pidfds of those whose death ends this process, see kinship.py."""
    return [fd for fd in map(_pidfd, kinship.guardians(os.getpid())) if fd >= 0]


def _pidfd(pid: int) -> int:
    try:
        return os.pidfd_open(pid)
    except OSError:
        return -1


# ------------------------------------------------------------------ starting a stage


def start_program(command: list[str]) -> Start:
    """The stage as a new program, in a process group of its own."""

    def start(beat_fd: int, restarts: int) -> int:
        env = {**os.environ, **_environment(beat_fd, restarts)}
        child = subprocess.Popen(command, env=env, pass_fds=(beat_fd, *listening.lent()), process_group=0)
        child.returncode = 0  # waited for here, by pid: Popen must neither wait nor complain
        return child.pid

    return start


def start_fork(run: Callable[[], int], stage: str, config: Config) -> Start:
    """The stage as a copy of this process, in a process group of its own."""

    def start(beat_fd: int, restarts: int) -> int:
        environment = _environment(beat_fd, restarts)
        sys.stdout.flush()
        sys.stderr.flush()
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        pid = os.fork()
        if pid:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
            return pid
        code = process.EXIT_FATAL
        try:
            os.environ.update(environment)
            process.die_with_parent()
            os.setpgid(0, 0)
            for number in SIGNALS:
                signal.signal(number, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
            logs.setup(stage, config)
            code = guarded(run)
            logging.shutdown()
            sys.stdout.flush()
            sys.stderr.flush()
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)

    return start


def _environment(beat_fd: int, restarts: int) -> dict[str, str]:
    return {
        process.BEAT_FD_VARIABLE: str(beat_fd),
        process.PARENT_VARIABLE: str(os.getpid()),
        "STARLING_RESTARTS": str(restarts),
    }


def guarded(run: Callable[[], int]) -> int:
    """The exit code of `run`, whatever happens in it: a fatal error is never 0."""
    try:
        return int(run() or 0)
    except (ConfigError, ResourceError) as error:
        log.error("%s", error.message)
        return process.EXIT_CONFIG
    except StarlingError as error:
        log.error("%s", error.message)
    except SystemExit as error:
        if isinstance(error.code, str):
            log.error("%s", error.code)
            return process.EXIT_FATAL
        return int(error.code or 0)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except Exception:
        log.exception("the stage has failed")
    return process.EXIT_FATAL


# ------------------------------------------------------------------ keeping it alive


class Supervisor:
    """The loop of one stage's lives. In the main thread; every child of this process belongs to it."""

    def __init__(
        self,
        stage: str,
        start: Start,
        policy: RestartPolicy,
        guardians: list[int],
        drain_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.stage = stage
        self._start = start
        self._policy = policy
        self._guardians = guardians  # pidfds
        self._drain_s = drain_s
        self._clock = clock
        self._stop_wishes = 0
        self._last_wish = float("-inf")
        self._restart_wish = False
        self._restarts = 0
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poll = select.poll()
        for fd in (self._wake, *guardians):
            self._poll.register(fd, select.POLLIN)

    def run(self) -> int:
        """Until told to stop (0 when the stage ended well) or giving up."""
        for number in SIGNALS:
            signal.signal(number, self._on_signal)
        while True:
            ended = self._live_once()
            if self._is_told_to_stop():
                return process.EXIT_OK if ended.code == 0 else process.EXIT_FATAL
            self._restarts += 1
            if self._restart_wish:
                self._restart_wish = False
                log.info("%s restarts as asked", self.stage)
                continue
            facts = {"code": ended.code, "ran_s": round(ended.ran_s, 3), "restarts": self._restarts}
            # Later the same code may come of what passes: a disk full for a while.
            if ended.code == process.EXIT_CONFIG and self._restarts == 1:
                log.error("%s cannot run as configured: giving up", self.stage, extra=facts)
                return process.EXIT_CONFIG
            wait_s = self._policy.after_death(ended.ran_s)
            if wait_s is None:
                log.error("%s %s, too often: giving up", self.stage, ended.reason, extra=facts)
                return process.EXIT_FATAL
            facts["wait_s"] = round(wait_s, 3)
            log.warning("%s %s: starting it again", self.stage, ended.reason, extra=facts)
            until = self._clock() + wait_s
            while (left := until - self._clock()) > 0:
                self._look(left)
                if self._is_told_to_stop():
                    return process.EXIT_OK

    def _is_told_to_stop(self) -> bool:
        return self._stop_wishes > 0

    def _live_once(self) -> Ended:
        """One life, from the start to the last descendant's end."""
        read_end, write_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        begun = self._clock()
        try:
            pid = self._start(write_end, self._restarts)
        finally:
            os.close(write_end)
        pidfd = os.pidfd_open(pid)
        self._poll.register(pidfd, select.POLLIN)
        try:
            reason = self._watch(pid, pidfd, read_end)
        finally:
            self._poll.unregister(pidfd)
            os.close(read_end)
        ran_s = self._clock() - begun
        ended = os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOWAIT)
        os.close(pidfd)
        assert ended is not None
        code = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
        _fence(pid)
        how = f"ended with code {code}" if code >= 0 else f"died of {signal.Signals(-code).name}"
        return Ended(code, reason or how, ran_s)

    def _watch(self, pid: int, pidfd: int, beats: int) -> str:
        """Until the stage has died; why it was killed, "" when it was not."""
        heard = looked = self._clock()
        allowance_s = FIRST_BEAT_S
        kill_at = float("inf")
        reason = ""
        asked = False
        while True:
            tick_s = TICK_S if asked or reason or kinship.children(pid) else LONE_TICK_S
            ready = self._look(tick_s)
            if pidfd in ready:
                return reason
            now = self._clock()
            # Time in which we did not run (a suspended machine) is not the stage's silence.
            heard += max(0.0, now - looked - tick_s - 1.0)
            looked = now
            allowed_ms = process.read_beats(beats)
            if allowed_ms is not None:
                heard, allowance_s = now, allowed_ms / 1000
            if (self._stop_wishes or self._restart_wish) and not asked:
                asked = True
                kill_at = now + self._drain_s
                signal.pidfd_send_signal(pidfd, signal.SIGTERM)
            if reason:
                continue
            if self._stop_wishes > 1:
                reason = "was killed as asked"
            elif now >= kill_at:
                reason = "did not finish in time and was killed"
            elif _is_stopped(pidfd):
                reason = "was stopped and has been killed"
            elif (below := kinship.stopped_descendant(pid)) != 0:
                reason = f"was killed, for its process {below} was stopped"
            elif now - heard > allowance_s:
                reason = f"gave no sign for {now - heard:.1f} s and was killed"
            if reason:
                _kill(pid, pidfd)

    def _look(self, timeout_s: float) -> set[int]:
        """Wait for something to happen; the descriptors where it did. Guardians are looked after here."""
        ready = {fd for fd, _ in self._poll.poll(timeout_s * 1000)}
        if self._wake in ready:
            os.eventfd_read(self._wake)
        for fd in ready.intersection(self._guardians):
            self._poll.unregister(fd)
            self._stop_wishes = max(self._stop_wishes, 1)
        return ready

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if number in (signal.SIGTERM, signal.SIGINT):
            now = self._clock()
            if self._stop_wishes == 0 or now - self._last_wish >= SAME_SIGNAL_S:
                self._stop_wishes += 1
                self._last_wish = now
        elif number == signal.SIGHUP:
            self._restart_wish = True
        os.eventfd_write(self._wake, 1)  # poll() is resumed after a handler (PEP 475): this ends it


def _is_stopped(pidfd: int) -> bool:
    try:
        return os.waitid(os.P_PIDFD, pidfd, os.WSTOPPED | os.WNOHANG) is not None
    except ChildProcessError:  # it is dead already
        return False


def _kill(pid: int, pidfd: int) -> None:
    """The stage and its group. It has not been waited for, so its pid names nobody else."""
    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def _fence(pid: int) -> None:
    """After the stage's death: end all that it has left and wait for it.

    The orphans are our children now, and theirs will be before waitid tells of their deaths.
    """
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    me = os.getpid()
    while True:
        for child in kinship.children(me):
            os.kill(child, signal.SIGKILL)
        try:
            os.waitid(os.P_ALL, 0, os.WEXITED)
        except ChildProcessError:
            return
