"""Times without the second 60: in every schema that a value may be read with, and in nothing else."""

from __future__ import annotations

from typing import Any

import pytest

from pipeline.api.plain_times import plain_times

TIME = {"type": "string", "format": "time"}
PLAIN = {**TIME, "allOf": [{"pattern": "^[^:]*:[^:]*:[0-5]"}]}


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"properties": {"const": TIME, "format": TIME}}, {"properties": {"const": PLAIN, "format": PLAIN}}),
        ({"dependencies": {"const": TIME, "a": ["b"]}}, {"dependencies": {"const": PLAIN, "a": ["b"]}}),
        ({"components": {"schemas": {"T": TIME}}}, {"components": {"schemas": {"T": PLAIN}}}),
        ({"items": [TIME], "enum": [TIME]}, {"items": [PLAIN], "enum": [TIME]}),
        ({"const": TIME, "default": TIME, "examples": [TIME]}, {"const": TIME, "default": TIME, "examples": [TIME]}),
    ],
)
def test_schemas_are_rewritten_and_values_are_not(schema: dict[str, Any], expected: dict[str, Any]) -> None:
    assert plain_times(schema) == expected
