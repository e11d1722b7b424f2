"""The clients `openai` and `anthropic` when things go wrong: retries, exception classes, streams that break."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import anthropic
import openai
import pytest
from click.testing import CliRunner
from openai.types.chat import ChatCompletionChunk

from pipeline.ipc import control
from starling.cli import cli
from tests.e2e.server import poll_until
from tests.gateway.http_client import Stream
from tests.gateway.peers import MODEL
from tests.gateway.server import Server

HI: list[Any] = [{"role": "user", "content": "Hi"}]
LONG = {"prompt": "x", "max_tokens": 40, "seed": 7, "ignore_eos": True}
LIMITS: dict[str, tuple[str, ...]] = {
    "one": ("--max-concurrent", "1"),
    "few": ("--requests-total", "1"),
    "metrics": ("--scope", "metrics"),
    "any": (),
}


class Keyed(NamedTuple):
    """A server with a key for each of `LIMITS`."""

    server: Server
    keys: dict[str, str]

    @contextmanager
    def occupied(self) -> Iterator[Stream]:
        """The key `one` has a request in flight, whose stream stands still; at the end it has none."""
        peers, key = self.server.peers, {"Authorization": f"Bearer {self.keys['one']}"}
        with peers.held():
            stream = self.server.stream("/v1/generate", LONG, key)
            try:
                yield stream
            finally:
                stream.close()
        # The gateway learns later than the client that the connection is closed.
        while self.server.request("POST", "/v1/generate", {"prompt": "x", "max_tokens": 1}, key).status == 429:
            time.sleep(0.01)


@pytest.fixture(scope="module")
def keyed(homes: Callable[[], Path]) -> Iterator[Keyed]:
    running = Server(homes())
    running.wait_ready()
    keys = {}
    for name, limits in LIMITS.items():
        done = CliRunner(env=running.env).invoke(cli, ["keys", "add", name, "--json", *limits])
        assert done.exit_code == 0, done.output
        keys[name] = json.loads(done.stdout)["key"]
    yield Keyed(running, keys)
    assert running.close() == 0


class Client(NamedTuple):
    """An official client, the call that asks for an answer, and the statuses of the responses so far."""

    library: Any
    ask: Callable[..., Any]
    statuses: list[int]
    is_refused: threading.Event
    close: Callable[[], None]


def connect(kind: str, keyed: Keyed, key: str, max_retries: int = 0) -> Client:
    statuses: list[int] = []
    is_refused = threading.Event()

    def record(response: Any) -> None:
        statuses.append(response.status_code)
        if response.status_code == 429:
            is_refused.set()

    root, library = f"http://127.0.0.1:{keyed.server.port}", openai if kind == "openai" else anthropic
    options: dict[str, Any] = {
        "api_key": keyed.keys.get(key, key),
        "max_retries": max_retries,
        "http_client": library.DefaultHttpxClient(event_hooks={"response": [record]}),
    }
    if kind == "openai":
        one = openai.OpenAI(base_url=f"{root}/v1", **options)
        ask = partial(one.chat.completions.create, seed=7)
        return Client(openai, ask, statuses, is_refused, one.close)
    other = anthropic.Anthropic(base_url=root, **options)
    return Client(anthropic, other.messages.create, statuses, is_refused, other.close)


KINDS = ("openai", "anthropic")
BODY: dict[str, Any] = {"model": MODEL, "messages": HI, "max_tokens": 5}


@pytest.mark.parametrize("kind", KINDS)
def test_a_refused_request_is_tried_again_until_it_is_admitted(keyed: Keyed, kind: str) -> None:
    client = connect(kind, keyed, "one", max_retries=5)
    answers: list[Any] = []
    with keyed.occupied():
        thread = threading.Thread(target=lambda: answers.append(client.ask(**BODY)))
        thread.start()
        assert client.is_refused.wait(60)
    thread.join(60)
    client.close()
    assert client.statuses[-1] == 200 and set(client.statuses[:-1]) == {429}
    assert answers and answers[0].usage


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("key", "change", "name", "message"),
    [
        ("one", {"max_tokens": 0}, "BadRequestError", "max_tokens"),
        ("sk-wrong", {}, "AuthenticationError", "key"),
        ("metrics", {}, "PermissionDeniedError", "scope"),
        ("one", {"model": "absent"}, "NotFoundError", "absent"),
    ],
)
def test_each_error_has_its_exception_class(
    keyed: Keyed, kind: str, key: str, change: dict[str, Any], name: str, message: str
) -> None:
    client = connect(kind, keyed, key, max_retries=3)
    with pytest.raises(getattr(client.library, name), match=message):
        client.ask(**BODY | change)
    client.close()
    assert len(client.statuses) == 1, "an error that another attempt does not mend is not tried again"


@pytest.mark.parametrize("kind", KINDS)
def test_a_request_that_was_cancelled_is_not_sent_again(keyed: Keyed, kind: str) -> None:
    client = connect(kind, keyed, "any", max_retries=2)
    peers, failures = keyed.server.peers, list[Exception]()

    def ask() -> None:
        try:
            client.ask(**BODY)
        except client.library.ConflictError as error:
            failures.append(error)

    with peers.held():
        n_before = len(peers.generator.submitted)
        thread = threading.Thread(target=ask)
        thread.start()
        poll_until(lambda: len(peers.generator.submitted) > n_before)
        name = peers.generator.submitted[-1].request
        key = {"Authorization": f"Bearer {keyed.keys['any']}"}
        assert keyed.server.request("DELETE", f"/v1/requests/{name}", None, key).status == 200
        thread.join(60)
    client.close()
    assert client.statuses == [409] and "cancelled by its client" in str(failures[0])


@pytest.mark.parametrize("kind", KINDS)
def test_what_may_be_tried_again_has_its_exception_class(keyed: Keyed, kind: str) -> None:
    client = connect(kind, keyed, "one")
    with keyed.occupied(), pytest.raises(client.library.RateLimitError) as limited:
        client.ask(**BODY)
    assert int(limited.value.response.headers["Retry-After"]) >= 1
    run_dir = keyed.server.home / "run"
    control.call(run_dir, "gateway", {"op": "drain", "target": MODEL, "timeout_s": 60}, timeout_s=60)
    try:
        with pytest.raises(client.library.InternalServerError, match="is draining") as drained:
            client.ask(**BODY)
        assert (drained.value.status_code, drained.value.response.headers["Retry-After"]) == (503, "5")
    finally:
        control.call(run_dir, "gateway", {"op": "resume", "target": MODEL}, timeout_s=60)
    client.close()


def test_a_quota_that_is_used_up_for_good_is_not_tried_again(keyed: Keyed) -> None:
    first, second = (connect(kind, keyed, "few", max_retries=3) for kind in KINDS)
    assert first.ask(**BODY).usage
    for client in (first, second):
        with pytest.raises(client.library.RateLimitError, match="in total"):
            client.ask(**BODY)
        assert client.statuses.count(429) == 1
        client.close()


def test_a_body_that_is_too_large(keyed: Keyed) -> None:
    client = connect("anthropic", keyed, "one")
    with pytest.raises(anthropic.RequestTooLargeError):
        client.ask(**BODY | {"messages": [{"role": "user", "content": "x" * (9 << 20)}]})
    client.close()


def test_a_stream_continues_behind_the_last_event_before_its_connection_broke(keyed: Keyed) -> None:
    """The raw lines have the ids of events, and a GET with the last of them gives the rest."""
    body: dict[str, Any] = {"model": MODEL, "messages": HI, "max_tokens": 40, "seed": 7}
    named = {"Idempotency-Key": "a-stream-that-breaks"}  # so that the request goes on without a reader
    url = f"http://127.0.0.1:{keyed.server.port}/v1"
    with openai.OpenAI(base_url=url, api_key=keyed.keys["any"], max_retries=0) as client:
        whole = client.chat.completions.create(**body).choices[0].message.content
        last, begun = "", ""
        with client.chat.completions.with_streaming_response.create(
            **body, stream=True, extra_headers=named
        ) as response:
            for line in response.iter_lines():
                if line.startswith("id: "):
                    last = line.removeprefix("id: ")
                elif line.startswith("data: {"):
                    begun += json.loads(line.removeprefix("data: "))["choices"][0]["delta"].get("content") or ""
                if len(begun) >= 5 and not line:
                    break  # the connection is closed, in the middle of the stream
        rest = client.get(
            f"/requests/{last.partition(':')[0]}",
            cast_to=ChatCompletionChunk,
            options={"headers": {"Last-Event-ID": last}},
            stream=True,
            stream_cls=openai.Stream[ChatCompletionChunk],
        )
        text = "".join(chunk.choices[0].delta.content or "" for chunk in rest if chunk.choices)
    assert 5 <= len(begun) < len(whole or "")
    assert begun + text == whole
