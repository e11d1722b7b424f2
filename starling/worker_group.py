"""A worker group inside one process: the ranks of one model as threads, over arenas that the caller made.

    group = WorkerGroup(model, arenas)
    group.compute(step)        # a step that has been published in the steps arena
    group.close()

The thread that calls `compute` is rank 0; every other rank is a thread of its own.  Compiled kernels release
Python's interpreter lock, so ranks compute in parallel.  No sockets, no other processes, no scheduler.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Self

from shm import step_ring as sh
from shm import words
from stages.worker import activations_arena as act
from stages.worker.kernels import compiled
from stages.worker.model import Arenas, Model, RankTable
from stages.worker.rank_places import node_of

FOLLOW_NS = 60_000_000_000  # how long a rank stays in compiled code without a step before it returns to Python
NO_LIMIT_NS = 3_600_000_000_000  # for `compute_ready`: effectively until the last published step


class WorkerGroup:
    """Computes the steps of one model. Not thread-safe: one thread at a time calls it. A context manager.

    `tables` holds each rank's parameter block, rank 0 first; with `profile` each counts the cycles that its rank
    spends in the phases of a step (`RankTable.phases`).
    """

    def __init__(
        self,
        model: Model,
        arenas: Arenas,
        profile: bool = False,
        clusters: Sequence[int] = (),
        nodes: Sequence[int] = (),
        copies: Sequence[Model] = (),
    ) -> None:
        """Compiled kernels must be in the cache. The number of ranks is `arenas.geometry.ranks`.

        clusters: the number of ranks of each cluster of the barrier; none: it has no clusters.
        nodes: likewise of each memory node, as many as `arenas.geometry.nodes`; none: there is one.
        copies: the model with the weights of each node; none: all ranks use those of `model`.
        Raises `ValueError` when model and arenas do not belong together.
        """
        self.model, self.arenas = model, arenas
        self.ranks = arenas.geometry.ranks
        act.set_up(act.control_words(arenas.activations), self.ranks, clusters, nodes)
        models = [copies[node_of(nodes, rank)] if copies else model for rank in range(self.ranks)]
        self.tables = [RankTable(own, arenas, rank, profile) for rank, own in enumerate(models)]
        self._control = arenas.activations.buffer.ctypes.data
        self._number = 0  # of the last announcement: even for a step, odd for a return to Python
        self._is_closing = False
        self.threads = [
            threading.Thread(target=self._follow, args=(table,), name=f"rank {table.rank}", daemon=True)
            for table in self.tables[1:]
        ]
        for thread in self.threads:
            thread.start()

    def compute(self, step: int) -> int:
        """Compute one published step (again, if it is computed already) and acknowledge it.

        Returns how many of its entries were refused because a number in them was out of bounds.

        """
        refused = self._lead(step, 0, 0, -1)
        words.store(self.arenas.steps.control, sh.DONE, step)
        return refused

    def compute_ready(self, first: int, bell: int = -1) -> tuple[int, int]:
        """Compute step `first` and the published steps after it without returning to Python between them.

        `bell`: a connected datagram socket that is rung after the step that `WAKE_AT` names; without one (-1),
        or when ringing fails, computing stops there.  Returns the last step computed and how many of its entries
        were refused, which ends the run.
        """
        control = self.arenas.steps.control
        refused = self._lead(first, NO_LIMIT_NS, control.ctypes.data, bell)
        done = words.load(control, sh.DONE)
        self._number += 2 * (done - first)
        return done, refused

    def _lead(self, step: int, limit_ns: int, ring: int, bell: int) -> int:
        self._number += 2
        timing = self.arenas.steps.timing.ctypes.data
        refused = compiled.run_steps(
            self.tables[0].address, self._control, self._number, step, timing, limit_ns, ring, bell
        )
        return int(refused)

    def _follow(self, table: RankTable) -> None:
        """The thread of a rank other than 0."""
        number = 0
        while not self._is_closing:
            number = compiled.run_steps(table.address, self._control, number, 0, 0, FOLLOW_NS, 0, -1)
            if number & 1:
                return

    def close(self) -> None:
        """End the threads. The arenas stay the caller's. Idempotent."""
        self._is_closing = True
        if self.threads:
            act.announce(act.control_words(self.arenas.activations), self._number + 1, self.ranks)
        for thread in self.threads:
            thread.join()
        self.threads = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
