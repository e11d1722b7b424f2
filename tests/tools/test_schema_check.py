"""The check of structured output: what counts as valid, refused by name or a fault; and its schemas."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tools.schema_check import corpus
from tools.schema_check.answers import Kind, judge
from tools.schema_check.command import check, report
from tools.schema_check.generated import NOT_SUPPORTED, generated

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "string", "maxLength": 3}, "b": {"type": "string", "format": "date"}},
    "required": ["a"],
    "not": {"required": ["c"]},
}


def answer(text: str, finish: str = "stop") -> dict[str, Any]:
    return {"choices": [{"message": {"content": text}, "finish_reason": finish}]}


def refusal(message: str, param: str = "response_format.json_schema.schema") -> dict[str, Any]:
    return {"error": {"message": message, "param": param}}


@pytest.mark.parametrize(
    ("status", "body", "kind"),
    [
        (200, answer('{"a": "xyz"}'), Kind.VALID),
        (200, answer('{"a": "xyzz"}'), Kind.INVALID),
        (200, answer('{"a": "x", "b": "2026-02-30"}'), Kind.INVALID),
        (200, answer('{"a": "x"'), Kind.INVALID),
        (200, answer('{"a": "x"', "length"), Kind.CUT),
        (400, refusal('cannot be used: Unimplemented keys: ["not"]'), Kind.REFUSED),
        (400, refusal("cannot be used: Unknown format: date"), Kind.REFUSED),
        (400, refusal("cannot be used: it is a note"), Kind.UNNAMED),
        (400, refusal("response_format has 70000 bytes; at most 65536 are allowed: shorten it"), Kind.TOO_LARGE),
        (400, refusal("cannot be used: compiling it takes longer than 10 s"), Kind.TOO_LARGE),
        (400, refusal("cannot be used: Current row has 3199 items; max is 1000; consider"), Kind.TOO_LARGE),
        (400, refusal("has 70000 bytes; at most 65536 are allowed", "messages"), Kind.UNNAMED),
        (400, refusal('Unimplemented keys: ["not"]', "model"), Kind.UNNAMED),
        (500, refusal("not"), Kind.FAILED),
    ],
)
def test_what_an_answer_says(status: int, body: dict[str, Any], kind: Kind) -> None:
    assert judge(SCHEMA, status, body).kind is kind


def test_what_jsonschema_cannot_use_is_not_counted_as_valid() -> None:
    schema = {"type": "string", "pattern": "\\p{L}"}
    assert judge(schema, 200, answer('"a"')).kind is Kind.UNCHECKED


def test_a_report_counts_schemas_and_answers() -> None:
    def send(body: dict[str, Any]) -> tuple[int, Any]:
        schema = body["response_format"]["json_schema"]["schema"]
        if "not" in schema:
            return 400, refusal('cannot be used: Unimplemented keys: ["not"]')
        return 200, answer("1" if schema.get("const") == body["seed"] else "2")

    schemas: dict[str, dict[str, Any]] = {"one": {"const": 1}, "any": {"type": "integer"}, "not": {"not": {}}}
    found = report(check(schemas, send, "m", range(1, 3), 10))
    assert found["by_schema"] == {"valid": 1, "INVALID": 1, "refused by name": 1}
    assert found["answers"] == {"valid": 3, "INVALID": 1, "refused by name": 1}
    assert found["refused"] == {'Unimplemented keys: ["not"]': 1}


def test_schemas_of_a_folder_are_taken_from_all_its_parts(tmp_path: Path) -> None:
    for i in range(20):
        path = tmp_path / ("many" if i < 15 else "few") / f"{i}.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps({"schema": {"const": i}, "tests": []} if i % 2 else {"type": "object", "title": i}))
    (tmp_path / "few" / "broken.json").write_text("{")
    found = corpus.from_folder(tmp_path, 8)
    assert len(found) == 8
    assert sum(name.startswith("few/") for name in found) >= 3
    assert found == corpus.from_folder(tmp_path, 8)
    assert all(set(schema) in ({"const"}, {"type", "title"}) for schema in found.values())


def test_generated_schemas_have_all_features_and_are_the_same_each_time() -> None:
    text = json.dumps([generated(i) for i in range(300)])
    for keyword in ("pattern", "format", "enum", "const", "anyOf", "oneOf", "allOf", "$ref", "patternProperties"):
        assert f'"{keyword}"' in text
    for keyword in ("minLength", "exclusiveMaximum", "multipleOf", "maxItems", "prefixItems", "additionalProperties"):
        assert f'"{keyword}"' in text
    assert all(f'"{keyword}"' in text for keyword in NOT_SUPPORTED)
    assert generated(7) == generated(7)
    assert not any(keyword in generated(i, refusable=False) for i in range(300) for keyword in NOT_SUPPORTED)
