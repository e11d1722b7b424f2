"""The sampler's fields on their way from a body to the scheduler, and what comes back: the seed, the best choices."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.responses.service_tier import ServiceTier

from pipeline.api.generation_fields import check_configured_order
from pipeline.api.requests import chat
from pipeline.api.requests.generation_request import GenerationRequest
from pipeline.errors import InvalidRequest
from pipeline.protocol import messages as m
from pipeline.protocol.messages import Sampling
from stages.gateway.endpoints.openai_formatter import best_sequences
from stages.gateway.requests.sequence_breakers import breakers_of
from stages.gateway.requests.state import RequestState
from tests.gateway.peers import CONTEXT, MODEL, VOCAB_SIZE
from tests.gateway.request_states import make_state
from tests.gateway.server import Server

SAMPLER = {
    "min_p": 0.05,
    "typical_p": 0.5,
    "top_n_sigma": 1.5,
    "dry_multiplier": 0.75,
    "dry_base": 2.0,
    "dry_allowed_length": 3,
    "dry_penalty_last_n": 64,
    "dry_sequence_breakers": ["\n", "|>"],
    "xtc_probability": 0.5,
    "xtc_threshold": 0.25,
}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/generate": {"prompt": "ab"},
    "/v1/completions": {"model": MODEL, "prompt": "ab"},
    "/v1/chat/completions": {"model": MODEL, "messages": [{"role": "user", "content": "ab"}]},
}


def bits(mask: bytes) -> set[int]:
    number = int.from_bytes(mask, "little")
    return {token for token in range(8 * len(mask)) if number >> token & 1}


@pytest.mark.parametrize("path", BODIES)
def test_the_scheduler_gets_every_parameter_of_the_sampler(server: Server, path: str) -> None:
    assert server.post(path, {**BODIES[path], **SAMPLER, "max_tokens": 3, "seed": 1}).status == 200
    frame = server.peers.generator.submitted[-1]
    sampling = msgspec.structs.asdict(frame.sampling)
    expected = {**SAMPLER, "dry_sequence_breakers": ("\n", "|>")}
    assert {name: sampling[name] for name in SAMPLER} == expected
    assert bits(frame.breakers) == {10, 256, 257}  # the line break, and the names of the two control tokens
    assert len(frame.breakers) == 4 * -(-VOCAB_SIZE // 32)


@pytest.mark.parametrize("path", BODIES)
def test_without_them_the_frame_is_as_small_as_before(server: Server, path: str) -> None:
    assert server.post(path, {**BODIES[path], "max_tokens": 3, "seed": 1, "mirostat": 0}).status == 200
    frame = server.peers.generator.submitted[-1]
    assert frame.sampling == m.Sampling(seed=1)
    assert frame.breakers == b""


def test_default_breakers_need_not_be_tokens_of_the_model(server: Server) -> None:
    assert server.post("/v1/generate", {"prompt": "a", "max_tokens": 3, "dry_multiplier": 1}).status == 200
    assert bits(server.peers.generator.submitted[-1].breakers) == set(b'\n:"*')


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.binary(max_size=4), max_size=70),
    st.lists(st.text("ab\n", min_size=1, max_size=3), max_size=4, unique=True).map(tuple),
)
def test_breakers_are_the_tokens_that_have_a_text_as_a_whole(pieces: list[bytes], texts: tuple[str, ...]) -> None:
    found = breakers_of(pieces, texts)
    assert bits(found.mask) == {i for i, piece in enumerate(pieces) if any(t.encode() in piece for t in texts)}
    assert set(found.missing) == {t for t in texts if not any(t.encode() in piece for piece in pieces)}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_the_drawn_seed_comes_back_and_repeats_the_answer(server: Server, path: str) -> None:
    body = {**BODIES[path], "max_tokens": 40}
    whole = server.post(path, body).json
    again = server.post(path, {**body, "seed": whole["seed"]}).json
    assert again["choices"] == whole["choices"]
    assert again["seed"] == whole["seed"]
    *_, last, done = server.stream(path, {**body, "seed": 77}).all()
    assert done.data == "[DONE]"
    assert last.data["choices"][0]["finish_reason"]
    assert last.data["seed"] == 77


def test_equal_bounds_of_the_output_are_one_bound(server: Server) -> None:
    body = {**BODIES["/v1/chat/completions"], "max_tokens": 7, "max_completion_tokens": 7, "seed": 3}
    assert server.post("/v1/chat/completions", body).json["usage"]["completion_tokens"] == 7


HINTS = {
    "user": "u",
    "metadata": {"project": "x"},
    "safety_identifier": "s",
    "prompt_cache_key": "k",
    "prompt_cache_retention": "24h",
    "service_tier": "flex",
}


@pytest.mark.parametrize("path", BODIES)
def test_hints_change_nothing(server: Server, path: str) -> None:
    body = {**BODIES[path], "max_tokens": 20, "seed": 5}
    assert server.post(path, {**body, **HINTS}).json["choices"] == server.post(path, body).json["choices"]


@pytest.mark.parametrize("tier", get_args(get_args(ServiceTier)[0]))
def test_every_tier_of_the_official_client_is_a_hint(tier: str) -> None:
    chat.read({"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "service_tier": tier})


def test_a_prediction_becomes_draft_tokens_and_is_counted(server: Server) -> None:
    says = {"model": MODEL, "messages": [{"role": "user", "content": "please say one two three"}], "n": 2}
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "too three!"}]
    body = {**says, "prediction": {"type": "content", "content": parts}}
    answer = server.post("/v1/chat/completions", body).json
    assert answer["choices"] == server.post("/v1/chat/completions", says).json["choices"]
    sent = [server.peers.do(lambda i=i: server.peers.generator.submitted[i]) for i in (-4, -3)]
    assert [frame.prediction for frame in sent] == [array("i", list(b"one too three!")).tobytes()] * 2
    # "t" and then " three" came where they were expected, "w" did not; "!" did not come.
    counts = {"accepted_prediction_tokens": 2 * 12, "rejected_prediction_tokens": 2 * 2}
    assert answer["usage"]["completion_tokens_details"] == counts
    off = server.post("/v1/chat/completions", {**body, "speculate": 0}).json
    assert off["usage"]["completion_tokens_details"] == counts
    assert server.peers.do(lambda: server.peers.generator.submitted[-1]).prediction == b""
    none = server.post("/v1/chat/completions", {**body, "prediction": {"type": "content", "content": ""}}).json
    assert set(none["usage"]["completion_tokens_details"].values()) == {0}


def test_a_prediction_longer_than_the_context_is_refused(server: Server) -> None:
    prediction = {"type": "content", "content": "x" * (CONTEXT + 1)}
    answer = server.post("/v1/chat/completions", {**BODIES["/v1/chat/completions"], "prediction": prediction})
    assert (answer.status, answer.error["param"]) == (400, "prediction.content")
    assert f"has {CONTEXT + 1} tokens; at most {CONTEXT}" in answer.error["message"]


def test_generate_takes_several_prompts(server: Server) -> None:
    body = {"max_tokens": 10, "seed": 5, "n": 2}
    answer = server.post("/v1/generate", {**body, "prompt": ["ab", "cd"]}).json
    apart = [server.post("/v1/generate", {**body, "prompt": prompt}).json for prompt in ("ab", "cd")]
    texts = [choice["text"] for choice in answer["choices"]]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert texts == [choice["text"] for one in apart for choice in one["choices"]]
    assert answer["usage"]["prompt_tokens"] == 4
    listed = server.post("/v1/generate", {**body, "prompt": [[97, 98], [99, 100]]}).json
    assert [choice["text"] for choice in listed["choices"]] == texts


def test_best_of_returns_some_of_the_texts_and_counts_all(server: Server) -> None:
    body = {"model": MODEL, "prompt": ["ab", "cd"], "max_tokens": 10, "seed": 5}
    every = server.post("/v1/completions", {**body, "n": 3}).json
    best = server.post("/v1/completions", {**body, "n": 2, "best_of": 3}).json
    assert [choice["index"] for choice in best["choices"]] == [0, 1, 2, 3]
    assert {choice["logprobs"] for choice in best["choices"]} == {None}
    # The peer gives all tokens the same probability: the first ones are chosen.
    expected = [every["choices"][i]["text"] for i in (0, 1, 3, 4)]
    assert [choice["text"] for choice in best["choices"]] == expected
    assert best["usage"] == every["usage"]


def test_the_best_texts_have_the_highest_probability_per_token() -> None:
    request: RequestState = make_state(
        generation=GenerationRequest(endpoint="completions", model=MODEL, n=4, n_returned=2)
    )
    for sequence, logprobs in zip(
        request.sequences, ([-1.0, -1.0], [-0.5], [-0.5, -0.5, -0.5], [-3.0, 0.0]), strict=True
    ):
        sequence.logprobs = [m.Logprob(value) for value in logprobs]
        sequence.n_used = len(logprobs)
    assert [s.index for s in best_sequences(request)] == [1, 2]


def test_the_configured_order_is_that_of_requests_without_one(make_server: Callable[..., Server]) -> None:
    order = ["mask", "min_p", "temperature"]
    model = {"name": MODEL, "path": "/none.gguf", "sampler_order": order}
    server = make_server(models=[model])
    server.wait_ready()
    for more, expected in ({}, order), ({"order": ["temperature", "mask"]}, ["temperature", "mask"]):
        assert server.post("/v1/generate", {"prompt": "a", "max_tokens": 2, **more}).status == 200
        assert list(server.peers.generator.submitted[-1].sampling.order) == expected
    for name, value in (("top_k", 5), ("presence_penalty", 0.5), ("xtc_probability", 0.1)):
        for path, body in (("/v1/generate", {"prompt": "a"}), ("/v1/completions", {"model": MODEL, "prompt": "a"})):
            refused = server.post(path, {**body, name: value})
            assert (refused.status, refused.error["param"]) == (400, name)
            assert "sampler_order" in refused.error["message"]
        accepted = {"prompt": "a", "max_tokens": 2, name: value, "order": order}  # the client has left it out itself
        assert server.post("/v1/generate", accepted).status == 200
    assert server.post("/v1/generate", {"prompt": "a", "max_tokens": 2, "min_p": 0.1, "temperature": 0}).status == 200


def test_a_temperature_of_0_needs_no_step() -> None:
    check_configured_order(Sampling(temperature=0.0), ("mask",))
    with pytest.raises(InvalidRequest, match=r"temperature is 0\.5"):
        check_configured_order(Sampling(temperature=0.5), ("mask",))
