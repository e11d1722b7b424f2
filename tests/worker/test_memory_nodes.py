"""Ranks on several memory nodes: weights and activations of each node, and the bytes of one rank on one node.

The nodes are emulated, with more ranks than this machine has cores: what is tested is that every rank reads the memory
of its node and that the bytes are the same, not that anything is faster.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from itertools import pairwise
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.runtime import cpu
from shm.arena import Arena
from shm.checkpoint import Hyper, load_index
from stages.worker import activations_arena as act
from stages.worker import rank_places
from stages.worker.adapters.prepared import prepare_adapter
from stages.worker.kernels import parameter_block as pb
from stages.worker.rank_clusters import MAX_CLUSTER
from tests.worker.conftest import Ingested, TinyGguf
from tools.step_runner import Entry, StepRunner
from tools.tiny_adapter import write_adapter

PLAIN = Hyper(2, 256, 4, 2, 64, 512, 307, 2048, 1e-5, 64, "neighbours", "silu")
EXPERTS = msgspec.structs.replace(PLAIN, n_experts=8, n_experts_used=2)
ROWS, TOKENS = 6, 320
BOUNDS = {"max_rows": ROWS, "max_tokens": TOKENS, "step_tokens": 384, "max_samples": 64}
STEPS: list[list[Entry]] = [
    [(0, 0, 240, 1), (1, 0, 3, 0), (2, 0, 1, 0), (3, 0, 1, 1), (4, 0, 30, 30)],  # long prompts: records are copied
    [(0, 240, 60, 0), (1, 3, 240, 9)],  # more than a few samples
    [(0, 300, 1, 1)],  # one token: every rank norms it itself
    [(0, 301, 1, 1), (1, 243, 1, 1), (2, 1, 7, 3), (3, 1, 1, 1), (4, 30, 12, 5)],
    [(row, at, 1, 1) for row, at in ((0, 302), (1, 244), (2, 8), (3, 2), (4, 42))],  # a batch of streams
]


def compute(runner: StepRunner, digests: list[str]) -> list[bytes]:
    """Logits and tokens of every sample of every step, and the pages."""
    vocab, n = runner.model.hyper.vocab_size, runner.geometry.max_positions
    prompts = np.random.default_rng(5).integers(0, vocab, (ROWS, n)).astype(np.int32)
    found = []
    for entries in STEPS:
        for row, tokens in enumerate(prompts):
            runner.write_row(row, tokens, adapter=digests[row % len(digests)])
        found.append(np.array(runner.run(entries)).tobytes())
        found += [runner.logits(i).tobytes() for i in range(sum(samples for *_, samples in entries))]
    return [*found, runner.pages.tobytes()]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "recipe", "adapted", "nodes", "clusters"),
    [
        ("grouped", "Q4_0_M", False, (2, 3), ()),  # dense matrices, too
        ("grouped", "Q4_0_M", True, (1, 3), ()),
        ("odd", "Q4_K_M", False, (2, 2, 1), ()),
        ("super", "Q4_K_M", False, (3, 3), (2, 1, 3)),
        ("gemma2", "Q4_0", False, (2, 1), ()),  # norms behind attention and FFN
        ("gpt2", "Q8_0", False, (1, 1), ()),
        ("qwen2moe", "Q4_0_M", False, (2, 3), ()),
        ("granitemoe", "Q8_0", False, (3, 1), ()),
        ("super", "Q4_0", False, (17, 1), (8, 9, 1)),  # so many ranks on a node that all wait for all
    ],
)
def test_the_bytes_are_those_of_one_node(
    tiny_gguf: TinyGguf,
    ingested: Ingested,
    tmp_path: Path,
    shape: str,
    recipe: str,
    adapted: bool,
    nodes: tuple[int, ...],
    clusters: tuple[int, ...],
) -> None:
    model = tiny_gguf(shape, recipe)
    index, adapters = ingested(model), []
    if adapted:
        source = write_adapter(tmp_path / "8.gguf", model, 8, 8)
        adapters.append(prepare_adapter(source, load_index(index), tmp_path / "adapters", 64, 1 << 30))
    digests = [*(one.digest for one in adapters), ""]
    (tmp_path / "one").mkdir()
    with StepRunner(index, tmp_path / "one", adapters=adapters, **BOUNDS) as runner:
        expected = compute(runner, digests)
    options = {"ranks": sum(nodes), "nodes": nodes, "clusters": clusters, "adapters": adapters}
    with StepRunner(index, tmp_path, **options, **BOUNDS) as runner:
        assert compute(runner, digests) == expected
        tables = [table.table for table in runner.group.tables]
        for rank, table in enumerate(tables):
            same_node = [other for other in tables if other[pb.NORM] == table[pb.NORM]]
            assert [other[pb.NODE_BARRIER] for other in same_node] == [table[pb.NODE_BARRIER]] * len(same_node)
            assert (table[pb.NODE_BARRIER] != 0) == (max(nodes) <= MAX_CLUSTER)
            assert len(same_node) == table[pb.NODE_RANKS]
            assert table[pb.RANK] - table[pb.NODE_RANK] == min(other[pb.RANK] for other in same_node)
            for word in (pb.NORM_Q, pb.ATTN_OUT_COPY, pb.EMBEDDING, pb.HEAD):
                if table[word]:
                    assert [other[pb.RANK] for other in tables if other[word] == table[word]] == [
                        other[pb.RANK] for other in same_node
                    ], f"rank {rank} shares word {word} with its node alone"


@pytest.mark.slow
def test_each_rank_reads_the_buffers_of_its_node(tiny_gguf: TinyGguf, ingested: Ingested, tmp_path: Path) -> None:
    index = ingested(tiny_gguf("super", "Q4_K_M"))
    with StepRunner(index, tmp_path, ranks=4, nodes=(2, 2), **BOUNDS) as runner:
        compute(runner, [""])
        hyper = runner.model.hyper
        for node in (0, 1):
            at = act.offsets(runner.geometry, hyper, node)[0]
            for word in (pb.NORM, pb.NORM_Q, pb.ATTN_OUT_COPY, pb.HIDDEN_COPY):
                part = runner.activations.view(at[word], (4096,), np.uint8)
                assert part.any(), f"node {node} has used its buffer {word}"


@pytest.mark.slow
def test_each_rank_reads_the_weights_of_its_node(tiny_gguf: TinyGguf, ingested: Ingested, tmp_path: Path) -> None:
    """Another value in the copy of the second node changes what its ranks compute, and nothing on the first one."""
    index = ingested(tiny_gguf("super", "Q4_K_M"))
    entries = [(0, 0, 40, 1)]
    found = []
    for is_changed in (False, True):
        with StepRunner(index, tmp_path, ranks=4, nodes=(2, 2), **BOUNDS) as runner:
            first, second = (runner.group.tables[rank].model for rank in (1, 3))
            assert first.weights.ctypes.data != second.weights.ctypes.data
            if is_changed:
                tensor = second.index.tensor(second.index.head_name)
                make_writeable(second.weights)[tensor.offset : tensor.offset + tensor.nbytes] = 0
            runner.write_row(0, np.arange(40))
            runner.run(entries)
            found.append(runner.logits(0))
    groups = -(-len(found[0]) // 16)
    border = 16 * (groups * 2 // 4)  # the first two of four ranks compute the logits before it
    assert np.array_equal(found[0][:border], found[1][:border])
    assert found[0][border:].any()
    assert not found[1][border:].any()


def make_writeable(data: np.ndarray) -> np.ndarray:
    """The bytes of a mapping that is protected."""
    begin = data.ctypes.data & -mmap.PAGESIZE
    length = ctypes.c_size_t(data.ctypes.data + data.nbytes - begin)
    access = mmap.PROT_READ | mmap.PROT_WRITE
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(begin), length, access) == 0
    return np.ctypeslib.as_array((ctypes.c_uint8 * data.nbytes).from_address(data.ctypes.data))


@given(
    st.integers(1, 6),
    st.integers(1, 64),
    st.integers(1, 40),
    st.sampled_from((PLAIN, EXPERTS)),
)
@settings(deadline=None)
def test_buffers_of_nodes_share_no_page(nodes: int, step_tokens: int, samples: int, h: Hyper) -> None:
    g = act.ActivationsGeometry(max(step_tokens, samples), samples, 4, 8, 256, max(nodes, 2), nodes=nodes)
    pages: dict[int, set[int]] = {}
    for node in range(nodes):
        found, size = act.offsets(g, h, node)
        assert all(at % 64 == 0 for at in found.values())
        ends = [*sorted(found.values()), size]
        assert all(a < b for a, b in pairwise(ends))
        words = (pb.NORM, pb.NORM_Q, pb.NORM_P, pb.ATTN_OUT_COPY, pb.HIDDEN_COPY)
        own = [at for word, at in found.items() if word in words]
        assert len(own) == (2 if nodes == 1 else 3 if h.n_experts else 4) + cpu.may_use_tiles()
        if nodes > 1:
            assert min(own) % 4096 == 0
            assert all(at < min(own) for at in found.values() if at not in own) or node > 0
            pages[node] = {at // 4096 for at in own}
    assert all(pages[a].isdisjoint(pages[b]) for a in pages for b in pages if a != b)


def test_the_arena_is_reserved_beside_the_ranks_of_each_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    h = PLAIN
    g = act.ActivationsGeometry(64, 8, 4, 8, 256, 4, nodes=2)
    cpus = sorted(os.sched_getaffinity(0))
    nodes = [[cpus[0]], [cpus[-1]]]
    seen: list[tuple[int, set[int]]] = []
    real = Arena.reserve

    def reserve(self: Arena, nbytes: int, huge: bool = False) -> bool:
        is_granted = real(self, nbytes, huge)
        seen.append((nbytes, os.sched_getaffinity(0)))
        return is_granted

    monkeypatch.setattr(Arena, "reserve", reserve)
    arena = act.create_activations(tmp_path / "m.act", g, h, bytes(32), nodes)
    size = act.activations_bytes(g, h)
    assert arena.reserved >= size
    begin = 0
    for end, allowed in seen:
        for node in (0, 1):
            own = act.offsets(g, h, node)[0]
            if begin <= own[pb.NORM] < end:
                assert allowed == set(nodes[node])
                assert end > own[pb.HIDDEN_COPY] + g.step_tokens * act.strides(h)[pb.HIDDEN_Q_STRIDE]
        begin = end
    attached, found = act.attach_activations(tmp_path / "m.act", bytes(32))
    assert found == g
    attached.close()
    arena.close()


def test_nodes_are_checked() -> None:
    with pytest.raises(ValueError, match="nodes is 3, at most 2, the number of ranks"):
        act.ActivationsGeometry(1, 1, 1, 1, 1, 2, nodes=3).check()
    control = np.zeros(act.CONTROL_WORDS, np.int64)
    with pytest.raises(ValueError, match=r"nodes have \[2, 2\] ranks, expected 5 in all and at least 1 in each"):
        act.reset_barrier(control, 5, nodes=(2, 2))


@given(st.lists(st.integers(1, 9), max_size=7))
def test_the_table_of_nodes(nodes: list[int]) -> None:
    control, ranks = np.full(act.CONTROL_WORDS, 7, np.int64), sum(nodes) or 3
    act.reset_barrier(control, ranks, nodes=nodes)
    members = [act.ranks_of_node(control, rank) for rank in range(ranks)]
    for rank in range(ranks):
        assert act.node_of(control, rank) == rank_places.node_of(nodes, rank)
        assert len(members[rank]) == (nodes[rank_places.node_of(nodes, rank)] if nodes else 0)
        assert not nodes or rank in members[rank]
