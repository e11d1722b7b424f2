"""The benchmark of long contexts: llama.cpp's filled cache is that of computed positions; both engines are timed."""

from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from pipeline.config.schema import ModelConfig
from stages.worker.checkpoint.prepare import prepare_checkpoint
from tools.bench.offline import depths
from tools.bench.offline.baseline import LLAMA_CPP, Baseline, available
from tools.bench.offline.candidate import STEP_TOKENS, Candidate
from tools.bench.offline.filled_cache import SequenceState
from tools.reference.peer_context import ContextParameters, check_layout
from tools.step_runner import Entry, StepRunner
from tools.tiny_gguf import SHAPES, write_model

needs_llama_cpp = pytest.mark.skipif(not available(), reason="`make peers` installs llama.cpp")


def state_bytes(positions: list[int], sequence: int = 1) -> ctypes.Array[ctypes.c_uint8]:
    cells = np.array([(position, 1, sequence) for position in positions], np.int32)
    data = b"\1\0\0\0" + len(positions).to_bytes(4, "little") + cells.tobytes() + bytes(range(200))
    return (ctypes.c_uint8 * len(data)).from_buffer_copy(data)


def test_a_state_moves_to_other_positions_and_keeps_the_rest() -> None:
    raw = state_bytes([7, 8, 9])
    before = bytes(raw)
    state = SequenceState(raw, 1, 7, 3)
    state.move(1000)
    assert bytes(raw) == bytes(state_bytes([1000, 1001, 1002]))
    state.move(7)
    assert bytes(raw) == before


@pytest.mark.parametrize("positions", [[7, 8, 10], [8, 9, 10], [7, 8]])
def test_a_state_of_another_layout_is_refused(positions: list[int]) -> None:
    with pytest.raises(RuntimeError, match="3 positions from 7 on has no or several records"):
        SequenceState(state_bytes(positions), 1, 7, 3)
    with pytest.raises(RuntimeError, match="has no or several records"):
        SequenceState(state_bytes([7, 8, 9], sequence=0), 1, 7, 3)


def test_parameters_of_another_layout_are_refused() -> None:
    with pytest.raises(RuntimeError, match="has another layout in this release of xllamacpp"):
        check_layout(ContextParameters())


@pytest.mark.slow
@needs_llama_cpp
@pytest.mark.parametrize(("flash", "kv_type", "value_bytes"), [(0, "f16", 2), (1, "f16", 2), (1, "int8", 1 + 2 / 32)])
def test_restored_positions_give_the_logits_of_computed_ones(
    tmp_path: Path, flash: int, kv_type: str, value_bytes: float
) -> None:
    """Moved to position 0 and back on the way; with one block in all places the logits are others."""
    gguf = write_model(tmp_path / "m.gguf", SHAPES["wide"], "Q4_0")
    baseline = Baseline(gguf, sorted(os.sched_getaffinity(0))[:1], 1, 4096, flash=(flash,), kv_type=kv_type)
    try:
        assert baseline.is_restored(1600)
        baseline.fill(2000)
        values = 2 * SHAPES["wide"].n_layers * SHAPES["wide"].n_kv_heads * SHAPES["wide"].head_dim
        token_bytes = value_bytes * values
        assert baseline.about["kv_mb"] == pytest.approx(2000 * token_bytes / 1e6, abs=0.1)
        assert min(baseline.depth(2000, 2)) > 0 and min(baseline.depth(600, 2, is_computed=True)) > 0
    finally:
        baseline.close()


