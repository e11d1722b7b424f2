"""What an engine has for each worker group of its model, and how sequences get from group to group.

    queue --(row)--> a group that is attached --(its steps are void, and it is not attached)--> another one

A sequence belongs to one group at a time, whose steps alone compute it: it leaves its group only after `detached`,
when no process of the group computes a step any more.  Its row stays, so the next group goes on from there.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Iterable, Sequence
from functools import partial
from typing import NamedTuple

from stages.scheduler.core.outbox import Outbox
from stages.scheduler.core.sequence import SequenceState
from stages.scheduler.core.sequence_table import SequenceTable, age
from stages.scheduler.core.step_log import StepLog
from stages.scheduler.core.step_loop import StepLoop
from stages.scheduler.core.worker_link import WorkerLink
from stages.scheduler.policy.group_choice import least_loaded
from stages.scheduler.policy.queues import TenantQueues
from stages.scheduler.policy.tenant import Tenant
from stages.scheduler.recovery.quarantine import Quarantine
from stages.scheduler.stats import Stats


class EngineGroup(NamedTuple):
    """The engine's part for one worker group."""

    link: WorkerLink
    members: list[SequenceState]  # the scheduled sequences that it computes, oldest first
    steps: StepLoop
    quarantine: Quarantine
    step_log: StepLog


class EngineGroups:
    """The groups of one engine. With one of them there is nothing to choose, and `worker` is its link."""

    def __init__(
        self,
        worker: WorkerLink,
        groups: Sequence[EngineGroup],
        queues: TenantQueues,
        table: SequenceTable,
        outbox: Outbox,
        stats: Stats,
    ) -> None:
        self.all = tuple(groups)
        self._worker = worker
        self._outbox = outbox
        self._stats = stats
        self._queues = queues
        self._unscheduled: list[Sequence[Tenant]] = [()] * len(groups)
        self._members = [group.members for group in groups]
        # Groups that may compute a step although they are not attached: between `halt` and `detached`.
        self._halted: set[int] = set()
        table.choose_group = self._choose
        if len(self.all) > 1:
            table.responds = self._responds
            for number, group in enumerate(self.all):
                group.steps.settle = partial(self._settle, number)

    def attached(self, number: int) -> None:
        """A group reads its ring from now on."""
        if self.all[0].link.first_attached == -math.inf:
            for group in self.all:
                group.link.first_attached = self._outbox.now
        self.all[number].link.is_attached = True
        if len(self.all) > 1:
            self._halted.discard(number)
            self._worker.is_attached = True
            for other in range(len(self.all)):
                self._move_members(other)

    def halted(self, number: int, now: float) -> None:
        """Nothing more is published for the group; it may still compute a step."""
        link = self.all[number].link
        if link.is_attached:
            link.detached_since = now
            self._halted.add(number)
            if (
                link.ring is not None and link.ring.has_worker
            ):  # else it was about to attach, perhaps for the tenth time
                self._worker.detached_since = now
        link.is_attached = False
        if len(self.all) > 1 and self._worker.is_attached and not any(group.link.is_attached for group in self.all):
            self._worker.is_attached = False

    def detached(self, number: int) -> None:
        """The group is halted and computes no step any more: its sequences go on in others, if any is attached."""
        self._halted.discard(number)
        self._move_members(number)

    def _settle(self, number: int, unscheduled: Sequence[Tenant]) -> None:
        """A tenant whose sequence found no place in the last step of its group waits, whatever other groups compute."""
        self._unscheduled[number] = unscheduled
        groups = zip(self.all, self._unscheduled, strict=True)
        self._queues.settle([tenant for group, waiting in groups if group.members for tenant in waiting])

    def _responds(self, sequence: SequenceState) -> bool:
        link = self.all[sequence.run.group].link
        return link.is_attached and not link.is_stalled

    def _choose(self) -> int:
        """The group for a sequence that is scheduled now; some group must be attached.

        One that computes, if there is one: another may still be mapping its arenas, or hang in a step.
        """
        attached = [number for number, group in enumerate(self.all) if group.link.is_attached]
        computing = [number for number in attached if self._computes(self.all[number].link)]
        return least_loaded(self._members, computing or attached, self._stats.mean_output) if attached else 0

    @staticmethod
    def _computes(link: WorkerLink) -> bool:
        return link.ring is not None and link.ring.has_worker and not link.is_stalled

    def _move_members(self, number: int) -> None:
        group = self.all[number]
        if group.link.is_attached or number in self._halted or not self._worker.is_attached or not group.members:
            return
        moved = [sequence for sequence in group.members if not sequence.run.inflight]
        for sequence in moved:
            to = self.all[target := self._choose()]
            group.members.remove(sequence)
            sequence.run.group = target
            insort(to.members, sequence, key=age)
        for one in self.all:
            one.quarantine.update(one.members)
        self.record(moved, "started", self._outbox.now)

    def record(self, sequences: Iterable[SequenceState], name: str, at: float) -> None:
        """For the timelines of their requests: the group that computes them is "lost", or has "started"."""
        for sequence in {sequence.request: sequence for sequence in sequences if not sequence.is_done}.values():
            self._outbox.add_event(sequence, name, at, pid=self.all[sequence.run.group].link.pid)
