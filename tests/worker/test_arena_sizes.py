"""Sizes of arenas that are computed in advance are those of the files."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pipeline.config.load import resolve
from pipeline.models import arena_sizes, capacity
from shm.arena import HEADER_BYTES, align
from shm.checkpoint import Hyper
from shm.layer_groups import LayerGroups
from shm.pages import KvGeometry, create_kv, pages_that_fit
from shm.step_ring import create_steps
from stages.scheduler.core.settings import Settings
from stages.worker import activations_arena as act
from tests.emulated_machine import memory_nodes

DIGEST = bytes(32)


def hyper(heads: int, kv_heads: int, head_dim: int, ffn: int, vocab: int, context: int) -> Hyper:
    n_rot = head_dim
    return Hyper(2, heads * head_dim, heads, kv_heads, head_dim, ffn, vocab, context, 1e-5, n_rot, "neighbours", "silu")


def test_a_sequence_has_at_most_the_positions_of_the_arena_unless_a_window_bounds_its_pages() -> None:
    model = {"name": "m", "path": "/m.gguf", "kv_cache_mb": 1}
    config = resolve({"models": [model]}, {})
    (settings,) = config.models
    geometry = KvGeometry(2, 4, 64, settings.page_tokens, settings.kv_type)
    positions = pages_that_fit(geometry, 1 << 20) * settings.page_tokens
    assert positions > 0
    for context, expected in ((positions, 0), (positions + 1, positions + 1), (1 << 20, positions + 1)):
        assert arena_sizes.max_positions(config, settings, (2, 4, 64, 0, 0), context) == expected
    wide = resolve({"models": [{**model, "kv_cache_mb": 64}]}, {})
    assert arena_sizes.max_positions(wide, wide.models[0], (2, 4, 64, 128, 0), 1 << 30) == 0


def test_a_window_in_some_layers_bounds_the_pages_of_their_groups_alone() -> None:
    model = {"name": "m", "path": "/m.gguf", "kv_cache_mb": 8}
    config = resolve({"models": [model]}, {})
    (settings,) = config.models
    window, each, step_tokens = 128, settings.page_tokens, config.scheduler.max_step_tokens
    kv = KvGeometry(6, 1, 64, each, settings.kv_type, 5)
    assert kv.groups == LayerGroups(6, 1)
    n_pages = pages_that_fit(kv, 8 << 20)
    n_window = -(-arena_sizes.most_positions(1 << 30, window, step_tokens, each) // each)
    positions = (n_pages - 5 * n_window) * each
    assert positions > n_pages // 6 * each, "more than with pages of all layers"
    for context, expected in ((positions, 0), (positions + 1, positions + 1), (1 << 20, positions + 1)):
        assert arena_sizes.max_positions(config, settings, (6, 1, 64, window, 5), context) == expected
    assert arena_sizes.most_pages(positions, window, step_tokens, each, kv.groups) == n_pages
    small = resolve({"models": [{**model, "kv_cache_mb": 1}]}, {})
    n_small = pages_that_fit(kv, 1 << 20)
    assert n_small < 6 * n_window
    assert arena_sizes.max_positions(small, small.models[0], (6, 1, 64, window, 5), 1 << 20) == n_small // 6 * each + 1


@settings(deadline=None)
@example(
    7, 1, 64, 17771, 14408, 17647, 15, 150, False, 32, False, (0, 0, 0), "portable"
)  # a word less would be a page less
@given(
    heads=st.integers(1, 40),
    kv_heads=st.integers(1, 8),
    head_dim=st.sampled_from([16, 64, 96, 128]),
    ffn=st.integers(32, 20_000),
    vocab=st.integers(10, 200_000),
    context=st.integers(16, 100_000),
    batch=st.integers(1, 128),
    step_tokens=st.integers(128, 4096),
    drafts=st.booleans(),
    page_tokens=st.sampled_from([16, 32, 256]),
    local_rope=st.booleans(),
    experts=st.sampled_from([(0, 0, 0), (8, 2, 0), (60, 4, 5632), (128, 8, 0)]),
    isa=st.sampled_from(["portable", "tiles"]),
)
def test_steps_and_activations_have_the_computed_size(
    heads: int,
    kv_heads: int,
    head_dim: int,
    ffn: int,
    vocab: int,
    context: int,
    batch: int,
    step_tokens: int,
    drafts: bool,
    page_tokens: int,
    local_rope: bool,
    experts: tuple[int, int, int],
    isa: str,
) -> None:
    """With tiles there are buffers of packed activations."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STARLING_ISA", isa)
        check_sizes(
            hyper(heads, kv_heads, head_dim, ffn, vocab, context),
            context,
            batch,
            step_tokens,
            drafts,
            page_tokens,
            local_rope,
            experts,
        )


