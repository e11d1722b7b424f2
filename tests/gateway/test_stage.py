"""The gateway process: recoveries, disconnects, bounds, keys, and an orderly end."""

from __future__ import annotations

import queue
import resource
import signal
import socket
import subprocess
import sys
import time
from array import array
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from pipeline.protocol import messages as m
from stages.gateway.http.connection_gate import RESERVED_PER_ADDRESS, SPARE
from stages.tokenizer.service import TokenizerService
from tests.gateway.peers import MODEL, make_tokenizer, output, text_of
from tests.gateway.server import LONG_MINUTE, LONG_MINUTE_S, MakeServer, Server

LONG = {"prompt": "long", "max_tokens": 290, "seed": 7, "ignore_eos": True}


def text_of_long() -> str:
    return text_of(output(array("i", list(b"long")).tobytes(), 7, 0, 290))


def text(events: list[Any]) -> str:
    return "".join(event.data.get("text", "") for event in events if event.data != "[DONE]")


def wait_until(server: Server, condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    """Wait for a condition, checked after each round of the peers."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        server.peers.do(lambda: None)


@pytest.mark.parametrize("victims", [["tokenizer"], ["scheduler"], ["tokenizer", "scheduler"]])
def test_a_stream_outlives_its_peers(server: Server, victims: list[str]) -> None:
    peers = server.peers
    with peers.held():
        stream = server.stream("/v1/generate", LONG)
        events = stream.events()
        peers.step(20)
        begun = [next(events) for _ in range(5)]
        for victim in victims:
            peers.do(getattr(peers, f"kill_{victim}"))
        for victim in victims:
            peers.do(getattr(peers, f"start_{victim}"))
    rest = list(events)
    stream.close()
    assert text(begun + rest) == text_of_long()
    assert rest[-1].data == "[DONE]"
    assert rest[-2].data["usage"]["completion_tokens"] == 290
    if "scheduler" in victims:
        (again,) = peers.do(lambda: [s for s in peers.generator.submitted if s.forced])
        assert len(again.forced) >= 5 * 4
    starts = [event.data["start"] for event in begun + rest if "start" in event.data]
    assert starts == sorted(set(starts))


def test_the_content_of_a_submission(server: Server) -> None:
    body = {
        "prompt": "x",
        "max_tokens": 5,
        "seed": -1,
        "cache_salt": "mine",
        "speculate": 4,
        "top_k": 9,
        "stop_token_ids": [7],
        "order": ["mask", "temperature", "top_k"],
        "logit_bias": {"5": -1.5},
    }
    assert server.post("/v1/generate", body).status == 200
    sent = server.peers.do(lambda: server.peers.generator.submitted[-1])
    assert (sent.cache_salt, sent.speculate, sent.tenant, sent.model) == ("mine", 4, "default", MODEL)
    assert sent.sampling == m.Sampling(
        seed=2**64 - 1, top_k=9, order=("mask", "temperature", "top_k"), logit_bias=((5, -1.5),)
    )
    assert sent.stop_ids == (256, 7)
    assert 0 < sent.deadline_ms <= 300_000


def test_a_disconnect_cancels_the_request(server: Server) -> None:
    generator = server.peers.generator
    with server.peers.held():
        stream = server.stream("/v1/generate", {**LONG, "n": 3, "max_tokens": 300})
        mine = stream.response.headers["X-Request-Id"]
        sequences = {f"{mine}/{choice}" for choice in range(3)}
        wait_until(server, lambda: generator.running.keys() >= sequences)
        server.peers.step()
        next(stream.events())
        stream.sock.shutdown(socket.SHUT_RDWR)
        stream.close()
        wait_until(server, lambda: {c.sequence for c in generator.cancelled} >= sequences)
        assert not server.peers.do(lambda: [s for s in generator.running if s.startswith(mine)])
        # The same for a client that waits for a whole response.
        connection = server.connect()
        body = b'{"prompt": "whole", "max_tokens": 50}'
        connection.request("POST", "/v1/generate", body, {"Content-Type": "application/json"})
        wait_until(server, lambda: len(generator.running) == 1)
        connection.close()
        wait_until(server, lambda: not generator.running)


def test_a_rejection_by_the_scheduler_has_its_status_even_for_a_stream(server: Server) -> None:
    def refuse(frame: m.Submit) -> m.Rejected:
        return m.Rejected(frame.sequence, "OVERLOADED", "the queue is full", "", 2.5)

    server.peers.do(lambda: setattr(server.peers.generator, "refuse", refuse))
    try:
        for stream in (False, True):
            answer = server.post("/v1/generate", {**LONG, "max_tokens": 5, "stream": stream})
            assert (answer.status, answer.headers["Retry-After"]) == (429, "3")
            assert answer.error["type"] == "overloaded_error"
    finally:
        server.peers.do(lambda: setattr(server.peers.generator, "refuse", lambda frame: None))


def test_an_error_during_a_stream_ends_it_with_an_error_event(server: Server) -> None:
    generator = server.peers.generator

    def poison() -> None:
        (sequence,) = generator.running
        _, sent = generator.running.pop(sequence)
        bad = m.SequenceTokens(sequence, sent, (), finish="error", error="INFERENCE", message="not finite")
        generator.outbox.append(m.Tokens(MODEL, 1, [bad]))

    with server.peers.held():
        stream = server.stream(
            "/v1/chat/completions",
            {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 300, "ignore_eos": True},
        )
        events = stream.events()
        server.peers.step()
        next(events)
        server.peers.do(poison)
        rest = list(events)
        stream.close()
    assert rest[-1].data == "[DONE]"
    assert rest[-2].data["error"]["code"] == "INFERENCE"
    assert [event for event in rest if event.data != "[DONE]" and "error" in event.data] == rest[-2:-1]


def test_bad_input_leaves_the_server_serving(server: Server) -> None:
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(b"\x00\x01 nonsense\r\n\r\n")
        connection.recv(4096)
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(b"POST /v1/generate HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
    assert server.get("/health").status == 200


# ------------------------------------------------------------------ servers with other settings


def test_readiness_names_the_missing_stage(make_server: MakeServer) -> None:
    server = make_server(server={"request_timeout_ms": 60_000})
    server.wait_ready()
    server.peers.do(lambda: setattr(server.peers, "model_ready", False))
    wait_until(server, lambda: "its worker is compiling" in str(server.get("/ready").json["reason"]))
    assert server.get("/ready").json["models"][MODEL]["reason"] == "its worker is compiling"
    assert server.get("/health").status == 200
    server.peers.do(server.peers.kill_tokenizer)
    wait_until(server, lambda: server.get("/ready").json["stages"]["tokenizer"]["reason"] == "not running")


class UnusableTokenizer(TokenizerService):
    """Refuses each description at once, as the tokenizer does where a model's vocabulary is damaged."""

    def __init__(self) -> None:
        super().__init__(make_tokenizer().model)
        self.asked: queue.SimpleQueue[float] = queue.SimpleQueue()  # when, monotonic s

    def reply(self, frame: Any) -> m.Frame | None:
        if isinstance(frame, m.Describe):
            self.asked.put(time.monotonic())
            return m.TokenizerFailed(frame.id, "MODEL_UNAVAILABLE", "its vocabulary is damaged")
        return super().reply(frame)


def test_a_description_that_is_refused_is_not_asked_for_again_at_once(make_server: MakeServer) -> None:
    tokenizer = UnusableTokenizer()
    make_server(tokenizer=lambda: tokenizer)
    asked = [tokenizer.asked.get(timeout=180) for _ in range(12)]
    # Once in a tick, which come every 100 ms, and once more when the tokenizer becomes ready.
    assert asked[-1] - asked[1] > 0.7, asked


def test_keys_quotas_and_cors(make_server: MakeServer) -> None:
    server = make_server(
        auth={"api_keys": [{"key": "sk-one", "tenant": "one"}, {"key": "sk-two", "tenant": "two"}]},
        rate_limits={"requests_per_minute": 3, "tokens_per_minute": 100},
        server={"enable_cors": True},
        preamble=LONG_MINUTE,
    )
    server.wait_ready()
    body = {"prompt": "x", "max_tokens": 5}
    assert server.get("/health").status == 200
    for header in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "sk-one"}):
        refused = server.post("/v1/generate", body, header)
        assert (refused.status, refused.error["code"]) == (401, "INVALID_API_KEY")
        assert refused.headers["WWW-Authenticate"] == "Bearer"
    one, two = {"Authorization": "Bearer sk-one"}, {"Authorization": "Bearer sk-two"}
    assert [server.post("/v1/generate", body, one).status for _ in range(4)] == [200, 200, 200, 429]
    limited = server.post("/v1/generate", body, one)
    assert limited.error["code"] == "RATE_LIMITED"
    third = LONG_MINUTE_S // 3  # of the minute, less what has passed
    assert third - 1000 <= int(limited.headers["Retry-After"]) <= third
    assert server.post("/v1/generate", {**body, "max_tokens": 120, "ignore_eos": True}, two).status == 200
    spent = server.post("/v1/generate", body, two)
    assert (spent.status, spent.error["code"]) == (429, "RATE_LIMITED")
    assert "tokens per minute" in spent.error["message"]
    flight = server.request("OPTIONS", "/v1/chat/completions", None, {"Origin": "http://a", **one})
    assert flight.status == 204
    assert flight.headers["Access-Control-Allow-Origin"] == "*"
    allowed = flight.headers["Access-Control-Allow-Headers"].split(", ")
    assert {"*", "Authorization", "Content-Type"} <= set(allowed)
    assert server.get("/health").headers["Access-Control-Allow-Origin"] == "*"
    assert "Access-Control-Allow-Origin" not in server.get("/metrics").headers


