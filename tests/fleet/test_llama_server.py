"""The real `llama-server` (`make peers-native`) in a fleet of real processes: an orchestrator and two agents."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline import procfs
from tests.fleet.agent_process import Agent
from tests.fleet.engine_hosts import KEYS, MINE, Hosts, texts
from tests.orchestrator.fleet import Fleet

pytestmark = pytest.mark.slow
PROGRAM = Path(sys.executable).parent / "llama-server"
TRIES = 5  # an engine may end its answer before the signal arrives
SILENT_MS = 3000
POLL_S = 0.05
N_TOKENS = 48
NUMBERS = ", ".join(str(number) for number in range(1, 100))
BEGINNING = "1, 2, 3, 4, 5, 6, 7, 8,"
QUESTION = {"role": "user", "content": "What is the capital of France? Answer in one sentence."}
COUNT = [
    {"role": "user", "content": "Count from 1 to 9."},
    {"role": "assistant", "content": "1, 2, 3, 4, 5, 6, 7, 8, 9"},
    {"role": "user", "content": "Count from 1 to 60."},
]
BODY = {"model": "m", "temperature": 0, "max_tokens": N_TOKENS, "ignore_eos": True}
TEXT = ("/v1/completions", {**BODY, "prompt": BEGINNING}, BEGINNING)
CHAT = ("/v1/chat/completions", {**BODY, "messages": COUNT}, "")
PREFILLED = (
    "/v1/chat/completions",
    {**BODY, "messages": [*COUNT, {"role": "assistant", "content": BEGINNING}], "continue_final_message": True}
    | {"add_generation_prompt": False},
    BEGINNING,
)


class Host(Agent):
    """An agent with one `llama-server` of the demo model."""

    def __init__(self, home: Path, secret: str, store: Path, gguf: Path) -> None:
        home.mkdir(mode=0o700)
        (home / "fleet-token").write_text(secret)
        (home / "fleet-token").chmod(0o600)
        engine = {"model": "m", "engine": "llama-server", "path": str(gguf), "program": str(PROGRAM)}
        engine |= {"silent_ms": SILENT_MS, "args": ["--ctx-size", "1024", "--parallel", "2", "--threads", "1"]}
        super().__init__(home, {"fleet": {"store": f"sqlite:{store}", "agent": {"id": home.name, "engines": [engine]}}})

    def engine_pid(self) -> int:
        """Of the engine's process; 0: none has become the program yet."""
        assert self.process is not None
        for pid in procfs.children(self.process.pid):
            try:
                if Path(f"/proc/{pid}/comm").read_text() == "llama-server\n":
                    return pid
            except OSError:
                continue
        return 0


@pytest.fixture(scope="module")
def hosts(demo_gguf: Path) -> Iterator[Hosts[Host]]:
    if not PROGRAM.exists():
        pytest.skip(f"{PROGRAM} is missing: make peers-native")
    base = Path(tempfile.mkdtemp(prefix="ls-"))  # short enough for sockets
    fleet = Fleet(base / "orchestrator", {"auth": {"api_keys": KEYS}})
    store = base / "orchestrator" / "fleet.db"
    agents = {name: Host(base / name, fleet.secret, store, demo_gguf) for name in ("one", "two")}
    try:
        for agent in agents.values():
            agent.start().wait_ready()
            assert agent.call("/load_model", model_id="m")[0] == 200
        yield Hosts(fleet, agents)
    finally:
        for agent in agents.values():
            agent.stop()
        assert fleet.close() == 0, "".join(fleet.lines)
        shutil.rmtree(base)


def test_answers_streamed_and_whole(hosts: Hosts[Host]) -> None:
    hosts.ready()
    (model,) = hosts.fleet.get("/v1/models", MINE).json["data"]
    assert (model["id"], model["engine"], model["ready"]) == ("m", "llama-server", True)
    body = {"model": "m", "prompt": "The capital of France is", "max_tokens": 4, "temperature": 0}
    whole = hosts.fleet.post("/v1/completions", body, MINE)
    assert whole.status == 200, whole.body
    (choice,) = whole.json["choices"]
    assert choice["text"].startswith(" Paris") and choice["finish_reason"] == "length"
    connection, response = hosts.open(
        "/v1/completions", {**body, "stream": True, "stream_options": {"include_usage": True}}
    )
    received = response.read()
    connection.close()
    events = [json.loads(line[6:]) for line in received.split(b"\n") if line.startswith(b"data: {")]
    assert "".join(texts(received)) == choice["text"] and received.endswith(b"data: [DONE]\n\n")
    assert [one["choices"][0]["finish_reason"] for one in events[:-1]] == [None] * 4 + ["length"]
    for usage in (whole.json["usage"], events[-1]["usage"]):
        assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (5, 4, 9)
    stopped = hosts.fleet.post("/v1/completions", {**body, "max_tokens": 40, "stop": ["."]}, MINE).json["choices"][0]
    assert (stopped["text"], stopped["finish_reason"]) == (" Paris", "stop")


