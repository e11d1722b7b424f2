"""The bytes of each token, mapped: no object for each of them is made."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pipeline.models.vocabulary_tables import Tables


class TokenTable:
    """Bytes by token id; of a special token its name. Ids are below `len`."""

    def __init__(self, tables: Tables) -> None:
        """Raises `KeyError`, `ValueError` for tables that do not fit."""
        pieces, ends = tables["pieces"], tables["ends"]
        self.lengths: NDArray[np.int64] = np.diff(ends, prepend=0).astype(np.int64)
        if len(ends) and (int(ends[-1]) != len(pieces) or bool((ends[1:] < ends[:-1]).any())):
            raise ValueError(f"the tokens end at {int(ends[-1])} of {len(pieces)} bytes")
        self.data, self.ends = pieces.tobytes(), ends
        self._ends = ends.data

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, token: int) -> bytes:
        ends = self._ends
        return self.data[ends[token - 1] if token else 0 : ends[token]]
