"""Models that are not loaded: a request loads them, idle ones go, and no death of a process loses a waiting request."""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from pipeline.errors import StarlingError
from pipeline.observe.status import read_all
from pipeline.procfs import children, read_stat
from starling.cli.reload import change
from tests.e2e.command import starling
from tests.e2e.conftest import share_caches
from tests.e2e.resumable import comparable, events, wait_answering
from tests.e2e.server import Server, poll_until, wait_gone
from tools.tiny_gguf import SHAPES, write_model

pytestmark = pytest.mark.slow

REQUEST: dict[str, Any] = {"prompt": [5, 6, 7, 8], "max_tokens": 20, "ignore_eos": True, "seed": 3}
SMALL = SHAPES["small"]._replace(context_length=8192)
TIMEOUT_S = 180.0
NAMES = ("first", "second", "third")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """`first` is loaded at the start and pinned; `second` and `third` are configured. Two fit."""
    home = tmp_path_factory.mktemp("demand")
    share_caches(home)
    models = [
        {
            "name": name,
            "path": str(write_model(home / f"{name}.gguf", SMALL, seed=seed)),
            "kv_cache_mb": 16 if name != "third" else 1,
            "preload": name == "first",
            "pinned": name == "first",
        }
        for seed, name in enumerate(NAMES)
    ]
    config = {"models": models, "on_demand": {"max_models": 2, "keep_alive": -1}, "cache": {"max_size_mb": 16}}
    with Server(home, config) as server:
        yield server
        server.stop()
        assert server.leftovers() == []
        assert server.pids() == {}


def states(server: Server) -> dict[str, str]:
    return {one["id"]: one["state"] for one in server.request("GET", "/v1/models")[1]["data"]}


def tokens(server: Server, model: str, **body: Any) -> list[int]:
    answer = server.post("/v1/generate", **REQUEST, model=model, **body)
    found: list[int] = answer["choices"][0]["tokens"]
    return found


def wait_state(server: Server, model: str, state: str) -> None:
    poll_until(
        lambda: states(server)[model] == state, lambda: (states(server), "".join(server.output[-40:])), TIMEOUT_S
    )


def wait_states(server: Server, expected: dict[str, str]) -> None:
    """A model answers a moment before it is loaded, and another one may be unloaded after that."""
    poll_until(lambda: states(server) == expected, lambda: states(server), TIMEOUT_S)


def parent(pid: int) -> int:
    found = read_stat(pid)
    assert found is not None
    return found.parent


@contextmanager
def held_loads(server: Server) -> Iterator[None]:
    """No worker group is started meanwhile: the process that starts them is stopped."""
    pid = parent(parent(server.pid_of("worker-first")))  # of the supervisor of one worker group
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def mapped_weights(pid: int) -> float:
    """The share of a process's map of a checkpoint that its page table has."""
    maps = re.findall(r"\.bin\nSize: +(\d+) kB(?:\n.*)*?\nRss: +(\d+) kB", Path(f"/proc/{pid}/smaps").read_text())
    return sum(int(resident) for _, resident in maps) / sum(int(size) for size, _ in maps)


def test_the_first_request_finds_the_weights_mapped(server: Server) -> None:
    """At a fresh start: dummy passes have read them in each rank, before the server was ready."""
    pid = server.pid_of("worker-first")
    assert all(mapped_weights(rank) > 0.9 for rank in (pid, *children(pid)))


def test_a_request_loads_a_model_and_the_least_recently_used_one_goes(server: Server) -> None:
    """The pinned one stays. Each model answers with its own weights, before and after."""
    first, second, third = (tokens(server, name) for name in NAMES)
    assert len({tuple(first), tuple(second), tuple(third)}) == 3
    wait_states(server, {"first": "loaded", "second": "unloaded", "third": "loaded"})
    assert [tokens(server, name) for name in reversed(NAMES)] == [third, second, first]
    wait_states(server, {"first": "loaded", "second": "loaded", "third": "unloaded"})
    shown = {one["name"]: one for one in json.loads(starling(server, "models", "--json"))}
    assert [shown[name]["state"] for name in NAMES] == ["loaded", "loaded", "ready"]
    assert shown["first"]["last_used"] >= shown["second"]["last_used"] > 0


