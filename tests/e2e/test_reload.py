"""Models are loaded, replaced and unloaded while a server runs: no request fails, no stream mixes two versions."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.errors import StarlingError
from pipeline.observe.status import read_all
from starling.cli.reload import change, gone
from tests.e2e.command import starling
from tests.e2e.conftest import share_caches
from tests.e2e.resumable import events, wait_answering
from tests.e2e.server import Server, poll_until, wait_gone
from tests.e2e.traffic import Traffic, tokens_of
from tools.tiny_gguf import SHAPES, write_model

pytestmark = pytest.mark.slow

REQUEST: dict[str, Any] = {"prompt": [5, 6, 7, 8], "max_tokens": 40, "ignore_eos": True, "seed": 3}
# Takes several times as long as a reload, with `SLOW_STEPS`. Draft tokens of so hot a sample are seldom right.
LONG: dict[str, Any] = {**REQUEST, "max_tokens": 600, "n": 2, "temperature": 2.0}
SLOW_STEPS = {"STARLING_FAULTS": "worker:slow@step=10"}  # 10 ms of sleep make streams long that compute little
SMALL, ODD = (SHAPES[name]._replace(context_length=8192) for name in ("small", "odd"))
TIMEOUT_S = 180.0
Undisturbed = Callable[..., str]


class Files:
    """Model files: `a` and `b` have one tokenizer and different weights, `other` has another tokenizer."""

    def __init__(self, directory: Path) -> None:
        self.a = write_model(directory / "a.gguf", SMALL, seed=1)
        self.b = write_model(directory / "b.gguf", SMALL, seed=2)
        self.other = write_model(directory / "other.gguf", ODD, seed=3)
        self.broken = directory / "broken.gguf"
        self.broken.write_bytes(self.a.read_bytes()[:5000])
        self.used = directory / "used.gguf"  # the configured file
        self.used.write_bytes(self.a.read_bytes())


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(tmp_path_factory.mktemp("files"))


@pytest.fixture
def server(tmp_path: Path, files: Files) -> Iterator[Server]:
    share_caches(tmp_path)
    config = {
        "models": [{"name": "tiny", "path": str(files.a), "kv_cache_mb": 16}],
        "auth": {"api_keys": [{"key": "sk-user", "tenant": "u"}, {"key": "sk-admin", "tenant": "u", "admin": True}]},
    }
    with Keyed(tmp_path, config, SLOW_STEPS) as server:
        yield server
        server.stop()
        assert server.leftovers() == []
        assert server.pids() == {}
        # No lock, record or failure of a version is left; the locks of the five stages stay.
        left = [path.name for path in (tmp_path / "run").iterdir() if "@" in path.name or "versions" in path.name]
        assert left == [], "".join(server.output[-60:])


class Keyed(Server):
    """A server whose requests carry a user's API key."""

    def request(self, method: str, path: str, body: Any = None, headers: Any = None) -> tuple[int, Any, dict[str, str]]:
        return super().request(method, path, body, {"Authorization": "Bearer sk-user", **(headers or {})})

    def stream(self, path: str, **body: Any) -> Iterator[dict[str, Any]]:
        for _, data in events(self, path, {**body, "stream": True}, {"Authorization": "Bearer sk-user"}):
            yield data


def run_dir(server: Server) -> Path:
    return server.home / "run"


def reload(server: Server, path: Path | None = None, op: str = "reload", name: str = "tiny", **fields: Any) -> Any:
    """Make a change and return the gateway's state after it."""
    return change(run_dir(server), op, name, fields.pop("timeout_s", TIMEOUT_S), path=str(path or ""), **fields)


def tokens(server: Server, **body: Any) -> list[int]:
    found: list[int] = server.post("/v1/generate", **{**REQUEST, **body})["choices"][0]["tokens"]
    return found


def cached(answer: Any) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def workers(server: Server) -> set[str]:
    return {r.stage for r in read_all(run_dir(server)) if r.stage.startswith("worker") and r.alive}


def arenas(server: Server) -> list[str]:
    return sorted(Path(path).name for path in server.leftovers() if path.endswith((".kv", ".steps", ".act")))


def wait_until(condition: Callable[[], bool], server: Server) -> None:
    """Request /ready until it answers 200 and `condition` holds."""

    def holds() -> bool:
        with contextlib.suppress(OSError):
            return server.request("GET", "/ready")[0] == 200 and condition()
        return False

    poll_until(holds, lambda: "it did not come:\n" + "".join(server.output[-60:]))


