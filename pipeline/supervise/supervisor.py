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
import signal
import subprocess
import time
from collections.abc import Callable
from typing import NamedTuple

from pipeline import procfs
from pipeline.config.schema import Config
from pipeline.errors import ConfigError, ResourceError, StarlingError
from pipeline.observe import logs
from pipeline.runtime import process, timer_coalescing
from pipeline.supervise import ancestors, base, listen_fd
from pipeline.supervise.base import SupervisorBase
from pipeline.supervise.restart_policy import Limits, RestartPolicy

log = logging.getLogger("starling.supervisor")

# Between looks at what tells nobody; the stage's own stop or death wakes us.
TICK_S = 0.25  # while it is to end
FAMILY_TICK_S = 1.0  # processes below the stage: of its ranks' stops a worker tells us by SIGCHLD
LONE_TICK_S = 2.5  # beats alone, and never more than a quarter of what the stage has allowed itself
FIRST_BEAT_S = 120.0  # from the start of the process; imports on a cold disk included
GRACE_S = 0.3  # beyond the drain time, for the stage's own end

Start = Callable[[int, int], int]  # (write end of the beat pipe, restarts so far) -> pid


class Ended(NamedTuple):
    """How a stage ended."""

    code: int  # exit code, or -signal
    reason: str
    ran_s: float
    was_ready: bool


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
    watched_ancestors = ancestors.open_watched_ancestors()
    start = start_program(command)
    if run is not None and preloaded(preload):
        start = start_fork(run, stage, config)
    policy = RestartPolicy(random.SystemRandom().random, limits)
    drain_s = config.server.drain_timeout_ms / 1000 + GRACE_S
    return Supervisor(stage, start, policy, watched_ancestors, drain_s).run()


def preloaded(preload: Callable[[], object] | None) -> bool:
    """Call it. False: this process cannot be forked as a stage (its modules fail, or start threads)."""
    try:
        if preload is not None:
            preload()
    except Exception:
        # Not ours to judge: the stage will say the same, and be restarted or given up.
        log.exception("cannot import the stage beforehand")
        return False
    threads = len(procfs.threads())
    if threads > 1:
        log.warning("its modules start threads: restarts pay for imports", extra={"threads": threads})
        return False
    gc.collect()
    gc.freeze()  # what is shared with every child stays untouched by its collector
    return True


# ------------------------------------------------------------------ starting a stage


def start_program(command: list[str]) -> Start:
    """The stage as a new program, in a process group of its own."""

    def start(beat_fd: int, restarts: int) -> int:
        env = {**os.environ, **_environment(beat_fd, restarts), process.PARENT_VARIABLE: str(os.getpid())}
        child = subprocess.Popen(command, env=env, pass_fds=(beat_fd, *listen_fd.lent()), process_group=0)
        child.returncode = 0  # waited for here, by pid: Popen must neither wait nor complain
        return child.pid

    return start


def start_fork(run: Callable[[], int], stage: str, config: Config) -> Start:
    """The stage as a copy of this process, in a process group of its own."""

    def start(beat_fd: int, restarts: int) -> int:
        environment = _environment(beat_fd, restarts)

        def live() -> int:
            os.environ.update(environment)
            logs.setup(stage, config)
            return guarded(run)

        return base.fork(live)

    return start


def _environment(beat_fd: int, restarts: int) -> dict[str, str]:
    return {process.BEAT_FD_VARIABLE: str(beat_fd), "STARLING_RESTARTS": str(restarts)}


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


