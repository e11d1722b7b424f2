"""/v1/responses: requests, answers, events, conversations, and what a killed gateway's successor still has."""

from __future__ import annotations

import http.client
import json
from collections.abc import Callable
from typing import Any

import pytest

from pipeline.protocol import messages as m
from tests.gateway.peers import MODEL, make_tokenizer
from tests.gateway.response_bodies import (
    CUT,
    PARIS,
    TOOL,
    assembled,
    prompt,
    read_events,
    said,
)
from tests.gateway.server import Server

PATH = "/v1/responses"
CASES: list[tuple[str, dict[str, Any], list[Any], str]] = [
    ("Hello ä\\n <b>", {}, ["Hello ä\n <b>"], "completed"),
    ("Hello", {"tools": []}, ["Hello"], "completed"),
    ("Hello", {"max_output_tokens": 4}, ["Hell"], "incomplete"),
    (PARIS, {}, [{"city": "Paris"}], "completed"),
    (f"I look. {PARIS}{PARIS}", {}, ["I look.", {"city": "Paris"}, {"city": "Paris"}], "completed"),
    (PARIS, {"tool_choice": "none"}, [PARIS.replace("\\n", "\n")], "completed"),
    (CUT, {"max_output_tokens": len(CUT)}, ['{"city": "Ro'], "incomplete"),
]


@pytest.mark.parametrize(("say", "more", "expected", "status"), CASES)
def test_whole_and_streamed_answers(
    server: Server, say: str, more: dict[str, Any], expected: list[Any], status: str
) -> None:
    body = said(say, **more)
    whole = server.post(PATH, body).json
    shown = [
        item["content"][0]["text"]
        if item["type"] == "message"
        else json.loads(item["arguments"])
        if item["status"] == "completed"
        else item["arguments"]
        for item in whole["output"]
    ]
    assert shown == expected
    assert (whole["object"], whole["status"]) == ("response", status)
    assert whole["incomplete_details"] == ({"reason": "max_output_tokens"} if status == "incomplete" else None)
    statuses = [item["status"] for item in whole["output"]]
    assert statuses == ["completed"] * (len(statuses) - 1) + [status]
    usage = whole["usage"]
    assert usage["input_tokens"] == len(prompt(server).encode())
    assert usage["input_tokens_details"] == {"cached_tokens": 3}
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    streamed = assembled(read_events(server, PATH, body))
    for response in (whole, streamed):
        for item in response["output"]:
            assert item.pop("id")
    differing = {"id", "created_at"}
    assert {k: v for k, v in streamed.items() if k not in differing} == {
        k: v for k, v in whole.items() if k not in differing
    }


def test_an_answer_repeats_the_request(server: Server) -> None:
    fields = {"instructions": "Be brief.", "metadata": {"a": "b"}, "temperature": 0.5, "top_p": 0.9, "user": "u"}
    answer = server.post(PATH, said("x", **fields)).json
    assert {name: answer[name] for name in fields} == fields
    assert answer["tools"] == [TOOL]
    assert answer["seed"] == 1
    assert prompt(server).startswith("system: Be brief.")


