"""`starling kv warm`: what is in the file, and what is asked of the server."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from pipeline.config.schema import DEMO_MODEL
from starling.cli import cli
from starling.cli.kv_warm import read_requests


def test_a_line_is_a_prompt() -> None:
    lines = """\
Once upon a time

"quoted"
[1, 2, 3]
[{"role": "user", "content": "hi"}]
{"prompt": "x", "cache_salt": "s", "stream": true, "max_tokens": 900, "min_tokens": 5, "n": 4, "seed": 1}
[not json
["a", "b"]
{"prompt": [1], "session_id": "mine", "temperature": 0, "model": "other"}
"""
    assert list(read_requests(lines, "", "m")) == [
        (1, "/v1/generate", {"prompt": "Once upon a time", "max_tokens": 1, "model": "m"}),
        (3, "/v1/generate", {"prompt": "quoted", "max_tokens": 1, "model": "m"}),
        (4, "/v1/generate", {"prompt": [1, 2, 3], "max_tokens": 1, "model": "m"}),
        (5, "/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1, "model": "m"}),
        (6, "/v1/generate", {"prompt": "x", "cache_salt": "s", "max_tokens": 1, "model": "m"}),
        (7, "/v1/generate", {"prompt": "[not json", "max_tokens": 1, "model": "m"}),
        (8, "/v1/completions", {"prompt": ["a", "b"], "max_tokens": 1, "model": "m"}),
        (9, "/v1/generate", {"prompt": [1], "max_tokens": 1, "model": "other"}),
    ]
    assert {body["model"] for _, _, body in read_requests(lines, "one", "m")} == {"one"}


@pytest.mark.parametrize("end", ["\u2028", "\u2029", "\x85", "\x0b", "\x0c", "\x1c"])
def test_only_a_newline_ends_a_line(end: str) -> None:
    body = json.dumps({"prompt": f"one{end}two"}, ensure_ascii=False)
    lines = f"{body}\r\nplain{end}text\n"
    assert [(number, sent["prompt"]) for number, _, sent in read_requests(lines, "m")] == [
        (1, f"one{end}two"),
        (2, f"plain{end}text"),
    ]


def test_a_body_that_is_not_json_is_refused_before_anything_is_sent(tmp_path: Path) -> None:
    file = tmp_path / "prompts"
    file.write_text('hello\n{"prompt": "x}\n')
    done = CliRunner().invoke(cli, ["kv", "warm", str(file)], standalone_mode=False)
    assert isinstance(done.exception, click.ClickException)
    assert f"{file}: line 2 begins with {{ and is not JSON: Unterminated string" in done.exception.message


class Server(BaseHTTPRequestHandler):
    """Refuses the word "bad"."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.seen.append((self.headers.get("Authorization"), body))  # type: ignore[attr-defined]
        is_bad = body["prompt"] == "bad"
        answer: dict[str, Any] = {"usage": {"prompt_tokens": 5, "prompt_tokens_details": {"cached_tokens": 2}}}
        data = json.dumps({"error": {"message": "no such word"}} if is_bad else answer).encode()
        self.send_response(400 if is_bad else 200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HTTPServer]:
    with HTTPServer(("127.0.0.1", 0), Server) as server:
        server.seen = []  # type: ignore[attr-defined]
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        monkeypatch.setenv("STARLING_HOME", str(tmp_path))
        monkeypatch.setenv("STARLING_SERVER__PORT", str(server.server_port))
        yield server
        server.shutdown()
        thread.join()


def test_asks_and_sums_up(server: HTTPServer, tmp_path: Path) -> None:
    file = tmp_path / "prompts"
    file.write_text("one\nbad\nthree\n")
    done = CliRunner().invoke(cli, ["kv", "warm", str(file), "--key", "sk-1"], standalone_mode=False)
    assert done.return_value == 1
    lines = done.output.splitlines()
    assert f"{file}:2: no such word" in lines  # whole, however long the path is: nothing reads it but a pipe
    assert "2 of 3 prompts, 10 tokens, 4 of them in the cache already" in lines
    assert server.seen[0] == ("Bearer sk-1", {"prompt": "one", "max_tokens": 1, "model": DEMO_MODEL})  # type: ignore[attr-defined]


def test_says_that_nobody_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STARLING_HOME", str(tmp_path))
    monkeypatch.setenv("STARLING_SERVER__PORT", "1")
    (tmp_path / "prompts").write_text("one\n")
    done = CliRunner().invoke(cli, ["kv", "warm", str(tmp_path / "prompts")])
    assert done.exit_code == 1
    assert "no server answers at http://127.0.0.1:1" in done.output
