"""Complete searches of two small parts of a fleet, with the real objects inside.

Leading     two candidates, one store (`MemoryStore`), terms (`Term`), messages that take any time or are lost, and
            processes that are stopped anywhere.  Time passes in ticks of 1 s
Streaming   one stream (`EventCutter`), two engines that give the same events, connections that end anywhere, also in
            the middle of an event, and bytes that a connection still had when it was given up

A state is copied, changed by one event, and known by its `key`.  The rules have names, and the test leaves out each:

    sent        a term is counted from when the lease was asked for, not from the answer
    fence       a leader's write has the condition of its term
    places      an engine that begins again sends what was delivered, which is left out by its place
    abort       bytes of a connection that is given up are not forwarded
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Coroutine, Hashable
from typing import Any, Protocol, Self

from pipeline.coordination.election import Term
from pipeline.coordination.interface import Change
from pipeline.coordination.memory import MemoryStore
from stages.orchestrator.event_cutter import EventCutter
from tests.fleet.coordination_stores import Clock

RULES = frozenset({"sent", "fence", "places", "abort"})
TTL_S = 2.5  # the holder's own time is 2 s


class World(Protocol):
    """A state of a search."""

    def copied(self) -> Self: ...
    def key(self) -> Hashable: ...
    def events(self) -> list[str]: ...
    def happen(self, event: str) -> None: ...
    def broken(self) -> str: ...


def search(start: World) -> tuple[int, list[str]]:
    """(number of reachable states, the shortest path to a broken one or an empty list)."""
    queue: deque[tuple[World, tuple[str, ...]]] = deque([(start, ())])
    known = {start.key()}
    while queue:
        world, way = queue.popleft()
        if why := world.broken():
            return len(known), [*way, why]
        for event in world.events():
            after = world.copied()
            after.happen(event)
            if after.key() not in known:
                known.add(after.key())
                queue.append((after, (*way, event)))
    return len(known), []


def now(call: Coroutine[Any, Any, Any]) -> Any:
    """The result of a call that waits for nothing."""
    try:
        call.send(None)
    except StopIteration as done:
        return done.value
    raise AssertionError("the call waits")


# ------------------------------------------------------------------ leading


class Candidate:
    def __init__(self) -> None:
        self.term: Term | None = None
        self.sent: tuple[str, float] | None = None  # a message that the store may receive: what, and when it was sent
        self.answer: tuple[str, float, str, int] | None = None  # what the store has answered
        self.write: tuple[Any, int] | None = None  # a write on its way: its conditions, and the fence of its term

    @property
    def fences(self) -> tuple[int, int, int]:
        """Of its term, of its answer, of its write; 0 without one."""
        return (
            self.term.fence if self.term else 0,
            self.answer[3] if self.answer else 0,
            self.write[1] if self.write else 0,
        )

    def key(self) -> Hashable:
        until = self.term.remaining_s if self.term else -1.0
        return until, self.sent, self.answer[:2] if self.answer else None


class Leading:
    """`ticks`: how long the search goes on."""

    def __init__(self, rules: frozenset[str], ticks: int = 4) -> None:
        self.rules = rules
        self.clock = Clock()
        self.ends = self.clock.now + ticks
        self.store = MemoryStore(self.clock)
        self.candidates = Candidate(), Candidate()
        self.applied = 0  # fence of the last write
        self.fault = ""

    def copied(self) -> Self:
        made = copy.copy(self)
        made.clock = Clock()
        made.clock.now = self.clock.now
        made.store = store = MemoryStore(made.clock, 0)
        store._items, store._revision = dict(self.store._items), self.store._revision
        store._leases = {name: copy.copy(lease) for name, lease in self.store._leases.items()}
        made.candidates = copy.copy(self.candidates[0]), copy.copy(self.candidates[1])
        for one in made.candidates:
            one.term = copy.copy(one.term)
            if one.term is not None:
                one.term._clock = made.clock
        return made

    def key(self) -> Hashable:
        """Of fences only their order counts, and of leases only the leader's."""
        item = self.store._items.get("leader")
        fences = [item[0].revision if item else 0, self.applied, *(f for one in self.candidates for f in one.fences)]
        ranks = {fence: rank for rank, fence in enumerate(sorted({0, *fences}))}
        ends = self.store._leases[item[1]].ends if item else 0.0
        numbers = tuple(ranks[fence] for fence in fences)
        candidates = sorted(zip((one.key() for one in self.candidates), (numbers[2:5], numbers[5:8])), key=repr)
        return self.clock.now, ends, numbers[:2], tuple(candidates), self.fault

    def events(self) -> list[str]:
        found = ["tick"] if self.clock.now < self.ends else []
        for index, one in enumerate(self.candidates):
            if one.sent is None and one.answer is None:
                found.append(f"{index} asks")
            if one.sent is not None:
                found += [f"store receives {index}", f"{index} is lost"]
            if one.answer is not None:
                found.append(f"{index} is answered")
            if one.write is None and one.term is not None and one.term.is_valid:
                found.append(f"{index} writes")
            if one.write is not None:
                found.append(f"store applies {index}")
        return found

    def happen(self, event: str) -> None:
        if event == "tick":
            self.clock.now += 1
            return
        one = self.candidates[int(next(part for part in event.split() if part.isdigit()))]
        if event.endswith("asks"):
            if one.term is not None and not one.term.is_valid:
                one.term = None
            one.sent = ("renew" if one.term else "campaign"), self.clock.now
        elif event.startswith("store receives"):
            assert one.sent is not None
            one.answer = *one.sent, *self._receive(one)  # type: ignore[assignment]
            one.sent = None
        elif event.endswith("is lost"):
            one.sent = None
        elif event.endswith("is answered"):
            self._take_answer(one)
        elif event.endswith("writes"):
            assert one.term is not None
            one.write = ((one.term.condition,) if "fence" in self.rules else ()), one.term.fence
        else:
            assert one.write is not None
            conditions, fence = one.write
            one.write = None
            if now(self.store.transact(conditions, (Change("placement", b"1"),))) is not None:
                if fence < self.applied:
                    self.fault = f"a write of fence {fence} was applied after one of {self.applied}"
                self.applied = fence

    def _receive(self, one: Candidate) -> tuple[str, int]:
        """What the store does with the message: the lease and the fence, ("", 0) if it refuses."""
        assert one.sent is not None
        if one.sent[0] == "renew":
            assert one.term is not None
            return (one.term.lease, one.term.fence) if now(self.store.renew(one.term.lease)) else ("", 0)
        lease = now(self.store.grant(TTL_S))
        fence = now(self.store.swap("leader", 0, b"x", lease))
        if fence is None:
            now(self.store.revoke(lease))
        return (lease, fence) if fence is not None else ("", 0)

    def _take_answer(self, one: Candidate) -> None:
        assert one.answer is not None
        kind, sent, lease, fence = one.answer
        one.answer = None
        begun = sent if "sent" in self.rules else self.clock.now
        if kind == "campaign":
            one.term = Term("leader", lease, fence, TTL_S, begun, self.clock) if lease else None
        elif not lease:
            one.term = None
        elif one.term is not None and one.term.is_valid:
            one.term.renewed(begun)

    def broken(self) -> str:
        leading = [one for one in self.candidates if one.term is not None and one.term.is_valid]
        return self.fault or ("two lead at once" if len(leading) > 1 else "")


