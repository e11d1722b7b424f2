"""Masks allow what the constraint allows, on every path, and depend on nothing but the tokens so far."""

from __future__ import annotations

import json
import random
import re
from functools import cache
from typing import Any

import jsonschema
import msgspec
import numpy as np
import pytest

from pipeline.api.constraint_fields import MAX_CHOICES
from pipeline.api.plain_times import plain_times
from pipeline.protocol.messages import Constraint, ReasoningPrefix
from stages.scheduler.constraints import grammar
from stages.tokenizer.reasoning_format import MARKS
from tools.schema_check.generated import generated

from . import vocabularies
from .schemas import SCHEMAS
from .vocabularies import END, PIECES, SIZE, TURN_END

LONGEST = 300  # tokens of a walk


@cache
def tokenizer() -> Any:
    return grammar.make_tokenizer(vocabularies.vocabulary())


def matcher_of(kind: str, text: str) -> Any:
    return grammar.new_matcher(tokenizer(), Constraint(kind, text, "field"))


def allowed(matcher: Any) -> list[int]:
    bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
    grammar.check(matcher)
    return np.flatnonzero(bits[:SIZE]).tolist()


def walk(matcher: Any, seed: int) -> tuple[bytes, bool]:
    """A random text that the masks allow; tokens that close something are preferred after a while."""
    rng, text = random.Random(seed), b""
    for step in range(LONGEST):
        ids = allowed(matcher)
        assert ids, text
        closing = [t for t in ids if t in (END, TURN_END) or PIECES[t].startswith((b'"', b"}", b"]"))]
        token = rng.choice(closing if closing and rng.random() < step / 40 else ids)
        if token in (END, TURN_END):
            return text, True
        assert matcher.consume_token(token)
        text += PIECES[token]
    return text, False


@pytest.mark.parametrize("name", SCHEMAS)
def test_every_walk_that_ends_is_valid_json_of_the_schema(name: str) -> None:
    schema, matcher = SCHEMAS[name], matcher_of("json_schema", json.dumps(SCHEMAS[name]))
    # Without "time", which jsonschema takes for a time without a zone.
    formats = jsonschema.FormatChecker(["date", "email", "ipv4", "uuid"])
    validator = jsonschema.Draft202012Validator(schema, format_checker=formats)
    ended = 0
    for seed in range(20):
        text, has_ended = walk(matcher.deep_copy(), seed)
        if has_ended:
            validator.validate(json.loads(text))
            ended += 1
    assert ended >= 10


@pytest.mark.parametrize("name", ["person", "recursive tree", "anyOf", "pattern", "string", "number bounds"])
def test_a_mask_is_a_function_of_the_tokens(name: str) -> None:
    """Step by step, consumed again at once, and after draft tokens that were taken back: the same masks."""
    fresh = matcher_of("json_schema", json.dumps(SCHEMAS[name]))
    for seed in range(6):
        rng, stepwise, tokens = random.Random(seed), fresh.deep_copy(), []
        for step in range(60):
            ids = allowed(stepwise)
            if step % 7 == 0:
                again = fresh.deep_copy()
                assert not tokens or again.consume_tokens(tokens)
                assert allowed(again) == ids
                other = matcher_of("json_schema", json.dumps(SCHEMAS[name]))
                assert other.try_consume_tokens(tokens) == len(tokens)
                assert allowed(other) == ids
            drafts = [rng.choice(ids), rng.randrange(SIZE), rng.randrange(SIZE)]
            kept = 0
            for token in drafts:
                if stepwise.is_stopped() or not stepwise.try_consume_tokens([token]):
                    break
                kept += 1
                stepwise.compute_bitmask()
            assert kept == 0 or stepwise.rollback(kept)
            assert allowed(stepwise) == ids
            token = rng.choice(ids)
            if token in (END, TURN_END):
                break
            assert stepwise.consume_token(token)
            tokens.append(token)


def test_the_end_is_forced_where_nothing_may_follow() -> None:
    matcher = matcher_of("choice", '["ab", "abc"]')
    assert matcher.consume_tokens([ord("a"), ord("b")])
    assert set(allowed(matcher)) == {ord("c"), END, TURN_END}
    assert matcher.consume_token(ord("c"))
    assert allowed(matcher) == [END, TURN_END]


def test_the_model_chooses_the_tokens_of_a_forced_text() -> None:
    matcher = matcher_of("choice", '["true"]')
    assert {PIECES[token] for token in allowed(matcher)} == {b"t", b"tr", b"true"}


GBNF = """
root ::= greeting " " name ("!" | "?")*
greeting ::= "hello" | "good " time-of-day
time-of-day ::= "morning" | "night"
name ::= [A-Z] [a-z]{1,6}
"""
LARK = """
start: expression
expression: NUMBER (OPERATOR NUMBER)*
NUMBER: /[1-9][0-9]{0,2}/
OPERATOR: "+" | "-"
"""


