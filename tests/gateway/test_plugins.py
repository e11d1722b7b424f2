"""Plugins in processes of their own, between a real gateway and scripted stages."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline.api.requests import chat as chat_requests
from pipeline.api.requests import generate as generate_requests
from pipeline.config.load import resolve
from pipeline.errors import StarlingError
from pipeline.observe.metrics import Metrics
from pipeline.procfs import children
from stages.gateway.plugins.plugins import Plugins
from stages.gateway.plugins.request_hook import changed, offered
from tests.gateway.server import Server

EXAMPLES = "tests.gateway.plugin_examples"
PATIENT = {"timeout_ms": 120_000, "start_timeout_ms": 120_000}
SAID = "write to ada@example.org or bob.b@mail.example.com, pay with 4111 1111 1111 1111 or 4111 1111 1111 1112. Bye"
SHOWN = "write to [EMAIL] or [EMAIL], pay with [CARD] or 4111 1111 1111 1112. Bye"


def plugin(name: str, kind: str, **settings: Any) -> dict[str, Any]:
    return {"name": name, "object": f"{EXAMPLES}:{kind}", **PATIENT, **settings}


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("plugins") / "calls"


@pytest.fixture(scope="module")
def guarded(homes: Callable[[], Path], log: Path) -> Iterator[Server]:
    """A gateway with two plugins: one redacts answers, the other one does what requests say."""
    plugins = [plugin("answers", "Answers"), plugin("trouble", "Trouble", options={"log": str(log)}, memory_mb=96)]
    running = Server(homes(), plugins=plugins, cache={"responses": {"enabled": True}})
    running.wait_ready()
    yield running
    assert running.close() == 0


def chat(said: str, **fields: Any) -> dict[str, Any]:
    return {"model": "bytes", "messages": [{"role": "user", "content": f"please say {said}"}], **fields}


def pid_of(server: Server, name: str, before: int = 0) -> int:
    """The process of a plugin, which has its name as an argument; wait for the successor of `before`."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        for pid in children(server.process.pid):
            with suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
                line = Path(f"/proc/{pid}/cmdline").read_bytes()
                if pid != before and line.rstrip(b"\0").endswith(b"\0" + name.encode()):
                    return pid
        time.sleep(0.02)
    raise AssertionError(f"plugin {name} has no process")


# ------------------------------------------------------------------ answers


def test_an_answer_is_changed_on_every_endpoint(guarded: Server) -> None:
    prompt = {"model": "bytes", "prompt": f"please say {SAID}\n", "max_tokens": 200}
    texts = [
        guarded.post("/v1/chat/completions", chat(SAID)).json["choices"][0]["message"]["content"],
        guarded.post("/v1/completions", prompt).json["choices"][0]["text"],
        guarded.post("/v1/messages", chat(SAID, max_tokens=200)).json["content"][0]["text"],
        guarded.post("/v1/responses", {"model": "bytes", "input": f"please say {SAID}"}).json["output"][0]["content"][
            0
        ]["text"],
    ]
    assert texts == [SHOWN] * 4
    choice = guarded.post("/v1/generate", prompt).json["choices"][0]
    assert (choice["text"], choice["tokens"]) == (SHOWN, [])  # tokens would tell the text


def test_a_stream_has_the_same_text_and_can_be_resumed_at_each_event(guarded: Server) -> None:
    events = guarded.stream("/v1/chat/completions", chat(SAID, n=2)).all()
    for index in (0, 1):
        deltas = [c["delta"] for e in events[:-1] for c in e.data["choices"] if c["index"] == index]
        assert "".join(d.get("content", "") for d in deltas) == SHOWN
        assert len(deltas) > 10  # the text comes as it is written
    request_id = events[1].id.partition(":")[0]
    for at in range(1, len(events) - 1, 7):
        rest = guarded.resume(f"/v1/requests/{request_id}", {"Last-Event-ID": events[at].id}).all()
        assert _text(events[: at + 1] + rest) == _text(events)
    again = guarded.stream("/v1/chat/completions", chat(SAID, n=2)).all()
    for index in (0, 1):  # the same events of each choice, however those of several choices alternate
        assert _of(again, index) == _of(events, index)


