"""A conversation of a fleet as a value: what changes make of it, in any order."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.api.conversation_object import MAX_ITEMS, TooLargeError, stored_items
from pipeline.api.item_pages import Page
from pipeline.api.requests.conversations import ConversationItem, NewItem
from pipeline.api.requests.response_items import read_item
from pipeline.api.response_object import answer_items
from pipeline.errors import InvalidRequest
from stages.orchestrator.responses.conversation import MAX_ADDED, StoredConversation, digits_of

MIB = 1 << 20
EMPTY = StoredConversation(id="conv_1", created=1, used=1.0, metadata=b"{}")


def response(number: int) -> str:
    return f"resp_{number:024x}"


def items_of(number: int) -> list[ConversationItem]:
    """The input and the answer of a response."""
    digits = digits_of(response(number))
    return [item(f"msg_{digits}i000"), item(f"msg_{digits}000", "assistant")]


def item(name: str, role: str = "user") -> ConversationItem:
    return ConversationItem(name, b'{"id":"%s"}' % name.encode(), {"role": role, "content": name})


def added(value: StoredConversation, number: int) -> StoredConversation:
    return value.with_response(response(number), items_of(number), 2.0, MIB)


STEPS = st.lists(st.tuples(st.sampled_from(["add", "withdraw", "item", "delete"]), st.integers(0, 4)), max_size=20)


@given(STEPS)
def test_items_of_a_response_are_there_once_and_together_whatever_the_order(steps: list[tuple[str, int]]) -> None:
    value, own, final, deleted = EMPTY, [], set(), set()
    for index, (step, number) in enumerate(steps):
        if step == "add":
            value = added(value, number)
            final.add(number)
        elif step == "withdraw":
            value = value.without_response(response(number), 2.0)
            final.add(number)
            assert not [one for one in value.items if digits_of(response(number)) in one.id]
            deleted.add(number)
        elif step == "item":
            own.append(f"own_{index}")
            value = value.with_items([item(own[-1])], 2.0, MIB)
        else:
            name = items_of(number)[0].id
            if value.find(name) is not None:
                deleted.add(number)
            value = value.without_item(name, 2.0)
        for known in final:
            assert value.has_had(response(known)) and added(value, known) is value
    assert value.nbytes == EMPTY.nbytes + sum(one.size for one in value.items)
    names = [one.id for one in value.items]
    assert len(set(names)) == len(names)
    assert [name for name in names if name.startswith("own_")] == own
    for number in final - deleted:
        first, second = (one.id for one in items_of(number))
        assert names.index(second) == names.index(first) + 1


@given(st.lists(st.integers(0, 9), unique=True, max_size=8), st.integers(0, 9))
def test_a_repeated_request_has_the_messages_that_it_had(numbers: list[int], repeated: int) -> None:
    value, before = EMPTY, {}
    for number in numbers:
        before[number] = value.messages(response(number))
        value = added(value, number)
    assert value.messages(response(repeated)) == before.get(repeated, value.messages(response(99)))


@given(st.integers(0, 30), st.integers(1, 7), st.booleans())
def test_pages_have_every_item_once(count: int, limit: int, is_ascending: bool) -> None:
    value = EMPTY.with_items([item(str(number)) for number in range(count)], 2.0, MIB)
    seen: list[str] = []
    while True:
        page = json.loads(value.page_body(Page(seen[-1] if seen else "", limit, is_ascending)))
        seen += [one["id"] for one in page["data"]]
        if not page["has_more"]:
            break
    assert seen == [str(number) for number in range(count)][:: 1 if is_ascending else -1]
    with pytest.raises(InvalidRequest, match="after"):
        value.page_body(Page("unknown", limit, is_ascending))


def test_what_is_remembered_is_bounded() -> None:
    value = EMPTY
    for number in range(MAX_ADDED + 10):
        value = value.without_response(response(number), 2.0)
    assert len(value.added) == MAX_ADDED and not value.has_had(response(9)) and value.has_had(response(10))


def test_a_conversation_is_bounded() -> None:
    full = EMPTY.with_items([item(str(number)) for number in range(MAX_ITEMS)], 2.0, 64 * MIB)
    with pytest.raises(TooLargeError, match="4097 items"):
        full.with_items([item("more")], 2.0, 64 * MIB)
    with pytest.raises(TooLargeError, match="tenant_mb"):
        EMPTY.with_items([item("x")], 2.0, EMPTY.nbytes + item("x").size - 1)
    assert EMPTY.with_items([item("x")], 2.0, EMPTY.nbytes + item("x").size).find("x") is not None


CALL = {"type": "function_call", "call_id": "c", "name": "weather", "arguments": '{"city": "Rome"}'}
INPUTS: list[dict[str, Any]] = [
    {"role": "user", "content": "a"},
    {"role": "developer", "content": [{"type": "input_text", "text": "b"}, {"type": "input_text", "text": "c"}]},
    {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "d"}]},
    CALL,
    {"type": "function_call_output", "call_id": "c", "output": "sunny"},
]


def test_items_of_a_stored_input_are_those_that_a_server_adds() -> None:
    made = [NewItem(one, read_item(one, "input")).named(f"{index}") for index, one in enumerate(INPUTS)]
    inputs = msgspec.json.encode([msgspec.Raw(one.item) for one in made])
    assert stored_items(inputs) == made


def test_a_value_survives_its_encoding() -> None:
    output = [{"id": "fc_1", "status": "completed", **CALL}]
    value = added(EMPTY, 1).with_items(answer_items(output), 2.0, MIB).without_response(response(7), 3.0)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(value), type=StoredConversation) == value


def test_a_response_whose_key_may_be_used_again_is_remembered_with_its_body() -> None:
    failed = EMPTY.without_response(response(1), 2.0, b"d" * 32)
    assert failed.has_had(response(1)) and failed.digest_of(response(1)) == b"d" * 32
    assert not failed.forgetting(response(1), 3.0).has_had(response(1))
    assert failed.forgetting(response(2), 3.0) is failed
    value = EMPTY.with_response(response(1), items_of(1), 2.0, MIB, b"d" * 32)
    assert value.forgetting(response(1), 3.0) is value and value.digest_of(response(1)) == b"d" * 32
    assert value.without_response(response(1), 3.0).digest_of(response(1)) == b"d" * 32
    assert value.digest_of(response(2)) == b""
    for one in items_of(1):
        value = value.without_item(one.id, 3.0)
    assert value.has_had(response(1)) and not value.forgetting(response(1), 4.0).has_had(response(1))
