"""Keys of `starling keys` at the orchestrator: limits of a key, and tenant and priority at the engines."""

from __future__ import annotations

import json
from contextlib import closing, suppress
from typing import Any

from click.testing import CliRunner

from pipeline.config import paths
from pipeline.config.load import load
from pipeline.fleet import token
from pipeline.observe.metrics import Metrics
from starling.cli import cli
from tests.e2e.server import poll_until
from tests.gateway.peers import MODEL
from tests.gateway.server import Server
from tests.orchestrator.fleet import Fleet
from tests.orchestrator.streams import BODY, hold, step


def keys(fleet: Fleet, *words: str) -> Any:
    environment = {"STARLING_HOME": str(fleet.home), "STARLING_CONFIG": str(fleet.home / "starling.yaml")}
    done = CliRunner().invoke(cli, ["keys", *words], env=environment)
    assert done.exit_code == 0, done.output
    return json.loads(done.output) if "--json" in words else None


def test_a_key_has_its_limits_and_its_tenant(fleet: Fleet, engines: list[Server]) -> None:
    fleet.wait(lambda state: all(one["health"] == "READY" for one in state["agents"]))
    made = keys(fleet, "add", "alice", "--tenant", "team", "--priority", "5", "--requests-per-day", "2", "--json")
    mine = {"Authorization": f"Bearer {made['key']}"}
    answer = fleet.post("/v1/generate", BODY, mine)
    assert answer.status == 200, answer.body
    assert answer.headers["x-ratelimit-remaining-requests"] == "1"
    name = answer.headers["X-Starling-Request"]
    (sent,) = [one for engine in engines for one in engine.peers.generator.submitted if one.request == name]
    assert (sent.tenant, sent.priority) == ("team", 5)
    assert fleet.get(f"/v1/requests/{name}", mine).body == answer.body
    streamed = fleet.post("/v1/generate", {**BODY, "stream": True}, mine)
    assert (streamed.status, streamed.headers["x-ratelimit-remaining-requests"]) == (200, "0")
    refused = fleet.post("/v1/generate", BODY, mine)
    assert (refused.status, refused.error["code"]) == (429, "RATE_LIMITED")
    assert fleet.get("/v1/fleet", mine).status == 403
    operator = keys(fleet, "add", "ops", "--scope", "admin", "--json")
    header = {"Authorization": f"Bearer {operator['key']}"}
    assert fleet.get("/v1/fleet", header).status == 200
    assert fleet.post("/v1/generate", BODY, header).status == 403
    keys(fleet, "revoke", "alice")
    assert fleet.post("/v1/generate", BODY, mine).error["code"] == "INVALID_API_KEY"


def test_a_key_with_one_request_in_flight_can_cancel_it(fleet: Fleet, engines: list[Server]) -> None:
    fleet.wait(lambda state: all(one["health"] == "READY" for one in state["agents"]))
    made = keys(fleet, "add", "carol", "--max-concurrent", "1", "--json")
    mine = {"Authorization": f"Bearer {made['key']}"}
    for engine in engines:
        hold(engine)
    try:
        with closing(fleet.connect()) as connection:
            body = json.dumps({**BODY, "stream": True}).encode()
            connection.request("POST", "/v1/generate", body, {"Content-Type": "application/json", **mine})
            fleet.wait(lambda state: any(one["under_way"] for one in state["agents"]))
            poll_until(lambda: any(engine.peers.generator.running for engine in engines))
            step(next(engine for engine in engines if engine.peers.generator.running), 1)
            response = connection.getresponse()
            path = f"/v1/requests/{response.headers['X-Starling-Request']}"
            assert fleet.get(path, mine).status == 429
            cancelled = fleet.request("DELETE", path, None, mine)
            assert cancelled.status == 200, cancelled.body
            assert b"cancelled by its client" in response.read()
    finally:
        for engine in engines:
            hold(engine, False)
        keys(fleet, "revoke", "carol")


def test_what_generates_no_text_counts_within_the_quota_of_tokens(fleet: Fleet) -> None:
    fleet.wait(lambda state: all(one["health"] == "READY" for one in state["agents"]))
    made = keys(fleet, "add", "bob", "--tokens-per-day", "10", "--json")
    mine = {"Authorization": f"Bearer {made['key']}"}
    text = "x" * 100
    for path, body in (
        ("/v1/tokenize", {"text": text}),
        ("/v1/detokenize", {"tokens": [1] * 20}),
        ("/v1/embeddings", {"input": text}),
        ("/v1/rerank", {"query": "x", "documents": [text]}),
        ("/v1/score", {"text_1": "x", "text_2": text}),
        ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": text}]}),
    ):
        refused = fleet.post(path, {"model": MODEL, **body}, mine)
        assert refused.status == 429 and b"tokens per day" in refused.body, (path, refused.body)
    keys(fleet, "revoke", "bob")


def test_metrics_name_the_tenants_of_a_server_of_the_same_home_as_that_does(
    fleet: Fleet, engines: list[Server]
) -> None:
    made = keys(fleet, "add", "scraper", "--scope", "metrics", "--json")["key"]
    other = keys(fleet, "add", "other", "--tenant", "other", "--json")["key"]
    scrapers = [made, fleet.secret, token.for_metrics(fleet.secret)]
    environment = {"STARLING_HOME": str(fleet.home)}
    directory = paths.arena_dir(load(fleet.home / "starling.yaml", environment), environment)
    directory.mkdir(parents=True, exist_ok=True)
    try:
        server = Metrics("gateway", directory)
        server.add("starling_tenant_tokens_total", "acme")
        server.publish()
        metrics = fleet.get("/metrics").body.decode()
        named = [fleet.get("/metrics", {"Authorization": f"Bearer {key}"}).body.decode() for key in scrapers]
        refused = [fleet.get("/metrics", {"Authorization": f"Bearer {key}"}).status for key in (other, "sk-unknown")]
    finally:
        (directory / "gateway.metrics").unlink()
        with suppress(OSError):  # the orchestrator has files there
            directory.rmdir()
    assert 'starling_tenant_tokens_total{tenant="all"} 1.0' in metrics
    assert "acme" not in metrics
    assert all('starling_tenant_tokens_total{tenant="acme"} 1.0' in text for text in named)
    assert refused == [403, 401]
    # The token for metrics is no operator's.
    assert fleet.get("/v1/fleet", {"Authorization": f"Bearer {scrapers[-1]}"}).status == 401
    for name in ("scraper", "other"):
        keys(fleet, "revoke", name)
