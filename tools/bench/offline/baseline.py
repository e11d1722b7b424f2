"""Other engines in child processes, so that their threads and memory are separate from Starling's.

The baseline is llama.cpp.  It is compiled for this CPU if `llama-cpp-python` is installed (native_baseline.py), else it
is the wheel `xllamacpp`, which is compiled for AVX2.  The wheel offers llama.cpp's server and not its decode call, so
figures come from the server's own timings: `prompt_ms` for prefill, and for decode the time between the first and the
last token of a request (the first one belongs to the prompt), summed over concurrent requests.  No HTTP is involved.

Further peers (peers.py) run in an environment of their own.  Parent and child exchange lines of JSON; the child begins
with a description of itself, or with {"error": ...}:

    {"prefill": 512}                     -> {"tokens_per_s": ..., "resident_mb": ...}
    {"decode": 4, "cached": 16, "n": 64} -> the same
    {"depth": 8192, "n": 24}             -> {"chunk": ..., "decode": ..., "resident_mb": ...}, of engines that have it
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import click
import numpy as np

from tools.bench.offline.ik_baseline import IkBaseline
from tools.bench.offline.native_baseline import NativeBaseline, resident_mb
from tools.bench.offline.openvino_baseline import OpenVinoBaseline

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
    ) -> None:
        """`python`: the interpreter that has the engine. Raises `EngineRefusesError`."""
        self.engine = engine
        command = [python, "-m", "tools.bench.offline.baseline", str(model), "--engine", engine]
        command += ["--cores", ",".join(map(str, cores)), "--slots", str(slots), "--slot-tokens", str(slot_tokens)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        self.pid = self._process.pid
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
        response = self._response()
        self.about["resident_mb"] = response["resident_mb"]
        return response

    def prefill(self, n_tokens: int) -> float:
        """Tokens per second of one prompt."""
        return self._request(prefill=n_tokens)["tokens_per_s"]

    def decode(self, batch: int, cached: int, n_tokens: int) -> float:
        """Tokens per second of `batch` sequences together, `n_tokens` each after `cached` ones."""
        return self._request(decode=batch, cached=cached, n=n_tokens)["tokens_per_s"]

    def depth(self, cached: int, n_tokens: int) -> tuple[float, float]:
        """Tokens per second of a chunk of a prompt, and of `n_tokens` tokens, behind `cached` positions.

        Only a llama.cpp that is compiled here (`make peers-native`).
        """
        found = self._request(depth=cached, n=n_tokens)
        return found["chunk"], found["decode"]

    def close(self) -> None:
        """End the child process."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()


# ------------------------------------------------------------------ the child process


class _Server:
    def __init__(self, model: str, threads: int, slots: int, slot_tokens: int) -> None:
        import xllamacpp

        params = xllamacpp.CommonParams()
        params.model.path = model
        params.n_parallel = slots
        params.n_ctx = slots * slot_tokens
        params.cpuparams.n_threads = threads
        params.cpuparams_batch.n_threads = threads
        params.cache_ram_mib = 0
        params.verbosity = -1
        begun = time.perf_counter()
        self._server = xllamacpp.Server(params)
        self.about = {
            "version": xllamacpp.__version__,
            "build": xllamacpp.BUILD_INFO,
            "cpu": xllamacpp.get_system_info().strip(" |"),
            "load_ms": round(1000 * (time.perf_counter() - begun), 1),
        }
        self._rng = np.random.default_rng(0)
        self._pool = ThreadPoolExecutor(slots)

    def _run(self, n_prompt: int, n_predict: int) -> dict[str, Any]:
        result = self._server.handle_completions(
            {
                "prompt": self._rng.integers(300, 20000, n_prompt).tolist(),
                "n_predict": n_predict,
                "ignore_eos": True,
                "cache_prompt": False,
                "temperature": 0.0,
                "samplers": ["top_k"],
                "top_k": 1,
            }
        )
        return (json.loads(result) if isinstance(result, str) else result)["timings"]

    def prefill(self, n: int) -> float:
        timings = self._run(n, 1)
        return 1000 * timings["prompt_n"] / timings["prompt_ms"]

    def decode(self, batch: int, cached: int, n: int) -> float:
        runs = [self._pool.submit(self._run, cached, n + 1) for _ in range(batch)]
        timings = [run.result() for run in runs]
        return sum(1000 * (t["predicted_n"] - 1) / t["predicted_ms"] for t in timings)


def _kind(engine: str) -> type[NativeBaseline] | type[_Server] | type[IkBaseline] | type[OpenVinoBaseline]:
    if engine == IkBaseline.NAME:
        return IkBaseline
    if engine == OpenVinoBaseline.NAME:
        return OpenVinoBaseline
    return NativeBaseline if importlib.util.find_spec("llama_cpp") else _Server


@click.command()
@click.argument("model")
@click.option("--cores", required=True)
@click.option("--slots", type=int, required=True)
@click.option("--slot-tokens", type=int, required=True)
@click.option("--engine", default=LLAMA_CPP)
def main(model: str, cores: str, slots: int, slot_tokens: int, engine: str) -> None:
    """Answer the requests on standard input, a line each, on standard output."""
    responses = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of the library must not mix with the responses
    numbers = [int(c) for c in cores.split(",")]
    os.sched_setaffinity(0, set(numbers))

    def send(value: dict[str, Any]) -> None:
        responses.write(json.dumps(value) + "\n")
        responses.flush()

    try:
        server = _kind(engine)(model, len(numbers), slots, slot_tokens)
    except Exception as error:  # libraries raise errors of their own classes
        send({"error": " ".join(str(error).split())[:300] or type(error).__name__})
        os._exit(1)
    send(server.about)
    for line in sys.stdin:
        request = json.loads(line)
        if "prefill" in request:
            rates = {"tokens_per_s": server.prefill(request["prefill"])}
        elif "depth" in request:
            assert isinstance(server, NativeBaseline)
            rates = dict(zip(("chunk", "decode"), server.depth(request["depth"], request["n"]), strict=True))
        else:
            rates = {"tokens_per_s": server.decode(request["decode"], request["cached"], request["n"])}
        send(rates | {"resident_mb": round(resident_mb(), 1)})
    os._exit(0)  # the library's own shutdown waits for its HTTP threads


if __name__ == "__main__":
    main()
