"""`starling run` and `starling chat` in processes of their own, with servers that they find, start, lose and end."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.e2e.command import starling
from tests.e2e.conftest import share_caches
from tests.e2e.resumable import wait_answering
from tests.e2e.server import POLL_S, ROOT, START_S, Server, wait_gone
from tools.tiny_gguf import SHAPES, write_model

pytestmark = pytest.mark.slow

LONG = ("run", "tiny", "Go on.", "--seed", "5", "--max-tokens", "600", "--json")
MOST = "7500"  # tokens of an answer that must not end before the test ends it; with its prompt they fit the context
SLOW_STEPS = {"STARLING_FAULTS": "worker:slow@step=10"}  # 10 ms of sleep: `LONG` takes seconds on any machine


def configured(home: Path, environment: Mapping[str, str] | None = None, **server: object) -> Server:
    share_caches(home)
    path = write_model(home / "tiny.gguf", SHAPES["small"]._replace(context_length=8192))
    models = [{"name": "tiny", "path": str(path), "kv_cache_mb": 16}]
    keys = [{"key": "sk-admin", "admin": True}, {"key": "sk-user", "tenant": "user"}]
    return Server(home, {"models": models, "auth": {"api_keys": keys}, "server": server}, environment)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with configured(tmp_path_factory.mktemp("run")) as server:
        yield server
        server.stop()
        assert server.leftovers() == []


def begin(server: Server, *args: str, stdin: int = subprocess.DEVNULL) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "starling", *args],
        cwd=ROOT,
        env=server.environment,
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


def typed(server: Server, text: str, *args: str) -> str:
    """The output of a command with `text` on its standard input."""
    process = begin(server, *args, stdin=subprocess.PIPE)
    out, errors = process.communicate(text.encode(), timeout=120)
    assert process.returncode == 0, errors
    return out.decode()


def pid_of_up(server: Server) -> int:
    """The pid in the lock file of `starling up`, once it is there. Does not touch the lock itself."""
    deadline = time.monotonic() + START_S
    while True:
        with contextlib.suppress(OSError, ValueError):
            return int((server.home / "run" / "up.lock").read_text())
        assert time.monotonic() < deadline
        time.sleep(POLL_S)


def first_byte(process: subprocess.Popen[bytes]) -> bytes:
    assert process.stdout is not None
    assert select.select([process.stdout], [], [], START_S)[0]
    byte = os.read(process.stdout.fileno(), 1)
    assert byte, process.stderr and process.stderr.read()
    return byte


# ------------------------------------------------------------------ with a server that runs


def test_an_answer_is_the_apis(server: Server) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Hello\n\nthere"}], "seed": 3, "max_tokens": 30}
    status, answer, _ = server.request("POST", "/v1/chat/completions", body, {"Authorization": "Bearer sk-user"})
    assert status == 200
    expected = answer["choices"][0]["message"]["content"]
    options = ("--seed", "3", "--max-tokens", "30")
    assert typed(server, "there\n", "run", "tiny", "Hello", *options) == expected.removesuffix("\n") + "\n"
    shown = json.loads(typed(server, "Hello\n\nthere\n", "run", "tiny", "--json", *options))
    assert (shown["text"], shown["seed"], shown["output_tokens"]) == (expected, 3, 30)
    assert typed(server, "Hello\\\n\\\nthere\n", "chat", *options) == expected.removesuffix("\n") + "\n"


def test_raw_continues_the_text(server: Server) -> None:
    body = {"prompt": "The end", "seed": 3, "max_tokens": 20}
    _, answer, _ = server.request("POST", "/v1/generate", body, {"Authorization": "Bearer sk-user"})
    shown = json.loads(typed(server, "", "run", "--raw", "--json", "tiny", "The", "end", "--seed=3", "--max-tokens=20"))
    assert shown["text"] == answer["choices"][0]["text"]


def test_a_conversation_has_all_its_messages(server: Server) -> None:
    """Each turn sends what was said before; /retry with the same seed says the same again."""
    out = typed(server, "One\n/set seed 4\n/retry\nTwo\n/undo\nTwo\n", "chat", "--max-tokens", "8", "--seed", "4")
    said = re.sub(r"\A(?s:(.*?))seed: 4\n", r"\1", out)
    first, second = said[: len(said) // 2], said[len(said) // 2 :]
    assert "removed\n" in out
    assert first and second


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (("run", "absent", "x"), 2, "no model 'absent'"),
        (("run", "tiny"), 2, "no prompt: give PROMPT"),
        (("run", "tiny", "x", "--temperature", "3"), 2, "not in the range 0<=x<=2"),
        (("run", "tiny", "x " * 20_000), 2, "context"),
        (("run", "tiny", "x", "--max-tokens", "90000"), 2, "context"),
        (("run", "tiny", "x", "--key", "sk-wrong"), 78, "--key or STARLING_API_KEY"),
        (("run", "tiny", "x", "--url", "http://127.0.0.1:9"), 1, "no server answers at http://127.0.0.1:9"),
        (("run", "tiny", "x", "--url", "localhost"), 2, "expected http://HOST:PORT"),
        (("run", "tiny", "x", "--raw", "--system", "y"), 2, "--system needs the model's chat template"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(server: Server, args: tuple[str, ...], code: int, message: str) -> None:
    process = begin(server, *args)
    out, errors = process.communicate(timeout=120)
    assert (process.returncode, out) == (code, b""), errors
    assert message in errors.decode()
    assert b"Traceback" not in errors


def test_ctrl_c_cancels_the_request(server: Server) -> None:
    process = begin(server, *LONG[:-1], "--max-tokens", MOST)
    first_byte(process)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 130
    assert errors.decode().strip() == "starling: interrupted"
    server.wait_metrics("starling_requests_in_flight", lambda found: not any(found.values()))


@pytest.mark.parametrize("stage", ["gateway", "worker-tiny", "scheduler"])
def test_a_stage_that_dies_costs_no_byte(server: Server, stage: str) -> None:
    undisturbed = json.loads(starling(server, *LONG))
    process = begin(server, *LONG[:-1])
    begun = first_byte(process)
    pid = server.pid_of(stage)
    os.kill(pid, signal.SIGKILL)
    rest, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert (begun + rest).decode() == undisturbed["text"].removesuffix("\n") + "\n"
    assert wait_gone(pid)
    wait_answering(server)


def test_a_request_that_the_gateway_forgot_is_sent_again(tmp_path: Path) -> None:
    with configured(tmp_path, SLOW_STEPS, journal_mb=0) as server:
        undisturbed = json.loads(starling(server, *LONG))
        process = begin(server, *LONG)
        server.wait_metrics("starling_requests_in_flight", lambda found: any(found.values()))
        os.kill(server.pid_of("gateway"), signal.SIGKILL)
        out, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
        shown = json.loads(out)
        assert shown["resumed"] == 1
        assert (shown["text"], shown["finish_reason"]) == (undisturbed["text"], undisturbed["finish_reason"])


def test_a_chat_on_a_terminal(server: Server) -> None:
    """Ctrl-C stops an answer, discards what is being typed, and ends at the second time at an empty prompt."""
    with chat_on_terminal(server, "--no-history") as chat:
        chat.wait_for(">>> ")
        chat.write(b"Tell me a story.\n")
        chat.wait_for(r"story\.\r\n..")
        chat.write(b"\x03")
        chat.wait_for("stopped")
        for _ in range(2):
            chat.wait_for(">>> ")
            chat.write(b"not finished")
            chat.wait_for("not finished")
            chat.interrupt(r"\n\(Ctrl-D or /bye ends\)")
        chat.wait_for(">>> ")
        chat.write(b"two lines\\\n")
        chat.wait_for(r"\n\.\.\. ")
        chat.interrupt(r"\n\(Ctrl-D or /bye ends\)")
        for command in (b"/show\n", b""):
            chat.wait_for(">>> ")
            chat.interrupt(r"\(Ctrl-C again, Ctrl-D or /bye ends\)")
            chat.wait_for(">>> ")
            chat.write(command)
            if command:
                chat.wait_for("messages: 2")
        chat.interrupt(r"\n")
        assert chat.process.wait(60) == 0
    assert not (server.home / "chat-history").exists()


class Chat:
    """`starling chat` on a terminal of its own, which it controls: keys send signals."""

    def __init__(self, process: subprocess.Popen[bytes], terminal: int) -> None:
        self.process = process
        self._terminal = terminal
        self._seen = ""

    def interrupt(self, pattern: str) -> None:
        """Ctrl-C at a prompt, repeated: one just before readline waits is seen with the next key."""
        self.write(b"\x03")
        while not select.select([self._terminal], [], [], 5)[0]:
            self.write(b"\x03")
        self.wait_for(pattern)

    def wait_for(self, pattern: str) -> None:
        """Read until the pattern has been shown, and forget what was before its end."""
        deadline = time.monotonic() + 120
        while not re.search(pattern, self._seen):
            assert select.select([self._terminal], [], [], max(0, deadline - time.monotonic()))[0], self._seen
            self._seen += os.read(self._terminal, 65536).decode("utf-8", "replace")
        self._seen = re.split(pattern, self._seen, maxsplit=1)[-1]

    def write(self, keys: bytes) -> None:
        os.write(self._terminal, keys)


@contextlib.contextmanager
def chat_on_terminal(server: Server, *options: str) -> Iterator[Chat]:
    master, slave = pty.openpty()
    environment = {**server.environment, "TERM": "dumb", "COLUMNS": "80"}
    process = subprocess.Popen(
        [sys.executable, "-m", "starling", "chat", "--max-tokens", MOST, "--seed", "1", *options],
        cwd=ROOT,
        env=environment,
        stdin=slave,
        stdout=slave,
        stderr=slave,
        start_new_session=True,
        preexec_fn=take_terminal,
    )
    os.close(slave)
    try:
        yield Chat(process, master)
    finally:
        process.kill()
        process.wait()
        os.close(master)


def take_terminal() -> None:
    """Standard input becomes the terminal of this session; its signals are not ignored, as under nohup."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    for number in (signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)


