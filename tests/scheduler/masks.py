"""A mask writer in the test's process."""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import numpy as np

from pipeline.protocol.messages import Constraint
from shm import step_ring as sh
from shm.step_ring import StepsGeometry
from stages.scheduler.constraints import frames as f
from stages.scheduler.constraints.mask_writer import MaskWriter

from . import vocabularies
from .vocabularies import SIZE

PLAIN = Constraint("regex", "[a-z]{400}", "regex")
ROWS = 4
TEXT = list(random.Random(1).choices(b"ab", k=300))


def at_once(sequence: str, function: Callable[[], Any]) -> Future[Any]:
    future: Future[Any] = Future()
    try:
        future.set_result(function())
    except Exception as error:
        future.set_exception(error)
    return future


class Masks:
    """A mask writer with its rows, each of which has the tokens of `TEXT`."""

    def __init__(self, *constraints: Constraint, **settings: Any) -> None:
        self.steps = sh.blank_steps(StepsGeometry(2, ROWS, 2, len(TEXT) + 16, 2, mask_words=sh.mask_words(SIZE)))
        self.n_compiled = 0

        def compile_now(sequence: str, function: Callable[[], Any]) -> Future[Any]:
            self.n_compiled += 1
            return at_once(sequence, function)

        self.writer = MaskWriter(compile_now, 4, 4, **settings)
        self.writer.set_vocabulary("m", vocabularies.vocabulary())
        self.writer.set_rows("m", self.steps)
        self.failed: dict[str, f.Failed] = {}
        self.kept: dict[str, int] = {}
        for row, constraint in enumerate(constraints):
            self.steps.tokens[row, : len(TEXT)] = TEXT
            self.writer.handle(f.Open(str(row), "m", "tenant", constraint))

    def at(self, row: int, length: int, drafts: tuple[int, ...] = ()) -> bytes | None:
        """The mask after so many tokens; None: the sequence has failed."""
        self.writer.handle(f.Mask(str(row), row, 0, length, 1, drafts))
        self.writer.limit_memory()
        for answer in self.writer.answers:
            if isinstance(answer, f.Failed):
                self.failed[answer.sequence] = answer
            elif isinstance(answer, f.Kept):
                self.kept[answer.sequence] = answer.count
        self.writer.answers.clear()
        if str(row) in self.failed:
            return None
        assert self.steps.mask_ready[row, length % sh.MASK_SLOTS] == sh.mask_tag(1, length)
        return np.array(self.steps.masks[row, length % sh.MASK_SLOTS]).tobytes()