@pytest.mark.slow
def test_both_engines_are_timed_at_each_depth(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The steps that are timed begin behind as many positions as the report names."""
    monkeypatch.setattr("pipeline.config.paths.models_dir", lambda: tmp_path / "models")
    monkeypatch.setattr("pipeline.config.paths.cache_dir", lambda: tmp_path)
    compute, timed = StepRunner.run, list[Entry]()

    def run(runner: StepRunner, entries: Sequence[Entry]) -> list[int]:
        timed.extend(entries)
        return compute(runner, entries)

    monkeypatch.setattr(StepRunner, "run", run)
    arguments = ["--shape", "wide", "--format", "Q4_0", "--depths", "16,7000", "--rounds", "2", "--flash", "on"]
    result = CliRunner().invoke(depths.main, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    report = json.loads(result.output.splitlines()[-1])
    rounds = [
        (0, depth + first, count, 1)
        for depth in (16, 7000)
        for _ in range(2)
        for first, count in [(0, STEP_TOKENS), *((at, 1) for at in range(depths.N_TOKENS))]
    ]
    warmed = [[(0, 0, STEP_TOKENS, 1), (0, depth, 1, 1), (0, depth + 1, 1, 1)] for depth in (16, 7000)]
    half = len(rounds) // 2
    assert timed == warmed[0] + rounds[:half] + warmed[1] + rounds[half:]
    short, long = report["depths"]
    assert min(*short["chunk"], *short["decode"], *long["chunk"], *long["decode"]) > 0
    token_bytes = 4 * SHAPES["wide"].n_layers * SHAPES["wide"].n_kv_heads * SHAPES["wide"].head_dim
    assert long["kv_mb"] - short["kv_mb"] == pytest.approx((7000 - 16) * token_bytes / 1e6, abs=2)
    assert "worst" in report
    if available():
        assert list(long[LLAMA_CPP]) == [depths.NAMES[1]]
        assert long["ratio"]["decode"] > 0


@pytest.mark.slow
@needs_llama_cpp
def test_an_int8_cache_is_compared_with_the_other_engine_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.config.paths.models_dir", lambda: tmp_path / "models")
    monkeypatch.setattr("pipeline.config.paths.cache_dir", lambda: tmp_path)
    turns = list[str]()
    close, start = Candidate.__exit__, Baseline.__init__

    def closed(candidate: Candidate, *exception: object) -> None:
        turns.append("Starling ends")
        close(candidate, *exception)

    def started(baseline: Baseline, *arguments: Any, **named: Any) -> None:
        turns.append(f"llama.cpp begins with {named['kv_type']}")
        assert "runner.kv" not in Path("/proc/self/maps").read_text()
        start(baseline, *arguments, **named)

    monkeypatch.setattr(Candidate, "__exit__", closed)
    monkeypatch.setattr(Baseline, "__init__", started)
    arguments = "--shape wide --format Q4_0 --depths 600 --rounds 2 --cache int8 --apart"
    result = CliRunner().invoke(depths.main, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert turns == ["Starling ends", "llama.cpp begins with int8"]
    (row,) = json.loads(result.output.splitlines()[-1])["depths"]
    assert list(row[LLAMA_CPP]) == [depths.NAMES[1]]
    assert min(row["ratio"].values()) > 0


def test_an_int8_cache_without_flash_attention_is_refused() -> None:
    result = CliRunner().invoke(depths.main, ["--cache", "int8", "--flash", "off"])
    assert result.exit_code == 2 and "with flash attention alone" in " ".join(result.output.split())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("work", "kv_type", "value_bytes"), [("chunk", "f16", 2), ("token", "f16", 2), ("token", "int8", 1 + 2 / 32)]
)
def test_what_is_timed_reads_all_positions_before_it_and_none_behind(
    tmp_path: Path, work: str, kv_type: str, value_bytes: float
) -> None:
    """A page with NaN makes the logits of a step NaN if and only if the step reads the page."""
    depth, tokens = 4000, 8192
    gguf = write_model(tmp_path / "m.gguf", SHAPES["yarn"], "Q4_0")
    index = prepare_checkpoint(ModelConfig(name="m", path=str(gguf)), tmp_path)
    with Candidate(index, tmp_path, sorted(os.sched_getaffinity(0))[:2], 1, tokens, kv_type=kv_type) as candidate:
        candidate.fill_cache()
        runner, hyper = candidate.runner, candidate.runner.model.hyper
        n_values = depth * 2 * hyper.n_layers * hyper.n_kv_heads * hyper.head_dim
        assert candidate.step_bytes(1, depth) - candidate.step_bytes(1, 0) == round(n_values * value_bytes)
        table = runner.steps.tables[0]
        page_tokens = tokens // len(table)

        def is_read(position: int) -> bool:
            page = runner.pages[table[position // page_tokens]]
            kept = page.copy()
            page.view(np.uint16)[:] = 0x7E00  # NaN in f16
            if work == "chunk":
                assert candidate.chunk_at(depth) > 0
            else:
                assert candidate.decode_at(depth, 1) > 0
            page[:] = kept
            return not np.isfinite(runner.logits(0)).all()

        before = [0, page_tokens, depth // 2, depth - page_tokens]
        assert [is_read(position) for position in before] == [True] * len(before)
        behind = [depth + STEP_TOKENS + page_tokens, tokens - 1]
        assert [is_read(position) for position in behind] == [False] * len(behind)
