"""Pages of one engine in another one: the same bytes where they are right, and computed again where they are not."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pipeline.config import paths
from pipeline.errors import InvalidRequest, NotFound, Overloaded
from pipeline.ipc import control
from shm.pages import KV_SPLIT
from shm.sent_pages import HEAD_BYTES, IDENTITY_BYTES, decode_head
from stages.agent.kv_pages.arena_pages import find_pages
from stages.kv import page_exchange
from stages.kv.lease import Grant
from stages.kv.page_exchange import MAX_OFFERS, OFFER_S, TENANT_SHARE, USED_S, Offer
from starling.cli.kv_clear import cleared
from tests.kv.engine_side import N_PAGES, REQUEST, TOKENS, Side
from tests.kv.process import WAIT_S, KvProcess, Scheduler, configure, load_config, write_model
from tests.kv.process_peers import words
from tests.kv.world import DIGEST, GEOMETRY, PAGE_BYTES, PAGE_TOKENS, contents, small_arena


@pytest.fixture
def source(tmp_path: Path) -> Side:
    """An engine that runs a request of six full pages."""
    side = Side(tmp_path, "source")
    side.compute(f"{REQUEST}/0~1", TOKENS)
    return side


@pytest.fixture
def target(tmp_path: Path) -> Iterator[Side]:
    side = Side(tmp_path, "target")
    yield side
    side.exchange.close()


def written(folder: Path, data: bytes) -> Path:
    path = folder / "sent"
    path.write_bytes(data)
    return path


def offer(target: Side, path: Path | str, request: str = REQUEST, tenant: str = "") -> dict[str, Any]:
    return target.exchange.take({"model": "tiny", "request": request, "path": str(path), "tenant": tenant})


def test_pages_of_another_engine_are_shared(source: Side, target: Side, tmp_path: Path) -> None:
    found = source.found()
    data = b"".join(found.read())
    assert len(data) == found.head.nbytes == decode_head(data).nbytes
    assert offer(target, written(tmp_path, data)) == {"pages": 6}
    target.use()
    grant = target.acquire("s", TOKENS)
    assert grant.cached_tokens == 6 * PAGE_TOKENS
    target.check_shared(grant, TOKENS)
    assert target.manager.pool.counters.imported == 6
    # They can be sent on, and have the same identities.
    target.manager.release("s", len(TOKENS))
    target.compute(f"{REQUEST}/0~2", TOKENS)
    assert b"".join(target.found().read()) == data


def test_an_offer_is_for_its_request_alone(source: Side, target: Side, tmp_path: Path) -> None:
    offer(target, written(tmp_path, b"".join(source.found().read())))
    target.use("req-other/0~1")
    assert target.acquire("s", TOKENS).cached_tokens == 0


@pytest.mark.parametrize("changed", [["other"] * 6, ["same", "same", "other", "other", "other", "other"]])
def test_pages_of_other_tokens_are_not_used(changed: list[str], source: Side, target: Side, tmp_path: Path) -> None:
    offer(target, written(tmp_path, b"".join(source.found().read())))
    tokens = [token + 100 * (changed[min(at // PAGE_TOKENS, 5)] == "other") for at, token in enumerate(TOKENS)]
    target.loaded.pages.rows = SimpleNamespace(known=lambda row, n: (np.array(tokens, np.int32), 1))
    target.use()
    grant = target.acquire("s", tokens)
    assert grant.cached_tokens == changed.count("same") * PAGE_TOKENS
    target.check_shared(grant, tokens)


def test_pages_of_another_tenant_are_not_used(source: Side, target: Side, tmp_path: Path) -> None:
    offer(target, written(tmp_path, b"".join(source.found().read())))
    target.use(salt="tenant\0")
    assert target.acquire("s", TOKENS, "tenant\0").cached_tokens == 0
    assert target.acquire("t", TOKENS).cached_tokens == 0
    assert target.manager.pool.counters.imported == 0


def flips(n_bytes: int) -> list[int]:
    """Places in a run of six pages: each field of the head and of two identities, and some of the pages' bytes."""
    identities = HEAD_BYTES, HEAD_BYTES + 2 * IDENTITY_BYTES
    places = [0, 8, 12, 16, 24, 60]
    places += [at + field for at in identities for field in (0, 16, 32, 48, 56, 60, 64)]
    contents_at = HEAD_BYTES + 6 * IDENTITY_BYTES
    places += [contents_at, contents_at + 2 * PAGE_BYTES + 77, n_bytes - 1]
    return places