class Stream(threading.Thread):
    """A long stream in a thread; `begun` is set at its first token."""

    def __init__(self, server: Server, **body: Any) -> None:
        super().__init__(daemon=True)
        self.begun = threading.Event()
        self.events: list[dict[str, Any]] = []
        self._is_left = False
        self._server, self._body = server, {**LONG, **body}
        self.start()

    def run(self) -> None:
        for event in self._server.stream("/v1/generate", **self._body):
            self.events.append(event)
            self.begun.set()
            if self._is_left:
                break

    def leave(self) -> None:
        """Close the connection: the request is cancelled."""
        self._is_left = True
        self.join(TIMEOUT_S)
        assert not self.is_alive()

    def result(self) -> str:
        self.join(TIMEOUT_S)
        assert not self.is_alive()
        return summary(self.events)


def summary(found: list[dict[str, Any]]) -> str:
    """Tokens, text and finish reason of each choice, and the number of tokens."""
    choices: dict[int, Any] = {}
    for event in found:
        assert "error" not in event, event
        if "index" in event:
            choice = choices.setdefault(event["index"], [[], "", ""])
            choice[0] += event.get("tokens", [])
            choice[1] += event.get("text", "")
            choice[2] += event.get("finish_reason") or ""
    assert "usage" in found[-1]
    return json.dumps([choices, found[-1]["usage"]["completion_tokens"]], sort_keys=True)


@pytest.fixture(scope="module")
def undisturbed() -> Undisturbed:
    """`undisturbed(server, "a", 3)`: the result of `LONG` with seed 3 on the file `a`, which the server has loaded.

    It is computed once, on the first server that needs it: the bytes of a request do not depend on the server.
    """
    found: dict[tuple[str, int, int], str] = {}

    def result(server: Server, file: str, seed: int = LONG["seed"], max_tokens: int = LONG["max_tokens"]) -> str:
        if (file, seed, max_tokens) not in found:
            found[file, seed, max_tokens] = Stream(server, seed=seed, max_tokens=max_tokens).result()
        return found[file, seed, max_tokens]

    return result


def test_a_reload_switches_new_requests_and_old_streams_finish_on_the_old_version(
    server: Server, files: Files, undisturbed: Undisturbed
) -> None:
    on_a, long_on_a = tokens(server), undisturbed(server, "a")
    stream = Stream(server)
    assert stream.begun.wait(TIMEOUT_S)
    state = reload(server, files.b)
    on_b = tokens(server)
    assert on_b != on_a
    assert [one["state"] for one in state["instances"] if one["model"] == "tiny"].count("serving") == 1
    assert stream.result() == long_on_a
    gone(run_dir(server), state, float("inf"))
    wait_until(lambda: workers(server) == {"worker-tiny@1"}, server)
    # /v1/models describes the serving version.
    (model,) = server.request("GET", "/v1/models")[1]["data"]
    assert model["digest"] == state["change"]["digest"]
    assert server.request("GET", "/v1/models/tiny")[1]["digest"] == model["digest"]
    # A reload without a path reads the same file again.
    assert tokens(server) == on_b
    reload(server)
    assert tokens(server) == on_b
    # With the first file the bytes of the first version return.
    reload(server, files.a)
    assert tokens(server) == on_a
    assert Stream(server).result() == long_on_a


def test_a_new_version_of_the_same_file_inherits_cached_pages(server: Server, files: Files) -> None:
    prompt = [5 + i % 90 for i in range(200)]
    first = server.post("/v1/generate", **{**REQUEST, "prompt": prompt})
    stream = Stream(server, max_tokens=8000, n=1)  # outlasts any reload, and is then left
    assert stream.begun.wait(TIMEOUT_S)
    state = reload(server)
    assert stream.is_alive()
    again = server.post("/v1/generate", **{**REQUEST, "prompt": prompt})
    assert again["choices"] == first["choices"]
    assert cached(again) == 192
    # A version of another file inherits no page.
    stream.leave()
    gone(run_dir(server), state, float("inf"))
    stream = Stream(server, max_tokens=8000, n=1)
    assert stream.begun.wait(TIMEOUT_S)
    reload(server, files.b)
    assert stream.is_alive()
    assert cached(server.post("/v1/generate", **{**REQUEST, "prompt": prompt})) == 0
    stream.leave()


