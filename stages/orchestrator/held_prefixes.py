"""The prefixes of prompts that each engine holds, for the term `kv_hit`.

    published   agents name the pages that their engines hold, and what has changed since the last poll
    named       an engine's answer names the pages of its prompt; since then this orchestrator stores which page a
                block of text ends in, at each engine of the version
    sent        what was sent within `RECENT_S` counts as held: its pages may not be published yet.  Of engines whose
                agents publish nothing, everything that was sent counts (prefixes.py)

All of it is bounded, and an estimate: wrong names make a routing choice worse and no answer different.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from pipeline.api.adapter_names import base_of
from pipeline.api.page_names import decode
from pipeline.fleet.bodies import HeartbeatResponse, LoadedModel, PrefixCursor, PrefixUpdate
from stages.orchestrator.prefixes import BLOCK_BYTES, PrefixMemory

RECENT_S = 5.0  # from sending a prompt until its pages are published
MAX_NAMED = 262_144  # blocks of text with their pages, of all models: 64 MiB of text
MAX_HELD = 65_536  # names of one engine; an agent publishes fewer


def engine_name(agent_id: str, model: LoadedModel) -> str:
    """A name that changes when the engine starts anew, with an empty KV cache. Adapters share that of their model."""
    return f"{agent_id}/{base_of(model.model_id)}/{model.engine_incarnation}"


class _Published:
    """The pages of one engine."""

    def __init__(self, agent_id: str, model: LoadedModel) -> None:
        self.agent_id = agent_id
        self.model_id = model.model_id
        self.incarnation = model.engine_incarnation
        self.number = 0
        self.names: set[int] = set()

    def apply(self, update: PrefixUpdate) -> None:
        if update.after not in (0, self.number):
            return  # an answer that was overtaken
        if update.after == 0:
            self.names.clear()
        self.names.difference_update(_names(update.removed))
        self.names.update(_names(update.added)[: MAX_HELD - len(self.names)])
        self.number = update.number


class HeldPrefixes:
    """One per orchestrator. `clock` is monotonic, s."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.sent = PrefixMemory()
        self._recent = PrefixMemory()
        self._recent_since = clock()
        self._before = PrefixMemory()  # the recent ones of the period before
        self._clock = clock
        self._published: dict[str, _Published] = {}  # by engine
        self._named: OrderedDict[int, int] = OrderedDict()  # the page's name by block

    # ---------------------------------------------------------------- what engines hold

    def cursors(self, agent_id: str) -> dict[str, PrefixCursor]:
        """What an agent is asked to publish, by model: changes since the last poll."""
        return {
            one.model_id: PrefixCursor(incarnation=one.incarnation, number=one.number)
            for one in self._published.values()
            if one.agent_id == agent_id
        }

    def apply(self, details: HeartbeatResponse) -> HeartbeatResponse:
        """Store what an agent has published; returns its answer without that."""
        models = []
        for one in details.loaded_models:
            if one.publishes_prefixes and one.engine_incarnation:
                name = engine_name(details.agent_id, one)
                published = self._published.get(name)
                if published is None:
                    published = self._published[name] = _Published(details.agent_id, one)
                if one.prefixes is not None:
                    published.apply(one.prefixes)
            models.append(msgspec.structs.replace(one, prefixes=None))
        return msgspec.structs.replace(details, loaded_models=tuple(models))

    def keep_only(self, engines: set[str]) -> None:
        """Forget the engines that have ended."""
        for memory in (self.sent, self._recent, self._before):
            memory.keep_only(engines)
        for name in self._published.keys() - engines:
            del self._published[name]

    def count_held(self, engine: str, names: Sequence[int]) -> int:
        """How many of a prefix's pages, from the first one on, the engine holds, as its agent publishes it."""
        published = self._published.get(engine)
        held = published.names if published is not None else frozenset()
        return next((place for place, name in enumerate(names) if name not in held), len(names))

    # ---------------------------------------------------------------- prompts

    def remember(self, engine: str, blocks: tuple[int, ...]) -> None:
        """A prompt was sent to the engine."""
        self._turn()
        self.sent.remember(engine, blocks)
        self._recent.remember(engine, blocks)

    def learn(self, blocks: tuple[int, ...], prompt_bytes: int, header: str) -> None:
        """An engine has named the pages of a prompt: a block ends in the page at the same share of the prompt."""
        named = decode(header)
        if named is None or not blocks or not prompt_bytes:
            return
        at = 0
        for number, block in enumerate(blocks):
            tokens = (number + 1) * BLOCK_BYTES * named.n_tokens / prompt_bytes
            while at + 1 < len(named.pages) and named.pages[at + 1][0] <= tokens:
                at += 1
            self._named[block] = named.pages[at][1]
            self._named.move_to_end(block)
        while len(self._named) > MAX_NAMED:
            self._named.popitem(last=False)

    def matched_bytes(self, engine: str, blocks: tuple[int, ...]) -> int:
        """Bytes of the longest prefix of a prompt that the engine probably holds."""
        published = self._published.get(engine)
        if published is None or not published.number:
            return self.sent.matched_bytes(engine, blocks)
        self._turn()
        count = 0
        for block in blocks:
            name = self._named.get(block)
            if name is None or name not in published.names:
                break
            count += 1
        sent = max(memory.matched_bytes(engine, blocks) for memory in (self._recent, self._before))
        return max(count * BLOCK_BYTES, sent)

    def _turn(self) -> None:
        """Forget what was sent more than `RECENT_S` ago: at most twice that long after it was sent."""
        now = self._clock()
        if now - self._recent_since >= RECENT_S:
            is_old = now - self._recent_since >= 2 * RECENT_S
            self._before = PrefixMemory() if is_old else self._recent
            self._recent, self._recent_since = PrefixMemory(), now


def _names(packed: bytes) -> list[int]:
    names: list[int] = np.frombuffer(packed[: len(packed) // 8 * 8], "<u8").tolist()
    return names
