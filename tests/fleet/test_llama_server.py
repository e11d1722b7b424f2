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
# The demo model's chat template, with a place for tools: prompts of chats without tools are the same.
TEMPLATE = """\
{%- if tools %}{{ '<|im_start|>system
A call is <tool_call>
{"name": NAME, "arguments": ARGUMENTS}
</tool_call>. The tools:
' }}{% for tool in tools %}{{ tool | tojson + '\\n' }}{% endfor %}{{ '<|im_end|>\\n' }}
{%- elif messages[0]['role'] != 'system' %}
{{- '<|im_start|>system\\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' + (message['content'] or '') }}
{%- for call in message['tool_calls'] or [] %}
{{- '<tool_call>\\n{"name": "' + call['function']['name'] + '", "arguments": ' }}
{{- call['function']['arguments'] | tojson + '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": "get_weather", "description": "Weather", "parameters": CITY}}]
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
        (home / "template.jinja").write_text(TEMPLATE)
        plain = {"model": "plain", "engine": "llama-server", "path": str(gguf), "program": str(PROGRAM)}
        plain |= {"silent_ms": SILENT_MS, "args": ["--ctx-size", "1024", "--parallel", "2", "--threads", "1"]}
        args = [*plain["args"], "--chat-template-file", str(home / "template.jinja")]
        engines = [{**plain, "model": "m", "args": args}, plain]
        super().__init__(home, {"fleet": {"store": f"sqlite:{store}", "agent": {"id": home.name, "engines": engines}}})

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
    models = {one["id"]: one for one in hosts.fleet.get("/v1/models", MINE).json["data"]}
    assert (models["m"]["engine"], models["m"]["ready"]) == ("llama-server", True)
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
        ("/v1/chat/completions", {**chat, "tools": TOOLS}, "tool_choice", "required"),
        ("/v1/chat/completions", {**chat, "tools": TOOLS}, "logprobs", True),
        ("/v1/completions", text, "logprobs", 1),
        ("/v1/completions", text, "repetition_penalty", 1.5),
        ("/v1/completions", text, "prompt", [1, 2]),
        ("/v1/completions", text, "prompt", ""),
    ):
        answer = hosts.fleet.post(path, {**body, field: value}, MINE)
        assert (answer.status, answer.json["error"]["param"]) == (400, field), answer.body
    long = hosts.fleet.post("/v1/completions", {**text, "prompt": "word " * 2000}, MINE)
    assert long.status == 400 and "context size" in long.json["error"]["message"]
    many = hosts.fleet.post("/v1/chat/completions", {**chat, "n": 3}, MINE)  # it has 2 slots
    assert many.status == 400 and "llama-server refuses the request: Field 'n'" in many.json["error"]["message"]


def test_a_tool_is_called(hosts: Hosts[Host]) -> None:
    """After three calls and their results the model makes the fourth one."""
    hosts.ready()
    messages: list[dict[str, Any]] = []
    for index, city in enumerate(("Rome", "Paris", "London")):
        arguments = json.dumps({"city": city})
        call = {"id": f"c{index}", "type": "function", "function": {"name": "get_weather", "arguments": arguments}}
        messages.append({"role": "user", "content": [{"type": "text", "text": f"Weather in {city}?"}]})
        messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        messages.append({"role": "tool", "content": "sunny", "tool_call_id": f"c{index}"})
    messages.append({"role": "user", "content": "Weather in Oslo?"})
    body = {"model": "m", "temperature": 0, "max_tokens": 60, "messages": messages, "tools": TOOLS}
    whole = hosts.fleet.post("/v1/chat/completions", body, MINE)
    assert whole.status == 200, whole.body
    (choice,) = whole.json["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] is None
    assert call["id"] and call["type"] == "function" and call["function"]["name"] == "get_weather"
    assert json.loads(call["function"]["arguments"]) == {"city": "Oslo"}
    streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
    connection, response = hosts.open("/v1/chat/completions", streamed)
    received = response.read()
    connection.close()
    *events, usage = [json.loads(line[6:]) for line in received.split(b"\n") if line.startswith(b"data: {")]
    assert usage["usage"] == {**whole.json["usage"], "prompt_tokens_details": usage["usage"]["prompt_tokens_details"]}
    deltas = [one["choices"][0]["delta"].get("tool_calls", []) for one in events]
    parts = [part["function"] for delta in deltas for part in delta]
    assert len(parts) > 4 and parts[0]["name"] == "get_weather"
    assert "".join(part["arguments"] for part in parts) == call["function"]["arguments"]
    assert events[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_answers_have_the_form_that_was_asked_for(hosts: Hosts[Host]) -> None:
    hosts.ready()
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    form = {"type": "json_schema", "json_schema": {"name": "verdict", "schema": schema}}
    body = {"model": "m", "temperature": 0, "max_tokens": 60, "messages": [QUESTION]}
    connection, response = hosts.open("/v1/chat/completions", {**body, "response_format": form, "stream": True})
    streamed = "".join(texts(response.read()))
    connection.close()
    whole = hosts.fleet.post("/v1/chat/completions", {**body, "response_format": form}, MINE)
    assert whole.status == 200, whole.body
    for text in (streamed, whole.json["choices"][0]["message"]["content"]):
        assert list(json.loads(text)) == ["ok"] and isinstance(json.loads(text)["ok"], bool)
    body["max_tokens"] = 5
    for fields, n_top in (({}, 0), ({"top_logprobs": 2}, 2)):
        answer = hosts.fleet.post("/v1/chat/completions", {**body, "logprobs": True, **fields}, MINE)
        (choice,) = answer.json["choices"]
        tokens = choice["logprobs"]["content"]
        assert "".join(one["token"] for one in tokens) == choice["message"]["content"] and len(tokens) == 5
        assert all(one["logprob"] <= 0 and len(one["top_logprobs"]) == n_top for one in tokens)
    answer = hosts.fleet.post("/v1/chat/completions", {**body, "n": 2}, MINE)
    first, second = answer.json["choices"]
    assert first["message"] == second["message"] and (first["index"], second["index"]) == (0, 1)
    assert answer.json["usage"]["completion_tokens"] == 10


def test_tools_are_refused_where_the_chat_template_has_no_place_for_them(hosts: Hosts[Host]) -> None:
    hosts.ready()
    body = {"model": "plain", "messages": [QUESTION], "max_tokens": 1}
    try:
        assert hosts.fleet.post("/v1/chat/completions", body, MINE).status == 200  # which loads it
        refused = hosts.fleet.post("/v1/chat/completions", {**body, "tools": TOOLS}, MINE)
        assert (refused.status, refused.json["error"]["param"]) == (400, "tools")
        assert "chat template has no place" in refused.json["error"]["message"]
    finally:
        for agent in hosts.agents.values():
            agent.call("/unload_model", model_id="plain")
    hosts.fleet.wait(lambda state: all(len(one["loaded_models"]) == 1 for one in state["agents"]))


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


def test_several_choices_end_with_their_engine(hosts: Hosts[Host]) -> None:
    """No other engine could go on with the choices from the text that was delivered."""
    for _ in range(TRIES):
        body = {**CHAT[1], "n": 2, "max_tokens": 2 * N_TOKENS, "stream": True}
        received = _with_signal(hosts, CHAT[0], body, signal.SIGKILL)
        if not received.endswith(b"data: [DONE]\n\n"):
            break
    assert b"starling_replayed" not in received and b"[DONE]" not in received
    error = json.loads(received.split(b"\n\n")[-2].partition(b"data: ")[2])["error"]
    assert error["code"] == "MODEL_UNAVAILABLE" and "send the request again" in error["message"]


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
