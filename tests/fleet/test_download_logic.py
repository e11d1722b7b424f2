"""The pure parts of a download: pieces, choice of sources, concurrency, bandwidth, eviction."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.blobs.retry import MOST_S, delay_s, retried
from pipeline.errors import ConfigError, ResourceError, StorageUnavailable
from stages.agent.cache.eviction import Bounds, Item, plan_eviction
from stages.agent.downloads.bandwidth import Bandwidth
from stages.agent.downloads.concurrency import AdaptiveLimit
from stages.agent.downloads.pieces import PieceMap
from stages.agent.downloads.sources import MAX_FAILURES, Source, SourceTable


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class FakeSource:
    def __init__(self, name: str, expected_rate: float = 1e8) -> None:
        self.name = name
        self.expected_rate = expected_rate
        self.is_local = self.is_peer = False
        self.timeout_s = 0.0

    def holds(self, piece: int) -> bool:
        return True

    async def read(self, offset: int, nbytes: int) -> bytes:
        raise AssertionError("the table reads nothing")


# ------------------------------------------------------------------ pieces


@given(st.integers(0, 20), st.sets(st.integers(0, 19)), st.lists(st.integers(0, 3), max_size=200))
def test_pieces_are_conserved(total: int, present: set[int], steps: list[int]) -> None:
    pieces = PieceMap(total, {piece for piece in present if piece < total})
    begun: list[int] = []
    for step in steps:
        if step == 0 and pieces.n_missing:
            piece = pieces.missing(3)[-1]
            pieces.begin(piece)
            begun.append(piece)
        elif step == 1 and (again := pieces.repeatable()):
            pieces.begin(again[0])
            begun.append(again[0])
        elif step == 2 and begun:
            pieces.failed(begun.pop(0))
        elif step == 3 and begun:
            pieces.arrived(begun.pop(len(begun) // 2))
        assert pieces.n_missing + len(pieces.in_flight) + len(pieces.present) == total
        assert max(pieces.in_flight.values(), default=0) <= 2
        assert not pieces.present & set(pieces.in_flight)
    assert pieces.is_complete == (len(pieces.present) == total)


def test_pieces_come_in_order_of_use_and_a_failed_one_first() -> None:
    pieces = PieceMap(4, {1})
    taken = []
    while (piece := pieces.first_missing()) is not None:
        pieces.begin(piece)
        taken.append(piece)
    assert taken == [0, 2, 3]
    pieces.failed(2)
    assert pieces.first_missing() == 2
    pieces.begin(2)
    assert pieces.repeatable() == [0, 3, 2]
    assert [pieces.arrived(0), pieces.arrived(0)] == [True, False]


# ------------------------------------------------------------------ sources


def table(*sources: FakeSource) -> tuple[SourceTable, Clock]:
    clock = Clock()
    return SourceTable(list(sources), clock), clock


def test_the_source_whose_answer_is_expected_first_is_asked() -> None:
    near, far = FakeSource("near", 1e9), FakeSource("far", 1e8)
    sources, _ = table(far, near)
    asked = []
    for piece in range(12):
        source = sources.choose(piece)
        assert source is not None
        sources.begin(source)
        asked.append(source.name)
    assert asked.count("near") == 11  # ten requests there take as long as the first one at the other
    assert asked[0] == "near"


def test_a_local_file_is_asked_first_for_what_it_has_right() -> None:
    local, far = FakeSource("local", 1.0), FakeSource("far", 1e9)
    local.is_local = True
    sources, _ = table(far, local)
    for piece in range(5):
        assert sources.choose(piece) is local
        sources.begin(local)
    sources.rejected(local, 3, StorageUnavailable("damaged"))
    assert sources.choose(3) is far


def test_measurements_replace_the_expectation() -> None:
    near, far = FakeSource("near", 1e9), FakeSource("far", 1e8)
    sources, _ = table(far, near)
    for _ in range(20):
        sources.begin(near)
        sources.ended(near)
        sources.succeeded(near, 1_000_000, 1.0)
    assert sources.choose(0) is far


def test_a_failing_source_pauses_with_backoff_and_a_burst_counts_once() -> None:
    one = FakeSource("one")
    sources, clock = table(one)
    for piece in range(16):
        sources.failed(one, piece, StorageUnavailable("503"))
    assert sources.choose(0) is None
    first = sources.next_ready_s(0)
    assert 0 < first < 0.5
    clock.now += first
    assert sources.choose(0) is one
    sources.failed(one, 0, StorageUnavailable("503"))
    assert sources.next_ready_s(0) == pytest.approx(2 * first)
    sources.failed(one, 1, StorageUnavailable("503", retry_after_s=7.0))
    clock.now += 100
    sources.failed(one, 1, StorageUnavailable("503", retry_after_s=7.0))
    assert sources.next_ready_s(0) >= 5.0


def test_a_damaged_piece_is_asked_from_another_source() -> None:
    near, far = FakeSource("near", 1e9), FakeSource("far", 1e6)
    sources, _ = table(near, far)
    sources.rejected(near, 3, StorageUnavailable("damaged"))
    assert sources.choose(3) is far
    assert sources.choose(4) is near


def test_a_download_gives_up_when_no_source_is_left() -> None:
    one, two = FakeSource("one"), FakeSource("two")
    sources, _ = table(one, two)
    sources.failed(one, 0, ConfigError("403"))
    assert sources.choose(5) is two
    for _ in range(MAX_FAILURES - 1):
        sources.rejected(two, 7, StorageUnavailable("damaged"))
    with pytest.raises(StorageUnavailable, match="damaged"):
        sources.rejected(two, 7, StorageUnavailable("damaged"))
    with pytest.raises(ConfigError):
        sources.failed(two, 0, ConfigError("403"))


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3), st.integers(0, 2)), max_size=60))
def test_a_waiting_download_never_spins(events: list[tuple[int, int, int]]) -> None:
    """Whenever no source can be asked, there is a positive time to wait for, unless all have refused."""
    all_sources: list[Source] = [FakeSource(name) for name in "abc"]
    clock = Clock()
    sources = SourceTable(all_sources, clock)
    for number, piece, kind in events:
        errors = [StorageUnavailable("x"), StorageUnavailable("y"), ConfigError("z")]
        try:
            if kind == 1:
                sources.rejected(all_sources[number], piece, errors[1])
            else:
                sources.failed(all_sources[number], piece, errors[kind])
        except (StorageUnavailable, ConfigError):
            return
        for one in range(4):
            assert (sources.choose(one) is None) == (sources.next_ready_s(one) > 0)
        clock.now += 0.1


# ------------------------------------------------------------------ concurrency and bandwidth


def steady(rate_of: object, most: int = 16, windows: int = 40) -> AdaptiveLimit:
    """The limit after many windows on a link whose rate depends on the number of requests."""
    clock = Clock()
    limit = AdaptiveLimit(most, clock)
    for _ in range(windows):
        value = limit.value
        clock.now += value * 1e6 / rate_of(value)  # type: ignore[operator]
        for _ in range(value):
            limit.arrived(1_000_000)
    return limit


def test_requests_grow_while_the_link_gets_faster() -> None:
    assert steady(lambda n: 40e6 * n, windows=4).value == 16
    assert steady(lambda n: 40e6 * min(n, 2), windows=6).value < 10  # a link that two requests fill


def test_a_refusal_halves_the_requests_once_a_window() -> None:
    limit = steady(lambda n: 40e6 * n, windows=4)
    for _ in range(5):
        limit.throttled()
    assert limit.value == 8
    for _ in range(20):
        for _ in range(limit.value):
            limit.arrived(1)
        limit.throttled()
    assert limit.value == 1


@given(st.lists(st.booleans(), max_size=300), st.integers(1, 64))
def test_the_limit_stays_in_its_bounds(events: list[bool], most: int) -> None:
    clock = Clock()
    limit = AdaptiveLimit(most, clock)
    for is_arrival in events:
        clock.now += 0.01
        limit.arrived(1000) if is_arrival else limit.throttled()
        assert 1 <= limit.value <= most


@given(st.lists(st.integers(1, 8 << 20), min_size=1, max_size=100))
def test_bandwidth_is_kept_over_time(sizes: list[int]) -> None:
    clock = Clock()
    rate = 1 << 20
    bucket = Bandwidth(rate, clock)
    begun = clock.now
    for nbytes in sizes:
        clock.now += bucket.delay_s(nbytes)
    # Everything but the last request and one second's credit is paid for.
    assert sum(sizes[:-1]) <= rate * (clock.now - begun + 1) + 1
    assert Bandwidth(0, clock).delay_s(1 << 40) == 0.0


# ------------------------------------------------------------------ retries


@given(st.integers(1, 1000), st.floats(0, 1e9), st.floats(0, 0.999))
def test_a_pause_is_bounded(failures: int, retry_after_s: float, jitter: float) -> None:
    assert 0 < delay_s(failures, retry_after_s, jitter) <= 1.25 * MOST_S


async def test_attempts_are_bounded_and_the_servers_wish_is_kept() -> None:
    pauses: list[float] = []
    calls = 0

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    async def fail() -> None:
        nonlocal calls
        calls += 1
        raise StorageUnavailable("503", retry_after_s=3.0)

    with pytest.raises(StorageUnavailable):
        await retried(fail, sleep=sleep, jitter=lambda: 0.5, attempts=4)
    assert (calls, len(pauses)) == (4, 3)
    assert min(pauses) >= 3.0


# ------------------------------------------------------------------ eviction

ITEMS = st.lists(
    st.builds(
        Item,
        st.uuids().map(str),
        st.integers(0, 1000),
        st.floats(0, 100),
        st.booleans(),
    ),
    max_size=12,
)


@given(
    ITEMS, st.integers(0, 3000), st.integers(0, 3000), st.integers(0, 5000), st.integers(0, 3000), st.integers(0, 500)
)
def test_eviction_makes_room_in_order_of_use_or_evicts_nothing(
    items: list[Item], need: int, more_disk: int, free: int, most: int, floor: int
) -> None:
    bounds = Bounds(most, floor)
    try:
        chosen = plan_eviction(items, need, more_disk, free, bounds)
    except ResourceError:
        possible = sum(item.nbytes for item in items if not item.is_pinned)
        total = sum(item.nbytes for item in items)
        assert (most and total - possible + need > most) or free + possible < floor + more_disk
        return
    by_key = {item.key: item for item in items}
    freed = sum(by_key[key].nbytes for key in chosen)
    assert not any(by_key[key].is_pinned for key in chosen)
    assert free + freed >= floor + more_disk
    assert not most or sum(item.nbytes for item in items) - freed + need <= most
    kept = [item.used for item in items if item.key not in chosen and not item.is_pinned]
    assert all(by_key[key].used <= used for key in chosen for used in kept)
    if chosen:  # no more than necessary
        less = freed - by_key[chosen[-1]].nbytes
        fits = free + less >= floor + more_disk
        assert not fits or (most and sum(item.nbytes for item in items) - less + need > most)