def test_a_changed_byte_is_never_used(source: Side, tmp_path: Path) -> None:
    good = b"".join(source.found().read())
    n_refused = n_partial = 0
    for number, place in enumerate(flips(len(good))):
        target = Side(tmp_path, f"target-{number}")
        bad = bytearray(good)
        bad[place] ^= 0x40
        try:
            offer(target, written(tmp_path, bytes(bad)))
        except InvalidRequest:
            n_refused += 1
            continue
        target.use()
        grant = target.acquire("s", TOKENS)
        assert grant.cached_tokens < 6 * PAGE_TOKENS, place
        # What was damaged was seen before it was shared, what is before it was used, and nothing behind it was copied.
        counters = target.manager.pool.counters
        assert counters.imported * PAGE_TOKENS == grant.cached_tokens
        assert counters.checksum_failures <= 1
        n_partial += grant.cached_tokens > 0
        target.check_shared(grant, TOKENS)
        target.exchange.close()
    assert n_refused >= 6
    assert n_partial >= 3


@pytest.mark.parametrize("length", [0, HEAD_BYTES - 1, HEAD_BYTES, -1, -PAGE_BYTES])
def test_a_shortened_file_is_refused(length: int, source: Side, target: Side, tmp_path: Path) -> None:
    data = b"".join(source.found().read())
    with pytest.raises(InvalidRequest, match="cannot be used"):
        offer(target, written(tmp_path, data[:length]))


def test_a_file_that_is_shortened_later_ends_no_process(source: Side, target: Side, tmp_path: Path) -> None:
    path = written(tmp_path, b"".join(source.found().read()))
    offer(target, path)
    os.truncate(path, HEAD_BYTES + 6 * IDENTITY_BYTES + 2 * PAGE_BYTES)
    target.use()
    grant = target.acquire("s", TOKENS)
    assert grant.cached_tokens == 2 * PAGE_TOKENS
    target.check_shared(grant, TOKENS)
    assert target.manager.pool.counters.checksum_failures == 1  # what follows is not read
    assert target.manager.count() == (N_PAGES - 7, 0, 7)


@pytest.mark.parametrize(("field", "value"), [("kv_type", "f32"), ("page_tokens", 32), ("n_layers", 2)])
def test_pages_of_another_geometry_are_refused(
    field: str, value: Any, source: Side, target: Side, tmp_path: Path
) -> None:
    target.loaded.pages.geometry = GEOMETRY._replace(**{field: value})
    with pytest.raises(InvalidRequest, match=field):
        offer(target, written(tmp_path, b"".join(source.found().read())))
    target.loaded.pages.geometry, target.loaded.pages.digest = GEOMETRY, "ab" * 32
    with pytest.raises(InvalidRequest, match="digest"):
        offer(target, tmp_path / "sent")


@pytest.mark.parametrize("path", ["", "/dev/zero", "/nonexistent", "/tmp"])
def test_what_is_no_file_of_pages_is_refused(path: str, target: Side) -> None:
    with pytest.raises(InvalidRequest, match="cannot be used"):
        offer(target, path)


