"""`starling keys` and a running gateway: scopes, limits and headers of keys that are made, replaced and revoked."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest
from click.testing import CliRunner

from pipeline.api.key_file import key_path
from starling.cli import cli
from tests.gateway.http_client import Answer
from tests.gateway.server import LONG_DAY_S, LONG_MINUTE, Server

BODY = {"prompt": "x", "max_tokens": 3, "seed": 7}
SCOPED = (
    ("models", "/v1/models"),
    ("models", "/v1/requests/req-none"),
    ("admin", "/v1/admin/state"),
    ("admin", "/lora-adapters"),
    ("metrics", "/metrics"),
)


@pytest.fixture(scope="module")
def open_server(homes: Any) -> Iterator[Server]:
    """A gateway without any key."""
    running = Server(homes())
    running.wait_ready()
    yield running
    assert running.close() == 0


def keys(server: Server, *args: str) -> Any:
    done = CliRunner(env=server.env).invoke(cli, ["keys", *args, *(["--json"] if args[0] != "revoke" else [])])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout) if args[0] != "revoke" else None


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def generate(server: Server, key: str, **fields: Any) -> Answer:
    return server.post("/v1/generate", {**BODY, **fields}, bearer(key))


def test_the_life_of_keys(open_server: Server) -> None:
    server = open_server
    assert server.post("/v1/generate", BODY).status == 200
    found = {scope: keys(server, "add", f"only-{scope}", "--scope", scope)["key"] for scope in dict(SCOPED)}
    assert server.post("/v1/generate", BODY).status == 401, "the next request needs a key"
    for has, key in found.items():
        for needs, path in SCOPED:
            answer = server.get(path, bearer(key))
            if has == needs:
                assert answer.status in (200, 404), (has, path)
            else:
                assert (answer.status, answer.error["code"]) == (403, "FORBIDDEN"), (has, path)
                assert f"the scope {needs}" in answer.error["message"], "what to ask the operator for"
    assert server.get("/metrics").status == 200, "a scrape without a key gets sums"
    assert generate(server, found["models"]).status == 200

    new = keys(server, "rotate", "only-models")["key"]
    assert generate(server, found["models"]).status == 401
    assert generate(server, new).status == 200
    keys(server, "revoke", "only-models", "only-admin", "only-metrics")
    assert generate(server, new).status == 401
    assert server.post("/v1/generate", BODY).status == 401, "without any key no client is admitted"

    path = key_path(server.home / "state")
    last = keys(server, "add", "last")["key"]
    assert generate(server, last).status == 200
    path.write_bytes(path.read_bytes()[:-9])
    assert generate(server, last).status == 200, "read before the damage"
    answer = generate(server, "sk-unknown")
    assert (answer.status, answer.error["code"]) == (503, "STORAGE_UNAVAILABLE")
    assert 'starling_state_file_errors_total{files="keys"} 1.0' in server.get("/metrics").body.decode()
    server.kill_and_restart()
    server.wait_ready()
    assert any("the key file cannot be used" in line for line in server.lines)
    for headers, status in (({}, 401), (bearer(last), 503), (bearer("sk-unknown"), 503)):
        assert server.post("/v1/generate", BODY, headers).status == status
    path.unlink()


def test_limits_of_keys_survive_the_gateway(homes: Any) -> None:
    server = Server(
        homes(),
        auth={"api_keys": [{"key": "sk-conf", "tenant": "t"}]},
        rate_limits={"requests_per_minute": 3, "tokens_per_minute": 500},
        preamble=LONG_MINUTE,
    )
    try:
        server.wait_ready()
        limits = ("--requests-per-minute", "0", "--tokens-per-day", "200", "--requests-total", "6")
        own = keys(server, "add", "own", "--tenant", "t", *limits)["key"]
        once = keys(server, "add", "once", "--max-concurrent", "1", "--requests-per-minute", "0")["key"]

        first = generate(server, "sk-conf")
        assert first.status == 200
        shown = {name.lower(): value for name, value in first.headers.items() if name.lower().startswith("x-rate")}
        used = first.json["usage"]["prompt_tokens"] + first.json["usage"]["completion_tokens"]
        assert shown["x-ratelimit-limit-requests"] == "3"
        assert shown["x-ratelimit-remaining-requests"] == "2"
        assert shown["x-ratelimit-limit-tokens"] == "500"
        assert shown["x-ratelimit-remaining-tokens"] == str(500 - used)
        assert shown["x-ratelimit-reset-requests"].endswith("s") and shown["x-ratelimit-reset-tokens"].endswith("s")
        stream = server.stream("/v1/generate", BODY, bearer("sk-conf"))
        assert stream.response.headers["x-ratelimit-remaining-requests"] == "1"
        stream.all()
        assert [generate(server, "sk-conf").status for _ in range(2)] == [200, 429]
        assert generate(server, "sk-conf").headers["x-ratelimit-remaining-requests"] == "0"

        assert [generate(server, own).status for _ in range(2)] == [200, 200], "its own limits count"
        answer = generate(server, own, max_tokens=230, ignore_eos=True)
        assert answer.status == 200
        spent = generate(server, own)
        assert (spent.status, spent.error["code"]) == (429, "RATE_LIMITED")
        assert "200 tokens per day has 0 left" in spent.error["message"]
        assert 1 <= int(spent.headers["Retry-After"]) <= LONG_DAY_S
        assert generate(server, once).status == 200  # its journal record follows the charges before it
        server.kill_and_restart()
        server.wait_ready()
        spent = generate(server, own)
        assert "200 tokens per day has 0 left" in spent.error["message"], "after the death of the gateway"
        assert generate(server, own).status == 429
        last = generate(server, own)
        assert last.error["code"] == "QUOTA_EXHAUSTED" and "6 requests in total" in last.error["message"]
        assert last.headers["x-should-retry"] == "false" and "Retry-After" not in last.headers

        server.peers.do(lambda: setattr(server.peers, "is_stepping", False))
        connection = server.connect()
        headers = {"Content-Type": "application/json", **bearer(once)}
        connection.request("POST", "/v1/generate", json.dumps(BODY).encode(), headers)
        deadline = time.monotonic() + 60
        while not server.peers.do(lambda: bool(server.peers.generator.running)):
            assert time.monotonic() < deadline, "the request has not reached the scheduler"
        refused = generate(server, once)
        assert (refused.status, refused.error["code"]) == (429, "OVERLOADED")
        assert "1 requests can be in flight with this API key" in refused.error["message"]
        server.peers.do(lambda: setattr(server.peers, "is_stepping", True))
        with connection.getresponse() as response:
            assert response.status == 200 and response.read()
        connection.close()
        assert generate(server, once).status == 200
    finally:
        server.close()
