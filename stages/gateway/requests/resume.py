"""Reading a request again: a client that lost its connection continues where its last event left off.

    find     the request, in flight, replayable, waiting or dormant
    resume   wait until it has produced again what the client has, then attach a sink that sends the rest

A cursor counts tokens. What was sent of them is counted in characters here, by decoding the tokens before the cursor
again, because text can be held back for later tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import TypeVar

from pipeline.errors import Conflict, InvalidRequest, NotFound
from stages.gateway.requests.event_cursor import TOKENS, EventCursor
from stages.gateway.requests.readers import CatchUpWaiter, Readers
from stages.gateway.requests.recovery import Recovery
from stages.gateway.requests.spec import RequestSpec
from stages.gateway.requests.state import RequestState, Sink
from stages.gateway.requests.text_decoder import StreamDecoder
from stages.gateway.requests.token_bytes import TokenBytes

TOKENS_AT_ONCE = 512  # decoded before other streams get the event loop; some 10 ms with long stop strings

Check = Callable[[RequestSpec], object]  # raises if the request cannot be read in this way
AnySink = TypeVar("AnySink", bound=Sink)


class Resumer:
    """One per gateway. `vocabularies`: see `Relay.vocabularies`."""

    def __init__(self, recovery: Recovery, readers: Readers, vocabularies: Mapping[str, TokenBytes]) -> None:
        self._recovery = recovery
        self._readers = readers
        self._vocabularies = vocabularies

    def spec_of(self, request_id: str, tenant: str, cursor: EventCursor | None = None) -> RequestSpec:
        """What the request to resume at `cursor` asks for. Raises as `find`, and starts nothing."""
        spec = self._recovery.spec_of(request_id, tenant)
        if spec is None:
            raise _missing(request_id)
        _check(spec, cursor)
        return spec

    def find(
        self, request_id: str, tenant: str, cursor: EventCursor | None = None, check: Check = lambda spec: None
    ) -> RequestState:
        """The request to resume at `cursor`. Its answer is generated again if it has to be.

        Raises `NotFound`, also for a request of another tenant, `InvalidRequest` if the cursor is of another request,
        and what `check` raises.
        """

        def check_all(spec: RequestSpec) -> None:
            _check(spec, cursor)
            check(spec)

        request = self._recovery.find(request_id, tenant, check_all)
        if request is None:
            raise _missing(request_id)
        return request

    async def resume(
        self,
        request: RequestState,
        cursor: EventCursor | None,
        attach: Callable[[list[int]], AnySink],
        prepare: Callable[[], Awaitable[None]],
    ) -> AnySink:
        """Wait until the request has reached `cursor` again, then add the sink that `attach` returns.

        `attach` gets the number of characters of each choice that the client has, and brings the sink up to date, at
        once; `prepare` is awaited before.
        """
        waiter = CatchUpWaiter(request, cursor)
        self._readers.join(request, waiter)
        try:
            await waiter.over
            await prepare()
            sink = attach(await self._received(request, cursor) if cursor is not None else [])
        except BaseException:
            self._readers.leave(request, waiter)
            raise
        self._readers.replace(request, waiter, sink)
        return sink

    async def _received(self, request: RequestState, cursor: EventCursor) -> list[int]:
        """Characters of each choice that a client with this cursor has. Raises `Conflict`."""
        counts = [0] * len(request.sequences)
        for sequence, choice in zip(request.sequences, cursor.choices):
            tokens = min(choice.tokens, sequence.n_emitted)
            if choice.level != TOKENS or not tokens or choice.units:
                continue
            if tokens == sequence.n_emitted and not sequence.is_flushed:
                counts[sequence.index] = sequence.text_length
            elif sequence.text_ends is not None:  # plugins have changed the text
                counts[sequence.index] = sequence.text_ends[tokens - 1]
            else:
                counts[sequence.index] = await self._length(request, sequence.tokens[:tokens])
        return counts

    async def _length(self, request: RequestState, tokens: list[int]) -> int:
        """Characters that are certain after these tokens. Yields to the event loop in between."""
        vocabulary = self._vocabularies.get(request.spec.vocabulary)
        if not vocabulary:
            raise Conflict(
                f"the vocabulary of {request.id} is no longer loaded, so its stream cannot be resumed in the middle; "
                f"GET /v1/requests/{request.id} without Last-Event-ID returns the whole answer",
                "Last-Event-ID",
            )
        generation = request.spec.generation
        decoder, length = StreamDecoder(generation.stop, generation.reasoning or None), 0
        skip_special, kept = generation.skip_special, generation.kept_control
        for at in range(0, len(tokens), TOKENS_AT_ONCE):
            for token in tokens[at : at + TOKENS_AT_ONCE]:
                length += len(decoder.push(vocabulary.shown(token, skip_special, kept)))
            await asyncio.sleep(0)
        return length


def _missing(request_id: str) -> NotFound:
    return NotFound(
        f"there is no request {request_id[:80]!r}; answers of ended requests are stored for a short time only"
    )


def _check(spec: RequestSpec, cursor: EventCursor | None) -> None:
    if cursor is not None and len(cursor.choices) != len(spec.sequences):
        raise InvalidRequest(
            f"Last-Event-ID has {len(cursor.choices)} places and the request {len(spec.sequences)} "
            f"choices; send the id of the last event as it was received",
            "Last-Event-ID",
        )
