"""Keeps the worker groups of each loaded model version: `starling supervise worker`.

    worker pool (this process, one thread; follows the table of model versions)
    └── supervisor of one group of a version (supervisor.py: restarts, fencing; SIGKILL at the pool's death)
        └── rank 0 and its ranks

Versions that appear in the table are started.  Versions that leave it are stopped in order, and their files are
removed.  A member is forked from a process that has already loaded the worker's modules and compiled kernels, so
that loading a model pays for neither.  Where versions are loaded while the server runs, one spare group is forked
ahead (spare_group.py), and replaced `SPARE_AFTER_S` after it was taken; without it a member starts as usual.

The failure of a member that gives up is recorded in its failure file.  If its version is serving, it is started again
every `RETRY_S` and at SIGHUP, and the members of other serving versions go on; if there are none, the pool ends with
the member's exit code.  If its version is loading or retiring, it is not started again.  A member that was killed is
started again after all its descendants have ended.  SIGTERM and SIGINT stop all members in order, a second signal at
once; SIGHUP restarts every group.  Notifies systemd for all of them (`READY`, `WATCHDOG`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from pipeline import procfs
from pipeline.config import paths, server_cores
from pipeline.config.schema import Config
from pipeline.errors import ModelUnavailable
from pipeline.models import control_cores, versions, weight_copies, worker_groups
from pipeline.models.versions import ModelVersion
from pipeline.observe import logs, status
from pipeline.observe.log_levels import LogLevelFollower
from pipeline.runtime import arena_dir, process, run_dir, timer_coalescing
from pipeline.supervise import ancestors, base
from pipeline.supervise.base import SupervisorBase
from pipeline.supervise.restart_count import path_of
from pipeline.supervise.restart_policy import RestartPolicy
from pipeline.supervise.spare_group import Prepare, SpareGroup, fork_spare, run_version
from pipeline.supervise.supervisor import GRACE_S, preloaded, supervise

log = logging.getLogger("starling.worker_pool")

TICK_S = 0.1  # while a member starts or stops
IDLE_TICK_S = 5.0  # otherwise: changes of the table, signals and deaths wake the pool
RETRY_S = 60.0  # until a serving version that has given up is started again; its cause may be a full disk
FORK_RETRY_S = 1.0  # until a version is started again for which no process could be forked
SPARE_AFTER_S = 2.0  # from the start of a member to the fork of a spare, so that it takes no core from the member
EXIT_S = 0.4  # beyond a member's drain time, for the end of its supervisor: honcho kills the pool after 5 s


@dataclass
class Member:
    """The supervisor of one worker group of a version."""

    version: ModelVersion  # with the number of the group
    policy: RestartPolicy
    pid: int = 0  # 0: not running
    pidfd: int = -1
    started: float = 0.0
    not_before: float = 0.0  # of the next start
    kill_at: float = field(default=float("inf"))
    has_given_up: bool = False
    orphans: set[int] = field(default_factory=set)  # processes of its last run that were killed and have not ended

    @property
    def is_over(self) -> bool:
        """Whether no process of it is left."""
        return not (self.pid or self.orphans)


class WorkerPool(SupervisorBase):
    """`fork(version)` starts a supervisor and returns its pid. `only`: restrict the pool to that model.

    `fork_spare` returns a spare group; None: there can be none.
    """

    def __init__(
        self,
        config: Config,
        fork: Callable[[ModelVersion], int],
        watched_ancestors: list[int],
        only: str = "",
        clock: Callable[[], float] = time.monotonic,
        retry_s: float = RETRY_S,
        fork_spare: Callable[[], SpareGroup | None] = lambda: None,
        spare_after_s: float = SPARE_AFTER_S,
    ) -> None:
        super().__init__(watched_ancestors, clock)
        self._retry_s = retry_s
        self._config = config
        self._fork = fork
        self._only = only
        self._follower = versions.VersionFollower(config)
        self._run_dir = paths.run_dir(config)
        self._arena_dir = paths.arena_dir(config)
        self._drain_s = config.server.drain_timeout_ms / 1000 + GRACE_S + EXIT_S
        self._members: dict[str, Member] = {}  # by `ModelVersion.stage`
        self._fork_spare = fork_spare
        self._spare_after_s = spare_after_s
        self._spare: SpareGroup | None = None
        self._spare_policy = RestartPolicy(random.SystemRandom().random)
        self._next_spare = float("-inf")  # when it may be forked
        self._restart_at = float("-inf")  # when a restart was requested last
        self._stops_sent = 0  # stop requests that the members and systemd have been notified of
        self._code = process.EXIT_OK
        self._is_ready_sent = "NOTIFY_SOCKET" not in os.environ
        self._watchdog_s = process.watchdog_interval_s()
        self._next_watchdog = float("-inf")
        self._renames = -1  # readable when a file has been renamed into the run directory
        try:
            self._renames = process.open_rename_watch(self._run_dir)
            self.register(self._renames)
        except OSError as error:  # the number of inotify watches per user is limited
            log.warning("run directory cannot be watched, polling it", extra={"error": str(error)})

    def run(self) -> int:
        """Until a stop is requested (0 when all members ended with 0) or all serving members have given up."""
        self.install_signal_handlers()
        self._remove_files_of_old_versions()
        while True:
            self._follower.poll()
            is_stopping = self.stop_requests > 0  # a stop that is requested from here on needs another round
            self._reconcile()
            if is_stopping and self._spare is None and all(member.is_over for member in self._members.values()):
                self.ignore_restart_requests()
                return self._code
            if self._renames in self.wait(self._timeout_s()):
                os.read(self._renames, 65536)
            self._reap()
            self._notify_systemd()

    def _timeout_s(self) -> float:
        """How long `run` may wait when no event comes."""
        members = self._members.values()
        is_settled = not any(member.orphans for member in members) and all(
            member.has_given_up or (member.pid and member.kill_at == float("inf")) for member in members
        )
        is_settled = is_settled and (self._spare is None or self._spare.pid != 0)
        if self._renames < 0 or self.stop_requests or not is_settled or not self._is_ready_sent:
            return TICK_S
        is_missing = self._spare is None and self._needs_spare()
        until_spare_s = max(0.0, self._next_spare - self._clock()) if is_missing else float("inf")
        if self._watchdog_s or until_spare_s < IDLE_TICK_S:
            return min(IDLE_TICK_S, self._watchdog_s or IDLE_TICK_S, until_spare_s)
        return timer_coalescing.until_aligned(self._clock(), IDLE_TICK_S)

    # -------------------------------------------------------------- starting and stopping

    def _wanted(self) -> dict[str, ModelVersion]:
        versions = [one for one in self._follower.table.versions if not self._only or one.name == self._only]
        groups = [group for one in versions for group in worker_groups.of_version(self._config, one)]
        return {one.stage: one for one in groups}

    def _reconcile(self) -> None:
        """Start, stop and kill members so that they match the table."""
        now = self._clock()
        wanted = {} if self.stop_requests else self._wanted()
        for stage, member in list(self._members.items()):
            member.version = wanted.get(stage, member.version)
            if stage not in wanted and member.is_over:
                del self._members[stage]
                self._remove_files(stage, member.version.group_slug)
            elif stage not in wanted and member.pid and member.kill_at == float("inf"):
                member.kill_at = now + self._drain_s
                signal.pidfd_send_signal(member.pidfd, signal.SIGTERM)
            elif now >= member.kill_at and member.pid:
                signal.pidfd_send_signal(member.pidfd, signal.SIGKILL)
        if self.stop_requests > max(1, self._stops_sent):
            self._stops_sent = self.stop_requests
            self._signal_all(signal.SIGTERM)  # a second one: each member kills its group
        if self.restart_requested:
            self.restart_requested = False
            self._restart_at = now
            self._signal_all(signal.SIGHUP)
            for member in self._members.values():
                member.not_before = min(member.not_before, now)
        for version in wanted.values():
            member = self._members.get(version.stage) or self._add(version)
            if member.has_given_up and not member.pid and versions.take_start_request(self._run_dir, version.stage):
                member.not_before = min(member.not_before, now)
            may_start = not member.has_given_up or version.state == "serving"
            if member.is_over and may_start and now >= member.not_before:
                self._start(member)
        self._keep_spare()

    def _add(self, version: ModelVersion) -> Member:
        member = self._members[version.stage] = Member(version, RestartPolicy(random.SystemRandom().random))
        return member

    def _start(self, member: Member) -> None:
        member.started = self._clock()
        self._next_spare = max(self._next_spare, member.started + self._spare_after_s)
        spare = self._spare
        was_spare = spare is not None and spare.pid != 0 and spare.is_prepared and spare.give(member.version)
        if spare is not None and was_spare:
            member.pid, member.pidfd, self._spare = spare.pid, spare.pidfd, None
        else:
            try:
                pid = self._fork(member.version)
                member.pid, member.pidfd = pid, base.open_pidfd(pid)
            except OSError as error:
                self._fence(member)  # what a supervisor has started that was forked and killed at once
                member.not_before = member.started + FORK_RETRY_S
                facts = {"version": member.version.group_id, "error": str(error), "retry_s": FORK_RETRY_S}
                log.error("worker group cannot be started", extra=facts)
                return
            self.register(member.pidfd)
        facts = {"version": member.version.group_id, "supervisor": member.pid, "was_spare": was_spare}
        log.info("worker group started", extra=facts)

    def _signal_all(self, number: signal.Signals) -> None:
        for member in self._members.values():
            if member.pid:
                signal.pidfd_send_signal(member.pidfd, number)

    # -------------------------------------------------------------- the spare

    def _needs_spare(self) -> bool:
        """Whether versions are loaded while the server runs: one was, or a configured model waits for a request."""
        if self.stop_requests or self._only:
            return False
        waits = self._config.on_demand.enabled and any(not model.preload for model in self._config.models)
        return waits or self._follower.table.serial > 0

    def _keep_spare(self) -> None:
        """Fork a spare if there is none, and it is time; kill it when the pool stops."""
        spare = self._spare
        if spare is not None and self.stop_requests:
            spare.kill()
        if spare is None and self._needs_spare() and self._clock() >= self._next_spare:
            self._next_spare = self._clock() + self._retry_s  # if there is none now
            try:
                self._spare = spare = self._fork_spare()
            except OSError as error:  # too many processes or descriptors, or too little memory
                log.warning("no spare worker group", extra={"error": str(error), "retry_s": self._retry_s})
            if spare is not None:
                self._next_spare = float("-inf")
                self.register(spare.pidfd)

    def _reap_spare(self) -> None:
        """Collect a spare that has ended, and kill one that is stopped; another one follows, after growing pauses."""
        spare = self._spare
        if spare is None:
            return
        if spare.is_stopped:
            spare.kill()
        if spare.pid and os.waitid(os.P_PIDFD, spare.pidfd, os.WEXITED | os.WNOHANG) is not None:
            self.unregister(spare.pidfd)
            os.close(spare.pidfd)
            spare.pid, spare.pidfd = 0, -1
            spare.kill()  # its channel is closed
            now = self._clock()
            wait_s = self._spare_policy.after_death(now - spare.started)
            self._next_spare = max(self._next_spare, now + (self._retry_s if wait_s is None else wait_s))
            if not self.stop_requests:
                log.warning("the spare worker group has ended")
        if not spare.pid:
            self._fence(spare)
            if not spare.orphans:
                self._spare = None

    # -------------------------------------------------------------- ended members

    def _reap(self) -> None:
        """Collect ended members, kill what is left of them, decide what happens next."""
        self._reap_spare()
        for member in self._members.values():
            if member.orphans:
                self._fence(member)
            if not member.pid:
                continue
            ended = os.waitid(os.P_PIDFD, member.pidfd, os.WEXITED | os.WNOHANG)
            if ended is None:
                continue
            self.unregister(member.pidfd)
            os.close(member.pidfd)
            member.pid, member.pidfd = 0, -1
            self._fence(member)
            self._on_end(member, ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status)

    def _fence(self, member: Member | SpareGroup) -> None:
        """Kill the orphans of an ended member or spare, now children of this subreaper, and collect those that ended.

        The others keep the member from being started again.  The pool does not wait for them: on a busy machine it
        may take seconds until the threads and the memory of a process are gone, and other members must start.  Where
        another one has ended and is not collected yet, some may be its own: then both wait for all of them.
        """
        groups: list[Member | SpareGroup] = [*self._members.values()]
        if self._spare is not None:
            groups.append(self._spare)
        has_collected = True
        while has_collected:  # the children of an orphan that has ended are orphans, too
            children = set(procfs.children(os.getpid()))  # first: who lives after this has no orphans among them
            sharers = [one for one in groups if one is member or one.orphans & member.orphans or _has_ended(one)]
            others = {pid for one in groups if one not in sharers for pid in one.orphans}
            orphans = children - others - {one.pid for one in groups}
            for one in sharers:
                one.orphans = orphans
            has_collected = False
            for pid in orphans:
                with contextlib.suppress(ProcessLookupError, ChildProcessError):
                    os.kill(pid, signal.SIGKILL)
                    has_collected |= os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG) is not None

    def _on_end(self, member: Member, code: int) -> None:
        """`code`: exit code, or -signal."""
        version = member.version
        if self.stop_requests:
            if code and member.kill_at == float("inf"):
                self._code = self._code or process.EXIT_FATAL
            return
        was_stopped, member.kill_at = member.kill_at != float("inf"), float("inf")
        if version.stage not in self._wanted() or was_stopped:
            return  # it had left the table, and starts again if it is back
        facts = {"version": version.group_id, "code": code}
        if code == 0:  # it was stopped from outside: `starling down` stops all supervisors
            self.stop_requests = 1
        elif code < 0:
            wait_s = member.policy.after_death(self._clock() - member.started)
            member.has_given_up = wait_s is None
            member.not_before = self._clock() + (wait_s or 0.0)
            log.warning("supervisor of a worker group was killed", extra=facts)
        else:
            member.has_given_up = True
        if member.has_given_up:
            self._on_given_up(member, code, facts)

    def _on_given_up(self, member: Member, code: int, facts: dict[str, object]) -> None:
        version = member.version
        if versions.read_failure(self._run_dir, version.stage) is None:
            how = f"ended with code {code}" if code > 0 else f"died of {signal.Signals(-code).name}"
            error = ModelUnavailable(f"its worker group {how}; see its log (starling logs worker)")
            versions.write_failure(self._run_dir, version.stage, error)
        if version.state != "serving":
            log.error("worker group has given up", extra=facts)
        elif self._serving_remain():
            # A request that came between its end and this moment is for its next start, too.
            was_requested = self._restart_at > member.started
            member.not_before = self._clock() + (0.0 if was_requested else self._retry_s)
            log.error("worker group has given up, other models go on", extra={**facts, "retry_s": self._retry_s})
        else:
            log.error("worker groups of all serving versions have given up, stopping", extra=facts)
            self._code = code if code > 0 else process.EXIT_FATAL
            self.stop_requests = max(1, self.stop_requests)

    def _serving_remain(self) -> bool:
        """Whether a serving version runs or will be started without having given up."""
        for version in self._wanted().values():
            member = self._members.get(version.stage)
            if version.state == "serving" and (member is None or member.pid or not member.has_given_up):
                return True
        return False

    # -------------------------------------------------------------- files

    def _remove_files(self, stage: str, slug: str) -> None:
        """Remove what only that version used, unless a process of another pool runs it."""
        # A concurrent `cleanup.sweep` holds the lock for a moment, too; the process named in it has ended then.
        holder = run_dir.lock_holder(self._run_dir, stage)
        if holder and procfs.exists(holder):
            log.warning("a stage runs outside this pool, its files stay", extra={"supervised": stage, "holder": holder})
            return
        for path in (
            self._run_dir / f"{stage}.lock",
            self._run_dir / f"{stage}.status",
            path_of(self._run_dir, stage),
            versions.failure_path(self._run_dir, stage),
            versions.start_request_path(self._run_dir, stage),
            weight_copies.path_of(self._run_dir, stage),
            self._arena_dir / f"{stage}.metrics",
            self._arena_dir / f"{slug}.act",
            *self._arena_dir.glob(f".{slug}.act.*"),
        ):
            path.unlink(missing_ok=True)

    def _remove_files_of_old_versions(self) -> None:
        """At the start: files of versions from an earlier run that are not in the table."""
        if self._only:
            return
        wanted = self._wanted()
        for path in self._run_dir.glob("worker-*.lock"):
            if path.stem not in wanted:
                self._remove_files(path.stem, path.stem.removeprefix("worker-"))

    # -------------------------------------------------------------- systemd

    def _notify_systemd(self) -> None:
        now = self._clock()
        if self._watchdog_s and now >= self._next_watchdog:
            self._next_watchdog = now + self._watchdog_s
            process.sd_notify("WATCHDOG=1")
        if self.stop_requests and self._stops_sent == 0:
            self._stops_sent = 1
            process.notify_stopping(self._drain_s)
        if not self._is_ready_sent:
            ready = {record.stage for record in status.read_all(self._run_dir) if record.alive and record.ready}
            given_up = {key for key, member in self._members.items() if member.has_given_up}
            serving = [one for one in self._wanted().values() if one.state == "serving" and one.stage not in given_up]
            if all(one.stage in ready for one in serving):
                self._is_ready_sent = process.sd_notify("READY=1")


def _has_ended(one: Member | SpareGroup) -> bool:
    """Whether its supervisor has ended, and has not been collected."""
    return one.pid != 0 and os.waitid(os.P_PIDFD, one.pidfd, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


# ------------------------------------------------------------------ the process


def run_worker_pool(
    config: Config,
    run: Callable[[ModelVersion], Callable[[], int]],
    command: Callable[[ModelVersion], list[str]],
    preload: Callable[[], object],
    only: str = "",
    prepare_spare: Prepare = lambda in_child, finish: (),
) -> int:
    """Run the pool in this process; the exit code.

    `run(version)` returns the body of the worker process of a version's group, and `command(version)` the command line
    that starts it as a new program.  `preload`: as for `supervise`.  `prepare_spare`: as for `fork_spare`.
    """
    process.become_subreaper()
    process.use_short_time_slice()  # of its forks, too, until they compute: others wait for a version that starts
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # as in `supervise`: a fork would lose its threads
    logs.setup("worker-pool", config, in_background=True)
    run_dir.prepare(paths.run_dir(config))
    server_cores.store(config)
    arena_dir.prepare(config)
    watched_ancestors = ancestors.open_watched_ancestors()

    if not versions.read(config).versions:
        preloaded(preload)  # while the pool has nothing else to do: the first load need not wait for it

    def fork(version: ModelVersion) -> int:
        """Start a supervisor; its pid."""
        # Preload for every member: kernels that an earlier group has compiled are then loaded for this one.
        # `run` reads the table, which the version may have left: that must end the member, not the pool.
        with server_cores.left():
            body = (lambda: run_version(run, version)) if preloaded(preload) else None
            return base.fork(lambda: _supervise_version(config, body, command(version), version.stage))

    def spare() -> SpareGroup | None:
        """A spare group; None: it could only be a new program."""
        with server_cores.left():
            if not preloaded(preload):
                return None
            return fork_spare("worker", config, run, time.monotonic(), prepare_spare)

    pool = WorkerPool(config, fork, watched_ancestors, only, fork_spare=spare)
    pool.on_wake = LogLevelFollower(paths.run_dir(config), "worker", config.logging.level).poll
    control_cores.keep_parent(config)
    return pool.run()


def _supervise_version(config: Config, body: Callable[[], int] | None, command: list[str], stage: str) -> int:
    os.environ.pop("NOTIFY_SOCKET", None)  # the pool notifies systemd
    return supervise("worker", command, config, body, counted_as=stage)
