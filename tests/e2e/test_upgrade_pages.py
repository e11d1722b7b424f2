"""KV pages that the previous release has saved are found by this one, and this one's by the previous one.

The stores of both releases open the same file in turn. Whether the pages are those that a server would compute, and
whether a server of each release uses those of the other, is in test_upgrade_servers.py.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from shm.pages import PAGE_HEADER, KvGeometry
from shm.prefix_hash import page_hashes, root_hash
from stages.kv.pool.page_headers import PageHeaders, PageIdentity, checksum
from stages.kv.storage.disk_store import DiskPageStore
from stages.kv.storage.persist import IN_STATE, file_identity, store_path
from tests.e2e import previous_release

pytestmark = pytest.mark.slow

MODEL = bytes(range(32))  # a digest
GEOMETRY = KvGeometry(1, 1, 32, 32, "f16")
FIRST, SECOND = range(64), range(100, 196)  # tokens of two prompts: two pages and three
MAX_BYTES = 1 << 20

OLD = """
import json, sys
from pathlib import Path
import numpy as np
from shm.pages import PAGE_HEADER, KvGeometry
from stages.kv.headers import Headers, PageName, checksum
from stages.kv.persist import IN_STATE, identity, store_path
from stages.kv.prefix import chain, root
from stages.kv.spill import PageStore

action, home = sys.argv[1], Path(sys.argv[2])
geometry = KvGeometry(*GEOMETRY)
path = store_path(home / "state/kv", "m", MODEL.hex(), geometry)
store = PageStore(path, identity(MODEL.hex(), geometry), geometry.page_bytes, MAX_BYTES, IN_STATE, lambda: 0.0)
start = root(MODEL, geometry, "")
found = {}
for tokens in (FIRST, SECOND):
    parent = start
    for ordinal, digest in enumerate(chain(start, np.array(tokens), geometry.page_tokens)):
        content = np.zeros(geometry.page_bytes, np.uint8)
        if action == "write" and tokens == FIRST:
            content[:] = ordinal + 1
            header = np.zeros((1, PAGE_HEADER), np.uint8)
            headers = Headers(header)
            headers.lease([0], start, 1, 1, 1)
            headers.publish(0, PageName(start, parent, digest, checksum(content), ordinal, geometry.page_tokens))
            assert store.put(digest, headers.record(0), content)
        elif action == "read":
            name = store.fetch(digest, content)
            found[digest.hex()] = name and [name.ordinal, sorted(set(content.tolist()))]
        parent = digest
found["damaged"] = store.counters.damaged
store.close()
print(json.dumps(found))
"""
for name in ("GEOMETRY", "MODEL", "MAX_BYTES", "FIRST", "SECOND"):
    OLD = OLD.replace(name, repr(tuple(globals()[name])[:5] if name == "GEOMETRY" else globals()[name]))


def open_store(home: Path) -> DiskPageStore:
    path = store_path(home / "state/kv", "m", MODEL.hex(), GEOMETRY)
    identity = file_identity(MODEL.hex(), GEOMETRY)
    # By a clock that stands still no disk is slow: a store pauses after a slow page.
    return DiskPageStore(path, identity, GEOMETRY.page_bytes, MAX_BYTES, IN_STATE, lambda: 0.0)


def test_saved_pages_survive_the_upgrade_and_the_way_back(tmp_path: Path) -> None:
    tree = previous_release.unpack(tmp_path / "v0.1.0")
    home = tmp_path / "home"
    previous_release.run(tree, OLD, "write", home)
    start = root_hash(MODEL, GEOMETRY, "")
    first, second = (page_hashes(start, np.array(tokens), GEOMETRY.page_tokens) for tokens in (FIRST, SECOND))
    content = np.zeros(GEOMETRY.page_bytes, np.uint8)

    store = open_store(home)
    assert store.hashes() == first
    for ordinal, page_hash in enumerate(first):
        identity = store.fetch(page_hash, content)
        assert identity is not None
        assert (identity.ordinal, set(content.tolist())) == (ordinal, {ordinal + 1})
    store.add_uses((page_hash, 3, 10) for page_hash in first)
    parent = start
    for ordinal, page_hash in enumerate(second):
        content[:] = 100 + ordinal
        headers = PageHeaders(np.zeros((1, PAGE_HEADER), np.uint8))
        headers.lease([0], start, 1, 1, 1)
        identity = PageIdentity(start, parent, page_hash, checksum(content), ordinal, GEOMETRY.page_tokens)
        headers.mark_full(0, identity)
        assert store.save(page_hash, headers.record(0), content)
        parent = page_hash
    assert store.counters.damaged == 0
    store.close()

    found = previous_release.run(tree, OLD, "read", home)
    assert found.pop("damaged") == 0
    expected = [[ordinal, [1 + ordinal]] for ordinal in range(2)] + [[ordinal, [100 + ordinal]] for ordinal in range(3)]
    assert found == {page_hash.hex(): page for page_hash, page in zip([*first, *second], expected, strict=True)}
