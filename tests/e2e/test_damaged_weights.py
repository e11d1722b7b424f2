"""Weights that differ from their checksums are not served: their model fails with the reason, and the others go on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pipeline.errors import ConfigError
from shm.checkpoint import bin_path, load_index
from starling import Embedded
from tests.e2e.conftest import share_caches
from tests.e2e.resumable import wait_answering
from tests.e2e.server import ROOT, Server, poll_until
from tools.tiny_gguf import SHAPES, write_model

pytestmark = pytest.mark.slow

DAMAGED = "blk.1.ffn_up.weight"


def flip(path: Path, at: int) -> None:
    """Change one bit of a file."""
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 4]))


def generate(server: Server, model: str) -> tuple[int, Any]:
    body = {"model": model, "prompt": [5, 6, 7], "max_tokens": 8, "temperature": 0}
    status, answer, _ = server.request("POST", "/v1/generate", body)
    return status, answer["choices"] if status == 200 else answer


def when_ready(server: Server, model: str) -> tuple[int, Any]:
    """The first answer of a model that is not a 503."""
    answers: list[tuple[int, Any]] = []

    def is_ready() -> bool:
        answers.append(generate(server, model))
        return answers[-1][0] != 503

    poll_until(is_ready, lambda: answers[-1])
    return answers[-1]


def is_ready_without(server: Server, model: str, reason: str) -> bool:
    """Whether the model `sound` is ready and the other one not, for this reason; a stage may be silent for a moment."""
    status, ready, _ = server.request("GET", "/ready")
    assert status == 503
    models = ready["models"]
    return bool(models["sound"]["ready"]) and str(models[model]["reason"]).startswith(reason)


def is_refused(server: Server, model: str, named: str) -> bool:
    """Whether a request for the model, which is refused, gets a message that names the reason."""
    status, body = generate(server, model)
    assert (status, body["error"]["code"]) == (503, "MODEL_UNAVAILABLE")
    return named in str(body["error"]["message"])


def starling(server: Server, *arguments: str) -> tuple[int, str]:
    """A command against the server's home: its exit code and output."""
    done = subprocess.run(
        [sys.executable, "-m", "starling", *arguments],
        cwd=ROOT,
        env=server.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,  # it may compile kernels
        check=False,
    )
    return done.returncode, done.stdout


def test_a_damaged_file_fails_only_its_model(tmp_path: Path) -> None:
    share_caches(tmp_path)
    cores = sorted(os.sched_getaffinity(0))
    models = [
        {
            "name": name,
            "path": str(write_model(tmp_path / f"{name}.gguf", SHAPES["small"], seed=i)),
            "kv_cache_mb": 8,
            "cpus": [cores[i % len(cores)]],
        }
        for i, name in enumerate(("sound", "damaged"))
    ]
    server = Server(tmp_path, {"models": models})
    code, output = starling(server, "prepare")
    assert code == 0, output
    listed = json.loads(starling(server, "models", "--json")[1])
    index_path = tmp_path / "models" / f"{next(row['digest'] for row in listed if row['name'] == 'damaged')}.idx"
    with server:
        expected = {name: generate(server, name) for name in ("sound", "damaged")}
        assert {status for status, _ in expected.values()} == {200}
    assert index_path.with_suffix(".verified").exists()
    # One bit of one weight, while no server runs; every size and name is right.
    tensor = load_index(index_path).tensor(DAMAGED)
    flip(bin_path(index_path), tensor.offset + tensor.nbytes // 2)
    named = f"{bin_path(index_path)}: tensor {DAMAGED}: piece 0 (bytes 0.."
    code, output = starling(server, "verify")
    assert code == 78
    assert named in output
    assert output.count("is intact") == 3
    try:
        server.start()
        server.wait_for("worker group has given up, other models go on")
        wait_answering(server)
        assert when_ready(server, "sound") == expected["sound"]
        server.wait_output(named)
        poll_until(lambda: is_ready_without(server, "damaged", f"its worker cannot start: {named}"))
        poll_until(lambda: is_refused(server, "damaged", named))
        # The remedy of the message; the pool would start the group again after a minute, and does so when asked.
        index_path.unlink()
        code, output = starling(server, "restart", "worker-damaged")
        assert code == 0, output
        assert "worker-damaged: ready again after" in output
        assert when_ready(server, "damaged") == expected["damaged"]
        assert starling(server, "verify")[0] == 0
    finally:
        server.stop()
    assert server.leftovers() == []


def test_an_engine_in_this_process_refuses_damaged_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, demo_server: Server
) -> None:
    """`demo_server`: its kernels are compiled."""
    share_caches(tmp_path)
    monkeypatch.setenv("STARLING_HOME", str(tmp_path))
    source = write_model(tmp_path / "tiny.gguf", SHAPES["small"], seed=3)
    with Embedded.load(source, kv_cache_mb=8):
        pass
    index_path = next((tmp_path / "models").glob("*.idx"))
    flip(bin_path(index_path), load_index(index_path).tensor(DAMAGED).offset)
    with pytest.raises(ConfigError, match=f"tensor {DAMAGED}: piece 0"):
        Embedded.load(source, kv_cache_mb=8)
