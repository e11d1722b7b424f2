"""The determinism guarantee: the bytes of a request, logits included, depend on the request alone.

The bytes are the same alone and among 17, in chunks, on one to three ranks, over pages of any size in any order,
repeated, with portable instructions, and with NumPy's CPU dispatch switched off.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from shm.step_ring import DONE, SLOTS, WAKE_AT
from stages.worker.kernels import features, parameter_block, plan
from stages.worker.kernels.buffer_sizes import PLAN_HEAD
from tests.worker.conftest import Ingested, TinyGguf
from tools.step_runner import StepRunner
from tools.tiny_gguf import SHAPES

pytestmark = pytest.mark.slow

SHAPE, RECIPE = "grouped", "Q4_0_M"  # seven formats, dense ones too; records that are whole per group
VOCAB = SHAPES[SHAPE].vocab_size
PROMPT = 263  # crosses a KV split of attention
MORE = 6
SAMPLING = {
    "seed": 2**63 - 5,
    "temperature": 0.8,
    "top_k": 40,
    "top_p": 0.9,
    "repetition": 1.1,
    "frequency": 0.2,
    "logprobs": 3,
    "min_p": 0.02,
    "typical_p": 0.95,
    "top_n_sigma": 3.0,
    "dry_multiplier": 0.8,
    "dry_base": 1.75,
    "dry_allowed": 1,
    "dry_last_n": -1,
    "breakers": (1, 2),
    "xtc_probability": 0.5,
    "xtc_threshold": 0.1,
}


def prompt(seed: int, n: int = PROMPT) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCAB, n).astype(np.int32)


def runner_for(index: Path, directory: Path, **options: object) -> StepRunner:
    bounds = {"max_rows": 20, "max_tokens": 320, "step_tokens": 512, "max_samples": 32}
    return StepRunner(index, directory, **(bounds | options))  # type: ignore[arg-type]


def fill(runner: StepRunner, row: int, chunk: int) -> list[np.ndarray]:
    return runner.prefill(row, PROMPT, chunk)


def answer(runner: StepRunner, row: int, first: list[np.ndarray], others: tuple[int, ...] = ()) -> str:
    """Digest of the row's logits, tokens and logprobs; `others` decode in the same steps."""
    h = hashlib.sha256()
    for logits in first:
        h.update(logits.tobytes())
    for i in range(MORE):
        entries = [(r, PROMPT + i, 1, 1) for r in others]
        entries.insert(len(others) // 2, (row, PROMPT + i, 1, 1))
        runner.run(entries)
        place = len(others) // 2
        s, slot = runner.steps, runner.slot
        h.update(runner.logits(place).tobytes())
        for out in (s.out_token, s.out_logprob, s.out_top_id, s.out_top_lp):
            h.update(out[slot, place].tobytes())
    h.update(runner.steps.tokens[row, : PROMPT + MORE + 1].tobytes())
    return h.hexdigest()


def alone(runner: StepRunner, chunk: int = 512) -> str:
    runner.write_row(0, prompt(0), **SAMPLING)
    return answer(runner, 0, fill(runner, 0, chunk))


@pytest.fixture(scope="module")
def index(tiny_gguf: TinyGguf, ingested: Ingested) -> Path:
    return ingested(tiny_gguf(SHAPE, RECIPE))


@pytest.fixture(scope="module")
def expected(index: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    with runner_for(index, tmp_path_factory.mktemp("alone")) as runner:
        return alone(runner)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_chunks_and_ranks(index: Path, tmp_path: Path, expected: str, ranks: int) -> None:
    with runner_for(index, tmp_path, ranks=ranks) as runner:
        for chunk in (1, 7, 64, 512) if ranks < 3 else (64,):
            assert alone(runner, chunk) == expected


@pytest.mark.parametrize(("ranks", "is_split"), [(1, False), (2, False), (3, True)])
def test_splits_are_units_where_heads_are_no_equal_shares(
    index: Path, tmp_path: Path, ranks: int, is_split: bool
) -> None:
    with runner_for(index, tmp_path, ranks=ranks) as runner:
        alone(runner)
        at = ctypes.c_int64.from_address(runner.group.tables[0].address + 8 * parameter_block.PLAN).value
        place = ctypes.c_int64.from_address(at + 8 * (PLAN_HEAD + plan.P_SPLIT)).value
        assert (place >= 0) == is_split


def test_ranks_in_clusters(index: Path, tmp_path: Path, expected: str) -> None:
    with runner_for(index, tmp_path, ranks=5, clusters=(2, 1, 2)) as runner:
        assert alone(runner, 100) == expected


@pytest.mark.parametrize(("nodes", "clusters"), [((2, 3), ()), ((3, 2), (2, 1, 2))])
def test_ranks_on_several_memory_nodes(
    index: Path, tmp_path: Path, expected: str, nodes: tuple[int, ...], clusters: tuple[int, ...]
) -> None:
    with runner_for(index, tmp_path, ranks=5, nodes=nodes, clusters=clusters) as runner:
        for chunk in (7, 263):
            assert alone(runner, chunk) == expected


@pytest.mark.parametrize(("page_tokens", "table_seed"), [(16, 1), (64, 2), (128, 3), (256, 4)])
def test_page_sizes_and_places(index: Path, tmp_path: Path, expected: str, page_tokens: int, table_seed: int) -> None:
    with runner_for(index, tmp_path, page_tokens=page_tokens, table_seed=table_seed) as runner:
        assert alone(runner, 100) == expected


@pytest.mark.parametrize("ranks", [1, 2])
def test_among_seventeen(index: Path, tmp_path: Path, expected: str, ranks: int) -> None:
    others = tuple(range(1, 17))
    with runner_for(index, tmp_path, ranks=ranks) as runner:
        runner.write_row(0, prompt(0), **SAMPLING)
        for row in others:
            runner.write_row(row, prompt(row), seed=row, temperature=1.0)
        # All prompts are computed together, in chunks of different lengths, with prompts and samples in one step.
        first: list[np.ndarray] = []
        at = [0] * 17
        while any(n < PROMPT for n in at):
            entries, samples, place = [], 0, -1
            for row in range(17):
                count = min(17 + 3 * row, PROMPT - at[row], 512 // 17)
                if count <= 0:
                    continue
                at[row] += count
                ends = at[row] == PROMPT
                if row == 0 and ends:
                    place = samples
                samples += ends
                entries.append((row, at[row] - count, count, int(ends)))
            runner.run(entries[::-1] if place < 0 else entries)
            if place >= 0:
                first = [runner.logits(place)]
        assert answer(runner, 0, first, others) == expected


def test_a_repeated_step_writes_the_same(index: Path, tmp_path: Path) -> None:
    with runner_for(index, tmp_path) as runner:
        runner.write_row(0, prompt(0), **SAMPLING)
        fill(runner, 0, 512)
        for i in range(4):
            runner.run([(0, PROMPT + i, 1, 1)])
            before = runner.logits(0).tobytes(), runner.tokens(1), runner.steps.tokens[0].tobytes()
            runner.compute()
            assert (runner.logits(0).tobytes(), runner.tokens(1), runner.steps.tokens[0].tobytes()) == before


def test_steps_that_follow_each_other_equal_single_ones(index: Path, tmp_path: Path) -> None:
    with runner_for(index, tmp_path) as runner:
        runner.write_row(0, prompt(0), **SAMPLING)
        fill(runner, 0, 512)
        steps = [[(0, PROMPT + i, 1, 1)] for i in range(2 * SLOTS)]
        singles = [runner.run(step) for step in steps]
        tokens, logits = runner.steps.tokens[0].tobytes(), runner.logits(0).tobytes()
        runner.steps.tokens[0, PROMPT + 1 :] = 0
        followed = []
        for begin, end in ((0, 1), (1, 8), (8, 8 + SLOTS - 1), (8 + SLOTS - 1, 2 * SLOTS)):
            followed += runner.run_all(steps[begin:end])
        assert followed == singles
        assert (runner.steps.tokens[0].tobytes(), runner.logits(0).tobytes()) == (tokens, logits)
        # It stops at the step for which the scheduler asked to be woken.
        done = int(runner.steps.control[DONE])
        runner.steps.control[WAKE_AT] = done + 2
        with pytest.raises(RuntimeError, match=f"stopped after step {done + 2} of {done + 4}: 0 entries"):
            runner.run_all(steps[:4])


def test_verification_samples_equal_single_steps(index: Path, tmp_path: Path) -> None:
    """Several samples of one entry are those that steps of one token each give."""
    with runner_for(index, tmp_path) as runner:
        runner.write_row(0, prompt(0), **SAMPLING)
        fill(runner, 0, 512)
        singles, logits = [], []
        for i in range(4):
            singles += runner.run([(0, PROMPT + i, 1, 1)])
            logits.append(runner.logits(0).tobytes())
        assert runner.run([(0, PROMPT, 4, 4)]) == singles
        assert [runner.logits(i).tobytes() for i in range(4)] == logits


@pytest.mark.timeout(3000)  # it may compile every kernel for another CPU, on what others leave of the cores
@pytest.mark.parametrize(
    ("isa", "disabled"),
    [("portable", ""), ("", "AVX512F AVX512CD AVX512_SKX AVX2 FMA3"), ("portable", "AVX2 FMA3")],
)
def test_instruction_sets(index: Path, tmp_path: Path, expected: str, isa: str, disabled: str) -> None:
    """`isa` "": that of this process."""
    environment = os.environ | ({"STARLING_ISA": isa} if isa else {})
    if disabled:
        environment["NPY_DISABLE_CPU_FEATURES"] = disabled
    command = [sys.executable, "-W", "ignore", "-m", "tests.worker.test_determinism", str(index), str(tmp_path)]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [isa or features.isa(), expected]


if __name__ == "__main__":
    with runner_for(Path(sys.argv[1]), Path(sys.argv[2]), ranks=2) as runner:
        print(features.isa(), alone(runner, 64))
