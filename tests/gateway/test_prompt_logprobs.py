"""Log probabilities of prompts in each API's form, whole and streamed, resumed, replayed, and after a restart."""

from __future__ import annotations

import struct
from array import array
from itertools import chain
from typing import Any

from tests.gateway.peers import EOS, MODEL, output, score_words, text_of
from tests.gateway.server import Server

TEXT = "The keeper, 一只鸟 " * 30  # more than two events
IDS = list(TEXT.encode())
PROMPT = array("i", IDS).tobytes()
LISTS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


def scores(top: int) -> list[tuple[int, float, list[tuple[int, float]]] | None]:
    found: list[tuple[int, float, list[tuple[int, float]]] | None] = [None]
    for index in range(1, len(IDS)):
        rank, logprob, *rest = struct.unpack("<" + "if" * (1 + top), score_words(PROMPT, index, top))
        found.append((rank, logprob, list(zip(rest[::2], rest[1::2], strict=True))))
    return found


def key(token: int) -> str:
    return chr(token) if token < 128 else f"bytes:\\x{token:02x}"


def openai_lists(answer: str, top: int) -> dict[str, list[Any]]:
    """The four lists of the prompt, and of an answer as the scheduler of these tests makes it."""
    lists: dict[str, list[Any]] = {"tokens": [key(token) for token in IDS], "token_logprobs": [], "top_logprobs": []}
    for token, score in zip(IDS, scores(top), strict=True):
        lists["token_logprobs"].append(score and score[1])
        tops = score and {key(other): value for other, value in score[2]} | {key(token): score[1]}
        lists["top_logprobs"].append(tops)
    lists["text_offset"] = [len(TEXT.encode()[:i].decode("utf-8", "ignore")) for i in range(len(IDS))]
    return lists


def joined(pieces: list[Any]) -> list[Any]:
    """What a client has of some events, however they were grouped."""
    text = "".join(piece["text"] for piece in pieces)
    return [text, *([value for p in pieces if p["logprobs"] for value in p["logprobs"][name]] for name in LISTS)]


def request(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": TEXT, "max_tokens": 4, "seed": 7, **fields}


def test_echo_with_logprobs_whole_and_streamed(server: Server) -> None:
    body = request(echo=True, logprobs=2)
    whole = server.post("/v1/completions", body).json["choices"][0]
    tokens = output(PROMPT, 7, 0, 4, (EOS,))
    assert whole["text"] == TEXT + text_of(tokens)
    expected, found = openai_lists(text_of(tokens), 2), whole["logprobs"]
    n = len(IDS)
    for name in ("tokens", "token_logprobs", "top_logprobs"):
        assert found[name][:n] == expected[name]
        assert len(found[name]) == n + len(tokens)
    assert found["text_offset"][n:] == [len(TEXT) + i for i in range(len(tokens))]
    assert found["text_offset"][:n] == expected["text_offset"]
    events = server.stream("/v1/completions", body).all()[:-1]
    pieces = [event.data["choices"][0] for event in events]
    assert [len(piece["logprobs"]["tokens"]) for piece in pieces[:-1]] == [256, 256, n - 512, *[1] * len(tokens)]
    assert [bool(event.id) for event in events] == [False, False, *[True] * (len(events) - 2)]
    for name, values in found.items():
        assert list(chain.from_iterable(piece["logprobs"][name] for piece in pieces[:-1])) == values
    assert "".join(piece["text"] for piece in pieces) == whole["text"]
    path = f"/v1/requests/{events[-1].id.partition(':')[0]}"
    for begin, headers in ((0, {}), (3, {"Last-Event-ID": events[2].id}), (5, {"Last-Event-ID": events[4].id})):
        again = [event.data["choices"][0] for event in server.resume(path, headers).all()[:-1]]
        assert joined(again) == joined(pieces[begin:])


def test_a_token_within_a_character_begins_where_the_character_does(server: Server) -> None:
    body = request(prompt="please say \U0001f426 \xe9!", max_tokens=20, logprobs=0)
    choice = server.post("/v1/completions", body).json["choices"][0]
    assert choice["text"] == "\U0001f426 \xe9!"
    expected = [0, 0, 0, 0, 1, 2, 2, 3]
    assert choice["logprobs"]["text_offset"][:8] == expected
    events = [event.data["choices"][0] for event in server.stream("/v1/completions", body).all()[:-1]]
    assert joined(events)[1 + LISTS.index("text_offset")][:8] == expected


def test_no_tokens(server: Server) -> None:
    answer = server.post("/v1/completions", request(echo=True, logprobs=0, max_tokens=0)).json
    assert (answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]) == (TEXT, "length")
    assert len(answer["choices"][0]["logprobs"]["tokens"]) == answer["usage"]["total_tokens"] == len(IDS)
    plain = server.post("/v1/completions", request(echo=True, max_tokens=0)).json["choices"][0]
    assert (plain["text"], plain["logprobs"]) == (TEXT, None)
    events = server.stream("/v1/completions", request(echo=True, logprobs=0, max_tokens=0)).all()
    assert len([event for event in events if event.data != "[DONE]"]) == 4


