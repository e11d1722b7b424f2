"""The items of a response's input: while it is generated, in pages, and at what cost."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import msgspec
import openai
import pytest

from pipeline.api.conversation_object import stored_items
from pipeline.api.item_pages import Page, page_body
from pipeline.api.json_body import to_json
from pipeline.api.requests.conversations import conversation_item
from pipeline.api.requests.generation_request import ResponseFields
from pipeline.api.requests.response_items import read_item
from pipeline.api.response_object import input_items, inputs_json
from pipeline.config.schema import StoredResponsesConfig
from pipeline.errors import InvalidRequest
from stages.gateway.requests.stored_responses import StoredResponse, StoredResponses
from tests.gateway.response_bodies import said
from tests.gateway.server import MakeServer, Server

PATH = "/v1/responses"
ITEMS: list[dict[str, Any]] = [
    {"role": "user", "content": "Größe?"},
    {"type": None, "id": "m", "role": "developer", "content": [{"type": "input_text", "text": t} for t in ("a", "b")]},
    {"role": "user", "content": []},
    {"type": "reasoning", "id": "r", "summary": [], "encrypted_content": None, "content": None},
    {"type": "reasoning", "content": [{"type": "reasoning_text", "text": t} for t in ("I ", "think")]},
    {
        "type": "message",
        "role": "assistant",
        "status": "completed",
        "content": [
            {
                "type": "output_text",
                "text": "x\n",
                "annotations": [0, {"a": [None]}],
                "logprobs": [],
                "parsed": {"b": 1},
            }
        ],
    },
    {"role": "assistant", "content": "y"},
    {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"a": [1, 2]}', "parsed_arguments": {"a": 1}},
    {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": t} for t in ("1", "2")]},
    {"type": "function_call_output", "call_id": "c", "output": ""},
]


def test_items_are_those_that_were_sent() -> None:
    fields = ResponseFields(inputs=to_json(ITEMS))
    expected = [conversation_item(item, read_item(item, "x"), f"1i{at:03d}") for at, item in enumerate(ITEMS)]
    shown = inputs_json(fields, "req-1")
    assert input_items(fields, "req-1") == stored_items(shown) == expected
    assert shown == to_json([msgspec.Raw(item.item) for item in expected])


def test_what_has_no_effect_is_copied() -> None:
    """A million numbers would take tens of ms of the event loop if objects were made of them, as of this one."""
    part = b'{"type":"output_text","text":"x","annotations":[1e999]}'
    fields = ResponseFields(inputs=b'[{"type":"message","role":"assistant","content":[%b]}]' % part)
    shown = inputs_json(fields, "req-1")
    assert part in shown
    assert part in page_body(shown, Page("", 1, True))
    for (item,) in (input_items(fields, "req-1"), stored_items(shown)):
        assert (part in item.item, item.message) == (True, {"role": "assistant", "content": "x"})


async def test_a_page_is_found_without_reading_the_other_items() -> None:
    store = StoredResponses(None, StoredResponsesConfig(), lambda: 1000.0)
    done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    items = [("i1", b'{"id":"i1"}'), ("i2", b"not JSON"), ("i3", b'{"id":"i3"}')]
    store.put(StoredResponse("a", "r1", b"{}", [], items), done.set_result)
    assert await done is None
    newest = json.loads(await store.inputs("a", "r1", Page("", 1, False)) or b"")
    assert (newest["data"], newest["last_id"], newest["has_more"]) == ([{"id": "i3"}], "i3", True)
    oldest = json.loads(await store.inputs("a", "r1", Page("i2", 9, False)) or b"")
    assert (oldest["data"], oldest["has_more"]) == ([{"id": "i1"}], False)
    with pytest.raises(InvalidRequest, match="the id of no item"):
        await store.inputs("a", "r1", Page("i4", 9, False))
    earlier = "UPDATE inputs SET items = ?"  # as earlier versions stored them
    await store.transact(lambda db, now: db.execute(earlier, (b'[{"id":"i4"},{"id":"i5"}]',)))
    first = json.loads(await store.inputs("a", "r1", Page("", 1, True)) or b"")
    assert (first["data"], first["has_more"]) == ([{"id": "i4"}], True)
    store.close(timeout_s=60)


def test_a_response_that_is_generated(server: Server) -> None:
    server.peers.do(lambda: setattr(server.peers, "is_stepping", False))
    try:
        name = server.post(PATH, said("x", background=True)).json["id"]
        streamed = said("x", background=True, previous_response_id=name)
        refused = server.post(PATH, streamed)
        assert (refused.status, refused.error["param"]) == (409, "previous_response_id")
        assert "is being generated" in refused.error["message"]
        items = server.get(f"{PATH}/{name}/input_items")
        assert items.status == 200, items.body
        assert [item["content"][0]["text"] for item in items.json["data"]] == ["please say x"]
        assert server.get(f"{PATH}/{name}/input_items?after=y").error["param"] == "after"
    finally:
        server.peers.do(lambda: setattr(server.peers, "is_stepping", True))
    assert server.get("/v1/requests/" + name.replace("resp_", "req-")).json["status"] == "completed"
    assert server.get(f"{PATH}/{name}/input_items").body == items.body
    assert server.post(PATH, streamed).status == 200


def test_reading_counts_as_a_request(make_server: MakeServer) -> None:
    server = make_server(rate_limits={"requests_per_minute": 2})
    server.wait_ready()
    name = server.post(PATH, said("x")).json["id"]
    answers = [server.get(f"{PATH}/{name}/input_items") for _ in range(2)]
    assert [answer.status for answer in answers] == [200, 429]
    assert answers[1].error["code"] == "RATE_LIMITED"


WRONG = [
    ("?stream=1", "stream"),
    ("?stream=True", "stream"),
    ("?stream=", "stream"),
    ("?starting_after=5", "starting_after"),
    ("?stream=false&starting_after=5", "starting_after"),
    ("?stream=true&stream=false", "stream"),
    ("?include[]=reasoning.encrypted_content", "include[]"),
    ("?include_obfuscation=true", "include_obfuscation"),
    ("?stream=true&staring_after=5", "staring_after"),
    ("/input_items?before=x", "before"),
    ("/input_items?limits=5", "limits"),
    ("/input_items?limit=5&limit=6", "limit"),
]


@pytest.mark.parametrize(("query", "param"), WRONG)
def test_parameters_of_urls_are_honoured_or_refused(server: Server, query: str, param: str) -> None:
    refused = server.get(f"{PATH}/resp_00{query}")
    assert (refused.status, refused.error["param"]) == (400, param), refused.body
    if query.startswith("/input"):
        refused = server.get(f"/v1/conversations/conv_00/items?{query.partition('?')[2]}")
        assert (refused.status, refused.error["param"]) == (400, param)


def test_no_padding_is_asked_for(server: Server) -> None:
    name = server.post(PATH, said("x")).json["id"]
    response = server.get(f"{PATH}/{name}?include_obfuscation=false&stream=false")
    assert json.loads(response.body)["id"] == name


def test_the_client_for_azure_reads_what_it_has_made(server: Server) -> None:
    """It adds `api-version` to each URL."""
    base = f"http://127.0.0.1:{server.port}/v1"
    with openai.AzureOpenAI(base_url=base, api_key="none", api_version="2024-10-21", max_retries=0) as azure:
        client: Any = azure  # the unions of its items are wide
        body = said("x")
        made = client.responses.create(model=body["model"], input=body["input"], stream=True, background=True)
        events = list(made)
        name = events[0].response.id
        again = client.responses.retrieve(name, stream=True, starting_after=events[1].sequence_number)
        assert [event.type for event in again] == [event.type for event in events[2:]]
        assert client.responses.retrieve(name).output_text == "x"
        items = client.responses.input_items.list(name, limit=1, order="asc").data
        assert [item.content[0].text for item in items] == ["please say x"]
        talk = client.conversations.create(items=[{"role": "user", "content": "a", "type": "message"}])
        listed = client.conversations.items.list(talk.id, limit=1).data
        assert [item.content[0].text for item in listed] == ["a"]
        client.responses.delete(name)
