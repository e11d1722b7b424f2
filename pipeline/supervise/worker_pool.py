"""Keeps a worker group for each instance of a model: `starling supervise worker`.

    crew (this process, one thread; knows the record of loaded models, version_table.py)
    └── supervisor of an instance (supervisor.py: restarts, fencing; SIGKILL at our death)
        └── rank 0 and its ranks

What the record names is started, what it does not name any more is ended in order and its leftovers are
removed.  A member is forked from a process that has the worker's modules and compiled kernels already, so
that loading a model costs neither.

A member that gives up while its instance is still being loaded, or has been replaced, is noted (its failure
file) and left; of an instance that serves, it ends the crew with its exit code, loudly.  A member
that is killed is started again, once nothing of it is left.  SIGTERM and SIGINT end all in order, a second
one at once; SIGHUP restarts every group.  Speaks to systemd for all of them (`READY`, `WATCHDOG`).
"""

from __future__ import annotations

import logging
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from pipeline import procfs
from pipeline.config import paths
from pipeline.config.schema import Config
from pipeline.errors import ModelUnavailable
from pipeline.models import versions
from pipeline.models.versions import ModelVersion
from pipeline.observe import logs, status
from pipeline.runtime import process, run_dir, timer_coalescing
from pipeline.supervise import ancestors, base
from pipeline.supervise.base import SupervisorBase
from pipeline.supervise.restart_policy import RestartPolicy
from pipeline.supervise.supervisor import GRACE_S, preloaded, supervise

log = logging.getLogger("starling.crew")

TICK_S = 0.1  # while somebody comes or goes
REST_S = 5.0  # else: new records, signals and deaths wake us
LAST_S = 1.0  # beyond a member's own time for its end

Run = Callable[[ModelVersion], Callable[[], int]]  # what the stage's process of an instance does


@dataclass
class Member:
    """A supervisor of an instance's group."""

    instance: ModelVersion
    policy: RestartPolicy
    pid: int = 0  # 0: it does not run
    pidfd: int = -1
    begun: float = 0.0
    not_before: float = 0.0
    kill_at: float = field(default=float("inf"))
    has_given_up: bool = False


