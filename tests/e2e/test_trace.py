"""`starling trace`, the slow-request log and `starling log-level`, on real processes that are killed meanwhile."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from pipeline.ipc import control
from tests.e2e.command import starling
from tests.e2e.conftest import share_caches
from tests.e2e.resumable import events, wait_answering
from tests.e2e.server import POLL_S, Server, wait_gone
from tests.e2e.up_server import Up
from tests.log_events import all_events
from tools.tiny_gguf import SHAPES, write_model

pytestmark = pytest.mark.slow

LONG: dict[str, Any] = {
    "prompt": list(range(3, 60)),
    "max_tokens": 1500,
    "n": 6,
    "ignore_eos": True,
    "seed": 3,
    "stream": True,
}
ATTEMPTS = 8  # to kill a stage before the end of a stream
ROUNDING_MS = 0.01


try:
    HAS_OTEL = importlib.util.find_spec("opentelemetry.exporter.otlp.proto.http") is not None
except ModuleNotFoundError:  # a package above it is missing
    HAS_OTEL = False
needs_otel = pytest.mark.skipif(not HAS_OTEL, reason="the extra otel is not installed")


@pytest.fixture(scope="module")
def collector() -> Iterator[Any]:
    if not HAS_OTEL:
        yield None
        return
    from tests.otlp_collector import Collector

    with Collector() as one:
        yield one


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, collector: Any) -> Iterator[Up]:
    home = tmp_path_factory.mktemp("trace")
    share_caches(home)
    model = {"name": "tiny", "path": str(write_model(home / "tiny.gguf", SHAPES["small"])), "kv_cache_mb": 16}
    config = {
        "models": [model],
        "scheduler": {"max_step_tokens": 64},
        "tracing": {"slow_request_ms": 1, "otlp": {"endpoint": collector.url if collector else ""}},
        "logging": {"format": "json"},
    }
    with Up(home, config) as server:
        yield server
        assert server.stop() == 0
        assert server.leftovers() == []


def trace(server: Server, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(starling(server, "trace", name, "--json"))
    assert sum(found["phases_ms"].values()) == pytest.approx(found["duration_ms"], abs=ROUNDING_MS)
    times = [event["at_ms"] for event in found["events"]]
    assert times == sorted(times)
    return found


def named(found: dict[str, Any], name: str) -> list[dict[str, Any]]:
    return [event for event in found["events"] if event["event"] == name]


def test_a_timeline_names_every_step_and_its_process(server: Up) -> None:
    prompt = [5 + i % 200 for i in range(300)]
    status, answer, headers = server.request(
        "POST", "/v1/completions", {"model": "tiny", "prompt": prompt, "max_tokens": 9, "seed": 1, "ignore_eos": True}
    )
    assert status == 200
    found = trace(server, headers["X-Starling-Request"])
    steps = [event["event"] for event in found["events"]]
    chunks = named(found, "prefill")
    order = [
        *("received", "parsed", "tokenized", "journaled", "submitted", "queued", "admitted"),
        *["prefill"] * len(chunks),
        *("first token", "decoded", "finished", "written"),
    ]
    # A wait for the model is in it if it took a millisecond, which a gateway without a core takes for nothing.
    assert [step for step in steps if step not in ("detokenized", "model ready")] == order
    # The chunks are the prompt, in order, in the worker; the last one samples the first token.
    assert len(chunks) >= 300 // 64
    assert [chunk["begin"] for chunk in chunks] == [0, *(chunk["end"] for chunk in chunks[:-1])]
    assert chunks[-1]["end"] == 300
    assert [chunk["samples"] for chunk in chunks] == [0] * (len(chunks) - 1) + [1]
    pids = {stage: server.pid_of(stage) for stage in ("gateway", "tokenizer", "scheduler")}
    pids["worker"] = server.pid_of("worker-tiny")
    assert {event["stage"]: event["pid"] for event in found["events"]} == pids
    assert named(found, "decoded")[0]["tokens"] == found["completion_tokens"] == 9
    assert found["prompt_tokens"] == 300
    assert found["outcome"] == "finished"
    assert found["phases_ms"]["recovery"] == 0
    assert min(found["phases_ms"][phase] for phase in ("admission", "prefill", "decode", "write")) > 0
    # The same request is found by the id of its object; the text has a line for each event.
    assert trace(server, answer["id"])["id"] == found["id"]
    text = starling(server, "trace", found["id"]).splitlines()
    assert sum(" prefill" in line and "end=" in line for line in text) == len(chunks)
    starling(server, "trace", "req-unknown", code=2)


def test_a_refused_request_says_how_it_ended(server: Up) -> None:
    headers = {"X-Request-Id": "cancelled-by-client"}
    body = {**LONG, "model": "tiny"}
    for _ in range(ATTEMPTS):
        stream = events(server, "/v1/completions", body, headers)
        request_id = next(stream)[0].partition(":")[0]
        shown = control.call(server.home / "run", "gateway", {"op": "trace", "request": request_id}, 60)["trace"]
        status = server.request("DELETE", f"/v1/requests/{request_id}")[0]
        list(stream)
        if (shown["outcome"], status) == ("open", 200):
            break
    else:
        pytest.fail(f"no stream was still running {ATTEMPTS} times")
    found = trace(server, "cancelled-by-client")
    assert (found["id"], found["outcome"], found["error"]) == (request_id, "failed", "CONFLICT")


@needs_otel
def test_a_trace_has_a_span_of_every_stage(server: Up, collector: Any) -> None:
    from tests.otlp_collector import attributes

    trace_id = "4bf92f3577b34da6a3ce929d0e0e4736"
    headers = {"traceparent": f"00-{trace_id}-00f067aa0ba902b7-01"}
    body = {"model": "tiny", "prompt": list(range(3, 300)), "max_tokens": 9, "ignore_eos": True}
    status, _, answered = server.request("POST", "/v1/completions", body, headers)
    assert status == 200
    root, *others = collector.trace(trace_id)
    assert root.parent_span_id.hex() == "00f067aa0ba902b7"
    assert answered["traceparent"] == f"00-{trace_id}-{root.span_id.hex()}-01"
    by_id = {span.span_id: span for span in (root, *others)}
    inside = {"wait for model": "admission", "tokenize": "admission", "prefill step": "prefill"}
    for span in others:  # each is a child of the one that caused it
        assert by_id[span.parent_span_id].name == inside.get(span.name, root.name)
    pids: dict[str, set[int]] = {}
    for span in others:
        facts = attributes(span)
        pids.setdefault(facts["starling.stage"], set()).update([facts["process.pid"]] if "process.pid" in facts else [])
        assert root.start_time_unix_nano <= span.start_time_unix_nano <= span.end_time_unix_nano
        assert span.end_time_unix_nano <= root.end_time_unix_nano
    assert pids.pop("kv") == set()
    stages = {"gateway": "gateway", "tokenizer": "tokenizer", "scheduler": "scheduler", "worker": "worker-tiny"}
    assert pids == {stage: {server.pid_of(name)} for stage, name in stages.items()}
    names = [span.name for span in others]
    assert names.count("prefill step") >= 297 // 64
    assert {
        name: names.count(name) for name in ("admission", "tokenize", "queue", "kv pages", "prefill", "decode")
    } == (dict.fromkeys(("admission", "tokenize", "queue", "kv pages", "prefill", "decode"), 1))


@pytest.mark.parametrize("stage", ["scheduler", "worker-tiny", "gateway"])
def test_the_death_of_a_stage_is_in_the_timeline(server: Up, collector: Any, stage: str) -> None:
    """Times still add up, and the time until the stage is back is not that of the model."""
    for _ in range(ATTEMPTS):
        found, pids = killed_meanwhile(server, stage)
        if found is not None:
            break
    else:
        pytest.fail(f"no stream was still running {ATTEMPTS} times")
    assert found["outcome"] == "finished"
    assert found["completion_tokens"] == LONG["max_tokens"] * LONG["n"]
    assert found["phases_ms"]["recovery"] > 0
    if HAS_OTEL:
        root, *others = collector.trace(found["trace_id"])
        assert root.status.code == 0
        assert all(root.start_time_unix_nano <= span.start_time_unix_nano <= span.end_time_unix_nano for span in others)
        assert sum(span.name == "recovery" for span in others) >= 1
        lost = [span.status.message for span in others if span.status.message]
        assert set(lost) == (set() if stage == "gateway" else {f"{stage.partition('-')[0]} lost"})
        assert sum(span.name == "decode" and not span.status.message for span in others) == LONG["n"]
    if stage == "gateway":
        assert [event["event"] for event in found["events"]][:2] == ["received", "recovered"]
        assert {event["pid"] for event in found["events"] if event["stage"] == "gateway"} == {None, pids[1]}
        return
    name = stage.partition("-")[0]
    assert [event["pid"] for event in named(found, "lost") if event["stage"] == name] == [pids[0]]
    started = [event for event in named(found, "started") if event["stage"] == name]
    assert [event["pid"] for event in started][-1] == pids[1]
    if stage == "scheduler":
        assert len(named(found, "resubmitted")) == LONG["n"]
        after = [event for event in named(found, "prefill") if event["at_ms"] >= started[0]["at_ms"]]
        assert {event["choice"] for event in after} == set(range(LONG["n"]))


def killed_meanwhile(server: Up, stage: str) -> tuple[dict[str, Any] | None, tuple[int, int]]:
    """Kill a stage during a stream. Returns the timeline (None: the stream had ended), and both pids."""
    pid = server.pid_of(stage)
    stream = events(server, "/v1/completions", {**LONG, "model": "tiny"}, {})
    last = next(stream)[0]
    request_id = last.partition(":")[0]
    try:
        os.kill(pid, signal.SIGKILL)
        assert wait_gone(pid)
        for last, _ in stream:  # noqa: B007 -- read after the connection has ended
            pass
    except (OSError, ValueError):
        pass  # the connection ends with the gateway
    wait_answering(server)
    if stage == "gateway":
        list(events(server, f"/v1/requests/{request_id}", None, {"Last-Event-ID": last}))
    found = trace(server, request_id)
    is_seen = bool(named(found, "recovered") or named(found, "lost"))
    return (found if is_seen else None), (pid, server.pid_of(stage))


def slow_line(server: Up, name: str) -> dict[str, Any]:
    """The line of a slow request in the gateway's log, which a thread writes after the answer."""
    deadline = time.monotonic() + 60
    while True:
        for text in starling(server, "logs", "gateway", "-n", "10000", "--json").splitlines():
            line: dict[str, Any] = json.loads(text)
            if line["event"] == "slow request" and line["client_request_id"] == name:
                return line
        assert time.monotonic() < deadline, f"no line of {name}"


