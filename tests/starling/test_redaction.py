"""The plugin that comes with the package: what it replaces, and that a stream has the same text."""

from __future__ import annotations

import importlib
import tomllib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from starling.plugins import InferenceRequest, InferenceResponse, Plugin, Refused
from starling.plugins.redaction import Redaction, is_card

ROOT = Path(__file__).parents[2]
# Parts of which addresses and numbers come about, in pieces and too long.
PARTS = [
    "a",
    "Bob",
    "@",
    ".",
    "com",
    "-",
    "_",
    " ",
    "4111",
    "1",
    "0",
    "4111 1111 1111 1111",
    "x@y.de",
    "é",
    "\n",
    "m" * 70,
]
TEXTS = st.lists(st.sampled_from(PARTS), max_size=40).map("".join)


def make(**options: object) -> Redaction:
    plugin = Redaction()
    plugin.initialize(options)
    return plugin


def output(plugin: Redaction, text: str, *, is_final: bool = True, choice: int = 0) -> str:
    response = InferenceResponse(
        request_id="req-1", endpoint="chat", model="m", tenant="", choice=choice, text=text, is_final=is_final
    )
    plugin.post_inference(response)
    return response.text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("mail ada@example.org.", "mail [EMAIL]."),
        ("<first.last+tag@mail.example.co.uk>", "<[EMAIL]>"),
        ("ada@localhost and @ada", "ada@localhost and @ada"),
        ("4111111111111111", "[CARD]"),
        ("5500-0000-0000-0004!", "[CARD]!"),
        ("4111 1111 1111 1112", "4111 1111 1111 1112"),
        ('{"to": "ada@example.org"}', '{"to": "[EMAIL]"}'),
        ("order 12345678901234567890123", "order 12345678901234567890123"),
    ],
)
def test_what_is_replaced(text: str, expected: str) -> None:
    assert output(make(), text) == expected


@settings(deadline=None, max_examples=200)
@given(TEXTS)
def test_a_stream_has_the_text_of_the_whole(text: str) -> None:
    plugin, expected, before = make(), output(make(), text), ""
    for end in range(len(text) + 1):
        part = output(plugin, text[:end], is_final=False)
        assert part.startswith(before)
        assert part == output(make(), text[:end], is_final=False)  # a function of the text alone
        before = part
    assert expected.startswith(before)
    assert output(plugin, text) == expected


def test_text_is_held_back_to_the_end_of_a_word() -> None:
    assert output(make(), "write to ada@exam", is_final=False) == "write to "
    assert output(make(), "It is 4111 11", is_final=False) == "It is "
    assert output(make(), "no more of it: " + "x" * 1000, is_final=False).endswith("x" * 700)


def test_requests_are_replaced_everywhere() -> None:
    call = {"id": "a@b.cc", "type": "function", "function": {"name": "send", "arguments": {"to": ["a@b.cc"]}}}
    request = InferenceRequest(
        id="req-1",
        endpoint="chat",
        model="m",
        tenant="",
        messages=[
            {"role": "user", "content": "I am a@b.cc"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
        ],
        prompts=["a@b.cc"],
        suffix="a@b.cc",
        documents=[{"text": "a@b.cc"}],
    )
    make(email="(mail)", kinds=["email"]).pre_inference(request)
    assert request.messages is not None
    assert request.messages[0]["content"] == "I am (mail)"
    assert request.messages[1]["tool_calls"][0]["function"]["arguments"] == {"to": ["(mail)"]}
    assert request.messages[1]["tool_calls"][0]["id"] == "a@b.cc"
    assert (request.prompts, request.suffix, request.documents) == (["(mail)"], "(mail)", [{"text": "(mail)"}])
    request.prompts = [[1, 2]]
    with pytest.raises(Refused, match="token ids"):
        make().pre_inference(request)


def test_options_are_checked() -> None:
    for options in ({"kinds": ["phone"]}, {"kinds": []}, {"e-mail": "x"}):
        with pytest.raises(ValueError, match="options are kinds"):
            make(**options)
    assert is_card("378282246310005")


def test_the_entry_points_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for target in project["entry-points"]["starling.plugins"].values():
        module, _, name = target.partition(":")
        assert issubclass(getattr(importlib.import_module(module), name), Plugin)