def test_every_endpoint_loads_its_model(server: Server) -> None:
    """One after the other: with `keep_alive` 0 the model goes when the request has ended."""
    text = {"model": "third", "keep_alive": 0}
    for path, body in (
        ("/v1/completions", {**text, "prompt": [5, 6], "max_tokens": 2}),
        ("/v1/embeddings", {**text, "input": [5, 6]}),
        ("/v1/tokenize", {"model": "third", "text": "ab"}),
    ):
        assert server.post(path, **body), path
        wait_state(server, "third", "unloaded" if "keep_alive" in body else "loaded")


def test_a_request_without_max_tokens_ends_where_its_arena_does(server: Server) -> None:
    """Also one that is admitted before its model is loaded. The context is longer."""
    body = {**REQUEST, "model": "third", "stop_token_ids": []}
    del body["max_tokens"]
    answer = server.post("/v1/generate", **body)
    used = answer["usage"]["total_tokens"]
    assert answer["choices"][0]["finish_reason"] == "length"
    assert used < SMALL.context_length
    status, refused, _ = server.request("POST", "/v1/generate", {**body, "max_tokens": used - 3})
    assert (status, refused["error"]["param"]) == (507, "max_tokens")


def test_a_session_outlives_its_model(server: Server) -> None:
    """It goes on where it was, with the answer that it has without an unload in between."""
    answers = []
    for keep_alive in (-1, 0):
        turn = server.post("/v1/generate", **REQUEST, model="third", session_id="", keep_alive=keep_alive)
        wait_state(server, "third", "unloaded" if keep_alive == 0 else "loaded")
        body = {**REQUEST, "model": "third", "session_id": turn["session_id"], "keep_alive": keep_alive}
        answers.append(server.post("/v1/generate", **body))
    first, second = answers
    assert first["choices"] == second["choices"]
    assert first["usage"]["prompt_tokens"] == second["usage"]["prompt_tokens"] > 2 * len(REQUEST["prompt"])
    wait_state(server, "third", "unloaded")


def test_a_pulled_model_is_loaded_by_its_name(server: Server) -> None:
    expected = tokens(server, "second")
    starling(server, "pull", str(server.home / "second.gguf"), "--name", "mine/pulled")
    assert tokens(server, "mine/pulled", keep_alive=0) == expected
    status, body, _ = server.request("POST", "/v1/generate", {**REQUEST, "model": "mine/other"})
    assert (status, body["error"]["code"]) == (404, "MODEL_NOT_FOUND")
    wait_state(server, "mine/pulled", "unloaded")
    starling(server, "rm", "mine/pulled")
    assert "mine/pulled" not in states(server)


def test_a_reload_of_a_pulled_model_takes_the_file_that_was_pulled_last(server: Server) -> None:
    second, third = tokens(server, "second"), tokens(server, "third", keep_alive=0)
    assert second != third
    starling(server, "pull", str(server.home / "second.gguf"), "--name", "mine/pulled")
    assert tokens(server, "mine/pulled") == second
    starling(server, "pull", str(server.home / "third.gguf"), "--name", "mine/pulled")
    assert tokens(server, "mine/pulled") == second
    starling(server, "unload", "second")  # two fit
    starling(server, "reload", "mine/pulled", "--wait")
    assert tokens(server, "mine/pulled", keep_alive=0) == third
    wait_state(server, "mine/pulled", "unloaded")
    starling(server, "load", "second")


def test_a_pulled_file_that_was_changed_is_refused_until_it_is_pulled_again(server: Server) -> None:
    """After the test before, which has pulled it."""
    wait_state(server, "mine/pulled", "unloaded")
    path = next(
        Path(one["path"]) for one in json.loads(starling(server, "models", "--json")) if one["name"] == "mine/pulled"
    )
    path.chmod(0o600)
    path.write_bytes((server.home / "second.gguf").read_bytes())
    for _ in range(2):
        status, body, headers = server.request("POST", "/v1/generate", {**REQUEST, "model": "mine/pulled"})
        assert (status, body["error"]["code"]) == (500, "MODEL_DAMAGED")
        assert "Retry-After" not in headers
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        assert f"its stored file has SHA-256 {digest}, expected {path.stem}" in body["error"]["message"]
        assert str(server.home) not in body["error"]["message"]
    starling(server, "pull", str(server.home / "third.gguf"), "--name", "mine/pulled")
    starling(server, "load", "mine/pulled")  # at once; requests get the error for some seconds more
    assert tokens(server, "mine/pulled") == tokens(server, "third")
    starling(server, "unload", "mine/pulled")
    starling(server, "rm", "mine/pulled")


