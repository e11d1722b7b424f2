"""Engines of other makers behind their door: a real process for each, a stand-in that answers as `vllm serve` does."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import re
import signal
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import aiohttp
import pytest

from pipeline.api.output_text import TEXT, TextSoFar, encode
from pipeline.api.output_tokens import RELAY
from pipeline.config.load import resolve
from pipeline.config.schema import Config, EngineConfig
from pipeline.errors import ConfigError, InvalidRequest
from stages.agent.engines import external_engine, local_model
from stages.agent.engines.door.request_body import read
from stages.agent.engines.external_engine import DIALECTS, ExternalEngine
from stages.agent.engines.interface import EngineDied
from stages.agent.stage import free_port, open_door
from tests.fleet.coordination_stores import until
from tests.fleet.engine_hosts import texts
from tests.fleet.stand_in_engine import expected

STAND_IN = Path(__file__).with_name("stand_in_engine.py")
PROMPT = {"model": "m", "prompt": "once", "max_tokens": 8}
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8}
NAME = "req-" + "ab" * 12 + "; created=1700000000; seed=5"


TOOLS = [{"type": "function", "function": {"name": "look", "description": "", "parameters": {"type": "object"}}}]
STRICT = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}, "strict": True}}]
NAMED = {"type": "function", "function": {"name": "look"}}


def called(arguments: str) -> list[dict[str, Any]]:
    """A chat with a call and its result."""
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": arguments}}
    return [
        {"role": "user", "content": [{"type": "text", "text": "he"}, {"type": "text", "text": "llo"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": [{"type": "text", "text": "seen"}], "tool_call_id": "c"},
    ]


def write_program(folder: Path) -> Path:
    """The stand-in, as the program `vllm`."""
    program = folder / "vllm"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} {STAND_IN} "$@"\n')
    program.chmod(0o755)
    return program


def set_control(model: Path, word: str) -> None:
    """Tell the stand-in what to do; it never reads a part of the file."""
    new = model.with_name(model.name + ".new")
    new.write_text(word)
    new.replace(model.with_name(model.name + ".control"))


class Site:
    """One engine, its model's directory, and a client."""

    def __init__(self, folder: Path, session: aiohttp.ClientSession) -> None:
        self.model = folder / "model"
        self.model.mkdir()
        (self.model / "config.json").write_text("{}")
        self.home = folder / "home"
        self._program = write_program(folder)
        self.session = session
        self.engine: ExternalEngine

    def config(self, **fields: Any) -> Config:
        one = {"model": "m", "engine": "vllm", "path": str(self.model), "program": str(self._program), **fields}
        return resolve({"fleet": {"agent": {"engines": [one]}}}, env={})

    async def make(self, **fields: Any) -> ExternalEngine:
        config = self.config(**fields)
        (configured,) = config.fleet.agent.engines
        found = await asyncio.to_thread(local_model.find, configured, self.home)
        return ExternalEngine(
            config,
            found,
            self.home,
            self.session,
            lambda: free_port("127.0.0.1"),
            lambda app: open_door(app, "127.0.0.1"),
        )

    async def start(self, **fields: Any) -> ExternalEngine:
        self.engine = await self.make(**fields)
        await self.engine.start()
        await self.engine.ready()
        return self.engine

    def control(self, words: str) -> None:
        set_control(self.model, words)

    def requests(self) -> list[dict[str, Any]]:
        path = self.model.with_name(self.model.name + ".requests")
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    async def post(
        self, path: str, body: dict[str, Any], so_far: TextSoFar | None = None, key: str | None = None, **headers: str
    ) -> tuple[int, bytes]:
        tail = b""
        if so_far is not None:
            tail = encode(so_far)
            headers[TEXT] = str(len(tail))
        return await self.send(path, json.dumps(body).encode() + tail, key, **headers)

    async def send(self, path: str, body: bytes, key: str | None = None, **headers: str) -> tuple[int, bytes]:
        given = {"Authorization": f"Bearer {key or self.engine.key}", "Content-Type": "application/json", **headers}
        async with self.session.post(self.engine.url + path, data=body, headers=given) as answer:
            return answer.status, await answer.read()


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    async with aiohttp.ClientSession() as session:
        made = Site(tmp_path, session)
        yield made
        if hasattr(made, "engine"):
            await made.engine.stop(at_once=True)


