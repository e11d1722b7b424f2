"""A gateway that speaks TLS: its answers, connections that it ends, new certificates, this repository's clients."""

from __future__ import annotations

import asyncio
import itertools
import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from pipeline.errors import ConfigError, ModelUnavailable
from pipeline.runtime.process import EXIT_CONFIG
from starling.bench.connection import Sender, Target
from starling.bench.response import ClientRequest
from starling.chaos.client import Client
from starling.cli.up import _answers_ready
from starling.client import address as addresses
from starling.client.answer import Answer, get_json
from tests.gateway.peers import MODEL
from tests.gateway.raw_http import raw_request, read_to_end, split_responses
from tests.gateway.server import Server
from tests.tls_files import DATA, der, place, trusting

WAIT_S = 60.0
SHORT: dict[str, Any] = {"prompt": "x", "max_tokens": 20, "seed": 1, "ignore_eos": True}
LONG: dict[str, Any] = {"prompt": "long", "max_tokens": 290, "seed": 7, "ignore_eos": True}


@pytest.fixture(scope="module")
def make_tls(homes: Callable[[], Path]) -> Iterator[Callable[..., Server]]:
    """Make a server with certificate `one`; by default without a journal."""
    servers: list[Server] = []

    def make(preamble: str = "", **section: Any) -> Server:
        home = homes()
        cert, key = place(home, "one")
        server = {"tls_cert": str(cert), "tls_key": str(key), **section}
        servers.append(Server(home, preamble=preamble, server=server))
        servers[-1].tls = trusting()
        servers[-1].wait_ready()
        return servers[-1]

    yield make
    for running in servers:
        assert running.close() == 0


@pytest.fixture(scope="module")
def server(make_tls: Callable[..., Server]) -> Server:
    return make_tls()


def connect(server: Server, receive_buffer: int = 0) -> ssl.SSLSocket:
    sock = socket.socket()
    if receive_buffer:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    sock.settimeout(WAIT_S)
    sock.connect(("127.0.0.1", server.port))
    return trusting().wrap_socket(sock, server_hostname="127.0.0.1")


def wait_line(server: Server, text: str) -> str:
    """The log line with the text, after a wait if it is not there yet."""
    while not (found := [line for line in server.lines if text in line]):
        has_answered(server)
    return found[0]


def has_answered(server: Server) -> bool:
    """Whether a new connection gets an answer. It is closed while connections that have ended still count."""
    with suppress(OSError):
        return server.get("/health").status == 200
    return False


def wait_running(server: Server, count: int) -> None:
    while server.peers.do(lambda: len(server.peers.generator.running)) != count:
        pass


def texts(events: list[Any]) -> str:
    return "".join(event.data.get("text", "") for event in events if event.data != "[DONE]")


# ---------------------------------------------------------------- answers


def test_streams_and_whole_answers_have_the_same_text(server: Server) -> None:
    whole = server.post("/v1/generate", LONG).json["choices"][0]["text"]
    events = server.stream("/v1/generate", LONG).all()
    assert (texts(events), events[-1].data) == (whole, "[DONE]")


def test_large_bodies_and_answers_pass(server: Server) -> None:
    text = "x" * 200_000
    assert server.post("/v1/tokenize", {"text": text}).json["count"] == len(text)


def test_requests_that_are_sent_together_are_answered_in_order(server: Server) -> None:
    with connect(server) as sock:
        sock.sendall(raw_request("POST", "/v1/generate", SHORT) * 2 + raw_request("GET", "/health"))
        sock.sendall(raw_request("GET", "/ready", headers="Connection: close\r\n"))
        answers = split_responses(read_to_end(sock), "POST", "POST", "GET", "GET")
    assert [(answer.status, answer.is_complete) for answer in answers] == [(200, True)] * 4


def test_a_response_in_http_1_0_ends_with_its_connection(server: Server) -> None:
    with connect(server) as sock:
        sock.sendall(raw_request("POST", "/v1/generate", {**SHORT, "stream": True}, version="1.0"))
        received = read_to_end(sock)  # raises if the end of the connection is not one of TLS
    assert received.endswith(b"data: [DONE]\n\n")


def test_a_large_head_is_refused(server: Server) -> None:
    with connect(server) as sock:
        with suppress(OSError):
            sock.sendall(b"GET /health HTTP/1.1\r\n" + b"X: y\r\n" * 100_000)
        with suppress(ssl.SSLError, ConnectionResetError):
            assert sock.recv(1 << 16).startswith((b"HTTP/1.1 431", b"HTTP/1.0 400", b"HTTP/1.1 400"))