def test_pages_that_a_full_arena_has_no_room_for_are_left_out(source: Side, tmp_path: Path) -> None:
    target = Side(tmp_path, "target", n_pages=7)
    other = [900 + token for token in TOKENS[: 4 * PAGE_TOKENS]]
    target.compute("held", other)  # four pages that stay
    offer(target, written(tmp_path, b"".join(source.found().read())))
    target.use()
    target.manager.check()
    assert target.manager.pool.counters.imported == 3
    target.manager.release("held", len(other))
    grant = target.acquire("s", TOKENS)
    assert grant.cached_tokens == 3 * PAGE_TOKENS
    target.check_shared(grant, TOKENS)
    target.exchange.close()


def test_an_import_evicts_no_page_of_its_own_prefix(source: Side, tmp_path: Path) -> None:
    target = Side(tmp_path, "target", n_pages=7)
    target.compute("first", TOKENS[: 2 * PAGE_TOKENS])
    target.manager.release("first", 2 * PAGE_TOKENS)  # cached longest ago: evicted first
    target.compute("later", [900 + token for token in TOKENS[: 3 * PAGE_TOKENS]])
    target.manager.release("later", 3 * PAGE_TOKENS)
    offer(target, written(tmp_path, b"".join(source.found().read())))
    target.use()
    grant = target.acquire("s", TOKENS)
    assert grant.cached_tokens == 6 * PAGE_TOKENS
    assert target.manager.pool.counters.imported == 4
    target.exchange.close()


def test_offers_are_bounded_in_number_bytes_and_time(
    source: Side, target: Side, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path, b"".join(source.found().read()))
    for number in range(MAX_OFFERS):
        offer(target, path, f"req-{number}")
    with pytest.raises(Overloaded, match="offers"):
        offer(target, path)
    offer(target, path, "req-0")  # replaces its offer
    target.now = OFFER_S
    target.exchange.expire()
    assert len(target.exchange) == 0
    monkeypatch.setattr(page_exchange, "MAX_OFFERED_BYTES", path.stat().st_size)
    offer(target, path)
    with pytest.raises(Overloaded, match="bytes"):
        offer(target, path, "req-other")
    target.use()
    assert len(target.exchange) == 0  # all of its pages are in the arena
    assert target.acquire("s", TOKENS).cached_tokens == 6 * PAGE_TOKENS


def test_an_offer_stays_for_further_sequences_of_its_request(source: Side, target: Side, tmp_path: Path) -> None:
    source.compute(f"{REQUEST}/1~2", [*TOKENS[: 3 * PAGE_TOKENS], *(77 for _ in range(PAGE_TOKENS)), 1])
    offer(target, written(tmp_path, b"".join(source.found().read())))
    target.use()
    target.now = USED_S - 0.1
    target.exchange.expire()
    assert len(target.exchange) == 1
    target.now = USED_S
    target.exchange.expire()
    assert len(target.exchange) == 0


def test_a_tenant_has_half_of_the_places_for_offers(
    source: Side, target: Side, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path, b"".join(source.found().read()))
    most = MAX_OFFERS // TENANT_SHARE
    for number in range(most):
        offer(target, path, f"req-{number}", "mine")
    offer(target, path, "req-0", "mine")  # replaces its offer
    for number in range(MAX_OFFERS - most):
        offer(target, path, f"req-other-{number}", "other")
    with pytest.raises(Overloaded, match="offers"):
        offer(target, path, "req-third", "third")
    target.loaded.pages.rows = SimpleNamespace(known=lambda row, n: (np.full(n, 900, np.int32), 1))
    target.use("req-other-0/0~1")  # it uses none of them, and another tenant's share gets no place by its end
    with pytest.raises(Overloaded, match="tenant"):
        offer(target, path, "req-more", "mine")
    assert len(target.exchange) == MAX_OFFERS
    target.exchange.close()
    monkeypatch.setattr(page_exchange, "MAX_OFFERED_BYTES", 3 * path.stat().st_size)
    offer(target, path, "req-0", "mine")
    with pytest.raises(Overloaded, match="tenant"):
        offer(target, path, "req-1", "mine")
    offer(target, path, "req-2", "other")


