"""Keeps one stage alive: `starling supervise STAGE`.

    supervisor (this process, one thread)
    └── stage (its own process group, SIGKILL at the supervisor's death)
        └── ranks, ...

The stage is forked from a process that has already imported its modules, so that a restart costs no
imports.  Where that is unsafe (threads are running) or impossible, it is started as a new program.

It is restarted when it dies, when it or a process below it is stopped, and when it sends no keepalive for
longer than the time it announced.  Fencing means killing: before a successor starts, the whole process group has
received SIGKILL and every descendant has been waited for (the supervisor is their subreaper).

SIGTERM or SIGINT, or the death of a watched ancestor (ancestors.py), lets the stage finish within its drain
time; a second signal kills it.  SIGHUP restarts the stage.  Exit codes: 1 after too many deaths; 78 when the
stage reports at its first start that a restart cannot help.

Knows nothing of what stages do, and imports nothing heavy itself.
"""

from __future__ import annotations

import errno
import gc
import logging
import os
import random
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from pipeline import procfs
from pipeline.config import paths, server_cores
from pipeline.config.schema import Config
from pipeline.errors import ConfigError, ResourceError, StarlingError
from pipeline.observe import logs
from pipeline.observe.background_file import THREAD_NAME
from pipeline.observe.log_levels import LogLevelFollower
from pipeline.runtime import process, timer_coalescing
from pipeline.runtime.malloc_trim import trim
from pipeline.runtime.paused_collector import paused_collector
from pipeline.supervise import ancestors, base, listen_fd
from pipeline.supervise.base import SupervisorBase
from pipeline.supervise.restart_count import RESTARTS_VARIABLE, RestartCount, open_count
from pipeline.supervise.restart_policy import Limits, RestartPolicy

log = logging.getLogger("starling.supervisor")

# Intervals of the checks that no event triggers; the stop or death of the stage itself wakes the supervisor.
TICK_S = 0.25  # while the stage is stopping
DESCENDANTS_TICK_S = 1.0  # while processes run below the stage, to detect that one is stopped
KEEPALIVE_TICK_S = 2.5  # otherwise; at most a quarter of the keepalive allowance
FIRST_KEEPALIVE_S = 120.0  # from the start of the process; includes imports from a cold disk
SHORTAGES = (errno.EAGAIN, errno.ENOMEM, errno.ENFILE)  # of processes, memory, files: a later start may succeed
GRACE_S = 0.3  # after the drain time, for the stage to close its files

Start = Callable[[int, int], int]  # (write end of the keepalive pipe, restarts so far) -> pid


class Running(NamedTuple):
    """A run of the stage."""

    pid: int
    keepalives: int  # read end of the pipe
    restart_count: RestartCount


class Ended(NamedTuple):
    """How one run of the stage ended."""

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
    counted_as: str = "",
) -> int:
    """Keep the stage alive until a stop is requested or it dies too often; the exit code.

    `command` starts the stage as a new program.  With `run` (what the program would do) it is forked
    instead, after `preload` has imported its modules: that must start no thread and open no file.
    `counted_as`: the name in the stage's records, if that is not `stage`.
    """
    watched_ancestors = prepare_supervisor(stage, config)
    start = start_program(command)
    if run is not None and preloaded(preload):
        start = start_fork(run, stage, config)
    return run_supervisor(stage, start, config, watched_ancestors, counted_as or stage, limits)


def prepare_supervisor(stage: str, config: Config) -> list[int]:
    """Make this process one that can supervise a stage; its watched ancestors."""
    process.become_subreaper()
    # NumPy's BLAS would start threads when it is imported, and a forked child would lack them.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    logs.setup(f"{stage}-supervisor", config, in_background=True)
    return ancestors.open_watched_ancestors()


def run_supervisor(
    stage: str,
    start: Start,
    config: Config,
    watched_ancestors: list[int],
    counted_as: str,
    limits: Limits = Limits(),  # noqa: B008
    running: Running | None = None,
) -> int:
    """Keep the stage alive, as `supervise` does; the exit code. `running`: its first run, which has been counted."""
    policy = RestartPolicy(random.SystemRandom().random, limits)
    drain_s = config.server.drain_timeout_ms / 1000 + GRACE_S
    count = open_count(config, counted_as) if running is None else running.restart_count
    supervisor = Supervisor(stage, start, policy, watched_ancestors, drain_s, count=count, running=running)
    supervisor.on_wake = LogLevelFollower(paths.run_dir(config), stage, config.logging.level).poll
    from pipeline.models import control_cores  # NumPy, whose BLAS must not have threads (`prepare_supervisor`)

    control_cores.keep_parent(config)
    code = supervisor.run()
    supervisor.ignore_restart_requests()
    return code


