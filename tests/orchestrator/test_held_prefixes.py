"""Prefixes that agents publish: every orchestrator lists what an engine holds, and no longer than it does."""

from __future__ import annotations

import hashlib

from hypothesis import given
from hypothesis import strategies as st

from pipeline.api import page_names
from pipeline.fleet.bodies import HeartbeatResponse, PrefixUpdate
from stages.agent import held_prefixes as agent
from stages.agent.held_prefixes import PrefixLog
from stages.orchestrator.held_prefixes import RECENT_S, HeldPrefixes, engine_name
from stages.orchestrator.prefixes import BLOCK_BYTES, block_hashes
from tests.orchestrator.agents import engine, heartbeat

PAGE = 32  # tokens
HASHES = [hashlib.sha256(bytes([number])).digest()[:16] for number in range(16)]
NAMES = [page_names.name_of(one) for one in HASHES]
ENGINE = engine(publishes_prefixes=True)
NAME = engine_name("a", ENGINE)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def answer(update: PrefixUpdate | None) -> HeartbeatResponse:
    return heartbeat("a", engine(publishes_prefixes=True, prefixes=update))


def published(log: PrefixLog, held: HeldPrefixes) -> None:
    """One poll."""
    cursor = held.cursors("a").get(ENGINE.model_id)
    held.apply(answer(log.since(cursor.number) if cursor is not None else None))


def prompt(text: bytes, n_pages: int) -> tuple[tuple[int, ...], int, str]:
    """Blocks, bytes and header of a prompt of some full pages, four bytes a token."""
    return block_hashes(text), len(text), page_names.encode(len(text) // 4, PAGE, HASHES[:n_pages])


@given(st.lists(st.tuples(st.sets(st.integers(0, 9), max_size=6), st.integers(0, 3))), st.integers(1, 6))
def test_every_follower_knows_what_is_held_now(looks: list[tuple[set[int], int]], remembered: int) -> None:
    """Whatever an engine holds at each look, and whichever polls each of three orchestrators makes."""
    log, followers = PrefixLog("1"), [HeldPrefixes(Clock()) for _ in range(3)]
    most, agent.MAX_REMOVED = agent.MAX_REMOVED, remembered
    try:
        for held, which in looks:
            log.observe(held)
            for follower in followers[:which]:
                published(log, follower)
        for follower in followers:
            published(log, follower)
            published(log, follower)  # the first answer of an unknown engine says only that it publishes
            assert [one.names for one in follower._published.values()] == [looks[-1][0] if looks else set()]
    finally:
        agent.MAX_REMOVED = most


def test_an_answer_that_was_overtaken_changes_nothing() -> None:
    log, held = PrefixLog("1"), HeldPrefixes(Clock())
    log.observe({1, 2})
    published(log, held)
    late = log.since(0)
    published(log, held)
    early = log.since(1)
    log.observe({2, 3})
    published(log, held)
    held.apply(answer(early))
    assert held._published[NAME].names == {2, 3}
    held.apply(answer(late))  # everything, as of then: the next answer corrects it
    published(log, held)
    assert held._published[NAME].names == {2, 3}


@given(st.binary(max_size=200), st.integers(0, 40))
def test_headers_survive_or_are_refused(raw: bytes, n_pages: int) -> None:
    hashes = [hashlib.sha256(b"%d" % number).digest() for number in range(n_pages * 8)]
    found = page_names.decode(page_names.encode(7 + PAGE * len(hashes), PAGE, hashes))
    if not hashes:
        assert found is None
    else:
        assert found is not None and found.n_tokens == 7 + PAGE * len(hashes)
        assert 1 <= len(found.pages) <= page_names.MAX_NAMES
        assert found.pages[-1] == (PAGE * len(hashes), page_names.name_of(hashes[-1]))
        assert all(name == page_names.name_of(hashes[end // PAGE - 1]) for end, name in found.pages)
    page_names.decode(raw.decode("latin-1"))


def test_a_prefix_counts_where_its_pages_are_and_until_they_are_evicted() -> None:
    clock, log = Clock(), PrefixLog("1")
    held = HeldPrefixes(clock)
    text = bytes(range(256)) * 4  # 256 tokens, 8 pages
    blocks, nbytes, header = prompt(text, 8)
    published(log, held)
    held.learn(blocks, nbytes, header)
    log.observe({99})
    published(log, held)
    assert held.matched_bytes(NAME, blocks) == 0  # another engine named the pages: this one does not hold them
    log.observe(NAMES[:4])
    published(log, held)
    assert held.matched_bytes(NAME, blocks) == 2 * BLOCK_BYTES  # 128 tokens
    log.observe(NAMES[:8])
    published(log, held)
    assert held.matched_bytes(NAME, blocks) == 4 * BLOCK_BYTES
    log.observe({NAMES[0]})
    published(log, held)
    assert held.matched_bytes(NAME, blocks) == 0
    assert held.matched_bytes(NAME, block_hashes(b"x" * 1024)) == 0


def test_what_was_just_sent_counts_until_it_should_have_been_published() -> None:
    clock, log = Clock(), PrefixLog("1")
    held = HeldPrefixes(clock)
    blocks = block_hashes(b"y" * 1024)
    held.remember(NAME, blocks)
    assert held.matched_bytes(NAME, blocks) == 1024
    log.observe({1})
    published(log, held)
    published(log, held)
    assert held.matched_bytes(NAME, blocks) == 1024
    clock.now += 2 * RECENT_S
    assert held.matched_bytes(NAME, blocks) == 0
    # Of an engine that publishes nothing, everything that was sent counts.
    other = engine_name("b", engine())
    held.remember(other, blocks)
    clock.now += 3 * RECENT_S
    assert held.matched_bytes(other, blocks) == 1024


def test_engines_that_have_ended_are_forgotten() -> None:
    log, held = PrefixLog("1"), HeldPrefixes(Clock())
    published(log, held)
    assert set(held.cursors("a")) == {ENGINE.model_id}
    held.keep_only({"b/x/1"})
    assert held.cursors("a") == {}