def test_slow_requests_are_logged_with_where_the_time_went(server: Up) -> None:
    headers = {"X-Request-Id": "slow-one"}
    body = {"model": "tiny", "prompt": "a b c", "max_tokens": 40, "ignore_eos": True}
    assert server.request("POST", "/v1/completions", body, headers)[0] == 200
    found = trace(server, "slow-one")
    line = slow_line(server, "slow-one")
    assert (line["model"], line["finish"], line["completion_tokens"]) == ("tiny", "finished", 40)
    assert {name: line[f"{name}_ms"] for name in found["phases_ms"]} == found["phases_ms"]
    assert line["duration_ms"] == found["duration_ms"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"model": "tiny", "input": ["one two", "three", "four five six"]}),
        ("/v1/rerank", {"model": "tiny", "query": "one", "documents": ["two", "three four"]}),
    ],
)
def test_requests_for_vectors_have_a_timeline(server: Up, path: str, body: dict[str, Any]) -> None:
    name = f"vectors-{path.rpartition('/')[2]}"
    status, answer, _ = server.request("POST", path, body, {"X-Request-Id": name})
    assert status == 200, answer
    found = trace(server, name)
    assert (found["outcome"], found["model"], found["request_id"]) == ("finished", "tiny", name)
    assert found["prompt_tokens"] > 3
    events = [event["event"] for event in found["events"]]
    assert [event for event in events if event in ("received", "parsed", "submitted", "finished", "written")] == [
        "received",
        "parsed",
        "submitted",
        "finished",
        "written",
    ]
    assert events.count("queued") == events.count("admitted") == 3
    assert {event["stage"] for event in found["events"]} >= {"gateway", "scheduler"}
    assert sum(found["phases_ms"].values()) == pytest.approx(found["duration_ms"], abs=0.1)
    assert slow_line(server, name)


