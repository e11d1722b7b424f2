"""/metrics needs no key: what it costs is no time of requests."""

from __future__ import annotations

import os
import threading
from pathlib import Path

from pipeline.observe.exposition import CONTENT_TYPE
from tests.gateway.http_client import Answer
from tests.gateway.peers import MODEL
from tests.gateway.server import MakeServer

# Rendering waits until the test has closed its end of a pipe.
HELD = """
import pipeline.observe.exposition as e
merge = e.merge
def held(snapshots):
    with open({path!r}) as pipe:
        pipe.read()
    return merge(snapshots)
e.merge = held
"""
BODY = {"model": MODEL, "prompt": "abc", "max_tokens": 3, "seed": 1, "ignore_eos": True}


def test_requests_are_served_while_metrics_are_rendered(make_server: MakeServer, tmp_path: Path) -> None:
    path = tmp_path / "held"
    os.mkfifo(path)
    server = make_server(preamble=HELD.format(path=str(path)))
    server.wait_ready()
    scraped: list[Answer] = []
    client = threading.Thread(target=lambda: scraped.append(server.get("/metrics")))
    client.start()
    with path.open("w"):  # waits for the reader
        assert server.get("/health").status == 200
        assert server.post("/v1/completions", BODY).status == 200
    client.join()
    (answer,) = scraped
    assert (answer.status, answer.headers["Content-Type"]) == (200, CONTENT_TYPE)
    assert b"starling_requests_in_flight 0.0\n" in answer.body, "of the moment before"
