"""Prefixes: what an engine was sent is found again, as far as prompts agree, and within the bound."""

from __future__ import annotations

import json
from itertools import takewhile

from hypothesis import given
from hypothesis import strategies as st

from stages.orchestrator.prefixes import BLOCK_BYTES, MAX_BLOCKS, PrefixMemory, block_hashes, prompt_text

PARTS = st.lists(st.sampled_from([b"a", b"b"]), max_size=6)


def text_of(parts: list[bytes]) -> bytes:
    return b"".join(part * BLOCK_BYTES for part in parts)


def common(some: list[bytes], others: list[bytes]) -> int:
    return len(list(takewhile(lambda pair: pair[0] == pair[1], zip(some, others))))


@given(st.lists(PARTS, max_size=8), PARTS)
def test_a_match_is_the_longest_common_prefix(sent: list[list[bytes]], asked: list[bytes]) -> None:
    memory = PrefixMemory()
    for parts in sent:
        memory.remember("e", block_hashes(text_of(parts)))
    longest = max((common(parts, asked) for parts in sent), default=0)
    assert memory.matched_bytes("e", block_hashes(text_of(asked))) == longest * BLOCK_BYTES
    assert memory.matched_bytes("another", block_hashes(text_of(asked))) == 0


@given(st.lists(PARTS, max_size=20), st.integers(1, 5))
def test_memory_is_bounded_and_keeps_what_was_sent_last(sent: list[list[bytes]], bound: int) -> None:
    memory = PrefixMemory(bound)
    for parts in sent:
        blocks = block_hashes(text_of(parts))
        memory.remember("e", blocks)
        assert memory.count("e") <= bound
        assert memory.matched_bytes("e", blocks) == min(len(blocks), bound) * BLOCK_BYTES


def test_salts_and_lengths_separate_prompts() -> None:
    text = b"x" * (3 * BLOCK_BYTES + 5)
    assert len(block_hashes(text)) == 3
    assert not set(block_hashes(text)) & set(block_hashes(text, "salt"))
    assert len(block_hashes(b"x" * (MAX_BLOCKS + 7) * BLOCK_BYTES)) == MAX_BLOCKS


def test_a_conversation_is_a_prefix_of_its_continuation() -> None:
    turns = [{"role": "user", "content": "Hello. " * 100}, {"role": "assistant", "content": "Good morning. " * 50}]
    begun, continued = ({"messages": turns[:1]}, {"messages": turns})
    assert prompt_text(continued).startswith(prompt_text(begun))
    assert prompt_text({"prompt": [1, 2, 3]}) == b"[1,2,3"
    assert prompt_text({"prompt": "text"}) == json.dumps("text").encode()
    assert prompt_text({"tools": [{"x": 1}], "messages": []}).startswith(b'[{"x":1}]')
    assert prompt_text({}) == b""


def test_engines_that_have_ended_are_forgotten() -> None:
    memory = PrefixMemory()
    blocks = block_hashes(b"x" * BLOCK_BYTES)
    for name in ("a", "b"):
        memory.remember(name, blocks)
    memory.keep_only({"b", "c"})
    assert (memory.count("a"), memory.count("b")) == (0, 1)
