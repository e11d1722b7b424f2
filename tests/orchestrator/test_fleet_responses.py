"""/v1/responses of a fleet: an engine computes an answer, and every orchestrator has it afterwards."""

from __future__ import annotations

import json
import secrets
import stat
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.gateway.peers import MODEL
from tests.gateway.response_bodies import CUT, PARIS, assembled, parse_events, prompt, read_events, said
from tests.gateway.server import Server
from tests.orchestrator.fleet import Fleet, Pair
from tests.orchestrator.pairs import NAMES, begin, kill, read_until, runner_of, serving, wait_ready, without_agent
from tests.orchestrator.stores import every_store
from tests.orchestrator.streams import MINE, OTHER, hold, step

PATH = "/v1/responses"
on_every_store = pytest.mark.parametrize("pair", every_store(pytest.mark.slow), indirect=True, scope="module")
pytestmark = pytest.mark.usefixtures("released")


def texts(response: dict[str, Any]) -> str:
    return "".join(part["text"] for item in response["output"] for part in item.get("content", ()))


def latest(engines: list[Server]) -> str:
    """The longest of the last prompts of the engines."""
    return max((prompt(engine) for engine in engines if engine.peers.generator.submitted), key=len)


@on_every_store
def test_each_orchestrator_has_what_the_other_has_stored(pair: Pair) -> None:
    first, second = pair
    made = first.post(PATH, said("Hello", store=True, metadata={"a": "b"}), MINE)
    assert made.status == 200, made.body
    assert "X-Starling-Kept" not in made.headers
    response = made.json
    assert (response["status"], texts(response), response["metadata"]) == ("completed", "Hello", {"a": "b"})
    name = response["id"]
    for orchestrator in pair:
        assert orchestrator.get(f"{PATH}/{name}", MINE).json == response
        items = orchestrator.get(f"{PATH}/{name}/input_items", MINE).json
        assert [item["content"] for item in items["data"]] == [[{"type": "input_text", "text": "please say Hello"}]]
        for path in (f"{PATH}/{name}", f"{PATH}/{name}/input_items", f"{PATH}/{name}?stream=true"):
            assert orchestrator.get(path, OTHER).status == 404
        assert orchestrator.request("DELETE", f"{PATH}/{name}", None, OTHER).status == 404
        again = orchestrator.post(PATH, said("More", previous_response_id=name), OTHER)
        assert (again.status, again.error["param"]) == (404, "previous_response_id")
    cancelled = second.post(f"{PATH}/{name}/cancel", {}, MINE)
    assert (cancelled.status, cancelled.json) == (200, response)
    deleted = second.request("DELETE", f"{PATH}/{name}", None, MINE)
    assert deleted.json == {"id": name, "object": "response", "deleted": True}
    for orchestrator in pair:
        assert orchestrator.get(f"{PATH}/{name}", MINE).status == 404
        assert orchestrator.request("DELETE", f"{PATH}/{name}", None, MINE).status == 404
    assert first.get(f"{PATH}/resp_unknown", MINE).status == 404


@pytest.mark.parametrize("is_streamed", [False, True])
def test_the_other_one_continues_with_the_whole_conversation(
    pair: Pair, engines: list[Server], is_streamed: bool
) -> None:
    first, second = pair
    begin = said("One", instructions="Be brief.")
    if is_streamed:
        response = assembled(read_events(first, PATH, begin, MINE))
    else:
        response = first.post(PATH, begin, MINE).json
    more = second.post(PATH, said("Two", previous_response_id=response["id"]), MINE).json
    assert more["previous_response_id"] == response["id"]
    third = assembled(read_events(first, PATH, said("Three", previous_response_id=more["id"]), MINE))
    assert (texts(response), texts(more), texts(third)) == ("One", "Two", "Three")
    given = latest(engines)
    places = [given.index(one) for one in ("please say One", "One", "please say Two", "please say Three")]
    assert given.count("One") == given.count("Two") == 2 and "Be brief." not in given
    assert places[0] < places[2] < places[3]
    first.request("DELETE", f"{PATH}/{response['id']}", None, MINE)  # ends no other
    again = second.post(PATH, said("Four", previous_response_id=third["id"]), MINE)
    assert texts(again.json) == "Four" and latest(engines).count("One") == 2


