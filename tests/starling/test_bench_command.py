"""`starling bench`, the command: failures by kind, the report, plots, Ctrl-C."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NamedTuple

import click
import pytest
from click.testing import CliRunner

from pipeline.errors import ModelUnavailable
from starling.bench import plots
from starling.cli.bench import bench
from starling.cli.run_command import EXIT_INTERRUPTED

TOKENS = 3
LIMIT_S = 120


def event(text: str = "", finish: str | None = None, **more: object) -> bytes:
    return b"data: " + json.dumps({"choices": [{"text": text, "finish_reason": finish}], **more}).encode() + b"\n\n"


class Server(ThreadingHTTPServer):
    """What it answers depends on the prompt."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.bodies: list[dict[str, object]] = []
        self.stalled = threading.Event()  # a request waits for ever
        self.release = threading.Event()  # until the test ends
        self.stall_after = 0  # 0: only what has the prompt "stall"

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request: object, client_address: object) -> None:
        """The client has gone, as it should."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def do_GET(self) -> None:
        self._answer(200, b'{"data": [{"id": "first"}, {"id": "second"}]}')

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.bodies.append(body)
        prompt = body["messages"][0]["content"] if "messages" in body else body["prompt"]
        match prompt:
            case "full":
                identity = f"req-{len(self.server.bodies)}"
                self._answer(429, b'{"error": {"message": "the queue is full"}}', ("X-Request-Id", identity))
                return
            case "page":
                self._answer(200, b"<html>")
                return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self._chunk(event(" one") + event(" two"))
        if prompt == "stall" or len(self.server.bodies) == self.server.stall_after:
            self.server.stalled.set()
            self.server.release.wait()
        match prompt:
            case "error":
                self._chunk(b'data: {"error": {"code": "TIMEOUT", "message": "too late"}}\n\n')
            case "broken":
                self.close_connection = True
                return
            case "unfinished":
                pass
            case "nonsense":
                self._chunk(b"data: {]\n\n")
            case _:
                usage = {"prompt_tokens": 5, "completion_tokens": TOKENS}
                self._chunk(event(" three", "length", usage=usage) + b"data: [DONE]\n\n")
        self.wfile.write(b"0\r\n\r\n")

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))

    def _answer(self, status: int, body: bytes, *fields: tuple[str, str]) -> None:
        self.send_response(status)
        for name, value in fields:
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as found:
        thread = threading.Thread(target=found.serve_forever)
        thread.start()
        yield found
        found.release.set()
        found.shutdown()
        thread.join()


class Done(NamedTuple):
    exit_code: int
    output: str


def run(*arguments: object) -> Done:
    """The command in this process, with the exit code that the program would have."""
    done = CliRunner().invoke(bench, [str(one) for one in arguments], standalone_mode=False)
    if isinstance(done.exception, click.ClickException):
        return Done(done.exception.exit_code, done.exception.format_message())
    if done.exception is not None:
        raise done.exception
    return Done(done.return_value, done.output)


def trace(path: Path, *prompts: str) -> Path:
    path.write_text("".join(json.dumps({"at_s": 0, "prompt": prompt}) + "\n" for prompt in prompts))
    return path


def test_failures_are_counted_by_kind(server: Server, home: Path, tmp_path: Path) -> None:
    prompts = ["good", "full", "broken", "good", "full", "error", "unfinished", "nonsense", "page"]
    file = trace(tmp_path / "trace.jsonl", *prompts)
    done = run(server.url, "--trace", file, "--json", tmp_path / "out.json", "--endpoint", "completions")
    assert done.exit_code == 0, done.output
    report = json.loads((tmp_path / "out.json").read_text())
    found = report["figures"]
    assert found["failures"] == {
        "HTTP 429": 2,
        "broken stream": 2,
        "error TIMEOUT": 1,
        "invalid stream": 1,
        "not a stream": 1,
    }
    assert (found["requests"], found["complete"], found["failed"], found["unfinished"]) == (9, 2, 7, 0)
    assert (found["output_tokens"], found["prompt_tokens"]) == (2 * TOKENS, 10)
    assert 'failed  2 x HTTP 429: {"error": {"message": "the queue is full"}}' in done.output
    # Which ones they were, and what the server's logs call the first of a kind.
    first = next(one for one in report["requests"] if one["status"] == 429)
    numbers = [number for number, one in enumerate(report["requests"], 1) if one["status"] == 429]
    assert first["error"] == '{"error": {"message": "the queue is full"}}'
    assert re.fullmatch(r"req-\d+", first["id"])
    assert f"        requests {numbers[0]}, {numbers[1]}; {numbers[0]} is {first['id']}\n" in done.output
    assert re.search(r"        request \d\n", done.output)  # the only one of its kind, without a name
    assert max(map(len, done.output.splitlines())) <= 80
    assert len(report["requests"]) == 9
    assert {one["status"] for one in report["requests"]} == {200, 429}
    assert (report["model"], report["load"], report["interrupted"]) == ("first", "trace of 9 requests", False)


def test_a_stalled_server_is_a_timeout(server: Server, home: Path, tmp_path: Path) -> None:
    file = trace(tmp_path / "trace.jsonl", "stall")
    done = run(server.url, "--trace", file, "--timeout", 0.5, "--warmup", 0)
    assert done.exit_code == 1
    assert "failed  1 x timeout: not complete within 0.5 s" in done.output


def test_a_server_that_is_not_there(home: Path) -> None:
    import socket

    with socket.socket() as bound:  # no server listens
        bound.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{bound.getsockname()[1]}"
        command = [sys.executable, "-m", "starling", "bench", url, "--model", "m", "--requests", "2"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("starling: ") and "refused" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_closed_loop_sends_what_it_was_told(server: Server, home: Path) -> None:
    sizes = ["--prompt-tokens", "uniform:3:9", "--max-tokens", "7", "--shared-prefix", 4]
    again = [run(server.url, "--requests", 12, "--clients", 4, "--seed", 5, "--field", "top_k=3", *sizes) for _ in "ab"]
    assert [one.exit_code for one in again] == [0, 0]
    assert "closed loop, 4 clients, seed 5" in again[0].output
    assert "12 of 12 requests complete" in again[0].output
    assert "output  36 tokens" in again[0].output
    runs = server.bodies[:13], server.bodies[13:]
    assert sorted(map(str, runs[0])) == sorted(map(str, runs[1]))
    for body in server.bodies:
        assert (body["model"], body["max_tokens"], body["top_k"], body["temperature"]) == ("first", 7, 3, 0)
        assert body["stream_options"] == {"include_usage": True}
        assert 7 <= len(body["messages"][0]["content"].split()) <= 13  # type: ignore[index]


def test_an_open_loop_has_no_more_than_its_requests(server: Server, home: Path, tmp_path: Path) -> None:
    report = tmp_path / "out.json"
    done = run(server.url, "--rate", 200, "--requests", 10, "--model", "second", "--json", report, "--warmup", 0)
    assert done.exit_code == 0, done.output
    assert "open loop, 200 requests/s" in done.output and "sent late" in done.output
    records = json.loads(report.read_text())["requests"]
    assert len(records) == len(server.bodies) == 10
    assert all(one["due_s"] <= one["sent_s"] <= one["first_s"] <= one["ended_s"] for one in records)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["http://127.0.0.1:1", "--clients", "2", "--rate", "3"], "--clients and --rate exclude each other"),
        (["http://127.0.0.1:1", "--prompt-tokens", "many"], "expected N, uniform:LOW:HIGH"),
        (["http://127.0.0.1:1", "--field", "x"], "expected NAME=JSON"),
        (["127.0.0.1:1"], "URL '127.0.0.1:1': expected http://HOST:PORT"),
        (["http://127.0.0.1:1", "--json", "no/such/file"], "--json no/such/file: No such file or directory"),
        (["http://127.0.0.1:1", "--json", "/proc/figures.json"], "--json /proc/figures.json: "),
        (["http://127.0.0.1:1", "--json", "/proc/version"], "--json /proc/version: "),
        (["http://127.0.0.1:1", "--plots", "/proc/plots"], "--plots /proc/plots: "),
    ],
)
def test_wrong_usage_is_refused_before_anything_is_sent(arguments: list[str], message: str, home: Path) -> None:
    done = run(*arguments, "--model", "m")
    assert done.exit_code == 2
    assert message in done.output


def test_a_run_without_a_result_leaves_no_empty_file(home: Path, tmp_path: Path) -> None:
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    old.write_text("of another run")
    for file in (old, new):
        with pytest.raises(ModelUnavailable):
            run("http://127.0.0.1:1", "--model", "m", "--json", file)
    assert old.read_text() == "of another run"
    assert not new.exists()


def test_a_file_that_cannot_be_written_any_more_is_named(server: Server, home: Path) -> None:
    """A device that is full once it is written: the figures are printed all the same."""
    command = [sys.executable, "-m", "starling", "bench", server.url, "--requests", "2", "--json", "/dev/full"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 1
    assert "2 of 2 requests complete" in done.stdout
    assert done.stderr == "starling: /dev/full: No space left on device; the result was not written\n"


def test_the_file_is_written_for_a_reader_that_has_left(server: Server, home: Path, tmp_path: Path) -> None:
    """`| head`: what was measured is not lost with the report."""
    path = tmp_path / "figures.json"
    line = [sys.executable, "-m", "starling", "bench", server.url, "--requests", "1", "--json", str(path)]
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "wb") as output:
        done = subprocess.run(line, stdout=output, stderr=subprocess.PIPE, text=True, timeout=LIMIT_S, check=False)
    assert (done.returncode, done.stderr) in ((0, ""), (1, ""))
    assert json.loads(path.read_text())["figures"]["complete"] == 1


def test_plots_without_matplotlib_are_refused_first(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plots, "find_spec", lambda name: None)
    done = run("http://127.0.0.1:1", "--plots", "p")
    assert done.exit_code == 2
    assert "pip install 'matplotlib>=" in done.output


def test_ctrl_c_prints_what_there_is(server: Server, home: Path, tmp_path: Path) -> None:
    """The sixth request, after one that warms up and four that are complete, waits for ever."""
    server.stall_after = 6
    report, figures = tmp_path / "out.json", tmp_path / "plots"
    command = [sys.executable, "-m", "starling", "bench", server.url, "--clients", "1", "--json", str(report)]
    if plots.can_plot():
        # Where a user has no list of fonts yet, matplotlib makes one, and says so on standard error after five seconds.
        made = [sys.executable, "-c", "from matplotlib import font_manager"]
        subprocess.run(made, check=True, capture_output=True, timeout=LIMIT_S)
        command += ["--plots", str(figures)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert server.stalled.wait(LIMIT_S)
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=LIMIT_S)
    assert process.returncode == EXIT_INTERRUPTED, errors
    assert "4 of 5 requests complete" in output
    assert "under way at the end: 1" in output
    assert errors == "starling: interrupted\n"
    found = json.loads(report.read_text())
    assert found["interrupted"] is True
    assert found["figures"]["unfinished"] == 1
    assert found["figures"]["failed"] == 0
    if plots.can_plot():
        names = ["between_tokens.png", "latency.png", "timeline.png"]
        assert sorted(path.name for path in figures.iterdir()) == names
        assert all(path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n") for path in figures.iterdir())


def test_a_run_that_is_killed_while_it_plots_leaves_no_part_of_a_plot(tmp_path: Path) -> None:
    """The kernel ends it at the first byte that it writes to a file."""
    if not plots.can_plot():
        pytest.skip("not installed: matplotlib")
    code = (
        "import resource, signal, sys; from pathlib import Path; from matplotlib import font_manager\n"
        "from starling.bench.load import Run; from starling.bench.plots import write_plots\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_DFL); resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))\n"
        "write_plots(Run([], 0.0, 1.0), Path(sys.argv[1]))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, timeout=LIMIT_S)
    assert done.returncode == -signal.SIGXFSZ, done.stderr
    assert not {path.name for path in tmp_path.iterdir()} & set(plots.FILES)
