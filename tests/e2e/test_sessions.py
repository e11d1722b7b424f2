"""The turns of a session give the text of one prompt with the same tokens, even if kv dies between them."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest

from tests.e2e.server import POLL_S, Server, wait_gone

pytestmark = pytest.mark.slow


def kill_kv(server: Server) -> None:
    pid = server.pid_of("kv")
    os.kill(pid, signal.SIGKILL)
    assert wait_gone(pid)


def generate(server: Server, prompt: Any, **more: Any) -> dict[str, Any]:
    body: dict[str, Any] = server.post("/v1/generate", prompt=prompt, max_tokens=12, temperature=0, **more)
    return body


def test_turns_give_the_text_of_one_prompt(demo_server: Server) -> None:
    server = demo_server
    text = "The harbour was quiet, and the boats lay still in the morning light. " * 4
    opened = generate(server, text, session_id="")
    name = opened["session_id"]
    history = server.post("/v1/tokenize", text=text, add_special_tokens=True)["tokens"]
    assert opened["usage"]["prompt_tokens"] == len(history)
    history += opened["choices"][0]["tokens"]

    for question in (" Then a bell rang:", " No sailor had expected"):
        kill_kv(server)
        stream = list(server.stream("/v1/generate", prompt=question, max_tokens=12, temperature=0, session_id=name))
        assert stream[-1]["session_id"] == name
        assert stream[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] >= 32
        tokens = [token for event in stream for token in event.get("tokens", [])]
        history += server.post("/v1/tokenize", text=question)["tokens"]
        assert stream[-1]["usage"]["prompt_tokens"] == len(history)
        once = generate(server, history)["choices"][0]
        assert "".join(event.get("text", "") for event in stream) == once["text"]
        assert tokens == once["tokens"]
        history += tokens

    turn = server.stream("/v1/generate", prompt=" Go on", max_tokens=4000, ignore_eos=True, session_id=name)
    next(turn)
    status, body, _ = server.request("POST", "/v1/generate", {"prompt": "x", "session_id": name})
    assert (status, body["error"]["code"]) == (409, "CONFLICT")
    turn.close()  # the client disconnects: the session keeps its former state
    while (answer := server.request("POST", "/v1/generate", {"prompt": "", "session_id": name, "max_tokens": 1}))[
        0
    ] == 409:
        time.sleep(POLL_S)  # until the server has cancelled the turn
    assert answer[0] == 200
    assert answer[1]["usage"]["prompt_tokens"] == len(history)

    assert server.post("/v1/session/close", session_id=name)["closed"]
    for path in ("/v1/session/close", "/v1/generate"):
        fields = {"session_id": name} if path.endswith("close") else {"session_id": name, "prompt": "x"}
        status, body, _ = server.request("POST", path, fields)
        assert (status, body["error"]["code"]) == (404, "NOT_FOUND")
