"""SIGKILL of an agent, an engine or the orchestrator under a stream: how long it pauses, and whether a byte differs.

`drain` kills nothing: the agent of the stream is drained.

The pause is the longest time between two events after the kill, for an orchestrator until the client has continued the
stream at the other one.  Events are compared byte by byte, after an orchestrator's death the text.  The checks of the
instrument: the longest such time of a stream that nothing disturbs, and that two of those are equal.
"""

from __future__ import annotations

import functools
import http.client
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import time
from typing import Any

from pipeline.runtime.process import die_with_parent
from tools.bench.fleet.fleet_under_test import START_S, FleetUnderTest
from tools.bench.fleet.overhead import body, percentile
from tools.bench.http.server_under_test import ROOT
from tools.ports import free_port

KINDS = ("engine", "agent", "orchestrator", "drain")
TOKENS = 200
KILL_AFTER = 40  # events
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


def victims(fleet: FleetUnderTest, kind: str, agent: str) -> list[int]:
    """The processes to kill. An engine is all of `starling up`; an agent leaves its engine to its successor."""
    if kind == "orchestrator":
        return fleet.processes("-m starling orchestrator")
    (pid,) = fleet.processes("-m starling agent", f"--id {agent} ")
    if kind == "agent":
        return [pid]
    return [one for one in fleet.tree(pid) if one != pid]


def once(fleet: FleetUnderTest, kind: str, request: dict[str, Any], other: tuple[str, int]) -> tuple[list[str], float]:
    """The events of a stream under which a process dies, or that is moved, and its longest pause, s."""
    stream = Stream(fleet.address, "/v1/completions", request)
    events = [stream.event() for _ in range(KILL_AFTER)]
    agent = fleet.why(stream.name)
    if kind == "drain":
        fleet.drain(agent)
    else:
        for pid in victims(fleet, kind, agent):
            os.kill(pid, signal.SIGKILL)
    pause_s, last = 0.0, time.perf_counter()
    while True:
        event = stream.event()
        if not event and events[-1] != "[DONE]" and kind == "orchestrator" and stream.name:
            again = Stream(other, f"/v1/requests/{stream.name}", None, stream.last_id)
            stream.close()
            if again.status != 200:
                break
            again.name, stream = "", again
            continue
        if not event:
            break
        now = time.perf_counter()
        pause_s, last = max(pause_s, now - last), now
        events.append(event)
    stream.close()
    if kind == "drain":
        if fleet.why(stream.name) == agent:
            raise RuntimeError(f"the stream has stayed on {agent}, which drains")
        fleet.uncordon(agent)
    return events, pause_s


def long_prompt(words: int, number: int) -> str:
    """A prompt that no agent has cached."""
    draw = random.Random(f"deaths {number}")
    return " ".join([*draw.choices(_WORDS, k=words), PROMPT])


def measure(deaths: int, kinds: tuple[str, ...] = KINDS, words: int = 0) -> dict[str, Any]:
    """Figures by what dies, in ms.

    With `words` each stream has a prompt of its own with so many words more, which only the agent has that serves it.
    """
    found: dict[str, Any] = {}
    with FleetUnderTest(2) as fleet:
        port = free_port()
        second = subprocess.Popen(
            [sys.executable, "-m", "starling", "orchestrator", "--port", str(port)],
            cwd=ROOT,
            env=fleet.environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            preexec_fn=functools.partial(die_with_parent, os.getpid()),
        )
        try:
            requests = [{**body(PROMPT, TOKENS), "temperature": t, "seed": 7} for t in (0, 0.8)]
            whole = [undisturbed(fleet, request) for request in requests]
            for request, (events, _) in zip(requests, whole, strict=True):
                if plain(undisturbed(fleet, request)[0]) != plain(events):
                    raise RuntimeError("two undisturbed streams differ")
            check_ms = round(1000 * max(pause for _, pause in whole), 1)
            for kind in kinds:
                pauses, lost, different = [], 0, 0
                for number in range(deaths):
                    request, (expected, _) = requests[number % 2], whole[number % 2]
                    if words:
                        request = {**request, "prompt": long_prompt(words, number)}
                        expected, _ = undisturbed(fleet, request)
                    events, pause_s = once(fleet, kind, request, ("127.0.0.1", port))
                    pauses.append(1000 * pause_s)
                    lost += not events or events[-1] != "[DONE]"
                    if kind == "orchestrator":
                        different += answer(events) != answer(expected)
                    else:
                        different += plain(events) != plain(expected)
                    fleet.wait_ready()
                found[kind] = {
                    "deaths": deaths,
                    "pause_ms": {
                        "p50": round(statistics.median(pauses), 1),
                        "p95": round(percentile(pauses, 0.95), 1),
                        "max": round(max(pauses), 1),
                    },
                    "undisturbed_ms": check_ms,
                    "lost": lost,
                    "different": different,
                }
                print(kind, json.dumps(found[kind]), flush=True)
        finally:
            second.terminate()
            second.wait()
    return found
