"""A model with a window in every layer: texts longer than the KV arena, and the same bytes as with all pages."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.config.load import resolve
from starling.embedded import Embedded
from tools.tiny_gguf import SHAPES, write_model

pytestmark = pytest.mark.slow

SHAPE = SHAPES["windowed"]._replace(context_length=8192)
PROMPT = [int(token) for token in np.random.default_rng(8).integers(3, SHAPE.vocab_size, 2500)]
OUTPUT = 300
PAGE_TOKENS = 32


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    directory = tmp_path_factory.mktemp("models")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pipeline.config.paths.models_dir", lambda env=None: directory)
        yield write_model(directory / "windowed.gguf", SHAPE, "Q4_0")


@contextmanager
def engine(path: Path, kv_cache_mb: int, caching: bool = True) -> Iterator[Embedded]:
    config = resolve({"scheduler": {"max_step_tokens": 128}, "cache": {"enabled": caching}}, {})
    how: dict[str, Any] = {"kv_cache_mb": kv_cache_mb, "kv_type": "f32", "ranks": 2, "page_tokens": PAGE_TOKENS}
    with Embedded.load(path, config=config, max_batch_size=4, **how) as loaded:
        yield loaded
        assert loaded._parts is not None
        loaded._parts.kv.check()


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


def test_the_bytes_are_those_of_a_sequence_that_keeps_all_pages(model: Path) -> None:
    with engine(model, 8, caching=False) as loaded:
        assert loaded._parts is not None
        loaded._parts.scheduler.leases.set_window(0, 0)
        expected, _, all_pages = run(loaded, PROMPT)
        second, _, _ = run(loaded, PROMPT + expected + [7] * 40, 50)
        assert all_pages >= (len(PROMPT) + OUTPUT) // PAGE_TOKENS
    # An arena of a third of them: what is behind the window is evicted.
    with engine(model, 1) as loaded:
        stats = loaded.stats()
        assert stats.kv_pages < all_pages
        tokens, _, most = run(loaded, PROMPT)
        assert tokens == expected
        bound = SHAPE.window + 256 + 3 * 128 + 160 + 3 * PAGE_TOKENS
        assert most <= bound // PAGE_TOKENS < stats.kv_pages
        again, cached, _ = run(loaded, PROMPT + expected + [7] * 40, 50)
        assert again == second
        assert cached == (len(PROMPT) + OUTPUT - 1) // PAGE_TOKENS * PAGE_TOKENS
        both = [loaded.submit(PROMPT[i:], max_tokens=60, seed=i, ignore_eos=True) for i in range(2)]
        while not all(loaded.poll(one).finish_reason for one in both):
            loaded.step()
        results = [list(loaded.release(one).tokens) for one in both]
    with engine(model, 8, caching=False) as loaded:
        assert loaded._parts is not None
        loaded._parts.scheduler.leases.set_window(0, 0)
        alone = [loaded.generate(PROMPT[i:], max_tokens=60, seed=i, ignore_eos=True) for i in range(2)]
        assert results == [list(one.tokens) for one in alone]
