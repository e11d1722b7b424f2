"""/v1/messages: the earlier messages of a conversation, as clients send them back, and prompts that are refused."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from pipeline.api.json_body import parse_object
from pipeline.api.json_prefix import MAX_DEPTH
from pipeline.api.requests.messages import read_count, text_characters
from pipeline.api.requests.tool_formats import FORMATS
from pipeline.errors import InvalidRequest
from stages.gateway.tool_calls.call_parser import CallEnd, CallParser
from tests.gateway.peers import CONTEXT, MODEL
from tests.gateway.server import Server
from tests.gateway.test_messages import FORMAT, PATH, error, message, prompt

FORMAT_ALONE = {"output_config": {"format": FORMAT}}


def test_a_long_number_in_the_input_of_a_call_does_not_end_the_conversation(server: Server) -> None:
    """A model wrote it, and the client sends it back."""
    use = {"type": "tool_use", "id": "a", "name": "weather", "input": {"city": "Ä", "n": [10**30, 1.5]}}
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a"}]},
    ]
    for path, body in ((PATH, message("x", messages=messages)), (f"{PATH}/count_tokens", None)):
        answer = server.post(path, body or {"model": MODEL, "messages": messages})
        assert answer.status == 200, answer.body
    assert f'"arguments": {{"city": "Ä", "n": [{10**30}, 1.5]}}' in prompt(server)
    wrong = {**use, "input": [10**30]}
    answer = server.post(PATH, message("x", messages=[messages[0], {"role": "assistant", "content": [wrong]}]))
    assert "an object" in error(answer, "invalid_request_error")


def test_the_deepest_input_of_a_call_can_be_sent_back() -> None:
    """The body that has it in a message is deeper."""
    arguments = f'{{"x": {"[" * (MAX_DEPTH - 1)}{"]" * (MAX_DEPTH - 1)}}}'
    parser = CallParser(FORMATS["hermes"], {"weather"})
    end = parser.feed(f'<tool_call>{{"name": "weather", "arguments": {arguments}}}</tool_call>')[-1]
    assert end == CallEnd(True, arguments)
    use = {"type": "tool_use", "id": "a", "name": "weather", "input": json.loads(arguments)}
    messages = [
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a"}]},
    ]
    read = read_count(parse_object(json.dumps({"model": MODEL, "messages": messages}).encode())).messages
    assert read is not None
    assert read[0]["tool_calls"][0]["function"]["arguments"] == use["input"]


def test_messages_of_one_role_after_each_other_become_one() -> None:
    """Also those with calls: some clients store each block of an answer as a message."""
    uses = [{"type": "tool_use", "id": name, "name": "weather", "input": {"city": name}} for name in ("a", "b")]
    answers = [[{"type": "text", "text": "I look."}], [uses[0]], [{"type": "text", "text": " Here."}, uses[1]]]
    results = [[{"type": "tool_result", "tool_use_id": name, "content": "sunny"}] for name in ("b", "a")]
    messages = [
        {"role": "user", "content": "x"},
        *({"role": "assistant", "content": content} for content in answers),
        *({"role": "user", "content": content} for content in results),
        {"role": "user", "content": "y"},
        {"role": "user", "content": "z"},
    ]
    read = read_count({"model": MODEL, "messages": messages}).messages
    assert read is not None
    assert [message["role"] for message in read] == ["user", "assistant", "tool", "tool", "user"]
    assert (read[1]["content"], read[4]["content"]) == ("I look. Here.", "y\nz")
    assert [call["id"] for call in read[1]["tool_calls"]] == ["a", "b"]
    with pytest.raises(InvalidRequest, match='two tool calls with the id "a"'):
        read_count({"model": MODEL, "messages": [messages[0], *messages[2:3] * 2, *messages[4:]]})


def test_thinking_and_the_input_of_calls_are_charged_when_tokens_are_counted() -> None:
    def characters(*blocks: dict[str, Any]) -> int:
        talk = [{"role": "user", "content": "x"}, {"role": "assistant", "content": list(blocks)}]
        results = [{"type": "tool_result", "tool_use_id": block["id"]} for block in blocks if "id" in block]
        talk.append({"role": "user", "content": results or "y"})
        return text_characters(read_count({"model": MODEL, "messages": talk}))

    text = {"type": "text", "text": "t"}
    thinking = {"type": "thinking", "thinking": "t" * 1000, "signature": ""}
    call = {"type": "tool_use", "id": "a", "name": "f", "input": {"x": "y" * 1000}}
    assert characters(thinking, text) == characters(text) + 1000
    assert characters(text, call) > characters(text) + 1000


def test_a_prompt_that_is_too_long_has_the_error_by_which_clients_recognize_it(server: Server) -> None:
    """Claude Code and others look for these words, and read the numbers, to shorten their history."""
    pattern = r"^prompt is too long: (\d+) tokens > (\d+) maximum \("
    long = [{"role": "user", "content": "x" * 5000}]
    text = error(server.post(PATH, message("x", messages=long)), "invalid_request_error")
    found = re.match(pattern, text)
    assert found is not None, text
    assert int(found[1]) > int(found[2]) == CONTEXT - 1
    huge = [{"role": "user", "content": "x" * 1_100_000}]
    counted = server.post(f"{PATH}/count_tokens", {"model": MODEL, "messages": huge})
    assert re.match(pattern, error(counted, "invalid_request_error"))


def test_a_schema_is_refused_for_an_answer_that_the_request_begins(server: Server) -> None:
    """The schema describes the new text alone: behind `{` it is no JSON."""
    messages = [{"role": "user", "content": 'please say {"a": 1}'}, {"role": "assistant", "content": '{"a":'}]
    for fields in ({"output_config": {"format": FORMAT}}, {"output_format": FORMAT}, {"tools": [], **FORMAT_ALONE}):
        refused = server.post(PATH, message("x", **fields, messages=messages))
        assert refused.status == 400
        name = "output_format" if "output_format" in fields else "output_config.format"
        assert error(refused, "invalid_request_error").startswith(f"{name}.schema constrains the answer")
        assert server.post(PATH, message("x", **fields, messages=messages[:1])).status == 200
    any_tool = {"tool_choice": {"type": "any"}, **FORMAT_ALONE}  # the schema has no effect
    assert server.post(PATH, message("x", **any_tool, messages=messages)).status == 200
