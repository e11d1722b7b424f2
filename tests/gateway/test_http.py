"""The endpoints over real sockets: whole responses, streams, rejections."""

from __future__ import annotations

import json
import socket
import subprocess
import threading
from array import array
from typing import Any

import pytest

from tests.gateway.peers import BOS, EOS, MODEL, TEXT, output, text_of
from tests.gateway.server import Server


def expected(prompt: str | list[int], max_tokens: int, seed: int = 7, choice: int = 0) -> list[int]:
    ids = list(prompt.encode()) if isinstance(prompt, str) else prompt
    return output(array("i", ids).tobytes(), seed, choice, max_tokens, (EOS,))


CHAT: dict[str, Any] = {"model": MODEL, "seed": 7, "max_tokens": 30, "messages": [{"role": "user", "content": "Hi"}]}
CHAT_PROMPT = "user: Hi\n"


# ------------------------------------------------------------------ whole responses


def test_generate(server: Server) -> None:
    answer = server.post("/v1/generate", {"prompt": "Hello", "max_tokens": 30, "seed": 7})
    assert answer.status == 200
    assert answer.headers["Content-Type"] == "application/json"
    body = answer.json
    tokens = expected("Hello", 30)
    assert body["id"].startswith("req-")
    assert body["id"] == answer.headers["X-Request-Id"]
    assert (body["object"], body["model"], body["seed"]) == ("generation", MODEL, 7)
    assert body["choices"] == [
        {
            "index": 0,
            "text": text_of(tokens),
            "tokens": tokens,
            "finish_reason": "length",
            "stop_string": None,
            "logprobs": None,
        }
    ]
    assert body["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 30,
        "total_tokens": 35,
        "prompt_tokens_details": {"cached_tokens": 3},
    }


def test_token_ids_as_a_prompt_and_a_random_seed_in_the_response(server: Server) -> None:
    first = server.post("/v1/generate", {"prompt": [1, 2, 3], "max_tokens": 20}).json
    again = server.post("/v1/generate", {"prompt": [1, 2, 3], "max_tokens": 20, "seed": first["seed"]}).json
    assert first["seed"] > 0
    assert first["choices"] == again["choices"]
    other = server.post("/v1/generate", {"prompt": [1, 2, 3], "max_tokens": 20}).json
    assert other["seed"] != first["seed"]


def test_without_max_tokens_the_configured_bound_applies(server: Server) -> None:
    body = server.post("/v1/generate", {"prompt": "x", "ignore_eos": True}).json
    assert body["usage"]["completion_tokens"] == 300
    assert body["choices"][0]["finish_reason"] == "length"


