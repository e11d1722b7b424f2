"""Law: the text does not depend on how tokens were grouped, and nothing leaks past a stop string."""

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
def test_text_comes_out_whole_whatever_the_tokens(text: str, sizes: list[int]) -> None:
    decoder = StreamDecoder()
    shown = [decoder.push(piece) for piece in cut(text.encode(), sizes)]
    assert all("�" not in s for s in shown)
    assert "".join(shown) + decoder.finish() == text


@given(st.binary(max_size=30), st.lists(st.integers(0, 3), max_size=30))
def test_invalid_bytes_are_replaced_as_python_does(data: bytes, sizes: list[int]) -> None:
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
        # What is held back is only the beginning of a stop string.
        held = whole[len(shown) :]
        assert whole.startswith(shown)
        assert not held or any(s.startswith(held) and s != held for s in stop)
    assert shown + decoder.finish() == text


def test_of_two_stop_strings_that_begin_together_the_longer_is_named() -> None:
    decoder = StreamDecoder(["ab", "abc"])
    assert decoder.push(b"xabcd") == "x"
    assert decoder.stop_string == "abc"