def _of(events: list[Any], index: int) -> list[Any]:
    return [c for event in events[:-1] for c in event.data["choices"] if c["index"] == index]


def _text(events: list[Any]) -> dict[int, str]:
    texts: dict[int, str] = {}
    for event in events:
        for choice in event.data["choices"] if event.data != "[DONE]" else ():
            texts[choice["index"]] = texts.get(choice["index"], "") + choice["delta"].get("content", "")
    return texts


def test_stop_strings_and_cached_answers(guarded: Server) -> None:
    stopped = guarded.post("/v1/chat/completions", chat(SAID, stop=[" or "])).json["choices"][0]
    assert (stopped["message"]["content"], stopped["finish_reason"]) == ("write to [EMAIL]", "stop")
    body = chat(SAID, temperature=0, max_tokens=30)
    first, second = guarded.post("/v1/chat/completions", body), guarded.post("/v1/chat/completions", body)
    assert second.headers["X-Starling-Cache"] == "hit"
    assert first.json["choices"] == second.json["choices"]
    assert first.json["choices"][0]["message"]["content"] == "write to [EMAIL] or bo"
    assert first.json["choices"][0]["finish_reason"] == "length"
    cached = guarded.stream("/v1/chat/completions", body).all()
    assert _text(cached) == {0: "write to [EMAIL] or bo"}


def test_logprobs_would_show_the_text(guarded: Server) -> None:
    refused = guarded.post("/v1/chat/completions", chat("hello", logprobs=True))
    assert (refused.status, refused.error["param"]) == (400, "logprobs")
    assert "'answers'" in refused.error["message"]


# ------------------------------------------------------------------ changes of requests


@pytest.mark.parametrize(("field", "value"), [("max_tokens", 0), ("top_p", 0.0), ("top_p", 1.5), ("temperature", -1.0)])
def test_a_change_is_within_the_bounds_of_the_api(field: str, value: float) -> None:
    generation = chat_requests.read({"model": "m", "messages": [{"role": "user", "content": "hello"}]})
    before, after = offered(generation, "req-1", "t"), offered(generation, "req-1", "t")
    setattr(after, field, value)
    with pytest.raises(ValueError, match=f"{field} is"):
        changed(generation, before, after)


def test_zeros_that_the_api_takes_may_be_set() -> None:
    generation = generate_requests.read({"prompt": "hello", "max_tokens": 5, "seed": 3, "stop": "x"})
    before, after = offered(generation, "req-1", "t"), offered(generation, "req-1", "t")
    after.max_tokens, after.seed, after.temperature, after.stop = 0, 0, 0.0, []
    found = changed(generation, before, after)
    assert (found.max_tokens, found.seed, found.sampling.temperature, found.stop) == (0, 0, 0.0, ())


# ------------------------------------------------------------------ failures


async def test_a_request_whose_time_ends_in_a_plugin_is_not_done(monkeypatch: pytest.MonkeyPatch) -> None:
    async def hang(*_: Any) -> None:
        await asyncio.sleep(3600)

    monkeypatch.setattr("stages.gateway.plugins.plugins.ask", hang)
    metrics = Metrics("gateway", None)
    config = resolve({"server": {"request_timeout_ms": 1}, "plugins": [plugin("slow", "Trouble")]}, {})
    plugins = Plugins(config, time.monotonic, metrics)
    generation = chat_requests.read({"model": "m", "messages": [{"role": "user", "content": "hello"}]})
    with pytest.raises(StarlingError, match="the plugins did not process the request"):
        await plugins.before(generation, "req-1", "t", time.monotonic())
    (series,) = metrics.snapshot().families["starling_plugin_requests_total"]
    assert (series.labels, series.value) == (("slow", "failed"), 1.0)