def test_calls_and_results_are_in_the_conversation(pair: Pair, engines: list[Server]) -> None:
    first, second = pair
    called = first.post(PATH, said(PARIS), MINE).json
    (call,) = called["output"]
    assert (call["name"], json.loads(call["arguments"])) == ("weather", {"city": "Paris"})
    unknown = [{"type": "function_call_output", "call_id": "call_x", "output": "sunny"}]
    refused = second.post(PATH, said("", input=unknown, previous_response_id=called["id"]), MINE)
    assert (refused.status, refused.error["param"]) == (400, "input[0].call_id"), refused.body
    result = [{"type": "function_call_output", "call_id": call["call_id"], "output": "please say sunny"}]
    answer = second.post(PATH, said("", input=result, previous_response_id=called["id"]), MINE)
    assert texts(answer.json) == "sunny", answer.body
    cut = first.post(PATH, said(CUT, max_output_tokens=len(CUT)), MINE).json
    assert (cut["status"], cut["output"][0]["arguments"]) == ("incomplete", '{"city": "Ro')


def test_what_is_not_stored_cannot_be_continued(pair: Pair) -> None:
    first, second = pair
    made = first.post(PATH, said("Hello", store=False), MINE).json
    assert texts(made) == "Hello" and made["store"] is False
    assert second.get(f"{PATH}/{made['id']}", MINE).status == 404
    refused = second.post(PATH, said("More", previous_response_id=made["id"]), MINE)
    assert (refused.status, refused.error["param"]) == (404, "previous_response_id")


def test_an_agent_dies_in_the_middle_of_a_stream(pair: Pair, engines: list[Server]) -> None:
    """The other one goes on, the response is stored, and is continued at the other orchestrator."""
    first, second = pair
    say = "an answer that is long enough"
    for engine in engines:
        hold(engine)
    connection = begin(first, PATH, said(say))
    index = serving(first)
    response = connection.getresponse()
    step(engines[index], 9)
    received = read_until(response, b"response.output_text.delta")
    with closing(connection), without_agent(pair, NAMES[index]):
        hold(engines[1 - index], False)
        received += response.read()
    whole = assembled(parse_events(received))
    assert texts(whole) == say
    assert second.get(f"{PATH}/{whole['id']}", MINE).json == whole
    hold(engines[index], False)
    more = second.post(PATH, said("More", previous_response_id=whole["id"]), MINE)
    assert texts(more.json) == "More" and latest(engines).count(say) == 2


def test_an_orchestrator_dies_in_the_middle_of_a_stream(pair: Pair, engines: list[Server]) -> None:
    """The other one forwards the rest, which it has not begun, and stores the response."""
    first, second = pair
    say = "another answer that is long enough"
    for engine in engines:
        hold(engine)
    connection = begin(first, PATH, said(say))
    index = serving(first)
    response = connection.getresponse()
    request_id = response.headers["X-Starling-Request"]
    step(engines[index], 9)
    received = read_until(response, b"response.output_text.delta")
    name = json.loads(received.partition(b"data: ")[2].partition(b"\n")[0])["response"]["id"]
    assert second.get(f"{PATH}/{name}", MINE).json["status"] == "in_progress"
    assert second.get(f"{PATH}/{name}", OTHER).status == 404
    refused = second.request("DELETE", f"{PATH}/{name}", None, MINE)
    assert (refused.status, refused.error["code"]) == (409, "CONFLICT")
    kill(first)
    connection.close()
    received = received[: received.rfind(b"\n\n") + 2]
    last = parse_events(received)[-1]
    rest = second.resume(f"/v1/requests/{request_id}", {**MINE, "Last-Event-ID": last.id})
    hold(engines[index], False)
    received += rest.response.read()
    rest.close()
    whole = assembled(parse_events(received))
    assert texts(whole) == say
    assert second.get(f"{PATH}/{name}", MINE).json == whole
    first.restart()
    wait_ready(first)
    more = first.post(PATH, said("More", previous_response_id=name), MINE)
    assert texts(more.json) == "More"
    # Read again, from its beginning and from the middle of a delta.
    events = read_events(first, f"{PATH}/{name}?stream=true", None, MINE)
    assert assembled(events)["output"] == whole["output"]
    delta = next(event.data for event in events if event.name == "response.output_text.delta")
    after = delta["sequence_number"] - len(delta["delta"]) + 3
    rest_events = read_events(first, f"{PATH}/{name}?stream=true&starting_after={after}", None, MINE)
    spoken = [event.data["delta"] for event in rest_events if event.name == "response.output_text.delta"]
    assert "".join(spoken) == say[3:]


