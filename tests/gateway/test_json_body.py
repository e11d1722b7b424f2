"""The strict parser: it rejects what Python's json accepts beyond RFC 8259, and nothing else."""

from __future__ import annotations

import contextlib
import json
import math
import time
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.api.fields import integer, number, read_fields
from pipeline.api.json_body import parse_object
from pipeline.api.requests import chat, completions, generate
from pipeline.errors import InvalidRequest
from tests.properties import examples

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@settings(max_examples=examples(50))
@given(st.dictionaries(st.text(), JSON, max_size=5), st.booleans())
def test_every_object_survives_a_round_trip(value: dict, escaped: bool) -> None:
    body = json.dumps(value, ensure_ascii=escaped).encode()
    assert parse_object(body) == value


@given(st.binary(max_size=60))
def test_any_bytes_give_an_object_or_an_invalid_request(body: bytes) -> None:
    with contextlib.suppress(InvalidRequest):
        assert isinstance(parse_object(body), dict)


@settings(max_examples=examples(30))
@given(st.dictionaries(st.sampled_from(sorted({*chat.FIELDS, *completions.FIELDS, *generate.FIELDS})), JSON))
def test_any_values_give_a_generation_request_or_an_invalid_request(body: dict) -> None:
    for module in (chat, completions, generate):
        with contextlib.suppress(InvalidRequest):
            request = module.read(body)
            assert request.sampling.temperature >= 0
            assert math.isfinite(request.sampling.temperature)
            assert 1 <= request.n <= 16


@pytest.mark.parametrize("name", ["json", "text/plain", "", "application/jsonp"])
def test_content_types(name: str) -> None:
    with pytest.raises(InvalidRequest, match="Content-Type"):
        parse_object(b"{}", name)
    assert parse_object(b"{}", "Application/JSON; charset=utf-8") == {}


@pytest.mark.parametrize("tail", ["", "\n", " \r\n\t"])
def test_a_body_is_read_once_whatever_blanks_follow_it(tail: str) -> None:
    """The memory of two readings at once is not within the bounds of a body."""
    body = b"[" + b"0.5," * 100_000 + b"1]"
    tracemalloc.start()
    try:
        value = parse_object(b'{"a":' + body + b"}" + tail.encode())
        held, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(value["a"]) == 100_001
    assert most < 1.5 * held


def test_errors_name_the_position() -> None:
    with pytest.raises(InvalidRequest, match="line 3, column 5"):
        parse_object(b'{\n"a": 1\n    "b": 2}')
    with pytest.raises(InvalidRequest) as refused:
        parse_object(rb'{"messages": [{"content": "ok"}, {"content": "\udfff"}]}')
    assert refused.value.param == "messages[1].content"
    for body, place in (
        (b'{"a": "NaN",\n "b": [NaN]}', "NaN, which is not a number in JSON, at line 2, column 8 (character 20)"),
        (b'{"a": -1e999}', "-1e999, which is too large, at line 1, column 7 (character 6)"),
        (b'{"a": 1' + b"0" * 256 + b"}", "257 digits, more than 256, at line 1, column 7 (character 6)"),
        (b'{"a": {"b": "\\"b", "b": 1}, "b": 2}', "'b' twice in one object, at line 1, column 20 (character 19)"),
        (b'{"b": [{"b": 1}],\n "\\u0062": 2}', "'b' twice in one object, at line 2, column 2 (character 19)"),
    ):
        with pytest.raises(InvalidRequest) as refused:
            parse_object(body)
        assert place in refused.value.message
    with pytest.raises(InvalidRequest, match="'b' twice in one object; give it once"):  # it would take a second
        parse_object(b'{"b": "' + b"x" * (1 << 20) + b'", "b": 2}')
    # A complete surrogate pair is a character.
    assert parse_object(rb'{"a": "\ud83d\udc26"}') == {"a": "🐦"}


def test_null_means_missing_and_bounds_are_inclusive() -> None:
    table = {"a": integer(1, 5), "b": number(0, 1, above=True)}
    assert read_fields({"a": None, "b": 1}, table) == {"b": 1.0}
    assert read_fields({"a": 5.0, "b": 0.5}, table) == {"a": 5, "b": 0.5}
    for bad in ({"a": 6}, {"a": 0}, {"b": 0}, {"b": 1.01}, {"a": False}, {"b": "1"}):
        with pytest.raises(InvalidRequest) as refused:
            read_fields(bad, table)
        assert refused.value.param in bad


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"a": ' + b"[" * 101 + b"]" * 101 + b"}", "nested too deeply"),
        (b'{"a": "\\ud800", "b": ' + b"[" * 5000 + b"]" * 5000 + b"}", "nested too deeply"),
        (b'{"a": [' + b"[]," * 100_000 + b"1]}", "arrays and objects"),
        (b'{"a": [' + b"1," * 1_200_000 + b"1]}", "values"),
    ],
)
def test_depth_and_number_of_values_are_bounded(body: bytes, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        parse_object(body)


def test_brackets_and_commas_in_strings_do_not_count() -> None:
    for text in ("[{" * 150_000, "," * 1_300_000, '\\"[' * 200, '"' + "[" * 200, "\\" * 7 + "[" * 200):
        assert parse_object(json.dumps({"a": text, "b": [[text]]}).encode()) == {"a": text, "b": [[text]]}
    assert parse_object(b'{"a": ' + b"[" * 99 + b"]" * 99 + b"}")


def test_a_long_unknown_name_and_long_values_are_shown_in_part_and_soon() -> None:
    begun = time.process_time()
    for body in ({"x" * 8_000_000: 1}, {"prompt": 5, "stop": {"a": "y" * 100}}, {"prompt": "a", "n": "1" * 8_000_000}):
        with pytest.raises(InvalidRequest) as caught:
            generate.read(body)
        assert len(caught.value.message) < 1500
    with pytest.raises(InvalidRequest) as caught:
        chat.read({"model": "m", "messages": [{"role": "user", "content": [{"type": "z" * 1_000_000}]}]})
    assert len(caught.value.message) < 200
    assert time.process_time() - begun < 5.0  # a quadratic search would take minutes


def test_the_search_for_surrogates_is_linear() -> None:
    begun = time.process_time()
    with pytest.raises(InvalidRequest, match="lone surrogate"):
        parse_object(b'{"' + b"n" * 1_000_000 + b'": [' + b'"a",' * 50_000 + rb'"\ud800"]}')
    assert time.process_time() - begun < 5.0  # a quadratic search would take minutes