# ---------------------------------------------------------------- who is not served


def test_old_versions_and_plain_http_are_not_spoken(server: Server) -> None:
    with socket.create_connection(("127.0.0.1", server.port), WAIT_S) as plain:
        plain.sendall(raw_request("GET", "/health"))
        assert b"HTTP" not in read_to_end(plain)
    context = trusting()
    with pytest.warns(DeprecationWarning, match="deprecated"):
        context.minimum_version, context.maximum_version = ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1
    context.set_ciphers("ALL:@SECLEVEL=0")
    with socket.create_connection(("127.0.0.1", server.port), WAIT_S) as sock, pytest.raises(OSError):
        context.wrap_socket(sock, server_hostname="127.0.0.1")
    assert server.get("/health").status == 200


# A server with few connections and short times, for the tests below.
BOUNDED = """
import stages.gateway.http.connection_gate as gate, stages.gateway.http.connection_watch as watch
gate.HANDSHAKE_S, watch.STALL_S, gate.SPARE, gate.RESERVED_PER_ADDRESS, gate.RESERVED_HEAD_S = 3.0, 0.5, 3, 1, 1000.0
"""


@pytest.fixture(scope="module")
def bounded(make_tls: Callable[..., Server]) -> Server:
    return make_tls(BOUNDED, max_concurrent_requests=1, max_connections_per_address=4)


def test_connections_without_a_handshake_count_and_are_closed(bounded: Server) -> None:
    address = ("127.0.0.1", bounded.port)
    with ExitStack() as stack:
        for sock in [stack.enter_context(socket.create_connection(address, WAIT_S)) for _ in range(4)]:
            assert read_to_end(sock) == b""
    while not has_answered(bounded):
        pass


def test_connections_over_the_limit_get_a_503(bounded: Server) -> None:
    with ExitStack() as stack:
        # Those of tests before may still count: some more than the bounds.
        held = [stack.enter_context(connect(bounded)) for _ in range(10)]
        received = b""
        for sock in itertools.cycle(held):  # the others have session tickets to read, and no answer
            sock.settimeout(0.02)
            with suppress(TimeoutError, ssl.SSLWantReadError):
                received = sock.recv(12)
                break
        assert received == b"HTTP/1.1 503"
        held[0].settimeout(WAIT_S)
        held[0].sendall(raw_request("GET", "/health"))
        assert held[0].recv(12) == b"HTTP/1.1 200"


# ---------------------------------------------------------------- clients that leave or do not read


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("says_so", [False, True])
def test_the_request_of_a_client_that_leaves_is_cancelled(server: Server, stream: bool, says_so: bool) -> None:
    server.peers.do(lambda: setattr(server.peers, "is_stepping", False))
    try:
        with connect(server) as sock:
            sock.sendall(raw_request("POST", "/v1/generate", {**LONG, "stream": stream}))
            wait_running(server, 1)
            if says_so:
                sock.settimeout(0.0)
                with suppress(ssl.SSLError, BlockingIOError):
                    sock.unwrap()  # close_notify
            else:
                sock.shutdown(socket.SHUT_WR)  # of TCP
            wait_running(server, 0)
    finally:
        server.peers.do(lambda: setattr(server.peers, "is_stepping", True))


def test_answers_that_are_not_read_are_cut_off(bounded: Server) -> None:
    with connect(bounded, 4096) as sock:
        sock.sendall(raw_request("POST", "/v1/tokenize", {"text": "x" * 200_000}))  # an answer of 4 MB
        wait_line(bounded, "the client does not read what waits for it")
    while not has_answered(bounded):
        pass


# ---------------------------------------------------------------- certificates


