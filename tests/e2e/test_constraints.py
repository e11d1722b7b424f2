"""Constrained output through every stage: valid, the same in any company, and the same after any death."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
from typing import Any

import jsonschema
import pytest

from pipeline.config.schema import DEMO_MODEL
from tests.e2e.server import Server
from tests.scheduler.schemas import SCHEMAS

pytestmark = pytest.mark.slow

BEGUN_S = 240.0  # until every stream has begun, on a busy machine
# For constraints that take long to compile: a process of low priority does it, one after the other, which has a
# fiftieth of a core on a busy machine. The server's own limit comes first.
VETTED_S = 360.0
PERSON = SCHEMAS["person"]
GBNF = 'root ::= item ("," item){2,6}\nitem ::= [a-z]{2,8} "=" ("on" | "off")\n'
LARK = 'start: NAME ":" VALUE\nNAME: /[A-Z][a-z]{2,9}/\nVALUE: /[0-9]{1,4}/\n'
KINDS: dict[str, tuple[dict[str, Any], str]] = {
    "choice": ({"choice": ["red", "green", "dark blue"]}, "red|green|dark blue"),
    "regex": ({"regex": r"[a-z]{3,9}, \d{2}"}, r"[a-z]{3,9}, [0-9]{2}"),
    "gbnf": ({"grammar": GBNF}, r"[a-z]{2,8}=(on|off)(,[a-z]{2,8}=(on|off)){2,6}"),
    "lark": ({"grammar": {"syntax": "lark", "definition": LARK}}, r"[A-Z][a-z]{2,9}:[0-9]{1,4}"),
    "vllm": ({"structured_outputs": {"regex": "(ab|cd){2,4}"}}, "(ab|cd){2,4}"),
    "guided": ({"guided_choice": ["yes", "no"]}, "yes|no"),
}


def generate(server: Server, **body: Any) -> dict[str, Any]:
    """The choice of one request."""
    answer = server.post("/v1/generate", **{"prompt": "A person as JSON: ", "max_tokens": 120, "seed": 1, **body})
    return dict(answer["choices"][0])


def at_once(server: Server, bodies: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The choices of requests that are sent together."""
    found: list[dict[str, Any]] = [{}] * len(bodies)

    def client(i: int) -> None:
        found[i] = generate(server, **bodies[i])

    threads = [threading.Thread(target=client, args=(i,)) for i in range(len(bodies))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def check_json(text: str, schema: dict[str, Any]) -> Any:
    """The parsed text; raises if it does not match."""
    value = json.loads(text)
    jsonschema.Draft202012Validator(schema).validate(value)
    return value


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_matches_streamed_or_not(demo_server: Server, kind: str) -> None:
    fields, pattern = KINDS[kind]
    whole = generate(demo_server, **fields)
    assert whole["finish_reason"] == "stop"
    assert re.fullmatch(pattern, whole["text"])
    events = list(demo_server.stream("/v1/generate", prompt="A person as JSON: ", max_tokens=120, seed=1, **fields))
    assert "".join(event.get("text", "") for event in events) == whole["text"]


def test_chat_with_a_schema_as_openai_and_llama_server_name_it(demo_server: Server) -> None:
    body = {"model": DEMO_MODEL, "messages": [{"role": "user", "content": "Invent a person."}], "seed": 2}
    named = {"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": PERSON}}
    texts = set()
    for fields in ({"response_format": named}, {"json_schema": PERSON}, {"guided_json": json.dumps(PERSON)}):
        answer = demo_server.post("/v1/chat/completions", max_tokens=300, **fields, **body)
        assert answer["choices"][0]["finish_reason"] == "stop"
        texts.add(answer["choices"][0]["message"]["content"])
    assert len(texts) == 1
    check_json(texts.pop(), PERSON)
    events = demo_server.stream("/v1/chat/completions", response_format={"type": "json_object"}, max_tokens=200, **body)
    text = "".join(event["choices"][0]["delta"].get("content") or "" for event in events if event["choices"])
    assert text.lstrip().startswith("{")


def test_output_is_valid_on_every_seed_and_the_same_in_any_company(demo_server: Server) -> None:
    """Sixteen schemas at once, twice with other seeds; what is cut by max_tokens is not whole JSON."""
    names = list(SCHEMAS)
    for seed in (1, 2):
        chosen = names[seed::3][:16]
        bodies = [
            {"json_schema": SCHEMAS[name], "seed": seed, "temperature": (0, 1, 1.5)[i % 3]}
            for i, name in enumerate(chosen)
        ]
        answers = at_once(demo_server, bodies)
        ended = 0
        for name, answer in zip(chosen, answers, strict=True):
            if answer["finish_reason"] == "stop":
                check_json(answer["text"], SCHEMAS[name])
                ended += 1
        assert ended >= 12
        for i in (0, 5, 10):
            assert generate(demo_server, **bodies[i]) == answers[i]


