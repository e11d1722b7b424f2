"""Sequences whose pages of a prefix are the same attend to it together; the bytes are those of pages of their own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from pipeline.config.schema import ModelConfig
from shm.checkpoint import load_index
from shm.pages import KV_SPLIT
from stages.worker import activations_arena as act
from stages.worker.adapters.prepared import prepare_adapter
from stages.worker.checkpoint.prepare import prepare_checkpoint
from stages.worker.kernels import plan as p
from stages.worker.kernels.buffer_sizes import BLOCK_ROWS
from stages.worker.kernels.prefix_groups import LEAST_MEMBERS
from stages.worker.kernels.shared_prefixes import CONVERSION_ROWS, block_members
from tests.worker.conftest import Ingested, TinyGguf
from tests.worker.instruction_sets import available_isas
from tools.step_runner import Entry, StepRunner
from tools.tiny_adapter import write_adapter
from tools.tiny_gguf import SHAPES, write_model

PAGE_TOKENS = 32
ROWS, TOKENS = 20, 4 * KV_SPLIT


class Row(NamedTuple):
    """A sequence: whose prefix it has, how many of its positions have the same pages, and how many are computed."""

    prefix_of: int
    shared: int
    known: int


# Prefixes of row 0, 1 and 14; with positions and with pages that are no whole KV splits.
SEQUENCES = [
    Row(0, 0, 900),
    Row(1, 0, 600),
    *(Row(0, 512 + 32 * (i % 3), 560 + 7 * i) for i in range(9)),  # rows 2 to 10
    Row(1, 512, 513),
    Row(1, 256, 512),  # the first position behind two splits
    Row(0, 224, 300),  # less than a split
    Row(14, 0, 300),
    Row(14, 288, 310),
    Row(16, 0, 10),
    Row(1, 512, 700),
    Row(0, 768, 800),
    Row(0, 256, 256),
]
DECODE: list[Entry] = [(row, SEQUENCES[row].known, 1, 1) for row in range(ROWS)]
# Rows 0, 2 to 10 and 18 share two splits, and 19 would leave one. 1, 11 and 17 share two, and
# 12 would leave one. 14 and 15 are two.
MIXED: list[Entry] = [
    (13, 300, 40, 1),  # of its last layer one token is needed
    *((row, SEQUENCES[row].known + 1, 1, 1) for row in (2, 5, 16, 9, 0, 3, 1, 11, 17)),
    (14, 300, 20, 0),
]


def texts(vocab: int) -> np.ndarray:
    rng = np.random.default_rng(5)
    own = rng.integers(0, vocab, (ROWS, TOKENS)).astype(np.int32)
    for row, (of, shared, _) in enumerate(SEQUENCES):
        own[row, :shared] = own[of, :shared]
    return own


def compute(runner: StepRunner, share: bool, digests: tuple[str, ...] = ("",)) -> tuple[list[bytes], list[int]]:
    """The logits of all samples, and the entries of prefix groups in each of the two steps."""
    text, tables = texts(runner.model.hyper.vocab_size), runner.steps.tables
    each = tables.shape[1] * PAGE_TOKENS // TOKENS  # pages of a place
    for row, (of, shared, known) in enumerate(SEQUENCES):
        runner.write_row(row, text[row], output_start=known, adapter=digests[of % len(digests)])
        first = 0
        if share:
            tables[row, : shared // PAGE_TOKENS * each] = tables[of, : shared // PAGE_TOKENS * each]
            first = shared
        for start in range(first, known, 512):
            runner.run([(row, start, min(512, known - start), 0)])
    found, groups = [], []
    for entries in (DECODE, MIXED):
        runner.publish(entries)
        runner.compute()
        n = sum(samples for *_, samples in entries)
        logits = [runner.logits(i).tobytes() for i in range(n)]
        groups.append(n_shared(runner))
        runner.compute()  # again, as by the successor of a dead worker
        assert [runner.logits(i).tobytes() for i in range(n)] == logits
        found += logits
    return found, groups


def n_shared(runner: StepRunner) -> int:
    offset = act.offsets(runner.geometry, runner.model.hyper)[0][act.c.PLAN]
    return int(runner.activations.view(offset, (p.SHARED + 1,), np.int64)[p.SHARED])


def compare(index: Path, directory: Path, ranks: int, kv_type: str, adapters: tuple = ()) -> list[int]:
    """Compare the bytes with those of pages of their own; returns the entries of prefix groups in each step."""
    bounds = {"max_rows": ROWS, "max_tokens": TOKENS, "step_tokens": 512, "max_samples": ROWS}
    bounds |= {"kv_type": kv_type, "page_tokens": PAGE_TOKENS, "adapters": adapters}
    digests = (*(one.digest for one in adapters), "")
    found = []
    for share, n in ((False, 1), (True, ranks)):
        with StepRunner(index, directory, ranks=n, **bounds) as runner:  # type: ignore[arg-type]
            found.append(compute(runner, share, digests))
    (apart, none), (together, groups) = found
    assert together == apart
    assert none == [0, 0]
    return groups


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "ranks", "kv_type", "groups"),
    [
        ("grouped", 1, "f16", [14, 8]),
        ("grouped", 2, "f16", [14, 8]),
        ("grouped", 3, "int8", [14, 8]),
        ("odd", 2, "f32", [14, 8]),
        ("gemma", 2, "f16", [14, 0]),  # one KV head: 10 units of the second step are fewer than 16
        ("windowed", 2, "f16", [0, 0]),  # no layer attends to whole prefixes
        ("gemma3", 2, "f16", [0, 0]),  # pages that belong to some layers only
    ],
)
def test_the_bytes_are_those_of_pages_of_their_own(
    tiny_gguf: TinyGguf, ingested: Ingested, tmp_path: Path, shape: str, ranks: int, kv_type: str, groups: list[int]
) -> None:
    assert compare(ingested(tiny_gguf(shape, "Q4_0")), tmp_path, ranks, kv_type) == groups


@pytest.mark.slow
def test_sequences_with_adapters_share_what_their_adapter_computed(
    tiny_gguf: TinyGguf, ingested: Ingested, tmp_path: Path
) -> None:
    model = tiny_gguf("grouped", "Q4_0_M")
    index = ingested(model)
    source = write_adapter(tmp_path / "4.gguf", model, 4, 4)
    adapter = prepare_adapter(source, load_index(index), tmp_path / "adapters", 64, 1 << 30)
    assert compare(index, tmp_path, 2, "f16", (adapter,)) == [14, 8]


@pytest.mark.slow
@pytest.mark.skipif("portable" not in available_isas(), reason="needs AVX2")
def test_the_bytes_are_equal_with_avx2_alone(tmp_path: Path) -> None:
    """Its blocks have other sizes, and read K and V from their pages."""
    code = "import sys; from tests.worker.test_shared_prefixes import main; main(sys.argv[1])"
    done = subprocess.run(
        ["env", "STARLING_ISA=portable", sys.executable, "-c", code, tmp_path], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (0, "[14, 8]\n"), done.stderr


def main(directory: str) -> None:
    """Print the entries of prefix groups, after `compare`."""
    path = write_model(Path(directory) / "m.gguf", SHAPES["grouped"], "Q4_0")
    index = prepare_checkpoint(ModelConfig(name="m", path=str(path)), Path(directory) / "models")
    print(compare(index, Path(directory), 2, "f16"))


@pytest.mark.parametrize("group", [1, 3, 4, 24])
@pytest.mark.parametrize(("members", "kv_heads", "ranks"), [(16, 3, 2), (3, 8, 2), (64, 8, 4), (5, 1, 2), (7, 2, 16)])
def test_blocks_leave_the_busiest_rank_least_to_do(group: int, members: int, kv_heads: int, ranks: int) -> None:
    most = BLOCK_ROWS // group

    def busiest(block: int) -> int:
        return -(-(-(-members // block) * kv_heads) // ranks) * (block * group + CONVERSION_ROWS)

    block = block_members.py_func(members, group, kv_heads, ranks)
    assert members >= LEAST_MEMBERS
    assert 1 <= block <= min(most, members)
    assert busiest(block) == min(busiest(n) for n in range(1, min(most, members) + 1))
