"""The response cache: its key, bounds and eviction order, and the same bytes from a gateway process."""

from __future__ import annotations

import re
import time
from array import array
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from pipeline.api.requests.generation_request import GenerationRequest, SessionTurn
from pipeline.api.requests.tool_fields import ToolUse
from pipeline.config.schema import ResponseCacheConfig
from pipeline.protocol import messages as m
from shm.pages import NUMERICS
from stages.gateway.requests.output import SequenceOutput, output_of, restore_output
from stages.gateway.requests.response_cache import (
    ENTRY_BYTES,
    ResponseCache,
    is_determined,
    key_of,
)
from stages.gateway.requests.spec import RequestSpec, ResponseKey, SequenceSpec
from stages.gateway.requests.state import SequencePhase
from tests.gateway.peers import MODEL
from tests.gateway.request_states import make_spec, make_state
from tests.gateway.server import Server

# ------------------------------------------------------------------ bounds and order


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def name(i: int) -> ResponseKey:
    return ResponseKey(i.to_bytes(32, "big"))


def line(text: str = "x", tokens: int = 3) -> SequenceOutput:
    return SequenceOutput(bytes(4 * tokens), [], text, tokens, "stop", "")


def make(**values: Any) -> tuple[ResponseCache, Clock]:
    clock = Clock()
    return ResponseCache(ResponseCacheConfig(enabled=True, **values), clock), clock


def order(cache: ResponseCache) -> list[int]:
    return [int.from_bytes(key, "big") for key in cache.order()]


@pytest.mark.parametrize(
    ("policy", "expected"),
    [("lru", [1, 3, 2, 0]), ("lfu", [1, 3, 2, 0]), ("fifo", [0, 1, 2, 3])],
)
def test_the_order_of_eviction(policy: str, expected: list[int]) -> None:
    """Entry 0 is used twice more, 2 and 3 once more (3 before 2), 1 never; new entries are not used."""
    cache, _ = make(max_entries=4, eviction_policy=policy)
    for i in range(4):
        assert cache.put(name(i), [line()])
    for i in (0, 3, 2, 0):
        assert cache.get(name(i)) == [line()]
    assert order(cache) == expected
    gone = []
    for i in range(10, 13):
        before = order(cache)
        cache.put(name(i), [line()])
        gone += sorted(set(before) - set(order(cache)))
    # lfu: a new entry goes before one that was used once more.
    assert gone == ([1, 10, 11] if policy == "lfu" else expected[:3])
    assert (len(cache), cache.evicted) == (4, 3)


def test_bytes_are_bounded_and_counted() -> None:
    cache, _ = make(max_size_mb=1, max_entries=1_000_000)
    each = 100_000 + ENTRY_BYTES
    for i in range(50):
        assert cache.put(name(i), [line("x" * 100_000)])
        assert cache.bytes <= 1 << 20
        assert cache.bytes >= len(cache) * each
    assert len(cache) == (1 << 20) // (each + 15)
    assert order(cache) == list(range(40, 50))


def test_an_answer_larger_than_the_cache_is_not_stored_and_evicts_nothing() -> None:
    cache, _ = make(max_size_mb=1)
    cache.put(name(1), [line()])
    assert not cache.put(name(2), [line("x" * (1 << 20))])
    assert order(cache) == [1]


def test_the_time_to_live_starts_when_an_answer_is_stored() -> None:
    cache, clock = make(ttl_s=60)
    cache.put(name(1), [line()])
    clock.now += 30
    cache.put(name(2), [line()])
    clock.now += 29.9
    assert cache.get(name(1)) == [line()]
    clock.now += 0.1
    assert cache.get(name(1)) is None
    assert cache.get(name(2)) == [line()]
    assert (cache.expired, cache.evicted, len(cache)) == (1, 0, 1)
    clock.now += 30
    cache.expire()
    assert (len(cache), cache.bytes) == (0, 0)


def test_without_a_time_to_live_entries_do_not_expire() -> None:
    cache, clock = make(ttl_s=0)
    cache.put(name(1), [line()])
    clock.now += 1e9
    assert cache.get(name(1)) == [line()]


