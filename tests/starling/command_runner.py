"""Runs many `starling` commands cheaply: each in a process that is forked from one that has imported them all.

    with Commands(environment) as commands:
        done = commands("status", "--json")                  # done.code, done.output, done.errors
        done = commands("top", columns=60)                   # on a terminal; done.output is all that it showed
        done = commands("models", reader_leaves=True)        # into a pipe whose reader has gone

Run as a program it is that one process, which has no threads: it reads a request from each line of its input and writes
a line with the result.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Mapping
from dataclasses import dataclass
from fcntl import ioctl
from pathlib import Path
from types import TracebackType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 240  # SIGALRM ends a command that takes longer


@dataclass(frozen=True)
class Done:
    """How a command ended: its exit code (negative: a signal) and what it wrote. On a terminal all is output."""

    code: int
    output: str
    errors: str


class Commands:
    """The process that runs commands. A context manager."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        """`environment`: of the commands, in which a test may change variables for one of them."""
        command = [sys.executable, "-m", __name__]
        variables = {**environment, "PYTHONPATH": str(ROOT)}
        self._process = subprocess.Popen(
            command, cwd=ROOT, env=variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def __enter__(self) -> Commands:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()

    def __call__(
        self, *words: str, columns: int = 0, reader_leaves: bool = False, environment: Mapping[str, str] | None = None
    ) -> Done:
        """Run `starling WORDS`. `columns`: on a terminal so wide; 0: into pipes."""
        assert self._process.stdin is not None and self._process.stdout is not None
        request = {"words": words, "columns": columns, "leaves": reader_leaves, "environment": dict(environment or {})}
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        texts = (base64.b64decode(answer[name]).decode() for name in ("output", "errors"))
        return Done(answer["code"], *texts)


def _serve() -> None:
    """The process that forks."""
    from starling.cli import COMMANDS, load_command

    for name in COMMANDS:
        load_command(name)
    for line in sys.stdin:
        request = json.loads(line)
        run = _on_terminal if request["columns"] else _into_pipes
        code, output, errors = run(request)
        found = {"output": base64.b64encode(output).decode(), "errors": base64.b64encode(errors).decode()}
        print(json.dumps({"code": code, **found}), flush=True)


def _command(request: Mapping[str, Any]) -> None:
    """Be the command; does not return."""
    from starling.cli import main

    try:
        os.environ.update(request["environment"])
        sys.argv = ["starling", *request["words"]]
        signal.alarm(LIMIT_S)
        # Streams of this process: those of its parent have the parent's buffers and no terminal.
        sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w", buffering=1)  # noqa: SIM115
        sys.__stdout__ = sys.stdout  # type: ignore[misc]  # the process's own, as of one that was not forked
        code = 0
        try:
            main()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        with contextlib.suppress(BrokenPipeError):
            sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        sys.stderr.flush()
        os._exit(1)


def _into_pipes(request: Mapping[str, Any]) -> tuple[int, bytes, bytes]:
    pipes = [os.pipe() for _ in range(2)]
    pid = os.fork()
    if not pid:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        if request["leaves"]:
            os.close(pipes[0][0])
        for number, (_, write) in enumerate(pipes, 1):
            os.dup2(write, number)
            os.close(write)
        _command(request)
    for _, write in pipes:
        os.close(write)
    if request["leaves"]:
        os.close(pipes[0][0])
        texts = [b"", _all_of(pipes[1][0])]
    else:
        texts = _both(pipes[0][0], pipes[1][0])
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), texts[0], texts[1]


def _both(first: int, second: int) -> list[bytes]:
    """All that two pipes carry; neither fills while the other is read."""
    import selectors

    texts = {first: b"", second: b""}
    with selectors.DefaultSelector() as selector:
        for pipe in texts:
            selector.register(pipe, selectors.EVENT_READ)
        while selector.get_map():
            for key, _ in selector.select():
                data = os.read(key.fd, 65536)
                texts[key.fd] += data
                if not data:
                    selector.unregister(key.fd)
                    os.close(key.fd)
    return list(texts.values())


def _all_of(pipe: int) -> bytes:
    with open(pipe, "rb") as stream:
        return stream.read()


def _on_terminal(request: Mapping[str, Any]) -> tuple[int, bytes, bytes]:
    pid, terminal = pty.fork()
    if not pid:
        ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", 24, request["columns"], 0, 0))
        os.environ["TERM"] = "xterm-256color"
        for name in ("COLUMNS", "LINES"):
            os.environ.pop(name, None)
        _command(request)
    shown = b""
    while True:
        try:
            data = os.read(terminal, 65536)
        except OSError:  # EIO: the other end is closed
            break
        if not data:
            break
        shown += data
    os.close(terminal)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), shown, b""


if __name__ == "__main__":
    _serve()
