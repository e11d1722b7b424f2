"""Log probabilities of outputs: how many a request may have, and that formatting many stops no other stream."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable
from typing import Any

import pytest

from pipeline.api.requests.generation_request import GenerationRequest
from pipeline.errors import InvalidRequest
from pipeline.protocol.messages import Logprob, Sampling
from stages.gateway.admission.lengths import MAX_OUTPUT_LOGPROBS, bound_logprobs
from stages.gateway.endpoints.chat_formatter import ChatFormatter
from stages.gateway.endpoints.completion_formatter import CompletionFormatter
from stages.gateway.endpoints.generate_formatter import GenerateFormatter
from stages.gateway.endpoints.output_logprobs import VALUES_AT_ONCE, prepare_rest, whole_body
from stages.gateway.http.sinks import EventStream
from stages.gateway.requests.event_cursor import TOKENS, ChoiceCursor, EventCursor
from stages.gateway.requests.state import Outcome, RequestState
from stages.gateway.requests.token_bytes import TokenBytes
from tests.gateway.peers import MODEL
from tests.gateway.request_states import make_state
from tests.gateway.server import Server
from tests.gateway.vocabularies import vocabulary_of

TOP, N_TOKENS = 20, 300
VOCABULARY = vocabulary_of([b"a", b" b", b"\xe2\x80", b"\x93", b"\n"])
Make = Callable[[RequestState, TokenBytes], Any]
FORMATTERS = {"chat": ChatFormatter, "completions": CompletionFormatter, "generate": GenerateFormatter}
each_formatter = pytest.mark.parametrize("endpoint", FORMATTERS)


def answer(endpoint: str, *, stream: bool = False, n: int = 2) -> RequestState:
    """A request of `n` choices that has all of its tokens."""
    ask = GenerationRequest(endpoint=endpoint, model=MODEL, n=n, stream=stream, logprobs=True, top_logprobs=TOP)
    request = make_state("req-1", ask, sampling=Sampling(seed=7, logprobs=TOP), max_tokens=N_TOKENS)
    for sequence in request.sequences:
        sequence.tokens = [(index + sequence.index) % 5 for index in range(N_TOKENS)]
        sequence.logprobs = [
            Logprob(-0.25 * index, tuple(((index + k) % 5, -0.5 * k) for k in range(TOP))) for index in range(N_TOKENS)
        ]
        grow(request, N_TOKENS)
    return request


def grow(request: RequestState, n_emitted: int) -> None:
    for sequence in request.sequences:
        text = b"".join(VOCABULARY.get(token) for token in sequence.tokens[:n_emitted])
        sequence.text, sequence.n_emitted = [text.decode("utf-8", "ignore")], n_emitted


def formatter_of(endpoint: str, request: RequestState) -> Any:
    make: Make = FORMATTERS[endpoint]
    return make(request, VOCABULARY)


@each_formatter
async def test_a_large_answer_is_made_in_parts(endpoint: str) -> None:
    """The event loop has turns meanwhile, and the bytes are those of an answer that is made at once."""
    request, turns = answer(endpoint), itertools.count()

    async def count() -> None:
        while True:
            next(turns)
            await asyncio.sleep(0)

    others = asyncio.ensure_future(count())
    made = await whole_body(formatter_of(endpoint, request), request)
    others.cancel()
    assert next(turns) >= 2 * N_TOKENS * (1 + TOP) // VALUES_AT_ONCE
    assert made == formatter_of(endpoint, request).whole_response()
    logprobs = json.loads(made)["choices"][1]["logprobs"]
    values = logprobs["top_logprobs"] if endpoint == "completions" else logprobs
    assert len(values["content"] if endpoint == "chat" else values) == N_TOKENS


@each_formatter
@pytest.mark.parametrize("received", [None, 0, 7, N_TOKENS - 1, N_TOKENS])
async def test_a_stream_that_is_read_again_has_the_same_bytes(endpoint: str, received: int | None) -> None:
    """Also if tokens come while it is prepared."""
    request = answer(endpoint, stream=True)
    cursor = None
    if received is not None:
        cursor = EventCursor("req-1", (ChoiceCursor(received), ChoiceCursor(N_TOKENS, TOKENS + 1)))
    sent = []
    for is_prepared in (True, False):
        formatter = formatter_of(endpoint, request)
        if is_prepared:
            grow(request, N_TOKENS - 20)
            await prepare_rest(formatter, request, cursor)
            grow(request, N_TOKENS)
        request.outcome = Outcome.OPEN
        stream = EventStream(request, formatter, pytest.fail)
        stream.resume(request, cursor.choices if cursor else (), [2 * (received or 0) // 3] * 2)
        sent.append(b"".join(stream._pending))
    assert sent[0] == sent[1]


@each_formatter
def test_nothing_is_formatted_of_what_a_client_has(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes after it is the same as in a stream that was read from its beginning."""
    request = answer(endpoint, stream=True, n=1)
    (sequence,) = request.sequences
    first, again = formatter_of(endpoint, request), formatter_of(endpoint, request)
    first.text_event(sequence, "x", 0, 30)
    with monkeypatch.context() as patch:
        patch.setattr(type(again), "_token_value", lambda *given: pytest.fail("it was formatted"), raising=False)
        again.skip(sequence, "x", 30, is_whole=False)
    assert again.text_event(sequence, "y", 30, 35) == first.text_event(sequence, "y", 30, 35)


def test_the_number_of_values_is_bounded() -> None:
    most = MAX_OUTPUT_LOGPROBS // (2 * 4 * 3)
    exact = [most, most]
    assert bound_logprobs(exact, 4, 2, "max_tokens", is_given=True) == exact
    with pytest.raises(
        InvalidRequest, match=f"max_tokens is {most + 1}, .*: set max_tokens to at most {most}"
    ) as caught:
        bound_logprobs([most + 1, most + 1], 4, 2, "max_tokens", is_given=True)
    assert caught.value.param == "max_tokens"
    assert bound_logprobs([2 * most - 9, 9], 4, 2, "max_tokens", is_given=False) == [2 * most - 9, 9]
    assert bound_logprobs([2 * most, 2 * most, 9], 4, 2, "max_tokens", is_given=False) == [most * 2 // 3] * 2 + [9]


def test_a_request_for_too_many_is_refused(server: Server) -> None:
    body = {"model": MODEL, "prompt": ["x"] * 8, "n": 16, "logprobs": 20, "max_tokens": 300}
    refused = server.post("/v1/generate", body)
    assert (refused.status, refused.error["param"]) == (400, "max_tokens"), refused.body
    assert f"at most {MAX_OUTPUT_LOGPROBS} values" in refused.error["message"]
