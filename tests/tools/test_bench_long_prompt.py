"""The benchmark of long prompts: pages that it adds to a KV cache are those of the prompt, and times add up."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from shm.pages import KvGeometry, pack_ordinal
from shm.prefix_hash import page_hashes, root_hash
from stages.kv.pool.arena import open_arena
from stages.kv.pool.page_headers import PageHeaders, PageIdentity, checksum
from tools.bench.http.filled_prefix import fill
from tools.bench.http.long_prompt import Part, integral_ms, main
from tools.tiny_gguf import SHAPES, write_model

GEOMETRY = KvGeometry(2, 1, 32, 16, "f16")
DIGEST = b"d" * 32
ROOT = root_hash(DIGEST, GEOMETRY, "tenant")


def part(depth: int, token_ms: float, tokens: int = 0) -> Part:
    return Part(depth, tokens, token_ms, 0.0, 1, 0.0, 0.0, 0.0, 0.0)


def arena_with(path: Path, tokens: np.ndarray, computed: int, n_pages: int) -> None:
    """An arena whose kv stage has ended, with the first `computed` pages of `tokens`."""
    budget = n_pages * (GEOMETRY.page_bytes + 256) + 8192
    opened = open_arena(path, GEOMETRY, DIGEST, budget, 1)
    assert opened.memory.grow(computed) >= computed
    headers, parent = PageHeaders(opened.views.headers), ROOT
    for page, page_hash in enumerate(page_hashes(ROOT, tokens, GEOMETRY.page_tokens)[:computed]):
        opened.views.pages[page] = page + 1
        headers.lease([page], ROOT, 1, 1, 1)
        total = checksum(opened.views.pages[page])
        headers.mark_full(page, PageIdentity(ROOT, parent, page_hash, total, pack_ordinal(page, 0), 16))
        parent = page_hash
    opened.arena.close()


def test_all_pages_of_the_prompt_are_found_by_the_next_kv_stage(tmp_path: Path) -> None:
    """With the hashes of its tokens, in their order, and checksums of what they hold: copies of the computed ones."""
    tokens = np.arange(16 * 9 + 5, dtype=np.int32)
    arena_with(tmp_path / "a.kv", tokens, computed=2, n_pages=12)
    assert fill(tmp_path / "a.kv", tokens) == (2 * 16, 9 * 16)
    opened = open_arena(tmp_path / "a.kv", GEOMETRY, DIGEST, 12 * (GEOMETRY.page_bytes + 256) + 8192, 2)
    assert opened.adopted is not None and not opened.adopted.unclaimed
    pages = {identity.ordinal: (page, identity) for page, identity in opened.adopted.full}
    hashes = page_hashes(ROOT, tokens, 16)
    assert [pages[place][1].page_hash for place in range(9)] == hashes and len(pages) == 9
    assert [pages[place][1].parent for place in range(9)] == [ROOT, *hashes[:-1]]
    for page, identity in pages.values():
        content = opened.views.pages[page]
        assert identity.checksum == checksum(content) and set(content.tolist()) in ({1}, {2})
    opened.arena.close()


def test_an_arena_that_lacks_the_beginning_or_room_is_refused(tmp_path: Path) -> None:
    tokens = np.arange(16 * 9, dtype=np.int32)
    arena_with(tmp_path / "a.kv", tokens, computed=1, n_pages=8)
    with pytest.raises(RuntimeError, match="no page of the prompt's first 16 tokens"):
        fill(tmp_path / "a.kv", tokens + 1)
    with pytest.raises(RuntimeError, match="7 free pages of 8, and 8 are missing"):
        fill(tmp_path / "a.kv", tokens)
    assert fill(tmp_path / "a.kv", tokens[: 16 * 8]) == (16, 16 * 8)


def test_a_time_that_grows_with_the_depth_is_integrated() -> None:
    """1 ms a token at the beginning, 3 ms behind 1,000 positions."""
    parts = [part(0, 1.0), part(400, 1.8), part(1000, 3.0)]
    assert integral_ms(parts, 1000) == pytest.approx(2000.0)
    assert integral_ms(parts, 500) == pytest.approx(750.0)  # 1 to 2 ms
    assert integral_ms([part(0, 2.0, 100), part(900, 2.0, 100)], 1000) == pytest.approx(2000.0)


@given(st.lists(st.floats(0.1, 100.0), min_size=1, max_size=8), st.integers(1, 5000))
def test_the_time_of_a_prompt_lies_between_those_of_its_parts(times: list[float], tokens: int) -> None:
    parts = [part(500 * i, ms, 100) for i, ms in enumerate(times)]
    assert min(times) * tokens * 0.999 <= integral_ms(parts, tokens) <= max(times) * tokens * 1.001


@pytest.mark.slow
def test_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a server: it finds all positions in its cache, or the benchmark fails."""
    model = write_model(tmp_path / "m.gguf", SHAPES["small"], seed=1)
    done = CliRunner().invoke(main, ["--gguf", str(model), "--prompt", "200", "--part", "32"])
    assert done.exit_code == 0, done.output
    assert "32 positions were computed, 192 are in the cache" in done.output
    found = json.loads(done.output.splitlines()[-1])["long_prompt"]
    assert found["tokens"] == 200
    assert [one["depth"] for one in found["parts"]] == [0, 0, 0, 32, 96, 128, 128]
    assert all(one["tokens"] == 32 for one in found["parts"])