def test_new_certificates_are_taken_and_broken_ones_are_not(make_tls: Callable[..., Server]) -> None:
    server = make_tls()
    with connect(server) as before:
        stream = server.stream("/v1/generate", LONG)
        place(server.home, "two")
        server.process.send_signal(signal.SIGHUP)
        server.wait_log("took a new certificate")
        with connect(server) as after:
            assert (before.getpeercert(True), after.getpeercert(True)) == (der("one"), der("two"))
        assert get_json(of_server(server), "/health")["status"] == "healthy"
        assert stream.all()[-1].data == "[DONE]"
        before.sendall(raw_request("GET", "/health"))
        assert before.recv(12) == b"HTTP/1.1 200"
    (server.home / "server.pem").write_text("garbage")
    server.process.send_signal(signal.SIGHUP)
    assert "server.pem" in wait_line(server, "the certificate in use stays")
    with connect(server) as after:
        assert after.getpeercert(True) == der("two")
    assert get_json(of_server(server), "/health")["status"] == "healthy"
    place(server.home, "one")  # without a signal
    server.wait_log("took a new certificate")
    with connect(server) as after:
        assert after.getpeercert(True) == der("one")
    # A stream goes on at the successor of a killed gateway.
    whole = server.post("/v1/generate", LONG).json["choices"][0]["text"]
    stream = server.stream("/v1/generate", LONG)
    events = stream.events()
    begun = [next(events) for _ in range(5)]
    name = stream.response.headers["X-Starling-Request"]
    server.kill_and_restart()
    stream.close()
    server.wait_ready()
    rest = server.resume(f"/v1/requests/{name}", {"Last-Event-ID": begun[-1].id}).all()
    assert texts(begun + rest) == whole


def test_a_start_without_a_usable_certificate_names_file_and_remedy(server: Server, tmp_path: Path) -> None:
    cert, key = place(tmp_path, "one")
    key.chmod(0o644)
    env = {
        **server.env,
        "STARLING_HOME": str(tmp_path),
        "STARLING_SERVER__ARENA_DIR": str(tmp_path / "shm"),
        "STARLING_SERVER__TLS_CERT": str(cert),
        "STARLING_SERVER__TLS_KEY": str(key),
    }
    done = subprocess.run(
        [sys.executable, "-m", "starling", "stage", "gateway"], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == EXIT_CONFIG
    assert f"server.tls_key: {key} has mode 644" in done.stderr
    assert "chmod 600" in done.stderr


# ---------------------------------------------------------------- clients


def of_server(server: Server) -> addresses.ServerAddress:
    """The address as commands of the server's home see it."""
    return addresses.of_config(server.config)._replace(port=server.port)


def test_commands_of_the_home_trust_its_server(server: Server) -> None:
    address = of_server(server)
    assert str(address) == f"https://127.0.0.1:{server.port}"
    assert get_json(address, "/v1/models")["data"][0]["id"] == MODEL
    expected = server.post("/v1/generate", {**SHORT, "model": MODEL}).json["choices"][0]["text"]
    answer = Answer(address, "/v1/generate", {**SHORT, "model": MODEL})
    assert "".join(answer.pieces()) == expected
    replace = msgspec.structs.replace
    assert _answers_ready(replace(server.config, server=replace(server.config.server, port=server.port)))


def test_other_clients_name_the_authority(server: Server) -> None:
    url = f"https://127.0.0.1:{server.port}/v1"
    with pytest.raises(ConfigError, match="not trusted.*--cacert"):
        get_json(addresses.parse(url), "/health")
    for trusted in ("ca.pem", "one.pem"):
        address = addresses.parse(url, cacert=str(DATA / trusted))
        assert get_json(address, "/health")["status"] == "healthy"
    with pytest.raises(ConfigError, match="not trusted"):
        list(Answer(addresses.parse(url, cacert=str(DATA / "two.pem")), "/v1/generate", SHORT).pieces())


def test_a_server_without_tls_is_reported_at_once(server: Server) -> None:
    with socket.create_server(("127.0.0.1", 0)) as plain:
        address = addresses.parse(f"https://127.0.0.1:{plain.getsockname()[1]}")
        connection = address.connection(WAIT_S)
        waiting = asyncio.Runner()
        with waiting:

            async def greet() -> None:
                accepted = asyncio.to_thread(plain.accept)
                failing = asyncio.to_thread(connection.connect)
                connected = asyncio.ensure_future(failing)
                other, _ = await accepted
                with other:
                    other.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                    with pytest.raises(ModelUnavailable, match="TLS handshake failed"):
                        await connected

            waiting.run(greet())


def test_benchmark_and_fault_injection_speak_tls(server: Server) -> None:
    async def run() -> tuple[int, bool]:
        request = ClientRequest({**SHORT, "model": MODEL, "stream": True}, path="/v1/generate")
        async with Sender(Target.of(of_server(server))) as sender:
            response = await sender.send(request)
            response.parse()
        connector = aiohttp.TCPConnector(ssl=of_server(server).tls() or True)
        async with aiohttp.ClientSession(connector=connector) as session:
            return response.status, await Client(str(of_server(server)), session).ready()

    assert asyncio.run(run()) == (200, True)
