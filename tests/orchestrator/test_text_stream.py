"""The text of a stream across engines: what is delivered is one text, wherever they die."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.api import sse
from pipeline.api.output_text import FIXED, MAX_TEXT_BYTES, comment, split_body
from pipeline.api.output_text import TEXT as TEXT_HEADER
from stages.orchestrator.event_cutter import EventTooLargeError
from stages.orchestrator.text_stream import MAX_REPLAYS, TextStream

TEXT = 'Grüße, 世界! {"data: ": 1}\nand \\ more'  # of one character a token


def answer(text: str, n_before: int, *, is_chat: bool, begins: bool) -> bytes:
    """What a door sends for the rest of an answer."""
    out = []

    def event(part: dict[str, str], reason: str | None = None) -> bytes:
        choice = {"index": 0, **({"delta": part} if is_chat else part), "finish_reason": reason}
        return sse.event(json.dumps({"id": "x", "choices": [choice]}).encode())

    if begins and is_chat:
        out.append(event({"role": "assistant", "content": ""}))
    for index, character in enumerate(text):
        out += [comment(n_before + index + 1), event({"content": character} if is_chat else {"text": character})]
    out += [comment(n_before + len(text)), event({} if is_chat else {"text": ""}, "stop")]
    usage = {"completion_tokens": n_before + len(text)}
    return b"".join([*out, sse.event(json.dumps({"choices": [], "usage": usage}).encode()), sse.DONE])


def delivered(stream: bytes) -> str:
    found = []
    for block in stream.split(b"\n\n"):
        if block.startswith(b"data: {"):
            for choice in json.loads(block[6:])["choices"]:
                found.append(choice["delta"].get("content", "") if "delta" in choice else choice["text"])
    return "".join(found)


@given(
    is_chat=st.booleans(),
    deaths=st.lists(st.integers(0, 4000) | st.integers(-160, -1), max_size=MAX_REPLAYS),
    cut=st.integers(11, 900),
    damage=st.sampled_from([b"", b"data: <html>\n\n", b'data: {"choices":[{}]}\n\n', b"data: [1]\n\n"]),
)
def test_text_is_neither_lost_nor_repeated(is_chat: bool, deaths: list[int], cut: int, damage: bytes) -> None:
    """Engines die after any byte, or send nonsense; the next one goes on after the text so far."""
    stream, received = TextStream(), b""
    for death in [*deaths, None]:
        _, so_far = split_body(str(len(rest)), rest) if (rest := stream.restart()) else (b"", None)
        assert stream.accepted({}) == (so_far is not None)
        text = so_far.text if so_far is not None else ""
        assert text == delivered(received) and TEXT.startswith(text)
        assert so_far is None or so_far.tokens == len(text)
        sent = answer(TEXT[len(text) :], len(text), is_chat=is_chat, begins=so_far is None)
        if death is not None and death < len(sent):  # a negative one counts from the end, where the last events are
            sent = sent[:death] + damage
        for begin in range(0, len(sent), cut):
            received += stream.feed(sent[begin : begin + cut])
            if stream.problem:
                break
        if stream.is_over:
            break
    assert stream.is_over and delivered(received) == TEXT and received.endswith(sse.DONE)
    assert received.count(sse.DONE) == 1 and received.count(b'"role"') == (1 if is_chat else 0)
    assert stream.tokens == len(TEXT) and received.count(b'"stop"') == 1
    assert (b"starling_replayed" in received) == (stream.n_replays > 0)
    last = json.loads(received.split(b"\n\n")[-3].removeprefix(b"data: "))
    assert last.get("starling_replayed", 0) == stream.n_replays


def test_an_error_event_is_not_forwarded_and_what_precedes_it_is() -> None:
    stream = TextStream()
    begun = answer("abc", 0, is_chat=False, begins=True).split(b": text 3")[0]
    out = stream.feed(begun + b'data: {"error":{"code":"MODEL_UNAVAILABLE"}}\n\ndata: more\n\n')
    assert delivered(out) == "ab" and b"error" not in out and b"more" not in out
    assert b"MODEL_UNAVAILABLE" in stream.error and not stream.is_over


def test_replays_and_text_have_bounds() -> None:
    stream = TextStream()
    stream.feed(answer("a", 0, is_chat=False, begins=True)[:-60])
    for _ in range(MAX_REPLAYS):
        assert stream.can_go_on
        stream.restart()  # of which engines that refuse it, or are not there, get nothing
        stream.restart()
        assert stream.accepted({})
    assert not stream.can_go_on
    stream = TextStream()
    half = json.dumps({"choices": [{"index": 0, "text": "x" * (MAX_TEXT_BYTES // 2), "finish_reason": None}]}).encode()
    stream.feed(2 * sse.event(half))
    assert stream.can_go_on
    stream.feed(sse.event(half))
    assert not stream.can_go_on
    stream = TextStream()
    stream.accepted({TEXT_HEADER: FIXED})
    stream.feed(answer("a", 0, is_chat=False, begins=True)[:-60])
    assert not stream.can_go_on
    with pytest.raises(EventTooLargeError):
        TextStream().feed(b"data: " + b"x" * (17 << 20))
