"""SIGKILL of a part of a fleet under a stream: how long the stream pauses, and whether a byte differs.

    engine        all processes of the stream's engine
    agent         its agent, with which the engine ends
    host          agent and engine at once, after the link of their host was cut (hosts_under_test.py); where network
                  namespaces are not permitted, without a cut
    orchestrator  the client continues the stream at another one
    store         etcd or Redis, which is started again, in turn under the stream and after it
    drain         kills nothing: the agent of the stream is drained

The pause is the longest time between two events after the kill, for an orchestrator until the client has continued the
stream at the other one.  Events are compared byte by byte, after an orchestrator's death the text.

The checks of the instrument: the longest such time of a stream that nothing disturbs, and that two of those are equal.
A kill counts only if the stream was running: events were delivered before it, and the death has reached the stream.
Before the first kill a stream that has not begun and one that is over must be refused, and a stream that is cut off on
purpose must be found lost (`check_instrument`).
"""

from __future__ import annotations

import http.client
import json
import random
import re
import statistics
import subprocess
import sys
import time
from typing import Any

from tools.bench.fleet import hosts_under_test, store_under_test
from tools.bench.fleet.fleet_under_test import START_S, FleetUnderTest, kill
from tools.bench.fleet.overhead import body, percentile
from tools.bench.fleet.store_under_test import StoreUnderTest
from tools.bench.http.server_under_test import ROOT

KINDS = ("engine", "agent", "host", "orchestrator", "store", "drain")
TOKENS = 200
KILL_AFTER = 40  # events
STORE_AWAY = 40  # events until a store is back that returns under the stream
MOST_REFUSED = 3  # kills that may miss the stream, for each that counts
_WORDS = ("harbour", "lantern", "winter", "gull", "anchor", "rope", "ladder", "storm", "glass", "wind", "tide")
PROMPT = "The old lighthouse keeper climbed the spiral stairs and"


class Stream:
    """One stream, with the time of each event."""

    def __init__(self, address: tuple[str, int], path: str, request: Any, last_id: str = "") -> None:
        self._connection = http.client.HTTPConnection(*address, timeout=START_S)
        headers = {"Content-Type": "application/json", **({"Last-Event-ID": last_id} if last_id else {})}
        method, data = ("GET", None) if request is None else ("POST", json.dumps(request).encode())
        self._connection.request(method, path, data, headers)
        self._response = self._connection.getresponse()
        self.status = self._response.status
        self.name = self._response.headers.get("X-Starling-Request", "")
        self.last_id = last_id

    def event(self) -> str:
        """The data of the next whole event; "" at the end or when the connection breaks."""
        identity = data = ""
        try:
            while line := self._response.readline():
                if line.startswith(b"id: "):
                    identity = line[4:].decode().strip()
                elif line.startswith(b"data: "):
                    data = line[6:].decode().strip()
                elif line == b"\n" and data:
                    self.last_id = identity or self.last_id
                    return data
        except (OSError, http.client.HTTPException):
            pass
        return ""

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


def plain(events: list[str]) -> list[str]:
    """The events without what differs from request to request."""
    return [re.sub(r'("created|"cached_tokens)":\d+', r'\1":0', re.sub("[0-9a-f]{24}", "ID", one)) for one in events]


def answer(events: list[str]) -> tuple[str, str]:
    """Text and finish reason. A client that comes back is sent what it has missed in fewer events."""
    choices = [one for event in events if event.startswith("{") for one in json.loads(event).get("choices", ())]
    return "".join(one["text"] for one in choices), next((r for one in choices if (r := one["finish_reason"])), "")


def undisturbed(fleet: FleetUnderTest, request: dict[str, Any]) -> tuple[list[str], float]:
    """All events, and the longest time between two of them."""
    stream = Stream(fleet.address, "/v1/completions", request)
    events: list[str] = []
    pause_s = last = 0.0
    while event := stream.event():
        now = time.perf_counter()
        if last and len(events) > KILL_AFTER:
            pause_s = max(pause_s, now - last)
        last = now
        events.append(event)
    stream.close()
    return events, pause_s


class MissedError(RuntimeError):
    """The kill would not reach, or has not reached, a running stream: it says nothing about pauses."""


def victims(fleet: FleetUnderTest, kind: str, agent: str) -> list[int]:
    """The processes to kill. An engine is all of `starling up`; an agent leaves its engine to its successor."""
    if kind == "orchestrator":
        return fleet.processes("-m starling orchestrator")[:1]
    (pid,) = fleet.processes("-m starling agent", f"--id {agent} ")
    if kind == "agent":
        return [pid]
    return [one for one in fleet.tree(pid) if one != pid]


def strike(fleet: FleetUnderTest, kind: str, agent: str, store: StoreUnderTest | None) -> None:
    """Let it die. Raises `MissedError` if there is nothing to kill."""
    if kind == "drain":
        fleet.drain(agent)
    elif kind == "host":
        fleet.kill_host(agent)
    elif kind == "store":
        assert store is not None
        store.kill()
    elif pids := victims(fleet, kind, agent):
        kill(pids)
    else:
        raise MissedError(f"{agent} has no process of the kind {kind}")


