"""A gateway that is killed in the middle of a turn: its successor keeps the turn, once."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.gateway.kv_peer import KvPeer
from tests.gateway.peers import output
from tests.gateway.server import Server


def test_a_turn_outlives_the_gateway(make_server: Callable[..., Server], homes: Callable[[], Path]) -> None:
    server = make_server()
    kv = KvPeer(server.config, homes())
    try:
        server.wait_ready()
        body: dict[str, Any] = {"prompt": "x", "session_id": "s", "create_session": True, "max_tokens": 200,
                                "seed": 7, "ignore_eos": True}  # fmt: skip
        stream = server.stream("/v1/generate", body)
        first = next(e for e in stream.events() if e.data.get("tokens"))
        name = first.id.partition(":")[0]
        server.kill_and_restart()
        stream.close()
        answer = server.take_up(f"/v1/requests/{name}", {}).all()
        assert answer[-2].data["session_id"] == "s"
        tokens = list(b"x") + output(array("i", list(b"x")).tobytes(), 7, 0, 200)
        assert kv.held("s") == tokens
        # Its answer is asked for once more, from a third gateway: the session is not touched.
        more = server.post("/v1/generate", {"prompt": "y", "session_id": "s", "max_tokens": 1}).json
        tokens += [*b"y", *more["choices"][0]["tokens"]]
        server.kill_and_restart()
        assert server.take_up(f"/v1/requests/{name}", {}).all()[-2].data["session_id"] == "s"
        assert kv.held("s") == tokens
    finally:
        kv.stop()
