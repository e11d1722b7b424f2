"""What the agents' KV caches probably hold: the prefixes of the prompts that were sent to each of them.

A prompt is cut into blocks of `BLOCK_BYTES` of its JSON text.  The hash of a block covers all text before it, as page
hashes do, so that the number of leading blocks that an agent was sent is the length of the common prefix.  Hashes are
64-bit: a collision makes an estimate wrong and nothing else.  Bounded per agent, least recently sent first.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import xxhash

from pipeline.api.json_body import to_json

BLOCK_BYTES = 256  # some 64 tokens: two pages
MAX_BLOCKS = 1024  # of one prompt: 256 KiB of text
MAX_REMEMBERED = 65_536  # blocks of an agent: 16 MiB of text


def prompt_text(body: dict[str, Any]) -> bytes:
    """The bytes of a body that its prompt is made of.

    The end of an array is left out, so that a conversation is a prefix of its continuation.
    """
    for name in ("messages", "prompt", "text", "tokens"):
        if body.get(name) is not None:
            first = to_json(body.get("tools")) if body.get("tools") else b""
            if isinstance(body.get("system"), str | list):  # Anthropic's API
                first += to_json(body["system"])
            return first + to_json(body[name]).removesuffix(b"]")
    return b""


def block_hashes(text: bytes, salt: str = "") -> tuple[int, ...]:
    """Chained hashes of the full blocks of `text`. Prompts of different salts share no blocks."""
    hashes = []
    chained = xxhash.xxh3_64_intdigest(salt.encode("utf-8", "surrogatepass"))
    view = memoryview(text)
    for begin in range(0, min(len(text), MAX_BLOCKS * BLOCK_BYTES) - BLOCK_BYTES + 1, BLOCK_BYTES):
        chained = xxhash.xxh3_64_intdigest(view[begin : begin + BLOCK_BYTES], seed=chained)
        hashes.append(chained)
    return tuple(hashes)


class PrefixMemory:
    """The blocks that each engine was sent. An engine is named by any string that changes with its start."""

    def __init__(self, max_blocks: int = MAX_REMEMBERED) -> None:
        self._max_blocks = max_blocks
        self._blocks: dict[str, OrderedDict[int, None]] = {}

    def matched_bytes(self, engine: str, blocks: tuple[int, ...]) -> int:
        """Bytes of the longest prefix of `blocks` that the engine was sent."""
        known = self._blocks.get(engine)
        if not known:
            return 0
        count = 0
        for block in blocks:
            if block not in known:
                break
            count += 1
        return count * BLOCK_BYTES

    def remember(self, engine: str, blocks: tuple[int, ...]) -> None:
        """A prompt was sent to the engine. The first blocks count as the most recent: they are evicted last."""
        known = self._blocks.setdefault(engine, OrderedDict())
        for block in reversed(blocks):
            known[block] = None
            known.move_to_end(block)
        while len(known) > self._max_blocks:
            known.popitem(last=False)

    def keep_only(self, engines: set[str]) -> None:
        """Forget the engines that have ended."""
        for name in self._blocks.keys() - engines:
            del self._blocks[name]

    def count(self, engine: str) -> int:
        """Blocks remembered of an engine."""
        return len(self._blocks.get(engine, ()))
