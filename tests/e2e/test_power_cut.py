"""Every process is killed at once, as by a power cut: a restart restores sessions, streams, quotas and caches."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.command import starling
from tests.e2e.conftest import share_caches
from tests.e2e.resumable import comparable, events
from tests.e2e.server import Server
from tools.tiny_gguf import SHAPES, write_model

pytestmark = pytest.mark.slow

MINE = {"Authorization": "Bearer sk-mine"}
PROMPT = [(i * 37) % 290 + 1 for i in range(200)]
SAMPLED: dict[str, Any] = {"ignore_eos": True, "temperature": 0.9, "seed": 3}
LONG: dict[str, Any] = {"prompt": PROMPT, **SAMPLED, "max_tokens": 1500, "n": 4, "stream": True}


def test_a_restart_restores_sessions_streams_quotas_and_caches(tmp_path: Path) -> None:
    share_caches(tmp_path)
    path = write_model(tmp_path / "tiny.gguf", SHAPES["small"])
    config = {
        "models": [{"name": "tiny", "path": str(path), "kv_cache_mb": 16, "ranks": 2}],
        "auth": {"api_keys": [{"key": "sk-mine", "tenant": "mine"}]},
    }
    with Server(tmp_path, config) as server:
        # In total, as a quota of a minute is given back while the server starts.
        key = json.loads(starling(server, "keys", "add", "other", "--requests-total", "4", "--json"))["key"]
        other = {"Authorization": f"Bearer {key}"}

        def ask(headers: dict[str, str], **body: Any) -> tuple[int, Any]:
            code, answer, _ = server.request("POST", "/v1/generate", {**SAMPLED, "max_tokens": 20, **body}, headers)
            return code, answer

        # The other tenant computes the expected answers, and uses up its quota.
        second = {"prompt": [7, 8, 9], "seed": 4}
        _, first = ask(other, prompt=PROMPT[:50], session_id="")
        _, whole = ask(other, **second, session_id=first["session_id"])
        undisturbed = comparable([data for _, data in events(server, "/v1/generate", LONG, other)])
        assert [ask(other, prompt=[1])[0] for _ in range(2)] == [200, 429]

        _, opened = ask(MINE, prompt=PROMPT[:50], session_id="")
        begun = []
        with contextlib.suppress(OSError, ValueError):
            for event in events(server, "/v1/generate", LONG, MINE):
                begun.append(event)
                if len(begun) == 60:
                    server.kill_all()
        server.stop()
        assert server.leftovers()  # sockets and arenas, as after a crash
        server.start().wait_ready()

        assert ask(other, prompt=[1])[0] == 429
        last = begun[-1][0]
        resumed = list(events(server, f"/v1/requests/{last.partition(':')[0]}", None, {**MINE, "Last-Event-ID": last}))
        assert comparable([data for _, data in begun + resumed]) == undisturbed
        code, turn = ask(MINE, **second, session_id=opened["session_id"])
        assert code == 200, turn
        assert turn["choices"] == whole["choices"]
        assert turn["usage"]["prompt_tokens"] == whole["usage"]["prompt_tokens"]
        code, again = ask(MINE, prompt=PROMPT)
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= 160
        server.stop()
        assert server.leftovers() == []
        assert server.pids() == {}