def test_attempts_that_fail_are_charged(make_server: MakeServer) -> None:
    server = make_server(rate_limits={"requests_per_minute": 3}, preamble=LONG_MINUTE)
    server.wait_ready()
    bodies = [b"{", {"prompt": "x", "n": 99}, {"model": "none", "prompt": "x"}, {"prompt": "x"}]
    assert [server.post("/v1/generate", body).status for body in bodies] == [400, 400, 404, 429]
    assert server.post("/v1/generate", b"{").status == 429


def test_the_limit_of_requests_in_flight(make_server: MakeServer) -> None:
    server = make_server(server={"max_concurrent_requests": 2})
    server.wait_ready()
    server.peers.do(lambda: setattr(server.peers, "is_stepping", False))
    connections = []
    for _ in range(2):
        connection = server.connect()
        body = b'{"prompt": "x", "max_tokens": 5}'
        connection.request("POST", "/v1/generate", body, {"Content-Type": "application/json"})
        connections.append(connection)
    wait_until(server, lambda: len(server.peers.generator.running) == 2)
    refused = server.post("/v1/generate", {"prompt": "x"})
    assert (refused.status, refused.error["code"]) == (429, "OVERLOADED")
    assert "max_concurrent_requests" in refused.error["message"]
    assert server.get("/ready").status == 503
    server.peers.do(lambda: setattr(server.peers, "is_stepping", True))
    assert [connection.getresponse().status for connection in connections] == [200, 200]
    for connection in connections:
        connection.close()
    wait_until(server, lambda: server.get("/ready").status == 200)


