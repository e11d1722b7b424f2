"""What leaves `step`, `run` and `generate` of `starling.Embedded`, and what it leaves of the requests."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.errors import InternalError
from starling.embedded import Embedded
from starling.generation import Delta
from tools.tiny_gguf import SHAPES, write_model

pytestmark = pytest.mark.slow

FIELDS: dict[str, Any] = {"max_tokens": 9, "seed": 1, "ignore_eos": True}
PROMPTS = [list(range(3 + i, 43 + i)) for i in range(3)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    directory = tmp_path_factory.mktemp("models")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pipeline.config.paths.models_dir", lambda env=None: directory)
        yield write_model(directory / "tiny.gguf", SHAPES["odd"], "Q4_0")


@pytest.fixture
def engine(model: Path) -> Iterator[Embedded]:
    with Embedded.load(model, kv_cache_mb=4, ranks=2, page_tokens=16) as loaded:
        yield loaded
        loaded._open_parts().kv.check()
        assert (loaded.stats().kv_pages_leased, loaded.stats().requests_kept) == (0, 0)


def strike(engine: Embedded, patch: pytest.MonkeyPatch, at: int, action: Callable[[], None]) -> None:
    """Call `action` before the computation of a step, the `at`-th from now on."""
    group, left = engine._open_parts().group, [at]
    compute = group.compute

    def struck(step: int) -> int:
        left[0] -= 1
        if left[0] == 0:
            action()
        return compute(step)

    patch.setattr(group, "compute", struck)


def test_an_interrupt_of_generate_ends_its_request_alone(engine: Embedded, monkeypatch: pytest.MonkeyPatch) -> None:
    undisturbed = engine.generate(PROMPTS[0], **FIELDS)
    strike(engine, monkeypatch, 3, lambda: signal.raise_signal(signal.SIGINT))
    other = engine.submit(PROMPTS[0], **FIELDS)
    with pytest.raises(KeyboardInterrupt):
        engine.generate(PROMPTS[1], **FIELDS)
    assert engine.stats().requests_kept == 1
    engine.run()
    assert engine.release(other).tokens == undisturbed.tokens


@pytest.mark.parametrize("method", ["run", "generate"])
def test_an_error_of_a_step_ends_all_requests(engine: Embedded, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    """They have had their last calls when it leaves the method. The engine stays usable."""
    undisturbed = [engine.generate(prompt, **FIELDS) for prompt in PROMPTS]
    calls = {"run": engine.run, "generate": lambda: engine.generate(PROMPTS[2], **FIELDS)}
    deltas: list[Delta] = []

    def fail() -> None:
        raise MemoryError("no more")

    strike(engine, monkeypatch, 3, fail)
    ids = [engine.submit(PROMPTS[i], on_token=deltas.append, **FIELDS) for i in range(2)]
    with pytest.raises(MemoryError):
        calls[method]()
    for i, request_id in enumerate(ids):
        reasons = [delta.finish_reason for delta in deltas if delta.id == request_id]
        assert reasons == [""] * (len(reasons) - 1) + ["error"]
        found = engine.release(request_id)
        assert (found.state, found.tokens) == ("failed", undisturbed[i].tokens[: len(found.tokens)])
        assert isinstance(found.error, InternalError)
        assert found.error.message == "computing has raised MemoryError: no more"
        assert isinstance(found.error.__cause__, MemoryError)
    assert [engine.generate(prompt, **FIELDS).tokens for prompt in PROMPTS] == [one.tokens for one in undisturbed]


def test_an_engine_that_computes_nothing_ends_all_requests(engine: Embedded, monkeypatch: pytest.MonkeyPatch) -> None:
    deltas: list[Delta] = []
    with monkeypatch.context() as patch:
        patch.setattr(engine._open_parts().scheduler.steps, "run_round", lambda now: None)
        request_id = engine.submit(PROMPTS[0], on_token=deltas.append)
        with pytest.raises(InternalError, match="100 steps in a row computed nothing"):
            engine.run()
        assert [delta.finish_reason for delta in deltas] == ["error"]
        assert not engine.step()
    assert engine.release(request_id).state == "failed"
    assert engine.generate(PROMPTS[0], **FIELDS).finish_reason == "length"
