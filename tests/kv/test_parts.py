"""The parts of the manager: order of eviction, page hashes, page headers, token rows, arena."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import xxhash

from pipeline.eviction_order import EvictionOrder
from shm import pages, prefix_hash
from shm.pages import HEADER, PAGE_FULL, PAGE_HEADER, PAGE_LEASED
from shm.prefix_hash import PageHash
from shm.step_ring import SERIAL, StepsGeometry, create_steps
from stages.kv.pool.arena import open_arena, scan
from stages.kv.pool.page_headers import PageHeaders, PageIdentity
from stages.kv.pool.token_rows import TokenRows
from stages.kv.storage.page_file import BLOCK, PageFile, encode_head
from tests.kv.world import DIGEST, GEOMETRY

ROOT = Path(__file__).parents[2]


def identity(ordinal: int = 0) -> PageIdentity:
    digests = [PageHash(bytes([i + ordinal]) * 16) for i in range(3)]
    return PageIdentity(*digests, checksum=1 << 63, ordinal=ordinal, tokens=16)


# ------------------------------------------------------------------ order of eviction


def evictable(policy: str) -> EvictionOrder[int]:
    """Pages 1..5 as (uses, born), released in this order."""
    order: EvictionOrder[int] = EvictionOrder(policy)
    for page, (uses, born) in enumerate([(2, 50), (1, 40), (3, 10), (1, 30), (2, 20)], 1):
        order.add(page, 100 * page, uses, born)
    return order


@pytest.mark.parametrize(
    ("policy", "expected"),
    [("lru", [1, 2, 3, 4, 5]), ("lfu", [2, 4, 1, 5, 3]), ("fifo", [3, 5, 4, 2, 1])],
)
def test_exact_order(policy: str, expected: list[int]) -> None:
    order = evictable(policy)
    assert list(order.order()) == expected
    assert [order.pop() for _ in range(5)] == expected
    with pytest.raises(IndexError):
        order.pop()


@pytest.mark.parametrize("policy", ["lru", "lfu", "fifo"])
def test_a_page_that_was_used_again_takes_its_new_place(policy: str) -> None:
    order = evictable(policy)
    order.remove(2)
    order.remove(1)
    order.add(2, 700, uses=9, born=40)
    assert 1 not in order
    assert list(order.order()) == {"lru": [3, 4, 5, 2], "lfu": [4, 5, 3, 2], "fifo": [3, 5, 4, 2]}[policy]


@pytest.mark.parametrize("policy", ["lru", "lfu", "fifo"])
def test_age_is_since_the_last_use(policy: str) -> None:
    order = evictable(policy)
    assert order.expired(before=300) == [1, 2]
    assert len(order) == 5


def test_stale_entries_do_not_accumulate() -> None:
    order: EvictionOrder[int] = EvictionOrder("lfu")
    for i in range(10_000):
        order.add(7, i, 1, 0)
        order.remove(7)
    assert order.n_items < 200


def test_unknown_policy() -> None:
    with pytest.raises(ValueError, match="eviction_policy is 'mru'"):
        EvictionOrder("mru")


# ------------------------------------------------------------------ page hashes


def test_hashes_are_as_defined() -> None:
    """Computed by hand, so that a change of the definition is found."""
    identity = b"1/1/1/32/16/f16"  # numerics first
    hasher = hashlib.sha256()
    for part in (b"starling kv chain 1", DIGEST, identity, b""):
        hasher.update(len(part).to_bytes(8, "little") + part)
    root = hasher.digest()[:16]
    assert prefix_hash.root_hash(DIGEST, GEOMETRY, "") == root
    tokens = np.arange(40, dtype=np.int32)
    first = hashlib.sha256(root + tokens[:16].tobytes()).digest()[:16]
    second = hashlib.sha256(first + tokens[16:32].tobytes()).digest()[:16]
    assert prefix_hash.page_hashes(PageHash(root), tokens, 16) == [first, second]


def test_hashes_are_the_same_in_another_process() -> None:
    code = (
        "import numpy as np; from shm.prefix_hash import *; from tests.kv.world import *;"
        "print(page_hashes(root_hash(DIGEST, GEOMETRY, 'x'), np.arange(32, dtype='i4'), 16)[-1].hex())"
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
    here = prefix_hash.page_hashes(prefix_hash.root_hash(DIGEST, GEOMETRY, "x"), np.arange(32, dtype="i4"), 16)[
        -1
    ].hex()
    assert seen == {here + "\n"}


def test_the_hash_covers_everything_that_the_contents_depend_on() -> None:
    tokens = np.arange(32, dtype=np.int32)

    def last(digest: bytes = DIGEST, salt: str = "", **geometry: object) -> bytes:
        return prefix_hash.page_hashes(prefix_hash.root_hash(digest, GEOMETRY._replace(**geometry), salt), tokens, 16)[
            -1
        ]

    hashes = [
        last(),
        last(bytes(32)),
        last(salt="a"),
        last(kv_type="f32"),
        last(page_tokens=32),
        last(n_layers=2),
        last(n_kv_heads=2),
        last(head_dim=64),
    ]
    tokens[0] = 5  # a token of the first page changes the hash of the second
    hashes.append(last())
    assert len(set(hashes)) == len(hashes)


# ------------------------------------------------------------------ headers


def test_a_header_round_trip() -> None:
    raw = np.zeros((4, PAGE_HEADER), np.uint8)
    headers = PageHeaders(raw)
    root = PageHash(b"\0r" * 8)  # leading zeros must survive
    headers.lease([1, 3], root, serial=77, now_ns=5, born_ns=4)
    assert headers.lease_of(3) == (root, 77)
    assert headers.state(1) == PAGE_LEASED
    headers.mark_full(1, identity())
    assert headers.state(1) == PAGE_FULL
    assert headers.identity(1) == identity()
    assert (headers.born_ns(1), headers.last_use_ns(1), headers.uses(1)) == (4, 5, 1)
    assert raw[:, 128:].max() == 0  # reserved for the worker
    assert raw[0].max() == raw[2].max() == 0


def test_a_page_with_a_torn_header_is_unclaimed() -> None:
    raw = np.zeros((3, PAGE_HEADER), np.uint8)
    headers = PageHeaders(raw)
    for page in range(3):
        headers.mark_full(page, identity(page))
    raw[0, 17] ^= 1
    raw[2, HEADER.fields["checksum"][1]] ^= 0x80  # type: ignore[index]
    found = scan(headers, 3)
    assert [page for page, _ in found.full] == [1]
    assert found.unclaimed == [0, 2]
    assert found.n_torn == 2


def test_a_half_written_identity_is_torn() -> None:
    """Identity and check are one copy of 72 bytes: wherever the copy ends, a mixture of two is recognised."""
    old, new = identity(0).pack(), identity(7).pack()
    raw = np.zeros((1, PAGE_HEADER), np.uint8)
    raw[0, 72] = PAGE_FULL
    for cut in range(73):
        raw[0, :72] = np.frombuffer(new[:cut] + old[cut:], np.uint8)
        found = [entry for _, entry in scan(PageHeaders(raw), 1).full]
        assert found == [identity(0)] * (new[:cut] == old[:cut]) + [identity(7)] * (new[cut:] == old[cut:])


def test_a_page_is_not_full_while_its_header_changes() -> None:
    """`lease` changes the state from full before it changes any other field."""
    raw = np.zeros((1, PAGE_HEADER), np.uint8)
    headers = PageHeaders(raw)
    headers.mark_full(0, identity())
    states: list[int] = []

    class Spy:
        def __init__(self, field: np.ndarray) -> None:
            self.field = field

        def __setitem__(self, where: np.ndarray, value: object) -> None:
            states.append(headers.state(0))
            self.field[where] = value

    for field in ("_root", "_serial", "_born", "_last_use", "_uses", "_refs", "_residency"):
        setattr(headers, field, Spy(getattr(headers, field)))
    headers.lease([0], PageHash(b"n" * 16), 9, 1, 1)
    assert len(states) == 7
    assert PAGE_FULL not in states
    assert headers.state(0) == PAGE_LEASED


def test_adopted_pages_are_evicted_in_the_predecessors_order() -> None:
    raw = np.zeros((4, PAGE_HEADER), np.uint8)
    headers = PageHeaders(raw)
    for page, (last_use, ordinal) in enumerate([(20, 0), (10, 0), (10, 1), (20, 1)]):
        headers.lease([page], PageHash(bytes(16)), 1, last_use, 1)
        headers.mark_full(page, identity(ordinal))
    assert [page for page, _ in scan(headers, 4).full] == [2, 1, 3, 0]


# ------------------------------------------------------------------ rows


def test_rows_are_read_only_while_they_belong_to_the_sequence(tmp_path: Path) -> None:
    path = tmp_path / "m.steps"
    arena, steps = create_steps(path, StepsGeometry(2, 1, 1, 64, 4), DIGEST)
    rows = TokenRows()
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


def test_an_arena_of_other_numerics_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages that kernels of an older numerics version computed must not be mixed with new ones."""

    def opened(generation: int) -> tuple[bool, int]:
        """(adopted, generation); closes every view, which would keep the lock."""
        home = open_arena(tmp_path / "m.kv", GEOMETRY, DIGEST, 64 * GEOMETRY.page_bytes, generation)
        home.arena.close()
        return home.adopted is not None, home.arena.generation

    assert opened(1) == (False, 1)
    assert opened(2) == (True, 1)
    monkeypatch.setattr(pages, "NUMERICS", pages.NUMERICS + 1)
    assert opened(3) == (False, 3)


