"""A stand-in for `vllm serve`: a real HTTP server with the documented `/health`, `/metrics` and `/v1/*`.

    python stand_in_engine.py serve MODEL --served-model-name NAME --host HOST --port PORT ...

It "computes" text by a rule, so that a test knows the one right continuation: after a prompt of n characters the next
token is the letter n mod 26.  A chat's prompt is its messages' contents, joined.  The file MODEL.control, which it
reads for each token, has what it does from the fourth token on: hold, die (SIGKILL), stop (SIGSTOP), or send nonsense,
an error, or an early end; or what it refuses: busy: all requests, no-parser: those with tools, bad-schema: all, in
their streams.  MODEL.requests gets a line for each body.

With tools each token is a part of one call of the first tool, whose arguments are `{"x": TEXT}`.  A log probability is
minus the number of the token.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


def letter(position: int) -> str:
    return chr(97 + position % 26)


def expected(prompt: str, n_tokens: int) -> str:
    """The text that follows a prompt."""
    return "".join(letter(len(prompt) + index) for index in range(n_tokens))


def _call_delta(tool: dict[str, Any], text: str, index: int, n: int) -> dict[str, Any]:
    """What token `index` of `n` adds to the call: its name first, then the arguments."""
    if not index:
        function = {"name": tool["function"]["name"], "arguments": ""}
        return {"index": 0, "id": "call-1", "type": "function", "function": function}
    arguments = ('{"x": "' if index == 1 else "") + text + ('"}' if index == n - 1 else "")
    return {"index": 0, "function": {"arguments": arguments}}


def _logprobs(body: dict[str, Any], text: str, index: int, is_chat: bool) -> dict[str, Any]:
    token = {"token": text, "logprob": -float(index), "bytes": [ord(text)]}
    if is_chat:
        return {"content": [{**token, "id": 7, "top_logprobs": [token] * body["top_logprobs"]}]}
    arrays = {"tokens": [text], "token_logprobs": [-float(index)], "text_offset": [index]}
    return {**arrays, "top_logprobs": [{text: -float(index)}]}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: StandIn

    def do_GET(self) -> None:
        if self.path == "/health":
            return self.answer(200, b"")
        if self.path == "/metrics":
            running = self.server.running
            text = f'vllm:num_requests_running{{model_name="m"}} {running}\nvllm:num_requests_waiting{{x="y"}} 2.0\n'
            text += "vllm:prefix_cache_queries_total 8.0\nvllm:prefix_cache_hits_total 6.0\n"
            return self.answer(200, text.encode())
        return self.answer(404, b"{}")

    def do_POST(self) -> None:
        raw = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Authorization") != f"Bearer {os.environ['VLLM_API_KEY']}":
            return self.answer(401, b'{"error":"Unauthorized"}')
        body = json.loads(raw)
        with self.server.requests.open("a") as file:
            file.write(json.dumps({"path": self.path, **body}) + "\n")
        if self.server.control() == "busy":
            return self.answer(503, b'{"error":{"message":"overloaded","type":"x","code":503}}')
        is_chat = self.path == "/v1/chat/completions"
        prompt = "".join(one["content"] for one in body["messages"]) if is_chat else body["prompt"]
        if body.get("tools") and self.server.control() == "no-parser":
            said = '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set' + 2000 * "."
            return self.answer(400, json.dumps({"error": {"message": said, "type": "BadRequestError"}}).encode())
        if len(prompt) > 10_000:
            return self.answer(400, b'{"error":{"message":"the prompt is too long","type":"BadRequestError"}}')
        self.server.running += 1
        try:
            return self.stream(body, prompt, is_chat)
        finally:
            self.server.running -= 1

    def stream(self, body: dict[str, Any], prompt: str, is_chat: bool) -> None:
        assert body["stream"] and body["stream_options"]["continuous_usage_stats"]
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        if self.server.control() == "bad-schema":
            said = "Grammar error: Invalid type: nonsense" + 2000 * "."
            self.chunk(b"data: " + json.dumps({"error": {"message": said, "code": 400}}).encode() + b"\n\n")
            self.chunk(b"")
            return
        choices = range(body.get("n", 1))
        for choice in choices if is_chat else ():
            self.event(body, is_chat, {"role": "assistant", "content": ""}, 0, prompt, choice)
        n = body.get("max_tokens", 50)
        for index in range(n):
            control = self.server.control() if index >= 3 else ""
            while control == "hold":
                time.sleep(0.01)
                control = self.server.control()
            if control in ("die", "stop"):
                self.server.clear()
                os.kill(os.getpid(), signal.SIGKILL if control == "die" else signal.SIGSTOP)
                time.sleep(0.5)  # until it has stopped
            if control == "nonsense":
                self.chunk(b"data: <html>\n\n")
            if control == "error":
                self.chunk(b'data: {"error":{"message":"CUDA error","type":"x"}}\n\n')
            if control in ("nonsense", "error", "end"):
                self.close_connection = True
                self.chunk(b"")
                return
            text = letter(len(prompt) + index)
            part: dict[str, Any] = {"content": text} if is_chat else {"text": text}
            if tools := body.get("tools"):
                part = {"tool_calls": [_call_delta(tools[0], text, index, n)]}
            for choice in choices:
                logprobs = _logprobs(body, text, index, is_chat) if body.get("logprobs") is not None else None
                self.event(body, is_chat, part, index + 1, prompt, choice, logprobs=logprobs)
        for choice in choices:
            is_named = isinstance(body.get("tool_choice"), dict)  # then vLLM says as OpenAI does: the model stopped
            reason = ("stop" if is_named else "tool_calls") if body.get("tools") else "length"
            self.event(body, is_chat, {} if is_chat else {"text": ""}, n, prompt, choice, reason)
        usage = {"prompt_tokens": len(prompt), "completion_tokens": n * len(choices)}
        self.chunk(b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\n")
        self.chunk(b"data: [DONE]\n\n")
        self.chunk(b"")

    def event(
        self,
        body: dict[str, Any],
        is_chat: bool,
        part: dict[str, Any],
        n: int,
        prompt: str,
        index: int,
        reason: str | None = None,
        logprobs: dict[str, Any] | None = None,
    ) -> None:
        shown = {"delta": part} if is_chat else part
        choice = {"index": index, **shown, "logprobs": logprobs, "finish_reason": reason}
        usage = {"prompt_tokens": len(prompt), "completion_tokens": n, "total_tokens": len(prompt) + n}
        event = {"id": "own-id", "model": body["model"], "created": 1, "choices": [choice], "usage": usage}
        self.chunk(b"data: " + json.dumps(event).encode() + b"\n\n")

    def chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))

    def answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: Any) -> None:
        pass


class StandIn(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, address: tuple[str, int], model: Path) -> None:
        super().__init__(address, Handler)
        self.requests = model.with_name(model.name + ".requests")
        self.running = 0
        self._control = model.with_name(model.name + ".control")

    def control(self) -> str:
        """What the test wants now."""
        return self._control.read_text() if self._control.exists() else ""

    def clear(self) -> None:
        """What ends the server counts once: its successor computes."""
        self._control.unlink(missing_ok=True)


def main(arguments: list[str]) -> None:
    assert arguments[0] == "serve"
    options = dict(zip(arguments[2::2], arguments[3::2], strict=False))
    print("stand-in for", options["--served-model-name"], flush=True)
    StandIn((options["--host"], int(options["--port"])), Path(arguments[1])).serve_forever()


if __name__ == "__main__":
    main(sys.argv[1:])
