"""Heads of one connection are read as each of them alone, also those that differ from the one before in the length."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from stages.orchestrator.text_request import MAX_BODY_BYTES, MAX_HEAD_BYTES, MAX_KEPT_BYTES, HeadReader, read_head

PATH = "/v1/generate"
HOST = b"Host: a\r\n"


def request(n_bytes: int) -> bytes:
    """One whose head has a field of so many bytes."""
    return b"POST %b HTTP/1.1\r\n%ba: %b\r\nContent-Length: 5\r\n\r\nhello" % (PATH.encode(), HOST, b"b" * n_bytes)


LENGTHS = st.one_of(
    st.integers(0, 2 * MAX_BODY_BYTES).map(b"%d".__mod__),
    st.sampled_from([b"", b"05", b"5 ", b" 5", b"+5", b"1234567", b"12345678", b"1\r\nA: b", b"5\r\n\r\n"]),
)


@given(
    st.lists(st.tuples(st.booleans(), LENGTHS, st.booleans()), min_size=2, max_size=6),
    st.sampled_from([b"", b"Content-Type: application/json\r\n", b"A: " + b"b" * (MAX_HEAD_BYTES - 120) + b"\r\n"]),
    st.sampled_from([b"Content-Length: ", b"content-length:", b"CONTENT-LENGTH:\t "]),
    st.sampled_from([b"", b" ", b"\r\nX-Request-Id: 1", b" \t\r\nX-Request-Id: 1"]),
)
def test_a_head_like_the_last_one_is_read_as_any(
    heads: list[tuple[bool, bytes, bool]], before: bytes, name: bytes, behind: bytes
) -> None:
    begin, reader = b"POST " + PATH.encode() + b" HTTP/1.1\r\n" + HOST, HeadReader((PATH,))
    for is_usual, length, is_cut in heads:
        data = begin + before + (b"" if is_usual else b"B: c\r\n") + name + length + behind + b"\r\n\r\n{}"
        data = data[: len(data) - 4 * is_cut]
        assert reader.read(data) == read_head(data, (PATH,))


def test_the_same_head_is_read_once_unless_it_is_large() -> None:
    for n_bytes, is_kept in ((10, True), (MAX_KEPT_BYTES, False)):
        reader, data = HeadReader((PATH,)), request(n_bytes)
        first = reader.read(data)
        assert first is not None and (reader.read(data + b"more") is first) is is_kept
        assert reader.read(data.replace(b"Content-Length: 5", b"Content-Length: 17")) == first._replace(
            fields=[(name, "17" if name == "Content-Length" else value) for name, value in first.fields],
            n_head=first.n_head + 1,
            n_body=17,
        )