@pytest.mark.parametrize(
    ("word", "status", "code", "reason"),
    [
        ("raise", 500, "PLUGIN_FAILED", "it raised KeyError"),
        ("exit", 503, "PLUGIN_UNAVAILABLE", "its process ended"),
        ("grow", 500, "PLUGIN_FAILED", "it raised MemoryError"),
        ("role", 500, "PLUGIN_FAILED", "Invalid enum value 'wizard'"),
        ("type", 500, "PLUGIN_FAILED", "Expected `array | null`, got `str`"),
        ("rename", 500, "PLUGIN_FAILED", "it changed one of id, endpoint, model, tenant"),
        ("refuse", 400, "REFUSED_BY_PLUGIN", "this is not discussed here"),
    ],
)
def test_a_request_is_refused_by_name(
    guarded: Server, log: Path, word: str, status: int, code: str, reason: str
) -> None:
    n_calls = len(log.read_text().splitlines()) if log.exists() else 0
    refused = guarded.post("/v1/chat/completions", chat(f"pre-{word}"))
    assert (refused.status, refused.error["code"]) == (status, code)
    assert "'trouble'" in refused.error["message"]
    assert reason in refused.error["message"]
    assert "secret" not in refused.body.decode()
    assert len(log.read_text().splitlines()) == n_calls + 1  # it is not called again
    assert guarded.post("/v1/chat/completions", chat("well")).json["choices"][0]["message"]["content"] == "well"


@pytest.mark.parametrize(
    ("word", "code", "reason"),
    [
        ("raise", "PLUGIN_FAILED", "it raised KeyError"),
        ("exit", "PLUGIN_UNAVAILABLE", "its process ended"),
        ("grow", "PLUGIN_FAILED", "it raised MemoryError"),
        ("rewrite", "PLUGIN_FAILED", "does not begin with what it returned before"),
        ("none", "PLUGIN_FAILED", "not a text"),
        ("refuse", "REFUSED_BY_PLUGIN", "this is not discussed here"),
    ],
)
def test_a_stream_ends_with_an_error_that_names_the_plugin(guarded: Server, word: str, code: str, reason: str) -> None:
    other = guarded.stream("/v1/chat/completions", chat("b" * 150))
    events = guarded.stream("/v1/chat/completions", chat(f"so: post-{word}. and more")).all()
    error = next(e.data["error"] for e in events if "error" in e.data)
    assert error["code"] == code
    assert "'trouble'" in error["message"]
    assert reason in error["message"]
    assert _text(other.all()) == {0: "b" * 150}


def test_a_killed_plugin_process_changes_no_byte(guarded: Server) -> None:
    said = SAID * 3
    for name in ("answers", "trouble"):
        stream = guarded.stream("/v1/chat/completions", chat(said))
        events = stream.events()
        begun = [next(events) for _ in range(15)]
        pid = pid_of(guarded, name)
        os.kill(pid, signal.SIGKILL)
        assert _text([*begun, *events]) == {0: SHOWN * 3}
        stream.close()
        assert pid_of(guarded, name, before=pid)