def test_uses_of_an_entry_cost_no_memory() -> None:
    cache, _ = make(eviction_policy="lfu")
    cache.put(name(1), [line()])
    for _ in range(10_000):
        cache.get(name(1))
    assert cache._orders[""].n_items <= 64 + 4 + 1


def test_a_full_cache_evicts_an_answer_of_the_tenant_that_holds_most() -> None:
    cache, clock = make(max_entries=4, ttl_s=60)
    cache.put(name(0), [line()], "small")
    for i in range(1, 20):
        cache.put(name(i), [line()], "large")
    assert sorted(order(cache)) == [0, 17, 18, 19]
    for i in range(20, 23):
        cache.put(name(i), [line()], "small")
    assert sorted(order(cache)) == [18, 19, 21, 22]
    assert cache.put(name(30), [line()], "another")
    assert sorted(order(cache)) in ([19, 21, 22, 30], [18, 19, 22, 30])
    clock.now += 60
    cache.expire()
    assert (len(cache), cache.bytes, order(cache)) == (0, 0, [])
    assert cache.put(name(40), [line()], "small")


def test_too_many_answers_of_one_tenant_do_not_drive_out_larger_ones_of_another() -> None:
    cache, _ = make(max_entries=4)
    cache.put(name(0), [line("x" * 10_000)], "few")
    for i in range(1, 10):
        cache.put(name(i), [line()], "many")
    assert sorted(order(cache)) == [0, 7, 8, 9]


def test_a_large_answer_does_not_take_the_place_of_other_tenants_answers() -> None:
    cache, _ = make(max_size_mb=1)
    cache.put(name(1), [line("x" * (1 << 18))], "one")
    assert not cache.put(name(2), [line("x" * (7 << 17))], "other")
    assert order(cache) == [1]
    assert cache.put(name(3), [line("x" * (7 << 17))], "one")
    assert order(cache) == [3]


# ------------------------------------------------------------------ the key


def spec(
    sampling: dict[str, Any] | None = None,
    sequence: dict[str, Any] | None = None,
    fields: dict[str, Any] | None = None,
    **generation: Any,
) -> RequestSpec:
    """A request with a seed; `sampling`, `sequence`, `fields` and `generation` change parts of it."""
    chosen = m.Sampling(**{"seed": 7, **(sampling or {})})
    made = GenerationRequest(**{"endpoint": "generate", "model": "", "sampling": chosen, "seed": 7, **generation})
    prompt = {"prompt": b"\1\0\0\0\2\0\0\0", "max_tokens": 10, "stop_ids": (2,)}
    return make_spec(generation=made, sampling=chosen, **{**prompt, **(sequence or {}), **(fields or {})})


CHANGED: dict[str, Callable[[], ResponseKey]] = {
    "model": lambda: key_of(spec(fields={"digest": "cd" * 32}), "f16"),
    "numerics": lambda: key_of(spec(fields={"numerics": NUMERICS + 1}), "f16"),
    "kv_type": lambda: key_of(spec(), "int8"),
    "kv_revision": lambda: key_of(spec(fields={"kv_revision": 1}), "f16"),
    "prompt": lambda: key_of(spec(sequence={"prompt": b"\1\0\0\0\3\0\0\0"}), "f16"),
    "max_tokens": lambda: key_of(spec(sequence={"max_tokens": 11}), "f16"),
    "stop_ids": lambda: key_of(spec(sequence={"stop_ids": ()}), "f16"),
    "choice": lambda: key_of(spec(fields={"sequences": (SequenceSpec(0, 0, 1, 10, m.Sampling(seed=7), (2,)),)}), "f16"),
    "stop": lambda: key_of(spec(stop=("a",)), "f16"),
    "skip_special": lambda: key_of(spec(skip_special=False), "f16"),
    "cache_salt": lambda: key_of(spec(cache_salt="s"), "f16"),
    **{
        field: (lambda field=field, value=value: key_of(spec({field: value}), "f16"))  # type: ignore[misc]
        for field, value in {
            "seed": 8,
            "temperature": 0.5,
            "top_k": 3,
            "top_p": 0.5,
            "repetition_penalty": 1.1,
            "frequency_penalty": 0.1,
            "presence_penalty": 0.1,
            "logprobs": 0,
            "min_tokens": 1,
            "ignore_eos": True,
            "order": ("mask",),
            "logit_bias": ((1, 1.0),),
            "min_p": 0.1,
            "typical_p": 0.5,
            "top_n_sigma": 1.0,
            "dry_multiplier": 0.5,
            "dry_base": 2.0,
            "dry_allowed_length": 3,
            "dry_penalty_last_n": 9,
            "dry_sequence_breakers": ("a",),
            "xtc_probability": 0.5,
            "xtc_threshold": 0.2,
        }.items()
    },
}


