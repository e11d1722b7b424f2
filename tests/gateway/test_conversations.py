"""/v1/conversations: items, pages, responses that continue one, tenants, bounds, and a restart."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import pytest

from pipeline.api.conversation_object import MAX_ITEMS, Conversation, TooLargeError
from pipeline.api.requests.conversations import ConversationItem
from pipeline.config.schema import StoredResponsesConfig
from pipeline.errors import StarlingError
from stages.gateway.requests import stored_conversations as stored
from stages.gateway.requests.stored_responses import StoredResponse, StoredResponses
from tests.gateway.http_client import Answer
from tests.gateway.peers import MODEL
from tests.gateway.server import Server

PATH = "/v1/conversations"
KEYS = {name: {"Authorization": f"Bearer sk-{name}"} for name in ("one", "two")}
MIB = 1 << 20
TOOL = {"type": "function", "name": "weather", "parameters": {"type": "object"}}
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'


@pytest.fixture(scope="module")
def tenants(homes: Callable[[], Path]) -> Iterator[Server]:
    """A server with two tenants."""
    keys = [{"key": f"sk-{name}", "tenant": name} for name in KEYS]
    running = Server(homes(), auth={"api_keys": keys}, stored_responses={"tenant_mb": 1})
    running.wait_ready()
    yield running
    assert running.close() == 0


class Client:
    """Requests of one tenant."""

    def __init__(self, server: Server, name: str = "one") -> None:
        self.server, self.headers = server, KEYS[name]

    def send(self, method: str, path: str, body: Any = None) -> Answer:
        return self.server.request(method, path, body, self.headers)

    def make(self, **body: Any) -> str:
        answer = self.send("POST", PATH, body)
        assert answer.status == 200, answer.body
        return str(answer.json["id"])

    def items(self, name: str, **query: Any) -> dict[str, Any]:
        text = "&".join(f"{key}={value}" for key, value in query.items())
        answer = self.send("GET", f"{PATH}/{name}/items?{text}")
        assert answer.status == 200, answer.body
        return dict(answer.json)

    def respond(self, say: str, **more: Any) -> dict[str, Any]:
        answer = self.send("POST", "/v1/responses", {"model": MODEL, "input": f"please say {say}", "seed": 1, **more})
        assert answer.status == 200, answer.body
        return dict(answer.json)

    def prompt(self) -> str:
        return bytes(self.server.peers.generator.submitted[-1].prompt[::4]).decode()


@pytest.fixture
def client(tenants: Server) -> Client:
    return Client(tenants)


def message(text: str, role: str = "user") -> dict[str, Any]:
    return {"type": "message", "role": role, "content": text}


def texts(items: list[dict[str, Any]]) -> list[str]:
    return [item["content"][0]["text"] for item in items]


def test_a_conversation_is_made_read_changed_and_deleted(client: Client) -> None:
    answer = client.send("POST", PATH, {"metadata": {"topic": "ä"}, "items": [message("a")]}).json
    assert (answer["object"], answer["metadata"]) == ("conversation", {"topic": "ä"})
    path = f"{PATH}/{answer['id']}"
    assert client.send("GET", path).json == answer
    assert client.send("POST", path, {"metadata": {"topic": "b"}}).json == {**answer, "metadata": {"topic": "b"}}
    assert client.send("GET", path).json["metadata"] == {"topic": "b"}
    assert client.send("DELETE", path).json == {"id": answer["id"], "object": "conversation.deleted", "deleted": True}
    for method, body in (("GET", None), ("DELETE", None), ("POST", {"metadata": {}})):
        assert client.send(method, path, body).status == 404
    assert client.send("GET", f"{path}/items").status == 404


def test_items_are_listed_in_pages(client: Client) -> None:
    name = client.make(items=[message(str(i)) for i in range(3)])
    added = client.send(
        "POST", f"{PATH}/{name}/items", {"items": [message("3", "developer"), message("4", "assistant")]}
    )
    assert texts(added.json["data"]) == ["3", "4"]
    everything = client.items(name)
    assert texts(everything["data"]) == ["4", "3", "2", "1", "0"]
    assert [item["content"][0]["type"] for item in everything["data"][:2]] == ["output_text", "input_text"]
    assert not everything["has_more"]
    for order, expected in (("asc", "01234"), ("desc", "43210")):
        seen: list[dict[str, Any]] = []
        after = ""
        while True:
            page = client.items(name, order=order, limit=2, **({"after": after} if after else {}))
            seen += page["data"]
            assert (page["first_id"], page["last_id"]) == (page["data"][0]["id"], page["data"][-1]["id"])
            after = page["last_id"]
            if not page["has_more"]:
                break
        assert "".join(texts(seen)) == expected
    assert client.items(name, order="asc", after=after, limit=1)["data"][0] == everything["data"][3]
    path = f"{PATH}/{name}/items/{after}"
    assert client.send("GET", path).json == everything["data"][-1]
    assert client.send("DELETE", path).json["id"] == name
    assert client.send("GET", path).status == client.send("DELETE", path).status == 404
    assert texts(client.items(name)["data"]) == ["4", "3", "2", "1"]
    empty = client.items(client.make())
    assert (empty["data"], empty["first_id"], empty["has_more"]) == ([], None, False)


def test_a_response_larger_than_the_tenants_bound_is_refused_and_drops_nothing(client: Client) -> None:
    name, before = client.make(items=[message("a")]), client.respond("one")["id"]
    body = {"model": MODEL, "input": "x" * (MIB // 2)}  # an item and a message
    refused = client.send("POST", "/v1/responses", body)
    assert (refused.status, refused.error["param"]) == (507, "store")
    assert client.send("POST", "/v1/responses", {**body, "store": False}).status != 507
    assert client.send("GET", f"/v1/responses/{before}").status == 200
    assert texts(client.items(name)["data"]) == ["a"]


def test_responses_continue_a_conversation(client: Client) -> None:
    name = client.make(items=[message("Be brief.", "system"), message("x"), message("y", "assistant")])
    first = client.respond("one", conversation=name)
    assert first["conversation"] == {"id": name}
    assert client.prompt() == "system: Be brief.\nuser: x\nassistant: y\nuser: please say one\n"
    second = client.respond(CALL, conversation={"id": name}, tools=[TOOL], store=False)
    (call,) = second["output"]
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "sunny"}
    third = client.respond("", conversation=name, tools=[TOOL], input=[result, message("please say done")])
    items = client.items(name, order="asc", limit=100)["data"]
    kinds = [(item["type"], item.get("role", "")) for item in items]
    assert kinds == [
        *(("message", role) for role in ("system", "user", "assistant", "user", "assistant", "user")),
        ("function_call", ""),
        ("function_call_output", ""),
        ("message", "user"),
        ("message", "assistant"),
    ]
    assert items[6] == call
    assert items[-1] == third["output"][0]
    assert client.prompt().endswith("user: <tool_response>\nsunny\n</tool_response>\nplease say done\n")
    assert len({item["id"] for item in items}) == len(items)
    given = client.send("GET", f"/v1/responses/{third['id']}/input_items?order=asc").json
    assert given["data"] == items[7:9]
    newest = client.send("GET", f"/v1/responses/{third['id']}/input_items?limit=1").json
    assert (newest["data"], newest["has_more"]) == ([items[8]], True)
    rest = client.send("GET", f"/v1/responses/{third['id']}/input_items?after={newest['last_id']}").json
    assert (rest["data"], rest["has_more"]) == ([items[7]], False)
    assert client.send("GET", f"/v1/responses/{second['id']}/input_items").status == 404


def test_one_response_at_a_time(client: Client) -> None:
    name, peers = client.make(), client.server.peers
    peers.do(lambda: setattr(peers, "is_stepping", False))
    body = {"model": MODEL, "input": "please say one", "conversation": name, "background": True}
    running = client.send("POST", "/v1/responses", body).json
    refused = client.send("POST", "/v1/responses", body)
    assert (refused.status, refused.error["param"]) == (409, "conversation")
    cancelled = client.send("POST", f"/v1/responses/{running['id']}/cancel")
    assert cancelled.json["status"] == "cancelled"
    peers.do(lambda: setattr(peers, "is_stepping", True))
    client.respond("two", conversation=name)
    assert texts(client.items(name)["data"]) == ["two", "please say two"]


def test_of_two_responses_at_the_same_instant_one_is_refused(tenants: Server) -> None:
    """Both come while no request is admitted; the one that came second is refused at once, the other one waits."""
    client, peers = Client(tenants), tenants.peers
    name = client.make()
    body = {"model": MODEL, "input": "please say both", "conversation": name}
    peers.do(peers.kill_tokenizer)
    with ThreadPoolExecutor(6) as pool:
        sent = [pool.submit(client.send, "POST", "/v1/responses", body) for _ in range(5)]
        sent.append(pool.submit(Client(tenants, "two").send, "POST", "/v1/responses", body))
        refused, waiting = [], set(sent)
        while len(refused) < 4:
            done, waiting = wait(waiting, timeout=120, return_when=FIRST_COMPLETED)
            assert done, "more than one request was taken"
            refused += [answer for one in done if (answer := one.result()).status == 409]
        peers.do(peers.start_tokenizer)
        last = sent[-1].result()
        answered = [one.result() for one in sent[:-1] if one.result().status == 200]
    assert [answer.error["param"] for answer in refused] == ["conversation"] * 4
    assert (len(answered), last.status) == (1, 404)  # another tenant's name is no conversation
    assert texts(client.items(name)["data"]) == ["both", "please say both"]
    client.respond("more", conversation=name)  # the claim has ended


def test_other_tenants_see_nothing(tenants: Server, client: Client) -> None:
    name, other = client.make(items=[message("x")]), Client(tenants, "two")
    (item,) = client.items(name)["data"]
    requests = [
        ("GET", f"{PATH}/{name}", None),
        ("POST", f"{PATH}/{name}", {"metadata": {}}),
        ("DELETE", f"{PATH}/{name}", None),
        ("GET", f"{PATH}/{name}/items", None),
        ("POST", f"{PATH}/{name}/items", {"items": [message("y")]}),
        ("GET", f"{PATH}/{name}/items/{item['id']}", None),
        ("DELETE", f"{PATH}/{name}/items/{item['id']}", None),
        ("POST", "/v1/responses", {"model": MODEL, "input": "x", "conversation": name}),
        ("GET", f"/v1/responses/{client.respond('a')['id']}/input_items", None),
    ]
    for method, path, body in requests:
        assert other.send(method, path, body).status == 404, path
        assert tenants.request(method, path, body).status == 401
    assert texts(client.items(name)["data"]) == ["x"]


REFUSED: list[tuple[str, str, Any, str]] = [
    ("POST", PATH, {"name": "x"}, "name"),
    ("POST", PATH, {"metadata": {"a": 5}}, "metadata.a"),
    ("POST", PATH, {"items": {}}, "items"),
    ("POST", PATH, {"items": [message("x")] * 21}, "items"),
    ("POST", PATH, {"items": [{"type": "item_reference", "id": "x"}]}, "items[0].type"),
    ("POST", PATH, {"items": [message("x" * (MIB + 1))]}, "items"),
    ("POST", f"{PATH}/ID", {}, "metadata"),
    ("POST", f"{PATH}/ID/items", {"items": []}, "items"),
    ("POST", f"{PATH}/ID/items", {}, "items"),
    ("GET", f"{PATH}/ID/items?limit=0", None, "limit"),
    ("GET", f"{PATH}/ID/items?limit=101", None, "limit"),
    ("GET", f"{PATH}/ID/items?limit=00000000150000", None, "limit"),
    ("GET", f"{PATH}/ID/items?limit=000000001{'0' * 20}", None, "limit"),
    ("GET", f"{PATH}/ID/items?limit=%C2%B2", None, "limit"),
    ("GET", f"{PATH}/ID/items?order=up", None, "order"),
    ("GET", f"{PATH}/ID/items?after=x", None, "after"),
    ("POST", "/v1/responses", {"model": MODEL, "input": "x", "conversation": 5}, "conversation"),
    ("POST", "/v1/responses", {"model": MODEL, "input": "x", "conversation": {}}, "conversation.id"),
    (
        "POST",
        "/v1/responses",
        {"model": MODEL, "input": "x", "conversation": "c", "previous_response_id": "r"},
        "previous_response_id",
    ),
]


@pytest.mark.parametrize(("method", "path", "body", "param"), REFUSED)
def test_refused(client: Client, method: str, path: str, body: Any, param: str) -> None:
    answer = client.send(method, path.replace("ID", client.make()), body)
    assert answer.status == 400
    assert answer.error["param"] == param


def test_a_conversation_outlives_the_gateway(homes: Callable[[], Path]) -> None:
    """It is killed while a response is generated: its items are added once, by the successor."""
    server = Server(homes(), auth={"api_keys": [{"key": "sk-one", "tenant": "one"}]})
    try:
        server.wait_ready()
        client, peers = Client(server), server.peers
        name = client.make(items=[message("x")], metadata={"a": "b"})
        client.respond("one", conversation=name)
        peers.do(lambda: setattr(peers, "is_stepping", False))
        body = {"model": MODEL, "input": "please say two", "conversation": name, "background": True}
        running = client.send("POST", "/v1/responses", body).json
        server.kill_and_restart()
        peers.do(peers.kill_scheduler)
        peers.do(peers.start_scheduler)
        peers.do(lambda: setattr(peers, "is_stepping", True))
        ended = client.send("GET", f"/v1/requests/{running['id'].replace('resp_', 'req-')}")
        assert ended.json["status"] == "completed"
        assert client.send("GET", f"{PATH}/{name}").json["metadata"] == {"a": "b"}
        expected = ["x", "please say one", "one", "please say two", "two"]
        assert texts(client.items(name, order="asc")["data"]) == expected
        server.kill_and_restart()
        assert texts(client.items(name, order="asc")["data"]) == expected
    finally:
        server.close()


def test_the_official_client(client: Client) -> None:
    openai = pytest.importorskip("openai")
    base = f"http://127.0.0.1:{client.server.port}/v1"
    with openai.OpenAI(base_url=base, api_key="sk-one", max_retries=0) as official:
        made = official.conversations.create(items=[message("Hello")], metadata={"topic": "demo"})
        answer = official.responses.create(model=MODEL, input="please say Hi", conversation=made.id)
        assert answer.conversation.id == made.id
        listed = list(official.conversations.items.list(made.id, order="asc", limit=1))
        assert [item.content[0].text for item in listed] == ["Hello", "please say Hi", "Hi"]
        inputs = list(official.responses.input_items.list(answer.id))
        assert [item.content[0].text for item in inputs] == ["please say Hi"]
        assert official.conversations.update(made.id, metadata={"topic": "x"}).metadata == {"topic": "x"}
        official.conversations.items.delete(listed[0].id, conversation_id=made.id)
        assert official.conversations.delete(made.id).deleted
        with pytest.raises(openai.NotFoundError):
            official.conversations.retrieve(made.id)


# ------------------------------------------------------------------ the store


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        self.now += 0.001
        return self.now


def item(name: str, size: int = 10) -> ConversationItem:
    return ConversationItem(name, b"x" * size, {"role": "user", "content": name})


async def make(store: StoredResponses, name: str, *items: ConversationItem, tenant: str = "a") -> None:
    def job(db: Any, now: float) -> None:
        stored.create(db, tenant, Conversation(name, int(now), b"{}"), now, store.ttl_s)
        stored.add(db, tenant, name, items, now, store.ttl_s, store.tenant_bytes)

    await store.transact(job, tenant)


async def names(store: StoredResponses, *wanted: str, tenant: str = "a") -> list[str]:
    return await store.transact(lambda db, now: [one for one in wanted if stored.find(db, tenant, one, now)])


def test_bounds_of_conversations_and_responses_together() -> None:
    clock = Clock()
    store = StoredResponses(None, StoredResponsesConfig(ttl_s=60, tenant_mb=1, max_size_mb=2), clock)

    async def use() -> None:
        await make(store, "c1", item("i1", MIB // 3))
        await make(store, "c2", item("i1", MIB // 3))
        await make(store, "other", item("i1", MIB // 3), tenant="b")
        done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        added = (item("i2"),)
        response = StoredResponse("a", "r1", b"x" * (MIB // 3), [], added_to="c1", added=lambda: added)
        store.put(response, done.set_result)
        assert await done is None
        assert await names(store, "c1", "c2") == ["c1"]  # it was used last
        assert await store.body("a", "r1") is not None
        assert await names(store, "other", tenant="b") == ["other"]
        assert await store.transact(lambda db, now: [m["content"] for m in stored.messages(db, "a", "c1")]) == [
            "i1",
            "i2",
        ]
        again: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        store.put(response, again.set_result)  # by a successor
        assert await again is None
        assert await store.transact(lambda db, now: len(stored.messages(db, "a", "c1"))) == 2
        with pytest.raises(TooLargeError, match="tenant_mb"):
            await make(store, "huge", item("i1", MIB + 1))
        assert await names(store, "huge") == []
        with pytest.raises(TooLargeError, match="at most 4096"):
            await make(store, "many", *(item(f"i{i}", 1) for i in range(MAX_ITEMS + 1)))
        large: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        store.put(response._replace(id="r2", added=lambda: (item("i3", MIB),)), large.set_result)
        error = await large
        assert (error.code, error.param) == ("INSUFFICIENT_RESOURCES", "conversation")
        assert await store.body("a", "r2") is None
        clock.now += 70
        assert await names(store, "c1") == []
        await make(store, "new")
        assert await store.transact(lambda db, now: db.execute("SELECT COUNT(*) FROM items").fetchone()[0]) == 0

    try:
        asyncio.run(use())
    finally:
        store.close(timeout_s=60)


def test_a_disk_that_takes_nothing_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    store = StoredResponses(tmp_path / "file" / "responses.db", StoredResponsesConfig(), Clock())
    try:
        with pytest.raises(StarlingError, match="server.state_dir") as error:
            asyncio.run(make(store, "c"))
        assert (error.value.code, error.value.status) == ("STORAGE_UNAVAILABLE", 503)
    finally:
        store.close(timeout_s=60)


def test_sizes_are_those_of_what_is_stored() -> None:
    store = StoredResponses(None, StoredResponsesConfig(), Clock())

    async def use() -> None:
        await make(store, "c", item("i1", 100), item("i2", 200))
        one = await store.transact(lambda db, now: db.execute("SELECT size FROM conversations").fetchone()[0])
        assert (
            one
            == sum(item(name, size).size for name, size in (("i1", 100), ("i2", 200))) + 2 + stored.CONVERSATION_BYTES
        )
        await store.transact(lambda db, now: stored.set_metadata(db, "a", "c", b'{"a":"b"}'))
        assert await store.transact(lambda db, now: stored.delete_item(db, "a", "c", "i1"))
        two = await store.transact(lambda db, now: db.execute("SELECT size FROM conversations").fetchone()[0])
        assert two == one - item("i1", 100).size + 7

    try:
        asyncio.run(use())
    finally:
        store.close(timeout_s=60)