class Supervisor(SupervisorBase):
    """The loop of one stage's lives. In the main thread; every child of this process belongs to it."""

    def __init__(
        self,
        stage: str,
        start: Start,
        policy: RestartPolicy,
        watched_ancestors: list[int],
        drain_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(watched_ancestors, clock)
        self.stage = stage
        self._start = start
        self._policy = policy
        self._drain_s = drain_s
        self._restarts = 0

    def run(self) -> int:
        """Until told to stop (0 when the stage ended well) or giving up."""
        self.take_signals()
        while True:
            ended = self._live_once()
            if self._is_told_to_stop():
                return process.EXIT_OK if ended.code == 0 else process.EXIT_FATAL
            self._restarts += 1
            if self.restart_requested:
                self.restart_requested = False
                log.info("%s restarts as asked", self.stage)
                continue
            facts = {"code": ended.code, "ran_s": round(ended.ran_s, 3), "restarts": self._restarts}
            # Later the same code may come of what passes: a disk full for a while.
            if ended.code == process.EXIT_CONFIG and self._restarts == 1:
                log.error("%s cannot run as configured: giving up", self.stage, extra=facts)
                return process.EXIT_CONFIG
            wait_s = self._policy.after_death(ended.ran_s, ended.was_ready)
            if wait_s is None:
                log.error("%s %s, too often: giving up", self.stage, ended.reason, extra=facts)
                return process.EXIT_FATAL
            facts["wait_s"] = round(wait_s, 3)
            log.warning("%s %s: starting it again", self.stage, ended.reason, extra=facts)
            until = self._clock() + wait_s
            while (left := until - self._clock()) > 0:
                self.look(left)
                if self._is_told_to_stop():
                    return process.EXIT_OK

    def _is_told_to_stop(self) -> bool:
        return self.stop_requests > 0

    def _live_once(self) -> Ended:
        """One life, from the start to the last descendant's end."""
        read_end, write_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        begun = self._clock()
        try:
            pid = self._start(write_end, self._restarts)
        finally:
            os.close(write_end)
        pidfd = os.pidfd_open(pid)
        self.register(pidfd)
        try:
            reason, was_ready = self._watch(pid, pidfd, read_end)
            last = process.read_beats(read_end)
        finally:
            self.unregister(pidfd)
            os.close(read_end)
        ran_s = self._clock() - begun
        ended = os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOWAIT)
        os.close(pidfd)
        assert ended is not None
        code = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
        _fence(pid)
        how = f"ended with code {code}" if code >= 0 else f"died of {signal.Signals(-code).name}"
        return Ended(code, reason or how, ran_s, was_ready or (last is not None and last.was_ready))

    def _watch(self, pid: int, pidfd: int, beats: int) -> tuple[str, bool]:
        """Until the stage has died; why it was killed ("" when it was not), and whether it has been ready."""
        heard = looked = self._clock()
        allowance_s = FIRST_BEAT_S
        kill_at = float("inf")
        reason = ""
        asked = was_ready = False
        below = procfs.Descendants(exist=True, stopped=0)
        while True:
            tick_s = TICK_S
            if not (asked or reason):
                rest_s = FAMILY_TICK_S if below.exist else LONE_TICK_S
                rest_s = min(rest_s, allowance_s / 4)
                tick_s = (
                    timer_coalescing.until_aligned(self._clock(), rest_s)
                    if rest_s >= timer_coalescing.ALIGN_S
                    else TICK_S
                )
            ready = self.look(tick_s)
            if pidfd in ready:
                return reason, was_ready
            now = self._clock()
            # Time in which we did not run (a suspended machine) is not the stage's silence.
            heard += max(0.0, now - looked - tick_s - 1.0)
            looked = now
            beat = process.read_beats(beats)
            if beat is not None:
                heard, allowance_s, was_ready = now, beat.allowance_ms / 1000, beat.was_ready
            if (self.stop_requests or self.restart_requested) and not asked:
                asked = True
                kill_at = now + self._drain_s
                signal.pidfd_send_signal(pidfd, signal.SIGTERM)
            if reason:
                continue
            if self.stop_requests > 1:
                reason = "was killed as asked"
            elif now >= kill_at:
                reason = "did not finish in time and was killed"
            elif _is_stopped(pidfd):
                reason = "was stopped and has been killed"
            elif (below := procfs.descendants(pid)).stopped:
                reason = f"was killed, for its process {below.stopped} was stopped"
            elif now - heard > allowance_s:
                reason = f"gave no sign for {now - heard:.1f} s and was killed"
            if reason:
                _kill(pid, pidfd)


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
        for child in procfs.children(me):
            os.kill(child, signal.SIGKILL)
        try:
            os.waitid(os.P_ALL, 0, os.WEXITED)
        except ChildProcessError:
            return