def test_other_parameters_keep_their_meaning(demo_server: Server) -> None:
    letters = {"regex": "[a-z ]{30,60}", "temperature": 0.8}
    plain = generate(demo_server, **letters)
    assert generate(demo_server, speculate=8, **letters) == plain
    repeats = {"regex": "(red, green, ){1,12}blue", "prompt": "red, green, " * 6, "temperature": 0}
    assert generate(demo_server, speculate=12, **repeats) == generate(demo_server, speculate=0, **repeats)
    several = demo_server.post("/v1/generate", prompt="Colours: ", n=3, seed=4, max_tokens=60, **letters)["choices"]
    assert len({choice["text"] for choice in several}) == 3
    assert all(re.fullmatch("[a-z ]{30,60}", choice["text"]) for choice in several)
    stopped = generate(demo_server, stop=["e"], **letters)
    assert stopped["text"] == plain["text"].partition("e")[0]
    logprobs = generate(demo_server, logprobs=2, **letters)
    assert logprobs["text"] == plain["text"]
    assert len(logprobs["logprobs"]) == len(plain["tokens"])
    penal = generate(demo_server, repetition_penalty=1.3, frequency_penalty=0.5, top_k=20, top_p=0.9, **letters)
    assert re.fullmatch("[a-z ]{30,60}", penal["text"])
    late = generate(demo_server, regex="a{2,9}", min_tokens=100)  # ends where nothing else may follow
    assert (late["text"], late["finish_reason"]) == ("a" * 9, "stop")
    assert generate(demo_server, max_tokens=3, **letters)["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"json_schema": {"type": "text"}}, "json_schema", "Invalid type: text"),
        ({"json_schema": {"not": {}}}, "json_schema", "not"),
        ({"regex": "(a"}, "regex", "unclosed group"),
        ({"grammar": "root ::= missing"}, "grammar", "missing"),
        ({"grammar": "start: missing"}, "grammar", "at 1(8): unknown name"),
    ],
)
def test_what_cannot_be_compiled_is_a_400_with_the_reason(
    demo_server: Server, fields: dict[str, Any], param: str, message: str
) -> None:
    for stream in (False, True):
        status, answer, _ = demo_server.request("POST", "/v1/generate", {"prompt": "x", "stream": stream, **fields})
        assert status == 400
        assert answer["error"]["param"] == param
        assert message in answer["error"]["message"]


# Constraints that are made to take time or memory, and whether they work: otherwise they are a 400, at once or later.
WIDE = {f"p{i}": {"type": "string"} for i in range(240)}  # a second of a core, until it is refused
HOSTILE: dict[str, tuple[dict[str, Any], bool]] = {
    "exponential pattern": ({"json_schema": {"type": "string", "pattern": "^.*a.{40}$"}}, True),
    "exponential regex": ({"regex": "(a|e|i|o|u|.)*[aeiou](a|e|.){400}x"}, True),
    "alternatives": ({"choice": [("ab" * (i % 40)) + str(i) for i in range(1000)]}, True),
    "ambiguous": ({"grammar": 'root ::= ("a" | "b" | [a-z ])* "a" ([a-z ]){60}'}, False),
    "many optional properties": (
        {"json_schema": {"type": "object", "properties": WIDE, "minProperties": 1, "additionalProperties": False}},
        False,
    ),
    "endless reference": ({"json_schema": {"$ref": "#"}}, False),
}


def test_hostile_constraints_end_or_fail_by_name_and_change_no_other_stream(demo_server: Server) -> None:
    victims: list[dict[str, Any]] = [{"max_tokens": 40, "seed": 3}, {"json_schema": PERSON, "seed": 5}]
    undisturbed = [generate(demo_server, **body) for body in victims]
    answers: dict[str, tuple[int, Any]] = {}

    def send(name: str) -> None:
        body = {"prompt": "e e e a a a ", "max_tokens": 16, "seed": 1, **HOSTILE[name][0]}
        answers[name] = demo_server.request("POST", "/v1/generate", body, timeout_s=VETTED_S)[:2]

    threads = [threading.Thread(target=send, args=(name,)) for name in HOSTILE]
    for thread in threads:
        thread.start()
    assert at_once(demo_server, victims) == undisturbed
    for thread in threads:
        thread.join()
    for name, (fields, works) in HOSTILE.items():
        status, answer = answers[name]
        if works:
            assert status == 200, (name, answer)
        else:
            (field,) = fields
            assert (status, answer["error"]["param"]) == (400, field), (name, answer)
            assert field in answer["error"]["message"]
    assert at_once(demo_server, victims) == undisturbed


def helper(server: Server, role: str) -> int:
    """The pid of a helper process of the scheduler."""
    [pid] = [pid for pid, command in server.pids().items() if re.search(rf"helper_main \d+ \d+ {role} ", command)]
    return pid


@pytest.mark.parametrize("victim", ["scheduler", f"worker-{DEMO_MODEL}", "mask", "vet"])
def test_streams_end_with_the_same_bytes_after_a_death(demo_server: Server, victim: str) -> None:
    bodies = [{"json_schema": PERSON, "seed": 5}, {"regex": "[a-z ]{60,90}", "seed": 6, "speculate": 4}]
    undisturbed = [generate(demo_server, **body) for body in bodies]
    begun = threading.Barrier(len(bodies) + 1)
    found: list[str] = [""] * len(bodies)

    def client(i: int) -> None:
        events = demo_server.stream("/v1/generate", prompt="A person as JSON: ", max_tokens=120, **bodies[i])
        n_tokens = 0
        for event in events:
            found[i] += event.get("text", "")
            before, n_tokens = n_tokens, n_tokens + len(event.get("tokens", ()))
            if before <= 3 < n_tokens:  # an event may have several tokens
                begun.wait(BEGUN_S)

    threads = [threading.Thread(target=client, args=(i,)) for i in range(len(bodies))]
    for thread in threads:
        thread.start()
    begun.wait(BEGUN_S)
    is_helper = victim in ("mask", "vet")
    os.kill(helper(demo_server, victim) if is_helper else demo_server.pid_of(victim), signal.SIGKILL)
    for thread in threads:
        thread.join()
    assert found == [answer["text"] for answer in undisturbed]
