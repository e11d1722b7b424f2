"""Adapters as vLLM's and llama-server's clients manage them: who may, and what is understood or refused by name."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.config.load import resolve
from pipeline.errors import InvalidRequest, ModelNotFound
from pipeline.models import versions
from stages.gateway.admin import LOAD_TIMEOUT_S, UNLOAD_TIMEOUT_S, Admin
from stages.gateway.endpoints.lora_adapters import read_load, read_scales, read_unload
from stages.gateway.http.adapter_endpoints import find_adapter
from stages.gateway.versions.catalog import VersionCatalog
from tests.gateway.peers import MODEL
from tests.gateway.server import MakeServer, Server

LOAD, UNLOAD, LIST = "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/lora-adapters"
ADMIN, USER = ({"Authorization": f"Bearer sk-{name}"} for name in ("admin", "user"))
KEYS = [{"key": "sk-admin", "admin": True}, {"key": "sk-user"}]


@pytest.fixture(scope="module")
def server(homes: Callable[[], Path]) -> Iterator[Server]:
    running = Server(homes(), auth={"api_keys": KEYS})
    running.wait_ready()
    yield running
    assert running.close() == 0


def catalog_of(**models: tuple[str, ...]) -> VersionCatalog:
    """A catalog of loaded models, each with the adapters of these names."""
    config = resolve(
        {
            "models": [
                {
                    "name": name,
                    "path": f"/{name}.gguf",
                    "adapters": [{"name": one, "path": f"/{one}"} for one in adapters],
                }
                for name, adapters in models.items()
            ]
        },
        {},
    )
    return VersionCatalog(config, versions.initial(config), lambda table: None)


@pytest.mark.slow
@pytest.mark.parametrize(("method", "path"), [("POST", LOAD), ("POST", UNLOAD), ("GET", LIST), ("POST", LIST)])
def test_only_administrators_manage_adapters(server: Server, method: str, path: str) -> None:
    body = None if method == "GET" else {}
    assert server.request(method, path, body).status == 401
    assert server.request(method, path, body, USER).error["code"] == "FORBIDDEN"
    assert server.request(method, path, body, ADMIN).status in (200, 400)


@pytest.mark.slow
def test_a_server_without_keys_has_no_administrators(make_server: MakeServer) -> None:
    without = make_server()
    without.wait_ready()
    assert [without.request(method, path, {}).status for method, path in (("POST", LOAD), ("POST", LIST))] == [403, 403]


@pytest.mark.slow
def test_the_list_of_a_model_without_adapters(server: Server) -> None:
    assert server.request("GET", LIST, None, ADMIN).json == []
    assert server.request("GET", f"{LIST}?model={MODEL}", None, ADMIN).json == []
    assert server.request("GET", f"{LIST}?model=none", None, ADMIN).error["code"] == "MODEL_NOT_FOUND"
    assert server.request("GET", f"{LIST}?slot=1", None, ADMIN).error["param"] == "slot"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (LOAD, {"lora_name": "x"}, "lora_path"),
        (LOAD, {"lora_name": "x", "lora_path": "relative"}, "lora_path"),
        (LOAD, {"lora_name": "x", "lora_path": "https://host/x"}, "lora_path"),
        (LOAD, {"lora_name": "-x", "lora_path": "/x"}, "lora_name"),
        (LOAD, {"lora_name": "x", "lora_path": "/x", "is_3d_lora_weight": True}, "is_3d_lora_weight"),
        (UNLOAD, {"lora_name": "x", "lora_int_id": 1}, "lora_int_id"),
        (LIST, [{"id": 0, "scale": 0.5}], "[0].scale"),
        (LIST, [{"id": 0, "scale": 0}], "[0].id"),
        (LIST, {"id": 0}, None),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(server: Server, path: str, body: Any, param: str | None) -> None:
    got = server.request("POST", path, body, ADMIN)
    assert (got.status, got.error["code"], got.error["param"]) == (400, "INVALID_REQUEST", param)


@pytest.mark.slow
def test_an_adapter_that_is_not_there_cannot_be_unloaded(server: Server) -> None:
    for name in ("x", f"{MODEL}:x"):
        got = server.request("POST", UNLOAD, {"lora_name": name}, ADMIN)
        assert (got.status, got.error["code"]) == (404, "MODEL_NOT_FOUND")
    assert server.request("POST", LIST, [], ADMIN).json == {"success": True}


@pytest.mark.parametrize(("target", "timeout_s"), [("m", UNLOAD_TIMEOUT_S), ("m:a", LOAD_TIMEOUT_S)])
async def test_an_unload_of_an_adapter_has_the_time_of_a_load(tmp_path: Path, target: str, timeout_s: float) -> None:
    """A version of the model without it is loaded; requests in flight finish on the other one, however long."""
    unloaded: list[tuple[str, float]] = []
    loader = SimpleNamespace(
        is_known=lambda change: False,
        unload=lambda name, change, seconds: unloaded.append((name, seconds)),
        report=lambda change: {"done": True},
    )
    admin = Admin(SimpleNamespace(loader=loader), tmp_path / "drains")  # type: ignore[arg-type]
    for given in ({}, {"timeout_s": 7.0}):
        assert (await admin._change("unload", {"target": target, **given}))["done"]
    assert unloaded == [(target, timeout_s), (target, 7.0)]


def test_names_of_adapters_and_their_models() -> None:
    one = catalog_of(m=("a", "b"))
    assert find_adapter(one, "c") == ("m", "c")
    assert find_adapter(one, "m:c") == ("m", "c")
    assert find_adapter(one, "a", is_known=True) == ("m", "a")
    with pytest.raises(ModelNotFound, match="no loaded model has an adapter 'c'"):
        find_adapter(one, "c", is_known=True)
    two = catalog_of(m=("a", "b"), n=("b",))
    assert find_adapter(two, "a", is_known=True) == ("m", "a")
    for is_known in (True, False):
        with pytest.raises(InvalidRequest, match="can be of 2 models: name m:b or n:b"):
            find_adapter(two, "b", is_known=is_known)


def test_a_request_may_name_an_adapter_alone() -> None:
    catalog = catalog_of(m=("a", "b"), n=("b", "m"))
    assert catalog.resolve_adapter("a") == ("m", "a")
    assert catalog.resolve_adapter("m") == ("m", ""), "models come first"
    with pytest.raises(
        ModelNotFound, match=re.escape("adapter 'b' belongs to several models; ask for one of m:b and n:b")
    ):
        catalog.resolve_adapter("b")
    with pytest.raises(ModelNotFound, match="there is no model 'c'"):
        catalog.resolve_adapter("c")


def test_bodies() -> None:
    assert read_load({"lora_name": "x", "lora_path": "/x", "load_inplace": True}) == ("x", "/x", True)
    assert read_load({"lora_name": "x", "lora_path": "/x", "is_3d_lora_weight": False}) == ("x", "/x", False)
    assert read_unload({"lora_name": "m:x", "lora_int_id": None}) == "m:x"
    assert read_scales([{"id": 1, "scale": 0}, {"id": 0, "scale": 0.0}]) == (1, 0)
    for body, name in (
        ([1], "[0]"),
        ([{"id": 0}], "[0].scale"),
        ([{"id": -1, "scale": 0}], "[0].id"),
        ([{"id": 0, "scale": 0}, {"id": 1, "scale": 1}], "[1].scale"),
        ([{"id": 0, "scale": 0, "name": "x"}], "[0].name"),
    ):
        with pytest.raises(InvalidRequest) as raised:
            read_scales(body)
        assert raised.value.param == name
    with pytest.raises(InvalidRequest, match="at most 64"):
        read_scales([{"id": 0, "scale": 0}] * 65)
