"""A model with a draft model gives the same bytes as without, whatever the draft model proposes, even if it dies."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.conftest import share_caches
from tests.e2e.server import Server, wait_gone
from tools.tiny_gguf import SHAPES, Shape, write_model

pytestmark = pytest.mark.slow

# A step of this model takes long enough for draft tokens to be worth the messages between two workers.
DEEP = Shape(16, 576, 9, 3, 64, 1536, 300)
SHALLOW = DEEP._replace(n_layers=1)
# On a busy machine draft tokens come too late, and the time that they took is earned again before the next ones.
WAIT_S = 300.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """`deep` gives the outputs of its draft model with sixteen times the layers; `odd` agrees with no other model."""
    home = tmp_path_factory.mktemp("draft")
    share_caches(home)
    files = {
        "deep": write_model(home / "deep.gguf", DEEP, seed=3, real_layers=1),
        "shallow": write_model(home / "shallow.gguf", SHALLOW, seed=3),
        "odd": write_model(home / "odd.gguf", DEEP._replace(n_layers=4), seed=4),
        "other": write_model(home / "other.gguf", SHAPES["odd"], seed=5),
    }
    common = {"kv_cache_mb": 8, "max_batch_size": 4}
    drafts = {"deep": "shallow", "odd": "shallow"}
    models = [
        {"name": name, "path": str(path), **common, **({"draft_model": drafts[name]} if name in drafts else {})}
        for name, path in files.items()
    ]
    with Server(home, {"models": models}) as server:
        yield server
        server.stop()
        assert server.leftovers() == []


def body(model: str, i: int, tokens: int = 150, **fields: Any) -> dict[str, Any]:
    return {
        "model": model,
        "prompt": [3 + i, 60, 71, 9],
        "max_tokens": tokens,
        "ignore_eos": True,
        "seed": 11 + i,
        **fields,
    }


def drafted(server: Server, model: str) -> dict[str, float]:
    """Counts of the draft model's tokens so far, by outcome."""
    found = server.metrics("starling_draft_tokens_total")
    return {
        outcome: found.get(f'model="{model}",outcome="{outcome}",source="model"', 0.0)
        for outcome in ("accepted", "rejected")
    }


# The outputs do not repeat themselves, so that prompt lookup finds no match.
FREE: list[dict[str, Any]] = [{"temperature": 0, "frequency_penalty": 1.9}, {"temperature": 1.5, "top_k": 50}]


def more_accepted(server: Server, model: str, ask: dict[str, Any], plain: Any, tokens: int = 60) -> dict[str, float]:
    """Send requests with drafts until `tokens` more of them are accepted. Returns the new draft tokens by outcome."""
    before = drafted(server, model)

    def is_drafted(_: Any) -> bool:
        assert server.post("/v1/generate", **ask, speculate=8)["choices"] == plain
        return drafted(server, model)["accepted"] >= before["accepted"] + tokens

    server.wait_metrics("starling_draft_tokens_total", is_drafted, WAIT_S)
    return {outcome: count - before[outcome] for outcome, count in drafted(server, model).items()}


@pytest.mark.parametrize("sampling", FREE, ids=["greedy", "drawn"])
def test_drafts_of_a_model_that_agrees_are_accepted_and_change_no_byte(
    server: Server, sampling: dict[str, Any]
) -> None:
    ask = body("deep", 1, **sampling)
    plain = server.post("/v1/generate", **ask)["choices"]
    since = more_accepted(server, "deep", ask, plain)
    assert since["rejected"] < 0.2 * since["accepted"]


def test_a_draft_model_with_other_weights_is_not_used_any_more(server: Server) -> None:
    ask = body("odd", 0, 600, temperature=0.9)
    plain = server.post("/v1/generate", **ask)["choices"]
    requests = 0

    def is_rejected(_: Any) -> bool:
        nonlocal requests
        requests += 1
        assert server.post("/v1/generate", **ask, speculate=8)["choices"] == plain
        return drafted(server, "odd")["rejected"] > 0

    server.wait_metrics("starling_draft_tokens_total", is_rejected, WAIT_S)
    assert sum(drafted(server, "odd").values()) < 200 * requests


def test_draft_tokens_do_not_count_as_requests_of_the_draft_model(server: Server) -> None:
    server.post("/v1/generate", **body("deep", 5, speculate=8, **FREE[0]))
    server.wait_metrics("starling_steps_total", lambda found: found['model="shallow"'] > 0)
    assert server.metrics("starling_tokens_generated_total").get('model="shallow"', 0.0) == 0.0
    assert not [labels for labels in server.metrics("starling_finished_total") if 'model="shallow"' in labels]
    answer = server.post("/v1/generate", **body("shallow", 5, 40, **FREE[0]))
    deep = server.post("/v1/generate", **body("deep", 5, 40, **FREE[0], speculate=8))
    assert answer["choices"] == deep["choices"], "the deep one says what its first layers say"


def test_the_death_of_the_draft_model_changes_no_byte(server: Server) -> None:
    ask = body("deep", 7, 500, **FREE[1])
    plain = server.post("/v1/generate", **ask)["choices"]
    more_accepted(server, "deep", ask, plain, 20)
    tokens: list[int] = []
    killed = 0
    for event in server.stream("/v1/generate", **ask, speculate=8):
        tokens += event.get("tokens", [])
        if len(tokens) > 150 * (killed + 1) and killed < 2:
            pid = server.pid_of("worker-shallow")
            os.kill(pid, signal.SIGKILL)
            killed += 1
            assert wait_gone(pid)
    assert (tokens, killed) == (plain[0]["tokens"], 2)
    server.pid_of("worker-shallow")
    more_accepted(server, "deep", ask, plain, 20)  # the restarted draft model is used again


def test_a_draft_model_may_be_unloaded_and_loaded_with_another_vocabulary(server: Server) -> None:
    ask = body("deep", 9, 60, **FREE[0])
    plain = server.post("/v1/generate", **ask)["choices"]
    for path, name in (("", "shallow"), (str(server.home / "other.gguf"), "shallow")):
        command(server, "unload", name)
        assert server.post("/v1/generate", **ask, speculate=8)["choices"] == plain
        command(server, "load", name, *(("--path", path) if path else ()))
        for _ in range(2):
            assert server.post("/v1/generate", **ask, speculate=8)["choices"] == plain
    server.wait_output("has a different vocabulary", "deep")
    said = [line for line in server.output if "has a different vocabulary" in line and "deep" in line]
    assert len(said) == 1


def command(server: Server, *words: str) -> None:
    import subprocess
    import sys

    done = subprocess.run(
        [sys.executable, "-m", "starling", *words],
        env=server.environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