@pytest.mark.parametrize(
    ("kind", "text", "pattern"),
    [
        ("regex", r"[a-c]{2,5}(x|yz)\d", r"[a-c]{2,5}(x|yz)\d"),
        ("regex", r"https?://[a-z/]+\.(com|org)", r"https?://[a-z/]+\.(com|org)"),
        ("choice", '["yes", "no", "it\\"s", "\\u00e9"]', 'yes|no|it"s|é'),
        ("gbnf", GBNF, r"(hello|good (morning|night)) [A-Z][a-z]{1,6}[!?]*"),
        ("lark", LARK, r"[1-9][0-9]{0,2}([+-][1-9][0-9]{0,2})*"),
    ],
)
def test_every_walk_that_ends_matches(kind: str, text: str, pattern: str) -> None:
    matcher, ended = matcher_of(kind, text), 0
    for seed in range(40):
        found, has_ended = walk(matcher.deep_copy(), seed)
        if has_ended:
            ended += 1
            assert re.fullmatch(pattern, found.decode())
    assert ended >= 10


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        ("json_schema", '{"type": "text"}', "Invalid type: text"),
        ("json_schema", '{"not": {"type": "string"}}', 'Unimplemented keys: ["not"]'),
        ("json_schema", '{"oneOf": [{"type": "string"}, {"minLength": 2, "type": "string"}]}', "oneOf"),
        ("json_schema", '{"$ref": "https://example.org/schema"}', "example.org"),
        ("json_schema", '{"type": "string", "pattern": "("}', "regex"),
        ("json_schema", '{"type": "array", "minItems": 3, "maxItems": 2}', "minItems"),
        ("json_schema", "[]", "must be an object"),
        ("regex", "(a", "regex"),
        ("gbnf", "root ::= missing", "missing"),
        ("gbnf", "rot ::= [a-z]", "root"),
        ("lark", "start: undefined_rule", "undefined_rule"),
        ("lark", 'start: "a"\n     | other', "unknown name"),
        ("other", "", "unknown"),
    ],
)
def test_a_constraint_that_cannot_be_used_is_refused_with_the_reason(kind: str, text: str, message: str) -> None:
    with pytest.raises(grammar.GrammarError, match=re.escape(message)) as caught:
        matcher_of(kind, text)
    assert "llguidance" not in str(caught.value)


@pytest.mark.parametrize("number", range(0, 60, 4))
def test_every_walk_of_a_generated_schema_is_valid(number: int) -> None:
    """`make schema-check` sends these schemas, and hundreds more, to a server."""
    schema = generated(number, refusable=False)
    matcher = matcher_of("json_schema", json.dumps(schema))
    validator = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER)
    for seed in range(3):
        found, has_ended = walk(matcher.deep_copy(), seed)
        if has_ended:
            validator.validate(json.loads(found))


@pytest.mark.parametrize("schema", ['{"$ref": "#"}', '{"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}'])
def test_a_reference_to_itself_is_refused_with_the_reason(schema: str) -> None:
    """When the first mask is computed, which is a part of vetting."""
    with pytest.raises(grammar.GrammarError, match=re.escape("a $ref leads back to itself")):
        allowed(matcher_of("json_schema", schema))


def test_a_choice_may_have_as_many_texts_as_a_request() -> None:
    """Also where they begin alike, so that all of them are possible for long."""
    texts = ["ab" * (i % 40) + str(i) for i in range(MAX_CHOICES)]
    matcher = matcher_of("choice", json.dumps(texts))
    for text in (texts[0], texts[39], texts[-1]):
        one = matcher.deep_copy()
        for token in text.encode():
            assert token in allowed(one)
            assert one.consume_token(token)
        assert END in allowed(one)


def test_a_choice_may_have_any_character() -> None:
    for text in [*map(chr, range(1, 160)), "\u2028", "\ufb00", "😀", '\\u0041"', "<[5]>", "/i", "%json", "//"]:
        tokens = [*text.encode()]
        matcher = matcher_of("choice", json.dumps([text, "other"], ensure_ascii=False))
        assert matcher.try_consume_tokens(tokens) == len(tokens), repr(text)
        assert matcher.is_accepting(), repr(text)


@pytest.mark.parametrize("form", ["time", "date", "date-time"])
def test_times_have_no_second_60_and_dates_no_year_0(form: str) -> None:
    schema = {"type": "string", "format": form, "allOf": [{"maxLength": 40}]}
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    matcher, ended = matcher_of("json_schema", json.dumps(schema)), 0
    for seed in range(120):
        found, has_ended = walk(matcher.deep_copy(), seed)
        if has_ended:
            ended += 1
            checker.check(json.loads(found), form)
    assert ended >= 60
    day, time = "2026-01-02", "23:58:59Z"
    texts = {"time": (time, "23:58:60Z"), "date": (day, "0000-01-02")}
    texts["date-time"] = (f"{day}T{time}", f"0000-01-02T{time}")
    for text, is_whole in zip(texts[form], (True, False), strict=True):
        tokens = [*f'"{text}"'.encode()]
        assert (matcher.deep_copy().try_consume_tokens(tokens) == len(tokens)) is is_whole


