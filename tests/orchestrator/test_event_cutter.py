"""The event cutter: however a stream is cut, interleaved and broken, each event of each choice is forwarded once."""

from __future__ import annotations

import itertools
import re

from hypothesis import given
from hypothesis import strategies as st

from stages.orchestrator.event_cutter import USUAL, EventCutter
from tests.gateway.test_event_stream import Transport, make


def stream_of(lengths: list[int], order: list[int], n_opening: int = 1) -> bytes:
    """A stream of choices with so many tokens each, whose next events come in the order of `order`, then by number."""
    places = ["0"] * len(lengths)
    events = ["retry: 1000\n" + 'data: {"opening":0}\n\n'] if n_opening else ["retry: 1000\n"]
    events += [f'data: {{"opening":{number}}}\n\n' for number in range(1, n_opening)]
    left = {
        choice: iter([*map(str, range(1, length + 1)), f"{length}f", f"{length}e"])
        for choice, length in enumerate(lengths)
    }
    for turn in itertools.chain(order, itertools.cycle(range(len(lengths)))):
        if not left:
            break
        choice = turn % len(lengths)
        place = next(left[choice], None) if choice in left else None
        if place is None:
            left.pop(choice, None)
            continue
        places[choice] = place
        events.append(f'id: req-1:{".".join(places)}\ndata: {{"choice":{choice},"at":"{place}"}}\n\n')
    places = [place.rstrip("e") + "d" for place in places]
    events.append(f'id: req-1:{".".join(places)}\ndata: {{"usage":1}}\n\n')
    return "".join([*events, "data: [DONE]\n\n"]).encode()


def of_choice(data: bytes, choice: int) -> list[bytes]:
    return re.findall(rb'"choice":%d,"at":"([^"]*)"' % choice, data)


def cut(data: bytes, places: list[int]) -> list[bytes]:
    bounds = [0, *sorted(place % (len(data) + 1) for place in places), len(data)]
    return [data[a:b] for a, b in itertools.pairwise(bounds)]


PLACES = st.lists(st.integers(0, 2000), max_size=6)
ORDERS = st.lists(st.lists(st.integers(0, 2), max_size=12), min_size=1, max_size=4)


@given(st.lists(st.integers(1, 5), min_size=1, max_size=3), ORDERS, PLACES, PLACES, st.integers(0, 3))
def test_a_stream_that_breaks_anywhere_has_each_event_once(
    lengths: list[int], orders: list[list[int]], places: list[int], deaths: list[int], n_opening: int
) -> None:
    cutter, forwarded = EventCutter(), b""
    for number, order in enumerate([*orders, []]):
        data = stream_of(lengths, order, n_opening)
        is_last = number == len(orders)
        death = len(data) if is_last or number >= len(deaths) else deaths[number] % len(data)
        cutter.restart(is_replay=True)
        for part in cut(data[:death], places):
            forwarded += cutter.feed(part)
        if cutter.last_id and not cutter.last_id.endswith(b"d"):  # the id says what the client has
            received = [(of_choice(forwarded, choice) or [b"0"])[-1] for choice in range(len(lengths))]
            assert cutter.last_id == b"req-1:" + b".".join(received)
        if cutter.is_over:
            break
    assert cutter.is_over
    whole = stream_of(lengths, [], n_opening)
    for choice in range(len(lengths)):
        assert of_choice(forwarded, choice) == of_choice(whole, choice)
    assert forwarded.count(b"opening") == n_opening and forwarded.count(b"usage") == 1
    assert forwarded.count(b"[DONE]") == 1 and forwarded.startswith(b"retry: 1000\n")
    assert cutter.n_events == whole.count(b"data: ")
    if len(lengths) == 1:
        assert forwarded == whole


def test_an_id_of_a_continued_stream_is_what_the_client_has() -> None:
    cutter = EventCutter()
    cutter.feed(b'id: r:1.0\ndata: {"a":1}\n\nid: r:2.0\ndata: {"a":2}\n\nid: r:2.1\ndata: {"b":1}\n\n')
    cutter.restart(is_replay=True)
    replayed = b'id: r:0.1\ndata: {"b":1}\n\nid: r:0.2\ndata: {"b":2}\n\nid: r:1.2\ndata: {"a":1}\n\n'
    assert cutter.feed(replayed) == b'id: r:2.2\ndata: {"b":2}\n\n'
    assert cutter.feed(b'id: r:2.2\ndata: {"a":2}\n\nid: r:3.2\ndata: {"a":3}\n\n') == b'id: r:3.2\ndata: {"a":3}\n\n'


