"""/openapi.json: a valid document of every route and every field, whose schemas accept what the readers accept."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jsonschema
import pytest
from openapi_spec_validator import OpenAPIV31SpecValidator

from pipeline.api.requests import chat, completions, generate, messages, session_close, tokenize
from pipeline.config.schema import Config, ModelConfig
from pipeline.errors import InvalidRequest
from stages.gateway.admin import Admin
from stages.gateway.endpoints import lora_adapters
from stages.gateway.http.administration import is_administration
from stages.gateway.http.app import make_app
from stages.gateway.http.web_endpoints import routes
from stages.gateway.openapi.document import make_document
from stages.gateway.openapi.examples import EXAMPLES
from stages.gateway.openapi.operations import OPERATIONS
from stages.gateway.service import Service
from tests.gateway.kv_peer import KvPeer
from tests.gateway.peers import MODEL
from tests.gateway.server import MakeServer, Server

BODIES = {
    "/v1/chat/completions": chat.BODY,
    "/v1/completions": completions.BODY,
    "/v1/messages": messages.BODY,
    "/v1/messages/count_tokens": messages.COUNT_BODY,
    "/v1/generate": generate.BODY,
    "/v1/session/close": session_close.BODY,
    "/v1/tokenize": tokenize.TOKENIZE_BODY,
    "/v1/detokenize": tokenize.DETOKENIZE_BODY,
    "/v1/load_lora_adapter": lora_adapters.LOAD_BODY,
    "/v1/unload_lora_adapter": lora_adapters.UNLOAD_BODY,
}


READERS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "/v1/chat/completions": chat.read,
    "/v1/completions": completions.read,
    "/v1/messages": messages.read,
    "/v1/messages/count_tokens": messages.read_count,
    "/v1/generate": generate.read,
    "/v1/tokenize": tokenize.read_tokenize,
    "/v1/detokenize": tokenize.read_detokenize,
    "/v1/session/close": session_close.read_close,
    "/v1/load_lora_adapter": lora_adapters.read_load,
    "/v1/unload_lora_adapter": lora_adapters.read_unload,
}


@pytest.fixture(scope="module")
def served_routes(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, str, str]]:
    config = Config(models=(ModelConfig(name="m", path="m.gguf"),))
    service = Service(config, lambda frame: True, lambda frame: True)
    return list(routes(make_app(config, service, Admin(service, tmp_path_factory.mktemp("drains") / "drains"))))


@pytest.fixture(scope="module")
def document(served_routes: list[tuple[str, str, str]]) -> dict[str, Any]:
    return make_document(served_routes, metrics_path="/metrics", needs_key=False)


@pytest.fixture(scope="module")
def kv(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[KvPeer]:
    """Answers about sessions, for which the gateway would wait 10 s."""
    peer = KvPeer(server.config, tmp_path_factory.mktemp("kv"))
    yield peer
    peer.stop()


def body_schema(document: dict[str, Any], path: str) -> dict[str, Any]:
    schema: dict[str, Any] = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    return schema


def test_the_document_is_valid(document: dict[str, Any]) -> None:
    OpenAPIV31SpecValidator(document).validate()
    for path, operations in document["paths"].items():
        for operation in operations.values():
            for content in operation.get("requestBody", {}).get("content", {}).values():
                jsonschema.Draft202012Validator.check_schema(content["schema"])
            assert operation["responses"], path


def test_every_route_is_in_the_document_and_nothing_else(
    document: dict[str, Any], served_routes: list[tuple[str, str, str]]
) -> None:
    described = {(method.upper(), path) for path, one in document["paths"].items() for method in one}
    assert described == {(method, path.replace(":.+", "")) for method, path, _ in served_routes}
    assert set(OPERATIONS) <= described
    assert {"/v1/chat/completions", "/v1/admin/load", "/metrics", "/openapi.json"} <= set(document["paths"])
    names = [operation["operationId"] for one in document["paths"].values() for operation in one.values()]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("path", BODIES)
def test_every_field_of_a_body_is_in_the_document(document: dict[str, Any], path: str) -> None:
    schema, table = body_schema(document, path), BODIES[path]
    assert set(schema["properties"]) == {*table.fields, *table.unsupported}
    assert schema.get("required", []) == list(table.required)
    assert schema["additionalProperties"] is False


def test_every_operation_has_examples_that_fit_its_schemas(document: dict[str, Any]) -> None:
    schemas = {"components": document["components"]}
    without = set()
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            contents = [operation["requestBody"]["content"]] if "requestBody" in operation else []
            answer = operation["responses"].get("200", {}).get("content", {})
            contents += [answer] if "application/json" in answer else []
            for content in contents:
                described = content["application/json"]
                if "example" not in described:
                    without.add((method.upper(), path))
                    continue
                jsonschema.Draft202012Validator({**schemas, **described["schema"]}).validate(described["example"])
    # Their answers are those of other operations, and the document itself.
    assert without == {("GET", "/v1/requests/{id}"), ("GET", "/openapi.json")}
    assert set(EXAMPLES) <= set(OPERATIONS)
    for (_, path), example in EXAMPLES.items():
        if path in BODIES and example.request is not None:
            READERS[path](example.request)


def test_the_parameters_of_queries_are_in_the_document(document: dict[str, Any]) -> None:
    found = {}
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            names = [one["name"] for one in operation.get("parameters", []) if one["in"] == "query"]
            if names:
                found[method, path] = names
    page = ["after", "limit", "order"]
    assert found == {
        ("get", "/v1/responses/{id}"): ["stream", "starting_after"],
        ("get", "/v1/responses/{id}/input_items"): page,
        ("get", "/v1/conversations/{id}/items"): page,
        ("delete", "/v1/requests/{id}"): ["unread", "after_s"],
        ("get", "/lora-adapters"): ["model"],
        ("post", "/lora-adapters"): ["model"],
    }


def test_the_example_of_a_drain_has_the_form_of_its_answer(document: dict[str, Any]) -> None:
    answer = document["paths"]["/v1/admin/drain"]["post"]["responses"]["200"]["content"]["application/json"]["example"]
    assert answer["draining"] == {"all": {"left_s": 30.0, "ended": 0}}
    assert all(isinstance(count, int) for count in answer["models"].values())


def test_a_route_that_is_not_described_appears_with_its_docstring() -> None:
    made = make_document([("POST", "/v1/new/{id:.+}", "POST /v1/new: something new.")], metrics_path="", needs_key=True)
    operation = made["paths"]["/v1/new/{id}"]["post"]
    assert operation["summary"] == "POST /v1/new: something new."
    assert "requestBody" in operation
    OpenAPIV31SpecValidator(made).validate()


@pytest.mark.parametrize("needs_key", [True, False])
def test_an_api_key_may_be_sent_in_either_header(needs_key: bool) -> None:
    made = make_document([("GET", "/v1/models", "Models.")], metrics_path="", needs_key=needs_key)
    assert made["security"] == [*([] if needs_key else [{}]), {"key": []}, {"x_api_key": []}]
    assert made["components"]["securitySchemes"] == {
        "key": {"type": "http", "scheme": "bearer"},
        "x_api_key": {"type": "apiKey", "in": "header", "name": "X-Api-Key"},
    }
    OpenAPIV31SpecValidator(made).validate()


CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


@pytest.mark.parametrize(
    ("path", "body", "is_valid"),
    [
        ("/v1/chat/completions", CHAT, True),
        ("/v1/chat/completions", {**CHAT, "temperature": None, "stop": ["a"], "store": False}, True),
        ("/v1/chat/completions", {**CHAT, "temperature": 2.5}, False),
        ("/v1/chat/completions", {**CHAT, "top_p": 0}, False),
        ("/v1/chat/completions", {**CHAT, "seed": 2**64}, False),
        ("/v1/chat/completions", {**CHAT, "store": True}, False),
        ("/v1/chat/completions", {**CHAT, "unknown": 1}, False),
        ("/v1/chat/completions", {**CHAT, "order": ["temperature"]}, False),
        ("/v1/chat/completions", {**CHAT, "order": ["mask", "temperature"]}, True),
        ("/v1/chat/completions", {**CHAT, "logit_bias": {"5": 101}}, False),
        ("/v1/chat/completions", {**CHAT, "tools": [TOOL], "tool_choice": "required"}, True),
        ("/v1/chat/completions", {**CHAT, "tools": [{"type": "function"}]}, False),
        ("/v1/chat/completions", {**CHAT, "response_format": {"type": "json_object"}}, True),
        ("/v1/chat/completions", {**CHAT, "response_format": {"type": "xml"}}, False),
        ("/v1/chat/completions", {**CHAT, "messages": []}, False),
        ("/v1/chat/completions", {**CHAT, "messages": [{"role": "user"}]}, False),
        (
            "/v1/chat/completions",
            {
                **CHAT,
                "messages": [
                    {"role": "assistant", "content": None, "tool_calls": [CALL]},
                    {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "3"}]},
                ],
            },
            True,
        ),
        ("/v1/completions", {"model": "m", "prompt": [[1, 2], [3]]}, True),
        ("/v1/completions", {"model": "m", "prompt": [-1]}, False),
        ("/v1/generate", {"prompt": [1, 2], "session_ttl_s": 5, "session_id": ""}, True),
        ("/v1/generate", {"prompt": {}}, False),
        ("/v1/messages", {**CHAT, "max_tokens": 5, "system": [{"type": "text", "text": "Be brief."}]}, True),
        ("/v1/messages", {**CHAT, "max_tokens": 5, "thinking": {"type": "enabled"}}, False),
        ("/v1/messages", CHAT, False),
        ("/v1/tokenize", {"text": "a"}, True),
        ("/v1/tokenize", {"text": 5}, False),
        ("/v1/detokenize", {"tokens": [1, 2]}, True),
        ("/v1/session/close", {}, False),
    ],
)
def test_schema_and_reader_agree(document: dict[str, Any], path: str, body: dict[str, Any], is_valid: bool) -> None:
    read = READERS[path]
    checker = jsonschema.Draft202012Validator(body_schema(document, path))
    assert checker.is_valid(body) is is_valid
    if is_valid:
        read(body)
    else:
        with pytest.raises(InvalidRequest):
            read(body)


@pytest.mark.slow
@pytest.mark.usefixtures("kv")
def test_a_server_sends_its_document_and_answers_as_it_says(server: Server) -> None:
    answer = server.get("/openapi.json")
    assert (answer.status, answer.headers["Content-Type"]) == (200, "application/json")
    document = answer.json
    OpenAPIV31SpecValidator(document).validate()
    assert server.get("/openapi.json", {"If-None-Match": answer.headers["ETag"]}).status == 304
    schemas = {"components": document["components"]}
    requests = [
        ("POST", "/v1/chat/completions", {**CHAT, "model": MODEL, "max_tokens": 3}),
        ("POST", "/v1/chat/completions", {**CHAT, "model": MODEL, "max_tokens": 3, "logprobs": True}),
        ("POST", "/v1/chat/completions", {**CHAT, "model": "none"}),
        ("POST", "/v1/chat/completions", {"messages": 5}),
        ("POST", "/v1/completions", {"model": MODEL, "prompt": "a", "max_tokens": 3}),
        ("POST", "/v1/messages", {**CHAT, "model": MODEL, "max_tokens": 3}),
        ("POST", "/v1/messages", {}),
        ("POST", "/v1/messages/count_tokens", {**CHAT, "model": MODEL}),
        ("POST", "/v1/generate", {"prompt": "a", "max_tokens": 3}),
        ("POST", "/v1/tokenize", {"text": "abc"}),
        ("POST", "/v1/detokenize", {"tokens": [97]}),
        ("POST", "/v1/session/close", {"session_id": "none"}),
        ("GET", "/v1/models", None),
        ("GET", "/health", None),
        ("GET", "/ready", None),
        ("GET", "/v1/admin/state", None),
    ]
    for method, path, body in requests:
        got = server.request(method, path, body)
        responses = document["paths"][path][method.lower()]["responses"]
        assert str(got.status) in responses, (path, got.status)
        schema = responses[str(got.status)]["content"]["application/json"]["schema"]
        jsonschema.Draft202012Validator({**schemas, **schema}).validate(got.json)
    of_server = {("GET", path) for path in ("/v1/models", "/health", "/ready")}
    for (method, path), example in EXAMPLES.items():
        is_alone = method == "POST" and "{" not in path and not is_administration(path) and "session" not in path
        if not is_alone and (method, path) not in of_server:
            continue
        more = {} if method == "GET" or "conversations" in path else {"model": MODEL}
        more |= {"tokens": [71, 111]} if "detokenize" in path else {}
        content = None if method == "GET" else {**(example.request or {}), **more}
        got = server.ready() if path == "/ready" else server.request(method, path, content)
        assert got.status == 200, (path, got.body)
        assert set(example.answer or {}) <= set(got.json), path


@pytest.mark.slow
def test_a_client_cancels_its_request(server: Server) -> None:
    server.peers.do(lambda: setattr(server.peers, "is_stepping", False))
    try:
        body = {**CHAT, "model": MODEL, "max_tokens": 50}
        stream = server.stream("/v1/chat/completions", body, {"Idempotency-Key": "to-cancel"})
        name = stream.response.headers["X-Starling-Request"]
        assert server.request("DELETE", f"/v1/requests/{name}").json == {"id": name, "cancelled": True}
        events = stream.all()
        assert events[-2].data["error"]["code"] == "CONFLICT"
        assert server.request("DELETE", f"/v1/requests/{name}").status == 404
    finally:
        server.peers.do(lambda: setattr(server.peers, "is_stepping", True))


@pytest.mark.slow
def test_the_reader_is_served_with_its_policy_and_revalidated(server: Server) -> None:
    page = server.get("/docs")
    assert (page.status, page.headers["Content-Type"]) == (200, "text/html; charset=utf-8")
    assert "script-src 'self'" in page.headers["Content-Security-Policy"]
    assert "unsafe" not in page.headers["Content-Security-Policy"]
    assert server.get("/docs", {"If-None-Match": f'"other", W/{page.headers["ETag"]}'}).status == 304
    head = server.request("HEAD", "/docs")
    assert (head.headers["Content-Length"], head.body) == (str(len(page.body)), b"")
    assert server.get("/web/docs.js").headers["Content-Type"] == "text/javascript; charset=utf-8"
    for path in ("/web/none.js", "/web/__init__.py", "/web/..%2F__init__.py"):
        assert server.get(path).status == 404


@pytest.mark.slow
def test_without_the_page_there_is_still_the_document(make_server: MakeServer) -> None:
    running = make_server(server={"enable_page": False})
    assert running.get("/docs").status == running.get("/web/docs.js").status == 404
    assert running.get("/openapi.json").status == 200
