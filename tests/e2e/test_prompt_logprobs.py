"""Log probabilities of prompts by a real server: exact, whatever runs beside them, is cached, or dies meanwhile."""

from __future__ import annotations

import itertools
import os
import signal
import threading
from typing import Any

import pytest

from pipeline.config.schema import DEMO_MODEL
from tests.e2e.comparison import comparable, process
from tests.e2e.phases import plan_strike, struck
from tests.e2e.resumable import events as read_events
from tests.e2e.resumable import persist
from tests.e2e.server import Server, wait_gone

pytestmark = pytest.mark.slow

SENTENCE = "The keeper of the light counts ships, stars and the names of the drowned. "
STREAM: dict[str, Any] = {"prompt": "The sea", "max_tokens": 60, "seed": 4, "temperature": 0.8, "ignore_eos": True}


def ids(server: Server, text: str) -> list[int]:
    found: list[int] = server.post("/v1/tokenize", model=DEMO_MODEL, text=text)["tokens"]
    return found


def scores(server: Server, prompt: Any, **fields: Any) -> Any:
    answer = server.post("/v1/generate", prompt=prompt, **{"max_tokens": 0, "prompt_logprobs": 3, "seed": 1} | fields)
    return [choice["prompt_logprobs"] for choice in answer["choices"]]


def echo(server: Server, prompt: Any, **fields: Any) -> Any:
    given = {"model": DEMO_MODEL, "max_tokens": 3, "echo": True, "logprobs": 2, "seed": 1, "prompt": prompt}
    return server.post("/v1/completions", **given | fields)["choices"]


def test_each_token_has_the_logprob_of_a_generation_that_is_made_to_choose_it(demo_server: Server) -> None:
    prompt = ids(demo_server, SENTENCE)
    found = scores(demo_server, prompt)[0]
    assert [entry["id"] for entry in found] == prompt
    assert (found[0]["logprob"], found[0]["rank"], found[0]["top"]) == (None, None, [])
    forced = [
        {"max_tokens": 1, "temperature": 0, "logprobs": 3, "prompt": prompt[:n], "logit_bias": {str(prompt[n]): 100}}
        for n in range(1, len(prompt))
    ]
    for entry, body in zip(found[1:], forced, strict=True):
        one = demo_server.post("/v1/generate", **body)["choices"][0]["logprobs"][0]
        assert one["id"] == entry["id"]
        assert (one["logprob"], one["top"]) == (entry["logprob"], entry["top"])
        if entry["rank"] <= 3:
            assert entry["top"][entry["rank"] - 1]["id"] == entry["id"]
        else:
            assert entry["id"] not in [other["id"] for other in entry["top"]]


def test_chunks_neighbours_and_caches_change_no_number(demo_server: Server) -> None:
    prompt = ids(demo_server, SENTENCE * 12)
    expected = scores(demo_server, prompt)[0]
    assert scores(demo_server, prompt)[0] == expected  # its pages are cached
    others = [prompt[i : i + 100] for i in range(8)]
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.extend(scores(demo_server, [prompt, *others, prompt], n=2)))
    for number, _ in enumerate(demo_server.stream("/v1/generate", **STREAM)):
        if number == 1:
            thread.start()
    thread.join(300)
    assert found[0] == found[1] == found[-1] == expected
    for i in range(len(others)):
        n = 2 + 2 * i
        assert found[n] == found[n + 1]
        assert found[n][50]["id"] == others[i][50]
    # A prompt that begins in the same way has the same scores as far as it is the same.
    assert found[2][:100] == expected[:100]
    assert scores(demo_server, SENTENCE * 12)[0] == expected
    alone = demo_server.post("/v1/generate", prompt=prompt, max_tokens=4, seed=9)["choices"][0]
    both = demo_server.post("/v1/generate", prompt=prompt, max_tokens=4, seed=9, prompt_logprobs=0)["choices"][0]
    assert both["text"] == alone["text"]
    assert [entry["logprob"] for entry in both["prompt_logprobs"]] == [entry["logprob"] for entry in expected]


def test_an_evaluation_harness_gets_its_sums(demo_server: Server) -> None:
    """As lm-evaluation-harness does: token ids, one token more, and the scores of the continuation."""
    context, continuation = ids(demo_server, "The sky is"), ids(demo_server, " blue today")
    prompts = [context + continuation, context]
    request = {"max_tokens": 1, "logprobs": 1, "temperature": 0, "seed": 1234}
    for choice, prompt in zip(echo(demo_server, prompts, **request), prompts, strict=True):
        logprobs = choice["logprobs"]
        assert [len(values) for values in logprobs.values()] == [len(prompt) + 1] * 4
        assert logprobs["token_logprobs"][0] is logprobs["top_logprobs"][0] is None
        assert "".join(logprobs["tokens"]) == choice["text"]
        for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
            assert choice["text"][offset : offset + len(token)] == token
        exact = scores(demo_server, prompt)[0]
        assert logprobs["token_logprobs"][1:-1] == [entry["logprob"] for entry in exact[1:]]
        is_greedy = [
            value == max(top.values())
            for value, top in zip(logprobs["token_logprobs"][1:], logprobs["top_logprobs"][1:], strict=True)
        ]
        assert is_greedy[:-1] == [entry["rank"] == 1 for entry in exact[1:]]
    none = echo(demo_server, context, max_tokens=0)[0]
    assert (none["text"], none["finish_reason"]) == ("The sky is", "length")
    assert len(none["logprobs"]["tokens"]) == len(context)


