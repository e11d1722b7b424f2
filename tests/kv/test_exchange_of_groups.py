"""Pages of a sequence with layer groups in another engine."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np

from pipeline.protocol import messages as m
from shm.layer_groups import LayerGroups
from shm.pages import KV_SPLIT, KvGeometry, first_read
from shm.prefix_hash import root_hasher
from stages.agent.held_prefixes import read_names
from stages.kv.lease import Grant
from stages.kv.manager import Manager
from stages.kv.pool.page_pool import PagePool
from tests.kv.engine_side import REQUEST, Side
from tests.kv.grouped import AHEAD, TOKENS, WINDOW, page_of
from tests.kv.world import DIGEST, PAGE_BYTES, PAGE_TOKENS

GEOMETRY = KvGeometry(4, 1, 32, PAGE_TOKENS, "f16", 3)
GROUPS = LayerGroups(4, 1)
CACHED = 40  # places
LOW = first_read(CACHED * PAGE_TOKENS, WINDOW) // PAGE_TOKENS


class GroupSide(Side):
    """An engine whose model has a window in three of four layers."""

    def __init__(self, folder: Path, name: str, n_pages: int = 200) -> None:
        super().__init__(folder, name, GEOMETRY, n_pages)
        assert GEOMETRY.groups == GROUPS
        assert GEOMETRY.page_bytes == PAGE_BYTES
        self.manager = self.loaded.manager = Manager(
            PagePool(self.views), PAGE_TOKENS, root_hasher(DIGEST, GEOMETRY), self.rows.read, groups=GROUPS
        )
        tokens = np.array(TOKENS, np.int32)
        self.loaded.pages.rows = SimpleNamespace(known=lambda row, n: (tokens[:n], 1))

    def begin(self, sequence: str = f"{REQUEST}/0~1", salt: str = "", window: int = 0) -> bool:
        frame = m.Acquire(1, "tiny", sequence, 0, len(TOKENS), len(TOKENS), salt, window=window)
        return self.exchange.begin(self.loaded, frame)

    def grant(self, sequence: str) -> Grant:
        serial = self.rows.take(0, TOKENS)
        found = self.manager.acquire(
            sequence, np.array(TOKENS, np.int32), len(TOKENS), 0, serial, window=WINDOW, ahead=AHEAD
        )
        assert isinstance(found, Grant)
        return found

    def compute_long(self, sequence: str) -> None:
        grant = self.grant(sequence)
        for begin in range(0, len(TOKENS), AHEAD):
            end = min(begin + AHEAD, len(TOKENS))
            answer = self.manager.extend(sequence, end)
            assert isinstance(answer, Grant)
            grant = answer
            for at in range(begin // PAGE_TOKENS * GROUPS.n_groups, end // PAGE_TOKENS * GROUPS.n_groups):
                place, group = divmod(at, GROUPS.n_groups)
                self.views.pages[grant.pages[at]] = page_of(TOKENS, place, group)
            self.manager.commit(sequence, end, first_read(end, WINDOW))


def test_pages_of_all_groups_that_a_sequence_reads_are_sent_and_used(tmp_path: Path) -> None:
    source = GroupSide(tmp_path, "source")
    source.compute_long(f"{REQUEST}/0~1")
    found = source.found()  # without what is cached behind the window, except for the last KV split
    assert found.head.n_pages == GROUPS.n_pages(CACHED, LOW - KV_SPLIT // PAGE_TOKENS)
    path = tmp_path / "sent"
    path.write_bytes(b"".join(found.read()))
    for name, n_pages, expected in (("target", 200, CACHED), ("small", 60, 0)):  # the second one lacks room for them
        target = GroupSide(tmp_path, name, n_pages)
        offered = target.exchange.take({"model": "tiny", "request": REQUEST, "path": str(path)})
        assert offered == {"pages": found.head.n_pages}
        target.use(window=WINDOW)
        if expected:
            grant = target.grant("s")
            assert grant.cached_tokens == expected * PAGE_TOKENS
            for at, page in enumerate(grant.pages[: CACHED * GROUPS.n_groups]):
                place, group = divmod(at, GROUPS.n_groups)
                if group < GROUPS.full or place >= LOW:
                    np.testing.assert_array_equal(target.views.pages[page], page_of(TOKENS, place, group))
        target.manager.check()
        target.exchange.close()


def test_an_engine_publishes_the_names_of_the_first_group(tmp_path: Path) -> None:
    source = GroupSide(tmp_path, "source")
    source.compute_long(f"{REQUEST}/0~1")
    hashes = source.manager.leases[f"{REQUEST}/0~1"].hashes[:CACHED]
    assert read_names(tmp_path) == {int.from_bytes(page_hash[:8], "little") for page_hash in hashes}