def test_the_timeout_of_a_request(make_server: MakeServer) -> None:
    server = make_server(server={"request_timeout_ms": 3000})  # enough for the request to reach the scheduler
    server.wait_ready()
    server.peers.do(lambda: setattr(server.peers, "is_stepping", False))
    late = server.post("/v1/generate", {"prompt": "x"})
    assert (late.status, late.error["code"]) == (503, "TIMEOUT")
    wait_until(server, lambda: len(server.peers.generator.cancelled) == 1)


def test_a_stream_that_times_out_ends_with_a_finish_reason_and_an_error(make_server: MakeServer) -> None:
    server = make_server(server={"request_timeout_ms": 4000})  # enough for the stream to begin
    server.wait_ready()
    server.peers.do(lambda: setattr(server.peers, "is_stepping", False))
    stream = server.stream("/v1/generate", {**LONG, "n": 2})
    events = stream.events()
    server.peers.step()
    next(events)
    *_, error, done = (event.data for event in events)
    assert done == "[DONE]"
    assert error["error"]["code"] == "TIMEOUT"
    assert error["choices"] == [{"index": index, "finish_reason": "timeout"} for index in range(2)]
    stream.close()


@pytest.mark.parametrize(("asked", "sent"), [({}, 0), ({"speculate": 0}, -1), ({"speculate": 3}, 3)])
def test_speculation_is_set_per_request(server: Server, asked: dict[str, int], sent: int) -> None:
    assert server.post("/v1/generate", {"prompt": "x", "max_tokens": 1, **asked}).status == 200
    assert server.peers.do(lambda: server.peers.generator.submitted[-1]).speculate == sent


