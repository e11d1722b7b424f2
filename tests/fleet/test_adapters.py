"""Published LoRA adapters behind an orchestrator: the bytes of a single server, loaded once, and after any death."""

from __future__ import annotations

import json
import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.procfs import children
from tests.e2e.conftest import share_caches
from tests.e2e.resumable import comparable, events
from tests.e2e.server import Server
from tests.fleet.agent_process import post, publish_tiny
from tests.fleet.published_adapters import PublishedAdapters
from tests.fleet.two_agents import MINE, Hosts

pytestmark = pytest.mark.slow

NAMES = ("tiny", "tiny:first", "tiny:second")
PROMPT = list(range(5, 105))
BODY: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 12, "seed": 7, "temperature": 2.0, "ignore_eos": True}
STREAM = {**BODY, "model": "tiny:first", "max_tokens": 1500, "n": 2, "stream": True}
TRIES = 5  # an engine may be far ahead of a client that a busy machine holds up


class AdapterHosts(Hosts):
    """An orchestrator and two agents that have loaded nothing."""

    def __init__(self, base: Path, adapters: PublishedAdapters) -> None:
        super().__init__(base, wait_ms=60_000)
        self.adapters = adapters

    def __enter__(self) -> AdapterHosts:
        for agent in self.agents.values():
            agent.start()
        for agent in self.agents.values():
            agent.wait_ready()
        self.wait_agents(("READY", "READY"))
        return self

    def wait_agents(self, health: tuple[str, ...]) -> None:
        self.fleet.wait(lambda state: tuple(one["health"] for one in state["agents"]) == health)

    def ask(self, model: str, **more: Any) -> Any:
        return self.fleet.post("/v1/generate", {**BODY, **more, "model": model}, MINE)

    def serving(self, model: str) -> list[str]:
        """Agents that have a model or an adapter ready."""
        found = self.fleet.get(f"/v1/models/{model}", MINE).json["agents"]
        assert isinstance(found, list)
        return found


def engine_of(hosts: AdapterHosts, name: str) -> int:
    """The process of an agent's only engine."""
    process = hosts.agents[name].process
    assert process is not None
    (found,) = (pid for pid in children(process.pid) if "--with-parent" in command_of(pid))
    return found