def write_page_file(path: Path, identity: bytes) -> None:
    """Write a page file without pages whose head has this identity."""
    head = encode_head({})[:12] + len(identity).to_bytes(4, "little")
    head += xxhash.xxh3_64_intdigest(identity).to_bytes(8, "little") + identity
    path.write_bytes(head.ljust(BLOCK, b"\0") + bytes(8 * BLOCK))


@pytest.mark.parametrize(
    "identity",
    [
        {"page_bytes": 4096, "slots": -1},  # an extent of 0 bytes
        {"page_bytes": 0, "slots": 1000},  # more cells than any file has
        {"page_bytes": 4096, "slots": 1 << 60},
        {"page_bytes": 100, "slots": 1},
        {"page_bytes": float("inf"), "slots": 1},
        {"page_bytes": [], "slots": 1},
        {},
    ],
)
def test_a_page_file_of_an_unusable_identity_is_refused(tmp_path: Path, identity: dict[str, Any]) -> None:
    path = tmp_path / "pages"
    write_page_file(path, msgspec.msgpack.encode(identity))
    with pytest.raises(ValueError, match="^its "):
        PageFile(path)


def test_a_page_file_of_a_deeply_nested_identity_is_refused_or_read(tmp_path: Path) -> None:
    """How deep the decoder goes depends on the version of Python."""
    path = tmp_path / "pages"
    identity = msgspec.msgpack.encode({"page_bytes": 4096, "slots": 1, "deep": 0})
    write_page_file(path, identity[:-1] + b"\x91" * 1500 + b"\0")
    problems = []
    try:
        with PageFile(path) as file:
            assert file.page_bytes == 4096
    except ValueError as error:
        problems.append(str(error))
    assert all(problem.startswith("its ") for problem in problems)