def test_waiting_for_a_model_is_bounded_by_the_request_timeout(make_server: MakeServer) -> None:
    server = make_server(server={"request_timeout_ms": 600})
    server.wait_ready()
    server.peers.do(lambda: setattr(server.peers, "model_ready", False))
    wait_until(server, lambda: "its worker is compiling" in str(server.get("/ready").json["reason"]))
    for stream in (False, True):
        message = ""
        while "its worker is compiling" not in message:
            begun = time.monotonic()
            refused = server.post("/v1/generate", {"prompt": "x", "stream": stream})
            assert 0.59 <= time.monotonic() - begun < 30.0  # the gateway's timers have milliseconds
            assert (refused.status, refused.error["code"]) == (503, "MODEL_UNAVAILABLE")
            assert int(refused.headers["Retry-After"]) >= 1
            message = refused.error["message"]
            assert "its worker is compiling" in message or "silent for" in message  # the peers had no core


def test_waiting_for_the_tokenizer_is_bounded_by_the_request_timeout(
    make_server: MakeServer,
) -> None:
    server = make_server(server={"request_timeout_ms": 600})
    server.wait_ready()
    server.peers.do(lambda: setattr(server.peers.tokenizer, "reply", lambda frame: None))
    begun = time.monotonic()
    late = server.post("/v1/generate", {"prompt": "x"})
    assert time.monotonic() - begun < 30.0
    assert (late.status, late.error["code"]) == (503, "TIMEOUT")
    assert "request_timeout_ms" in late.error["message"]
    assert not server.peers.generator.submitted


def test_more_texts_than_the_queue_holds_are_rejected(make_server: MakeServer) -> None:
    server = make_server(
        scheduler={"max_queue_depth": 6}, performance={"batch_size": 2}, rate_limits={"max_queue_depth": 4}
    )
    server.wait_ready()
    assert server.post("/v1/generate", {"prompt": "x", "max_tokens": 3, "n": 6}).status == 200
    refused = server.post("/v1/generate", {"prompt": "x", "max_tokens": 3, "n": 7})
    assert (refused.status, refused.error["code"], refused.error["param"]) == (400, "INVALID_REQUEST", "n")
    for part in ("n = 7", "at most 6", "rate_limits.max_queue_depth = 4", "max_batch_size = 2"):
        assert part in refused.error["message"]
    assert "Retry-After" not in refused.headers
    many = server.post("/v1/completions", {"model": MODEL, "prompt": ["x"] * 7, "max_tokens": 3})
    assert (many.status, many.error["param"]) == (400, "prompt")
    assert "7 prompts" in many.error["message"]


def test_a_slow_client_is_dropped_and_does_not_delay_others(make_server: MakeServer) -> None:
    server = make_server()
    server.wait_ready()
    server.peers.do(lambda: setattr(server.peers, "tokens_per_step", 200))
    body = {**LONG, "max_tokens": 1500, "n": 16, "logprobs": 20}
    stream = server.stream("/v1/generate", body)
    wait_until(server, lambda: any("reads too slowly" in line for line in server.lines), 120.0)
    wait_until(server, lambda: not server.peers.generator.running)
    stream.close()
    assert server.post("/v1/generate", {"prompt": "x", "max_tokens": 5}).status == 200


