"""/v1/conversations of a fleet: two orchestrators of one store, engines that answer, and deaths."""

from __future__ import annotations

import secrets
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import openai
import pytest

from pipeline.coordination.interface import Item
from stages.orchestrator.responses.heads import HEADS
from tests.gateway.peers import MODEL
from tests.gateway.response_bodies import assembled, read_events, said
from tests.gateway.server import Server
from tests.gateway.test_conversations import CALL, REFUSED, TOOL, message
from tests.orchestrator.fleet import Fleet, Pair
from tests.orchestrator.pairs import NAMES, begin, kill, read_until, runner_of, serving, wait_ready, without_agent
from tests.orchestrator.stores import every_store
from tests.orchestrator.streams import MINE, OTHER, hold, step

PATH = "/v1/conversations"
RESPONSES = "/v1/responses"


@pytest.fixture(scope="module")
def sections() -> dict[str, Any]:
    """A small bound, so that conversations are evicted."""
    return {"stored_responses": {"tenant_mb": 2}}


on_every_store = pytest.mark.parametrize("pair", every_store(pytest.mark.slow), indirect=True, scope="module")
pytestmark = pytest.mark.usefixtures("released")


@pytest.fixture(autouse=True)
def forgotten(engines: list[Server]) -> None:
    """Prompts of earlier tests do not count, nor those of this one on another store."""
    for engine in engines:
        engine.peers.do(engine.peers.generator.submitted.clear)


def make(orchestrator: Fleet, **body: Any) -> str:
    answer = orchestrator.post(PATH, body, MINE)
    assert answer.status == 200, answer.body
    return str(answer.json["id"])


def texts(orchestrator: Fleet, name: str) -> list[str]:
    """The texts of the items, oldest first."""
    answer = orchestrator.get(f"{PATH}/{name}/items?order=asc&limit=100", MINE)
    assert answer.status == 200, answer.body
    return [item["content"][0]["text"] for item in answer.json["data"]]


def respond(orchestrator: Fleet, say: str, name: str, **more: Any) -> dict[str, Any]:
    answer = orchestrator.post(RESPONSES, said(say, conversation=name, **more), MINE)
    assert answer.status == 200, answer.body
    return dict(answer.json)


def prompts(engines: list[Server], text: str) -> list[str]:
    """The prompts that end with a question."""
    made = [bytes(one.prompt[::4]).decode() for engine in engines for one in engine.peers.generator.submitted]
    return [one for one in made if f"please say {text}\n" in one]


@on_every_store
def test_each_orchestrator_changes_what_the_other_has_made(pair: Pair) -> None:
    first, second = pair
    made = first.post(PATH, {"metadata": {"topic": "ä"}, "items": [message("a")]}, MINE).json
    path = f"{PATH}/{made['id']}"
    assert (made["object"], made["metadata"]) == ("conversation", {"topic": "ä"})
    added = second.post(f"{path}/items", {"items": [message("b", "assistant"), message("c")]}, MINE)
    assert [item["content"][0]["text"] for item in added.json["data"]] == ["b", "c"]
    for orchestrator in pair:
        assert orchestrator.get(path, MINE).json == made
        assert texts(orchestrator, made["id"]) == ["a", "b", "c"]
    newest = first.get(f"{path}/items?limit=2", MINE).json
    assert (newest["has_more"], newest["data"]) == (True, added.json["data"][::-1])
    rest = second.get(f"{path}/items?after={newest['last_id']}", MINE).json
    assert (rest["has_more"], len(rest["data"])) == (False, 1)
    item = f"{path}/items/{newest['first_id']}"
    assert first.get(item, MINE).json == newest["data"][0]
    assert second.request("DELETE", item, None, MINE).json["id"] == made["id"]
    assert first.get(item, MINE).status == second.request("DELETE", item, None, MINE).status == 404
    assert first.post(path, {"metadata": {"topic": "b"}}, MINE).json == {**made, "metadata": {"topic": "b"}}
    assert second.get(path, MINE).json["metadata"] == {"topic": "b"}
    gone = second.request("DELETE", path, None, MINE).json
    assert gone == {"id": made["id"], "object": "conversation.deleted", "deleted": True}
    for orchestrator in pair:
        for method, where in (("GET", path), ("DELETE", path), ("GET", f"{path}/items")):
            assert orchestrator.request(method, where, None, MINE).status == 404
        refused = orchestrator.post(RESPONSES, said("x", conversation=made["id"]), MINE)
        assert (refused.status, refused.error["param"]) == (404, "conversation")


