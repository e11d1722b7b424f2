"""A model with a window in five of six layers: the bytes are those of pages with all layers, and more sequences fit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.config.load import resolve
from shm.checkpoint import Hyper
from shm.layer_groups import LayerGroups
from starling.embedded import Embedded
from tools.tiny_gguf import SHAPES, write_model

pytestmark = pytest.mark.slow

SHAPE = SHAPES["gemma3"]._replace(context_length=8192)
GROUPS = LayerGroups(6, 1)
PROMPT = [int(token) for token in np.random.default_rng(8).integers(3, SHAPE.vocab_size, 2500)]
OUTPUT = 300
PAGE_TOKENS = 32
PLACES = (len(PROMPT) + OUTPUT) // PAGE_TOKENS


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    directory = tmp_path_factory.mktemp("models")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pipeline.config.paths.models_dir", lambda env=None: directory)
        yield write_model(directory / "mixed.gguf", SHAPE, "Q4_0")


@contextmanager
def engine(
    path: Path, kv_cache_mb: int, caching: bool = True, kv_type: str = "f16", step_tokens: int = 128
) -> Iterator[Embedded]:
    config = resolve({"scheduler": {"max_step_tokens": step_tokens}, "cache": {"enabled": caching}}, {})
    how: dict[str, Any] = {"kv_cache_mb": kv_cache_mb, "kv_type": kv_type, "ranks": 2, "page_tokens": PAGE_TOKENS}
    with Embedded.load(path, config=config, max_batch_size=4, **how) as loaded:
        yield loaded
        assert loaded._parts is not None
        loaded._parts.kv.check()


@contextmanager
def one_group() -> Iterator[None]:
    """Pages of all layers, none of which is released while its sequence runs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Hyper, "n_windowed", property(lambda self: 0))
        yield


def run(loaded: Embedded, prompt: list[int], n: int = OUTPUT) -> tuple[list[int], int, int]:
    """Tokens, tokens that came from the cache, and the most pages that were leased at once."""
    request = loaded.submit(prompt, max_tokens=n, seed=3, ignore_eos=True)
    most = 0
    while not loaded.poll(request).finish_reason:
        loaded.step()
        most = max(most, loaded.stats().kv_pages_leased)
    result = loaded.release(request)
    assert result.error is None
    return list(result.tokens), result.cached_tokens, most


def test_the_bytes_are_those_of_pages_with_all_layers(model: Path) -> None:
    with one_group(), engine(model, 8, caching=False) as loaded:
        expected, _, _ = run(loaded, PROMPT)
        second, _, _ = run(loaded, PROMPT + expected + [7] * 40, 50)
        third, _, _ = run(loaded, PROMPT[:700] + [9] * 30, 50)
    # An arena that has no room for all pages of one sequence: what is behind the window is evicted.
    with engine(model, 3) as loaded:
        assert loaded._parts is not None
        n_pages = loaded.stats().kv_pages
        assert n_pages < GROUPS.n_pages(PLACES)
        tokens, _, most = run(loaded, PROMPT)
        assert tokens == expected
        assert PLACES <= most <= loaded._parts.scheduler.leases.most_pages(len(PROMPT) + OUTPUT) < n_pages
        again, cached, _ = run(loaded, PROMPT + expected + [7] * 40, 50)
        assert again == second
        assert cached == (len(PROMPT) + OUTPUT - 1) // PAGE_TOKENS * PAGE_TOKENS
        other, _, _ = run(loaded, PROMPT[:700] + [9] * 30, 50)
        assert other == third
    with engine(model, 16) as loaded:  # where nothing is evicted, an earlier window is there, too
        assert run(loaded, PROMPT)[0] == expected
        other, cached, _ = run(loaded, PROMPT[:700] + [9] * 30, 50)
        assert (other, cached) == (third, 700 // PAGE_TOKENS * PAGE_TOKENS)


def at_once(loaded: Embedded, prompts: list[list[int]]) -> tuple[list[list[int]], int, int]:
    """The tokens of all prompts, the most positions that sequences had at once, and the number of preemptions.

    Chunks are as long as where no stream waits for them: on a busy machine the first sequence would end too early.
    """
    assert loaded._parts is not None
    steps = loaded._parts.scheduler.steps
    steps.budget = steps.budget._replace(pacing=steps.budget.pacing._replace(gap_factor=1e6, max_prefill_us=1e12))
    requests = [loaded.submit(prompt, max_tokens=OUTPUT, seed=i, ignore_eos=True) for i, prompt in enumerate(prompts)]
    most = 0
    while not all(loaded.poll(one).finish_reason for one in requests):
        loaded.step()
        most = max(most, sum(one.run.computed for one in loaded._parts.scheduler.table.scheduled if one.run.pages))
    tokens = [list(loaded.release(one).tokens) for one in requests]
    return tokens, most, loaded._parts.scheduler.stats.preemptions


def test_long_sequences_run_at_once_that_did_not_fit(model: Path) -> None:
    prompts = [PROMPT[i:] for i in range(3)]
    with one_group(), engine(model, 8) as loaded:
        room = loaded.stats().kv_pages * PAGE_TOKENS
        expected, most, preemptions = at_once(loaded, prompts)
        assert most <= room < 2 * (len(PROMPT) + OUTPUT)
        assert preemptions > 0, "two begin, and one of them is computed again"
    with engine(model, 8) as loaded:
        tokens, most, preemptions = at_once(loaded, prompts)
        assert tokens == expected
        assert most > room
        assert preemptions == 0


@pytest.mark.parametrize(("kv_type", "kv_cache_mb"), [("int8", 3), ("f32", 6)])
def test_other_kv_types_give_the_bytes_of_pages_with_all_layers(model: Path, kv_type: str, kv_cache_mb: int) -> None:
    """Alone and among others, in chunks of other lengths, and over pages that were released, evicted or cached."""
    n = 60
    prompts = [PROMPT, PROMPT[300:], PROMPT[900:]]
    with one_group(), engine(model, 4 * kv_cache_mb, False, kv_type) as loaded:
        expected = [run(loaded, prompt, n)[0] for prompt in prompts]
        more, _, _ = run(loaded, PROMPT + expected[0] + [7] * 40, n)
    with engine(model, kv_cache_mb, True, kv_type, step_tokens=71) as loaded:
        assert loaded.stats().kv_pages < GROUPS.n_pages((len(PROMPT) + n) // PAGE_TOKENS)
        assert run(loaded, PROMPT, n)[0] == expected[0]
        again, cached, _ = run(loaded, PROMPT + expected[0] + [7] * 40, n)
        assert again == more
        assert cached == (len(PROMPT) + n - 1) // PAGE_TOKENS * PAGE_TOKENS
    with engine(model, 2 * kv_cache_mb, True, kv_type) as loaded:
        requests = [loaded.submit(prompt, max_tokens=n, seed=3, ignore_eos=True) for prompt in prompts]
        while not all(loaded.poll(one).finish_reason for one in requests):
            loaded.step()
        assert [list(loaded.release(one).tokens) for one in requests] == expected