def test_used_offers_give_their_places_to_new_ones(source: Side, target: Side, tmp_path: Path) -> None:
    path = written(tmp_path, b"".join(source.found().read()))
    for number in range(MAX_OFFERS):
        offer(target, path, f"req-{number}")
    target.loaded.pages.rows = SimpleNamespace(known=lambda row, n: (np.full(n, 900, np.int32), 1))
    target.use("req-3/0~1")  # it uses none of them
    target.use("req-5/0~1")
    assert len(target.exchange) == MAX_OFFERS
    offer(target, path, "req-new-1")
    offer(target, path, "req-new-2")
    with pytest.raises(Overloaded, match="offers"):
        offer(target, path, "req-new-3")
    assert not target.begin("req-3/0~2")


def test_a_turn_of_the_loop_copies_a_part(
    source: Side, target: Side, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Frames are handled meanwhile: another sequence gets pages, but none of those that have come."""
    monkeypatch.setattr(page_exchange, "STEP_BYTES", 2 * PAGE_BYTES)
    offer(target, written(tmp_path, b"".join(source.found().read())))
    other = [900 + token for token in TOKENS]
    sequence = f"{REQUEST}/0~1"
    assert target.begin(sequence)
    assert target.step() == []
    target.manager.check()
    assert target.manager.count().leased == 2
    assert target.acquire("other", other).cached_tokens == 0
    assert target.step() == []
    assert target.step() == [sequence]
    assert target.step() == []
    target.manager.check()
    assert target.manager.count().leased == 6 + 7
    grant = target.acquire(sequence, TOKENS)
    target.loaded.imports.end(sequence)
    assert grant.cached_tokens == 6 * PAGE_TOKENS
    target.check_shared(grant, TOKENS)


def test_an_offer_keeps_its_place_while_it_is_copied(
    source: Side, target: Side, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_exchange, "STEP_BYTES", 2 * PAGE_BYTES)
    path = written(tmp_path, b"".join(source.found().read()))
    offer(target, path)
    for number in range(MAX_OFFERS - 1):
        offer(target, path, f"req-{number}")
    sequence = f"{REQUEST}/0~1"
    assert target.begin(sequence)
    assert target.step() == []
    with pytest.raises(Overloaded, match="offers"):
        offer(target, path, "req-more")
    target.now = 2 * USED_S  # a busy machine
    target.exchange.expire()
    assert [target.step(), target.step()] == [[], [sequence]]
    assert target.manager.pool.counters.imported == 6
    offer(target, path, "req-more")
    target.loaded.imports.end(sequence)


@pytest.mark.parametrize("how", ["the sequence ends", "the scheduler ends", "it asks again", "the offer ends"])
def test_an_import_that_ends_early_holds_no_page(
    how: str, source: Side, target: Side, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_exchange, "STEP_BYTES", 2 * PAGE_BYTES)
    offer(target, written(tmp_path, b"".join(source.found().read())))
    sequence = f"{REQUEST}/0~1"
    assert target.begin(sequence)
    assert target.step() == []
    if how == "the sequence ends":
        target.loaded.imports.end(sequence)
        assert target.step() == []
    elif how == "the scheduler ends":
        target.loaded.imports.clear()
        assert target.step() == []
    elif how == "it asks again":
        assert target.begin(sequence)
        assert [target.step(), target.step()] == [[], [sequence]]
        assert target.manager.pool.counters.imported == 6
        target.loaded.imports.end(sequence)
    else:
        target.exchange.close()
        assert target.step() == [sequence]
        target.loaded.imports.end(sequence)
    target.manager.check()
    assert target.manager.count().leased == 0
    grant = target.acquire(sequence, TOKENS)
    assert grant.cached_tokens == (6 if how == "it asks again" else 2) * PAGE_TOKENS
    target.check_shared(grant, TOKENS)


def test_no_page_behind_a_gap_is_copied(source: Side, target: Side, tmp_path: Path) -> None:
    data = bytearray(b"".join(source.found().read()))
    data[HEAD_BYTES + 2 * IDENTITY_BYTES] ^= 1  # the third page has no name
    offer(target, written(tmp_path, bytes(data)))
    target.use()
    assert target.manager.pool.counters.imported == 2
    assert target.acquire("s", TOKENS).cached_tokens == 2 * PAGE_TOKENS


def test_with_a_window_only_its_pages_are_copied(tmp_path: Path) -> None:
    n_pages, window = 3 * KV_SPLIT // PAGE_TOKENS, 40
    tokens = [1 + at // PAGE_TOKENS for at in range(n_pages * PAGE_TOKENS + 3)]
    source, target = (Side(tmp_path, name, n_pages=n_pages + 1) for name in ("source", "target"))
    source.compute(f"{REQUEST}/0~1", tokens)
    data = bytearray(b"".join(source.found().read()))
    data[HEAD_BYTES + 2 * IDENTITY_BYTES] ^= 1  # a page that the window does not reach
    offer(target, written(tmp_path, bytes(data)))
    target.loaded.pages.rows = SimpleNamespace(known=lambda row, n: (np.array(tokens, np.int32), 1))
    target.use(window=window)
    assert target.manager.pool.counters.imported == KV_SPLIT // PAGE_TOKENS
    grant = target.manager.acquire("s", np.array(tokens, np.int32), len(tokens), window=window, ahead=1)
    assert isinstance(grant, Grant)
    assert grant.cached_tokens == n_pages * PAGE_TOKENS
    for place in range(n_pages - KV_SPLIT // PAGE_TOKENS, n_pages):
        np.testing.assert_array_equal(target.views.pages[grant.pages[place]], contents(tokens, place))
    target.exchange.close()


def test_a_damaged_page_of_the_arena_is_replaced(source: Side, target: Side, tmp_path: Path) -> None:
    target.compute("first", TOKENS)
    damaged = target.manager.leases["first"].pages[1]
    target.manager.release("first", len(TOKENS))
    target.views.pages[damaged, 9] ^= 1
    offer(target, written(tmp_path, b"".join(source.found().read())))
    target.use()
    assert target.manager.pool.counters.imported == 1
    grant = target.acquire("s", TOKENS)
    assert grant.cached_tokens == 6 * PAGE_TOKENS
    target.check_shared(grant, TOKENS)


def test_an_import_evicts_no_later_page_of_its_own_prefix(source: Side, tmp_path: Path) -> None:
    target = Side(tmp_path, "target", n_pages=8)
    target.compute("first", TOKENS)
    first, second = target.manager.leases["first"].pages[:2]
    target.manager.release("first", len(TOKENS))
    for page in (first, second):
        target.manager.pool.table.evict(page)
    target.compute("later", [900 + token for token in TOKENS[: 4 * PAGE_TOKENS]])
    target.manager.release("later", 4 * PAGE_TOKENS)  # used last: evicted last
    offer(target, written(tmp_path, b"".join(source.found().read())))
    target.use()
    assert target.manager.pool.counters.imported == 2
    grant = target.acquire("s", TOKENS)
    assert grant.cached_tokens == 6 * PAGE_TOKENS
    target.check_shared(grant, TOKENS)
    target.exchange.close()


def test_closed_offers_leave_no_descriptor(source: Side, target: Side, tmp_path: Path) -> None:
    path = written(tmp_path, b"".join(source.found().read()))
    before = len(os.listdir("/proc/self/fd"))
    offer(target, path)
    target.exchange.close()
    with pytest.raises(ValueError, match="begin"):
        Offer("/proc/self/exe")
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_request_without_pages_has_none_to_send(source: Side) -> None:
    for asked in ({"model": "tiny", "request": "req-other"}, {"model": "other", "request": REQUEST}, {}):
        with pytest.raises(NotFound):
            source.exchange.tails(asked)


def test_a_page_that_is_used_again_meanwhile_is_not_sent(source: Side) -> None:
    found = source.found()
    source.views.pages[3, 5] ^= 1
    with pytest.raises(ValueError, match="changed"):
        list(found.read())


def test_of_a_prefix_over_the_bound_the_beginning_is_sent(source: Side) -> None:
    answer = source.exchange.tails({"model": "tiny", "request": REQUEST})
    whole = source.found()
    most = HEAD_BYTES + 4 * (PAGE_BYTES + IDENTITY_BYTES)
    for n_pages, max_bytes in ((4, most), (3, most - 1), (0, HEAD_BYTES), (0, 0), (6, 1 << 30)):
        found = find_pages(source.path, answer["digest"], answer["tails"], max_bytes)
        assert (len(found.places), found.n_known) == (n_pages, 6)
        assert found.head.nbytes <= max(max_bytes, HEAD_BYTES)
        assert found.identities == whole.identities[: n_pages * IDENTITY_BYTES]


def test_sequences_of_a_request_send_their_common_prefix_once(source: Side) -> None:
    other = [*TOKENS[: 3 * PAGE_TOKENS], *(77 for _ in range(PAGE_TOKENS)), 1]
    source.compute(f"{REQUEST}/1~2", other)
    assert len(source.found().places) == 7


def test_an_empty_arena_has_nothing(tmp_path: Path) -> None:
    side = Side(tmp_path, "empty")
    assert find_pages(side.path, DIGEST.hex(), ["00" * 16], 1 << 30).places == ()
    assert small_arena(1).headers.shape == side.views.headers[:1].shape


@pytest.mark.slow
def test_two_processes_exchange_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    homes = [tmp_path / name for name in ("a", "b")]
    for home in homes:
        home.mkdir()
        configure(home)
    digests = {write_model(home) for home in homes}
    (digest,) = digests
    tokens = words(*range(5, 10))
    with KvProcess(homes[0]), KvProcess(homes[1]), Scheduler(homes[0], digest) as a, Scheduler(homes[1], digest) as b:
        a.wait_ready()
        b.wait_ready()
        a.acquire(f"{REQUEST}/0~1", tokens)
        a.compute(f"{REQUEST}/0~1")
        a.wait(lambda: a.state().leased == 6)

        def call(home: Path, op: str, **more: Any) -> dict[str, Any]:
            config = load_config(home)
            return control.call(paths.run_dir(config), "kv", {"op": op, "model": "tiny", "request": REQUEST, **more})

        answer: dict[str, Any] = {}

        def computed() -> bool:
            try:
                answer.update(call(homes[0], "tails"))
            except Exception:
                return False
            return True

        a.wait(computed)
        arena = paths.arena_dir(load_config(homes[0])) / answer["arena"]
        data = b"".join(find_pages(arena, answer["digest"], answer["tails"], 1 << 30).read())
        bad = bytearray(data)
        bad[-1] ^= 1  # of the last page
        for name, sent, n_cached in (("cleared", data, 0), ("damaged", bytes(bad), 4), ("whole", data, 5)):
            memory = os.memfd_create(name)
            os.write(memory, sent)
            assert call(homes[1], "take", path=f"/proc/{os.getpid()}/fd/{memory}") == {"pages": 5}
            os.close(memory)
            if name == "cleared":  # what has come and is not cached yet goes as well
                run_dir, everything = paths.run_dir(load_config(homes[1])), {"op": "clear", "model": "", "tenant": ""}
                report = cleared(run_dir, everything, WAIT_S, pause=lambda _: b.turn())
                assert report["done"]
            granted = b.acquire(f"{REQUEST}/0~{name}", tokens)
            assert granted.cached_tokens == n_cached * PAGE_TOKENS
            b.check(f"{REQUEST}/0~{name}", granted.cached_tokens)
        b.wait_total("starling_kv_cache_imported_pages_total", 5)
        b.wait(lambda: "pages of another engine are damaged" in KvProcess(homes[1]).log())