def test_items_become_messages(server: Server) -> None:
    items = [
        {"role": "developer", "content": [{"type": "input_text", "text": "A"}, {"type": "input_text", "text": "B"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
        {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city": "Paris"}'},
        {"type": "function_call_output", "call_id": "c1", "output": "sunny"},
        {"role": "user", "content": "please say it"},
    ]
    assert server.post(PATH, said("", input=items)).status == 200
    shown = prompt(server)
    assert shown.startswith("system: AB")
    assert 'assistant: I look.\n<tool_call>\n{"name": "weather", "arguments": {"city":"Paris"}}' in shown
    assert "sunny" in shown.split("I look.")[1]


def test_a_conversation_continues_and_forks(server: Server) -> None:
    first = server.post(PATH, said("one", tools=[], instructions="Be brief.")).json
    second = server.post(PATH, said("two", tools=[], previous_response_id=first["id"])).json
    assert prompt(server) == "user: please say one\nassistant: one\nuser: please say two\n"
    assert second["previous_response_id"] == first["id"]
    third = server.post(PATH, said("three", tools=[], previous_response_id=second["id"])).json
    assert prompt(server).endswith("assistant: two\nuser: please say three\n")
    assert server.request("DELETE", f"{PATH}/{first['id']}").json == {
        "id": first["id"],
        "object": "response",
        "deleted": True,
    }
    server.post(PATH, said("four", tools=[], previous_response_id=third["id"]))  # has what was deleted
    assert prompt(server).startswith("user: please say one\n")
    for path, method in ((first["id"], "GET"), (first["id"], "DELETE"), ("resp_00", "GET"), ("x", "GET")):
        assert server.request(method, f"{PATH}/{path}").status == 404
    gone = server.post(PATH, said("five", previous_response_id=first["id"]))
    assert (gone.status, gone.error["param"]) == (404, "previous_response_id")


def test_a_call_of_a_stored_response_needs_its_result(server: Server) -> None:
    call = server.post(PATH, said(PARIS)).json
    refused = server.post(PATH, said("x", previous_response_id=call["id"]))
    assert refused.status == 400
    assert "before the result of the tool call" in refused.error["message"]
    result = {"type": "function_call_output", "call_id": call["output"][0]["call_id"], "output": "sunny"}
    question = {"role": "user", "content": "please say thanks"}
    done = server.post(PATH, said("", input=[result, question], previous_response_id=call["id"]))
    assert done.json["output"][0]["content"][0]["text"] == "thanks"
    assert '"name": "weather"' in prompt(server)


def test_a_response_is_read_again_until_it_is_deleted(server: Server) -> None:
    whole = server.post(PATH, said("Hello"))
    assert server.get(f"{PATH}/{whole.json['id']}").json == whole.json
    unstored = server.post(PATH, said("Hello", store=False)).json
    assert unstored["store"] is False
    assert server.get(f"{PATH}/{unstored['id']}").status == 404
    assert server.post(PATH, said("x", previous_response_id=unstored["id"])).status == 404


def test_a_deleted_response_frees_its_idempotency_key(server: Server) -> None:
    key = {"Idempotency-Key": "a-key"}
    first = server.post(PATH, said("Hello"), key).json["id"]
    assert server.post(PATH, said("Hello"), key).json["id"] == first
    assert server.request("DELETE", f"{PATH}/{first}").status == 200
    again = server.post(PATH, said("Hello"), key)
    assert again.status == 200, again.body
    assert again.json["id"] != first
    assert server.get(f"{PATH}/{again.json['id']}").json == again.json


DIES_AS_IT_DELETES = """
import os, signal
from stages.gateway.requests.stored_responses import StoredResponses
delete = StoredResponses._delete
def delete_and_die(*arguments):
    delete(*arguments)
    os.kill(os.getpid(), signal.SIGKILL)
StoredResponses._delete = delete_and_die
"""


def test_a_gateway_killed_as_it_deletes_a_response_has_freed_its_idempotency_key(
    make_server: Callable[..., Server],
) -> None:
    server = make_server(preamble=DIES_AS_IT_DELETES)
    server.wait_ready()
    key = {"Idempotency-Key": "a-key"}
    first = server.post(PATH, said("Hello"), key).json["id"]
    with pytest.raises((http.client.HTTPException, ConnectionError)):
        server.request("DELETE", f"{PATH}/{first}")
    server.kill_and_restart()
    server.wait_ready()
    again = server.post(PATH, said("Hello"), key)
    assert again.status == 200, again.body
    assert server.get(f"{PATH}/{again.json['id']}").json == again.json


def test_a_stream_is_continued_after_any_event(server: Server) -> None:
    events = read_events(server, PATH, said(f"I look. {PARIS}"))
    whole = assembled(events)
    path = f"{PATH}/{whole['id']}?stream=true"
    assert assembled(read_events(server, path)) == whole
    for at, event in enumerate(events):
        number = event.data["sequence_number"]
        rest = read_events(server, f"{path}&starting_after={number}")
        assert assembled([*events[: at + 1], *rest]) == whole
        if event.id:
            for where, body in ((PATH, said("ignored")), (path, None), (f"{path}&starting_after=0", None)):
                rest = read_events(server, where, body, {"Last-Event-ID": event.id})
                assert [e.name for e in rest if "delta" not in e.name] == [
                    e.name for e in events[at + 1 :] if "delta" not in e.name
                ]
    for last_id in ("req-0a:1", "0"):
        refused = server.get(path, {"Last-Event-ID": last_id})
        assert (refused.status, refused.error["param"]) == (400, "Last-Event-ID")
    for number in ("x", "%C2%B2", "-2", "1" * 5000, "0" * 20 + "1"):
        refused = server.get(f"{path}&starting_after={number}")
        assert (refused.status, refused.error["param"]) == (400, "starting_after")
    unstreamed = server.post(PATH, said("x")).json["id"]
    assert server.get(f"{PATH}/{unstreamed}?stream=true").error["param"] == "stream"


def test_a_killed_gateway_loses_no_response(make_server: Callable[..., Server]) -> None:
    server = make_server()
    server.wait_ready()
    first = server.post(PATH, said("one", tools=[])).json
    server.peers.do(lambda: setattr(server.peers, "is_stepping", False))
    waiting = server.post(PATH, said("later", tools=[], background=True)).json
    assert waiting["status"] in ("queued", "in_progress")
    server.kill_and_restart()
    assert server.get(f"{PATH}/{first['id']}").json == first
    server.peers.do(lambda: setattr(server.peers, "is_stepping", True))
    server.wait_ready()
    # A reader of the request waits for its end.
    whole = server.get("/v1/requests/" + waiting["id"].replace("resp_", "req-")).json
    assert whole["status"] == "completed"
    assert server.get(f"{PATH}/{waiting['id']}").json == whole
    server.post(PATH, said("two", tools=[], previous_response_id=waiting["id"]))
    assert prompt(server) == "user: please say later\nassistant: later\nuser: please say two\n"


def test_a_response_in_the_background_that_cannot_be_recovered_has_failed(make_server: Callable[..., Server]) -> None:
    server = make_server()
    server.wait_ready()
    peers = server.peers
    peers.do(lambda: setattr(peers, "is_stepping", False))
    waiting = server.post(PATH, said("later", background=True)).json["id"]
    peers.do(peers.kill_tokenizer)
    peers.do(lambda: setattr(peers, "_make_tokenizer", lambda: make_tokenizer(digest="cd" * 32)))  # another model
    peers.do(peers.start_tokenizer)
    server.kill_and_restart()
    whole = server.get("/v1/requests/" + waiting.replace("resp_", "req-"))  # waits for the end
    assert (whole.status, whole.error["code"]) == (409, "CONFLICT")
    stored = server.get(f"{PATH}/{waiting}")
    assert (stored.status, stored.json["status"]) == (200, "failed"), stored.body
    assert "another version" in stored.json["error"]["message"]


def test_a_response_in_the_background_is_cancelled(make_server: Callable[..., Server]) -> None:
    server = make_server()
    server.wait_ready()
    server.peers.do(lambda: setattr(server.peers, "is_stepping", False))
    made = [server.post(PATH, said("x", background=True)).json["id"] for _ in range(16)]
    refused = server.post(PATH, said("x", background=True))
    assert (refused.status, refused.error["param"]) == (429, "background")
    assert server.get(f"{PATH}/{made[0]}").json["status"] in ("queued", "in_progress")
    assert server.request("DELETE", f"{PATH}/{made[0]}").status == 409
    cancelled = server.post(f"{PATH}/{made[0]}/cancel", {}).json
    assert cancelled["status"] == "cancelled"
    assert server.get(f"{PATH}/{made[0]}").json == cancelled
    assert server.post(f"{PATH}/{made[0]}/cancel", {}).json == cancelled
    assert server.post(f"{PATH}/resp_00/cancel", {}).status == 404
    server.kill_and_restart()
    assert server.get(f"{PATH}/{made[0]}").json == cancelled


def test_a_file_that_cannot_be_used_is_no_internal_error(make_server: Callable[..., Server]) -> None:
    server = make_server()
    server.wait_ready()
    file = server.home / "state" / "responses.db"
    file.mkdir(parents=True)  # instead of a file
    answers = [
        server.get(f"{PATH}/resp_00"),
        server.request("DELETE", f"{PATH}/resp_00"),
        server.post(f"{PATH}/resp_00/cancel", {}),
        server.get(f"{PATH}/resp_00/input_items"),
        server.post(PATH, said("x", previous_response_id="resp_00")),
        server.post(PATH, said("x")),
    ]
    assert [(answer.status, answer.error["code"]) for answer in answers] == 6 * [(503, "STORAGE_UNAVAILABLE")]
    assert (
        f'starling_state_file_errors_total{{files="responses"}} {len(answers)}' in server.get("/metrics").body.decode()
    )
    file.rmdir()
    assert server.get(f"{PATH}/resp_00").status == 404


def test_responses_belong_to_their_tenant(make_server: Callable[..., Server]) -> None:
    server = make_server(auth={"api_keys": [{"key": "sk-a", "tenant": "a"}, {"key": "sk-b", "tenant": "b"}]})
    server.wait_ready()
    mine, other = {"Authorization": "Bearer sk-a"}, {"Authorization": "Bearer sk-b"}
    made = server.post(PATH, said("x"), mine).json["id"]
    assert server.get(f"{PATH}/{made}", mine).status == 200
    assert server.get(f"{PATH}/{made}", other).status == 404
    assert server.request("DELETE", f"{PATH}/{made}", None, other).status == 404
    assert server.post(PATH, said("x", previous_response_id=made), other).status == 404


CALLS: list[dict[str, Any]] = [
    {"role": "user", "content": "Weather?"},
    {"type": "function_call", "call_id": "a", "name": "weather", "arguments": "{}"},
    {"type": "function_call", "call_id": "b", "name": "weather", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "a", "output": "sunny"},
]
RESULT = CALLS[3]
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"input": None}, "input", "missing"),
    ({"input": []}, "input", "empty"),
    ({"input": [{"type": "web_search_call"}]}, "input[0].type", "function_call_output"),
    ({"input": [{"type": "reasoning", "summary": ["x"]}]}, "input[0].summary", "not supported"),
    ({"input": [{"type": "reasoning", "content": [{"type": "text"}]}]}, "input[0].content[0].type", "reasoning_text"),
    ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role", '"user"'),
    (
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        "input[0].content[0].type",
        "text only",
    ),
    (
        {"input": [{"type": "function_call_output", "call_id": "c", "output": "x"}]},
        "input[0].call_id",
        "must be the id",
    ),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type", '"function" only'),
    ({"tool_choice": {"type": "file_search"}}, "tool_choice", '"required"'),
    ({"conversation": []}, "conversation", "a string"),
    ({"include": ["message.output_text.logprobs"]}, "include", "not supported"),
    ({"reasoning": {"effort": "low"}}, "reasoning.effort", "template has none"),
    ({"reasoning": {"effort": "much"}}, "reasoning.effort", '"minimal"'),
    ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema", "required"),
    ({"text": {"format": {"type": "xml"}}}, "text.format.type", '"json_schema"'),
    ({"truncation": "auto"}, "truncation", "send less"),
    ({"background": True, "store": False}, "background", "store is false"),
    ({"max_tokens": 5}, "max_tokens", "unknown parameter"),
    ({"max_output_tokens": 5000}, "max_output_tokens", "at most"),
    ({"input": "x" * 5000}, "input", "has 5"),
    ({"input": [*CALLS, {**RESULT, "call_id": "c"}]}, "input[4].call_id", "must be the id of a tool call"),
    ({"input": CALLS[:3]}, "input[2]", "has no result; send one after input[2]"),
]


@pytest.mark.parametrize(("change", "param", "message"), REFUSED)
def test_refused(server: Server, change: dict[str, Any], param: str, message: str) -> None:
    answer = server.post(PATH, {**said("x"), **change})
    assert answer.status == 400
    assert answer.error["param"] == param
    assert message in answer.error["message"]


def asked(say: str, **more: Any) -> dict[str, Any]:
    """The same for the official client, which has no seed."""
    body = said(say, **more)
    del body["seed"]
    return body


def test_the_openai_client(server: Server) -> None:
    openai = pytest.importorskip("openai")
    with openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none") as client:
        whole = client.responses.create(**asked("Hello"))
        assert (whole.output_text, whole.status, whole.usage.output_tokens) == ("Hello", "completed", 6)
        with client.responses.stream(**asked(f"I look. {PARIS}")) as stream:
            events = list(stream)
            final = stream.get_final_response()
        assert events[-1].type == "response.completed"
        text, call = final.output
        assert (text.content[0].text, call.name) == ("I look.", "weather")
        assert json.loads(call.arguments) == {"city": "Paris"}
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
        question = {"role": "user", "content": "please say Sunny."}
        # The answer as input items, as clients without stored responses send it.
        repeated = asked("", input=[{"role": "user", "content": "Weather?"}, *final.output, result, question])
        assert client.responses.create(**repeated).output_text == "Sunny."
        stored = client.responses.create(**asked("", input=[result, question], previous_response_id=final.id))
        assert stored.output_text == "Sunny."
        assert client.responses.retrieve(stored.id).output == stored.output
        again = list(client.responses.retrieve(final.id, stream=True))
        rest = list(client.responses.retrieve(final.id, stream=True, starting_after=again[2].sequence_number))
        assert [event.type for event in rest] == [event.type for event in again[3:]]
        client.responses.delete(stored.id)
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(stored.id)
        with pytest.raises(openai.BadRequestError):
            client.responses.create(**asked("x", truncation="auto"))


def test_a_refusal_of_the_scheduler_names_the_field_of_the_request(server: Server) -> None:
    def refuse(frame: m.Submit) -> m.Rejected:
        return m.Rejected(frame.sequence, "INSUFFICIENT_RESOURCES", "max_tokens of 5 need 9 pages", "max_tokens", 0.0)

    server.peers.do(lambda: setattr(server.peers.generator, "refuse", refuse))
    try:
        refused = server.post(PATH, {"model": MODEL, "input": "Hi", "max_output_tokens": 5})
    finally:
        server.peers.do(lambda: setattr(server.peers.generator, "refuse", lambda frame: None))
    assert (refused.status, refused.error["param"]) == (507, "max_output_tokens")
    assert "max_output_tokens of 5" in refused.error["message"]