def command_of(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()


@pytest.fixture(scope="module")
def base() -> Iterator[Path]:
    """A directory with a path short enough for sockets."""
    found = Path(tempfile.mkdtemp(prefix="ad-"))
    yield found
    shutil.rmtree(found)


@pytest.fixture(scope="module")
def hosts(base: Path) -> Iterator[AdapterHosts]:
    adapters = PublishedAdapters(base, base / "blobs")
    with AdapterHosts(base, adapters) as running:
        adapters.publish("first")
        adapters.publish("second")
        yield running


@pytest.fixture(scope="module")
def expected(base: Path, hosts: AdapterHosts) -> dict[str, Any]:
    """The answers of one server with the same files, by name; `STREAM`'s under "stream"."""
    home = base / "single"
    home.mkdir()
    share_caches(home)
    adapters = [{"name": name, "path": str(hosts.adapters.paths[name])} for name in ("first", "second")]
    model = {"name": "tiny", "path": str(base / "tiny.gguf"), "kv_cache_mb": 32, "adapters": adapters}
    with Server(home, {"models": [model]}) as server:
        found: dict[str, Any] = {name: server.post("/v1/generate", **BODY, model=name)["choices"] for name in NAMES}
        found["stream"] = comparable([data for _, data in events(server, "/v1/generate", STREAM, {})])
        found["404"] = server.request("POST", "/v1/generate", {**BODY, "model": "tiny:third"})[1]
    assert len({json.dumps(found[name]) for name in NAMES}) == len(NAMES), "the adapters change the answers"
    return found


def test_a_request_loads_model_and_adapter(hosts: AdapterHosts, expected: dict[str, Any]) -> None:
    answers: list[Any] = []

    def ask() -> None:
        answers.append(hosts.ask("tiny:first"))

    threads = [threading.Thread(target=ask) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [answer.status for answer in answers] == [200] * 6, answers[0].body
    assert all(answer.json["choices"] == expected["tiny:first"] for answer in answers)
    assert {answer.json["model"] for answer in answers} == {"tiny:first"}
    assert len(hosts.serving("tiny:first")) == len(hosts.serving("tiny")) == 1
    loads = [one for one in hosts.fleet.fleet_events() if one["kind"] == "load"]
    assert [one["model"] for one in loads] == ["tiny:first"], "one load for all who wait"


def test_adapters_share_an_engine_and_its_batches(hosts: AdapterHosts, expected: dict[str, Any]) -> None:
    assert hosts.ask("tiny:second").json["choices"] == expected["tiny:second"]
    agents = hosts.serving("tiny:second")
    assert agents == hosts.serving("tiny:first") == hosts.serving("tiny"), "it was loaded into the engine that runs"
    found: dict[tuple[str, int], Any] = {}

    def ask(name: str, number: int) -> None:
        found[name, number] = hosts.ask(name).json["choices"]

    threads = [threading.Thread(target=ask, args=(name, number)) for number in range(3) for name in NAMES]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {(name, number): expected[name] for name in NAMES for number in range(3)}


def test_cached_pages_belong_to_one_adapter(hosts: AdapterHosts) -> None:
    def cached(name: str) -> int:
        usage = hosts.ask(name, cache_salt="a prompt that is cached under no other salt").json["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    assert [cached(name) for name in NAMES] == [0, 0, 0]
    assert [cached(name) for name in NAMES] == [96, 96, 96]


def test_models_are_listed_with_their_adapters(hosts: AdapterHosts) -> None:
    listed = {one["id"]: one for one in hosts.fleet.get("/v1/models", MINE).json["data"]}
    assert list(listed) == list(NAMES)
    first = listed["tiny:first"]
    assert (first["parent"], first["root"], first["digest"]) == ("tiny", "tiny", listed["tiny"]["digest"])
    assert first["ready"] and first["adapter_digest"] == hosts.adapters.digests["first"]
    assert "parent" not in listed["tiny"]
    manifests = {
        "tiny": "catalog/tiny.json",
        **{f"tiny:{one}": f"adapters/tiny/{one}.json" for one in ("first", "second")},
    }
    published = {name: json.loads((hosts.adapters.blobs / file).read_text()) for name, file in manifests.items()}
    assert {name: one["created"] for name, one in listed.items()} == {
        n: one["published"] for n, one in published.items()
    }


def test_an_unknown_adapter_is_the_servers_404(hosts: AdapterHosts, expected: dict[str, Any]) -> None:
    answer = hosts.ask("tiny:third")
    assert (answer.status, answer.json) == (404, expected["404"])
    assert "it has: tiny:first, tiny:second" in answer.error["message"]


def test_an_adapter_is_asked_for_without_its_model(hosts: AdapterHosts, expected: dict[str, Any]) -> None:
    answer = hosts.ask("second")
    assert (answer.status, answer.json["model"]) == (200, "tiny:second")
    assert answer.json["choices"] == expected["tiny:second"]


def interrupted(hosts: AdapterHosts, act: Callable[[str], object]) -> list[Any]:
    """The data of `STREAM`, in the middle of which `act` is called with the agent that has it."""
    for _ in range(TRIES):
        received, is_interrupted = [], False
        for event in events(hosts.fleet, "/v1/generate", STREAM, MINE):  # type: ignore[arg-type]
            received.append(event[1])
            if len(received) == 40:
                busy = [one["agent_id"] for one in hosts.fleet.state()["agents"] if one["under_way"]]
                assert len(busy) <= 1
                if is_interrupted := bool(busy):
                    act(busy[0])
        if is_interrupted:
            return received
    raise AssertionError("each time the answer was complete before 40 events were read")


def test_a_stream_goes_on_when_its_agent_is_killed(hosts: AdapterHosts, expected: dict[str, Any]) -> None:
    reader = hosts.fleet
    (victim,) = hosts.serving("tiny:first")
    other = next(name for name in hosts.agents if name != victim)

    def kill(name: str) -> None:
        process = hosts.agents[name].process
        assert process is not None and name == victim
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    received = interrupted(hosts, kill)
    assert comparable(received) == expected["stream"]
    assert len(received) > 40
    loads = [(one["agent"], one["model"]) for one in reader.fleet_events() if one["kind"] == "loaded"]
    assert (other, "tiny:first") in loads and (other, "tiny") not in loads, "it had to load model and adapter"
    hosts.agents[victim].start().wait_ready()
    # What the agent had, its successor loads again.
    reader.wait(
        lambda state: any(
            {one["name"]: one["is_ready"] for model in agent.get("loaded_models", ()) for one in model["adapters"]}
            == {"first": True, "second": True}
            for agent in state["agents"]
            if agent["agent_id"] == victim
        )
    )


def test_a_stream_goes_on_when_its_engine_is_killed(hosts: AdapterHosts, expected: dict[str, Any]) -> None:
    hosts.wait_agents(("READY", "READY"))
    received = interrupted(hosts, lambda name: os.kill(engine_of(hosts, name), signal.SIGKILL))
    assert comparable(received) == expected["stream"]


def load_everywhere(hosts: AdapterHosts, model: str) -> None:
    for agent in hosts.agents.values():
        status, answer = agent.call("/load_model", model_id=model)
        assert status == 200, answer
    hosts.fleet.wait(
        lambda state: all(one["agents"] == ["one", "two"] for one in state["models"] if one["id"] == model)
    )


def test_a_stream_moves_when_its_agent_drains(hosts: AdapterHosts, expected: dict[str, Any]) -> None:
    hosts.wait_agents(("READY", "READY"))
    load_everywhere(hosts, "tiny:first")

    def moved() -> int:
        return int(hosts.fleet.state()["moves"].get("moved", 0))

    before = moved()
    for _ in range(TRIES):  # it may end before its successor has computed what there is of it
        sources: list[str] = []

        def drain(name: str) -> None:
            sources.append(name)  # noqa: B023
            hosts.cordon(name, True, drain=True)

        try:
            received = interrupted(hosts, drain)
        finally:
            for source in sources:
                hosts.cordon(source, False)
        assert comparable(received) == expected["stream"]
        if moved() > before:
            break
    assert moved() == before + 1


def turn(hosts: AdapterHosts, session: str, number: int) -> str:
    """What a client sees of a turn but for its names."""
    more = {"prompt": PROMPT[20 * number : 20 * number + 30], "session_id": session, "create_session": True}
    answer = hosts.ask("tiny:first", **more)
    assert answer.status == 200, answer.body
    return json.dumps([answer.json["choices"], answer.json["usage"]["prompt_tokens"]])


def close(hosts: AdapterHosts, session: str) -> None:
    closed = hosts.fleet.post("/v1/session/close", {"model": "tiny:first", "session_id": session}, MINE)
    assert closed.status == 200, closed.body


@pytest.mark.parametrize("is_loaded", [True, False])
def test_a_session_of_an_adapter_moves_when_its_agent_drains(hosts: AdapterHosts, is_loaded: bool) -> None:
    """Also to an agent that must load the adapter for the next turn."""
    hosts.wait_agents(("READY", "READY"))
    load_everywhere(hosts, "tiny:first")
    unmoved = [turn(hosts, "unmoved", number) for number in range(3)]
    close(hosts, "unmoved")
    assert turn(hosts, "s", 0) == unmoved[0]
    (source,) = hosts.holders("s")
    (target,) = set(hosts.agents) - {source}
    if not is_loaded:
        assert hosts.agents[target].call("/unload_model", model_id="tiny:first")[0] == 200
        hosts.fleet.wait(
            lambda state: all(one["agents"] == [source] for one in state["models"] if one["id"] == "tiny:first")
        )
    try:
        done = hosts.run("drain", source, "--wait", "--timeout", "120")
        assert done.exit_code == 0, done.output
        assert hosts.holders("s") == [target]
        assert [turn(hosts, "s", number) for number in (1, 2)] == unmoved[1:]
        assert hosts.holders("s") == [target]
    finally:
        hosts.cordon(source, False)
    close(hosts, "s")


def test_publishing_again_changes_nothing(hosts: AdapterHosts) -> None:
    before = {path: path.read_bytes() for path in hosts.adapters.blobs.rglob("*") if path.is_file()}
    done = hosts.adapters.publish("first")
    assert (done["sent_bytes"], done["digest"]) == (0, hosts.adapters.digests["first"])
    assert {path: path.read_bytes() for path in before} == before
    refused = hosts.adapters.run("publish", str(hosts.adapters.paths["second"]), "--name", "tiny:first")
    assert refused.exit_code == 1 and "--replace" in str(refused.exception)


def test_an_unloaded_adapter_is_loaded_again(hosts: AdapterHosts, expected: dict[str, Any]) -> None:
    for agent in hosts.agents.values():
        status, _ = agent.call("/unload_model", model_id="tiny:first")
        assert status == 200
    assert hosts.ask("tiny:first").json["choices"] == expected["tiny:first"]
    assert hosts.ask("tiny").json["choices"] == expected["tiny"]


def test_an_engine_that_began_before_its_weights_takes_an_adapter(
    hosts: AdapterHosts, expected: dict[str, Any]
) -> None:
    agent = hosts.agents["one"]
    assert agent.call("/unload_model", model_id="tiny", drop_cached=True)[0] == 200
    for name in ("tiny", "tiny:first"):
        status, loaded = agent.call("/load_model", model_id=name)
        assert (status, loaded["status"], loaded["model_id"]) == (200, "success", name), loaded
    asked = {**BODY, "path": "/v1/generate", "model": "tiny:first"}
    status, answer = post(f"{agent.url}/infer", asked, agent.token)
    assert (status, answer["choices"]) == (200, expected["tiny:first"])


def test_a_damaged_adapter_is_refused_until_it_is_published_again(hosts: AdapterHosts) -> None:
    adapters = hosts.adapters
    adapters.publish("third")
    blob = adapters.blobs / "lora" / f"{adapters.digests['third']}.lora"
    good = blob.read_bytes()
    blob.chmod(0o644)
    blob.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    answer = hosts.ask("tiny:third")
    assert answer.status == 500 and "does not have the SHA-256 in its name" in answer.error["message"]
    assert hosts.ask("tiny:first").status == 200, "the model and its other adapters serve on"
    blob.write_bytes(good)
    assert hosts.ask("tiny:third").status == 200
    # A file that is damaged on an agent's disk is fetched again.
    (name,) = hosts.serving("tiny:third")
    agent = hosts.agents[name]
    assert agent.call("/unload_model", model_id="tiny:third")[0] == 200
    stored = agent.home / "models" / "adapters" / blob.name
    stored.write_bytes(b"x" * len(good))
    assert agent.call("/load_model", model_id="tiny:third")[0] == 200
    assert stored.read_bytes() == good


def test_what_is_unpublished_is_unknown(hosts: AdapterHosts) -> None:
    run = hosts.adapters.run
    listed = json.loads(run("catalog", "--json").output)
    assert [one["name"] for one in listed] == ["tiny", "tiny:first", "tiny:second", "tiny:third"]
    assert run("unpublish", "tiny:third").exit_code == 0
    assert not list(hosts.adapters.blobs.rglob(f"{hosts.adapters.digests['third']}.lora"))
    assert run("unpublish", "tiny").exit_code == 0
    assert json.loads(run("catalog", "--json").output) == []
    assert not list(hosts.adapters.blobs.rglob("*.lora"))
    publish_tiny(hosts.adapters.folder, hosts.adapters.blobs)
