"""The text decoder: the grouping of tokens does not change the text, and no text past a stop string is released."""

from hypothesis import given
from hypothesis import strategies as st

from stages.gateway.requests.text_decoder import StreamDecoder

texts = st.text(st.sampled_from("ab–日本😀👩‍👧\n x"), max_size=40)
stops = st.lists(st.text(st.sampled_from("ab–本😀 x"), min_size=1, max_size=4), max_size=4)


def cut(data: bytes, sizes: list[int]) -> list[bytes]:
    pieces, at = [], 0
    for size in sizes:
        pieces.append(data[at : at + size])
        at += size
    return [*pieces, data[at:]]


@given(texts, st.lists(st.integers(0, 5), max_size=40))
def test_text_does_not_depend_on_the_boundaries_of_tokens(text: str, sizes: list[int]) -> None:
    decoder = StreamDecoder()
    shown = [decoder.push(piece) for piece in cut(text.encode(), sizes)]
    assert all("�" not in s for s in shown)
    assert "".join(shown) + decoder.finish() == text


@given(st.binary(max_size=30), st.lists(st.integers(0, 3), max_size=30))
def test_invalid_utf8_is_replaced_as_python_replaces_it(data: bytes, sizes: list[int]) -> None:
    decoder = StreamDecoder()
    shown = "".join(decoder.push(piece) for piece in cut(data, sizes)) + decoder.finish()
    assert shown == data.decode("utf-8", "replace")


@given(texts, stops, st.lists(st.integers(0, 5), max_size=40))
def test_stop_string_ends_the_text_at_its_first_completion(text: str, stop: list[str], sizes: list[int]) -> None:
    decoder = StreamDecoder(stop)
    shown, grown = "", b""
    for piece in cut(text.encode(), sizes):
        grown += piece
        shown += decoder.push(piece)
        whole = grown.decode("utf-8", "ignore")
        met = [(whole.find(s), -len(s), s) for s in stop if s in whole]
        if met:
            at, _, first = min(met)
            assert decoder.stop_string == first
            assert shown == whole[:at]
            return
        # Only the beginning of a stop string is held back.
        held = whole[len(shown) :]
        assert whole.startswith(shown)
        assert not held or any(s.startswith(held) and s != held for s in stop)
    assert shown + decoder.finish() == text


def test_the_longer_of_two_stop_strings_with_the_same_start_is_reported() -> None:
    decoder = StreamDecoder(["ab", "abc"])
    assert decoder.push(b"xabcd") == "x"
    assert decoder.stop_string == "abc"