def test_a_stream_is_continued_after_the_last_event_that_a_client_has(pair: Pair) -> None:
    events = read_events(pair[0], PATH, said("Hello again"), MINE)
    whole = assembled(events)
    deltas = [event for event in events if event.name == "response.output_text.delta"]
    had = next(event for event in deltas if event.id)
    begun = "".join(event.data["delta"] for event in deltas[: deltas.index(had) + 1])
    path = f"{PATH}/{whole['id']}?stream=true"
    for orchestrator in pair:
        for where in (path, f"{path}&starting_after=0"):  # a client that reconnects adds the header to its URL
            rest = read_events(orchestrator, where, None, {**MINE, "Last-Event-ID": had.id})
            spoken = [event.data["delta"] for event in rest if event.name == "response.output_text.delta"]
            assert begun + "".join(spoken) == "Hello again"
            assert rest[-1].data["response"]["output"] == whole["output"]
        refused = orchestrator.get(path, {**MINE, "Last-Event-ID": f"req-{'0' * 24}:1"})
        assert (refused.status, refused.error["param"]) == (400, "Last-Event-ID")


# ---------------------------------------------------------------- in the background


def ended(orchestrator: Fleet, name: str) -> dict[str, Any]:
    """A response of the background, when it has ended."""
    while (found := orchestrator.get(f"{PATH}/{name}", MINE)).json["status"] in ("queued", "in_progress"):
        assert orchestrator.process.poll() is None, "".join(orchestrator.lines)
    response: dict[str, Any] = found.json
    return response


def test_a_response_in_the_background_ends_at_any_orchestrator(pair: Pair, engines: list[Server]) -> None:
    first, second = pair
    for engine in engines:
        hold(engine)
    made = first.post(PATH, said("Hello", background=True), MINE)
    assert (made.status, made.json["status"], made.json["background"]) == (200, "queued", True)
    assert made.headers["X-Request-Id"] == made.headers["X-Starling-Request"]
    name = made.json["id"]
    for orchestrator in pair:
        assert orchestrator.get(f"{PATH}/{name}", MINE).json["status"] in ("queued", "in_progress")
        assert orchestrator.get(f"{PATH}/{name}", OTHER).status == 404
        assert orchestrator.post(f"{PATH}/{name}/cancel", {}, OTHER).status == 404
        assert orchestrator.request("DELETE", f"{PATH}/{name}", None, MINE).status == 409
        early = said("More", previous_response_id=name)
        refused = orchestrator.post(PATH, early, MINE)
        assert (refused.status, refused.error["param"]) == (409, "previous_response_id")
        assert orchestrator.post(PATH, early, OTHER).status == 404
    for engine in engines:
        hold(engine, False)
    response = ended(second, name)
    assert (response["status"], texts(response), response["seed"]) == ("completed", "Hello", made.json["seed"])
    assert response["created_at"] == made.json["created_at"]
    more = second.post(PATH, said("More", previous_response_id=name), MINE)
    assert texts(more.json) == "More"


@on_every_store
def test_another_orchestrator_runs_what_a_dead_one_has_begun(pair: Pair, engines: list[Server]) -> None:
    for engine in engines:
        hold(engine)
    name = pair[0].post(PATH, said("Hello again", background=True), MINE).json["id"]
    runner, other = runner_of(pair)
    kill(runner)
    for engine in engines:
        hold(engine, False)
    response = ended(other, name)
    assert (response["status"], texts(response)) == ("completed", "Hello again")
    computed = [f for one in engines for f in one.peers.generator.submitted if f.request[4:] == name[5:]]
    assert len(computed) == 1  # the engine has gone on with it
    runner.restart()
    wait_ready(runner)
    assert runner.get(f"{PATH}/{name}", MINE).json == response


def test_a_response_in_the_background_is_cancelled_at_any_orchestrator(pair: Pair, engines: list[Server]) -> None:
    for engine in engines:
        hold(engine)
    name = pair[0].post(PATH, said("Hello", background=True), MINE).json["id"]
    runner, other = runner_of(pair)
    cancelled = other.post(f"{PATH}/{name}/cancel", {}, MINE)
    assert (cancelled.status, cancelled.json["status"]) == (200, "cancelled"), cancelled.body
    for orchestrator in pair:
        assert orchestrator.get(f"{PATH}/{name}", MINE).json == cancelled.json
    runner.wait(lambda state: not any(one["under_way"] for one in state["agents"]))
    assert other.post(f"{PATH}/{name}/cancel", {}, MINE).json == cancelled.json
    assert other.request("DELETE", f"{PATH}/{name}", None, MINE).status == 200