def preloaded(preload: Callable[[], object] | None) -> bool:
    """Call `preload`. False: this process cannot be forked as a stage (an import fails or starts threads)."""
    try:
        if preload is not None:
            with paused_collector():
                preload()
    except Exception:
        # The stage will fail with the same error as a program, and is then restarted or given up.
        log.exception("preloading the stage failed")
        return False
    # A child writes its lines itself: it does not need the thread that writes those of this process.
    known = {os.getpid(), *(one.native_id for one in threading.enumerate() if one.name == THREAD_NAME)}
    threads = set(procfs.threads()) - known
    if threads:
        log.warning("preloading started threads, restarts will import again", extra={"threads": len(threads)})
        return False
    # Without a collection before: imports leave hardly any garbage, and the gateway's objects take 30 ms to traverse.
    trim()  # what `preload` needed for a moment would be free memory in every child
    gc.freeze()  # keeps memory shared: the children's collectors do not touch these objects
    return True


# ------------------------------------------------------------------ starting a stage


def start_program(command: list[str]) -> Start:
    """Start the stage as a new program in its own process group."""

    def start(keepalive_fd: int, restarts: int) -> int:
        """Start the stage; its pid."""
        env = {**os.environ, **_environment(keepalive_fd, restarts), process.PARENT_VARIABLE: str(os.getpid())}
        fds = (keepalive_fd, *listen_fd.inherited_fds())
        with server_cores.left():
            child = subprocess.Popen(command, env=env, pass_fds=fds, process_group=0)
        child.returncode = 0  # this module waits by pid: Popen must neither wait nor warn
        return child.pid

    return start


def start_fork(run: Callable[[], int], stage: str, config: Config) -> Start:
    """Start the stage as a copy of this process in its own process group."""

    def start(keepalive_fd: int, restarts: int) -> int:
        """Start the stage; its pid."""

        def body() -> int:
            """The stage's process."""
            set_environment(keepalive_fd, restarts)
            setup_logs(stage, config)
            return guarded(run)

        return base.fork(body)

    return start


def _environment(keepalive_fd: int, restarts: int) -> dict[str, str]:
    return {process.KEEPALIVE_FD_VARIABLE: str(keepalive_fd), RESTARTS_VARIABLE: str(restarts)}


def set_environment(keepalive_fd: int, restarts: int) -> None:
    """Set what a forked stage reads of its supervisor."""
    os.environ.update(_environment(keepalive_fd, restarts))


def setup_logs(stage: str, config: Config) -> None:
    """Those of a forked stage; of a worker, which forks its ranks, lines wait until it has."""
    logs.setup(stage, config, in_background=True, is_held=stage.startswith("worker"))


def guarded(run: Callable[[], int]) -> int:
    """The exit code of `run`; exceptions are logged and never give code 0."""
    try:
        return int(run() or 0)
    except (ConfigError, ResourceError) as error:
        log.error("the stage cannot run: change the configuration or the machine", extra={"reason": error.message})
        return process.EXIT_CONFIG
    except StarlingError as error:
        log.error("the stage cannot run", extra={"reason": error.message})
    except SystemExit as error:
        if isinstance(error.code, str):
            log.error("the stage cannot run", extra={"reason": error.code})
            return process.EXIT_FATAL
        return int(error.code or 0)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except Exception:
        log.exception("stage failed")
    return process.EXIT_FATAL


def start_run(start: Start, count: RestartCount) -> Running:
    """Start the stage with a pipe for its keepalives, and count that. Raises what `start` raises."""
    read_end, write_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    count.started()
    try:
        return Running(start(write_end, count.number), read_end, count)
    except BaseException:
        os.close(read_end)
        raise
    finally:
        os.close(write_end)


# ------------------------------------------------------------------ supervision