def test_a_closed_terminal_costs_no_line_of_the_history(server: Server) -> None:
    with chat_on_terminal(server) as chat:
        chat.wait_for("Ctrl-D ends")
        chat.wait_for(">>> ")
        chat.write(b"Tell me a story.\n")
        chat.wait_for(r"story\.\r\n..")
        chat.process.send_signal(signal.SIGINT)
        chat.wait_for("stopped")
        chat.wait_for(">>> ")
        chat.write(b"/show\n")
        chat.wait_for("messages: 2")
        chat.wait_for(">>> ")
        chat.write(b"/sett\n")
        chat.wait_for("no command /sett; /help lists them")
        chat.wait_for(">>> ")
        chat.process.send_signal(signal.SIGHUP)  # the terminal is closed
        assert chat.process.wait(60) == -signal.SIGHUP
    history = server.home / "chat-history"
    assert history.stat().st_mode & 0o777 == 0o600
    assert history.read_text().splitlines() == ["Tell me a story.", "/show", "/sett"]


# ------------------------------------------------------------------ without a server


@pytest.fixture
def stopped(tmp_path: Path) -> Iterator[Server]:
    """A home whose server does not run."""
    server = configured(tmp_path)
    yield server
    left = server.pids()
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    assert not left
    assert server.leftovers() == []