def test_a_stream_in_the_background_outlives_its_client(pair: Pair, engines: list[Server]) -> None:
    first, second = pair
    say = "what the client does not wait for"
    for engine in engines:
        hold(engine)
    connection = begin(first, PATH, said(say, background=True))
    index = serving(first)
    response = connection.getresponse()
    step(engines[index], 9)
    received = read_until(response, b"response.output_text.delta")
    connection.close()
    name = parse_events(received)[0].data["response"]["id"]
    hold(engines[index], False)
    whole = ended(second, name)
    assert (whole["status"], texts(whole)) == ("completed", say)
    assert assembled(read_events(first, f"{PATH}/{name}?stream=true", None, MINE))["output"] == whole["output"]


@on_every_store
def test_responses_in_the_background_are_bounded_and_keyed(pair: Pair, engines: list[Server]) -> None:
    first, second = pair
    for engine in engines:
        hold(engine)
    keyed = {
        **MINE,
        "Idempotency-Key": secrets.token_hex(8),
    }  # engines have those of other pairs
    made = [one.post(PATH, said("Hello", background=True), keyed) for one in (first, second, first)]
    assert [one.status for one in made] == [200] * 3 and len({one.json["id"] for one in made}) == 1
    assert {one.json["status"] for one in made} <= {"queued", "in_progress"}
    for orchestrator in pair:
        items = orchestrator.get(f"{PATH}/{made[0].json['id']}/input_items", MINE).json["data"]
        assert [item["content"][0]["text"] for item in items] == ["please say Hello"]
    other = second.post(PATH, said("Other", background=True), keyed)
    assert (other.status, other.error["param"]) == (409, "Idempotency-Key")
    names = [made[0].json["id"]]
    for number in range(15):
        names.append(pair[number % 2].post(PATH, said("Hello", background=True), MINE).json["id"])
    for orchestrator in pair:
        refused = orchestrator.post(PATH, said("Hello", background=True), MINE)
        assert (refused.status, refused.error["param"]) == (429, "background")
    assert second.post(PATH, said("Hello", background=True), OTHER).status == 200
    for engine in engines:
        hold(engine, False)
    assert {ended(first, name)["status"] for name in names} == {"completed"}
    again = second.post(PATH, said("Hello", background=True), keyed)
    assert (again.status, again.json["status"]) == (200, "completed")


def test_an_unknown_model_is_refused_before_the_answer(pair: Pair) -> None:
    refused = pair[0].post(PATH, said("Hello", background=True, model="unknown"), MINE)
    assert (refused.status, refused.error["code"]) == (404, "MODEL_NOT_FOUND")


def test_a_response_that_cannot_be_computed_has_failed(pair: Pair) -> None:
    first, second = pair
    long = "x" * 5000  # more than the context
    name = first.post(PATH, said(long, background=True), MINE).json["id"]
    failed = ended(second, name)
    assert (failed["status"], failed["error"]["code"], failed["output"]) == ("failed", "invalid_prompt", [])
    items = second.get(f"{PATH}/{name}/input_items", MINE).json["data"]
    assert len(items) == 1


def test_the_official_client_follows_a_stream(pair: Pair) -> None:
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{pair[1].port}/v1", api_key="sk-mine", max_retries=0)
    with client, client.responses.stream(model=MODEL, input="please say Hello") as stream:
        spoken = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        response = stream.get_final_response()
        assert spoken == response.output_text == "Hello"
        assert client.responses.retrieve(response.id).output_text == "Hello"
        more = client.responses.create(model=MODEL, input="please say Bye", previous_response_id=response.id)
        assert more.output_text == "Bye"
        assert [item.type for item in client.responses.input_items.list(more.id)] == ["message"]
        client.responses.delete(response.id)


def test_files_of_responses_belong_to_the_user_alone(pair: Pair) -> None:
    assert pair[0].post(PATH, said("Hello"), MINE).status == 200
    home = pair[0].home / "responses"
    found = list(home.rglob("*"))
    assert any(path.is_file() for path in found)
    for path in (home, *found):
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path


def test_a_response_that_cannot_be_stored_fails(homes: Callable[[], Path], engines: list[Server]) -> None:
    fleet = Fleet(homes())
    try:
        fleet.add_agent("one", engines[0])
        (fleet.home / "responses").write_text("in the way")
        failed = fleet.post(PATH, said("Hello"))
        assert (failed.status, failed.error["code"]) == (503, "STORAGE_UNAVAILABLE")
        events = read_events(fleet, PATH, said("Hello"))
        assert events[-1].name == "response.failed"
        assert events[-1].data["response"]["error"]["code"] == "server_error"
        assert events[-1].data["sequence_number"] > events[-2].data["sequence_number"]
        assert fleet.post(PATH, said("Hello", store=False)).status == 200
        (fleet.home / "responses").unlink()
        assert fleet.post(PATH, said("Hello")).status == 200
    finally:
        fleet.close()
