"""The adapters that a worker group computes with: memory that all of its ranks share, and the table of what is in it.

Rank 0 makes it before it forks the others, which therefore have it at the same address.  It ends with the group, also
when that is killed.  kernels/adapter_table.py draws the table.  A slot's tag is stored last: kernels see a whole
adapter or none.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Sequence

import numpy as np

from pipeline.errors import ConfigError
from shm import words
from shm.arena import align
from shm.checkpoint import Index
from shm.step_ring import adapter_tag
from stages.worker.adapters.adapter import PARAM
from stages.worker.adapters.prepared import Prepared
from stages.worker.kernels import adapter_table as t
from stages.worker.kernels.formats import BY_ID, DENSE

_NO_RESERVE = 0x4000  # MAP_NORESERVE of Linux: pages that are never written take no memory


def used_bytes(base: Index, adapters: Iterable[Prepared]) -> int:
    """Bytes of the table and of the adapters; several names of one adapter count once."""
    sizes = {one.digest: align(one.data.size) for one in adapters}
    return align(8 * t.table_words(base.hyper.n_layers)) + sum(sizes.values())


class AdapterMemory:
    """The loaded adapters of one group. `address`: of the table, in this process and in all that it forks."""

    def __init__(self, base: Index, adapters: Sequence[Prepared]) -> None:
        """Load adapters for a model. Raises `ConfigError` for one that is not of this model, or for too many."""
        self._base = base
        self.max_rank = max((one.max_rank for one in adapters), default=0)
        self._used = align(8 * t.table_words(base.hyper.n_layers))
        nbytes = self._used + sum(align(one.data.size) for one in adapters) + 4096
        self._map = mmap.mmap(-1, nbytes, flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | _NO_RESERVE)
        self._bytes = np.frombuffer(self._map, np.uint8)
        self._words = self._bytes[: 8 * t.table_words(base.hyper.n_layers)].view(np.int64)
        self.address = self._bytes.ctypes.data
        self.digests: list[str] = []  # by slot
        for one in adapters:
            self._load(one)

    @property
    def nbytes(self) -> int:
        """Bytes in use."""
        return self._used

    def _load(self, adapter: Prepared) -> None:
        if adapter.digest in self.digests:
            return
        slot, tag = len(self.digests), adapter_tag(adapter.digest)
        if slot >= t.MAX_ADAPTERS:
            raise ConfigError(f"more than {t.MAX_ADAPTERS} adapters are configured for a model", PARAM)
        if tag in self._words[: t.MAX_ADAPTERS]:
            raise ConfigError(f"adapters {adapter.digest} and another one have the same tag; use one of them", PARAM)
        self._check(adapter)
        at = self._used
        self._bytes[at : at + adapter.data.size] = adapter.data
        self._used += align(adapter.data.size)
        n_layers = self._base.hyper.n_layers
        rows = self._words[t.MAX_ADAPTERS :].reshape(t.MAX_ADAPTERS, n_layers, len(t.TARGETS), t.PAIR_WORDS)
        base = self.address + at
        for pair in adapter.header.pairs:
            row = rows[slot, pair.layer, pair.target]
            row[t.A], row[t.A_FORMAT] = base + pair.a_offset, pair.a_format
            row[t.B], row[t.B_FORMAT] = base + pair.b_offset, pair.b_format
            row[t.PAIR_RANK] = pair.rank
            row[t.SCALE] = int(np.float32(pair.scale).view(np.uint32))
        self.digests.append(adapter.digest)
        words.fence()
        self._words[slot] = tag

    def _check(self, adapter: Prepared) -> None:
        """Compare every pair with the model's matrices: kernels check nothing again."""
        h = self._base.hyper
        dense = {one.id for one in DENSE}
        for pair in adapter.header.pairs:
            is_known = 0 <= pair.layer < h.n_layers and 0 <= pair.target < len(t.TARGETS) and pair.rank > 0
            is_known = is_known and abs(pair.scale) <= float(np.finfo(np.float32).max)
            name = f"blk.{pair.layer}.{t.TARGETS[pair.target]}.weight" if is_known else ""
            found = next((one for one in self._base.tensors if one.name == name), None)
            if found is None or (found.rows, found.columns) != (pair.rows, pair.columns):
                raise ConfigError(f"adapter {adapter.digest} is of another model; use one of this model", PARAM)
            for kind, offset, rows, columns in (
                (pair.a_format, pair.a_offset, pair.rank, pair.columns),
                (pair.b_format, pair.b_offset, pair.rows, pair.rank),
            ):
                end = offset + align(rows, 16) * columns * BY_ID[kind].source_bytes if kind in dense else -1
                if not 0 <= offset < end <= adapter.data.size:
                    raise ConfigError(f"adapter {adapter.digest}: its prepared file is damaged; remove it", PARAM)