def test_a_changed_file_is_read_only_by_a_reload(server: Server, files: Files, tmp_path: Path) -> None:
    moving = tmp_path / "moving.gguf"
    moving.write_bytes(files.a.read_bytes())
    reload(server, moving)
    on_a = tokens(server)
    (tmp_path / "new").write_bytes(files.b.read_bytes())
    os.replace(tmp_path / "new", moving)
    # Restarted stages serve the loaded version, not the file that now has its name.
    for stage in ("worker-tiny@1", "kv", "tokenizer", "scheduler"):
        pid = server.pid_of(stage)
        os.kill(pid, signal.SIGKILL)
        assert wait_gone(pid)
        wait_until(lambda: True, server)
        assert tokens(server) == on_a
    done = json.loads(starling(server, "reload", "tiny", "--json"))
    assert done["ok"]
    assert done["previous"] == "tiny@1"
    assert tokens(server) != on_a


def test_reloads_under_load_fail_no_request(server: Server) -> None:
    with Traffic(server, 4) as traffic:
        seen = []
        for _ in range(4):
            state = reload(server)
            seen.append(state["change"]["instance"])
            streams = traffic.streams
            wait_until(lambda: traffic.streams >= streams + 8 or bool(traffic.faults), server)  # noqa: B023
    assert traffic.faults == []
    assert seen == ["tiny@1", "tiny@2", "tiny@3", "tiny@4"]
    wait_until(lambda: workers(server) == {"worker-tiny@4"}, server)
    # The metrics of a model continue across its versions.
    name = 'starling_tokens_generated_total{model="tiny"}'

    def generated() -> float:
        lines = server.request("GET", "/metrics")[1].splitlines()
        return next((float(line.split()[-1]) for line in lines if line.startswith(name)), 0.0)

    wait_until(lambda: generated() >= traffic.streams * 120, server)  # snapshots of the metrics are periodic
    after = server.request("GET", "/metrics")[1]
    assert "tiny@" not in "".join(line for line in after.splitlines() if "starling_kv" in line or name[:20] in line)
    wait_until(lambda: arenas(server) == ["tiny@4.act", "tiny@4.kv", "tiny@4.steps"], server)


def test_a_failed_load_leaves_the_old_version_serving(server: Server, files: Files, tmp_path: Path) -> None:
    expected = tokens(server)
    text = tmp_path / "text.gguf"
    text.write_text("no model at all")
    with Traffic(server, 2) as traffic:
        for path, code in ((files.broken, 78), (text, 78), (tmp_path / "none.gguf", 78)):
            answer = json.loads(starling(server, "reload", "tiny", "--path", str(path), "--json", code=code))
            assert answer["ok"] is False
            assert answer["error"]["message"]
            assert workers(server) <= {"worker-tiny", "worker-tiny@1"}
        with pytest.raises(StarlingError, match=r"needs [\d,]+ bytes .* has [\d,]+ free") as refused:
            reload(server, files.b, "load", "big", kv_cache_mb=16_000_000)
        assert (refused.value.code, refused.value.status) == ("INSUFFICIENT_RESOURCES", 507)
        for op, name, error in (
            ("reload", "none", "MODEL_NOT_FOUND"),
            ("unload", "none", "MODEL_NOT_FOUND"),
            ("load", "none", "MODEL_NOT_FOUND"),
            ("load", "tiny", "CONFLICT"),
        ):
            with pytest.raises(StarlingError) as raised:
                reload(server, None, op, name)
            assert raised.value.code == error
        for op in ("reload", "unload", "load"):
            assert "'absent'" in json.loads(starling(server, op, "absent", "--json", code=2))["error"]["message"]
    assert traffic.faults == []
    assert tokens(server) == expected
    wait_until(lambda: workers(server) == {"worker-tiny"}, server)
    wait_until(lambda: not [p for p in server.leftovers() if "@" in p], server)


def test_sessions_continue_only_with_the_same_tokenizer(server: Server, files: Files) -> None:
    def turn(prompt: list[int], **more: Any) -> tuple[int, Any]:
        body = {**REQUEST, "prompt": prompt, "max_tokens": 10, "session_id": "chat", **more}
        status, answer, _ = server.request("POST", "/v1/generate", body)
        return status, answer

    status, first = turn([5, 6, 7], create_session=True)
    assert status == 200, first
    reload(server, files.b)
    status, second = turn([9])
    assert status == 200, second
    # The same tokens as for one prompt of the tokens so far and the turn's.
    so_far = [5, 6, 7, *first["choices"][0]["tokens"]]
    assert second["choices"][0]["tokens"] == tokens(server, prompt=[*so_far, 9], max_tokens=10)
    assert second["usage"]["prompt_tokens"] == len(so_far) + 1
    reload(server, files.other)
    for more in ({}, {"create_session": True}):
        status, refused = turn([9], **more)
        assert (status, refused["error"]["code"], refused["error"]["param"]) == (409, "CONFLICT", "session_id")
    reload(server, files.b)
    status, third = turn([10])
    assert status == 200, third
    assert third["usage"]["prompt_tokens"] == len(so_far) + 1 + 10 + 1
    reload(server, files.other)
    assert server.request("POST", "/v1/session/close", {"session_id": "chat"})[0] == 200
    assert turn([9])[0] == 404
    assert turn([9], create_session=True)[0] == 200