def test_a_server_is_started_and_ended(stopped: Server) -> None:
    shown = json.loads(starling(stopped, "run", "tiny", "Hello", "--seed", "1", "--max-tokens", "5", "--json"))
    assert shown["output_tokens"] == 5
    assert stopped.pids() == {}
    # A file that is not configured is served by the same means.
    other = write_model(stopped.home / "other.gguf", SHAPES["small"], seed=1)
    shown = json.loads(starling(stopped, "run", str(other), "Hello", "--max-tokens", "5", "--json"))
    assert shown["model"] == "other"


def test_commands_share_the_server_that_one_of_them_started(stopped: Server) -> None:
    """It ends with the last of them, also when that is not the one that started it."""
    first = begin(stopped, *LONG[:-1], "--max-tokens", MOST)
    first_byte(first)
    up = pid_of_up(stopped)
    second = begin(stopped, "chat", "--seed", "1", "--max-tokens", "5", stdin=subprocess.PIPE)
    assert second.stdin is not None
    second.stdin.write(b"Hello\n")
    second.stdin.flush()
    assert first_byte(second)
    first.kill()
    first.communicate()
    second.stdin.write(b"Again\n")
    out, errors = second.communicate(timeout=120)
    assert (second.returncode, errors) == (0, b"")
    assert out.count(b"\n") >= 1
    assert wait_gone(up)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
@pytest.mark.parametrize("moment", ["starting", "answering"])
def test_what_a_command_started_ends_with_it(stopped: Server, moment: str, number: int) -> None:
    process = begin(stopped, *LONG[:-1], "--max-tokens", MOST)
    if moment == "answering":
        first_byte(process)
    up = pid_of_up(stopped)
    process.send_signal(number)
    process.communicate(timeout=120)
    assert process.returncode == (130 if number == signal.SIGINT else -signal.SIGKILL)
    assert wait_gone(up)


def test_a_server_that_cannot_start_is_explained(stopped: Server) -> None:
    stopped.environment["STARLING_MODELS__0__PATH"] = "/no/such.gguf"
    process = begin(stopped, "run", "tiny", "x")
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 78
    assert "the server could not be started: model 'tiny': /no/such.gguf does not exist" in errors.decode()
