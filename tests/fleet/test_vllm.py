"""The real `vllm serve` (`make vllm-peer`) on CPUs, in a fleet of real processes: an orchestrator and two agents."""

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
from tools.tiny_gguf import SHAPES, write_model
from tools.tiny_hf import write_directory

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]  # it takes minutes to start on two cores
PROGRAM = Path(f"{sys.prefix}.vllm") / "bin" / "vllm"
START_MS = 900_000
N_TOKENS = 96
TRIES = 3  # an engine may end its answer before the signal arrives
# The random model would repeat one token, which may be a special one without text.
SAMPLED = {"model": "m", "prompt": "the quick brown fox", "temperature": 1.0, "seed": 7, "frequency_penalty": 2.0}
SAMPLED |= {"max_tokens": N_TOKENS}
BODY = {**SAMPLED, "ignore_eos": True}


CHAT = {**SAMPLED, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 200}
del CHAT["prompt"]
OK = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "", "parameters": OK}} for name in ("look", "other")
]


class Host(Agent):
    """An agent with one `vllm serve` of a random model."""

    def __init__(self, home: Path, secret: str, store: Path, model: Path) -> None:
        home.mkdir(mode=0o700)
        (home / "fleet-token").write_text(secret)
        (home / "fleet-token").chmod(0o600)
        args = ["--dtype", "float32", "--enforce-eager", "--max-model-len", "512", "--max-num-seqs", "4"]
        args += ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
        engine = {"model": "m", "engine": "vllm", "path": str(model), "program": str(PROGRAM), "args": args}
        agent = {"id": home.name, "engines": [engine], "start_timeout_s": START_MS // 1000}
        super().__init__(home, {"fleet": {"store": f"sqlite:{store}", "agent": agent}})
        self.environment["VLLM_CPU_KVCACHE_SPACE"] = "1"  # GB

    def engine_pids(self) -> list[int]:
        """Of the engine's processes that serve."""
        assert self.process is not None
        return [pid for pid in procfs.children(self.process.pid) if b"vllm" in _command(pid)]


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts[Host]]:
    if not PROGRAM.exists():
        pytest.skip(f"{PROGRAM} is missing: make vllm-peer")
    base = Path(tempfile.mkdtemp(prefix="vl-"))  # short enough for sockets
    model = write_directory(write_model(base / "m.gguf", SHAPES["qwen3"], "F32"), base / "model")
    # Fields that the classes of `transformers` need, and this project's reader does not.
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "model_type": "qwen3"}))
    vocabulary = json.loads((model / "tokenizer_config.json").read_text())
    ends = {name: value["content"] for name, value in vocabulary.items() if isinstance(value, dict)}
    vocabulary |= {**ends, "tokenizer_class": "PreTrainedTokenizerFast"}
    (model / "tokenizer_config.json").write_text(json.dumps(vocabulary))
    fleet = Fleet(base / "orchestrator", {"auth": {"api_keys": KEYS}})
    store = base / "orchestrator" / "fleet.db"
    agents = {name: Host(base / name, fleet.secret, store, model) for name in ("one", "two")}
    try:
        for agent in agents.values():
            agent.start().wait_ready()
            status, answer = agent.call("/load_model", model_id="m", timeout_ms=START_MS)
            assert status == 200, (answer, "".join(agent.output))
        yield Hosts(fleet, agents)
    finally:
        for agent in agents.values():
            agent.stop()
        assert fleet.close() == 0, "".join(fleet.lines)
        shutil.rmtree(base)


def test_answers_streamed_and_whole(hosts: Hosts[Host]) -> None:
    hosts.ready()
    (model,) = hosts.fleet.get("/v1/models", MINE).json["data"]
    assert (model["id"], model["engine"], model["ready"]) == ("m", "vllm", True)
    whole = hosts.fleet.post("/v1/completions", BODY, MINE)
    assert whole.status == 200, whole.body
    (choice,) = whole.json["choices"]
    assert choice["finish_reason"] == "length" and choice["text"]
    connection, response = hosts.open(
        "/v1/completions", {**BODY, "stream": True, "stream_options": {"include_usage": True}}
    )
    received = response.read()
    connection.close()
    assert response.status == 200 and received.endswith(b"data: [DONE]\n\n"), received
    assert "".join(texts(received))
    events = [json.loads(line[6:]) for line in received.split(b"\n") if line.startswith(b"data: {")]
    for usage in (whole.json["usage"], events[-1]["usage"]):
        assert usage["completion_tokens"] == N_TOKENS and usage["prompt_tokens"] > 0
        assert usage["total_tokens"] == N_TOKENS + usage["prompt_tokens"]
    chat = {"model": "m", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8, "temperature": 1.0}
    answer = hosts.fleet.post("/v1/chat/completions", chat, MINE)
    assert answer.status == 200 and answer.json["choices"][0]["message"]["role"] == "assistant", answer.body


def test_what_it_would_do_otherwise_is_refused_by_name(hosts: Hosts[Host]) -> None:
    hosts.ready()
    for field, value in (("best_of", 2), ("echo", True), ("prompt", [1, 2]), ("suffix", "x")):
        answer = hosts.fleet.post("/v1/completions", {**SAMPLED, field: value}, MINE)
        assert (answer.status, answer.json["error"]["param"]) == (400, field), answer.body
    long = hosts.fleet.post("/v1/completions", {**SAMPLED, "prompt": "word " * 2000}, MINE)
    assert long.status == 400, long.body