def test_the_key_covers_every_sampling_parameter() -> None:
    assert set(m.Sampling.__struct_fields__) <= set(CHANGED)


@pytest.mark.parametrize("what", CHANGED)
def test_the_key_contains_what_determines_the_bytes(what: str) -> None:
    assert CHANGED[what]() != key_of(spec(), "f16")


@pytest.mark.parametrize(
    "other", [spec(fields={"tenant": "b", "plugins": ("p@1#",)}), spec(endpoint="chat", fields={"plugins": ("p@1#",)})]
)
def test_the_key_contains_what_plugins_get(other: RequestSpec) -> None:
    """One that redacts the answers of a tenant may leave those of another one, with whom it shares the cache."""
    assert key_of(other, "f16") != key_of(spec(fields={"plugins": ("p@1#",)}), "f16")


def test_the_key_contains_what_ends_an_answer_with_its_first_call() -> None:
    several, one, other = ToolUse(("f",)), ToolUse(("f",), is_single=True), ToolUse(("g",), is_single=True)
    named = ToolUse(("f",), is_single=True, format="hermes")
    keys = [key_of(spec(tools=tools), "f16") for tools in (several, one, other, named)]
    assert len(set(keys)) == 4
    assert key_of(spec(tools=ToolUse(("g",))), "f16") == keys[0]


def test_the_key_leaves_out_what_has_no_effect_on_the_bytes() -> None:
    key = key_of(spec(), "f16")
    other = spec(fields={"priority": 5, "deadline": 1.0, "name": "req-2"}, stream=True, speculate=4, include_usage=True)
    assert key_of(other, "f16") == key


PREDICTED = array("i", [1, 2, 3, 4]).tobytes()


def test_an_answer_from_the_cache_is_counted_by_the_request_s_own_prediction() -> None:
    first, second, third = (make_state(prediction=prediction) for prediction in (PREDICTED, b"", PREDICTED[:8]))
    one = first.sequences[0]
    one.tokens, one.n_used, one.n_emitted, one.finish_reason = [1, 2, 3], 3, 3, "length"
    one.count_predicted()
    one.move(SequencePhase.FINISHED)
    restored = []
    for request in (first, second, third):
        if request is not first:
            restore_output(request.sequences[0], output_of(one))
        restored.append(request.predicted)
    assert (restored[0], restored[2]) == ((3, 1), (2, 0))


def test_two_prompts_differ_from_one_joined_prompt() -> None:
    joined = spec(sequence={"prompt": b"\1\0\0\0" * 4})
    one = spec(sequence={"prompt": b"\1\0\0\0" * 2})
    both = msgspec.structs.replace(one, sequences=one.sequences * 2)
    assert key_of(both, "f16") != key_of(joined, "f16")


def test_the_seed_has_no_effect_at_temperature_0() -> None:
    greedy = [spec({"temperature": 0.0, "seed": seed}, seed=None) for seed in (1, 2)]
    assert all(map(is_determined, greedy))
    assert key_of(greedy[0], "f16") == key_of(greedy[1], "f16")
    assert not is_determined(spec(seed=None))
    assert is_determined(spec())
    assert not is_determined(spec(turn=SessionTurn("sess", 1, 0)))


