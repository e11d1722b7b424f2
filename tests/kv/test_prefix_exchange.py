"""Prefixes that many requests share go to another engine: which, how much, and what of them is cached there."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.api.page_names import name_of
from pipeline.errors import InvalidRequest, NotFound, Overloaded
from shm.pages import KvGeometry
from stages.agent.kv_pages.arena_pages import find_pages
from stages.kv import prefix_exchange
from stages.kv.loaded_versions import LoadedVersion, LoadedVersions
from stages.kv.prefix_exchange import ARENA_SHARE, KEEP_S, MAX_KEPT, PrefixExchange
from tests.kv.engine_side import Side
from tests.kv.world import GEOMETRY, PAGE_TOKENS, contents

MINE, OTHER = "mine\0", "other\0"
# Of two tenants for whom an orchestrator forwards, at an engine with one API key.
ONE, TWO = f"fleet\0{'1' * 32} a", f"fleet\0{'2' * 32} "
SYSTEM = [token for page in range(3) for token in [page + 5] * PAGE_TOKENS]
USES = 2


class Engine(Side):
    """An engine's side, with its exchange of prefixes."""

    def __init__(self, folder: Path, name: str, geometry: KvGeometry = GEOMETRY, n_pages: int = 32) -> None:
        super().__init__(folder, name, geometry, n_pages)
        self.prefixes = PrefixExchange(lambda name: self.loaded if name == "tiny" else None, lambda: self.now)
        self.n_runs = 0

    def run(self, tokens: list[int], salt: str = "") -> int:
        """A whole request; the tokens of its prompt that were cached."""
        self.n_runs += 1
        sequence = f"run-{self.n_runs}"
        serial = self.rows.take(0, tokens)
        grant = self.acquire(sequence, tokens, salt, serial)
        self.check_shared(grant, tokens, salt)
        for place in range(grant.cached_tokens // PAGE_TOKENS, len(tokens) // PAGE_TOKENS):
            self.views.pages[grant.pages[place]] = contents(tokens, place, salt)
        self.manager.release(sequence, len(tokens))
        return grant.cached_tokens

    def listed(self, limit: int = 1000) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.prefixes.prefixes({"model": "tiny", "limit": limit})["prefixes"]
        return found

    def file(self, folder: Path, tails: list[str], name: str = "sent") -> Path:
        """A file with the pages of prefixes, as the agent reads them."""
        place = self.prefixes.prefixes({"model": "tiny", "limit": 0})
        assert place["prefixes"] == []
        found = find_pages(folder / place["arena"], place["digest"], tails, 1 << 30)
        path = folder / name
        path.write_bytes(b"".join(found.read()))
        return path

    def keep(self, path: Path, tenant: str = "", uses: int = USES, idle_s: float = 0.0) -> int:
        asked = {"model": "tiny", "path": str(path), "tenant": tenant, "uses": uses, "idle_s": idle_s}
        return int(self.prefixes.keep(asked)["pages"])

    def take(self, path: Path, tenant: str = "", uses: int = USES, idle_s: float = 0.0) -> None:
        """Cache a file's pages; nothing else happens meanwhile."""
        self.keep(path, tenant, uses, idle_s)
        while self.prefixes.step():
            self.manager.check()
        self.manager.check()


@pytest.fixture
def source(tmp_path: Path) -> Iterator[Engine]:
    made = Engine(tmp_path, "source")
    yield made
    made.prefixes.close()


@pytest.fixture
def target(tmp_path: Path) -> Iterator[Engine]:
    made = Engine(tmp_path, "target")
    yield made
    made.prefixes.close()


def prompt(number: int, system: list[int] = SYSTEM) -> list[int]:
    return [*system, *[100 + number] * PAGE_TOKENS, 1]


def test_a_prefix_that_requests_share_is_cached_at_another_engine(
    source: Engine, target: Engine, tmp_path: Path
) -> None:
    assert [source.run(prompt(number)) for number in range(3)] == [0, len(SYSTEM), len(SYSTEM)]
    (found,) = source.listed()
    assert (found["tenant"], found["uses"]) == ("", 3)
    tail = bytes.fromhex(found["tail"])
    assert found["names"][-1] == name_of(tail) and len(found["names"]) == 3
    target.take(source.file(tmp_path, [found["tail"]]), uses=found["uses"])
    assert len(target.prefixes) == 0
    # As other engines publish it, and as a page that requests have used.
    assert [one["tail"] for one in target.listed()] == [found["tail"]]
    assert target.manager.pool.counters.warmed == 3
    assert target.run(prompt(7)) == len(SYSTEM)
    assert target.manager.pool.counters.warm_hits == 3


def test_the_most_used_prefixes_are_listed_first_and_those_of_one_request_not_at_all(source: Engine) -> None:
    rare, alone = [7] * PAGE_TOKENS, [8] * (2 * PAGE_TOKENS)
    for number in range(2):
        source.run(prompt(number, rare))
    for number in range(5):
        source.run(prompt(number))
    source.run([*alone, 1])
    assert [(len(one["names"]), one["uses"]) for one in source.listed()] == [(3, 5), (1, 2)]
    assert [len(one["names"]) for one in source.listed(limit=3)] == [3]
    with pytest.raises(NotFound):
        source.prefixes.prefixes({"model": "none", "limit": 1})


def test_a_tenant_gets_half_of_what_is_listed(source: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_exchange, "MAX_PREFIXES", 4)
    for begin in range(6):
        for number in range(2):
            source.run(prompt(number, [50 + begin] * PAGE_TOKENS), MINE)
    for number in range(2):
        source.run(prompt(number), OTHER)
    assert sorted(one["tenant"] for one in source.listed()) == ["mine", "mine", "other"]


def test_tenants_behind_an_orchestrator_are_tenants(source: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_exchange, "MAX_PREFIXES", 4)
    for begin in range(6):
        for number in range(2):
            source.run(prompt(number, [50 + begin] * PAGE_TOKENS), ONE)
    for number in range(2):
        source.run(prompt(number), TWO)
    owners = [f"fleet\0{'1' * 32}"] * 2 + [f"fleet\0{'2' * 32}"]
    assert sorted(one["tenant"] for one in source.listed()) == owners


@pytest.mark.parametrize("is_older", ["source", "target"])
def test_engines_that_do_not_tell_forwarded_tenants_apart_exchange_prefixes_with_those_that_do(
    source: Engine, target: Engine, tmp_path: Path, is_older: str
) -> None:
    for number in range(2):
        source.run(prompt(number), ONE)
    (found,) = source.listed()
    path = source.file(tmp_path, [found["tail"]])
    if is_older == "source":
        target.run([*[9] * PAGE_TOKENS, 1], ONE)
        target.take(path, tenant=f"fleet\0{'2' * 32}")
        assert target.run(prompt(7), ONE) == 0  # of another tenant, with a root that is known here
        told = "fleet"
    else:
        target.manager.owners.learn_owner(target.manager.root_hash_of(ONE), "fleet")
        told = found["tenant"]
    target.take(path, tenant=told)
    assert target.run(prompt(8), ONE) == len(SYSTEM)


def test_an_answer_has_a_bounded_number_of_prefixes_and_names(source: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    for begin in range(6):
        for number in range(2):
            source.run(prompt(number, [50 + begin] * (2 * PAGE_TOKENS)))
    monkeypatch.setattr(prefix_exchange, "MAX_NAMES", 9)
    assert [len(one["names"]) for one in source.listed()] == [2] * 4
    monkeypatch.setattr(prefix_exchange, "MAX_PREFIXES", 3)
    assert len(source.listed()) == 3


def test_the_longest_answer_fits_in_the_buffer_of_a_control_socket() -> None:
    """A line is sent at once, or not at all (pipeline/ipc/control_poll.py)."""
    names = [2**64 - 1] * prefix_exchange.MAX_NAMES
    one = {"tail": "f" * 32, "names": [], "tenant": "\U0001f600" * 64, "uses": 2**32 - 1, "idle_s": 1e9}
    answer = {"prefixes": [{**one, "names": names}, *[one] * prefix_exchange.MAX_PREFIXES]}
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        data = json.dumps(answer).encode()
        assert ours.send(data) == len(data)


def test_no_tenant_takes_all_places_of_those_that_are_ranked(source: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_exchange, "MAX_CANDIDATES", 6)
    for begin in range(3):
        for number in range(4):
            source.run(prompt(number, [50 + begin] * (2 * PAGE_TOKENS)), MINE)
    for number in range(2):
        source.run(prompt(number), OTHER)
    found = {one["tenant"]: len(one["names"]) for one in source.listed(6)}
    assert found == {"mine": 1, "other": 3}


def test_of_pages_that_are_used_alike_the_first_ones_of_their_prefixes_are_ranked(
    source: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefix_exchange, "MAX_CANDIDATES", 6)
    for begin in range(4):
        for number in range(2):
            source.run(prompt(number, [50 + begin] * (3 * PAGE_TOKENS)))
    assert sum(len(one["names"]) for one in source.listed(6)) == 6
    assert len(source.listed(6)) == 4


def test_a_prefix_whose_tenant_is_not_known_is_not_listed(source: Engine) -> None:
    for number in range(2):
        source.run(prompt(number), MINE)
    assert len(source.listed()) == 1
    source.manager.owners.__init__()  # type: ignore[misc]  # as after a restart of the kv stage
    assert source.listed() == []


def test_another_tenant_finds_nothing(source: Engine, target: Engine, tmp_path: Path) -> None:
    for number in range(2):
        source.run(prompt(number), MINE)
    (found,) = source.listed()
    path = source.file(tmp_path, [found["tail"]])
    target.run([*[9] * PAGE_TOKENS, 1], MINE)
    target.take(path, tenant="other")  # whose they are not: the root is known here
    assert target.run(prompt(3), MINE) == 0
    target.manager.owners.__init__()  # type: ignore[misc]
    fresh = Engine(tmp_path, "fresh")
    fresh.take(path, tenant="mine")
    assert fresh.run(prompt(5), OTHER) == fresh.run(prompt(5)) == 0
    assert fresh.run(prompt(5), MINE) == len(SYSTEM)


def test_a_damaged_page_and_those_behind_it_are_left_out(source: Engine, target: Engine, tmp_path: Path) -> None:
    for number in range(2):
        source.run(prompt(number))
    path = source.file(tmp_path, [source.listed()[0]["tail"]])
    raw = bytearray(path.read_bytes())
    raw[-source.views.pages.shape[1] - 1] ^= 1  # the last byte of the second of three pages
    path.write_bytes(raw)
    target.take(path)
    assert target.run(prompt(7)) == PAGE_TOKENS


def test_pages_that_were_used_later_stay(source: Engine, tmp_path: Path) -> None:
    for number in range(2):
        source.run(prompt(number))
    path = source.file(tmp_path, [source.listed()[0]["tail"]])
    full = Engine(tmp_path, "full", n_pages=12)
    for number in range(3):
        full.run([20 + number] * (4 * PAGE_TOKENS))
    pool, held = full.manager.pool, set(full.manager.pool.table.hashes())
    assert pool.free == 0 and len(held) == 12
    full.take(path, idle_s=3600.0)  # not used for longer than any page there
    assert set(pool.table.hashes()) == held
    full.take(path)
    assert pool.counters.warmed == pool.counters.evictions == 3 == 12 // ARENA_SHARE
    assert full.run(prompt(7)) == len(SYSTEM)


def test_what_is_known_of_pages_that_came_is_bounded(source: Engine, tmp_path: Path) -> None:
    small = Engine(tmp_path, "small", n_pages=12)
    tails: set[str] = set()
    for begin in range(12):
        system = [50 + begin] * (3 * PAGE_TOKENS)
        for number in range(2):
            source.run(prompt(number, system))
        tail = next(one["tail"] for one in source.listed() if one["tail"] not in tails)
        tails.add(tail)
        small.take(source.file(tmp_path, [tail]))
        for number in range(3):  # nothing of it stays
            small.run([20 + number] * (4 * PAGE_TOKENS))
    assert small.manager.pool.counters.warmed >= 30
    assert len(small.manager.pool._warmed) <= 2 * 12


def test_a_prefix_that_is_partly_there_is_completed(source: Engine, target: Engine, tmp_path: Path) -> None:
    for number in range(2):
        source.run(prompt(number))
    target.run([*SYSTEM[:PAGE_TOKENS], 1])
    target.take(source.file(tmp_path, [source.listed()[0]["tail"]]))
    assert target.manager.pool.counters.warmed == 2
    assert target.run(prompt(7)) == len(SYSTEM)


def test_files_are_bounded_in_number_bytes_and_time(
    source: Engine, target: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(2):
        source.run(prompt(number))
    path = source.file(tmp_path, [source.listed()[0]["tail"]])
    for _ in range(MAX_KEPT // 2):
        target.keep(path, "mine")
    with pytest.raises(Overloaded, match="of their tenant"):
        target.keep(path, "mine")
    for _ in range(MAX_KEPT // 2):
        target.keep(path)
    with pytest.raises(Overloaded):
        target.keep(path)
    target.now += KEEP_S
    while target.prefixes.step():
        pass
    assert target.run(prompt(7)) == 0
    monkeypatch.setattr(prefix_exchange, "MAX_KEPT_BYTES", path.stat().st_size)
    target.keep(path)
    with pytest.raises(Overloaded):
        target.keep(path)


def test_nothing_is_cached_before_the_leases_are_known(source: Engine, target: Engine, tmp_path: Path) -> None:
    for number in range(2):
        source.run(prompt(number))
    target.manager.is_reconciled = False
    target.keep(source.file(tmp_path, [source.listed()[0]["tail"]]))
    assert not target.prefixes.step() and len(target.prefixes) == 1
    target.manager.is_reconciled = True
    while target.prefixes.step():
        pass
    assert target.run(prompt(7)) == len(SYSTEM)


def test_nothing_is_cached_in_the_arena_of_a_version_that_was_unloaded(
    source: Engine, target: Engine, tmp_path: Path
) -> None:
    """A thread closes it at that moment: what were reserved then would be memory of another file, or of none."""
    for number in range(2):
        source.run(prompt(number))
    loaded: Any = LoadedVersion.__new__(LoadedVersion)
    loaded.version = SimpleNamespace(id="tiny")
    known = {"manager": target.manager, "model": SimpleNamespace(name="tiny"), "close_files": list}
    loaded.pages = SimpleNamespace(**vars(target.loaded.pages), **known)
    target.loaded = loaded
    target.keep(source.file(tmp_path, [source.listed()[0]["tail"]]))
    closing: list[Any] = []
    versions: Any = SimpleNamespace(
        removed=SimpleNamespace(add=lambda pages: None),
        _thread=SimpleNamespace(submit=lambda *work: closing.extend(work)),
    )
    LoadedVersions._remove(versions, loaded)
    assert loaded in closing
    while target.prefixes.step():
        pass
    assert (len(target.prefixes), target.manager.pool.counters.warmed) == (0, 0)


def test_what_is_no_file_of_this_version_is_refused(source: Engine, tmp_path: Path) -> None:
    for number in range(2):
        source.run(prompt(number))
    path = source.file(tmp_path, [source.listed()[0]["tail"]])
    other = Engine(tmp_path, "other", GEOMETRY._replace(n_layers=2))
    with pytest.raises(InvalidRequest, match="expected"):
        other.keep(path)
    (tmp_path / "none").write_bytes(b"none")
    for wrong in (tmp_path / "none", tmp_path, tmp_path / "missing"):
        with pytest.raises(InvalidRequest):
            source.keep(wrong)


@pytest.mark.parametrize(("uses", "idle_s"), [(2**32, 0.0), (10**30, 1e300), (-1, -1.0)])
def test_numbers_out_of_bounds_count_as_the_bound(
    source: Engine, target: Engine, tmp_path: Path, uses: int, idle_s: float
) -> None:
    for number in range(2):
        source.run(prompt(number))
    target.take(source.file(tmp_path, [source.listed()[0]["tail"]]), uses=uses, idle_s=idle_s)
    assert target.run(prompt(7)) == len(SYSTEM)


def test_an_engine_that_caches_nothing_takes_nothing(source: Engine, tmp_path: Path) -> None:
    for number in range(2):
        source.run(prompt(number))
    path = source.file(tmp_path, [source.listed()[0]["tail"]])
    source.manager.is_caching = False
    with pytest.raises(NotFound, match=r"cache\.enabled"):
        source.keep(path)


def test_what_are_no_numbers_is_refused_before_a_file_is_opened(source: Engine, tmp_path: Path) -> None:
    for wrong in ({"uses": float("inf")}, {"uses": "many"}, {"idle_s": None}):
        with pytest.raises(InvalidRequest, match="not given in numbers"):
            source.prefixes.keep({"model": "tiny", "path": str(tmp_path / "missing"), **wrong})
