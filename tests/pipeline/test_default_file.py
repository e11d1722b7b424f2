"""configs/default.yaml shows every key of the configuration with its default; those of items of lists in comments."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import msgspec
import pytest
import yaml

from pipeline.config import schema
from pipeline.config.load import load, resolve
from pipeline.config.schema import Config

ROOT = Path(__file__).resolve().parents[2]
SECTIONS = [one for one in vars(schema).values() if isinstance(one, type) and issubclass(one, schema.Section)]
EXAMPLES = ("name", "path", "model", "engine")  # keys of items whose values in the file are not defaults


def test_the_shipped_file_is_the_defaults() -> None:
    assert load(ROOT / "configs" / "default.yaml", {}) == resolve({}, {})


def _item_of(field: msgspec.structs.FieldInfo) -> type[schema.Section] | None:
    """The type of the items of a list of sections."""
    kind = get_args(field.type)[0] if get_origin(field.type) is Annotated else field.type
    items = get_args(kind)
    return items[0] if get_origin(kind) is tuple and items[0] in SECTIONS else None


def _shown_item(text: str, name: str) -> dict[str, Any]:
    """The item that a comment shows: in braces beside the list's name, or as a block below it."""
    beside = re.search(rf"^[ #]*{name}:.*?(\{{.*\}}).*\n", text, re.M)
    if beside:
        return dict(yaml.safe_load(beside[1]))
    block = re.search(rf"^(?:# )? *{name}:.*\n((?: *# .*\n)+)", text, re.M)
    assert block, f"{name} has no item in a comment"
    (item,) = yaml.safe_load(re.sub(r"^( *)#", r"\1 ", block[1], flags=re.M))
    return dict(item)


@pytest.mark.parametrize("section", SECTIONS[1:], ids=lambda section: section.__name__)
def test_the_shipped_file_shows_every_key(section: type[schema.Section]) -> None:
    text = (ROOT / "configs" / "default.yaml").read_text()
    raw = {"models": [], **yaml.safe_load(text)}  # a comment in the file
    shown = _find(Config, raw, text, section)
    assert set(shown) == {field.name for field in msgspec.structs.fields(section)}
    for field in msgspec.structs.fields(section):
        value = shown[field.name]
        is_shown = value is not None and field.name not in EXAMPLES  # in braces a key may stand without a value
        if is_shown and field.type not in SECTIONS and field.default is not msgspec.NODEFAULT:
            assert msgspec.convert(value, field.type) == field.default


def _find(at: type[schema.Section], raw: dict[str, Any], text: str, section: type[schema.Section]) -> dict[str, Any]:
    """What the file shows of a section; empty if it shows none."""
    if at is section:
        return raw
    for field in msgspec.structs.fields(at):
        item = _item_of(field)
        if item is not None or field.type in SECTIONS:
            inner = raw[field.name] if item is None else _shown_item(text, field.name)
            if found := _find(item or field.type, inner, text, section):
                return found
    return {}
