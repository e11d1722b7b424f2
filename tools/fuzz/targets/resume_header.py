"""SSE resume headers: `Last-Event-ID` from its bytes to the events that follow it.

byte 0   the state of the request: bit 0 ended, bits 1 and 2 the number of choices, bits 3 to 5 tokens so far
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Iterator

from pipeline.api.requests import chat
from pipeline.errors import StarlingError
from pipeline.protocol.messages import Described, Sampling
from stages.gateway.endpoints.chat_formatter import ChatFormatter
from stages.gateway.http.sinks import EventStream
from stages.gateway.requests.event_cursor import EventCursor, is_reached, parse_event_cursor
from stages.gateway.requests.resume import Resumer
from stages.gateway.requests.spec import RequestSpec, SequenceSpec
from stages.gateway.requests.state import Outcome, RequestState, SequencePhase
from stages.gateway.requests.text_decoder import StreamDecoder
from stages.gateway.requests.token_bytes import TokenBytes
from tools.fuzz.target import Target

PIECES = [b"a", b"\xe2\x82", b"\xac", b"<|x|>", b" b", b"st", b"x", b""]
ID = "req-0a1b2c"


def _vocabulary() -> TokenBytes:
    ends, at = array("I"), 0
    for piece in PIECES:
        ends.append(at := at + len(piece))
    table = TokenBytes()
    described = Described(
        *("", "m", "", len(PIECES), 64, (), True),
        pieces=b"".join(PIECES),
        piece_ends=ends.tobytes(),
        control=array("i", [3]).tobytes(),
    )
    table.fill(described)
    return table


VOCABULARY = _vocabulary()


def _request(selector: int) -> RequestState:
    """A chat of 1 to 4 choices that has produced 0 to 7 tokens."""
    n = 1 + (selector >> 1 & 3)
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "stream": True, "n": n, "stop": ["stop"]}
    generation = chat.read(body)
    sequences = tuple(SequenceSpec(0, 0, choice, 9, Sampling(), ()) for choice in range(n))
    spec = RequestSpec(
        id=ID,
        tenant="t",
        model="m",
        digest="ab",
        numerics=1,
        generation=generation,
        seed=1,
        created=1,
        fingerprint="fp",
        deadline=9.0,
        prompts=(b"1234",),
        sequences=sequences,
        version="m",
    )
    request = RequestState(spec, 9.0)
    is_ended = bool(selector & 1)
    for sequence in request.sequences:
        tokens = [i % len(PIECES) for i in range(selector >> 3 & 7)]
        decoder = StreamDecoder(generation.stop)
        parts = [decoder.push(VOCABULARY.shown(token, generation.skip_special)) for token in tokens]
        if is_ended:
            parts.append(decoder.finish())
            sequence.finish_reason = "length"
            sequence.is_flushed = True
            sequence.move(SequencePhase.FINISHED)
        sequence.tokens, sequence.text = tokens, [part for part in parts if part]
        sequence.text_length, sequence.n_emitted = sum(map(len, parts)), len(tokens)
    if is_ended:
        request.end(Outcome.FINISHED)
    return request


async def _resume(request: RequestState, cursor: EventCursor) -> None:
    resumer = Resumer(None, None, {"m": VOCABULARY})  # type: ignore[arg-type]
    received = await resumer._received(request, cursor)
    stream = EventStream(request, ChatFormatter(request, VOCABULARY), lambda reason: None)
    stream.resume(request, cursor.choices, received)


LOOP = asyncio.new_event_loop()


def run(data: bytes) -> None:
    """Parse the header as aiohttp decodes it, and produce the events after it."""
    text = data[1:].decode("utf-8", "surrogateescape")
    cursor = parse_event_cursor(text)
    again = f"{cursor.request}:" + ".".join(
        f"{choice.tokens}{('', 'f', 'e', 'd')[choice.level]}" for choice in cursor.choices
    )
    assert parse_event_cursor(again) == cursor
    request = _request(data[0])
    if len(cursor.choices) != len(request.sequences):
        return  # refused before: `Resumer.find`
    for sequence, choice in zip(request.sequences, cursor.choices, strict=True):
        if not is_reached(sequence, choice):
            return  # a reader waits
    LOOP.run_until_complete(_resume(request, cursor))


def seeds() -> Iterator[bytes]:
    """Cursors of one and several choices."""
    for selector, positions in ((0x38, "3"), (0x39, "7d"), (0x3B, "2.5f"), (0x3F, "1.2e.3f.4d"), (0x3E, "1.2.3.4")):
        yield bytes([selector]) + f"{ID}:{positions}".encode()


TARGET = Target(
    run,
    seeds,
    errors=(StarlingError,),
    modules=(
        "stages.gateway.http.sinks",
        "stages.gateway.requests.event_cursor",
        "stages.gateway.requests.resume",
        "stages.gateway.requests.text_decoder",
    ),
    max_bytes=256,
)
