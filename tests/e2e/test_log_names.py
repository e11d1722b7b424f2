"""Log lines of all stages name the request, its session, its model and its tenant; also after a stage was killed."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.e2e.conftest import share_caches
from tests.e2e.resumable import events, wait_answering
from tests.e2e.server import POLL_S, Server, wait_gone
from tests.e2e.up_server import Up
from tools.tiny_gguf import SHAPES, write_model

pytestmark = pytest.mark.slow

Line = dict[str, Any]
ATTEMPTS = 8  # to kill a stage before the end of a stream
WAIT_S = 60.0  # for lines, which threads write
PROMPT = list(range(3, 60))
HOSTILE = '\x1b[31m"},{"event":"x\n\u2028' + "é" * 100
TIMINGS = ("duration_ms", "queue_ms", "kv_ms")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    home = tmp_path_factory.mktemp("log-names")
    share_caches(home)
    model = {"name": "tiny", "path": str(write_model(home / "tiny.gguf", SHAPES["small"])), "kv_cache_mb": 16}
    keys = [{"key": f"sk-{name}", "tenant": name} for name in ("acme", "globex")]
    config = {
        "models": [model],
        "auth": {"api_keys": keys},
        "scheduler": {"max_step_tokens": 64},
        "tracing": {"slow_request_ms": 1},
        "logging": {"format": "json", "level": "debug"},
    }
    with Up(home, config) as server:
        yield server
        assert server.stop() == 0
        assert server.leftovers() == []


def key_of(tenant: str) -> dict[str, str]:
    return {"Authorization": f"Bearer sk-{tenant}"}


def logged(server: Server) -> list[Line]:
    """Every whole line of every process."""
    lines: list[Line] = []
    for path in sorted((server.home / "logs").iterdir()):
        lines += map(json.loads, path.read_text().split("\n")[:-1])
    return lines


def wait_lines(server: Server, holds: Callable[[list[Line]], bool]) -> list[Line]:
    deadline = time.monotonic() + WAIT_S
    while not holds(lines := logged(server)):
        assert time.monotonic() < deadline, lines[-40:]
        time.sleep(POLL_S)
    return lines


def about(lines: list[Line], request_id: str) -> dict[str, list[Line]]:
    """Lines of a request, by stage."""
    found: dict[str, list[Line]] = {}
    for line in lines:
        if line.get("request_id") == request_id:
            found.setdefault(line["stage"], []).append(line)
    return found


def names_of(line: Line) -> tuple[Any, ...]:
    """What every line of a request has. Raises `KeyError`."""
    assert {"ts", "level", "stage", "pid", "event"} <= line.keys()
    return line["model"], line["tenant"], line["session_id"]


def steps_of(lines: list[Line], request_id: str) -> list[Line]:
    """The lines of the scheduler about the steps that computed a request."""
    steps = [line for line in lines if line["event"] == "requests of steps"]
    return [line for line in steps if any(one["request_id"] == request_id for one in line["requested_by"])]


def computed_in(lines: list[Line], steps: list[Line]) -> list[Line]:
    """The lines of workers about the same steps."""
    return [
        line
        for line in lines
        if line["event"] == "steps are computed"
        and any(
            (line["model"], line["generation"]) == (one["model"], one["generation"])
            and line["first"] <= one["last"]
            and one["first"] <= line["last"]
            for one in steps
        )
    ]


def check(server: Server, client_id: str, tenant: str, session_id: str | None) -> None:
    """Lines of every stage name the request whose `X-Request-Id` the client has given."""

    def is_complete(lines: list[Line]) -> bool:
        mine = [one for one in lines if one.get("client_request_id") == client_id]
        events = {line["event"] for line in mine}
        if not {"request", "slow request"} <= events:
            return False
        request_id = mine[0]["request_id"]
        steps = steps_of(lines, request_id)
        return about(lines, request_id).keys() >= wanted and bool(computed_in(lines, steps))

    wanted = {"gateway", "tokenizer", "scheduler", "kv"}
    lines = wait_lines(server, is_complete)
    request_id = next(one["request_id"] for one in lines if one.get("client_request_id") == client_id)
    assert client_id != request_id
    for stage, found in about(lines, request_id).items():
        assert {names_of(line) for line in found} == {("tiny", tenant, session_id)}, stage
        assert any(name in line for line in found for name in TIMINGS), stage
    named = {"request_id": request_id, "tenant": tenant, "session_id": session_id}
    steps = steps_of(lines, request_id)
    assert all(named in line["requested_by"] for line in steps)
    pid = server.pid_of("worker-tiny")
    assert {(line["stage"], line["pid"]) for line in computed_in(lines, steps)} == {("worker", pid)}
    assert {line["worker_pid"] for line in steps} == {pid}


@pytest.mark.parametrize(
    ("path", "tenant", "body"),
    [
        ("/v1/chat/completions", "acme", {"messages": [{"role": "user", "content": "abc"}], "max_tokens": 3}),
        ("/v1/completions", "globex", {"prompt": "abc", "max_tokens": 3}),
        ("/v1/embeddings", "acme", {"input": ["one two", "three"]}),
        ("/v1/generate", "globex", {"prompt": "abc", "max_tokens": 3, "session_id": ""}),
        ("/v1/generate", "acme", {"prompt": "abc", "max_tokens": 3, "session_id": HOSTILE, "create_session": True}),
    ],
    ids=["chat", "completions", "embeddings", "session", "hostile session"],
)
def test_lines_of_every_stage_name_the_request(server: Up, path: str, tenant: str, body: Line) -> None:
    client_id = f"names-{tenant}-{path.rpartition('/')[2]}-{len(body.get('session_id', 'none'))}"
    headers = {**key_of(tenant), "X-Request-Id": client_id}
    status, answer, _ = server.request("POST", path, {"model": "tiny", **body}, headers)
    assert status == 200, answer
    check(server, client_id, tenant, answer["session_id"] if "session_id" in body else None)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/tokenize", {"text": "abc"}),
        ("/v1/detokenize", {"tokens": [5, 6]}),
        ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "abc"}]}),
    ],
)
def test_lines_about_a_text_alone_name_its_request(server: Up, path: str, body: Line) -> None:
    client_id = f"text-{path.rpartition('/')[2]}"
    headers = {**key_of("acme"), "X-Request-Id": client_id}
    status, answer, _ = server.request("POST", path, {"model": "tiny", **body}, headers)
    assert status == 200, answer

    def is_complete(lines: list[Line]) -> bool:
        mine = [one for one in lines if one.get("client_request_id") == client_id]
        return bool(mine) and about(lines, mine[0]["request_id"]).keys() >= {"gateway", "tokenizer"}

    lines = wait_lines(server, is_complete)
    request_id = next(one["request_id"] for one in lines if one.get("client_request_id") == client_id)
    for found in about(lines, request_id).values():
        assert {names_of(line) for line in found} == {("tiny", "acme", None)}


@pytest.mark.parametrize("stages", [("scheduler",), ("worker-tiny",), ("kv",), ("gateway", "scheduler")], ids="+".join)
def test_lines_after_a_death_name_the_request_as_before(server: Up, stages: tuple[str, ...]) -> None:
    """The successors learn it from the gateway, whose own successor reads it in the journal."""
    for _ in range(ATTEMPTS):
        found = killed_meanwhile(server, stages)
        if found is not None:
            break
    else:
        pytest.fail(f"no stream was still running {ATTEMPTS} times")
    request_id, session_id, began = found
    pids = {stage.partition("-")[0]: server.pid_of(stage) for stage in ("scheduler", "worker-tiny", "kv", "gateway")}

    def is_complete(lines: list[Line]) -> bool:
        mine = about(lines, request_id)
        ended = [line for line in mine.get("scheduler", []) if line["event"] == "a sequence has ended"]
        slow = [line for line in mine.get("gateway", []) if line["event"] == "slow request"]
        # The kv stage logs a request for pages after its answer.
        is_asked = "scheduler" not in stages or pages_asked(mine) != []
        return bool(ended and slow) and is_asked and computed(lines) != []

    def pages_asked(mine: dict[str, list[Line]]) -> list[Line]:
        """Of the present kv stage, behind the death of the stages: a scheduler's successor asks for pages again."""
        return [line for line in mine.get("kv", []) if line["pid"] == pids["kv"] and line["ts"] >= began]

    def computed(lines: list[Line]) -> list[Line]:
        """Of the present worker, behind the death of the stages."""
        found = computed_in(lines, steps_of(lines, request_id))
        return [line for line in found if line["pid"] == pids["worker"] and line["ts"] >= began]

    lines = wait_lines(server, is_complete)
    mine = about(lines, request_id)
    for stage, of_stage in mine.items():
        assert {names_of(line) for line in of_stage} == {("tiny", "globex", session_id)}, stage
    for stage in stages:
        if stage in ("gateway", "scheduler"):
            assert pids[stage] in {line["pid"] for line in mine[stage]}, stage


