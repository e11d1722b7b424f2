"""The pieces that the manager is made of: free list, order of eviction, names, headers, rows."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from shm import pages
from shm.pages import HEADER, PAGE_FULL, PAGE_HEADER, PAGE_LEASED
from shm.step_ring import SERIAL, StepsGeometry, create_steps
from stages.kv.pool import prefix_hash
from stages.kv.pool.allocator import Allocator
from stages.kv.pool.arena import open_arena, scan
from stages.kv.pool.eviction import Evictor
from stages.kv.pool.headers import Headers, PageName
from stages.kv.pool.prefix_hash import PageDigest
from stages.kv.pool.token_rows import Rows
from tests.kv.world import DIGEST, GEOMETRY

ROOT = Path(__file__).parents[2]


def name(ordinal: int = 0) -> PageName:
    digests = [PageDigest(bytes([i + ordinal]) * 16) for i in range(3)]
    return PageName(*digests, checksum=1 << 63, ordinal=ordinal, tokens=16)


# ------------------------------------------------------------------ allocator


def test_pages_are_given_out_in_order_and_come_back() -> None:
    a = Allocator(5)
    assert a.take(3) == [0, 1, 2]
    assert a.share(1) == 2
    assert a.drop(1, keep=True) == 1
    assert a.drop(1, keep=True) == 0
    assert a.drop(0, keep=False) == 0
    a.check()
    assert (a.free, a.cached, a.leased) == (3, 1, 1)
    assert a.take(1) == [0]  # the last one freed is the first one out: it is warm
    with pytest.raises(ValueError, match="5 pages asked for, 2 are free"):
        a.take(5)
    with pytest.raises(ValueError, match="neither leased nor cached"):
        a.share(4)


# ------------------------------------------------------------------ order of eviction


def unpinned(policy: str) -> Evictor:
    """Pages 1..5 as (uses, born), unpinned in this order."""
    evictor = Evictor(policy)
    for page, (uses, born) in enumerate([(2, 50), (1, 40), (3, 10), (1, 30), (2, 20)], 1):
        evictor.add(page, 100 * page, uses, born)
    return evictor


@pytest.mark.parametrize(
    ("policy", "order"),
    [("lru", [1, 2, 3, 4, 5]), ("lfu", [2, 4, 1, 5, 3]), ("fifo", [3, 5, 4, 2, 1])],
)
def test_exact_order(policy: str, order: list[int]) -> None:
    evictor = unpinned(policy)
    assert list(evictor.order()) == order
    assert [evictor.pop() for _ in range(5)] == order
    with pytest.raises(IndexError):
        evictor.pop()


@pytest.mark.parametrize("policy", ["lru", "lfu", "fifo"])
def test_a_page_that_was_used_again_takes_its_new_place(policy: str) -> None:
    evictor = unpinned(policy)
    evictor.remove(2)
    evictor.remove(1)
    evictor.add(2, 700, uses=9, born_ns=40)
    assert 1 not in evictor
    assert list(evictor.order()) == {"lru": [3, 4, 5, 2], "lfu": [4, 5, 3, 2], "fifo": [3, 5, 4, 2]}[policy]


@pytest.mark.parametrize("policy", ["lru", "lfu", "fifo"])
def test_age_is_since_the_last_use(policy: str) -> None:
    evictor = unpinned(policy)
    assert evictor.expired(before_ns=300) == [1, 2]
    assert len(evictor) == 5


def test_stale_entries_do_not_pile_up() -> None:
    evictor = Evictor("lfu")
    for i in range(10_000):
        evictor.add(7, i, 1, 0)
        evictor.remove(7)
    assert len(evictor._heap) < 200


def test_unknown_policy() -> None:
    with pytest.raises(ValueError, match="eviction_policy is 'mru'"):
        Evictor("mru")


# ------------------------------------------------------------------ names


def test_names_are_as_defined() -> None:
    """By hand: root and chain, so that a change of the definition is seen."""
    identity = b"1/1/1/32/16/f16"  # numerics first
    hasher = hashlib.sha256()
    for part in (b"starling kv chain 1", DIGEST, identity, b""):
        hasher.update(len(part).to_bytes(8, "little") + part)
    root = hasher.digest()[:16]
    assert prefix_hash.root(DIGEST, GEOMETRY, "") == root
    tokens = np.arange(40, dtype=np.int32)
    first = hashlib.sha256(root + tokens[:16].tobytes()).digest()[:16]
    second = hashlib.sha256(first + tokens[16:32].tobytes()).digest()[:16]
    assert prefix_hash.chain(PageDigest(root), tokens, 16) == [first, second]


def test_names_are_the_same_in_another_process() -> None:
    code = (
        "import numpy as np; from stages.kv.pool import prefix_hash; from tests.kv.world import *;"
        "print(prefix_hash.chain(prefix_hash.root(DIGEST, GEOMETRY, 'x'), np.arange(32, dtype='i4'), 16)[-1].hex())"
    )
    seen = {
        subprocess.run(
            [sys.executable, "-c", code],
            cwd=ROOT,
            check=True,
            capture_output=True,
            text=True,
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)},
        ).stdout
        for seed in ("1", "2")
    }
    here = prefix_hash.chain(prefix_hash.root(DIGEST, GEOMETRY, "x"), np.arange(32, dtype="i4"), 16)[-1].hex()
    assert seen == {here + "\n"}


def test_everything_that_matters_is_in_a_name() -> None:
    tokens = np.arange(32, dtype=np.int32)

    def last(digest: bytes = DIGEST, salt: str = "", **geometry: object) -> bytes:
        return prefix_hash.chain(prefix_hash.root(digest, GEOMETRY._replace(**geometry), salt), tokens, 16)[-1]

    names = [
        last(),
        last(bytes(32)),
        last(salt="a"),
        last(kv_type="f32"),
        last(page_tokens=32),
        last(n_layers=2),
        last(n_kv_heads=2),
        last(head_dim=64),
    ]
    tokens[0] = 5  # a token of the first page changes the name of the second
    names.append(last())
    assert len(set(names)) == len(names)


# ------------------------------------------------------------------ headers


def test_a_header_is_read_as_it_was_written() -> None:
    raw = np.zeros((4, PAGE_HEADER), np.uint8)
    headers = Headers(raw)
    root = PageDigest(b"\0r" * 8)  # zeros at the ends must survive
    headers.lease([1, 3], root, serial=77, now_ns=5, born_ns=4)
    assert headers.lease_of(3) == (root, 77)
    assert headers.state(1) == PAGE_LEASED
    headers.publish(1, name())
    assert headers.state(1) == PAGE_FULL
    assert headers.name(1) == name()
    assert (headers.born_ns(1), headers.last_use_ns(1), headers.uses(1)) == (4, 5, 1)
    assert raw[:, 128:].max() == 0  # the worker's
    assert raw[0].max() == raw[2].max() == 0


def test_a_torn_header_is_not_believed() -> None:
    raw = np.zeros((3, PAGE_HEADER), np.uint8)
    headers = Headers(raw)
    for page in range(3):
        headers.publish(page, name(page))
    raw[0, 17] ^= 1
    raw[2, HEADER.fields["checksum"][1]] ^= 0x80  # type: ignore[index]
    found = scan(headers, 3)
    assert [page for page, _ in found.full] == [1]
    assert found.limbo == [0, 2]
    assert found.torn == 2


def test_a_header_of_two_halves_is_neither() -> None:
    """Identity and check are one copy of 72 bytes: cut anywhere, the state says full, nobody believes it."""
    old, new = name(0).pack(), name(7).pack()
    raw = np.zeros((1, PAGE_HEADER), np.uint8)
    raw[0, 72] = PAGE_FULL
    for cut in range(73):
        raw[0, :72] = np.frombuffer(new[:cut] + old[cut:], np.uint8)
        found = [entry for _, entry in scan(Headers(raw), 1).full]
        assert found == [name(0)] * (new[:cut] == old[:cut]) + [name(7)] * (new[cut:] == old[cut:])


def test_a_page_is_not_full_while_its_header_changes() -> None:
    """The state leaves full before the first other field of a lease, and is full after the last."""
    raw = np.zeros((1, PAGE_HEADER), np.uint8)
    headers = Headers(raw)
    headers.publish(0, name())
    seen: list[int] = []

    class Spy:
        def __init__(self, field: np.ndarray) -> None:
            self.field = field

        def __setitem__(self, where: np.ndarray, value: object) -> None:
            seen.append(headers.state(0))
            self.field[where] = value

    for field in ("_root", "_serial", "_born", "_last_use", "_uses", "_refs", "_residency"):
        setattr(headers, field, Spy(getattr(headers, field)))
    headers.lease([0], PageDigest(b"n" * 16), 9, 1, 1)
    assert len(seen) == 7
    assert PAGE_FULL not in seen
    assert headers.state(0) == PAGE_LEASED


def test_adopted_pages_are_evicted_as_they_would_have_been() -> None:
    raw = np.zeros((4, PAGE_HEADER), np.uint8)
    headers = Headers(raw)
    for page, (last_use, ordinal) in enumerate([(20, 0), (10, 0), (10, 1), (20, 1)]):
        headers.lease([page], PageDigest(bytes(16)), 1, last_use, 1)
        headers.publish(page, name(ordinal))
    assert [page for page, _ in scan(headers, 4).full] == [2, 1, 3, 0]


# ------------------------------------------------------------------ rows


def test_rows_are_read_only_while_they_are_the_sequence_s(tmp_path: Path) -> None:
    path = tmp_path / "m.steps"
    arena, steps = create_steps(path, StepsGeometry(2, 1, 1, 64, 4), DIGEST)
    rows = Rows()
    assert rows.known(0, 1) is None
    rows.attach(path, DIGEST)
    steps.row_ints[1, SERIAL] = 42
    steps.tokens[1, :5] = [9, 8, 7, 6, 5]
    known = rows.known(1, 3)
    assert known is not None
    assert (known[0].tolist(), known[1]) == ([9, 8, 7], 42)
    read = rows.read(1, 42, 3, 5)
    assert read is not None
    assert read.tolist() == [6, 5]
    assert rows.read(1, 41, 3, 5) is None
    for row, n_tokens in ((2, 1), (-1, 1), (0, 0), (0, 66)):
        assert rows.known(row, n_tokens) is None
    rows.detach()
    arena.close()


def test_an_arena_of_another_arithmetic_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After an update of the kernels' contract, what the old ones computed must not be mixed in."""

    def opened(generation: int) -> tuple[bool, int]:
        """(adopted, generation); lets go of every view, which would keep the lock."""
        home = open_arena(tmp_path / "m.kv", GEOMETRY, DIGEST, 64 * GEOMETRY.page_bytes, generation)
        home.arena.close()
        return home.found is not None, home.arena.generation

    assert opened(1) == (False, 1)
    assert opened(2) == (True, 1)
    monkeypatch.setattr(pages, "NUMERICS", pages.NUMERICS + 1)
    assert opened(3) == (False, 3)
