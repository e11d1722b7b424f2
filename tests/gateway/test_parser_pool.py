"""Large and compressed bodies: parsed in other processes, with bounds, and with the same results."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import signal
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.api.content_coding import decompress
from pipeline.errors import InvalidRequest, StarlingError, TooLarge
from stages.gateway.endpoints.body_readers import Body
from stages.gateway.http import parser_pool
from stages.gateway.http.parser_pool import INLINE_BYTES
from tests.gateway.server import MakeServer, Server

PROMPT = "A long prompt, with {brackets}, and commas. " * 90
BODY = {"prompt": PROMPT, "max_tokens": 8, "seed": 3}


def parsers_of(server: Server) -> list[int]:
    """Pids of the gateway's parser processes."""
    children = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text().split()
    return [int(p) for p in children if b"parser_process" in Path(f"/proc/{p}/cmdline").read_bytes()]


def padded(body: dict, n: int = 2 * INLINE_BYTES) -> bytes:
    """The body with so much white space that it is parsed in another process."""
    return json.dumps(body).encode() + b" " * n


def test_a_body_is_read_in_the_same_way_in_another_process(server: Server) -> None:
    small, large = server.post("/v1/generate", BODY), server.post("/v1/generate", padded(BODY))
    assert parsers_of(server)
    assert small.json["choices"] == large.json["choices"]
    ids = list(PROMPT.encode()) * 1
    assert server.post("/v1/generate", {**BODY, "prompt": ids}).json["choices"] == small.json["choices"]
    for bad in ({"prompt": 5}, {"prompt": "x", "n": 99}, {"prompt": [1, -1]}, {"a" * 300_000: 1}, {}):
        inline, elsewhere = server.post("/v1/generate", bad), server.post("/v1/generate", padded(bad))
        assert (inline.status, inline.error) == (elsewhere.status, elsewhere.error)
    text = server.post("/v1/detokenize", padded({"tokens": ids})).json["text"]
    assert text == PROMPT
    assert server.post("/v1/tokenize", padded({"text": PROMPT})).json["tokens"] == ids


@pytest.mark.parametrize("coding", ["gzip", "deflate"])
def test_compressed_bodies(server: Server, coding: str) -> None:
    data = json.dumps(BODY).encode()
    packed = gzip.compress(data) if coding == "gzip" else zlib.compress(data)
    expected = server.post("/v1/generate", BODY).json["choices"]
    assert server.post("/v1/generate", packed, {"Content-Encoding": coding}).json["choices"] == expected
    bomb = b'{"prompt": "' + b"a" * 7_000_000 + b'"}'
    packed = gzip.compress(bomb) if coding == "gzip" else zlib.compress(bomb)
    refused = server.post("/v1/generate", packed, {"Content-Encoding": coding})
    assert (refused.status, refused.error["code"]) == (400, "INVALID_REQUEST")
    assert "32 times" in refused.error["message"]
    assert server.post("/v1/generate", data, {"Content-Encoding": coding}).status == 400
    assert server.post("/v1/generate", data, {"Content-Encoding": "br"}).status == 415


def test_the_ratio_and_the_size_are_bounded_before_the_body_is_held() -> None:
    for data in (b"", b"{}", os.urandom(100_000), b"x" * 60_000):
        assert decompress(gzip.compress(data), "gzip", 1 << 20) == data
        assert decompress(zlib.compress(data), "deflate", 1 << 20) == data
        raw = zlib.compressobj(wbits=-15)
        assert decompress(raw.compress(data) + raw.flush(), "deflate", 1 << 20) == data
    with pytest.raises(InvalidRequest, match="32 times"):
        decompress(gzip.compress(b"x" * 8_000_000), "gzip", 16 << 20)
    with pytest.raises(TooLarge):
        decompress(gzip.compress(os.urandom(1000)), "gzip", 999)
    with pytest.raises(InvalidRequest, match="complete"):
        decompress(gzip.compress(b"x" * 1000)[:-3], "gzip", 1 << 20)
    with pytest.raises(StarlingError, match="gzip, gzip"):
        decompress(gzip.compress(b"x"), "gzip, gzip", 1 << 20)


def wait_until_gone(server: Server, pids: list[int]) -> None:
    """Return when the gateway has collected these children."""
    deadline = time.monotonic() + 60
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def written_bytes(server: Server) -> int:
    """What the gateway has written, to whatever files and sockets (proc(5), `/proc/pid/io`)."""
    fields = dict(line.split(": ") for line in Path(f"/proc/{server.process.pid}/io").read_text().splitlines())
    return int(fields["wchar"])


def test_a_parser_killed_between_two_bodies_fails_none(server: Server) -> None:
    for _ in range(3):
        expected = server.post("/v1/generate", padded(BODY)).json["choices"]
        killed = parsers_of(server)
        assert killed
        for pid in killed:
            os.kill(pid, signal.SIGKILL)
        wait_until_gone(server, killed)
        for _ in range(2):
            assert server.post("/v1/generate", padded(BODY)).json["choices"] == expected


