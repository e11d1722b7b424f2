"""What an orchestrator serves of a server's API, and what it says of the rest."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from contextlib import ExitStack, closing
from http.client import HTTPConnection
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import jsonschema
import pytest
from openapi_spec_validator import OpenAPIV31SpecValidator

from pipeline.api.unsupported_paths import UNSUPPORTED_PATHS
from tests.e2e.server import poll_until
from tests.gateway.peers import MODEL
from tests.gateway.server import Server
from tests.orchestrator.fleet import Fleet, TestAgent
from tests.orchestrator.streams import BODY, MINE, OTHER, hold, step


def test_a_request_in_flight_is_cancelled_by_its_tenant(fleet: Fleet, engines: list[Server]) -> None:
    for engine in engines:
        hold(engine)
    connection = fleet.connect()
    try:
        headers = {"Content-Type": "application/json", **MINE}
        connection.request("POST", "/v1/completions", json.dumps({**BODY, "stream": True}).encode(), headers)
        fleet.wait(lambda state: any(one["under_way"] for one in state["agents"]))
        while not (serving := [engine for engine in engines if engine.peers.generator.running]):
            pass
        step(serving[0], 1)
        response = connection.getresponse()
        name = response.headers["X-Starling-Request"]
        path = f"/v1/requests/{name}"
        assert fleet.request("DELETE", path, None, OTHER).status == 404
        cancelled = fleet.request("DELETE", path, None, MINE)
        assert (cancelled.status, cancelled.json) == (200, {"id": name, "cancelled": True})
        assert b"cancelled by its client" in response.read()
        again = fleet.request("DELETE", path, None, MINE)
        assert (again.status, again.error["code"]) == (404, "NOT_FOUND")
        # The engines receive the end before the answer is sent, and read it a moment later.
        poll_until(
            lambda: not any(engine.peers.do(lambda e=engine: list(e.peers.generator.running)) for engine in engines)
        )
    finally:
        connection.close()
        for engine in engines:
            hold(engine, False)


def test_a_request_that_waits_for_its_model_is_cancelled(fleet: Fleet, cold_agent: TestAgent) -> None:
    cold_agent.may_load.clear()
    with closing(fleet.connect()) as connection:
        body = json.dumps({**BODY, "model": "cold", "stream": True}).encode()
        connection.request("POST", "/v1/generate", body, {"Content-Type": "application/json", **MINE})
        response = connection.getresponse()  # begins with the first comment
        path = f"/v1/requests/{response.headers['X-Starling-Request']}"
        assert fleet.request("DELETE", path, None, OTHER).status == 404
        assert fleet.request("DELETE", path, None, MINE).status == 200
        assert b"cancelled by its client" in response.read()
        assert fleet.request("DELETE", path, None, MINE).status == 404
    cold_agent.may_load.set()
    fleet.wait(lambda state: "cold" in cold_agent.engines)


def test_cancellations_under_way_are_bounded_for_a_tenant_and_in_all(
    homes: Callable[[], Path], engines: list[Server]
) -> None:
    """They ask every engine, and one of these is silent."""
    keys = [{"key": f"sk-{tenant}", "tenant": tenant} for tenant in ("mine", "other")]
    fleet = Fleet(homes(), {"auth": {"api_keys": keys}}, max_concurrent_requests=8)
    with ExitStack() as stack:
        stack.callback(fleet.close)
        fleet.add_agent("one", engines[0])
        names = [fleet.post("/v1/generate", BODY, tenant).headers["X-Starling-Request"] for tenant in (MINE, OTHER)]
        mine, other = (f"/v1/requests/{name}" for name in names)
        silent = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        silent.settimeout(60)
        fleet.add_agent("two", cast(Server, SimpleNamespace(port=silent.getsockname()[1])))

        def cancel(path: str, tenant: dict[str, str]) -> tuple[HTTPConnection, socket.socket]:
            connection = stack.enter_context(closing(fleet.connect()))
            connection.request("DELETE", path, headers=tenant)
            asked = stack.enter_context(silent.accept()[0])
            assert asked.recv(1 << 16).startswith(b"DELETE ")
            return connection, asked

        under_way = []
        for path, tenant, n, bound in (
            (mine, MINE, 6, "6 requests can be cancelled at once for one client"),
            (other, OTHER, 1, "8 requests can be cancelled at once for all clients together"),
        ):
            under_way += [cancel(path, tenant) for _ in range(n)]
            refused = fleet.request("DELETE", path, None, tenant)
            assert (refused.status, refused.error["code"]) == (429, "OVERLOADED")
            assert refused.error["message"].startswith(bound)
        silent.close()
        for _, asked in under_way:
            asked.close()
        assert [connection.getresponse().status for connection, _ in under_way] == [404] * len(under_way)
        assert fleet.request("DELETE", mine, None, MINE).status == 404


def test_an_orchestrator_with_all_its_requests_is_not_ready(
    homes: Callable[[], Path], engines: list[Server], released: None
) -> None:
    keys = [{"key": f"sk-{tenant}", "tenant": tenant} for tenant in ("mine", "other")]
    fleet = Fleet(homes(), {"auth": {"api_keys": keys}}, max_concurrent_requests=4)
    with ExitStack() as stack:
        stack.callback(fleet.close)
        fleet.add_agent("one", engines[0])
        hold(engines[0])
        assert fleet.get("/ready").json["in_flight"] == 0
        held = []
        for tenant in (MINE, MINE, MINE, OTHER):
            assert fleet.get("/ready").status == 200
            held.append(stack.enter_context(closing(fleet.connect())))
            headers = {"Content-Type": "application/json", **tenant}
            held[-1].request("POST", "/v1/generate", json.dumps(BODY).encode(), headers)
            poll_until(lambda: fleet.get("/ready").json["in_flight"] == len(held))
        answer = fleet.get("/ready")
        assert (answer.status, answer.json["overloaded"]) == (503, True)
        assert answer.json["reason"] == "4 requests are in flight, of at most 4"
        hold(engines[0], False)
        assert [connection.getresponse().status for connection in held] == [200] * 4
        poll_until(lambda: fleet.get("/ready").status == 200)


def test_every_answer_has_a_request_id(fleet: Fleet) -> None:
    text = {"model": MODEL, "text": "x"}
    answers = [fleet.get(path, MINE) for path in ("/v1/models", f"/v1/models/{MODEL}", "/v1/engines", "/v1/nothing")]
    answers += [fleet.get(path) for path in ("/health", "/ready", "/metrics", "/openapi.json", "/docs", "/web/docs.js")]
    answers += [fleet.post("/v1/tokenize", text, MINE), fleet.post("/v1/generate", BODY, MINE)]
    names = [str(answer.headers["X-Request-Id"]) for answer in answers]
    assert all(name.startswith("req-") for name in names) and len(set(names)) == len(names), names
    assert names[-1] == answers[-1].headers["X-Starling-Request"]
    assert fleet.get("/v1/models", {**MINE, "X-Request-Id": "mine-2"}).headers["X-Request-Id"] == "mine-2"


def test_the_older_name_of_models_redirects(fleet: Fleet) -> None:
    for path, target in (("/v1/engines", "/v1/models"), (f"/v1/engines/{MODEL}", f"/v1/models/{MODEL}")):
        answer = fleet.get(path, MINE)
        assert (answer.status, answer.headers["Location"]) == (308, target)


def test_the_document_describes_what_is_served(fleet: Fleet) -> None:
    answer = fleet.get("/openapi.json")  # without a key
    assert answer.status == 200
    OpenAPIV31SpecValidator(answer.json).validate()
    assert answer.json["security"] == [{"key": []}, {"x_api_key": []}]
    paths = answer.json["paths"]
    assert {"get", "delete"} <= set(paths["/v1/requests/{id}"]) and "/v1/fleet/why/{id}" in paths
    assert {"get", "delete"} <= set(paths["/v1/responses/{id}"]) and "/v1/responses/{id}/input_items" in paths
    assert {"get", "post", "delete"} <= set(paths["/v1/conversations/{id}"])
    assert {"get", "delete"} <= set(paths["/v1/conversations/{id}/items/{item}"])
    assert not [path for path in paths if "admin" in path or "lora" in path]
    for path, operations in paths.items():
        for method in operations:
            found = fleet.request(method.upper(), path.replace("{id}", MODEL).replace("{item}", "x"), None, MINE)
            assert found.status not in (405, 501), (method, path)
            if found.status == 404:
                assert "unknown path" not in found.error["message"], (method, path)
    tag = {"If-None-Match": answer.headers["ETag"]}
    assert fleet.get("/openapi.json", tag).status == 304


def test_the_document_describes_the_answers_of_the_probes(fleet: Fleet) -> None:
    document = fleet.get("/openapi.json").json
    for path, name in (("/health", "Health"), ("/ready", "Readiness")):
        schema, answer = document["components"]["schemas"][name], fleet.get(path).json
        assert set(schema["required"]) == set(answer)
        content = document["paths"][path]["get"]["responses"]["200"]["content"]["application/json"]
        for value in (answer, content["example"]):
            jsonschema.Draft202012Validator(schema).validate(value)


def test_the_page_of_the_document_has_its_files(fleet: Fleet) -> None:
    page = fleet.get("/docs")
    assert page.status == 200 and b"/web/docs.js" in page.body
    for name in ("docs.js", "docs.css", "page.css", "dom.js", "icon.svg"):
        assert fleet.get(f"/web/{name}").status == 200, name
    assert fleet.get("/web/chat.js").status == 404


@pytest.mark.parametrize(
    ("path", "remedy"),
    [
        ("/v1/threads/x/runs", "/v1/conversations"),
        ("/v1/admin/load", "starling fleet"),
        ("/v1/load_lora_adapter", "MODEL:ADAPTER"),
        ("/lora-adapters", "MODEL:ADAPTER"),
        ("/v1/organization", "/v1/fleet"),
    ],
)
def test_what_is_not_served_is_named_with_a_remedy(fleet: Fleet, path: str, remedy: str) -> None:
    refused = fleet.post(path, {"model": MODEL, "input": "x", "store": False}, MINE)
    assert (refused.status, refused.error["code"]) == (501, "NOT_IMPLEMENTED")
    assert path.removeprefix("/v1").split("/")[1] in refused.error["message"] and remedy in refused.error["message"]


def test_no_remedy_is_a_path_that_an_orchestrator_refuses(fleet: Fleet) -> None:
    for name in UNSUPPORTED_PATHS:
        message = fleet.post(f"/v1/{name}", {}, MINE).json["error"]["message"]
        assert "/v1/admin" not in message, message


def test_an_adapter_that_is_not_published_is_unknown(fleet: Fleet) -> None:
    refused = fleet.post("/v1/generate", {**BODY, "model": f"{MODEL}:french"}, MINE)
    assert (refused.status, refused.error["code"], refused.error["param"]) == (404, "MODEL_NOT_FOUND", "model")
    assert refused.error["message"] == f"model {MODEL!r} has no adapter 'french'; it has: none"
    named = {"model": f"{MODEL}:french"}
    for path, body in (
        ("/v1/chat/completions", {**named, "messages": [{"role": "user", "content": "x"}], "stream": True}),
        ("/v1/generate", {**BODY, **named, "session_id": "s", "create_session": True}),
        ("/v1/embeddings", {**named, "input": "x"}),
    ):
        assert fleet.post(path, body, MINE).error["message"] == refused.error["message"], path
    assert fleet.post("/v1/generate", {**BODY, "model": "unknown:french"}, MINE).error["code"] == "MODEL_NOT_FOUND"
