"""Other engines in child processes, so that their threads and memory are separate from Starling's.

The baseline is llama.cpp.  It is compiled for this CPU if `llama-cpp-python` is installed (native_baseline.py), else it
is the wheel `xllamacpp`, which is compiled for AVX2 (wheel_baseline.py).

Further peers (peers.py) run in an environment of their own.  Parent and child exchange lines of JSON; the child begins
with a description of itself, or with {"error": ...}:

    {"prefill": 512}                     -> {"tokens_per_s": ..., "resident_mb": ...}
    {"decode": 4, "cached": 16, "n": 64} -> the same

and of llama.cpp

    {"fill": 8192}                              -> {"kv_mb": ..., "resident_mb": ...}
    {"depth": 8192, "n": 24, "computed": 0}     -> {"chunk": ..., "decode": ..., "resident_mb": ...}
    {"restore": 2048}                           -> {"same": 1, "resident_mb": ...}
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from tools.bench.offline.ik_baseline import IkBaseline
from tools.bench.offline.native_baseline import FLASH, NativeBaseline, resident_mb
from tools.bench.offline.openvino_baseline import OpenVinoBaseline
from tools.bench.offline.wheel_baseline import WheelBaseline

LLAMA_CPP = "llama.cpp"


class EngineRefusesError(Exception):
    """An engine does not run the model: its message says why."""


def available() -> bool:
    """Whether a build of llama.cpp is installed."""
    return any(importlib.util.find_spec(name) is not None for name in ("llama_cpp", "xllamacpp"))


class Baseline:
    """The parent's handle of the child process. `about`: version, build, CPU features, load time."""

    def __init__(
        self,
        model: Path,
        cores: list[int],
        slots: int,
        slot_tokens: int,
        engine: str = LLAMA_CPP,
        python: str = sys.executable,
        flash: Sequence[int] = FLASH,
        kv_type: str = "f16",
    ) -> None:
        """`python`: the one that has the engine; `flash`, `kv_type`: of native_baseline.py, the latter of llama.cpp.

        Raises `EngineRefusesError`.
        """
        self.engine = engine
        command = [python, "-m", "tools.bench.offline.baseline", str(model), "--engine", engine]
        command += ["--cores", ",".join(map(str, cores)), "--slots", str(slots), "--slot-tokens", str(slot_tokens)]
        command += ["--flash", ",".join(map(str, flash)), "--kv-type", kv_type]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        self.pid = self._process.pid
        self._is_asked = False  # a request has no response yet
        self.about: dict[str, Any] = self._response()
        if "error" in self.about:
            self.close()
            raise EngineRefusesError(f"{engine}: {self.about['error']}")

    def _response(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise EngineRefusesError(f"{self.engine}: its process ended with code {self._process.wait()}")
        return json.loads(line)

    def _request(self, **request: int) -> dict[str, float]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        self._is_asked = True
        response = self._response()
        self._is_asked = False
        self.about |= {name: response[name] for name in ("resident_mb", "kv_mb") if name in response}
        return response

    def prefill(self, n_tokens: int) -> float:
        """Tokens per second of one prompt."""
        return self._request(prefill=n_tokens)["tokens_per_s"]

    def decode(self, batch: int, cached: int, n_tokens: int) -> float:
        """Tokens per second of `batch` sequences together, `n_tokens` each after `cached` ones."""
        return self._request(decode=batch, cached=cached, n=n_tokens)["tokens_per_s"]

    def fill(self, cached: int) -> None:
        """Fill the caches of llama.cpp for `depth`."""
        self._request(fill=cached)

    def depth(self, cached: int, n_tokens: int, is_computed: bool = False) -> tuple[float, float]:
        """Tokens per second of a chunk, and of `n_tokens` tokens, each behind `cached` positions of llama.cpp."""
        found = self._request(depth=cached, n=n_tokens, computed=int(is_computed))
        return found["chunk"], found["decode"]

    def is_restored(self, n: int) -> bool:
        """Whether llama.cpp computes the same logits behind `n` positions that were restored from their state."""
        return bool(self._request(restore=n)["same"])

    def close(self) -> None:
        """End the child process."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        if self._is_asked:
            self._process.kill()  # its request may take minutes
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()


# ------------------------------------------------------------------ the child process


def _start(engine: str, model: str, threads: int, slots: int, slot_tokens: int, flash: list[int], kv_type: str) -> Any:
    if engine == OpenVinoBaseline.NAME:
        return OpenVinoBaseline(model, threads, slots, slot_tokens)
    if engine == IkBaseline.NAME:
        return IkBaseline(model, threads, slots, slot_tokens, flash)
    kind = NativeBaseline if importlib.util.find_spec("llama_cpp") else WheelBaseline
    return kind(model, threads, slots, slot_tokens, flash, kv_type)


@click.command()
@click.argument("model")
@click.option("--cores", required=True)
@click.option("--slots", type=int, required=True)
@click.option("--slot-tokens", type=int, required=True)
@click.option("--engine", default=LLAMA_CPP)
@click.option("--flash", default=",".join(map(str, FLASH)))
@click.option("--kv-type", default="f16")
def main(model: str, cores: str, slots: int, slot_tokens: int, engine: str, flash: str, kv_type: str) -> None:
    """Answer the requests on standard input, a line each, on standard output."""
    responses = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of the library must not mix with the responses
    numbers = [int(c) for c in cores.split(",")]
    os.sched_setaffinity(0, set(numbers))

    def send(value: dict[str, Any]) -> None:
        responses.write(json.dumps(value) + "\n")
        responses.flush()

    try:
        kinds = [int(kind) for kind in flash.split(",")]
        server = _start(engine, model, len(numbers), slots, slot_tokens, kinds, kv_type)
    except Exception as error:  # libraries raise errors of their own classes
        send({"error": " ".join(str(error).split())[:300] or type(error).__name__})
        os._exit(1)
    send(server.about)
    for line in sys.stdin:
        request = json.loads(line)
        if "prefill" in request:
            rates = {"tokens_per_s": server.prefill(request["prefill"])}
        elif "depth" in request:
            found = server.depth(request["depth"], request["n"], bool(request["computed"]))
            rates = dict(zip(("chunk", "decode"), found, strict=True))
        elif "fill" in request:
            server.fill(request["fill"])
            rates = {"kv_mb": round(server.kv_mb, 1)}
        elif "restore" in request:
            rates = {"same": int(server.is_restored(request["restore"]))}
        else:
            rates = {"tokens_per_s": server.decode(request["decode"], request["cached"], request["n"])}
        send(rates | {"resident_mb": round(resident_mb(), 1)})
    os._exit(0)  # the library's own shutdown waits for its HTTP threads


if __name__ == "__main__":
    main()