def test_a_prefilled_message_is_continued(hosts: Hosts[Host]) -> None:
    hosts.ready()
    body = {"model": "m", "messages": [QUESTION], "max_tokens": 24, "temperature": 0}
    plain = hosts.fleet.post("/v1/chat/completions", body, MINE).json
    assert plain["choices"][0]["finish_reason"] == "stop" and "Paris" in plain["choices"][0]["message"]["content"]
    begun = {**body, "messages": [QUESTION, {"role": "assistant", "content": "The capital of France"}]}
    begun |= {"continue_final_message": True, "add_generation_prompt": False}
    answer = hosts.fleet.post("/v1/chat/completions", begun, MINE).json
    assert answer["choices"][0]["message"]["content"].startswith(" is Paris")
    assert answer["usage"]["prompt_tokens"] == plain["usage"]["prompt_tokens"] + 4


def test_what_it_would_do_otherwise_is_refused_by_name(hosts: Hosts[Host]) -> None:
    hosts.ready()
    chat = {"model": "m", "messages": [QUESTION], "max_tokens": 1}
    text = {"model": "m", "prompt": "x", "max_tokens": 1}
    for path, body, field, value in (
        ("/v1/chat/completions", chat, "n", 2),
        ("/v1/chat/completions", chat, "logprobs", True),
        ("/v1/chat/completions", chat, "response_format", {"type": "json_object"}),
        ("/v1/completions", text, "repetition_penalty", 1.5),
        ("/v1/completions", text, "prompt", [1, 2]),
        ("/v1/completions", text, "prompt", ""),
    ):
        answer = hosts.fleet.post(path, {**body, field: value}, MINE)
        assert (answer.status, answer.json["error"]["param"]) == (400, field), answer.body
    long = hosts.fleet.post("/v1/completions", {**text, "prompt": "word " * 2000}, MINE)
    assert long.status == 400 and "context size" in long.json["error"]["message"]


@pytest.mark.parametrize(
    ("request_", "number"),
    [(TEXT, signal.SIGKILL), (CHAT, signal.SIGKILL), (PREFILLED, signal.SIGSTOP)],
    ids=["text-killed", "chat-killed", "prefilled-stopped"],
)
def test_a_stream_goes_on_from_its_text(hosts: Hosts[Host], request_: Any, number: signal.Signals) -> None:
    path, fields, beginning = request_
    body = {**fields, "stream": True, "stream_options": {"include_usage": True}}
    for _ in range(TRIES):
        received = _with_signal(
            hosts, path, {**body, "stream": True, "stream_options": {"include_usage": True}}, number
        )
        if b": starling_replayed" in received:
            break
    assert received.count(b": starling_replayed") == 1 and received.endswith(b"data: [DONE]\n\n"), received
    written = beginning + "".join(texts(received))
    assert len(written) > len(beginning) + N_TOKENS // 2 and NUMBERS.startswith(written), written
    events = [json.loads(line[6:]) for line in received.split(b"\n") if line.startswith(b"data: {")]
    assert len({(one["id"], one["created"]) for one in events}) == 1
    assert events[-2]["choices"][0]["finish_reason"] == "length"
    assert [one["starling_replayed"] for one in events[-2:]] == [1, 1]
    assert events[-1]["usage"]["completion_tokens"] == N_TOKENS


def _with_signal(hosts: Hosts[Host], path: str, body: dict[str, Any], number: signal.Signals) -> bytes:
    """A stream whose engine gets a signal after three texts. Returns when another engine has taken its place."""
    hosts.ready()
    connection, response = hosts.open(path, body)
    received = b""
    while len(texts(received)) < 3:
        more = response.read1(1 << 16)
        assert more, received
        received += more
    victim, _ = hosts.serving(response.headers["X-Starling-Request"])
    before = victim.engine_pid()
    os.kill(before, number)
    received += response.read()
    connection.close()
    while victim.engine_pid() in (0, before) or victim.model("m")["cache_state"] != "READY":
        assert victim.process is not None and victim.process.poll() is None, "".join(victim.output)
        time.sleep(POLL_S)
    return received


def test_nothing_is_left_of_an_agent_that_stops(hosts: Hosts[Host]) -> None:
    """The last test: it stops the agents."""
    hosts.ready()
    for agent in hosts.agents.values():
        pid = agent.engine_pid()
        assert pid and agent.process is not None
        assert not agent.call("/heartbeat")[1]["reasons"]
        agent.process.send_signal(signal.SIGTERM)
        assert agent.process.wait(60) == 0
        assert not procfs.exists(pid)
