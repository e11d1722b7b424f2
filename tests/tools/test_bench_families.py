"""The benchmark of architectures: shapes of the same size, memory of arenas and weights, and a run on tiny models."""

from __future__ import annotations

import json
import mmap
import os
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from stages.worker.checkpoint.architectures import ARCHITECTURES
from tools.bench.families import speed
from tools.bench.families.command import main
from tools.bench.families.memory import Measured, resident, taken
from tools.bench.families.shapes import BASE, FAMILIES, base_of, shape_of, weights_of_layers
from tools.bench.offline.candidate import Candidate

SMAPS = """\
7f0000000000-7f0000400000 rw-p 00000000 00:00 0 
Pss:                1000 kB
7f0001000000-7f0009000000 rw-s 00000000 00:1a 77                         /dev/shm/starling-0/tiny.kv
Pss:               64000 kB
7f0010000000-7f0016000000 r--s 00000000 fe:01 99                         /home/x/models/abc.bin
Pss:               48000 kB
Pss_Dirty:            48 kB
7f0020000000-7f0026000000 r--s 06000000 fe:01 99                         /home/x/models/abc.bin (deleted)
Pss:                2000 kB
7f0030000000-7f0030001000 r-xp 00000000 fe:01 12                         /usr/lib/libc.so.6
Pss:                 200 kB
"""  # noqa: W291


def test_every_architecture_has_a_shape() -> None:
    assert {shape_of(family).architecture for family in FAMILIES} == set(ARCHITECTURES)


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_are_as_large_as_those_of_llama(family: str) -> None:
    base, found = (weights_of_layers(shape_of(name)) for name in (BASE, family))
    assert found == pytest.approx(base, rel=0.015)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_position_has_as_much_k_and_v_as_in_the_llama_graph_beside_it(family: str) -> None:
    if family == "llama2":
        return  # it shows what K and V of each head cost
    base, found = (shape_of(name) for name in (base_of(family), family))
    assert found.n_kv_heads * found.head_dim == base.n_kv_heads * base.head_dim


def test_a_prompt_attends_to_as_many_positions_as_the_input_of_an_encoder() -> None:
    found: list[tuple[int, int]] = []

    class Recorded(Candidate):
        def __init__(self) -> None:
            self.clock = time.perf_counter

        def fill_tokens(self, rows: int, tokens: int) -> None:
            found.clear()

        def _compute_prompt(self, row: int, tokens: int, start: int = 0) -> None:
            found.append((start, tokens))

    ((_, of_base, _),) = speed._runs("bert")
    of_base(Recorded())
    before, (start, end) = found
    assert before == (0, start) and end - start == speed.PROMPT
    assert sum(range(start + 1, end + 1)) == pytest.approx(speed.PROMPT**2, rel=0.01)


def test_shares_of_a_file_are_added() -> None:
    assert resident(SMAPS) == {".kv": 64000 << 10, ".bin": 50000 << 10}


def test_an_arena_is_what_its_file_holds(tmp_path: Path) -> None:
    """Of this process: a file with room for 1 MB, of which two pages are written."""
    with (tmp_path / "m.act").open("w+b") as file:
        file.truncate(1 << 20)
        for at in (0, 1 << 19):
            os.pwrite(file.fileno(), b"x" * 4096, at)
        os.fsync(file.fileno())
        with mmap.mmap(file.fileno(), 1 << 20):
            found = taken([os.getpid()])
    assert found[".act"] == 512 * (tmp_path / "m.act").stat().st_blocks
    assert 0 < found[".act"] < 1 << 19


def test_a_row_has_both_sizes() -> None:
    row = Measured("m", {"weights": (10**8, 99 * 10**6), "KV arena": (10**7, 10**7)}, (200.0, 150.0))
    assert row.total == (110_000_000, 109_000_000)
    assert row.line() == "| m | 100.0 / 99.0 | 10.0 / 10.0 | 110.0 / 109.0 | 200.0 / 150.0 (75%) |"


@pytest.mark.slow
def test_a_run_on_tiny_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the compiled kernels of the developer's cache and separate directories for the models."""
    monkeypatch.setattr("pipeline.config.paths.models_dir", lambda: tmp_path / "models")
    monkeypatch.setattr("pipeline.config.paths.cache_dir", lambda: tmp_path / "cache")
    for name, value in (("PROMPT", 20), ("CACHED", 4), ("TOKENS", 3)):
        monkeypatch.setattr(speed, name, value)
    arguments = ["speed", "qwen2", "bert", "--layers", "1", "--rounds", "1", "--phases"]
    done = CliRunner().invoke(main, arguments, catch_exceptions=False)
    (qwen, bert) = json.loads(done.output.splitlines()[-1])["families"]
    assert all(len(qwen[work]) == 1 and qwen[work][0] > 0 for work in speed.WORKS)
    assert set(bert) == {"family", "beside", "weights_m", "prefill"}