def test_answers_have_the_form_that_was_asked_for(hosts: Hosts[Host]) -> None:
    """The model is random: what its grammar leaves open is white space."""
    hosts.ready()
    form = {"type": "json_schema", "json_schema": {"name": "verdict", "schema": OK}}
    answer = hosts.fleet.post("/v1/chat/completions", {**CHAT, "response_format": form}, MINE)
    assert answer.status == 200, answer.body
    assert list(json.loads(answer.json["choices"][0]["message"]["content"])) == ["ok"]
    for is_stream in (False, True):
        bad = {**form, "json_schema": {"name": "bad", "schema": {"type": "nonsense"}}}
        refused = hosts.fleet.post("/v1/chat/completions", {**CHAT, "response_format": bad, "stream": is_stream}, MINE)
        assert refused.status == 400 and "Invalid type: nonsense" in refused.json["error"]["message"], refused.body
    short = {**CHAT, "max_tokens": 4, "ignore_eos": True}
    for n_top in (0, 2):
        body = {**short, "logprobs": True, **({"top_logprobs": n_top} if n_top else {})}
        tokens = hosts.fleet.post("/v1/chat/completions", body, MINE).json["choices"][0]["logprobs"]["content"]
        assert [len(one["top_logprobs"]) for one in tokens] == 4 * [n_top]
    text = hosts.fleet.post("/v1/completions", {**BODY, "max_tokens": 4, "logprobs": 2}, MINE).json["choices"][0]
    assert {name: len(value) for name, value in text["logprobs"].items()} == dict.fromkeys(text["logprobs"], 4)
    several = hosts.fleet.post("/v1/chat/completions", {**short, "n": 3}, MINE).json
    assert [one["index"] for one in several["choices"]] == [0, 1, 2] and several["usage"]["completion_tokens"] == 12


def test_a_forced_call_is_made_and_matches_its_schema(hosts: Hosts[Host]) -> None:
    hosts.ready()
    named = {"type": "function", "function": {"name": "other"}}
    for choice in ("required", named):
        body = {**CHAT, "tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False}
        whole = hosts.fleet.post("/v1/chat/completions", body, MINE)
        assert whole.status == 200, whole.body
        connection, response = hosts.open("/v1/chat/completions", {**body, "stream": True})
        received = response.read()
        connection.close()
        events = [json.loads(line[6:]) for line in received.split(b"\n") if line.startswith(b"data: {")]
        parts = [part for one in events for part in one["choices"][0]["delta"].get("tool_calls", [])]
        (call,) = whole.json["choices"][0]["message"]["tool_calls"]
        streamed = "".join(part["function"].get("arguments", "") for part in parts)
        for name, arguments in (
            (call["function"]["name"], call["function"]["arguments"]),
            (parts[0]["function"]["name"], streamed),
        ):
            assert name in ("look", "other") and list(json.loads(arguments)) == ["ok"], received
    messages = [
        *CHAT["messages"],
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": [{"type": "text", "text": "yes"}], "tool_call_id": call["id"]},
    ]
    after = hosts.fleet.post("/v1/chat/completions", {**CHAT, "messages": messages, "tools": TOOLS}, MINE)
    assert after.status == 200, after.body


def test_a_stream_goes_on_from_its_text_when_its_engine_is_killed(hosts: Hosts[Host]) -> None:
    body = {**BODY, "max_tokens": 300, "stream": True, "stream_options": {"include_usage": True}}
    for _ in range(TRIES):
        received = _killed(hosts, body)
        if b": starling_replayed" in received:
            break
    assert received.count(b": starling_replayed") == 1 and received.endswith(b"data: [DONE]\n\n"), received
    events = [json.loads(line[6:]) for line in received.split(b"\n") if line.startswith(b"data: {")]
    assert len({(one["id"], one["created"]) for one in events}) == 1
    assert [one["starling_replayed"] for one in events[-2:]] == [1, 1]
    assert events[-2]["choices"][0]["finish_reason"] == "length"


def _killed(hosts: Hosts[Host], body: dict[str, Any]) -> bytes:
    """A stream whose engine is killed after three texts. Returns when another engine has taken its place."""
    hosts.ready()
    connection, response = hosts.open("/v1/completions", body)
    received = b""
    while len(texts(received)) < 3:
        more = response.read1(1 << 16)
        assert more, received
        received += more
    victim, _ = hosts.serving(response.headers["X-Starling-Request"])
    before = victim.engine_pids()
    for pid in before:
        os.kill(pid, signal.SIGKILL)
    received += response.read()
    connection.close()
    while set(victim.engine_pids()) <= set(before) or victim.model("m")["cache_state"] != "READY":
        assert victim.process is not None and victim.process.poll() is None, "".join(victim.output)
        time.sleep(0.05)
    return received


def test_nothing_is_left_of_an_agent_that_stops(hosts: Hosts[Host]) -> None:
    """The last test: it stops the agents."""
    hosts.ready()
    for agent in hosts.agents.values():
        pids = agent.engine_pids()
        assert pids and agent.process is not None
        agent.process.send_signal(signal.SIGTERM)
        assert agent.process.wait(60) == 0
        assert not any(procfs.exists(pid) for pid in pids)
