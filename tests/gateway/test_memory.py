"""The memory of the gateway process does not grow with the number of requests."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from pipeline import procfs
from tests.gateway.peers import MODEL
from tests.gateway.server import Server

PROMPT = "It was a bright cold day in April, and the clocks were striking thirteen. " * 8
WARM_UP, MEASURED = 1200, 700  # requests; the heap still grows by 1 MB after 1000
ROUNDS = 8  # of `MEASURED`: the heap grows in rare steps of 2 MB and more, and a leak in every round
MAX_GROWTH_KB = 700  # a leaked request would have some KB


def send_request(server: Server, number: int) -> None:
    """Send a request of one of eight kinds."""
    body = {"prompt": PROMPT, "max_tokens": 12, "seed": number, "logprobs": 3}
    match number % 8:
        case 0:
            assert server.post("/v1/generate", body).status == 200
        case 1:
            server.stream("/v1/generate", {**body, "n": 2}).all()
        case 2 | 3:  # the client disconnects, and may resume
            stream = server.stream("/v1/generate", {**body, "max_tokens": 60})
            event = next(stream.events())
            stream.close()
            if number % 8 == 3:
                answer = server.get(f"/v1/requests/{event.id.split(':')[0]}", {"Last-Event-ID": event.id})
                assert answer.status in (200, 404)
        case 4:
            events = server.stream("/v1/generate", body).all()
            assert server.get(f"/v1/requests/{events[0].id.split(':')[0]}").status == 200
        case 5:
            messages = [{"role": "user", "content": PROMPT}]
            chat = {"model": MODEL, "messages": messages, "max_tokens": 9, "logprobs": True, "top_logprobs": 2}
            server.stream("/v1/chat/completions", chat).all()
        case 6:
            assert server.post("/v1/generate", {**body, "max_tokens": "many"}).status == 400
        case 7:
            assert server.post("/v1/completions", {"model": MODEL, "prompt": PROMPT, "max_tokens": 3}).status == 200


def test_memory_is_flat(make_server: Callable[..., Server]) -> None:
    server = make_server()
    server.wait_ready()
    memory: list[int] = []
    with ThreadPoolExecutor(4) as clients:
        list(clients.map(lambda number: send_request(server, number), range(WARM_UP)))
        for _ in range(1 + ROUNDS):
            memory.append(procfs.memory_bytes(server.process.pid) >> 10)
            if len(memory) > 1 and memory[-1] - memory[-2] < MAX_GROWTH_KB:
                return
            list(clients.map(lambda number: send_request(server, number), range(MEASURED)))
    raise AssertionError(f"the memory grew in every round, kB: {memory}")