def killed_meanwhile(server: Up, stages: tuple[str, ...]) -> tuple[str, str, str] | None:
    """Kill stages during a turn of a session. None: it had ended. Returns ids of request and session, and when."""
    old = {stage: server.pid_of(stage) for stage in stages}
    session_id = f"session-{'-'.join(stages)}-{time.monotonic_ns()}"
    body = {
        "model": "tiny",
        "prompt": PROMPT,
        "max_tokens": 1500,
        "ignore_eos": True,
        "seed": 3,
        "stream": True,
        "session_id": session_id,
        "create_session": True,
    }
    stream = events(server, "/v1/generate", body, key_of("globex"))
    last = next(stream)[0]
    request_id = last.partition(":")[0]
    began = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime())
    received = 1
    try:
        for pid in old.values():
            os.kill(pid, signal.SIGKILL)
        for pid in old.values():
            assert wait_gone(pid)
        for last, _ in stream:  # noqa: B007 -- read after the connection has ended
            received += 1
    except (OSError, ValueError):
        pass  # the connection ends with the gateway
    wait_answering(server)
    if "gateway" in stages:
        list(events(server, f"/v1/requests/{request_id}", None, {"Last-Event-ID": last, **key_of("globex")}))
    for stage, pid in old.items():
        assert server.pid_of(stage) != pid
    lines = wait_lines(server, lambda lines: any(map(is_slow(request_id), lines)))
    line = next(filter(is_slow(request_id), lines))
    assert line["completion_tokens"] == body["max_tokens"]
    is_recovered = bool(line["recovery_ms"]) if stages != ("kv",) else line["restarts"] > 0
    return (request_id, session_id, began) if is_recovered else None


def is_slow(request_id: str) -> Callable[[Line], bool]:
    return lambda line: (line["event"], line.get("request_id")) == ("slow request", request_id)