def test_a_client_that_comes_with_an_id_gets_what_follows_it() -> None:
    cutter = EventCutter(b"r:2")
    cutter.restart(is_replay=True)
    stream = b'retry: 1000\ndata: {"o":1}\n\nid: r:0\ndata: {"o":2}\n\n'
    stream += b"".join(b'id: r:%d\ndata: {"a":%d}\n\n' % (number, number) for number in range(1, 5))
    assert cutter.feed(stream) == b'id: r:3\ndata: {"a":3}\n\nid: r:4\ndata: {"a":4}\n\n'


def test_a_stream_that_an_engine_continues_has_no_second_delay() -> None:
    cutter = EventCutter()
    first = b'retry: 1000\nid: r:1\ndata: {"a":1}\n\nid: r:2\ndata: {"a":2}\n\n'
    assert cutter.feed(first + b"id: r:3\nda") == first
    cutter.restart(is_replay=False)
    rest = b'id: r:4\ndata: {"a":34}\n\ndata: [DONE]\n\n'
    assert cutter.feed(b"retry: 1000\n" + rest) == rest
    assert cutter.is_over


def test_several_events_of_one_token_are_told_apart_by_their_units() -> None:
    cutter = EventCutter()
    events = [b'id: r:3-10\nevent: x\ndata: {"n":1}\n\n', b'id: r:3-20\nevent: x\ndata: {"n":2}\n\n']
    events += [b'id: r:3\nevent: x\ndata: {"n":3}\n\n', b'id: r:4\nevent: x\ndata: {"n":4}\n\n']
    cutter.feed(b"".join(events[:2]))
    cutter.restart(is_replay=True)
    assert cutter.feed(b"".join(events)) == b"".join(events[2:])


def test_comments_pass_and_count_for_nothing() -> None:
    cutter = EventCutter()
    assert cutter.feed(b":\n\nid: r:1\ndata: {}\n\n") == b":\nid: r:1\ndata: {}\n\n"
    assert (cutter.n_events, cutter.last_id) == (1, b"r:1")


def test_an_error_is_held_back_with_all_that_follows() -> None:
    cutter = EventCutter()
    error = b'id: r:1e\ndata: {"error":{"code":"DRAINING"}}\n\n'
    assert cutter.feed(b"id: r:1\ndata: {}\n\n" + error + b"data: [DONE]\n\n") == b"id: r:1\ndata: {}\n\n"
    assert cutter.error == error and not cutter.is_over
    named = EventCutter()
    named.feed(b'event: error\ndata: {"type":"error","error":{}}\n\n')
    assert named.error and not named.n_events


def test_the_choices_that_an_error_ends_are_those_that_have_not_ended() -> None:
    cutter = EventCutter()
    assert cutter.open_choices(3) == [0, 1, 2]
    for places, expected in ((b"0.0.0", [0, 1, 2]), (b"4e.2f.0", [1, 2]), (b"4e.2f.7d", [1]), (b"4e.2e.7d", [])):
        cutter.feed(b"id: r:%b\ndata: {}\n\n" % places)
        assert cutter.open_choices(3) == expected
    assert EventCutter(b"r:2e.7").open_choices(1) == [1]  # read again: only the id says how many there are