def test_other_tenants_see_nothing(pair: Pair) -> None:
    name = make(pair[0], items=[message("x")])
    (item,) = pair[0].get(f"{PATH}/{name}/items", MINE).json["data"]
    requests = [
        ("GET", f"{PATH}/{name}", None),
        ("POST", f"{PATH}/{name}", {"metadata": {}}),
        ("DELETE", f"{PATH}/{name}", None),
        ("GET", f"{PATH}/{name}/items", None),
        ("POST", f"{PATH}/{name}/items", {"items": [message("y")]}),
        ("GET", f"{PATH}/{name}/items/{item['id']}", None),
        ("DELETE", f"{PATH}/{name}/items/{item['id']}", None),
        ("POST", RESPONSES, said("x", conversation=name)),
        ("POST", RESPONSES, said("x", conversation=name, background=True)),
    ]
    for orchestrator in pair:
        for method, path, body in requests:
            assert orchestrator.request(method, path, body, OTHER).status == 404, path
            assert orchestrator.request(method, path, body).status == 401
    assert texts(pair[1], name) == ["x"]


@pytest.mark.parametrize(("method", "path", "body", "param"), REFUSED)
def test_refused_as_a_server_does(pair: Pair, method: str, path: str, body: Any, param: str) -> None:
    answer = pair[0].request(method, path.replace("ID", make(pair[1])), body, MINE)
    assert (answer.status, answer.error["param"]) == (400, param), answer.body


@on_every_store
def test_responses_continue_a_conversation_at_any_orchestrator(pair: Pair, engines: list[Server]) -> None:
    first, second = pair
    name = make(first, items=[message("Be brief.", "system"), message("x"), message("y", "assistant")])
    one = respond(second, "one", name)
    assert one["conversation"] == {"id": name}
    (given,) = prompts(engines, "one")
    assert given.endswith("user: x\nassistant: y\nuser: please say one\n") and "Be brief." in given
    two = assembled(read_events(first, RESPONSES, said("two", conversation=name, store=False), MINE))
    assert two["status"] == "completed" and first.get(f"{RESPONSES}/{two['id']}", MINE).status == 404
    called = respond(second, CALL, name, tools=[TOOL])
    (call,) = called["output"]
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "sunny"}
    unknown = second.post(RESPONSES, said("", conversation=name, input=[{**result, "call_id": "call_x"}]), MINE)
    assert (unknown.status, unknown.error["param"]) == (400, "input[0].call_id"), unknown.body
    last = respond(first, "", name, tools=[TOOL], input=[result, message("please say done")])
    assert prompts(engines, "done")[-1].count("assistant: two") == 1
    items = second.get(f"{PATH}/{name}/items?order=asc&limit=100", MINE).json["data"]
    kinds = [(item["type"], item.get("role", "")) for item in items]
    roles = ("system", "user", "assistant", "user", "assistant", "user", "assistant", "user")
    assert kinds == [
        *(("message", role) for role in roles),
        ("function_call", ""),
        ("function_call_output", ""),
        ("message", "user"),
        ("message", "assistant"),
    ]
    assert (items[8], items[11]) == (call, last["output"][0])
    assert len({item["id"] for item in items}) == len(items)
    inputs = first.get(f"{RESPONSES}/{last['id']}/input_items?order=asc", MINE).json["data"]
    assert inputs == items[9:11]


@on_every_store
def test_one_response_at_a_time_at_all_orchestrators(pair: Pair, engines: list[Server]) -> None:
    first, second = pair
    name = make(first)
    for engine in engines:
        hold(engine)
    running = first.post(RESPONSES, said("lost", conversation=name, background=True), MINE).json
    for orchestrator in pair:
        for more in ({}, {"background": True}):
            refused = orchestrator.post(RESPONSES, said("two", conversation=name, **more), MINE)
            assert (refused.status, refused.error["param"]) == (409, "conversation"), refused.body
    cancelled = second.post(f"{RESPONSES}/{running['id']}/cancel", {}, MINE).json
    assert cancelled["status"] == "cancelled"
    connection = begin(second, RESPONSES, said("two", conversation=name))
    serving(second)
    refused = first.post(RESPONSES, said("three", conversation=name), MINE)
    assert (refused.status, refused.error["param"]) == (409, "conversation")
    for engine in engines:
        hold(engine, False)
    with closing(connection):
        read_until(connection.getresponse(), b"event: response.completed")
        respond(first, "three", name)  # at once
    assert texts(first, name) == ["please say two", "two", "please say three", "three"]