def test_load_and_unload(server: Server, files: Files) -> None:
    done = json.loads(starling(server, "load", "two", "--path", str(files.b), "--kv-cache-mb", "16", "--json"))
    assert (done["ok"], done["instance"]) == (True, "two@1")
    expected = tokens(server, model="two")
    assert expected != tokens(server)
    assert [m["id"] for m in server.request("GET", "/v1/models")[1]["data"]] == ["tiny", "two"]
    assert sorted(server.request("GET", "/ready")[1]["models"]) == ["tiny", "two"]
    # Its worker records that it is ready a moment after the gateway has received it.
    poll_until(lambda: any(one.ready for one in read_all(run_dir(server)) if one.stage == "worker-two@1"))
    rows = {row["stage"]: row["state"] for row in json.loads(starling(server, "status", "--json"))}
    assert rows["worker-two@1"] == "ready"
    # The model stays loaded after every stage has been restarted.
    for stage in ("scheduler", "kv", "tokenizer", "worker-two@1", "gateway"):
        pid = server.pid_of(stage)
        os.kill(pid, signal.SIGKILL)
        assert wait_gone(pid)
    wait_answering(server)
    wait_until(lambda: tokens(server, model="two") == expected, server)

    # Unloading lets streams finish, refuses new requests, then removes the name.
    stream = Stream(server, model="two", seed=8)
    assert stream.begun.wait(TIMEOUT_S)
    unloading = threading.Thread(target=reload, args=(server, None, "unload", "two"))
    unloading.start()
    status = 200
    while status == 200:
        status, answer, headers = server.request("POST", "/v1/generate", {**REQUEST, "model": "two", "max_tokens": 1})
    assert (status, answer["error"]["code"]) in ((503, "DRAINING"), (404, "MODEL_NOT_FOUND"))
    assert status == 404 or int(headers["Retry-After"]) >= 1
    unloading.join()
    assert stream.result().count('"length"') == LONG["n"]
    assert server.request("POST", "/v1/generate", {**REQUEST, "model": "two"})[0] == 404
    assert server.request("GET", "/v1/models/two")[0] == 404
    wait_until(lambda: workers(server) == {"worker-tiny"}, server)
    wait_until(lambda: not [p for p in server.leftovers() if "two" in p], server)

    # After the timeout the remaining streams end with an error.
    reload(server, files.b, "load", "two", kv_cache_mb=16)
    # It needs so many steps that the command begins before it ends.
    stream = Stream(server, model="two", max_tokens=3000)
    assert stream.begun.wait(TIMEOUT_S)
    starling(server, "unload", "two", "--timeout", "0", code=1)
    stream.join(TIMEOUT_S)
    assert stream.events[-1]["error"]["code"] == "DRAINING"

    # Without a model the server is not ready. The configured model can be loaded again by its name.
    expected = tokens(server)
    reload(server, None, "unload", "tiny")
    status, ready, _ = server.request("GET", "/ready")
    assert (status, ready["reason"]) == (503, "no model is loaded")
    starling(server, "restart", "all", "--with-gateway", "--timeout", "240")
    starling(server, "load", "tiny")
    assert tokens(server) == expected


def test_the_admin_endpoints_need_an_admin_key(server: Server, files: Files) -> None:
    admin = {"Authorization": "Bearer sk-admin"}
    body = {"target": "tiny", "path": str(files.b)}
    assert server.request("POST", "/v1/admin/reload", body)[0] == 403
    status, state, _ = server.request("POST", "/v1/admin/reload", body, admin)
    assert (status, state["change"]["done"], state["change"]["instance"]) == (200, True, "tiny@1")
    for wrong, param in (
        ({"target": "tiny", "path": "b.gguf"}, "path"),
        ({"path": str(files.b)}, "target"),
        ({**body, "timeout_s": -1}, "timeout_s"),
        ({**body, "wait": 1}, "wait"),
        ({**body, "no": 1}, "no"),
    ):
        status, refused, _ = server.request("POST", "/v1/admin/reload", wrong, admin)
        assert (status, refused["error"]["param"]) == (400, param)
    status, refused, _ = server.request("POST", "/v1/admin/reload", {"target": "none"}, admin)
    assert (status, refused["error"]["code"]) == (404, "MODEL_NOT_FOUND")
    body = {"target": "big", "path": str(files.b), "kv_cache_mb": 16_000_000}
    status, refused, _ = server.request("POST", "/v1/admin/load", body, admin)
    assert (status, refused["error"]["code"]) == (507, "INSUFFICIENT_RESOURCES")