def test_each_choice_and_prompt_has_its_scores(server: Server) -> None:
    body = {**request(prompt=["ab", TEXT, "ab"], n=2), "prompt_logprobs": 1}
    choices = server.post("/v1/generate", body).json["choices"]
    assert [len(choice["prompt_logprobs"]) for choice in choices] == [2, 2, len(IDS), len(IDS), 2, 2]
    long = choices[2]["prompt_logprobs"]
    for token, score, entry in zip(IDS, scores(1), long, strict=True):
        assert entry["id"] == token
        assert (entry["logprob"], entry["rank"]) == ((score[1], score[0]) if score else (None, None))
        assert [(other["id"], other["logprob"]) for other in entry["top"]] == (score[2] if score else [])
    streamed = [event.data for event in server.stream("/v1/generate", body).all()]
    parts = [data for data in streamed if data != "[DONE]" and "prompt_logprobs" in data]
    assert streamed[: len(parts)] == parts
    for index in range(6):
        mine, values = [part for part in parts if part["index"] == index], choices[index]["prompt_logprobs"]
        assert list(chain.from_iterable(part["prompt_logprobs"] for part in mine)) == values
        assert [part["start"] for part in mine] == list(range(0, len(values), 256))


def test_vllms_form_in_completions_and_chats(server: Server) -> None:
    given = server.post("/v1/completions", request(prompt_logprobs=2, logprobs=1, n=2)).json["choices"][1]
    assert given["prompt_logprobs"][0] is None
    for token, score, entry in list(zip(IDS, scores(2), given["prompt_logprobs"], strict=True))[1:]:
        assert score is not None
        ranks = {other: (value, place) for place, (other, value) in enumerate(score[2], 1)}
        expected = {token: (score[1], score[0])} | ranks
        assert {int(name): (one["logprob"], one["rank"]) for name, one in entry.items()} == expected
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2, "prompt_logprobs": 0}
    answer = server.post("/v1/chat/completions", chat).json
    assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"] == len("user: Hi\n")
    assert [len(entry) for entry in answer["prompt_logprobs"][1:]] == [1] * (len("user: Hi\n") - 1)
    refused = server.post("/v1/chat/completions", {**chat, "stream": True})
    assert (refused.status, refused.error["param"]) == (400, "prompt_logprobs")


def test_a_scheduler_that_dies_between_scores_continues_after_the_last_one(server: Server) -> None:
    generator = server.peers.generator

    def hold() -> None:
        server.peers.is_stepping = False

    def die() -> None:
        server.peers.kill_scheduler()
        server.peers.start_scheduler()
        server.peers.is_stepping = True

    whole = server.post("/v1/generate", {**request(), "prompt_logprobs": 2}).json["choices"]
    server.peers.do(hold)
    try:
        stream = server.stream("/v1/generate", {**request(), "prompt_logprobs": 2})  # it has left the queue
        server.peers.do(lambda: server.peers.generator.step(3))
    finally:
        server.peers.do(die)
    events = [event.data for event in stream.all() if event.data != "[DONE]"]
    assert server.peers.generator is not generator
    found = list(chain.from_iterable(data.get("prompt_logprobs", []) for data in events))
    assert found == whole[0]["prompt_logprobs"]
    assert "".join(data.get("text", "") for data in events) == whole[0]["text"]
    resubmitted = [frame.scored for frame in server.peers.generator.submitted]
    assert resubmitted
    assert 1 <= resubmitted[0] < len(IDS)