class Supervisor(SupervisorBase):
    """Starts the stage, watches it and restarts it. Runs in the main thread; every child belongs to it."""

    def __init__(
        self,
        stage: str,
        start: Start,
        policy: RestartPolicy,
        watched_ancestors: list[int],
        drain_s: float,
        clock: Callable[[], float] = time.monotonic,
        count: RestartCount | None = None,
        running: Running | None = None,
    ) -> None:
        """`count`: with the restarts by earlier supervisors; None: there were none, and none will follow.

        running: the first run; None: it is started.
        """
        super().__init__(watched_ancestors, clock)
        self.stage = stage
        self._start = start
        self._policy = policy
        self._drain_s = drain_s
        self._restarts = 0  # by this supervisor
        self._count = count or RestartCount()
        self._running = running

    def run(self) -> int:
        """Until a stop is requested (0 when the stage then exited with 0) or the stage dies too often."""
        self.install_signal_handlers()
        while True:
            ended = self._run_once()
            if self._must_stop():
                self._count.stopped()
                return process.EXIT_OK if ended.code == 0 else process.EXIT_FATAL
            self._restarts += 1
            self._count.restarted()
            if self.restart_requested:
                self.restart_requested = False
                log.info("a stage restarts on request", extra={"supervised": self.stage})
                continue
            facts: dict[str, Any] = {
                "supervised": self.stage,
                "reason": ended.reason,
                "code": ended.code,
                "ran_s": round(ended.ran_s, 3),
                "restarts": self._restarts,
            }
            # At a later start the same code may have a temporary cause, such as a full disk.
            if ended.code == process.EXIT_CONFIG and self._restarts == 1:
                log.error("a stage cannot run with this configuration, giving up", extra=facts)
                return process.EXIT_CONFIG
            wait_s = self._policy.after_death(ended.ran_s, ended.was_ready)
            if wait_s is None:
                log.error("a stage has ended, too many restarts, giving up", extra=facts)
                return process.EXIT_FATAL
            facts["wait_s"] = round(wait_s, 3)
            log.warning("a stage has ended, restarting it", extra=facts)
            until = self._clock() + wait_s
            while not self.restart_requested and (left := until - self._clock()) > 0:
                self.wait(left)
                if self._must_stop():
                    return process.EXIT_OK
            self.restart_requested = False  # the stage that starts now is the one that was requested

    def _must_stop(self) -> bool:
        return self.stop_requests > 0

    def _run_once(self) -> Ended:
        """One run of the stage, from its start until its last descendant has been waited for."""
        begun = self._clock()
        running, self._running = self._running, None
        try:
            pid, read_end, _ = running or start_run(self._start, self._count)
        except OSError as error:
            if error.errno not in SHORTAGES:
                raise
            return Ended(process.EXIT_FATAL, f"cannot be started: {error.strerror}", 0.0, was_ready=False)
        pidfd = os.pidfd_open(pid)
        self.register(pidfd)
        try:
            reason, was_ready = self._watch(pid, pidfd, read_end)
            last = process.read_keepalives(read_end)
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

    def _watch(self, pid: int, pidfd: int, keepalives: int) -> tuple[str, bool]:
        """Until the stage has ended. Why it was killed ("" when it was not), and whether it reported readiness."""
        last_keepalive = last_check = self._clock()
        allowance_s = FIRST_KEEPALIVE_S
        kill_at = float("inf")
        reason = ""
        is_stopping = was_ready = False
        descendants = procfs.Descendants(exist=True, stopped=0)
        while True:
            tick_s = TICK_S
            if not (is_stopping or reason):
                idle_s = DESCENDANTS_TICK_S if descendants.exist else KEEPALIVE_TICK_S
                idle_s = min(idle_s, allowance_s / 4)
                if idle_s >= timer_coalescing.ALIGN_S:
                    tick_s = timer_coalescing.until_aligned(self._clock(), idle_s)
            ready = self.wait(tick_s)
            if pidfd in ready:
                return reason, was_ready
            now = self._clock()
            # Time in which the supervisor did not run (a suspended machine) does not count as the stage's silence.
            last_keepalive += max(0.0, now - last_check - tick_s - 1.0)
            last_check = now
            keepalive = process.read_keepalives(keepalives)
            if keepalive is not None:
                last_keepalive, allowance_s, was_ready = now, keepalive.allowance_ms / 1000, keepalive.was_ready
            if (self.stop_requests or self.restart_requested) and not is_stopping:
                is_stopping = True
                kill_at = now + self._drain_s
                signal.pidfd_send_signal(pidfd, signal.SIGTERM)
            if reason:
                continue
            if self.stop_requests > 1:
                reason = "was killed on a second signal"
            elif now >= kill_at:
                reason = "did not finish in time and was killed"
            elif _is_stopped(pidfd):
                reason = "was stopped (SIGSTOP) and has been killed"
            elif (descendants := procfs.descendants(pid)).stopped:
                reason = f"was killed because its process {descendants.stopped} was stopped"
            elif now - last_keepalive > allowance_s:
                reason = f"sent no keepalive for {now - last_keepalive:.1f} s and was killed"
            if reason:
                _kill(pid, pidfd)


def _is_stopped(pidfd: int) -> bool:
    try:
        return os.waitid(os.P_PIDFD, pidfd, os.WSTOPPED | os.WNOHANG) is not None
    except ChildProcessError:  # it has ended
        return False


def _kill(pid: int, pidfd: int) -> None:
    """Kill the stage and its group. It has not been waited for, so its pid cannot have been reused."""
    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def _fence(pid: int) -> None:
    """After the stage's end: kill all descendants and wait for them.

    Orphans have become children of this process, and so will their own children before `waitid` reports the death
    of their parent.
    """
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    while True:
        for child in procfs.children(os.getpid()):
            os.kill(child, signal.SIGKILL)
        try:
            os.waitid(os.P_ALL, 0, os.WEXITED)
        except ChildProcessError:
            return