def test_an_output_has_the_tokens_that_count_and_is_restored() -> None:
    (sequence,) = make_state().sequences
    sequence.tokens, sequence.n_used, sequence.n_emitted = [1, 2, 3, 4], 3, 3
    sequence.logprobs = [m.Logprob(-1.0, ())] * 4
    sequence.text, sequence.finish_reason, sequence.stop_string = ["a", "b"], "stop", "c"
    sequence.move(SequencePhase.FINISHED)
    output = output_of(sequence)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(output), type=SequenceOutput) == output
    assert (len(output.tokens), len(output.logprobs), output.text) == (12, 3, "ab")
    (other,) = make_state().sequences
    restore_output(other, output)
    assert output_of(other) == output
    assert other.phase is SequencePhase.FINISHED


# ------------------------------------------------------------------ a gateway process

ON = {"cache": {"responses": {"enabled": True, "max_entries": 8}}}
NEW = ("id", "created", "usage", "seed")


def same(body: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in body.items() if key not in NEW}


BODIES: dict[str, dict[str, Any]] = {
    "/v1/generate": {"prompt": "Hello", "max_tokens": 30, "seed": 7, "logprobs": 2, "n": 2},
    "/v1/chat/completions": {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Hi"}],
        "seed": 7,
        "logprobs": True,
        "top_logprobs": 1,
        "stop": "zu",
    },
    "/v1/completions": {
        "model": MODEL,
        "prompt": ["ab", "Käfig"],
        "temperature": 0,
        "max_tokens": 20,
        "logprobs": 1,
        "skip_special_tokens": False,
    },
}


def counts(server: Server) -> dict[str, float]:
    lines = server.get("/metrics").body.decode().splitlines()
    found = {}
    for entry in lines:
        if entry.startswith("starling_response_cache_"):
            label, _, value = entry.rpartition(" ")
            found[label.removeprefix("starling_response_cache_")] = float(value)
    return found


@pytest.mark.parametrize("path", BODIES)
def test_the_same_request_again_is_answered_without_the_scheduler(
    path: str, make_server: Callable[..., Server]
) -> None:
    server = make_server(**ON)
    server.wait_ready()
    first = server.post(path, BODIES[path])
    asked = server.peers.do(lambda: len(server.peers.generator.submitted))
    again = server.post(path, BODIES[path])
    assert server.peers.do(lambda: len(server.peers.generator.submitted)) == asked > 0
    assert (first.headers["X-Starling-Cache"], again.headers["X-Starling-Cache"]) == ("miss", "hit")
    one, two = first.json, again.json
    assert same(one) == same(two)
    assert one["id"] != two["id"]
    for count in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert one["usage"][count] == two["usage"][count]
    assert two["usage"]["prompt_tokens_details"]["cached_tokens"] == two["usage"]["prompt_tokens"]
    found = counts(server)
    assert found[f'hits_total{{model="{MODEL}"}}'] == 1
    assert found[f'misses_total{{model="{MODEL}"}}'] == 1
    assert found["entries"] == 1
    assert found["bytes"] > 0


def texts(events: list[Any]) -> dict[int, str]:
    """The logprobs of each choice of /v1/generate."""
    found: dict[int, str] = {}
    for event in events:
        if event.data != "[DONE]" and "text" in event.data:
            found[event.data["index"]] = found.get(event.data["index"], "") + event.data["text"]
    return found


def test_streams_and_whole_responses_share_entries(make_server: Callable[..., Server]) -> None:
    server = make_server(**ON)
    server.wait_ready()
    body = {"prompt": "Hello", "max_tokens": 40, "seed": 7, "n": 2}
    whole = server.post("/v1/generate", body)
    stream = server.stream("/v1/generate", body)
    assert stream.response.headers["X-Starling-Cache"] == "hit"
    events = stream.all()
    assert events[-1].data == "[DONE]"
    assert texts(events) == {c["index"]: c["text"] for c in whole.json["choices"]}
    ends = {e.data["index"]: e.data for e in events if e.data != "[DONE]" and "finish_reason" in e.data}
    assert {i: e["finish_reason"] for i, e in ends.items()} == {
        c["index"]: c["finish_reason"] for c in whole.json["choices"]
    }
    # The other way round, and the stream can be resumed at any event.
    other = {**body, "prompt": "Other"}
    streamed = server.stream("/v1/generate", other).all()
    assert server.post("/v1/generate", other).headers["X-Starling-Cache"] == "hit"
    hit = server.stream("/v1/generate", other).all()
    assert texts(hit) == texts(streamed)
    rest = server.resume(f"/v1/requests/{hit[0].id.partition(':')[0]}").all()
    assert texts(rest) == texts(streamed)
    assert rest[-1].data == "[DONE]"