class WorkerPool(SupervisorBase):
    """`fork(instance)` starts a supervisor and returns its pid. `only`: of that model alone."""

    def __init__(
        self,
        config: Config,
        fork: Callable[[ModelVersion], int],
        watched_ancestors: list[int],
        only: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(watched_ancestors, clock)
        self._config = config
        self._fork = fork
        self._only = only
        self._follower = versions.VersionFollower(config)
        self._run_dir = paths.run_dir(config)
        self._arena_dir = paths.arena_dir(config)
        self._drain_s = config.server.drain_timeout_ms / 1000 + GRACE_S + LAST_S
        self._members: dict[str, Member] = {}
        self._told = 0
        self._code = process.EXIT_OK
        self._is_announced = "NOTIFY_SOCKET" not in os.environ
        self._watchdog_s = process.watchdog_interval_s()
        self._next_watchdog = float("-inf")
        self._records = -1  # readable when a record has been placed in the run directory
        try:
            self._records = process.open_rename_watch(self._run_dir)
            self.register(self._records)
        except OSError as error:  # of these a user may have only so many
            log.warning("new records are looked for, not heard of", extra={"error": str(error)})

    def run(self) -> int:
        """Until told to stop (0 when all ended well), or until a member that is needed gives up."""
        self.take_signals()
        self._remove_strangers()
        while True:
            self._follower.poll()
            self._reconcile()
            if self.stop_requests and not any(member.pid for member in self._members.values()):
                return self._code
            if self._records in self.look(self._patience_s()):
                os.read(self._records, 65536)
            self._reap()
            self._tell_systemd()

    def _patience_s(self) -> float:
        """How long nothing has to be looked after, if nothing is heard."""
        members = self._members.values()
        is_settled = all(member.has_given_up or (member.pid and member.kill_at == float("inf")) for member in members)
        if self._records < 0 or self.stop_requests or not is_settled or not self._is_announced:
            return TICK_S
        return (
            timer_coalescing.until_aligned(self._clock(), REST_S)
            if not self._watchdog_s
            else min(REST_S, self._watchdog_s)
        )

    # -------------------------------------------------------------- what there should be

    def _wanted(self) -> dict[str, ModelVersion]:
        return {one.id: one for one in self._follower.table.versions if not self._only or one.name == self._only}

    def _reconcile(self) -> None:
        now = self._clock()
        wanted = {} if self.stop_requests else self._wanted()
        for instance_id, member in list(self._members.items()):
            member.instance = wanted.get(instance_id, member.instance)
            if instance_id not in wanted and not member.pid:
                self._forget(member)
            elif instance_id not in wanted and member.kill_at == float("inf"):
                member.kill_at = now + self._drain_s
                signal.pidfd_send_signal(member.pidfd, signal.SIGTERM)
            elif now >= member.kill_at and member.pid:
                signal.pidfd_send_signal(member.pidfd, signal.SIGKILL)
        if self.stop_requests > max(1, self._told):
            self._told = self.stop_requests
            self._signal_all(signal.SIGTERM)  # a second one: each kills its group
        if self.restart_requested:
            self.restart_requested = False
            self._signal_all(signal.SIGHUP)
        for instance in wanted.values():
            member = self._members.get(instance.id) or self._join(instance)
            if not member.pid and not member.has_given_up and now >= member.not_before:
                self._begin(member)

    def _join(self, instance: ModelVersion) -> Member:
        member = self._members[instance.id] = Member(instance, RestartPolicy(random.SystemRandom().random))
        return member

    def _begin(self, member: Member) -> None:
        member.begun = self._clock()
        member.pid = self._fork(member.instance)
        member.pidfd = os.pidfd_open(member.pid)
        self.register(member.pidfd)
        log.info("worker group begins", extra={"instance": member.instance.id, "supervisor": member.pid})

    def _signal_all(self, number: signal.Signals) -> None:
        for member in self._members.values():
            if member.pid:
                signal.pidfd_send_signal(member.pidfd, number)

    # -------------------------------------------------------------- what has ended

    def _reap(self) -> None:
        for member in self._members.values():
            if not member.pid:
                continue
            ended = os.waitid(os.P_PIDFD, member.pidfd, os.WEXITED | os.WNOHANG)
            if ended is None:
                continue
            self.unregister(member.pidfd)
            os.close(member.pidfd)
            member.pid, member.pidfd = 0, -1
            self._fence()
            self._judge(member, ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status)

    def _fence(self) -> None:
        """End what a killed member has left to us (we are the subreaper) and wait for it."""
        mine = {member.pid for member in self._members.values()}
        while strangers := [pid for pid in procfs.children(os.getpid()) if pid not in mine]:
            for pid in strangers:
                try:
                    os.kill(pid, signal.SIGKILL)
                    os.waitid(os.P_PID, pid, os.WEXITED)
                except (ProcessLookupError, ChildProcessError):
                    pass

    def _judge(self, member: Member, code: int) -> None:
        instance = member.instance
        if self.stop_requests:
            if code and member.kill_at == float("inf"):
                self._code = self._code or process.EXIT_FATAL
            return
        if instance.id not in self._wanted():
            return
        facts = {"instance": instance.id, "code": code}
        if code == 0:  # somebody ended it by itself: `starling down` ends all supervisors
            self.stop_requests = 1
        elif code < 0:
            wait_s = member.policy.after_death(self._clock() - member.begun)
            member.has_given_up = wait_s is None
            member.not_before = self._clock() + (wait_s or 0.0)
            log.warning("the supervisor of a worker group has died", extra=facts)
        else:
            member.has_given_up = True
        if not member.has_given_up:
            return
        if instance.state == "serving":
            log.error("a worker group has given up, and all ends with it", extra=facts)
            self._code = code if code > 0 else process.EXIT_FATAL
            self.stop_requests = max(1, self.stop_requests)
            return
        log.error("a worker group has given up", extra=facts)
        if versions.read_failure(self._run_dir, instance.stage) is None:
            how = f"ended with code {code}" if code > 0 else f"died of {signal.Signals(-code).name}"
            why = ModelUnavailable(f"its worker group {how}; its log says why (starling logs worker)")
            versions.note_failure(self._run_dir, instance.stage, why)

    def _forget(self, member: Member) -> None:
        """Its instance is gone: remove what only it used."""
        del self._members[member.instance.id]
        self._remove(member.instance.stage, member.instance.slug)

    def _remove(self, stage: str, slug: str) -> None:
        """Unless somebody is that stage: a crew that was started beside a running one has nothing of its own here."""
        # Who sweeps (leftovers.py) has the lock too, for a moment; the process named in it is gone then.
        holder = run_dir.lock_holder(self._run_dir, stage)
        if holder and procfs.exists(holder):
            log.warning("%s runs here, and not as one of ours: its files stay", stage, extra={"holder": holder})
            return
        for path in (
            self._run_dir / f"{stage}.lock",
            self._run_dir / f"{stage}.status",
            versions.failure_path(self._run_dir, stage),
            self._arena_dir / f"{stage}.metrics",
            self._arena_dir / f"{slug}.act",
            *self._arena_dir.glob(f".{slug}.act.*"),
        ):
            path.unlink(missing_ok=True)

    def _remove_strangers(self) -> None:
        """At the start: what instances of an earlier life have left that are not wanted any more."""
        if self._only:
            return
        wanted = {one.stage for one in self._wanted().values()}
        for path in self._run_dir.glob("worker-*.lock"):
            if path.stem in wanted:
                continue
            self._remove(path.stem, path.stem.removeprefix("worker-"))

    # -------------------------------------------------------------- systemd

    def _tell_systemd(self) -> None:
        now = self._clock()
        if self._watchdog_s and now >= self._next_watchdog:
            self._next_watchdog = now + self._watchdog_s
            process.sd_notify("WATCHDOG=1")
        if self.stop_requests and self._told == 0:
            self._told = 1
            process.sd_notify("STOPPING=1")
        if not self._is_announced:
            ready = {record.stage for record in status.read_all(self._run_dir) if record.alive and record.ready}
            serving = [one for one in self._wanted().values() if one.state == "serving"]
            if all(one.stage in ready for one in serving):
                self._is_announced = process.sd_notify("READY=1")


# ------------------------------------------------------------------ the process


def keep(config: Config, run: Run, preload: Callable[[], object], only: str = "") -> int:
    """The crew's whole life, in this process; the exit code. `preload`: as for `supervise`."""
    process.become_subreaper()
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # as in supervise: a fork would lose its threads
    logs.setup("worker-crew", config)
    run_dir.prepare(paths.run_dir(config))
    watched_ancestors = ancestors.open_watched_ancestors()
    can_fork = False

    def fork(instance: ModelVersion) -> int:
        nonlocal can_fork
        # Again for each: what an earlier group has compiled is there for this one.
        can_fork = preloaded(preload)
        return _fork(config, instance, run(instance) if can_fork else None)

    return WorkerPool(config, fork, watched_ancestors, only).run()


def _fork(config: Config, instance: ModelVersion, run: Callable[[], int] | None) -> int:
    """A supervisor of the instance, as a copy of this process."""

    def live() -> int:
        os.environ.pop("NOTIFY_SOCKET", None)
        command = [sys.executable, "-m", "starling", "stage", "worker", "--model", instance.id]
        return supervise("worker", command, config, run)

    return base.fork(live)