def test_the_end_token_is_counted_but_is_not_text(server: Server) -> None:
    body = server.post("/v1/generate", {"prompt": "Hello", "seed": 7}).json
    tokens = expected("Hello", 300)
    assert tokens[-1] == EOS
    choice = body["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert choice["text"] == text_of(tokens)
    assert choice["tokens"] == tokens[:-1]
    assert body["usage"]["completion_tokens"] == len(tokens)


def test_chat(server: Server) -> None:
    answer = server.post("/v1/chat/completions", CHAT)
    body = answer.json
    assert set(body) == {"id", "object", "created", "model", "system_fingerprint", "choices", "usage", "seed"}
    assert body["id"].startswith("chatcmpl-")
    assert body["object"] == "chat.completion"
    message = {"role": "assistant", "content": text_of(expected(CHAT_PROMPT, 30)), "refusal": None}
    assert body["choices"] == [{"index": 0, "message": message, "logprobs": None, "finish_reason": "length"}]
    assert body["usage"]["prompt_tokens"] == len(CHAT_PROMPT)


def test_chat_accepts_text_parts_and_reads_developer_as_system(server: Server) -> None:
    messages = [
        {
            "role": "developer",
            "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}],
        },
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Yes?", "refusal": None, "tool_calls": None},
    ]
    body = server.post("/v1/chat/completions", {**CHAT, "messages": messages}).json
    assert body["usage"]["prompt_tokens"] == len("system: Be brief.\nuser: Hi\nassistant: Yes?\n")


def test_completions_with_several_prompts_choices_and_echo(server: Server) -> None:
    body = server.post(
        "/v1/completions",
        {"model": MODEL, "prompt": ["ab", "Käfig"], "n": 2, "max_tokens": 10, "seed": 7, "echo": True},
    ).json
    assert body["object"] == "text_completion"
    assert body["id"].startswith("cmpl-")
    assert [c["index"] for c in body["choices"]] == [0, 1, 2, 3]
    wanted = [prompt + text_of(expected(prompt, 10, choice=choice)) for prompt in ("ab", "Käfig") for choice in (0, 1)]
    assert [c["text"] for c in body["choices"]] == wanted
    assert body["usage"]["prompt_tokens"] == 2 + 6
    assert body["usage"]["completion_tokens"] == 40


def test_completions_default_to_sixteen_tokens_and_echo_ids_as_text(server: Server) -> None:
    body = server.post("/v1/completions", {"model": MODEL, "prompt": [97, 98], "seed": 7, "echo": True}).json
    assert body["choices"][0]["text"] == "ab" + text_of(expected("ab", 16))
    assert body["usage"]["completion_tokens"] == 16


@pytest.mark.parametrize("stop", ["ging", ["zzz", "ging"], ["ging,", "ging"]])
def test_a_stop_string_ends_the_text_before_it(server: Server, stop: Any) -> None:
    body = server.post(
        "/v1/generate", {"prompt": "stop", "max_tokens": 200, "seed": 7, "stop": stop, "ignore_eos": True}
    ).json
    choice = body["choices"][0]
    assert choice["text"] == text_of(expected("stop", 200), "ging")
    assert choice["finish_reason"] == "stop"
    assert choice["stop_string"] in ("ging", "ging,")
    assert body["usage"]["completion_tokens"] == len(choice["tokens"])


def test_logprobs_of_each_endpoint(server: Server) -> None:
    tokens = expected(CHAT_PROMPT, 4)
    body = server.post("/v1/chat/completions", {**CHAT, "max_tokens": 4, "logprobs": True, "top_logprobs": 2}).json
    content = body["choices"][0]["logprobs"]["content"]
    assert [entry["bytes"] for entry in content] == [[t] for t in tokens]
    assert content[0]["logprob"] == -0.5
    tops = [(top["token"], top["logprob"]) for top in content[0]["top_logprobs"]]
    assert tops[1:] == [("A", -1.5)]
    body = server.post("/v1/chat/completions", {**CHAT, "max_tokens": 4, "logprobs": True}).json
    assert body["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []

    body = server.post(
        "/v1/completions", {"model": MODEL, "prompt": "ab", "max_tokens": 4, "seed": 7, "logprobs": 2}
    ).json
    logprobs = body["choices"][0]["logprobs"]
    assert set(logprobs) == {"tokens", "token_logprobs", "top_logprobs", "text_offset"}
    assert all(len(values) == 4 for values in logprobs.values())
    assert logprobs["token_logprobs"] == [-0.5] * 4
    assert logprobs["top_logprobs"][0]["A"] == -1.5

    body = server.post("/v1/generate", {"prompt": "ab", "max_tokens": 4, "seed": 7, "logprobs": 3}).json
    entries = body["choices"][0]["logprobs"]
    assert [entry["id"] for entry in entries] == body["choices"][0]["tokens"]
    assert [top["id"] for top in entries[0]["top"]] == [entries[0]["id"], 65, 66]


# ------------------------------------------------------------------ streams


def test_a_chat_stream_has_openais_events_in_order(server: Server) -> None:
    events = server.stream("/v1/chat/completions", {**CHAT, "stream_options": {"include_usage": True}}).all()
    assert events[-1].data == "[DONE]"
    chunks = [event.data for event in events[:-1]]
    assert all(chunk["object"] == "chat.completion.chunk" for chunk in chunks)
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": "", "refusal": None}
    texts = [chunk["choices"][0]["delta"]["content"] for chunk in chunks[1:-2]]
    assert "".join(texts) == text_of(expected(CHAT_PROMPT, 30))
    assert len(texts) > 10
    assert chunks[-2]["choices"] == [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": "length"}]
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 30
    assert all(chunk["usage"] is None for chunk in chunks[:-1])


def test_a_stream_and_a_whole_response_have_the_same_text(server: Server) -> None:
    body = {"prompt": "same", "max_tokens": 60, "seed": 9, "n": 3, "logprobs": 2}
    whole = server.post("/v1/generate", body).json
    events = [event.data for event in server.stream("/v1/generate", body).all()[:-1]]
    for index, choice in enumerate(whole["choices"]):
        mine = [event for event in events if event.get("index") == index and "text" in event]
        assert "".join(event["text"] for event in mine) == choice["text"]
        for part in ("tokens", "logprobs"):
            assert [item for event in mine for item in event[part]] == choice[part]
        starts = [event["start"] for event in mine]
        assert starts == sorted(starts)
        (end,) = (event for event in events if event.get("index") == index and "finish_reason" in event)
        assert end["finish_reason"] == choice["finish_reason"]
    assert events[-1]["usage"] == whole["usage"]
    assert events[-1]["seed"] == 9


def test_each_event_has_an_id_to_resume_from(server: Server) -> None:
    stream = server.stream("/v1/generate", {"prompt": "ids", "max_tokens": 12, "seed": 7, "n": 2})
    request_id = stream.response.headers["X-Request-Id"]
    events = stream.all()
    places = [event.id.removeprefix(f"{request_id}:") for event in events]
    assert places[-1] == "12d.12d"
    ends = [tuple(int(part.rstrip("fed")) for part in place.split(".")) for place in places]
    assert ends == sorted(ends)


def test_a_completion_stream(server: Server) -> None:
    events = server.stream(
        "/v1/completions", {"model": MODEL, "prompt": "ab", "max_tokens": 20, "seed": 7, "echo": True}
    ).all()
    chunks = [event.data for event in events[:-1]]
    assert chunks[0]["choices"][0]["text"] == "ab"
    assert "".join(c["choices"][0]["text"] for c in chunks) == "ab" + text_of(expected("ab", 20))
    assert [c["choices"][0]["finish_reason"] for c in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"


def test_text_arrives_as_it_is_generated(server: Server) -> None:
    """The first event arrives while the model is held before the second token."""

    def hold() -> None:
        server.peers.is_stepping = False

    def step() -> None:
        server.peers.generator.step(1)

    server.peers.do(hold)
    try:
        opened: list[Any] = []
        thread = threading.Thread(
            target=lambda: opened.append(server.stream("/v1/generate", {"prompt": "one", "max_tokens": 5}))
        )
        thread.start()
        while not server.peers.do(lambda: bool(server.peers.generator.running)):
            pass
        server.peers.do(step)
        thread.join(60)
        events = opened[0].events()
        for index in range(5):
            event = next(events)
            assert event.data["start"] == index
            if index < 4:
                server.peers.do(step)
        opened[0].close()
    finally:
        server.peers.do(lambda: setattr(server.peers, "is_stepping", True))


def test_http_1_0_gets_the_stream_without_chunks(server: Server) -> None:
    body = json.dumps({"prompt": "old", "max_tokens": 5, "stream": True}).encode()
    kind = "Content-Type: application/json"
    head = f"POST /v1/generate HTTP/1.0\r\n{kind}\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.sendall(head.encode() + body)
        data = b"".join(iter(lambda: connection.recv(65536), b""))
    headers, _, events = data.partition(b"\r\n\r\n")
    assert b"chunked" not in headers.lower()
    assert events.startswith(b"retry: 1000\nid: req-")
    assert events.endswith(b"data: [DONE]\n\n")


def test_two_requests_on_one_connection(server: Server) -> None:
    connection = server.connect()
    for stream in (True, False, True):
        body = json.dumps({"prompt": "k", "max_tokens": 5, "seed": 7, "stream": stream})
        connection.request("POST", "/v1/generate", body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        assert response.status == 200
        assert response.read()
    connection.close()


def test_the_openai_client(server: Server) -> None:
    openai = pytest.importorskip("openai")
    with openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none") as client:
        text = text_of(expected(CHAT_PROMPT, 30))
        messages = [{"role": "user", "content": "Hi"}]
        whole = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=30, seed=7)
        assert whole.choices[0].message.content == text
        stream = client.chat.completions.create(
            model=MODEL,
            messages=messages,
            max_completion_tokens=30,
            seed=7,
            stream=True,
            logprobs=True,
            top_logprobs=1,
            stream_options={"include_usage": True},
        )
        chunks = list(stream)
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == text
        assert chunks[-1].usage.prompt_tokens_details.cached_tokens == 3
        done = client.completions.create(model=MODEL, prompt="ab", max_tokens=9, seed=7, logprobs=1)
        assert done.choices[0].text == text_of(expected("ab", 9))
        assert [model.id for model in client.models.list()] == [MODEL]
        model = client.models.retrieve(MODEL)
        assert (model.context_length, model.quantization, model.state) == (4096, "Q4_K", "loaded")
        with pytest.raises(openai.BadRequestError, match="temperature"):
            client.completions.create(model=MODEL, prompt="ab", temperature=3)
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="absent", prompt="ab")


def test_curl(server: Server) -> None:
    done = subprocess.run(
        [
            "curl",
            "-sN",
            f"http://127.0.0.1:{server.port}/v1/generate",
            "-H",
            "Content-Type: application/json",
            "-d",
            '{"prompt": "curl", "max_tokens": 3, "stream": true}',
        ],
        capture_output=True,
        check=True,
        timeout=60,
    )
    assert done.stdout.count(b"data: ") >= 4


# ------------------------------------------------------------------ other endpoints


def test_tokenize_and_detokenize_are_inverse(server: Server) -> None:
    tokens = server.post("/v1/tokenize", {"text": TEXT}).json
    assert tokens["count"] == len(TEXT.encode())
    assert tokens["offsets"][0] == [0, 1]
    text = server.post("/v1/detokenize", {"model": MODEL, "tokens": tokens["tokens"]}).json
    assert text == {"model": MODEL, "text": TEXT}
    special = server.post("/v1/detokenize", {"tokens": [BOS, 65, EOS]}).json["text"]
    assert special == "<|begin|>A<|end|>"
    shown = server.post("/v1/detokenize", {"tokens": [65, EOS], "skip_special_tokens": True})
    assert shown.json["text"] == "A"
    refused = server.post("/v1/detokenize", {"tokens": [65, 258]})
    assert (refused.status, refused.error["param"]) == (400, "tokens")
    assert "tokens[1] is 258" in refused.error["message"]


def test_models_and_engines(server: Server) -> None:
    listed = server.get("/v1/models").json
    assert listed["object"] == "list"
    (model,) = listed["data"]
    assert (model["id"], model["object"], model["owned_by"]) == (MODEL, "model", "starling")
    assert server.get(f"/v1/models/{MODEL}").json == model
    assert server.get("/v1/models/other").error["code"] == "MODEL_NOT_FOUND"
    moved = server.get("/v1/engines")
    assert (moved.status, moved.headers["Location"]) == (308, "/v1/models")
    assert server.get(f"/v1/engines/{MODEL}").headers["Location"] == f"/v1/models/{MODEL}"


def test_health_ready_and_metrics(server: Server) -> None:
    health = server.get("/health").json
    assert set(health) == {"status", "uptime_seconds", "total_requests", "cache_hit_rate", "memory_usage_mb"}
    assert health["status"] == "healthy"
    server.post("/v1/generate", {"prompt": "count me", "max_tokens": 3})
    assert server.get("/health").json["total_requests"] > health["total_requests"]
    ready = server.ready()
    assert ready.status == 200
    assert ready.json["ready"] is True
    assert set(ready.json["stages"]) == {"gateway", "tokenizer", "scheduler", "kv"}
    assert ready.json["models"][MODEL]["ready"] is True
    metrics = server.get("/metrics")
    assert metrics.headers["Content-Type"].startswith("text/plain; version=0.0.4")
    assert b'starling_requests_total{endpoint="/v1/generate",status="200"}' in metrics.body
    assert b"starling_time_to_first_token_seconds_bucket" in metrics.body


def test_a_priority_orders_and_does_not_change_the_text(server: Server) -> None:
    body = {"model": MODEL, "prompt": "ab", "max_tokens": 5, "seed": 7}
    texts = set()
    for priority, expected in ((None, 0), (-100, 100), (3, -3)):
        texts.add(server.post("/v1/completions", {**body, "priority": priority}).json["choices"][0]["text"])
        assert server.peers.do(lambda: server.peers.generator.submitted[-1].priority) == expected
    assert len(texts) == 1
    assert server.post("/v1/completions", {**body, "priority": 101}).error["param"] == "priority"


def test_a_suffix_is_part_of_the_prompt_and_its_ends_are_stops(server: Server) -> None:
    server.peers.do(lambda: server.peers.generator.submitted.clear())
    body = {"model": MODEL, "prompt": ["ab", "Käfig"], "suffix": "yz", "max_tokens": 5, "seed": 7}
    answer = server.post("/v1/completions", body).json
    prompts = [[1, *text.encode(), 2, *b"yz", 3] for text in ("ab", "Käfig")]
    assert answer["usage"]["prompt_tokens"] == sum(map(len, prompts))
    submitted = server.peers.do(lambda: list(server.peers.generator.submitted))
    assert sorted(array("i", frame.prompt).tolist() for frame in submitted) == sorted(prompts)
    assert {frame.stop_ids for frame in submitted} == {(EOS, 4)}
    plain = server.post("/v1/completions", {**body, "prompt": "ab", "suffix": ""}).json
    assert plain["usage"]["prompt_tokens"] == 2