VICTIMS = ("scheduler", "kv", "tokenizer", "worker-tiny", "worker-tiny@1", "gateway")
# Each victim and each phase; all pairs with `make kill-matrix`.
DEATHS = [
    (phase, victim)
    for i, victim in enumerate(VICTIMS)
    for j, phase in enumerate(("loading", "self-test"))
    if os.environ.get("STARLING_KILL_MATRIX") == "all" or (i + j) % 2 == 0
]


@pytest.mark.parametrize(("phase", "victim"), DEATHS)
def test_a_reload_survives_the_death_of_any_stage(
    server: Server, files: Files, undisturbed: Undisturbed, phase: str, victim: str
) -> None:
    """The new version serves in the end, every stream keeps its bytes, and no file is left."""
    seeds = () if victim == "gateway" else (1, 2)
    results = [undisturbed(server, "a", seed) for seed in seeds]
    expected = tokens(server)
    streams = [Stream(server, seed=seed) for seed in seeds]
    # The worker of the old version is there to be killed, however long the reload takes.
    others = [Stream(server, max_tokens=8000, n=1)] if victim == "worker-tiny" else []
    assert all(stream.begun.wait(TIMEOUT_S) for stream in streams + others)
    killed = threading.Event()

    def strike(state: dict[str, Any]) -> None:
        now = state["change"].get("phase", "switched")
        if not killed.is_set() and (now.startswith(phase) or now == "switched"):
            with contextlib.suppress(ProcessLookupError):
                pid = next((r.pid for r in read_all(run_dir(server)) if r.stage == victim and r.alive), 0)
                if pid:
                    killed.set()
                    os.kill(pid, signal.SIGKILL)

    state = change(run_dir(server), "reload", "tiny", TIMEOUT_S, strike, path=str(files.b))
    assert killed.is_set()
    for stream in others:
        stream.leave()
    wait_answering(server)
    wait_until(lambda: True, server)
    assert tokens(server) != expected
    assert [stream.result() for stream in streams] == results
    gone(run_dir(server), state, float("inf"))
    wait_until(lambda: workers(server) == {"worker-tiny@1"}, server)
    wait_until(lambda: arenas(server) == ["tiny@1.act", "tiny@1.kv", "tiny@1.steps"], server)


def test_a_stream_of_the_old_version_outlives_the_gateway(
    server: Server, files: Files, undisturbed: Undisturbed
) -> None:
    """It began before the switch and is resumed after it, on its own version."""
    key = {"Authorization": "Bearer sk-user"}
    begun: list[tuple[str, dict[str, Any]]] = []
    for version in range(1, 9):
        body = {**LONG, "max_tokens": version * LONG["max_tokens"]}  # a reload takes longer on a busy machine
        expected = undisturbed(server, "a" if version % 2 else "b", max_tokens=body["max_tokens"])
        begun.clear()
        is_under_way = False
        with contextlib.suppress(OSError, ValueError):
            for event in events(server, "/v1/generate", {**body, "stream": True}, key):
                begun.append(event)
                if len(begun) == 10:
                    state = reload(server, files.b if version % 2 else files.a)
                    previous = state["change"]["previous"]
                    is_under_way = any(one["in_flight"] for one in state["instances"] if one["instance"] == previous)
                    if not is_under_way:
                        break  # it ended before the reload
                    pid = server.pid_of("gateway")
                    os.kill(pid, signal.SIGKILL)
                    assert wait_gone(pid)
        wait_answering(server)
        if is_under_way and "usage" not in begun[-1][1]:  # it had not ended before the gateway did
            break
    else:
        pytest.fail("no stream takes as long as a reload")
    last = begun[-1][0]
    rest = list(events(server, f"/v1/requests/{last.partition(':')[0]}", None, {**key, "Last-Event-ID": last}))
    assert summary([data for _, data in begun + rest]) == expected
    wait_until(lambda: workers(server) == {f"worker-tiny@{version}"}, server)
    assert tokens_of([{"tokens": tokens(server)}]) != []