def heads(orchestrator: Fleet, name: str) -> list[Item]:
    """The record of a conversation in the store."""
    return [item for item in orchestrator.items(HEADS) if item.key.endswith(name)]


@on_every_store
@pytest.mark.parametrize("moment", ["while it is generated", "when its items are added"])
def test_an_orchestrator_dies_under_a_response(pair: Pair, engines: list[Server], moment: str) -> None:
    """Another one stores it, and its items are in the conversation once."""
    first, second = pair
    name, say = make(second, items=[message("x")]), "an answer that is long enough to be cut"
    for engine in engines:
        hold(engine)
    connection = begin(first, RESPONSES, said(say, conversation=name))
    index = serving(first)
    response = connection.getresponse()
    request_id = response.headers["X-Starling-Request"]
    step(engines[index], 9)
    read_until(response, b"response.output_text.delta")
    before = heads(first, name)
    if moment == "when its items are added":
        hold(engines[index], False)
        while heads(first, name) == before:
            assert first.process.poll() is None
    kill(first)
    connection.close()
    for engine in engines:
        hold(engine, False)
    whole = assembled(read_events(second, f"/v1/requests/{request_id}", None, MINE))
    assert whole["status"] == "completed" and whole["conversation"] == {"id": name}
    expected = ["x", f"please say {say}", say]
    assert texts(second, name) == expected
    assert second.get(f"{RESPONSES}/{whole['id']}", MINE).json == whole
    first.restart()
    wait_ready(first)
    assembled(read_events(first, f"/v1/requests/{request_id}", None, MINE))  # once more
    assert texts(first, name) == expected
    respond(first, "more", name)
    assert texts(second, name) == [*expected, "please say more", "more"]


def test_a_stream_is_not_continued_from_another_context(pair: Pair, engines: list[Server]) -> None:
    """No engine has it any longer, nor its orchestrator, and the conversation has changed."""
    first, second = pair
    name, say = make(second, items=[message("old")]), "what no engine has"
    for engine in engines:
        hold(engine)
    connection = begin(first, RESPONSES, said(say, conversation=name))
    index = serving(first)
    step(engines[index], 9)
    received = read_until(connection.getresponse(), b"response.output_text.delta")
    last_id = received.rpartition(b"\nid: ")[2].partition(b"\n")[0].decode()
    kill(first)
    connection.close()
    with without_agent(pair, NAMES[index]):
        (item, *_) = second.get(f"{PATH}/{name}/items?order=asc", MINE).json["data"]
        assert second.request("DELETE", f"{PATH}/{name}/items/{item['id']}", None, MINE).status == 200
        headers = {**MINE, "Last-Event-ID": last_id}
        with closing(begin(second, RESPONSES, said(say, conversation=name), headers)) as connection:
            refused = connection.getresponse()
            assert refused.status == 404, refused.read()
            assert "its conversation may have changed" in refused.read().decode()
        for engine in engines:
            hold(engine, False)


@on_every_store
def test_another_orchestrator_runs_what_a_dead_one_has_begun(pair: Pair, engines: list[Server]) -> None:
    name = make(pair[0])
    for engine in engines:
        hold(engine)
    made = pair[0].post(RESPONSES, said("Hello", conversation=name, background=True), MINE).json
    runner, other = runner_of(pair)
    kill(runner)
    for engine in engines:
        hold(engine, False)
    path = f"{RESPONSES}/{made['id']}"
    while (response := other.get(path, MINE).json)["status"] in ("queued", "in_progress"):
        pass
    assert response["status"] == "completed"
    assert texts(other, name) == ["please say Hello", "Hello"]
    runner.restart()
    wait_ready(runner)