def test_values_that_look_like_schemas_stay_as_they_are() -> None:
    schema = {"enum": [{"format": "time"}, "x"]}
    assert plain_times(schema) == schema
    named = {"type": "object", "properties": {"format": {"type": "string"}, "default": {"format": "time"}}}
    found = plain_times(named)
    assert found["properties"]["format"] == {"type": "string"}
    assert "allOf" in found["properties"]["default"]


def test_logits_without_a_token_are_never_allowed() -> None:
    wide = grammar.make_tokenizer(vocabularies.vocabulary(), 32 * 12)
    matcher = grammar.new_matcher(wide, Constraint("regex", ".*"))
    bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
    assert bits[ord("a")]
    assert not bits[SIZE:].any()


def test_a_vocabulary_without_an_end_is_refused() -> None:
    file = vocabularies.vocabulary()
    file.eos_ids = ()
    with pytest.raises(grammar.GrammarError, match="no end token"):
        grammar.make_tokenizer(file)


TEXT_MARKS = ReasoningPrefix("<think>", "</think>")
CONTROL_END = ReasoningPrefix("<think>", "<|turn|>", end_id=TURN_END)
AFTER = [
    msgspec.structs.replace(one, is_open=is_open) for one in (TEXT_MARKS, CONTROL_END) for is_open in (False, True)
]
ANSWERS = [
    ("json_schema", '{"type": "object", "additionalProperties": false}', "{}"),
    ("regex", " a{2}", " aa"),
    ("choice", '[" one", "two"]', " one"),
    ("lark", 'start: x\nx: "y" thinking\nthinking: "z"', "yz"),
    ("gbnf", 'root ::= "a" "b"', "ab"),
]


def tokens_of(text: str, after: ReasoningPrefix) -> list[int]:
    """Bytes, and the end mark where it is a control token."""
    parts = text.split(after.end) if after.end_id >= 0 else [text]
    return [token for index, part in enumerate(parts) for token in [*[after.end_id] * (index > 0), *part.encode()]]


@pytest.mark.parametrize("after", AFTER, ids=str)
@pytest.mark.parametrize(("kind", "text", "answer"), ANSWERS)
def test_a_constraint_begins_after_reasoning(after: ReasoningPrefix, kind: str, text: str, answer: str) -> None:
    """Reasoning is any text, with an answer in it, too. No end token is allowed before the answer is whole."""
    constraint = Constraint(kind, text, "field", after)
    matcher = grammar.new_matcher(tokenizer(), constraint)
    begin = "" if after.is_open else after.begin
    for token in tokens_of(f"{begin}\nä {answer} </thin> {after.end}{answer}", after):
        ids = allowed(matcher)
        assert token in ids
        assert END not in ids
        assert matcher.consume_token(token)
    assert END in allowed(matcher)
    if not after.is_open:  # the model need not think
        bare = grammar.new_matcher(tokenizer(), constraint)
        assert all(bare.consume_token(token) for token in answer.encode())
        assert END in allowed(bare)
    wrong = grammar.new_matcher(tokenizer(), constraint)
    assert all(wrong.consume_token(token) for token in tokens_of(f"{begin}x{after.end}", after))
    assert 0x23 not in allowed(wrong)


@pytest.mark.parametrize(("begin", "end"), [*MARKS, (".*", "a|b)("), ('"q"', "\\\\n")])
def test_all_marks_can_be_written_in_a_grammar(begin: str, end: str) -> None:
    matcher = grammar.new_matcher(tokenizer(), Constraint("choice", '["x"]', "field", ReasoningPrefix(begin, end)))
    for token in f"{begin}so {begin}".encode():
        assert matcher.consume_token(token)
    for token in end.encode():
        assert len(allowed(matcher)) > 1 or token >= 128
        assert matcher.consume_token(token)
    assert allowed(matcher) == [ord("x")]


@pytest.mark.parametrize("after", AFTER, ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_a_walk_with_reasoning_ends_in_a_valid_answer(after: ReasoningPrefix, seed: int) -> None:
    schema = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
    matcher = grammar.new_matcher(tokenizer(), Constraint("json_schema", json.dumps(schema), "field", after))
    rng, begin = random.Random(seed), "" if after.is_open else after.begin
    for token in tokens_of(begin, after):
        assert matcher.consume_token(token)
    for _ in range(40):
        ids = [token for token in allowed(matcher) if token != after.end_id and PIECES[token] != b"<"]
        assert matcher.consume_token(rng.choice(ids))
        while not matcher.is_error() and all(128 <= token < 256 for token in allowed(matcher)):
            assert matcher.consume_token(rng.choice(allowed(matcher)))  # the rest of a character
    for token in tokens_of(after.end, after):
        assert matcher.consume_token(token)
    text, is_over = walk(matcher, seed)
    if is_over:
        jsonschema.validate(json.loads(text), schema)


def test_errors_name_lines_of_the_client() -> None:
    for after in (None, TEXT_MARKS):
        with pytest.raises(grammar.GrammarError) as error:
            grammar.new_matcher(tokenizer(), Constraint("lark", 'start: a\na: unknown_rule "x"', "field", after))
        assert "unknown_rule" in str(error.value)
