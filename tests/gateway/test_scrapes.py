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
# What is asked for, instead of metrics.
SHOWN = """
from pipeline.observe.scrapes import Scrapes
async def body(self, variant):
    return str(variant.is_paced).encode()
Scrapes.body = body
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


def test_keys_that_may_read_metrics_wait_for_no_pause(make_server: MakeServer) -> None:
    server = make_server(
        preamble=SHOWN, auth={"api_keys": [{"key": "sk-admin", "admin": True}, {"key": "sk-plain", "tenant": "a"}]}
    )
    for kind in ("text/plain", "application/openmetrics-text"):
        admin = server.get("/metrics", {"Authorization": "Bearer sk-admin", "Accept": kind})
        plain = server.get("/metrics", {"Authorization": "Bearer sk-plain", "Accept": kind})
        assert (admin.body, plain.body, server.get("/metrics", {"Accept": kind}).body) == (b"False", b"True", b"True")


def test_without_keys_all_scrapes_are_paced(make_server: MakeServer) -> None:
    server = make_server(preamble=SHOWN)
    assert server.get("/metrics").body == server.get("/metrics", {"X-Api-Key": "sk-admin"}).body == b"True"