def test_opening_events_that_come_with_an_error_are_held_back_too() -> None:
    """Nothing was forwarded then: another engine may begin, with opening events of its own."""
    opening = b'retry: 1000\ndata: {"o":1}\n\nid: r:0\ndata: {"o":2}\n\n'
    error = b'id: r:0\nevent: response.failed\ndata: {"type":"response.failed"}\n\n'
    first = b'id: r:1\ndata: {"n":1}\n\n'
    cutter = EventCutter()
    assert cutter.feed(opening + b": failed DRAINING\n\n" + error) == b"" and not cutter.has_begun
    assert (cutter.before_error, cutter.error, cutter.error_code) == (opening, error, "DRAINING")
    cutter.restart(is_replay=True)
    assert not cutter.before_error
    assert cutter.feed(opening + first) == opening + first and cutter.n_events == 3
    begun = EventCutter()  # the error comes later
    assert begun.feed(opening) == opening and begun.feed(error) == b""
    assert (begun.before_error, begun.error, begun.n_events) == (b"", error, 2)
    begun.restart(is_replay=True)
    assert begun.feed(opening + first) == first
    text = EventCutter()
    assert text.feed(opening + first + error) == opening + first and not text.before_error
    resumed = EventCutter(b"r:0")
    resumed.feed(b"retry: 1000\n" + error)
    assert (resumed.before_error, resumed.last_id) == (b"", b"r:0")


def test_messages_end_with_their_last_event() -> None:
    cutter = EventCutter()
    last = b'id: r:1d\nevent: message_stop\ndata: {"type":"message_stop"}\n\n'
    assert cutter.feed(last) == last and cutter.is_over


BLOCKS = [
    b": tokens 0 0 0 7",
    b": tokens 0 1 0 8,9",
    b": loading",
    b": failed DRAINING",
    b'id: r:1\ndata: {"n":1}',
    b'id: r:2\nevent: delta\ndata: {"type":"delta"}',
    b'event: delta\nid: r:3\ndata: {"n":3}',
    b"id: r:3\n: a comment\ndata: {}",
    b"id: r:4d\ndata: [DONE]",
    b'id: r:4d\nevent: message_stop\ndata: {"type":"message_stop"}',
    b'id: r:4d\nevent: x\ndata: {"type":"response.completed","response":{}}',
    b'id: r:4d\nevent: x\ndata: {"type":"response.failed","response":{}}',
    b'id: r:4e\ndata: {"error":{}}',
    b'retry: 1000\ndata: {"n":0}',
    b"data: {}",
    b"id: r:5",
]


@given(st.lists(st.tuples(st.sampled_from(BLOCKS), st.booleans()), max_size=8), st.booleans())
def test_events_that_come_singly_are_taken_like_those_that_come_together(
    blocks: list[tuple[bytes, bool]], is_replay: bool
) -> None:
    """A part of a stream ends behind each block that is marked."""
    opening, together, singly = b'id: r:1\ndata: {"n":1}\n\n', EventCutter(), EventCutter()
    for cutter in (together, singly):
        cutter.feed(opening)
        cutter.restart(is_replay=is_replay)
    parts = [b""]
    for block, is_end in blocks:
        parts[-1] += block + b"\n\n"
        if is_end:
            parts.append(b"")
    data = b"".join(parts)
    # Its last byte comes by itself, so that no part is one event.
    whole = together.feed(data[:-1]) + together.feed(data[-1:])
    assert b"".join(map(singly.feed, parts)) == whole
    for name in ("last_id", "n_events", "is_over", "error", "error_code"):
        assert getattr(singly, name) == getattr(together, name)
    assert singly.output.counts() == together.output.counts()


async def test_what_an_engine_sends_for_a_step_is_taken_at_once() -> None:
    """The bytes are those that the gateway writes to an orchestrator for one token."""
    stream, request, _ = make()
    transport = Transport()
    stream.name_tokens()
    stream.attach(transport, is_chunked=False)  # type: ignore[arg-type]
    (sequence,) = request.sequences
    for number in range(1, 5):
        sequence.tokens.append(100 + number)
        stream.text(sequence, f"word{number}", number - 1, number)
        stream.flush()
    _opening, *steps = transport.writes
    assert len(steps) == 3 and all(USUAL.fullmatch(step) for step in steps)
    at_once, byte_by_byte = EventCutter(), EventCutter()
    forwarded = [b"".join(map(at_once.feed, transport.writes))]
    forwarded.append(b"".join(byte_by_byte.feed(bytes([one])) for one in b"".join(transport.writes)))
    assert forwarded[0] == forwarded[1] and b": tokens" not in forwarded[0]
    for cutter in (at_once, byte_by_byte):
        assert (cutter.last_id, cutter.output.counts()) == (b"req-1:4", [4])
    assert at_once.n_events == byte_by_byte.n_events