@on_every_store
def test_items_of_many_clients_are_all_there(pair: Pair) -> None:
    name = make(pair[0])

    def add(number: int) -> int:
        return pair[number % 2].post(f"{PATH}/{name}/items", {"items": [message(str(number))]}, MINE).status

    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(add, range(24))) == [200] * 24
    assert sorted(texts(pair[0], name), key=int) == [str(number) for number in range(24)]


@on_every_store
def test_a_key_belongs_to_one_body(pair: Pair) -> None:
    """Also when the engine that has answered is gone, and its orchestrator."""
    first, second = pair
    # The engines of all stores are the same, and know the keys of the others.
    key, other_key = secrets.token_hex(8), secrets.token_hex(8)
    name, keyed = make(first), {**MINE, "Idempotency-Key": key}
    made = first.post(RESPONSES, said("Hello", conversation=name), keyed)
    assert made.status == 200, made.body
    spoken = first.post(
        "/v1/completions", {"model": MODEL, "prompt": "a", "max_tokens": 4}, {**keyed, "Idempotency-Key": other_key}
    )
    assert spoken.status == 200

    def check(orchestrator: Fleet) -> None:
        again = orchestrator.post(RESPONSES, said("Hello", conversation=name), keyed)
        assert (again.status, again.json["output"]) == (200, made.json["output"]), again.body
        for other in (said("Other", conversation=name), said("Hello"), said("Hello", background=True)):
            refused = orchestrator.post(RESPONSES, other, keyed)
            assert (refused.status, refused.error["param"]) == (409, "Idempotency-Key"), refused.body
            assert "another body" in refused.error["message"]
        assert texts(orchestrator, name) == ["please say Hello", "Hello"]

    for orchestrator in pair:
        check(orchestrator)
        other = {"model": MODEL, "prompt": "b", "max_tokens": 4}
        for path in ("/v1/completions", "/v1/generate"):
            refused = orchestrator.post(path, other, {**keyed, "Idempotency-Key": other_key})
            assert (refused.status, refused.error["param"]) == (409, "Idempotency-Key"), refused.body
            assert repr(other_key) in refused.error["message"]
    for agent in NAMES:  # the other engine does not have the request
        with without_agent(pair, agent):
            check(second)


@on_every_store
def test_a_repeated_request_continues_what_its_conversation_was(pair: Pair, engines: list[Server]) -> None:
    """Although items were deleted since, and the engine that has answered is gone."""
    first, second = pair
    for number, is_stream in enumerate((False, True)):
        say, keyed = f"again {number}", {**MINE, "Idempotency-Key": secrets.token_hex(8)}
        name = make(first, items=[message("old")])
        body = said(say, conversation=name)

        def ask(orchestrator: Fleet) -> dict[str, Any]:
            if is_stream:  # noqa: B023
                return assembled(read_events(orchestrator, RESPONSES, body, keyed))  # noqa: B023
            answer = orchestrator.post(RESPONSES, body, keyed)  # noqa: B023
            assert answer.status == 200, answer.body
            return dict(answer.json)

        made = ask(first)
        assert made["status"] == "completed", made
        (prompt,) = prompts(engines, say)
        index = next(index for index, engine in enumerate(engines) if prompts([engine], say))
        (item, *_) = first.get(f"{PATH}/{name}/items?order=asc", MINE).json["data"]
        assert first.request("DELETE", f"{PATH}/{name}/items/{item['id']}", None, MINE).status == 200
        with without_agent(pair, NAMES[index]):
            again = ask(second)
            assert again["output"] == made["output"] and (is_stream or again == made)
            assert prompts(engines, say) == [prompt] * (2 if is_stream else 1)


def test_the_official_client(pair: Pair) -> None:
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{pair[1].port}/v1", api_key="sk-mine", max_retries=0)
    with client:
        made = client.conversations.create(items=[message("Hello")], metadata={"topic": "demo"})  # type: ignore[list-item]
        answer = client.responses.create(model=MODEL, input="please say Hi", conversation=made.id)
        assert answer.conversation is not None and answer.conversation.id == made.id
        listed: list[Any] = list(client.conversations.items.list(made.id, order="asc", limit=1))
        assert [item.content[0].text for item in listed] == ["Hello", "please say Hi", "Hi"]
        client.conversations.items.delete(listed[0].id, conversation_id=made.id)
        assert client.conversations.delete(made.id).deleted
        with pytest.raises(openai.NotFoundError):
            client.conversations.retrieve(made.id)