def test_sigterm_lets_streams_finish_and_rejects_new_requests(make_server: MakeServer) -> None:
    server = make_server()
    server.wait_ready()
    with server.peers.held():
        stream = server.stream("/v1/generate", LONG)
        events = stream.events()
        server.peers.step()
        begun = [next(events)]
        server.process.send_signal(signal.SIGTERM)
        server.wait_log("draining")
        refused = server.post("/v1/generate", {"prompt": "x"})
        assert (refused.status, refused.error["code"]) == (503, "DRAINING")
        assert refused.headers["Retry-After"]
        assert server.get("/ready").json["reason"] == "draining"
    assert text(begun + list(events)) == text_of_long()
    stream.close()
    assert server.process.wait(60) == 0


def test_requests_past_the_drain_timeout_end_with_an_error_that_says_so(make_server: MakeServer) -> None:
    server = make_server(server={"drain_timeout_ms": 300})
    server.wait_ready()
    server.peers.do(lambda: setattr(server.peers, "is_stepping", False))
    stream = server.stream("/v1/generate", LONG)
    events = stream.events()
    server.peers.step()
    next(events)
    server.process.send_signal(signal.SIGTERM)
    rest = list(events)
    stream.close()
    assert rest[-1].data == "[DONE]"
    assert rest[-2].data["error"]["code"] == "DRAINING"
    assert "0.3 s" in rest[-2].data["error"]["message"]
    assert server.process.wait(60) == 0


def test_a_port_in_use_is_reported_in_one_line(make_server: MakeServer) -> None:
    server = make_server()
    (server.home / "2").mkdir(mode=0o700)
    second = subprocess.run(
        [sys.executable, "-m", "starling", "stage", "gateway"],
        env={
            **server.env,
            "STARLING_SERVER__PORT": str(server.port),
            "STARLING_SERVER__RUN_DIR": str(server.home / "2"),
            "STARLING_SERVER__STATE_DIR": str(server.home / "2" / "state"),
        },
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert second.returncode == 78
    (line,) = [line for line in second.stderr.splitlines() if "cannot listen" in line]
    assert f"127.0.0.1:{server.port}" in line
    assert "STARLING_SERVER__PORT" in line
    assert "Traceback" not in second.stderr


@pytest.fixture
def many_files() -> Iterator[None]:
    """This process may open the connections of a test, whatever its limit was."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard if hard < 4096 else max(soft, 4096), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


# The gateway begins with a limit that is lower than the number of the test's connections; it may raise it.
FEW_FILES = "import resource as r; r.setrlimit(r.RLIMIT_NOFILE, (256, r.getrlimit(r.RLIMIT_NOFILE)[1]))"


def test_the_limit_of_open_files_does_not_bound_connections(many_files: None, make_server: MakeServer) -> None:
    server = make_server(server={"max_connections_per_address": 1000}, preamble=FEW_FILES)
    server.wait_ready()
    idle = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(300)]
    assert server.get("/health").status == 200
    for connection in idle:
        connection.close()


def test_connections_over_the_limit_get_a_503(make_server: MakeServer) -> None:
    server = make_server(
        server={"max_concurrent_requests": 1, "max_connections_per_address": 1000},
        preamble="import stages.gateway.http.connection_gate as g; g.RESERVED_HEAD_S = 60.0",  # of silent connections
    )
    server.wait_ready()
    idle = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(1 + SPARE)]
    assert server.get("/health").status == 200  # the reserve
    idle += [socket.create_connection(("127.0.0.1", server.port)) for _ in range(RESERVED_PER_ADDRESS)]
    refused = server.get("/health")
    assert (refused.status, refused.error["code"]) == (503, "OVERLOADED")
    assert refused.headers["Retry-After"] == "1"
    for connection in idle:
        connection.close()
    wait_until(server, lambda: server.get("/health").status == 200)
