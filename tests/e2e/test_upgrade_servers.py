"""Servers of the previous release and of this one take turns on one home; `make test-upgrade` runs it.

It takes minutes, because the kernels of the previous release have to be compiled. The answers are compared with those
of a server of this release that is never stopped.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.config import paths
from pipeline.config.schema import DEMO_MODEL
from tests.e2e import previous_release
from tests.e2e.conftest import copy_cache, share_caches
from tests.e2e.previous_release import PreviousServer
from tests.e2e.resumable import comparable, events
from tests.e2e.server import Server, wait_gone

LIMIT_S = 2400
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(LIMIT_S),
    pytest.mark.skipif(not os.environ.get("STARLING_TEST_UPGRADE"), reason="takes minutes: make test-upgrade"),
]
TURNS = (
    "Once upon a time the keeper of a lighthouse lived on a rock in the sea with a starling that could count to nine. ",
    " One day",
    " Later",
    " In the end",
)
# In flight when the previous release is killed.
LONG = {"prompt": TURNS[0], "max_tokens": 100, "ignore_eos": True, "temperature": 0.8, "seed": 7, "stream": True}


def turn(server: Server, number: int, key: str = "") -> tuple[str, int]:
    """One turn of the session: its text, and how many tokens of its prompt came from the cache."""
    body = {
        "prompt": TURNS[number],
        "session_id": "story",
        "create_session": number == 0,
        "max_tokens": 24,
        "temperature": 0,
    }
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    status, answer, _ = server.request("POST", "/v1/generate", body, headers)
    assert status == 200, answer
    return answer["choices"][0]["text"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def kill_in_a_stream(server: Server) -> str:
    """End every process of a server at once, after the first event of the long request. Returns the request's id."""
    connection = server.connect()
    try:
        connection.request("POST", "/v1/generate", json.dumps(LONG).encode(), {"Content-Type": "application/json"})
        response = connection.getresponse()
        assert response.status == 200, response.read()
        name = response.getheader("X-Request-Id")
        assert name is not None
        assert response.readline()
        pids = server.pids()
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        assert all(wait_gone(pid) for pid in pids)
    finally:
        connection.close()
    return name


@pytest.fixture
def servers(tmp_path: Path, demo_gguf: Path) -> Callable[[bool], Server]:
    """Makes a server of this release (True) or of the previous one, all with the same home and configuration."""
    tree = previous_release.unpack(tmp_path / "v0.1.0")
    home = tmp_path / "home"
    home.mkdir()
    # A copy: each release may remove kernels of others.
    copy_cache(paths.cache_dir(), home / "cache")
    config = {"models": [{"name": DEMO_MODEL, "path": str(demo_gguf), "kv_cache_mb": 128}]}

    def make(is_new: bool) -> Server:
        return Server(home, config) if is_new else PreviousServer(tree, home, config)

    return make


@pytest.fixture
def expected(tmp_path: Path, demo_gguf: Path) -> tuple[list[str], str]:
    """The texts of all turns and the long answer, by one server without an interruption."""
    home = tmp_path / "whole"
    home.mkdir()
    share_caches(home, models=True)
    with Server(home, {"models": [{"name": DEMO_MODEL, "kv_cache_mb": 128}]}) as server:
        texts = [turn(server, number)[0] for number in range(len(TURNS))]
        return texts, comparable([data for _, data in events(server, "/v1/generate", LONG, {})])


def test_servers_of_both_releases_continue_each_others_work(
    servers: Callable[[bool], Server], expected: tuple[list[str], str]
) -> None:
    texts, long_answer = expected
    with servers(False) as server:
        assert turn(server, 0)[0] == texts[0]
        assert server.stop(signal.SIGINT) == 0
    with servers(False) as server:
        name = kill_in_a_stream(server)

    # The upgrade, after a crash: what was in flight ends, and the session goes on from the pages that were saved.
    with servers(True) as server:
        assert comparable([data for _, data in events(server, f"/v1/requests/{name}", None, {})]) == long_answer
        text, n_cached = turn(server, 1)
        assert text == texts[1]
        assert n_cached >= 32
        answer = server.post("/v1/responses", model=DEMO_MODEL, input="Name a colour.", max_output_tokens=8)
        made = subprocess.run(
            [sys.executable, "-m", "starling", "keys", "add", "client", "--tenant", "default", "--json"],
            env=server.environment,
            capture_output=True,
            text=True,
            check=True,
        )
        key: str = json.loads(made.stdout)["key"]
        server.stop(signal.SIGINT)

    # The way back. This release's keys do not count there.
    with servers(False) as server:
        text, n_cached = turn(server, 2)
        assert text == texts[2]
        assert n_cached >= 32
        assert server.stop(signal.SIGINT) == 0

    # And forward again: keys and stored responses are there.
    with servers(True) as server:
        assert server.request("GET", f"/v1/responses/{answer['id']}")[0] == 401
        text, n_cached = turn(server, 3, key)
        assert text == texts[3]
        assert n_cached >= 32
        status, stored, _ = server.request(
            "GET", f"/v1/responses/{answer['id']}", None, {"Authorization": f"Bearer {key}"}
        )
        assert status == 200
        assert stored["output"] == answer["output"]
        server.stop(signal.SIGINT)
        assert server.leftovers() == []
