"""The reader of responses: however the bytes are cut, the same head, body and end; and nothing that is ambiguous."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.orchestrator.http_response import (
    MAX_FIELDS,
    MAX_HEAD_BYTES,
    MAX_SIZE_BYTES,
    ResponseError,
    ResponseReader,
)

OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"
INTERIM = b"HTTP/1.1 100 Continue\r\n\r\n"
CUTS = st.lists(st.integers(0, 4000), max_size=12)
BODIES = st.lists(st.binary(min_size=1, max_size=300), max_size=8)
EXTENSIONS = st.sampled_from([b"", b";a=b", b' ;q="x y"', b"\t;\xff"])
TRAILERS = st.lists(st.sampled_from([b"X-Sum: 7", b"a:", b"T:  x "]), max_size=3)


def cut(data: bytes, places: list[int]) -> list[bytes]:
    bounds = [0, *sorted(place % (len(data) + 1) for place in places), len(data)]
    return [data[a:b] for a, b in itertools.pairwise(bounds)]


def chunk(part: bytes, extension: bytes = b"", form: str = "%x") -> bytes:
    return (form % len(part)).encode() + extension + b"\r\n" + part + b"\r\n"


def read(parts: list[bytes], method: str = "POST") -> tuple[int, dict[str, str], bytes, bool, bool]:
    """Status, fields, body, whether it has ended, and whether the connection is kept."""
    reader = ResponseReader(method)
    body = b"".join([reader.feed(part) for part in parts])
    return reader.status, dict(reader.fields), body, reader.has_ended, reader.keeps_connection


@given(BODIES, st.lists(EXTENSIONS, min_size=8), TRAILERS, st.integers(0, 2), st.sampled_from(["%x", "0%X"]), CUTS)
def test_chunks_are_put_together_wherever_the_bytes_are_cut(
    parts: list[bytes], extensions: list[bytes], trailers: list[bytes], n_interim: int, form: str, cuts: list[int]
) -> None:
    chunks = b"".join(chunk(part, extension, form) for part, extension in zip(parts, extensions))
    data = INTERIM * n_interim + CHUNKED + chunks + b"0\r\n" + b"".join(one + b"\r\n" for one in trailers) + b"\r\n"
    found = read(cut(data, cuts))
    assert found == (200, {"Transfer-Encoding": "chunked"}, b"".join(parts), True, True)


@given(st.binary(max_size=2000), st.integers(0, 2), CUTS)
def test_a_body_of_known_length_ends_there(body: bytes, n_interim: int, cuts: list[int]) -> None:
    data = INTERIM * n_interim + OK + b"content-length: %d\r\nConnection: a, close\r\n\r\n%b" % (len(body), body)
    status, fields, found, has_ended, keeps = read(cut(data, cuts))
    assert (status, found, has_ended, keeps) == (200, body, True, False)
    assert fields["content-length"] == str(len(body))


@given(BODIES, st.integers(0, 10_000), CUTS, st.booleans())
def test_a_response_that_breaks_has_not_ended(
    parts: list[bytes], place: int, cuts: list[int], is_chunked: bool
) -> None:
    body = b"".join(parts)
    if is_chunked:
        data = CHUNKED + b"".join(map(chunk, parts)) + b"0\r\n\r\n"
    else:
        data = OK + b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
    _, _, found, has_ended, _ = read(cut(data[: place % len(data)], cuts))
    assert not has_ended and body.startswith(found)


PIECES = st.sampled_from(
    [
        OK,
        CHUNKED,
        INTERIM,
        b"\r\n",
        b"\r",
        b"\n",
        b"\0",
        b"5\r\nhello\r\n",
        b"0\r\n\r\n",
        b"0\r\n",
        b"5;",
        b"fffffffffffff\r\n",
        b"Content-Length: 3\r\n",
        b"Content-Length: 4\r\n",
        b"A: b\r\n",
        b" c\r\n",
        b"HTTP/1.",
        b"x" * MAX_SIZE_BYTES,
    ]
)


@given(st.lists(st.one_of(PIECES, st.binary(max_size=6)), max_size=12).map(b"".join), CUTS)
def test_it_does_not_depend_on_the_cuts_what_is_refused(data: bytes, cuts: list[int]) -> None:
    try:
        whole = read([data])
    except ResponseError:
        with pytest.raises(ResponseError):
            read(cut(data, cuts))
        return
    assert read(cut(data, cuts)) == whole


@pytest.mark.parametrize(
    "data",
    [
        b"HTTP/2 200 OK\r\n\r\n",
        b"HTTP/1.1 20 OK\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 200\tOK\r\nContent-Length: 0\r\n\r\n",
        b"\r\nHTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\n\r\n",
        OK.replace(b"\r", b"") + b"Content-Length: 0\n\n",
        OK + b"A: b\r\r",
        OK + b"\r\n",
        OK + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n",
        OK + b"Content-Length: 5\r\nContent-Length: 5\r\n\r\n",
        OK + b"Content-Length: +5\r\n\r\n",
        OK + b"Content-Length: 5_0\r\n\r\n",
        OK + b"Content-Length: " + b"9" * 16 + b"\r\n\r\n",
        OK + b"Transfer-Encoding: gzip, chunked\r\n\r\n",
        OK + b"Transfer-Encoding: identity\r\n\r\n",
        b"HTTP/1.0 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n",
        OK + b"Content-Length : 0\r\n\r\n",
        OK + b"A: b\r\n c\r\nContent-Length: 0\r\n\r\n",
        OK + b"A: b\nContent-Length: 0\r\n\r\n",
        OK + b"A: b\rc\r\nContent-Length: 0\r\n\r\n",
        OK + b"A: \0\r\nContent-Length: 0\r\n\r\n",
        OK + b"no field\r\nContent-Length: 0\r\n\r\n",
        CHUNKED + b"5\nhello\r\n",
        CHUNKED + b"0x5\r\nhello\r\n",
        CHUNKED + b"+5\r\nhello\r\n",
        CHUNKED + b"\r\nhello\r\n",
        CHUNKED + b"5\r\nhello!\r\n",
        CHUNKED + b"5\r\nhello\n0\r\n\r\n",
        CHUNKED + b"0\r\nbad trailer\r\n\r\n",
        CHUNKED + b"0\r\nA: \0\r\n\r\n",
    ],
)
def test_what_could_be_read_in_two_ways_is_refused(data: bytes) -> None:
    with pytest.raises(ResponseError):
        read([data])
    with pytest.raises(ResponseError):
        read([data[at : at + 1] for at in range(len(data))])


@pytest.mark.parametrize("status", [b"204 No Content", b"304 Not Modified"])
def test_some_responses_have_no_body(status: bytes) -> None:
    assert read([b"HTTP/1.1 " + status + b"\r\n\r\n"])[2:] == (b"", True, True)
    for framing in (b"", b"Content-Length: 9\r\n", b"Transfer-Encoding: chunked\r\n"):
        assert read([OK + framing + b"\r\n"], "HEAD")[2:] == (b"", True, True)


def test_bytes_after_the_end_end_the_connection() -> None:
    for parts in ([CHUNKED + b"0\r\n\r\nHTTP"], [CHUNKED + b"0\r\n\r\n", b"H"], [OK + b"Content-Length: 1\r\n\r\nab"]):
        _, _, body, has_ended, keeps = read(parts)
        assert has_ended and not keeps and body in (b"", b"a")


def test_heads_sizes_and_trailers_are_bounded() -> None:
    room = MAX_HEAD_BYTES - len(OK + b"Content-Length: 0\r\nA: ")
    fits = OK + b"Content-Length: 0\r\nA: " + b"x" * room + b"\r\n\r\n"
    assert read(cut(fits, [len(fits) - 1]))[3:] == (True, True)
    too_long = OK + b"Content-Length: 0\r\nA: " + b"x" * (room + 1)
    too_many = b"".join(b"A%d: x\r\n" % number for number in range(MAX_FIELDS + 1))
    for data in (
        too_long + b"\r\n\r\n",
        too_long + b"xxx",
        OK + too_many + b"\r\n",
        CHUNKED + b"5;" + b"x" * MAX_SIZE_BYTES,
        CHUNKED + b"5;" + b"x" * MAX_SIZE_BYTES + b"\r\nhello\r\n",
        CHUNKED + b"0\r\n" + b"A: x\r\n" * (MAX_HEAD_BYTES // 6 + 1),
        CHUNKED + b"0\r\nA: " + b"x" * MAX_HEAD_BYTES,
    ):
        with pytest.raises(ResponseError):
            read([data])


def test_fields_are_found_in_any_case_and_joined() -> None:
    reader = ResponseReader("GET")
    reader.feed(OK + b"X-One: a\r\nx-ONE:  b \r\nContent-Length: 0\r\nRetry-After:1\r\n\r\n")
    assert reader.fields["x-one"] == reader.fields["X-One"] == "a, b"
    assert list(reader.fields) == ["X-One", "Content-Length", "Retry-After"] and reader.fields.get("none") is None