def check_sizes(
    h: Hyper,
    context: int,
    batch: int,
    step_tokens: int,
    drafts: bool,
    page_tokens: int,
    local_rope: bool,
    experts: tuple[int, int, int],
) -> None:
    h = msgspec.structs.replace(
        h,
        has_local_rope=local_rope,
        n_experts=experts[0],
        n_experts_used=experts[1],
        shared_ffn_width=experts[2],
    )
    models = [{"name": "m", "path": "p", "max_batch_size": batch, "page_tokens": page_tokens, "kv_cache_mb": 64}]
    if drafts:
        models.append({"name": "target", "path": "q", "draft_model": "m", "max_batch_size": 1})
    config = resolve({"models": models, "scheduler": {"max_step_tokens": step_tokens}}, {})
    found = arena_sizes.arena_sizes(config, config.models[0], h)
    settings = Settings("m", batch, max_draft_sequences=arena_sizes.MAX_DRAFT_SEQUENCES if drafts else 0)
    steps = settings.steps_geometry(context, page_tokens, h.vocab_size, h.width)
    geometry = act.geometry_for(steps, h, step_tokens, 2)
    assert found.activations == HEADER_BYTES + align(act.activations_bytes(geometry, h), 4096)
    assert found.steps == HEADER_BYTES + align(arena_sizes.steps_bytes(steps), 4096)
    for nodes in (2, 3):
        several = act.geometry_for(steps, h, step_tokens, 3, nodes=nodes)
        assert arena_sizes.activations_bytes(steps, h, step_tokens, 0, nodes) == act.activations_bytes(several, h)


@pytest.mark.parametrize("nodes", [1, 2])
def test_the_files_have_the_computed_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nodes: int) -> None:
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) < nodes:
        pytest.skip("a node needs a CPU")
    places = [cpus[node::nodes] for node in range(nodes)]
    lists = {node: ",".join(map(str, some)) for node, some in enumerate(places)}
    monkeypatch.setenv("STARLING_NODES", str(memory_nodes(tmp_path / "nodes", lists)))
    h = hyper(4, 2, 32, 256, 1000, 512)
    config = resolve({"models": [{"name": "m", "path": "p", "kv_cache_mb": 4, "max_batch_size": 4}]}, {})
    model = config.models[0]
    found = arena_sizes.arena_sizes(config, model, h)
    steps = arena_sizes.steps_geometry(4, 0, 512, model.page_tokens, h.vocab_size, h.width)
    kv = KvGeometry(h.n_layers, h.n_kv_heads, h.head_dim, model.page_tokens, model.kv_type)
    arenas = [
        create_kv(tmp_path / "m.kv", kv, pages_that_fit(kv, config.kv_cache_bytes(model)), DIGEST, 1)[0],
        create_steps(tmp_path / "m.steps", steps, DIGEST)[0],
        act.create_activations(
            tmp_path / "m.act", act.geometry_for(steps, h, 512, 2, nodes=nodes), h, DIGEST, places if nodes > 1 else ()
        ),
    ]
    for arena, size in zip(arenas, found, strict=True):
        assert arena.path.stat().st_size == size
        arena.close()
    assert capacity.need(config, model) > found.total, "the model is not prepared"