def test_a_parser_killed_while_it_has_a_body_fails_none(server: Server) -> None:
    expected = server.post("/v1/generate", padded(BODY)).json["choices"]
    killed = parsers_of(server)
    for pid in killed:
        os.kill(pid, signal.SIGSTOP)
    before = written_bytes(server)
    with ThreadPoolExecutor(1) as client:
        answer = client.submit(server.post, "/v1/generate", padded(BODY, 8 * INLINE_BYTES))
        while written_bytes(server) < before + INLINE_BYTES // 2:  # a part of the body is in the pipe
            assert not answer.done()
            time.sleep(0.01)
        for pid in killed:
            os.kill(pid, signal.SIGKILL)
        assert answer.result().json["choices"] == expected


def post_until_parsed(server: Server) -> None:
    """On a busy machine a parser may not have started within the limit."""
    deadline = time.monotonic() + 120
    while (answer := server.post("/v1/generate", padded(BODY))).status != 200:
        assert answer.error["code"] == "TIMEOUT"
        assert time.monotonic() < deadline


def test_a_parser_that_does_not_answer_is_killed(make_server: MakeServer) -> None:
    server = make_server(preamble="import stages.gateway.http.parser_pool as p; p.TIME_LIMIT_S = 5.0")
    server.wait_ready()
    post_until_parsed(server)
    stopped = parsers_of(server)
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    refused = server.post("/v1/generate", padded(BODY))
    assert (refused.status, refused.error["code"]) == (503, "TIMEOUT")
    post_until_parsed(server)
    assert not set(stopped) & set(parsers_of(server))


class HeldParsers:
    """A pool whose processes are replaced by functions that answer when `may_answer` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.may_answer = asyncio.Event()
        self.under_way: list[bytes] = []

        async def start() -> Any:
            return SimpleNamespace(child=SimpleNamespace(returncode=None))

        async def end(process: Any) -> None:
            return

        async def exchange(process: Any, body: Body) -> tuple[bool, Any]:
            self.under_way.append(bytes(body.data))
            await self.may_answer.wait()
            return True, "parsed"

        for name, function in (("_start", start), ("_end", end), ("_exchange", exchange)):
            monkeypatch.setattr(parser_pool, name, function)
        self.pool = parser_pool.ParserPool()

    def read(self, data: bytes, tenant: str = "t") -> asyncio.Task[Any]:
        return asyncio.ensure_future(self.pool.read(Body(bytearray(data), "generate", "", "gzip", 1 << 20), tenant))


async def turns() -> None:
    """Let everything run that waits for nothing else."""
    for _ in range(20):
        await asyncio.sleep(0)


async def test_a_body_does_not_wait_for_one_that_an_idle_parser_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both come before the parser runs."""
    parsers = HeldParsers(monkeypatch)
    parsers.may_answer.set()
    assert await parsers.read(b"first") == "parsed"
    parsers.may_answer.clear()
    both = [parsers.read(b"second"), parsers.read(b"third")]
    await turns()
    assert parsers.under_way == [b"first", b"second", b"third"]
    parsers.may_answer.set()
    assert await asyncio.gather(*both) == ["parsed", "parsed"]
    await parsers.pool.close()


async def test_bodies_of_clients_that_have_left_are_dropped_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while no parser becomes free: nothing counts their bytes any more."""
    parsers = HeldParsers(monkeypatch)
    busy = [parsers.read(b"one"), parsers.read(b"two", "u")]
    await turns()
    left = [parsers.read(b"same", tenant) for tenant in ("t", "u") for _ in range(3)]
    stays = parsers.read(b"same")
    await turns()
    assert len(parsers.pool._waiting) == 7
    for task in left:
        task.cancel()
    await asyncio.wait(left)
    assert len(parsers.pool._waiting) == 1
    parsers.may_answer.set()
    assert await asyncio.gather(*busy, stays) == ["parsed"] * 3
    assert parsers.under_way == [b"one", b"two", b"same"]
    await parsers.pool.close()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_parsers_end_with_the_gateway(make_server: MakeServer, number: int) -> None:
    server = make_server()
    server.wait_ready()
    assert server.post("/v1/generate", padded(BODY)).status == 200
    pids = parsers_of(server)
    assert pids
    server.process.send_signal(number)
    server.process.wait(60)
    deadline = time.monotonic() + 60
    while any(Path(f"/proc/{pid}/cmdline").exists() and Path(f"/proc/{pid}/cmdline").read_bytes() for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (("INVALID_REQUEST", "why", "n", 400), ("INVALID_REQUEST", ("", ""))),
        (("INVALID_REQUEST", "why", "n", 400, ("m", "s"), "more"), ("INVALID_REQUEST", ("m", "s"))),
        (("INVALID_REQUEST", "why"), ("INTERNAL", ("", ""))),
        (None, ("INTERNAL", ("", ""))),
    ],
)
async def test_an_answer_of_another_release_is_read_or_refused(
    monkeypatch: pytest.MonkeyPatch, answer: Any, expected: tuple[str, tuple[str, str]]
) -> None:
    async def exchange(process: asyncio.subprocess.Process, body: Body) -> tuple[bool, Any]:
        return False, answer

    monkeypatch.setattr(parser_pool, "_exchange", exchange)
    pool = parser_pool.ParserPool()
    try:
        with pytest.raises(StarlingError) as refused:
            async with asyncio.timeout(60):
                await pool.read(Body(padded(BODY), "generate", "application/json", "", 1 << 20), "t")
    finally:
        await pool.close()
    assert (refused.value.code, refused.value.names) == expected
