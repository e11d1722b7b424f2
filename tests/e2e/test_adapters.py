"""LoRA adapters behind a server: exact, batched together, cached apart, and the same after any process's death."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.e2e.command import starling
from tests.e2e.conftest import share_caches
from tests.e2e.resumable import comparable, events, wait_answering
from tests.e2e.server import Server, poll_until, wait_gone
from tools.reference.exact_forward import ExactModel, ExactSequence
from tools.tiny_adapter import write_adapter, write_peft
from tools.tiny_gguf import SHAPES, write_model

pytestmark = pytest.mark.slow

CORES = sorted(os.sched_getaffinity(0))
PROMPT = np.random.default_rng(1).integers(3, 260, 100).tolist()  # three KV pages and a part of one
NAMES = ("tiny", "tiny:first", "tiny:second")
STREAM: dict[str, Any] = {
    "model": "tiny:first",
    "prompt": PROMPT,
    "max_tokens": 1200,
    "n": 3,
    "seed": 7,
    "temperature": 0.8,
    "ignore_eos": True,
    "stream": True,
}


class Files:
    """A model and adapters of it: `second` is a PEFT directory, and `peft` is `first` in that form."""

    def __init__(self, directory: Path) -> None:
        self.model = write_model(directory / "tiny.gguf", SHAPES["small"], "Q4_0_M", seed=3)
        self.first = write_adapter(directory / "first.gguf", self.model, rank=4, seed=1)
        self.second_gguf = write_adapter(directory / "second.gguf", self.model, rank=9, seed=2, dtype="F16")
        self.second = write_peft(directory / "second", self.model, rank=9, seed=2, dtype="F16")
        self.peft = write_peft(directory / "peft", self.model, rank=4, seed=1)

    def reference(self, name: str) -> Path | None:
        return {"tiny": None, "tiny:first": self.first, "tiny:second": self.second_gguf}[name]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(tmp_path_factory.mktemp("adapters"))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, files: Files) -> Iterator[Server]:
    home = tmp_path_factory.mktemp("home")
    share_caches(home)
    adapters = [{"name": name, "path": str(getattr(files, name))} for name in ("first", "second", "peft")]
    model = {"name": "tiny", "path": str(files.model), "kv_cache_mb": 32, "adapters": adapters}
    with Server(home, {"models": [model]}) as server:
        yield server
        server.stop()
        assert server.leftovers() == []
        assert server.pids() == {}


def greedy(files: Files, adapter: Path | None, n: int) -> list[int]:
    sequence = ExactSequence(ExactModel(files.model, adapter))
    logits, found = sequence.extend(PROMPT, last_only=True), []
    for _ in range(n):
        found.append(int(logits[0].argmax()))
        logits = sequence.extend(found[-1:], last_only=True)
    return found


def generate(server: Server, model: str, **more: Any) -> dict[str, Any]:
    body = {"model": model, "prompt": PROMPT, "max_tokens": 12, "temperature": 0, "ignore_eos": True, **more}
    answer: dict[str, Any] = server.post("/v1/generate", **body)
    return answer


def test_answers_are_those_of_the_unmerged_reference(server: Server, files: Files) -> None:
    expected = {name: greedy(files, files.reference(name), 12) for name in NAMES}
    assert len({tuple(tokens) for tokens in expected.values()}) == len(NAMES), "the adapters change the answers"
    found: dict[tuple[str, int], list[int]] = {}

    def ask(name: str, number: int) -> None:
        found[name, number] = generate(server, name)["choices"][0]["tokens"]

    threads = [threading.Thread(target=ask, args=(name, number)) for number in range(3) for name in NAMES]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {(name, number): expected[name] for name in NAMES for number in range(3)}


def test_cached_pages_belong_to_one_adapter(server: Server) -> None:
    salt = "a prompt that is cached under no other salt"

    def cached(name: str) -> int:
        usage = generate(server, name, cache_salt=salt)["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    assert [cached(name) for name in NAMES] == [0, 0, 0]
    assert [cached(name) for name in NAMES] == [96, 96, 96]
    # The same adapter under another name, from a file of another kind, has the same pages.
    assert cached("tiny:peft") == 96


def test_models_are_listed_with_their_adapters(server: Server) -> None:
    listed: list[dict[str, Any]] = []

    def are_ready() -> bool:  # a stage that is silent for a moment makes them unready
        listed[:] = server.request("GET", "/v1/models")[1]["data"]
        return all(one["ready"] for one in listed)

    poll_until(are_ready, lambda: listed)
    assert [one["id"] for one in listed] == ["tiny", "tiny:first", "tiny:second", "tiny:peft"]
    assert [one.get("parent") for one in listed] == [None, "tiny", "tiny", "tiny"]
    shown = server.request("GET", "/v1/models/tiny:first")[1]
    assert shown["adapter_digest"] == listed[3]["adapter_digest"] != listed[2]["adapter_digest"]
    assert server.request("GET", "/v1/models/tiny:third")[0] == 404


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "the quick fox"}], "max_tokens": 4}),
        ("/v1/completions", {"prompt": "the quick fox", "max_tokens": 4}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "the quick fox"}], "max_tokens": 4}),
        ("/v1/responses", {"input": "the quick fox", "max_output_tokens": 16}),
        ("/v1/generate", {"prompt": "the quick fox", "max_tokens": 4}),
    ],
)
def test_every_endpoint_for_text_takes_an_adapter(server: Server, path: str, body: dict[str, Any]) -> None:
    assert server.post(path, model="tiny:second", **body)["model"] == "tiny:second"
    status, answer, _ = server.request("POST", path, {**body, "model": "tiny:third"})
    assert status == 404
    assert "model 'tiny' has no adapter 'third'; it has: tiny:first, tiny:second, tiny:peft" in str(answer)


def test_embeddings_are_refused_and_tokens_counted(server: Server) -> None:
    status, answer, _ = server.request("POST", "/v1/embeddings", {"model": "tiny:first", "input": "x"})
    assert status == 400
    assert answer["error"]["message"] == "embeddings are computed without adapters: ask for 'tiny'"
    assert server.post("/v1/tokenize", model="tiny:first", text="the fox")["count"] >= 1


def test_a_session_stays_with_its_adapter(server: Server) -> None:
    created = server.post("/v1/generate", model="tiny:first", prompt=PROMPT, max_tokens=3, session_id="")
    session = created["session_id"]
    turn = {"prompt": [5, 6, 7], "max_tokens": 3, "session_id": session}
    assert server.request("POST", "/v1/generate", {**turn, "model": "tiny:first"})[0] == 200
    for other in ("tiny", "tiny:second"):
        status, answer, _ = server.request("POST", "/v1/generate", {**turn, "model": other})
        assert status == 400
        assert "was begun with another adapter" in answer["error"]["message"]
    assert server.request("POST", "/v1/generate", {**turn, "model": "tiny:first"})[0] == 200


def test_a_stream_keeps_its_adapter_when_processes_die(server: Server) -> None:
    undisturbed = comparable([data for _, data in events(server, "/v1/generate", STREAM, {})])
    begun = []
    victims = {20: "worker-tiny", 60: "scheduler", 90: "kv", 120: "gateway"}
    try:
        for event in events(server, "/v1/generate", STREAM, {}):
            begun.append(event)
            if victim := victims.get(len(begun)):
                pid = server.pid_of(victim)
                os.kill(pid, signal.SIGKILL)
                assert wait_gone(pid)
    except (OSError, ValueError):
        pass  # the connection ends with the gateway
    wait_answering(server)
    last = begun[-1][0]
    assert len(begun) >= 120
    rest = list(events(server, f"/v1/requests/{last.partition(':')[0]}", None, {"Last-Event-ID": last}))
    assert comparable([data for _, data in begun + rest]) == undisturbed


def test_a_replaced_file_counts_from_the_next_reload_on(server: Server, files: Files) -> None:
    """Of the tests behind it, none needs the first version of the model."""
    before = generate(server, "tiny:first")
    digest = server.request("GET", "/v1/models/tiny:first")[1]["adapter_digest"]
    write_adapter(files.first, files.model, rank=5, seed=9)
    pid = server.pid_of("worker-tiny")
    os.kill(pid, signal.SIGKILL)
    assert wait_gone(pid)
    server.pid_of("worker-tiny")  # requests wait 10 s for a stage that is restarted
    assert generate(server, "tiny:first")["choices"] == before["choices"]
    starling(server, "reload", "tiny")
    assert server.request("GET", "/v1/models/tiny:first")[1]["adapter_digest"] != digest
    assert generate(server, "tiny:first")["choices"][0]["tokens"] == greedy(files, files.first, 12)


def test_adapters_are_loaded_and_unloaded_while_the_server_runs(server: Server, files: Files, tmp_path: Path) -> None:
    third = write_adapter(tmp_path / "third.gguf", files.model, rank=6, seed=11)
    before = {one["id"]: one for one in server.request("GET", "/v1/models")[1]["data"]}
    kept = generate(server, "tiny:second")["choices"]
    streams: list[list[dict[str, Any]]] = []

    def read() -> None:
        streams.append([data for _, data in events(server, "/v1/generate", STREAM, {})])

    read()
    running = events(server, "/v1/generate", STREAM, {})
    first_event = next(running)
    starling(server, "load", "tiny:third", "--path", str(third))
    assert generate(server, "tiny:third")["choices"][0]["tokens"] == greedy(files, third, 12)
    assert comparable([first_event[1], *(data for _, data in running)]) == comparable(streams[0])
    after = {one["id"]: one for one in server.request("GET", "/v1/models")[1]["data"]}
    assert after.pop("tiny:third")["parent"] == "tiny"
    assert {name: one.get("adapter_digest") for name, one in after.items()} == {
        name: one.get("adapter_digest") for name, one in before.items()
    }
    assert generate(server, "tiny:second")["choices"] == kept
    starling(server, "load", "tiny:third", "--path", str(third), code=1)
    starling(server, "load", "tiny:fourth", "--path", str(tmp_path / "missing"), code=78)
    starling(server, "load", "tiny:fourth", "--path", str(files.model), code=78)
    assert generate(server, "tiny:third")["choices"][0]["tokens"] == greedy(files, third, 12)
    # The file of an adapter counts again when that adapter is loaded again, and no other one's does.
    write_adapter(third, files.model, rank=6, seed=12)
    (files.second / "adapter_config.json").rename(tmp_path / "adapter_config.json")
    starling(server, "reload", "tiny:third")
    (tmp_path / "adapter_config.json").rename(files.second / "adapter_config.json")
    assert generate(server, "tiny:third")["choices"][0]["tokens"] == greedy(files, third, 12)
    assert generate(server, "tiny:second")["choices"] == kept
    starling(server, "unload", "tiny:third")
    assert server.request("POST", "/v1/generate", {"model": "tiny:third", "prompt": "x"})[0] == 404
    starling(server, "unload", "tiny:third", code=2)
    assert generate(server, "tiny:second")["choices"] == kept


def listed(server: Server, *words: str) -> dict[str, dict[str, Any]]:
    return {one["name"]: one for one in json.loads(starling(server, "adapter", "list", *words, "--json"))}


def test_the_commands_for_adapters(server: Server, files: Files, tmp_path: Path) -> None:
    path = write_adapter(tmp_path / "third.gguf", files.model, rank=6, seed=11)
    before = listed(server)
    assert set(before) == {"tiny:first", "tiny:second", "tiny:peft"}
    assert {one["state"] for one in before.values()} == {"loaded"}
    done = json.loads(starling(server, "adapter", "load", "tiny:third", str(path), "--json"))
    assert done["ok"] and done["model"] == "tiny"
    third = listed(server, "tiny")["tiny:third"]
    assert (third["state"], third["rank"], third["path"]) == ("loaded", 6, str(path))
    shown = server.request("GET", "/v1/models/tiny:third")[1]
    assert third["digest"] == shown["adapter_digest"]
    prepared = server.home / "models" / "adapters" / f"{third['digest']}.lora"
    assert 0 < prepared.stat().st_size - third["bytes"] < 65536
    failed = json.loads(starling(server, "adapter", "load", "tiny:third", str(path), "--json", code=1))
    assert failed["error"]["code"] == "CONFLICT"
    write_adapter(path, files.model, rank=7, seed=11)
    starling(server, "adapter", "load", "tiny:third", str(path), "--replace")
    assert listed(server)["tiny:third"]["rank"] == 7
    starling(server, "adapter", "load", "tiny:fourth", str(tmp_path / "missing"), code=78)
    starling(server, "adapter", "list", "none", code=2)
    starling(server, "adapter", "unload", "tiny", code=2)
    starling(server, "adapter", "unload", "tiny:third")
    starling(server, "adapter", "unload", "tiny:third", code=2)
    assert listed(server) == before


def test_adapters_by_the_requests_of_other_servers(server: Server, files: Files, tmp_path: Path) -> None:
    """The last test of this server: with the key that it makes, every request needs one."""
    path = write_peft(tmp_path / "third", files.model, rank=6, seed=11)
    made = starling(server, "keys", "add", "operator", "--scope", "admin", "--scope", "models")
    key = {"Authorization": f"Bearer {made.split()[0]}"}

    def ask(method: str, path: str, body: Any = None) -> tuple[int, Any]:
        return server.request(method, path, body, key)[:2]

    body = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    status, text = ask("POST", "/v1/load_lora_adapter", {"lora_name": "third", "lora_path": str(path)})
    assert (status, text) == (200, "Success: LoRA adapter 'third' added successfully.")
    answers = [ask("POST", "/v1/generate", {**body, "model": name})[1] for name in ("third", "tiny:third")]
    assert [one["model"] for one in answers] == ["tiny:third"] * 2
    gguf = write_adapter(tmp_path / "third.gguf", files.model, rank=6, seed=11)
    assert answers[0]["choices"][0]["tokens"] == answers[1]["choices"][0]["tokens"] == greedy(files, gguf, 12)
    names = ["tiny:first", "tiny:second", "tiny:peft", "tiny:third"]
    found = ask("GET", "/lora-adapters")[1]
    assert [(one["id"], one["model"], one["scale"]) for one in found] == [(n, name, 0) for n, name in enumerate(names)]
    assert found[3]["path"] == str(path)
    assert ask("POST", "/lora-adapters", [{"id": n, "scale": 0} for n in range(4)]) == (200, {"success": True})
    assert ask("POST", "/lora-adapters", [{"id": 3, "scale": 1.0}])[1]["error"]["param"] == "[0].scale"
    loaded_twice = ask("POST", "/v1/load_lora_adapter", {"lora_name": "third", "lora_path": str(path)})
    assert (loaded_twice[0], loaded_twice[1]["error"]["code"]) == (409, "CONFLICT")
    replacing = {"lora_name": "third", "lora_path": str(files.second_gguf), "load_inplace": True}
    assert ask("POST", "/v1/load_lora_adapter", replacing)[0] == 200
    replaced = ask("POST", "/v1/generate", {**body, "model": "third"})[1]
    assert replaced["choices"][0]["tokens"] == greedy(files, files.second_gguf, 12)
    assert ask("POST", "/v1/unload_lora_adapter", {"lora_name": "third"})[0] == 200
    assert [ask("POST", "/v1/generate", {**body, "model": name})[0] for name in ("third", "tiny:third")] == [404, 404]