class Reading:
    """What a client has received of a stream under which something dies."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.pause_s = 0.0
        self.n_continued = 0  # times that it has asked another orchestrator


def once(
    fleet: FleetUnderTest,
    kind: str,
    request: dict[str, Any],
    other: tuple[str, int] | None = None,
    store: StoreUnderTest | None = None,
    *,
    after: int = KILL_AFTER,
    store_away: int = STORE_AWAY,
) -> Reading:
    """Read a stream under which something dies after `after` events. Raises `MissedError`.

    `other`: where it is continued if its connection breaks; None: nowhere.  `store_away`: events until the store is
    back; it is back after the stream in any case.
    """
    stream = Stream(fleet.address, "/v1/completions", request)
    try:
        found = _read_under(fleet, kind, stream, other, store, after, store_away)
    finally:
        if store is not None and not store.is_running:
            store.start()
    return found


def _read_under(
    fleet: FleetUnderTest,
    kind: str,
    stream: Stream,
    other: tuple[str, int] | None,
    store: StoreUnderTest | None,
    after: int,
    store_away: int,
) -> Reading:
    reading = Reading()
    events = reading.events = [stream.event() for _ in range(after)]
    if stream.status != 200 or not events or "" in events or "[DONE]" in events:
        stream.close()
        raise MissedError(f"the stream does not run after {after} events (status {stream.status})")
    name, agent, n_events = stream.name, fleet.why(stream.name), len(fleet.events())
    strike(fleet, kind, agent, store)
    last = time.perf_counter()
    while True:
        event = stream.event()
        if not event and events[-1] != "[DONE]" and kind == "orchestrator" and stream.name and other is not None:
            again = Stream(other, f"/v1/requests/{stream.name}", None, stream.last_id)
            stream.close()
            if again.status != 200:
                break
            again.name, stream = "", again
            reading.n_continued += 1
            continue
        if not event:
            break
        now = time.perf_counter()
        reading.pause_s, last = max(reading.pause_s, now - last), now
        events.append(event)
        if store is not None and not store.is_running and len(events) == after + store_away:
            store.start()
    stream.close()
    _check_reached(fleet, kind, name, agent, n_events, reading, has_other=other is not None)
    return reading


def _check_reached(
    fleet: FleetUnderTest, kind: str, name: str, agent: str, n_events: int, reading: Reading, *, has_other: bool
) -> None:
    """Repair the fleet. Raises `MissedError` if the death has not reached the stream: it had ended before."""
    if kind == "orchestrator":
        is_reached = reading.n_continued > 0 if has_other else reading.events[-1] != "[DONE]"
    elif kind == "store":
        is_reached = "store-down" in fleet.events()[n_events:]
    else:
        choices = fleet.choices(name)
        is_reached = choices[-1] != agent if kind == "drain" else len(choices) > 1
    if kind == "drain":
        fleet.uncordon(agent)
    elif kind == "host":
        fleet.restore_host(agent)
    if not is_reached:
        raise MissedError(f"the stream was over, or has stayed on {agent}, when it was struck ({kind})")


def verdict(kind: str, events: list[str], expected: list[str]) -> tuple[bool, bool]:
    """Whether a stream is lost, and whether it differs."""
    is_lost = not events or events[-1] != "[DONE]"
    if kind == "orchestrator":
        return is_lost, answer(events) != answer(expected)
    return is_lost, plain(events) != plain(expected)


def check_instrument(fleet: FleetUnderTest, request: dict[str, Any], expected: list[str]) -> None:
    """Prove that it refuses kills that miss, and sees what is lost. Raises `RuntimeError`."""
    short = {**request, "max_tokens": KILL_AFTER // 4}
    for what, given, after in (("has not begun", request, 0), ("is over", short, KILL_AFTER)):
        before = fleet.processes("-m starling agent")
        try:
            once(fleet, "agent", given, after=after)
        except MissedError:
            if fleet.processes("-m starling agent") == before:
                continue
        raise RuntimeError(f"a kill under a stream that {what} counts")
    middle = len(expected) // 2
    for kind in ("engine", "orchestrator"):
        if verdict(kind, expected, expected) != (False, False):
            raise RuntimeError("an undisturbed stream counts as lost or different")
        if verdict(kind, expected[:middle] + expected[middle + 1 :], expected) != (False, True):
            raise RuntimeError("an event that is missing is not seen")
    if verdict("orchestrator", _cut_off(fleet, request).events, expected) != (True, True):
        raise RuntimeError("a stream that was cut off does not count as lost")
    fleet.wait_ready()
    print("instrument: early and late kills refused, a loss and a missing event seen", flush=True)


def _cut_off(fleet: FleetUnderTest, request: dict[str, Any]) -> Reading:
    """A stream whose only orchestrator dies; again if it was over by then."""
    for _ in range(MOST_REFUSED):
        try:
            return once(fleet, "orchestrator", request)
        except MissedError as error:
            print("instrument:", error, flush=True)
            fleet.wait_ready()
    raise RuntimeError("every stream was over when its orchestrator died")


def long_prompt(words: int, number: int) -> str:
    """A prompt that no agent has cached."""
    draw = random.Random(f"deaths {number}")
    return " ".join([*draw.choices(_WORDS, k=words), PROMPT])


class Bench:
    """A fleet, the requests, and what they give undisturbed."""

    def __init__(self, fleet: FleetUnderTest, words: int) -> None:
        self._fleet = fleet
        self._words = words
        self._requests = [{**body(PROMPT, TOKENS), "temperature": t, "seed": 7} for t in (0, 0.8)]
        whole = [undisturbed(fleet, request) for request in self._requests]
        for request, (events, _) in zip(self._requests, whole, strict=True):
            if plain(undisturbed(fleet, request)[0]) != plain(events):
                raise RuntimeError("two undisturbed streams differ")
        self._whole = [events for events, _ in whole]
        self._check_ms = round(1000 * max(pause for _, pause in whole), 1)

    def check_instrument(self) -> None:
        """See `check_instrument`."""
        check_instrument(self._fleet, self._requests[0], self._whole[0])

    def measure(
        self, kind: str, deaths: int, other: tuple[str, int] | None = None, store: StoreUnderTest | None = None
    ) -> dict[str, Any]:
        """Figures of one kind, in ms."""
        pauses: list[float] = []
        lost = different = refused = 0
        while len(pauses) < deaths:
            number = len(pauses)
            request, expected = self._requests[number % 2], self._whole[number % 2]
            if self._words:
                request = {**request, "prompt": long_prompt(self._words, number + 1000 * refused)}
                expected, _ = undisturbed(self._fleet, request)
            away = STORE_AWAY if number % 2 == 0 else 2 * TOKENS
            try:
                reading = once(self._fleet, kind, request, other, store, store_away=away)
            except MissedError as error:
                refused += 1
                print(kind, "refused:", error, flush=True)
                if refused > MOST_REFUSED * deaths:
                    raise
                continue
            finally:
                self._fleet.wait_ready(lambda state: state["store"] == "up")
            pauses.append(1000 * reading.pause_s)
            is_lost, differs = verdict(kind, reading.events, expected)
            lost, different = lost + is_lost, different + differs
        return {
            "deaths": deaths,
            "pause_ms": {
                "p50": round(statistics.median(pauses), 1),
                "p95": round(percentile(pauses, 0.95), 1),
                "max": round(max(pauses), 1),
            },
            "undisturbed_ms": self._check_ms,
            "lost": lost,
            "different": different,
            "refused": refused,
        }


def measure(deaths: int, kinds: tuple[str, ...] = KINDS, words: int = 0) -> dict[str, Any]:
    """Figures by what dies, in ms.

    With `words` each stream has a prompt of its own with so many words more, which only the agent has that serves it.
    """
    found: dict[str, Any] = {}
    has_hosts = "host" in kinds and hosts_under_test.are_permitted()
    apart = {"store", "host"} if has_hosts else {"store"}
    if here := [kind for kind in kinds if kind not in apart]:
        with FleetUnderTest(2) as fleet:
            other = fleet.add_orchestrator()
            bench = Bench(fleet, words)
            bench.check_instrument()
            for kind in here:
                found[kind] = _shown(kind, bench.measure(kind, deaths, other))
    if has_hosts:
        found["host"] = _shown("host", _of_hosts(deaths, words))
    elif "host" in kinds:
        found["host"]["cut"] = False
    if "store" in kinds:
        found["store"] = _of_stores(deaths, words)
    return {kind: found[kind] for kind in kinds}


def _shown(kind: str, figures: dict[str, Any]) -> dict[str, Any]:
    print(kind, json.dumps(figures), flush=True)
    return figures


def _of_stores(deaths: int, words: int) -> dict[str, Any]:
    """By store: a fleet whose etcd or Redis dies."""
    found: dict[str, Any] = {}
    for name in store_under_test.installed():
        with StoreUnderTest(name) as store, FleetUnderTest(2, store=store.address) as fleet:
            found[name] = _shown(name, Bench(fleet, words).measure("store", deaths, store=store))
    return found or {"skipped": "neither etcd nor Redis is installed with its client: make fleet-peers"}


def _of_hosts(deaths: int, words: int) -> dict[str, Any]:
    """This module in namespaces of its own, as a program."""
    command = [*hosts_under_test.COMMAND, sys.executable, "-m", "tools.bench.fleet.deaths", str(deaths), str(words)]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise RuntimeError(f"hosts have not been measured:\n{done.stdout[-3000:]}")
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return figures


def _main(deaths: int, words: int) -> None:
    """In namespaces: the last line is the figures."""
    names = ["one", "two"]
    hosts_under_test.connect_hosts(names)
    with hosts_under_test.HostsUnderTest(names) as fleet:
        print(json.dumps({"cut": True, **Bench(fleet, words).measure("host", deaths)}))


if __name__ == "__main__":
    _main(int(sys.argv[1]), int(sys.argv[2]))
