"""The operator's commands on a running server: status, logs, restart, drain, resume, down."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from pipeline.ipc import control
from starling.cli.kv_clear import cleared
from tests.e2e.command import starling
from tests.e2e.conftest import share_caches
from tests.e2e.resumable import events
from tests.e2e.server import ROOT, Server, poll_until, wait_gone
from tests.e2e.traffic import REQUEST, Traffic, tokens_of
from tests.e2e.up_server import Up
from tools.tiny_gguf import SHAPES, write_model

pytestmark = pytest.mark.slow

STAGES = ["tokenizer", "scheduler", "kv", "gateway", "worker-tiny"]
ENDLESS: dict[str, Any] = {**REQUEST, "max_tokens": 2000, "n": 8, "seed": 1}


def make_config(home: Path) -> dict[str, Any]:
    """The configuration of one tiny model, and so much time for requests that none is refused for want of it."""
    share_caches(home)
    path = write_model(home / "tiny.gguf", SHAPES["small"])
    models = [{"name": "tiny", "path": str(path), "kv_cache_mb": 16}]
    return {"models": models, "server": {"request_timeout_ms": 3_600_000}}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    home = tmp_path_factory.mktemp("ops")
    with Up(home, make_config(home)) as server:
        yield server
        assert server.stop() == 0
        assert server.leftovers() == []


def shows_ready(server: Server) -> bool:
    try:
        return "not ready" not in starling(server, "status")
    except AssertionError:  # its exit code is 1
        return False


def shows_drain(server: Server) -> bool:
    try:
        return "refuses requests for all" in starling(server, "status", code=1)
    except AssertionError:  # its exit code is 0: the gateway, which has a second for it, has not told
        return False


def status(server: Server) -> dict[str, dict[str, Any]]:
    """Of all stages, when each has recorded that it is ready: others know it a moment before."""
    poll_until(lambda: shows_ready(server))
    return {row["stage"]: row for row in json.loads(starling(server, "status", "--json"))}


def test_status_shows_every_stage(server: Up) -> None:
    rows = status(server)
    assert sorted(rows) == sorted(STAGES)
    for row in rows.values():
        assert row["state"] == "ready"
        assert row["memory_bytes"] > 1 << 20
        assert row["pid"] in server.pids()
    lines = starling(server, "status").splitlines()
    assert len(lines) == 1 + len(STAGES)
    assert max(map(len, lines)) <= 80


def test_logs_merges_the_stages_in_order_of_time(server: Up) -> None:
    lines = [json.loads(line) for line in starling(server, "logs", "-n", "0", "--json").splitlines()]
    assert lines == []

    def merged() -> list[dict[str, Any]]:
        return [json.loads(line) for line in starling(server, "logs", "-n", "1000", "--json").splitlines()]

    # Threads write the files: a stage may be ready before its lines are there.
    poll_until(lambda: {"gateway", "worker"} <= {line["stage"] for line in merged()})
    times = [line["ts"] for line in merged()]
    assert times == sorted(times)
    poll_until(lambda: " INFO    gateway  listening" in starling(server, "logs", "gateway"))


def test_logs_follow(server: Up) -> None:
    follower = subprocess.Popen(
        [sys.executable, "-m", "starling", "logs", "gateway", "-f", "-n", "1"],
        cwd=ROOT,
        env=server.environment,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert follower.stdout is not None
        assert follower.stdout.readline()
        server.post("/v1/generate", prompt=[1, 2], max_tokens=1)
        assert any("endpoint=/v1/generate" in line for line in follower.stdout)
    finally:
        follower.kill()
        follower.communicate()


def test_every_stage_restarts_without_a_failed_request(server: Up) -> None:
    before = status(server)
    with Traffic(server) as traffic:
        said = starling(server, "restart", "all")
    assert traffic.faults == []
    assert traffic.streams > 0
    after = status(server)
    for name in STAGES:
        if name == "gateway":
            assert after[name]["pid"] == before[name]["pid"]
        else:
            assert f"{name}: ready again" in said
            assert after[name]["pid"] != before[name]["pid"]
            assert after[name]["restarts"] == before[name]["restarts"] + 1
    assert "gateway: not restarted" in said


def test_the_gateway_hands_over_without_a_failed_request(server: Up) -> None:
    before = status(server)["gateway"]["pid"]
    with Traffic(server) as traffic:
        # This stream is in flight when the gateway begins to hand over, and must finish.
        stream = server.stream("/v1/generate", **REQUEST, seed=5)
        begun = [next(stream)]
        rest: list[dict[str, Any]] = []
        reader = threading.Thread(target=lambda: rest.extend(stream))
        reader.start()
        assert "gateway: ready again" in starling(server, "restart", "gateway")
        reader.join()
    assert len(tokens_of(begun + rest)) == REQUEST["max_tokens"]
    # New connections have waited for the successor in the listening socket, which the supervisor holds.
    assert traffic.faults == []
    assert status(server)["gateway"]["pid"] != before


def test_requests_without_a_client_outlive_a_restart_of_the_gateway(server: Up) -> None:
    """A response in the background, and a request with a key whose client has left: with the bytes that they had."""
    endless = {"seed": 4, "temperature": 0.9, "min_tokens": 2000}
    said = {"model": "tiny", "input": "hello", "max_output_tokens": 2000, **endless}
    text = {"prompt": [1, 2, 3], "max_tokens": 2000, **endless}
    expected = server.post("/v1/responses", **said)["output"][0]["content"]
    undisturbed = tokens_of(list(server.stream("/v1/generate", **text)))
    key = {"Content-Type": "application/json", "Idempotency-Key": "left"}
    n_lines = len(server.output)
    name = server.post("/v1/responses", **said, background=True)["id"]
    connection = server.connect()
    connection.request("POST", "/v1/generate", json.dumps({**text, "stream": True}), key)
    assert connection.getresponse().status == 200
    connection.close()
    said_of_it = starling(server, "restart", "gateway", "--drain-timeout", "120")
    assert "gateway: ready again" in said_of_it
    assert "not finished" not in said_of_it
    server.wait_output("recovering requests that were in flight", "requests=2", since=n_lines)
    answer = list(events(server, "/v1/generate", {**text, "stream": True}, key))
    assert tokens_of([data for _, data in answer]) == undisturbed
    (request_id,) = {where.partition(":")[0] for where, _ in answer if where}
    assert request_id
    response = server.request("GET", "/v1/requests/" + name.replace("resp_", "req-"))[1]  # waits for its end
    stored = server.request("GET", f"/v1/responses/{name}")[1]
    assert (stored["status"], stored) == ("incomplete", response)
    assert [part["text"] for part in stored["output"][0]["content"]] == [part["text"] for part in expected]


def test_a_drain_refuses_new_requests_and_lets_others_finish(server: Up) -> None:
    stream = server.stream("/v1/generate", **{**REQUEST, "max_tokens": 1500}, seed=3)
    begun = [next(stream)]
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "starling", "drain", "--timeout", "600"],
            cwd=ROOT,
            env=server.environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert len(tokens_of(begun + list(stream))) == 1500
        said, _ = process.communicate()
        assert process.returncode == 0, said
        code, body, headers = server.request("POST", "/v1/generate", {"prompt": [1], "max_tokens": 1})
        assert (code, body["error"]["code"]) == (503, "DRAINING")
        assert int(headers["Retry-After"]) > 0
        code, body, _ = server.request("GET", "/ready")
        assert (code, body["reason"]) == (503, "the server is drained")
        poll_until(lambda: shows_drain(server))
        # A restart of the gateway does not end the drain.
        starling(server, "restart", "gateway")
        assert server.request("GET", "/ready")[0] == 503
    finally:
        starling(server, "resume")
    poll_until(lambda: server.request("GET", "/ready")[0] == 200)  # the new gateway needs heartbeats of all stages
    assert server.post("/v1/generate", prompt=[1], max_tokens=1)["choices"]


def test_a_drain_ends_late_requests_with_an_error(server: Up) -> None:
    # One stream of a tiny model may end before the command has started; these need ten times as long. Two of them fill
    # a batch: some have begun when they are ended, most have not.
    begun = threading.Event()

    def last_event(seed: int) -> tuple[int, dict[str, Any]]:
        connection = server.connect()
        try:
            body = json.dumps({**ENDLESS, "seed": seed, "stream": True}).encode()
            connection.request("POST", "/v1/generate", body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            if response.status == 200:
                begun.set()  # the headers are sent when the request leaves the queue
            text = response.read().decode()
        finally:
            connection.close()
        if response.status == 200:
            text = text.split("data: ")[-1 - text.count("[DONE]")]
        return response.status, json.loads(text)

    with ThreadPoolExecutor(10) as pool:
        answers = [pool.submit(last_event, seed) for seed in range(10)]
        assert begun.wait(120)

        def have_all_come(found: dict[str, float]) -> bool:
            return sum(found.values()) + sum(answer.done() for answer in answers) >= len(answers)

        server.wait_metrics("starling_requests_in_flight", have_all_come)
        try:
            output = starling(server, "drain", "tiny", "--timeout", "0.2", code=1)
            cut = [(status, event["error"]) for status, event in (a.result() for a in answers) if "error" in event]
        finally:
            starling(server, "resume", "tiny")
    assert f"{len(cut)} requests not finished within 0.2 s" in output
    assert {error["code"] for _, error in cut} == {"DRAINING"}
    assert all("model tiny was drained" in error["message"] for _, error in cut)
    assert {status for status, _ in cut} == {200, 503}
    assert server.post("/v1/generate", prompt=[1], max_tokens=1)["choices"]


def by_choice(events: list[dict[str, Any]]) -> dict[int, list[int]]:
    """The tokens of each choice."""
    found: dict[int, list[int]] = {}
    for event in events:
        assert "error" not in event, event
        if "tokens" in event:
            found.setdefault(event["index"], []).extend(event["tokens"])
    return found


def test_clearing_the_cache_changes_no_byte(server: Up) -> None:
    """Neither of streams that run meanwhile, nor of those that find nothing cached afterwards."""
    prompt = list(range(3, 170))
    request = {**ENDLESS, "prompt": prompt, "max_tokens": 1500}
    undisturbed = by_choice(list(server.stream("/v1/generate", **request)))
    for _ in range(8):
        stream = server.stream("/v1/generate", **request)
        begun = [next(stream)]
        (report,) = cleared(server.home / "run", {"op": "clear"}, 60)["models"]
        assert by_choice(begun + list(stream)) == undisturbed
        if report["in_use"]:  # the stream was still running
            break
    else:
        pytest.fail("no stream was still running")

    def cached() -> int:
        usage = server.post("/v1/completions", model="tiny", prompt=prompt, max_tokens=1)["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    def n_leased() -> int:
        (model,) = control.call(server.home / "run", "kv", {"op": "audit"})["models"]
        return int(model["page_table"][2])

    cached()
    assert cached() > 0
    poll_until(lambda: n_leased() == 0)  # the pages of a sequence are released after its last token is sent
    assert "tiny: dropped" in starling(server, "kv", "clear", "--model", "tiny")
    assert cached() == 0
    assert by_choice(list(server.stream("/v1/generate", **request))) == undisturbed
    starling(server, "kv", "clear", "--model", "unknown", code=2)
    starling(server, "kv", "clear", "--tenant", "default", code=1)  # without keys all share their pages
    starling(server, "kv", "check")


def test_unknown_targets_are_refused(server: Up) -> None:
    starling(server, "drain", "unknown", code=2)
    starling(server, "restart", "unknown", code=2)


@pytest.mark.parametrize("kind", [Server, Up])
def test_down_stops_the_server_and_leaves_no_files(tmp_path: Path, kind: type[Server]) -> None:
    server = kind(tmp_path, make_config(tmp_path))
    try:
        server.start().wait_ready()
        pids = server.pids()
        assert "ended" in starling(server, "down")
        assert all(wait_gone(pid) for pid in pids)
        assert server.leftovers() == []
        assert "nothing is running" in starling(server, "down")
        assert "no stage is running" in starling(server, "status", code=1)
    finally:
        server.stop(9)
    assert os.path.exists(tmp_path / "logs" / "gateway.log")