def test_log_levels_change_while_the_server_runs(server: Up) -> None:
    """Every stage follows, the restart of a stage included."""

    def levels(*words: str) -> dict[str, str]:
        found: dict[str, str] = json.loads(starling(server, "log-level", *words, "--json"))
        return found

    stages = {"gateway", "kv", "scheduler", "tokenizer", "worker-tiny"}
    assert levels() == dict.fromkeys(stages, "info")
    assert levels("kv", "debug") == {"kv": "debug"}
    server.wait_for('"kv-supervisor".*"log level changed".*"debug"')
    pid = server.pid_of("kv")
    os.kill(pid, signal.SIGKILL)
    assert wait_gone(pid)
    assert server.pid_of("kv") != pid
    assert levels() == {**dict.fromkeys(stages, "info"), "kv": "debug"}
    assert levels("debug") == dict.fromkeys(stages, "debug")
    server.wait_for('"worker-pool".*"log level changed".*"debug"')
    assert server.request("GET", "/v1/models", headers={"X-Request-Id": "routine"})[0] == 200
    server.wait_for('"client_request_id": ?"routine"')  # a line of level debug
    assert levels("worker", "error") == {"worker-tiny": "error"}
    assert levels("worker", "WARN") == {"worker-tiny": "warning"}
    assert levels("Warn") == dict.fromkeys(stages, "warning")
    assert levels("RESET") == dict.fromkeys(stages, "info")
    starling(server, "log-level", "kvv", "debug", code=2)
    starling(server, "log-level", "kv", "loud", code=2)