def test_a_response_from_the_cache_is_stored_and_continues_its_conversation(make_server: Callable[..., Server]) -> None:
    server = make_server(**ON)
    server.wait_ready()
    texts = []
    for body in ({}, {"stream": True}, {"background": True}):
        conversation = server.post("/v1/conversations", {}).json["id"]
        for more in ({}, {"conversation": conversation}):
            answer = server.post("/v1/responses", {"model": MODEL, "input": "Hi", "seed": 7, **body, **more})
            found = re.search(r"resp_[0-9a-f]+", answer.body.decode())
            assert found
            request = "req-" + found[0].removeprefix("resp_")
            whole = server.get(f"/v1/requests/{request}").body  # waits for the end
            stored = server.get(f"/v1/responses/{found[0]}")
            assert stored.status == 200, stored.body
            assert (stored.json["status"], b"completed" in whole) == ("completed", True)
            texts.append((answer.headers["X-Starling-Cache"], stored.json["output"][0]["content"]))
            after = server.post("/v1/responses", {"model": MODEL, "input": "x", "previous_response_id": found[0]})
            assert after.status == 200, after.body
        items = server.get(f"/v1/conversations/{conversation}/items").json["data"]
        assert [item["role"] for item in items] == ["assistant", "user"]
    assert [cache for cache, _ in texts] == ["miss"] + ["hit"] * 5
    assert all(content == texts[0][1] for _, content in texts)


def test_a_request_without_a_seed_bypasses_the_cache(make_server: Callable[..., Server]) -> None:
    server = make_server(**ON)
    server.wait_ready()
    answers = [server.post("/v1/generate", {"prompt": "Hello", "max_tokens": 40}) for _ in range(3)]
    assert {a.headers["X-Starling-Cache"] for a in answers} == {"bypass"}
    assert len({a.json["seed"] for a in answers}) == 3
    assert "entries" in counts(server)
    assert counts(server)["entries"] == 0


def test_failed_and_abandoned_answers_are_not_stored(make_server: Callable[..., Server]) -> None:
    server = make_server(**ON)
    server.wait_ready()
    body = {"prompt": "Hello", "max_tokens": 2000, "seed": 7, "ignore_eos": True}
    generator = server.peers.generator

    def refuse(frame: m.Submit) -> m.Rejected | None:
        return m.Rejected(frame.sequence, "OVERLOADED", "full", "", 1.0)

    server.peers.do(lambda: setattr(generator, "refuse", refuse))
    assert server.post("/v1/generate", body).status == 429
    server.peers.do(lambda: setattr(generator, "refuse", lambda frame: None))
    stream = server.stream("/v1/generate", body)
    next(stream.events())
    stream.close()
    wait_cancelled(server)
    again = server.post("/v1/generate", body)
    assert again.headers["X-Starling-Cache"] == "miss"
    assert len(again.json["choices"][0]["tokens"]) == 2000
    assert server.post("/v1/generate", body).json["choices"] == again.json["choices"]
    assert counts(server)["entries"] == 1


def wait_cancelled(server: Server) -> None:
    """Wait until the scheduler has the frame; HTTP requests pass the time."""
    deadline = time.monotonic() + 60
    while not server.peers.do(lambda: len(server.peers.generator.cancelled)):
        assert time.monotonic() < deadline, "the request of a client that left was not cancelled"
        server.get("/health")


def test_off_by_default(server: Server) -> None:
    body = {"prompt": "Hello", "max_tokens": 5, "seed": 7}
    for _ in range(2):
        answer = server.post("/v1/generate", body)
        assert "X-Starling-Cache" not in answer.headers
        assert answer.json["choices"][0]["tokens"]
    assert counts(server) == {}
