"""Tokens of running sequences, read from the scheduler's step arena (shm/step_ring.py)."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from shm.arena import Arena
from shm.step_ring import SERIAL, Steps, attach_steps


class TokenRows:
    """The rows of one model. Until `attach`, every row is unknown."""

    def __init__(self) -> None:
        self._arena: Arena | None = None
        self._steps: Steps | None = None

    def attach(self, path: Path, digest: bytes) -> None:
        """Read from this arena from now on. Raises `ArenaError` or `OSError`: then every row is unknown."""
        self.detach()
        self._arena, self._steps, _ = attach_steps(path, digest)

    def detach(self) -> None:
        """Close the arena. Idempotent."""
        if self._arena is not None:
            self._arena.close()
        self._arena = self._steps = None

    def known(self, row: int, n_tokens: int) -> tuple[np.ndarray, int] | None:
        """(tokens (n,) int32, serial) of a row that the scheduler does not change meanwhile; None out of bounds."""
        steps = self._steps
        if steps is None or not self._is_within(steps, row, n_tokens):
            return None
        return steps.tokens[row, :n_tokens].copy(), int(steps.row_ints[row, SERIAL])

    def read(self, row: int, serial: int, begin: int, end: int) -> np.ndarray | None:
        """Tokens [begin, end) of the sequence with this serial; None when the row belongs to another sequence.

        The scheduler stores the serial of a row's new sequence before its tokens.  If the old serial is still there
        after the copy, none of the copied tokens is the new sequence's.
        """
        steps = self._steps
        if steps is None or not self._is_within(steps, row, end):
            return None
        tokens = steps.tokens[row, begin:end].copy()
        return tokens if int(steps.row_ints[row, SERIAL]) == serial else None

    @staticmethod
    def _is_within(steps: Steps, row: int, n_tokens: int) -> bool:
        rows, columns = steps.tokens.shape
        return 0 <= row < rows and 0 < n_tokens <= columns