def test_what_an_operator_has_unloaded_is_not_loaded_by_a_request(server: Server) -> None:
    run_dir = server.home / "run"
    assert tokens(server, "second")
    wait_state(server, "second", "loaded")
    change(run_dir, "unload", "second", TIMEOUT_S)
    status, body, _ = server.request("POST", "/v1/generate", {**REQUEST, "model": "second"})
    assert (status, body["error"]["code"]) == (404, "MODEL_NOT_FOUND")
    assert "second" not in states(server)
    with pytest.raises(StarlingError, match="not loaded"):
        change(run_dir, "unload", "second", TIMEOUT_S)
    assert tokens(server, "third", keep_alive=0)
    wait_state(server, "third", "unloaded")
    change(run_dir, "unload", "third", TIMEOUT_S)  # it is not loaded, and requests do not load it from now on
    assert server.request("POST", "/v1/generate", {**REQUEST, "model": "third"})[0] == 404
    for name in ("second", "third"):
        change(run_dir, "load", name, TIMEOUT_S)
        assert tokens(server, name, keep_alive=0)
        wait_state(server, name, "unloaded")


@pytest.mark.parametrize("victim", ["gateway", "scheduler", "tokenizer", "kv", "worker"])
def test_a_waiting_request_survives_the_death_of(victim: str, server: Server) -> None:
    """SIGKILL while the model is being loaded, and the client's stream has only comments."""
    # A worker is killed as soon as the test finds it: its answer is long, so that it is not unloaded before.
    n_tokens = 2000 if victim == "worker" else REQUEST["max_tokens"]
    body = {**REQUEST, "model": "second", "stream": True, "keep_alive": 0, "max_tokens": n_tokens}
    undisturbed = comparable([data for _, data in events(server, "/v1/generate", body, {})])
    wait_state(server, "second", "unloaded")
    name = f"req-{os.urandom(12).hex()}"
    ending = workers_of_second(server)  # of the load before, perhaps
    connection = server.connect()
    headers = {"Content-Type": "application/json", "X-Starling-Request": name}
    with held_loads(server):
        connection.request("POST", "/v1/generate", json.dumps(body), headers)
        response = connection.getresponse()
        assert (response.status, response.getheader("X-Starling-Request")) == (200, name)
        assert response.readline().startswith(b": loading second: ")
        poll_until(lambda: server.request("HEAD", f"/v1/requests/{name}")[0] == 200)  # it is in the journal then
        if victim != "worker":
            pid = server.pid_of(victim)
            os.kill(pid, signal.SIGKILL)
            assert wait_gone(pid)
    if victim == "worker":
        poll_until(lambda: workers_of_second(server) - ending, timeout_s=TIMEOUT_S)
        (pid,) = workers_of_second(server) - ending
        os.kill(pid, signal.SIGKILL)
    if victim == "gateway":
        connection.close()
        wait_answering(server)
        found = [data for _, data in events(server, f"/v1/requests/{name}", None, {})]
    else:
        lines = [line.decode().rstrip("\n") for line in response]
        found = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        connection.close()
    assert comparable(found) == undisturbed
    wait_state(server, "second", "unloaded")


def workers_of_second(server: Server) -> set[int]:
    """The processes of its workers."""
    records = read_all(server.home / "run")
    return {record.pid for record in records if record.stage.startswith("worker-second") and record.alive}


def test_a_load_that_fails_is_refused(server: Server) -> None:
    """The client learns that the model cannot be loaded, and no path on the server."""
    path = server.home / "third.gguf"
    content = path.read_bytes()
    wait_state(server, "third", "unloaded")
    path.write_bytes(content[:5000])
    try:
        status, body, headers = server.request("POST", "/v1/generate", {**REQUEST, "model": "third"})
        assert status == 503, body
        assert int(headers["Retry-After"]) >= 1
        assert str(server.home) not in body["error"]["message"]
    finally:
        path.write_bytes(content)
