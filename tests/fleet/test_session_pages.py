"""A session moves with its KV pages between real agents; one for which the target has no room stays, and sends none."""

from __future__ import annotations

import itertools
import json
import re
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from stages.orchestrator.page_transfers import PAUSE_S
from tests.fleet.two_agents import MINE, Host, Hosts
from tools.tiny_gguf import SHAPES

# The arena of "two" has room for less than 2,000 positions of this shape, whose context is 8,192.
SHAPE, SMALL_MB = SHAPES["wide"], 1
SHORT, LONG = 20 * "once upon a time there was a keeper ", 130 * "the lamp of the other tower is out "
NEXT = " and then"
SENT_S = 4 * PAUSE_S  # until pages have gone with a session


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    made = Hosts(tmp_path_factory.mktemp("sp"), shape=SHAPE, cache_mb={"two": SMALL_MB})
    with made as running:
        yield running


def turn(hosts: Hosts, session: str, prompt: str) -> tuple[str, int]:
    """What a client sees of a turn but for its names, and the tokens that were cached."""
    body = {"model": "tiny", "prompt": prompt, "session_id": session, "create_session": True, "max_tokens": 6}
    answer = hosts.fleet.post("/v1/generate", {**body, "seed": 7, "temperature": 1.0, "ignore_eos": True}, MINE)
    assert answer.status == 200, answer.body
    usage = answer.json["usage"]
    seen = json.dumps([answer.json["choices"], usage["prompt_tokens"]])
    return seen, int(usage["prompt_tokens_details"]["cached_tokens"])


def calls(host: Host) -> Counter[tuple[str, str]]:
    """Answers of the agent by path and status."""
    with urllib.request.urlopen(
        urllib.request.Request(f"{host.url}/metrics", headers={"Authorization": f"Bearer {host.token}"}), timeout=60
    ) as answer:
        text = answer.read().decode()
    found = re.findall(r'^starling_agent_requests_total\{endpoint="(.*?)",status="(.*?)"\} (\d+)', text, re.MULTILINE)
    return Counter({(path, status): int(count) for path, status, count in found})


def stays(hosts: Hosts, session: str, reason: str) -> dict[str, Any]:
    """The orchestrator's line about a session that stays for that reason, when there is one."""
    while True:
        assert hosts.fleet.process.poll() is None, "".join(hosts.fleet.lines)
        for line in list(hosts.fleet.lines):
            if "stays as it is for now" in line:
                found: dict[str, Any] = json.loads(line)
                if found["session_id"] == session and re.fullmatch(reason, found["reason"]):
                    return found
        hosts.fleet.state()


def moved(hosts: Hosts, session: str, prompt: str) -> tuple[str, int]:
    """The first turn of a session, which moves from "one" to "two" then."""
    hosts.cordon("two", True)
    # One turn each before a drain: what two sequences have shared would be sent as a prefix, too.
    begun = turn(hosts, session, prompt)
    assert begun[1] == 0
    hosts.cordon("two", False)
    hosts.cordon("one", True, drain=True)
    while hosts.holders(session) != ["two"]:
        assert hosts.fleet.process.poll() is None, "".join(hosts.fleet.lines)
    hosts.cordon("one", False)
    return begun


@pytest.mark.slow
def test_a_session_takes_its_pages_with_it_if_its_target_has_room(hosts: Hosts) -> None:
    one, two = (hosts.agents[name] for name in ("one", "two"))
    # Where an engine does not answer in time the session moves without them, and no pages are sent for `PAUSE_S`.
    deadline = time.monotonic() + SENT_S
    for number in itertools.count(1):
        session, prompt = f"short-{number}", f"{number} {SHORT}"
        begun = moved(hosts, session, prompt)
        made = calls(two)
        assert made["/take_session", "200"] == number
        if made["/take_prefixes", "200"] or time.monotonic() > deadline:
            break
    assert made["/take_prefixes", "200"] == 1
    second, cached = turn(hosts, session, NEXT)
    assert hosts.holders(session) == ["two"] and cached > 0
    given = calls(one)["/give_prefixes", "200"]

    # The target says that it has no room for the other one, and is sent nothing.
    hosts.cordon("two", True)
    turn(hosts, "long", LONG)
    hosts.cordon("two", False)
    hosts.cordon("one", True, drain=True)
    line = stays(hosts, "long", r"session 'long' has \d{4} tokens, at most 19\d\d are kept")
    assert line["agent"] == "one"
    hosts.cordon("one", False)
    asked = calls(two)
    assert asked["/move_session", "400"] > 0
    assert (asked["/take_prefixes", "200"], asked["/take_session", "200"]) == (1, number)
    assert calls(one)["/give_prefixes", "200"] == given
    assert hosts.holders("long") == ["one"] and "long" not in two.sessions()
    assert turn(hosts, "long", NEXT)[1] > 0  # where its pages are

    # The turn of a session that has stayed has the same bytes as that of the one that has moved.
    hosts.cordon("two", True)
    assert [turn(hosts, "unmoved", prompt)[0] for prompt in (prompt, NEXT)] == [begun[0], second]
    hosts.cordon("two", False)