# ------------------------------------------------------------------ streaming

ANSWER = [b'data: {"n":%d}\n\n' % number for number in range(3)]
IDS = [b"req-%024x:%d" % (5, number + 1) for number in range(3)]
STREAM = [b"id: " + identity + b"\n" + data for identity, data in zip(IDS, ANSWER)] + [b"data: [DONE]\n\n"]
MAX_DEATHS = 3


class Connection:
    def __init__(self, engine: int, begin: int) -> None:
        self.engine = engine
        self.rest = b"".join(STREAM[begin:])

    def sizes(self) -> set[int]:
        """How many bytes may come at once: an event, all but its last bytes, or what is left."""
        event = self.rest.find(b"\n\n") + 2
        return {event - 1, event, len(self.rest)} - {0, 1} if self.rest else set()


class Streaming:
    """The relay sends the request to an engine, and to the other one, or the same one again, when that ends."""

    def __init__(self, rules: frozenset[str]) -> None:
        self.rules = rules
        self.cutter = EventCutter()
        self.received = b""
        self.connection: Connection | None = Connection(0, 0)
        self.left: Connection | None = None  # a connection that is given up, which may still have bytes
        self.knows = {0}  # engines that have the request
        self.deaths = 0

    def copied(self) -> Self:
        return copy.deepcopy(self)

    def key(self) -> Hashable:
        connections = tuple((one.engine, len(one.rest)) if one else None for one in (self.connection, self.left))
        cutter = self.cutter
        replay = vars(cutter._replay).values() if cutter._replay else ()
        return connections, self.received, cutter._rest, repr(list(replay)), tuple(sorted(self.knows)), self.deaths

    def events(self) -> list[str]:
        if self.cutter.is_over:
            return []
        found = []
        if self.connection is not None:
            found += [f"bytes {n}" for n in self.connection.sizes()]
            if self.deaths < MAX_DEATHS:
                found += ["the engine dies", "the connection breaks"]
        else:
            found += [f"continue at {engine}" for engine in sorted(self.knows)]
            found += [f"begin again at {engine}" for engine in {0, 1} - self.knows]
        if self.left is not None and self.left.rest and "abort" not in self.rules:
            found.append("late bytes")
        return found

    def happen(self, event: str) -> None:
        kind, last = event.rsplit(" ", 1)
        if kind == "bytes":
            assert self.connection is not None
            data, self.connection.rest = self.connection.rest[: int(last)], self.connection.rest[int(last) :]
            self.received += self.cutter.feed(data)
        elif event == "late bytes":
            assert self.left is not None
            self.received += self.cutter.feed(self.left.rest)
            self.left = None
        elif last in ("dies", "breaks"):
            assert self.connection is not None
            if last == "dies":
                self.knows.discard(self.connection.engine)
            self.left = None if "abort" in self.rules else self.connection
            self.connection = None
            self.deaths += 1
        elif kind == "continue at":  # `Last-Event-ID`, or the whole answer where nothing was delivered
            at = IDS.index(self.cutter.last_id) + 1 if self.cutter.last_id else 0
            self.cutter.restart(is_replay=not self.cutter.last_id)
            self.connection = Connection(int(last), at)
        else:
            self.cutter.restart(is_replay="places" in self.rules)
            self.connection = Connection(int(last), 0)
            self.knows.add(int(last))

    def broken(self) -> str:
        whole = b"".join(STREAM)
        if not whole.startswith(self.received):
            return f"the client has received {self.received!r}"
        return "a part of the answer is missing" if self.cutter.is_over and self.received != whole else ""