async def test_a_start_that_is_cancelled_ends_after_its_fence(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fence that went on in its thread would end the next engine of the home."""
    begun, may_end = threading.Event(), threading.Event()

    def fence(*arguments: object) -> int:
        begun.set()
        assert may_end.wait(60)
        return 0

    engine = await site.make()
    monkeypatch.setattr(external_engine, "fence", fence)
    start = asyncio.create_task(engine.start())
    await until(begun.is_set)
    start.cancel()
    for _ in range(20):
        await asyncio.sleep(0)
    was_over = start.done()
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await start
    assert not was_over


async def test_answers_are_ours_and_the_engine_gets_our_defaults(site: Site) -> None:
    engine = await site.start()
    name = {"X-Starling-Request": NAME}
    status, body = await site.post("/v1/completions", PROMPT, **name)
    assert status == 200, body
    whole = json.loads(body)
    assert whole["choices"][0] == {"index": 0, "text": expected("once", 8), "logprobs": None, "finish_reason": "length"}
    assert (whole["id"], whole["created"], whole["model"]) == ("cmpl-" + "ab" * 12, 1700000000, "m")
    assert whole["usage"]["prompt_tokens"] == 4 and whole["usage"]["completion_tokens"] == 8
    body_sent = site.requests()[0]
    assert body_sent["temperature"] == 1.0 and body_sent["top_p"] == 1.0 and body_sent["seed"] == 5
    streamed = {**CHAT, "stream": True, "stream_options": {"include_usage": True}}
    status, stream = await site.post("/v1/chat/completions", streamed, **name, **{RELAY: "1"})
    assert "".join(texts(stream)) == expected("hello", 8)
    assert stream.count(b": text ") == 9 and stream.endswith(b"data: [DONE]\n\n")
    assert b'"completion_tokens":8' in stream and b"own-id" not in stream
    assert (await engine.queue())[:3] == (0, 2, 0.75)


async def test_a_request_needs_the_key_and_none_is_repeated(site: Site) -> None:
    await site.start()
    assert (await site.post("/v1/completions", PROMPT, key="wrong"))[0] == 401
    assert (await site.post("/v1/embeddings", PROMPT))[0] == 400
    for header in ("Idempotency-Key", "Last-Event-ID"):  # it gives no answer a second time
        status, answer = await site.post("/v1/completions", PROMPT, **{header: "x"})
        assert status == 400 and json.loads(answer)["error"]["param"] == header
    assert site.requests() == []


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("completions", {"n": 17}, "n"),
        ("completions", {"response_format": {"type": "json_object"}}, "response_format"),
        ("completions", {"dry_multiplier": 1.0}, "dry_multiplier"),
        ("completions", {"logprobs": 2}, "logprobs"),
        ("completions", {"prompt": [1, 2]}, "prompt"),
        ("completions", {"prompt": ""}, "prompt"),
        ("completions", {"max_tokens": 0}, "max_tokens"),
        ("completions", {"session_id": "s"}, "session_id"),
        ("chat/completions", {"guided_json": {"type": "object"}}, "guided_json"),
        ("chat/completions", {"logprobs": True, "response_format": {"type": "json_object"}}, "logprobs"),
        ("chat/completions", {"logprobs": True, "tools": TOOLS}, "logprobs"),
        ("chat/completions", {"tools": TOOLS, "tool_choice": "required"}, "tool_choice"),
        ("chat/completions", {"tools": TOOLS, "tool_choice": NAMED}, "tool_choice"),
        ("chat/completions", {"tools": STRICT}, "tools[0].function.strict"),
        ("chat/completions", {"messages": called("no JSON")}, "messages[1].tool_calls[0].function.arguments"),
        ("chat/completions", {"reasoning_effort": "low"}, "reasoning_effort"),
        ("chat/completions", {"messages": [{"role": "tool", "content": "x", "tool_call_id": "1"}]}, "messages"),
        ("chat/completions", {"unheard_of": 1}, "unheard_of"),
        ("messages", {}, "model"),
        ("generate", {}, "model"),
    ],
)
def test_what_the_engine_cannot_honour_is_refused_by_name(path: str, fields: dict[str, Any], param: str) -> None:
    body = {**(CHAT if path == "chat/completions" else PROMPT), **fields}
    with pytest.raises(InvalidRequest) as refused:
        read(f"/v1/{path}", json.dumps(body).encode(), "application/json", DIALECTS["llama-server"])
    assert refused.value.param.startswith(param), refused.value.message


def test_a_neutral_value_is_no_refusal() -> None:
    neutral = {"n": 1, "dry_multiplier": 0, "user": "me", "echo": False, "speculate": None, "frequency_penalty": 0}
    body = json.dumps({**PROMPT, **neutral}).encode()
    read("/v1/completions", body, "application/json", DIALECTS["llama-server"])


def test_what_one_engine_honours_another_one_may_refuse() -> None:
    body = json.dumps({**PROMPT, "frequency_penalty": 0.5}).encode()
    read("/v1/completions", body, "application/json", DIALECTS["vllm"])
    with pytest.raises(InvalidRequest, match="llama-server computes it"):
        read("/v1/completions", body, "application/json", DIALECTS["llama-server"])


async def test_malformed_http_is_refused_as_others(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    port = int((await site.start()).url.rpartition(":")[2])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nno colon\r\n\r\n")
    head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    await writer.wait_closed()
    assert b" 400 " in head and b"\r\nContent-Type: application/json\r\n" in head
    assert "not valid HTTP" in json.loads(body)["error"]["message"]
    (line,) = [line for line in caplog.records if line.message == "a client sent malformed HTTP"]
    assert (line.levelname, line.__dict__["client"]) == ("WARNING", "127.0.0.1")


async def test_an_answer_goes_on_after_a_text(site: Site) -> None:
    await site.start()
    text = expected("once", 3)
    _, stream = await site.post(
        "/v1/completions", {**PROMPT, "stream": True}, TextSoFar(text=text, tokens=3), **{RELAY: "1"}
    )
    assert text + "".join(texts(stream)) == expected("once", 8)
    assert b": text 8\n\n" in stream
    chat = {**CHAT, "stream": True, "stream_options": {"include_usage": True}}
    text = expected("hello", 5)
    _, stream = await site.post("/v1/chat/completions", chat, TextSoFar(text=text, tokens=5))
    assert text + "".join(texts(stream)) == expected("hello", 8) and b"role" not in stream
    assert b'"completion_tokens":8' in stream
    sent = site.requests()[-1]
    assert sent["messages"][-1] == {"role": "assistant", "content": text}
    assert sent["continue_final_message"] is True and sent["add_generation_prompt"] is False
    # The client's body may be compressed; what follows it is not.
    tail = encode(TextSoFar(text=text, tokens=5))
    body = gzip.compress(json.dumps(chat).encode()) + tail
    _, stream = await site.send("/v1/chat/completions", body, **{"Content-Encoding": "gzip", TEXT: str(len(tail))})
    assert text + "".join(texts(stream)) == expected("hello", 8)
    # With all of its tokens there is nothing to compute.
    before = len(site.requests())
    _, stream = await site.post("/v1/completions", {**PROMPT, "stream": True}, TextSoFar(text="x", tokens=8))
    assert texts(stream) == [] and b'"length"' in stream and len(site.requests()) == before


async def test_a_stream_that_breaks_ends_with_an_error_that_can_be_cured(site: Site) -> None:
    await site.start()
    for word in ("nonsense", "error", "end", "die"):
        site.control(word)
        status, stream = await site.post("/v1/completions", {**PROMPT, "stream": True})
        assert status == 200 and "".join(texts(stream)) == expected("once", 3), word
        last = stream.split(b"\n\n")[-2]
        assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "MODEL_UNAVAILABLE", last
        status, answer = await site.post("/v1/completions", PROMPT)
        assert (status, json.loads(answer)["error"]["code"]) == (503, "MODEL_UNAVAILABLE"), word
    assert "signal 9" in (await site.engine.ended()).message


async def test_a_busy_engine_and_a_bad_prompt(site: Site) -> None:
    await site.start()
    status, answer = await site.post("/v1/completions", {**PROMPT, "prompt": "x" * 20_000})
    assert status == 400 and b"the prompt is too long" in answer
    site.control("busy")
    status, answer = await site.post("/v1/completions", PROMPT)
    assert (status, json.loads(answer)["error"]["code"]) == (503, "OVERLOADED")


async def test_an_engine_that_is_silent_counts_as_dead(site: Site) -> None:
    engine = await site.start(silent_ms=4000, answer_timeout_ms=4000)
    ended = asyncio.create_task(engine.ended())
    site.control("stop")
    _, stream = await site.post("/v1/completions", {**PROMPT, "stream": True})
    assert "".join(texts(stream)) == expected("once", 3) and b"MODEL_UNAVAILABLE" in stream
    assert (await engine.queue()).submitted == 1  # heartbeats do not wait for it
    assert "has not answered /health for 4 s" in (await ended).message
    await engine.stop(at_once=True)


async def test_an_engine_is_not_silent_because_its_agent_was_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    asked: list[float] = []
    ending: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    engine = ExternalEngine.__new__(ExternalEngine)
    engine._engine = EngineConfig(model="m", engine="vllm", path=str(tmp_path), silent_ms=15_000)
    engine._home = tmp_path
    engine._child = cast(Any, SimpleNamespace(wait=lambda: asyncio.shield(ending)))

    async def is_healthy(timeout_s: float = 0.0) -> bool:
        nonlocal now
        asked.append(now)
        if len(asked) == 2:  # stopped here: the time for the answer is over, though it has come
            now += 20.0
        elif len(asked) == 4:
            ending.set_result(-9)
        return len(asked) != 2

    async def measure(timeout_s: float) -> None:
        pass

    monkeypatch.setattr(engine, "_is_healthy", is_healthy)
    monkeypatch.setattr(engine, "_measure", measure)
    monkeypatch.setattr(external_engine, "HEALTH_S", 0.01)
    engine._clock = lambda: now
    assert "killed by signal 9" in (await engine.ended()).message
    assert len(asked) == 4


async def test_a_shut_door_ends_what_is_under_way(site: Site) -> None:
    engine = await site.start()
    site.control("hold")
    running = asyncio.create_task(site.post("/v1/completions", {**PROMPT, "stream": True}))
    whole = asyncio.create_task(site.post("/v1/completions", PROMPT))
    await until(lambda: len(site.requests()) == 2)
    await engine.suspend()
    _, stream = await running
    assert b"lease has ended" in stream and "[DONE]" not in stream.decode()
    assert (await whole)[0] == 503
    assert (await site.post("/v1/completions", PROMPT))[0] == 503
    await engine.resume()
    site.control("")
    assert (await site.post("/v1/completions", PROMPT))[0] == 200


async def test_an_engine_that_is_unloaded_ends_what_it_has_and_takes_no_more(site: Site) -> None:
    engine = await site.start()
    site.control("hold")
    running = asyncio.create_task(site.post("/v1/completions", PROMPT))
    await until(lambda: len(site.requests()) == 1)
    stopping = asyncio.create_task(engine.stop())
    await asyncio.sleep(0)
    status, answer = await site.post("/v1/completions", PROMPT)
    assert (status, json.loads(answer)["error"]["code"]) == (503, "DRAINING")
    site.control("")
    status, answer = await running
    assert status == 200 and json.loads(answer)["choices"][0]["text"] == expected("once", 8)
    await stopping
    assert len(site.requests()) == 1


async def test_no_more_requests_than_allowed(site: Site) -> None:
    await site.start(max_requests=1)
    site.control("hold")
    first = asyncio.create_task(site.post("/v1/completions", PROMPT))
    await until(lambda: len(site.requests()) == 1)
    status, answer = await site.post("/v1/completions", PROMPT)
    assert (status, json.loads(answer)["error"]["code"]) == (503, "OVERLOADED")
    watched = asyncio.create_task(site.engine.ended())  # which looks at the metrics, too
    while (await site.engine.queue()).running != 1:
        await asyncio.sleep(0.01)
    watched.cancel()
    site.control("")
    assert (await first)[0] == 200


async def test_a_client_that_leaves_frees_its_place(site: Site) -> None:
    await site.start(max_requests=1)
    site.control("hold")
    first = asyncio.create_task(site.post("/v1/completions", PROMPT))
    await until(lambda: len(site.requests()) == 1)
    first.cancel()
    await asyncio.wait([first])
    site.control("")
    while (await site.post("/v1/completions", PROMPT))[0] != 200:
        await asyncio.sleep(0.01)


async def test_tenants_share_no_cached_prompts(site: Site) -> None:
    await site.start()
    for salt in ("aa", "aa", "bb"):
        await site.post("/v1/completions", PROMPT, **{"X-Starling-Request": f"{NAME}; salt={salt}"})
    await site.post("/v1/completions", PROMPT)
    first, again, other, none = [one.get("cache_salt") for one in site.requests()]
    assert first == again != other and first and other and none is None
    assert "aa" not in (first, other)


async def test_its_output_is_kept_and_its_limits_hold(site: Site) -> None:
    engine = await site.start(memory_mb=512)
    log = site.home / "engine.log"
    await until(lambda: log.exists() and "stand-in for m" in log.read_text())
    (pid,) = [int(one) for one in os.listdir("/proc") if one.isdigit() and _is_stand_in(int(one), site.model)]
    limits = Path(f"/proc/{pid}/limits").read_text()
    assert re.search(rf"Max data size\s+{512 << 20}\s", limits) and re.search(r"Max core file size\s+0\s", limits)
    assert os.getpgid(pid) != os.getpgid(0)
    environment = Path(f"/proc/{pid}/environ").read_bytes()
    assert b"SPT_NOENV=1" in environment  # or it would hide itself from fence.py
    assert engine.key.encode() not in environment  # the door's key is not the engine's
    os.kill(pid, signal.SIGKILL)
    assert "signal 9" in (await engine.ended()).message


def _is_stand_in(pid: int, model: Path) -> bool:
    try:
        return str(model).encode() in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False


async def test_a_program_that_is_not_there_is_named(site: Site) -> None:
    with pytest.raises(EngineDied, match="/no/vllm cannot be run: No such file") as failed:
        await site.start(program="/no/vllm")
    assert failed.value.is_final


def test_the_digest_follows_the_files(tmp_path: Path) -> None:
    gguf = tmp_path / "m.gguf"
    gguf.write_bytes(b"one")
    engine = EngineConfig(model="m", engine="llama-server", path=str(gguf))
    first = local_model.find(engine, tmp_path / "home")
    assert first.digest == "7692c3ad3540bb803c020b3aee66cd8887123234ea0c6e7143c0add73ff431ed" and first.nbytes == 3
    assert local_model.find(engine, tmp_path / "home") == first
    (tmp_path / "other").write_bytes(b"two")
    (tmp_path / "other").rename(gguf)
    assert local_model.find(engine, tmp_path / "home").digest != first.digest
    gguf.unlink()
    with pytest.raises(ConfigError, match="put the model there"):
        local_model.find(engine, tmp_path / "home")


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"path": "relative.gguf"}, "engines.0.path"),
        ({"model": "all"}, "engines.0.model"),
        ({"args": ["--port=1"]}, "engines.0.args"),
        ({"args": ["--api-key", "x"]}, "engines.0.args"),
        ({"args": ["--api_key=x"]}, "engines.0.args"),
        ({"args": ["--hf-repo", "x/y"]}, "engines.0.args"),
        ({"model": "smollm2-135m-instruct"}, "engines.0.model"),
    ],
)
def test_what_the_configuration_must_not_say(fields: dict[str, Any], what: str) -> None:
    one = {"model": "m", "engine": "llama-server", "path": "/m.gguf", **fields}
    with pytest.raises(ConfigError, match=what):
        resolve({"fleet": {"agent": {"engines": [one]}}}, env={})


def test_an_operator_chooses_the_parser_of_calls() -> None:
    args = ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    one = {"model": "m", "engine": "vllm", "path": "/m", "args": args}
    assert list(resolve({"fleet": {"agent": {"engines": [one]}}}, env={}).fleet.agent.engines[0].args) == args