def test_every_line_of_the_log_is_an_object_that_names_its_request(server: Up) -> None:
    """Of all processes, those that were killed before included: fixed keys, constant events, one id in all stages."""
    starling(server, "log-level", "debug")
    body = {"model": "tiny", "prompt": "a b c", "max_tokens": 3, "ignore_eos": True, "session_id": ""}
    status, answer, headers = server.request("POST", "/v1/generate", body)
    assert status == 200, answer
    served = headers["X-Starling-Request"]
    assert server.request("POST", "/v1/generate", {**body, "session_id": answer["session_id"], "top_p": 7})[0] == 400
    status, _, headers = server.request("POST", "/v1/completions", {"model": "tiny", "prompt": "x", "max_tokens": -1})
    assert status == 400
    refused = headers["X-Request-Id"]
    status, _, headers = server.request("POST", "/v1/completions", {"model": "no-model", "prompt": "x"})
    assert status == 404
    unknown = headers["X-Request-Id"]
    deadline = time.monotonic() + 120
    wanted = {"gateway", "tokenizer", "scheduler", "kv"}
    while True:  # lines are written by threads
        lines = logged(server.home)
        seen = {line["stage"] for line in lines if line.get("request_id") == served}
        requests = {line["request_id"]: line for line in lines if line["event"] == "request"}
        steps = [line for line in lines if (line["stage"], line["event"]) == ("worker", "steps are computed")]
        if seen >= wanted and {served, refused, unknown} <= requests.keys() and steps:
            break
        assert time.monotonic() < deadline, (seen, sorted(requests))
        time.sleep(POLL_S)
    assert {line["event"] for line in lines} <= all_events()
    keys = {"request_id", "client_request_id", "session_id", "model", "tenant", "duration_ms", "status", "endpoint"}
    assert all(keys <= line.keys() and line["request_id"] for line in requests.values())
    texts = [line for line in requests.values() if line["endpoint"] in ("/v1/completions", "/v1/generate")]
    assert all(line["model"] and line["tenant"] for line in texts)
    sessions = [line["session_id"] for line in texts if line["endpoint"] == "/v1/generate"]
    assert sessions[-2:] == [answer["session_id"]] * 2
    mine = [line for line in lines if line.get("request_id") == served]
    mine += [one for line in lines for one in line.get("requested_by", ()) if one["request_id"] == served]
    tenants = {(line["tenant"], line["session_id"]) for line in mine}
    assert tenants == {(requests[served]["tenant"], answer["session_id"])}
    assert {line["model"] for line in mine if "stage" in line} == {"tiny"}
    assert [requests[name]["model"] for name in (refused, unknown)] == ["tiny", "no-model"]
    assert [requests[name]["error"] for name in (refused, unknown)] == ["INVALID_REQUEST", "MODEL_NOT_FOUND"]
    starling(server, "log-level", "reset")


def logged(home: Path) -> list[dict[str, Any]]:
    """Every whole line of every process; each is one object with what all lines have."""
    lines = []
    for path in sorted((home / "logs").iterdir()):
        for text in path.read_text().split("\n")[:-1]:
            line = json.loads(text)
            assert isinstance(line, dict)
            assert {"ts", "level", "stage", "pid", "event"} <= line.keys(), text
            assert line["stage"] == path.name.partition(".log")[0]
            assert isinstance(line["pid"], int)
            assert line["level"] in ("debug", "info", "warning", "error")
            assert datetime.fromisoformat(line["ts"]).utcoffset() is not None
            lines.append(line)
    return lines
