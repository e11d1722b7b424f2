"""The baseline over HTTP: llama-server as `make peers-native` compiles it for this CPU, else the AVX2 build of the
wheel `xllamacpp` (`make peers`).

It gets the same file, cores, threads, slots and context as the server under test, and keeps its own defaults for
speed (reuse of a slot's prompt, batching).  Prompts are not copied out of the slots, because no prompt is repeated.
The wheel's server runs in a process of its own:

    python -m tools.bench.http.baseline MODEL --port 8080 --cores 0,1 --slots 16 --slot-tokens 1024
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Self

import click

from pipeline.runtime.process import die_with_parent
from tools.bench.http.server_under_test import STOP_S, http_get
from tools.ports import free_port

LOAD_S = 300.0
FLASH_ATTENTION = ("on", "off")  # which is faster depends on the build, the prompt and the batch: both are measured


class BaselineMissing(RuntimeError):
    """llama-server is not installed or does not start; the message says which and why."""


def native_server() -> Path | None:
    """The binary that `make peers-native` compiles; None without one."""
    path = Path(sys.executable).with_name("llama-server")
    return path if os.access(path, os.X_OK) else None


class ServerProcess:
    """A server of the benchmark's own: its process, and the directory with its files, which is removed with it."""

    _process: subprocess.Popen[bytes]
    _directory: tempfile.TemporaryDirectory[str]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """End the server. Idempotent."""
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._directory.cleanup()


class BaselineServer(ServerProcess):
    """llama-server, with flash attention "on" or "off". A context manager; ready when entered.

    Raises `BaselineMissing`.
    """

    def __init__(
        self, model: Path, cores: list[int], slots: int, slot_tokens: int, flash_attention: str = "on"
    ) -> None:
        self.name = "llama-server" if flash_attention == "on" else "llama-server -fa off"
        self.port = free_port()
        self.address = ("127.0.0.1", self.port)
        self.model = model.stem
        self.keys: dict[str, str] = {}  # llama-server has no tenants
        binary = native_server()
        if binary is None and importlib.util.find_spec("xllamacpp") is None:
            raise BaselineMissing(
                "llama-server is not installed: make peers-native compiles it, make peers fetches a wheel"
            )
        where = [str(model), str(self.port), ",".join(map(str, cores)), str(slots), str(slot_tokens), flash_attention]
        command = _native_command(binary, *where) if binary else _wheel_command(*where)
        me = os.getpid()

        def begin() -> None:
            die_with_parent(me)
            os.sched_setaffinity(0, set(cores))

        self._directory = tempfile.TemporaryDirectory(prefix="llama-server-")
        self._log = Path(self._directory.name) / "output"
        begun = time.perf_counter()
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, preexec_fn=begin
            )
        try:
            self._wait_ready()
        except BaseException:
            self.close()
            raise
        load_ms = round(1000 * (time.perf_counter() - begun), 1)
        said = _native_about(binary) if binary else _wheel_about(self._said())
        self.about: dict[str, Any] = {**said, "load_ms": load_ms, "slots": slots, "flash_attention": flash_attention}

    def _wait_ready(self) -> None:
        deadline = time.monotonic() + LOAD_S
        while http_get(self.address, "/health")[0] != 200:
            code = self._process.poll()
            if code is not None or time.monotonic() > deadline:
                how = f"ended with code {code}" if code is not None else f"was not ready after {LOAD_S:.0f} s"
                raise BaselineMissing(f"llama-server {how}:\n" + "\n".join(self._said().splitlines()[-5:]))
            time.sleep(0.05)

    def _said(self) -> str:
        return self._log.read_text(errors="replace")

    @property
    def pids(self) -> list[int]:
        """The server's process."""
        return [self._process.pid]


def _native_command(
    binary: Path, model: str, port: str, cores: str, slots: str, slot_tokens: str, flash_attention: str
) -> list[str]:
    threads = str(len(cores.split(",")))
    return [
        str(binary),
        "--model",
        model,
        "--host",
        "127.0.0.1",
        "--port",
        port,
        "--threads",
        threads,
        "--threads-batch",
        threads,
        "--parallel",
        slots,
        "--ctx-size",
        str(int(slots) * int(slot_tokens)),
        "--threads-http",
        str(int(slots) + 4),
        "--flash-attn",
        flash_attention,
        "--cache-ram",
        "0",
        "--offline",
    ]


def _native_about(binary: Path) -> dict[str, str]:
    def lines(*arguments: str) -> list[str]:
        done = subprocess.run(
            [binary, *arguments], stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=60
        )
        return [line.strip() for line in (done.stdout + done.stderr).splitlines() if line.strip()]

    # It logs the CPU's features before it refuses the file; otherwise it does so only at a high log level.
    features = re.search(r"system_info:[^|]*\| (.*)", "\n".join(lines("--model", os.devnull, "-lv", "4", "--offline")))
    return {
        "version": "; ".join(lines("--version")[:2]),
        "build": "compiled for this CPU",
        "cpu": features[1].strip(" |") if features else "",
    }


def _wheel_command(model: str, port: str, cores: str, slots: str, slot_tokens: str, flash_attention: str) -> list[str]:
    return [
        sys.executable,
        "-m",
        "tools.bench.http.baseline",
        model,
        "--port",
        port,
        "--cores",
        cores,
        "--slots",
        slots,
        "--slot-tokens",
        slot_tokens,
        "--flash-attention",
        flash_attention,
    ]


def _wheel_about(said: str) -> dict[str, str]:
    line = next((line for line in said.splitlines() if line.startswith("{")), "{}")
    about: dict[str, str] = json.loads(line)
    return about


# ------------------------------------------------------------------ the wheel's process


@click.command()
@click.argument("model")
@click.option("--cores", required=True)
@click.option("--port", type=int, required=True)
@click.option("--slots", type=int, required=True)
@click.option("--slot-tokens", type=int, required=True)
@click.option("--flash-attention", type=click.Choice(FLASH_ATTENTION), default="on")
def main(model: str, cores: str, port: int, slots: int, slot_tokens: int, flash_attention: str) -> None:
    """Serve until killed; the first line of output is JSON: version, build and CPU features."""
    import xllamacpp

    threads = len(cores.split(","))
    params = xllamacpp.CommonParams()
    params.model.path = model
    params.hostnames = ["127.0.0.1"]
    params.port = port
    params.n_parallel = slots
    params.n_ctx = slots * slot_tokens
    params.cpuparams.n_threads = threads
    params.cpuparams_batch.n_threads = threads
    params.n_threads_http = slots + 4
    kinds = xllamacpp.llama_flash_attn_type
    is_on = flash_attention == "on"
    params.flash_attn_type = kinds.LLAMA_FLASH_ATTN_TYPE_ENABLED if is_on else kinds.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.cache_ram_mib = 0
    params.verbosity = -1
    about = {
        "version": xllamacpp.__version__,
        "build": str(xllamacpp.BUILD_INFO),
        "cpu": xllamacpp.get_system_info().strip(" |"),
    }
    click.echo(json.dumps(about))
    server = xllamacpp.Server(params)
    click.echo(f"listens at {server.listening_address}")
    while True:
        signal.pause()


if __name__ == "__main__":
    main()
