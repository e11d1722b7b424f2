"""A gateway that is killed in the middle of a turn: its successor commits the turn exactly once."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.gateway.kv_peer import KvPeer
from tests.gateway.peers import output
from tests.gateway.server import Server


def test_a_tenants_cache_salt_and_the_configured_time_to_live(
    make_server: Callable[..., Server], homes: Callable[[], Path]
) -> None:
    keys = [
        {"key": "sk-a", "tenant": "a", "cache_salt": "blue"},
        {"key": "sk-a2", "tenant": "a", "cache_salt": "blue"},
        {"key": "sk-b", "tenant": "b"},
    ]
    server = make_server(auth={"api_keys": keys}, cache={"session_ttl_s": 60, "responses": {"enabled": True}})
    kv = KvPeer(server.config, homes())

    def ask(key: str, **more: Any) -> Any:
        body = {"prompt": "x", "max_tokens": 3, "seed": 7, **more}
        return server.post("/v1/generate", body, {"Authorization": f"Bearer {key}"})

    def salts() -> list[str]:
        return [frame.cache_salt for frame in server.peers.do(lambda: list(server.peers.generator.submitted))]

    try:
        server.wait_ready()
        for key, more in (
            ("sk-a", {}),
            ("sk-b", {}),
            ("sk-a", {"cache_salt": "own"}),
            ("sk-b", {"cache_salt": "own"}),
            ("sk-b", {"cache_salt": "blue"}),
        ):
            assert ask(key, **more).headers["X-Starling-Cache"] == "miss"
        assert len(set(salts())) == 5
        assert salts()[:2] == ["blue\0", "\x01b\0"]
        assert ask("sk-a2").headers["X-Starling-Cache"] == "hit"
        # Later turns may omit the session's salt or repeat it, but not change it.
        name = ask("sk-a", session_id="", cache_salt="own").json["session_id"]
        assert ask("sk-a2", session_id=name).status == 200
        assert ask("sk-a", session_id=name, cache_salt="own").status == 200
        assert ask("sk-a", session_id=name, cache_salt="other").status == 400
        assert set(salts()[5:]) == {salts()[2]}
        assert ask("sk-b", session_id=name).status == 404
        kv.do(lambda: setattr(kv, "late_s", 30.0))
        assert ask("sk-a", session_id=name).status == 200
        kv.do(lambda: setattr(kv, "late_s", 30.0 + 61.0))
        assert ask("sk-a", session_id=name).status == 404
    finally:
        kv.stop()


def test_a_turn_outlives_the_gateway(make_server: Callable[..., Server], homes: Callable[[], Path]) -> None:
    server = make_server()
    kv = KvPeer(server.config, homes())
    try:
        server.wait_ready()
        body: dict[str, Any] = {
            "prompt": "x",
            "session_id": "s",
            "create_session": True,
            "max_tokens": 200,
            "seed": 7,
            "ignore_eos": True,
        }
        stream = server.stream("/v1/generate", body)
        first = next(e for e in stream.events() if e.data.get("tokens"))
        name = first.id.partition(":")[0]
        server.kill_and_restart()
        stream.close()
        answer = server.resume(f"/v1/requests/{name}", {}).all()
        assert answer[-2].data["session_id"] == "s"
        tokens = list(b"x") + output(array("i", list(b"x")).tobytes(), 7, 0, 200)
        assert kv.held("s") == tokens
        # A third gateway generates the answer again without changing the session.
        more = server.post("/v1/generate", {"prompt": "y", "session_id": "s", "max_tokens": 1}).json
        tokens += [*b"y", *more["choices"][0]["tokens"]]
        server.kill_and_restart()
        assert server.resume(f"/v1/requests/{name}", {}).all()[-2].data["session_id"] == "s"
        assert kv.held("s") == tokens
    finally:
        kv.stop()