def test_vllms_field_in_completions_and_chats(demo_server: Server) -> None:
    text = "The sky is blue"
    exact = scores(demo_server, text)[0]
    choice = demo_server.post("/v1/completions", model=DEMO_MODEL, prompt=text, max_tokens=1, prompt_logprobs=3)
    for entry, given in zip(exact, choice["choices"][0]["prompt_logprobs"], strict=True):
        if given is not None:
            own = given[str(entry["id"])]
            assert own == {"logprob": entry["logprob"], "rank": entry["rank"], "decoded_token": entry["token"]}
            assert {int(name) for name in given} == {entry["id"], *(other["id"] for other in entry["top"])}
    chat = demo_server.post(
        "/v1/chat/completions",
        model=DEMO_MODEL,
        max_tokens=1,
        prompt_logprobs=0,
        messages=[{"role": "user", "content": text}],
    )
    assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]
    assert [given is None for given in chat["prompt_logprobs"]] == [True] + [False] * (len(chat["prompt_logprobs"]) - 1)


def test_a_stream_has_the_same_numbers_in_events_of_256_tokens(demo_server: Server) -> None:
    prompt = SENTENCE * 20
    whole = echo(demo_server, prompt)[0]
    body = {"model": DEMO_MODEL, "prompt": prompt, "max_tokens": 3, "echo": True, "logprobs": 2, "seed": 1}
    events = list(demo_server.stream("/v1/completions", **body))
    pieces = [event["choices"][0] for event in events]
    joined = {
        name: list(itertools.chain.from_iterable(piece["logprobs"][name] for piece in pieces if piece["logprobs"]))
        for name in whole["logprobs"]
    }
    assert joined == whole["logprobs"]
    assert "".join(piece["text"] for piece in pieces) == whole["text"]
    assert len(pieces[0]["logprobs"]["tokens"]) == 256
    assert max(len(piece["logprobs"]["tokens"]) for piece in pieces if piece["logprobs"]) == 256
    received = list(read_events(demo_server, "/v1/completions", {**body, "stream": True}, {}))
    middle, rest = received[-3][0], received[-2:]
    again = list(read_events(demo_server, f"/v1/requests/{middle.partition(':')[0]}", None, {"Last-Event-ID": middle}))
    assert again == rest


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"prompt_logprobs": 1, "session_id": "s", "create_session": True}, "prompt_logprobs"),
        ({"prompt_logprobs": 20, "prompt": [[5] * 8000] * 2}, "prompt_logprobs"),
        ({"max_tokens": -1}, "max_tokens"),
    ],
)
def test_errors_name_the_field(demo_server: Server, fields: dict[str, Any], param: str) -> None:
    status, answer, _ = demo_server.request("POST", "/v1/generate", {"prompt": "a", **fields})
    assert (status, answer["error"]["param"]) == (400, param), answer


def test_deaths_of_all_stages_change_no_number(demo_server: Server) -> None:
    prompt = ids(demo_server, SENTENCE * 15)
    expected = [scores(demo_server, prompt)[0], scores(demo_server, prompt[3:])[0]]
    stream = comparable(list(demo_server.stream("/v1/generate", **STREAM)))
    found: list[Any] = []
    is_over = threading.Event()

    def score_all_the_time() -> None:
        while not is_over.is_set():
            found.append(scores(demo_server, [prompt, prompt[3:]], seed=len(found)))

    thread = threading.Thread(target=score_all_the_time)
    thread.start()
    events: list[dict[str, Any]] = []
    n_tokens = 0  # an event may have those of several steps
    kills = [(3, "worker/1"), (12, "kv"), (24, "scheduler"), (36, "worker/1"), (48, "tokenizer")]
    for event in demo_server.stream("/v1/generate", **STREAM):
        events.append(event)
        n_tokens += len(event.get("tokens", ()))
        while kills and n_tokens >= kills[0][0]:
            os.kill(demo_server.pid_of(process(kills.pop(0)[1], DEMO_MODEL)), signal.SIGKILL)
    is_over.set()
    thread.join(300)
    assert not kills
    assert comparable(events) == stream
    assert found
    assert all(answer == expected for answer in found)


def test_the_gateways_successor_scores_the_prompt_again(demo_server: Server) -> None:
    body = {"model": DEMO_MODEL, "prompt": SENTENCE * 20, "echo": True, "logprobs": 2, "seed": 2, "stream": True}
    expected = persist(demo_server, "/v1/completions", body, "undisturbed").events
    gateway = demo_server.pid_of("gateway")
    plan_strike(demo_server, "prefill", [gateway], [demo_server.pid_of("scheduler")])
    received, _, attempts = persist(demo_server, "/v1/completions", body, "k")
    struck(demo_server, "prefill")
    assert wait_gone(gateway)
    assert attempts > 1
    names = ("id", "created")
    plain = [[{k: v for k, v in data.items() if k not in names} for _, data in side] for side in (received, expected)]
    assert plain[0] == plain[1]