def test_a_plugin_of_the_working_directory_comes_after_installed_modules(
    make_server: Callable[..., Server], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the plugin itself is imported from there, and no module that Starling needs."""
    (tmp_path / "house.py").write_text(f"from {EXAMPLES} import Answers as Rules\n")
    for name in ("msgspec", "pipeline"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise SystemExit('imported from the working directory')\n")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    monkeypatch.chdir(tmp_path)
    server = make_server(plugins=[plugin("house", "", object="house:Rules")])
    server.wait_ready()
    answer = server.post("/v1/chat/completions", chat(SAID)).json
    assert answer["choices"][0]["message"]["content"] == SHOWN


def test_the_journal_has_what_pre_inference_made_of_a_request(homes: Callable[[], Path], tmp_path: Path) -> None:
    """A gateway that is killed in the middle of a stream: same bytes, and the request is not processed again."""
    log = tmp_path / "calls"
    plugins = [
        plugin("redaction", "Redaction", object="starling.plugins.redaction:Redaction"),
        plugin("trouble", "Trouble", options={"log": str(log)}),
    ]
    server = Server(homes(), plugins=plugins)
    try:
        server.wait_ready()
        body = chat(f"Hi eve@example.com! {'m' * 40}@example.com {'and so on ' * 30}")
        undisturbed = _text(server.stream("/v1/chat/completions", body).all())
        assert undisturbed[0].startswith("Hi [EMAIL]! [EMAIL] and so on and")
        stream = server.stream("/v1/chat/completions", body)
        events = stream.events()
        begun = [next(events) for _ in range(30)]
        journal = (server.home / "state" / "journal" / "requests.journal").read_bytes()
        assert b"eve@" not in journal
        peers = server.peers
        peers.do(lambda: setattr(peers, "is_stepping", False))
        server.kill_and_restart()
        stream.close()
        peers.do(peers.kill_scheduler)
        peers.do(peers.start_scheduler)
        peers.do(lambda: setattr(peers, "tokens_per_step", 7))
        peers.do(lambda: setattr(peers, "is_stepping", True))
        server.wait_ready()
        request_id = begun[1].id.partition(":")[0]
        rest = server.resume(f"/v1/requests/{request_id}", {"Last-Event-ID": begun[-1].id}).all()
        assert _text(begun + rest) == undisturbed
        assert log.read_text().splitlines().count(request_id) == 1
        assert _text(server.resume(f"/v1/requests/{request_id}").all()) == undisturbed
        _check_stored_responses(server)
        file = server.home / "starling.yaml"
        file.write_text(yaml.safe_dump({**yaml.safe_load(file.read_text()), "plugins": plugins[:1]}))
        server.kill_and_restart()
        peers.do(peers.kill_scheduler)
        peers.do(peers.start_scheduler)
        conflict = server.get(f"/v1/requests/{request_id}").body.decode()  # generated again it would be another text
        assert '"code":"CONFLICT"' in conflict
        assert "trouble@0#" in conflict
        assert "Hi" not in conflict
    finally:
        server.close()
    assert not any(b"ada@" in file.read_bytes() for file in (server.home / "state").rglob("*") if file.is_file())


def _check_stored_responses(server: Server) -> None:
    """What the client reads later, and what is on the disk, is what the plugins made of it."""
    body = {"model": "bytes", "instructions": "for me@example.org", "input": "please say hi to ada@example.org"}
    answer = server.post("/v1/responses", body).json
    assert answer["output"][0]["content"][0]["text"] == "hi to [EMAIL]"
    assert answer["instructions"] == "for [EMAIL]"
    items = server.get(f"/v1/responses/{answer['id']}/input_items").json["data"]
    assert "ada@" not in str(items)
    assert "[EMAIL]" in str(items)
    ids = {"model": "bytes", "prompt": [1, 2, 3]}
    refused = server.post("/v1/completions", ids)
    assert (refused.status, refused.error["param"]) == (400, "prompt")
    second = {"model": "bytes", "input": "please say bye", "previous_response_id": answer["id"]}
    assert server.post("/v1/responses", second).json["output"][0]["content"][0]["text"] == "bye"


def test_a_plugin_that_hangs_or_cannot_be_started(homes: Callable[[], Path], tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.touch()
    plugins = [
        plugin("settings", "Settings"),
        plugin("broken", "Broken", options={"broken": str(broken)}),
        plugin("trouble", "Trouble", options={"log": str(tmp_path / "calls")}, timeout_ms=1000),
    ]
    server = Server(homes(), plugins=plugins)
    try:
        server.wait_log("a plugin cannot be started")
        refused = server.post("/v1/chat/completions", chat("hello"))
        assert (refused.status, refused.error["code"]) == (503, "PLUGIN_UNAVAILABLE")
        assert "it raised OSError" in refused.error["message"]
        deadline = time.monotonic() + 120
        while "plugin broken" not in (reason := str(server.get("/ready").json["reason"])):
            assert time.monotonic() < deadline, reason  # the stages are looked at first
        broken.unlink()
        server.wait_ready()
        for said in ("pre-hang", "post-hang. "):
            hung = server.post("/v1/chat/completions", chat(said))
            assert hung.error["code"] == "PLUGIN_FAILED"
            assert "it took longer than 1000 ms (plugins.timeout_ms)" in hung.error["message"]
        _until_answered(server, "hello")
        frame = server.peers.generator.submitted[-1]
        assert (frame.sampling.seed, frame.sampling.temperature) == (7, 0.5)
        assert bytes(frame.prompt[::4]).startswith(b"system: be kind\nuser: please say hello")
        assert 'starling_plugin_restarts_total{plugin="trouble"}' in server.get("/metrics").body.decode()
        line = server.wait_log("output of a helper process")
        assert (line["plugin"], line["text"]) == ("settings", "a plugin may print")
    finally:
        server.close()


def _until_answered(server: Server, said: str) -> None:
    """A call that is slow because the machine is busy has failed for the same reason."""
    deadline = time.monotonic() + 120
    while (answer := server.post("/v1/chat/completions", chat(said))).status != 200:
        assert time.monotonic() < deadline, answer.error
    assert answer.json["choices"][0]["message"]["content"] == said


def test_failures_may_be_skipped(homes: Callable[[], Path], tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.touch()
    plugins = [
        plugin("broken", "Broken", options={"broken": str(broken)}, on_failure="skip"),
        plugin("trouble", "Trouble", options={"log": str(tmp_path / "calls")}, on_failure="skip"),
        plugin("whole", "Whole", on_failure="skip"),
    ]
    server = Server(homes(), plugins=plugins)
    try:
        server.wait_ready()
        for said in ("pre-raise", "pre-exit", "pre-role", "one post-raise. more", "one post-exit. more"):
            answer = server.post("/v1/chat/completions", chat(said))
            assert answer.json["choices"][0]["message"]["content"] == said[::-1]
        assert server.post("/v1/chat/completions", chat("pre-refuse")).status == 400
        events = server.stream("/v1/chat/completions", chat("backwards")).all()
        assert _text(events) == {0: "sdrawkcab"}
        rest = server.resume(f"/v1/requests/{events[1].id.partition(':')[0]}", {"Last-Event-ID": events[1].id}).all()
        assert _text(events[:2] + rest) == {0: "sdrawkcab"}
    finally:
        server.close()


def test_without_plugins_there_is_no_process(server: Server) -> None:
    server.post("/v1/chat/completions", chat("hello"))
    commands = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in children(server.process.pid)]
    assert not any(b"plugin" in command for command in commands)


def test_calls_of_tools_are_changed_and_stay_calls(guarded: Server) -> None:
    mail = {"type": "function", "function": {"name": "mail", "parameters": {"type": "object"}}}
    call = '<tool_call>{"name": "mail", "arguments": {"to": "ada@example.org", "n": 4}}</tool_call>'
    body = chat(f"I write to ada@example.org. {call}", tools=[mail])
    message = guarded.post("/v1/chat/completions", body).json["choices"][0]["message"]
    assert message["content"].strip() == "I write to [EMAIL]."
    assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {"to": "[EMAIL]", "n": 4}
    events = guarded.stream("/v1/chat/completions", body).all()
    deltas = [d for e in events[:-1] for c in e.data["choices"] for d in c["delta"].get("tool_calls", [])]
    streamed = "".join(d["function"].get("arguments", "") for d in deltas)
    assert streamed == message["tool_calls"][0]["function"]["arguments"]
