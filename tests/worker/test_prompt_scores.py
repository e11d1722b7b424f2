"""The kernels score the tokens of a prompt: the reference's log probabilities and ranks, in any chunks and batch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from stages.worker.kernels import sampler
from stages.worker.kernels.buffer_sizes import sampler_bytes
from tests.worker.conftest import Ingested, TinyGguf
from tests.worker.sampler_row import logits_of
from tools.reference import sampling as reference
from tools.step_runner import StepRunner
from tools.tiny_gguf import SHAPES

pytestmark = pytest.mark.slow

SHAPE, RECIPE = "grouped", "Q4_0_M"
VOCAB, PROMPT, TOP = SHAPES[SHAPE].vocab_size, 61, 4


def rank(logits: np.ndarray, token: int) -> int:
    order = np.lexsort((np.arange(len(logits)), -logits.astype(np.float64)))
    return int(np.flatnonzero(order == token)[0]) + 1


@pytest.mark.parametrize("kind", ["normal", "ties", "flat"])
@pytest.mark.parametrize("vocab", [1, 15, 16, 17, 63, 1025, 5000])
def test_ranks_and_logprobs_equal_the_reference(vocab: int, kind: str) -> None:
    rng = np.random.default_rng(vocab)
    logits = logits_of(rng, vocab, kind)
    scratch = np.zeros(sampler_bytes(vocab, 10), np.uint8)
    values, ids, best = reference.logprobs(logits, min(TOP, vocab))
    for token in {0, vocab - 1, *rng.integers(0, vocab, 20).tolist()}:
        out, top_ids, top = np.zeros(1, np.float32), np.zeros(TOP, np.int32), np.zeros(TOP, np.float32)
        at = [a.ctypes.data for a in (out, top_ids, top, scratch)]
        assert sampler.score(logits.ctypes.data, vocab, token, TOP, *at) == rank(logits, token)
        assert out[0] == values[token]
        n = len(ids)
        assert (top_ids[:n].tolist(), top[:n].tolist()) == (ids.tolist(), best.tolist())
    for token in (-1, vocab):
        assert sampler.score(logits.ctypes.data, vocab, token, 0, *at) == -1
    logits[vocab // 2] = np.nan
    assert sampler.score(logits.ctypes.data, vocab, 0, 0, *at) == -1


def scores(runner: StepRunner, row: int, count: int, at: int = 0) -> list[tuple[object, ...]]:
    s, slot = runner.steps, runner.slot
    return [
        (
            int(s.out_token[slot, i]),
            float(s.out_logprob[slot, i]),
            s.out_top_id[slot, i, :TOP].tolist(),
            s.out_top_lp[slot, i, :TOP].tolist(),
        )
        for i in range(at, at + count)
    ]


def test_scores_do_not_depend_on_chunks_neighbours_or_ranks(
    tiny_gguf: TinyGguf, ingested: Ingested, tmp_path: Path
) -> None:
    index = ingested(tiny_gguf(SHAPE, RECIPE))
    rng = np.random.default_rng(7)
    prompt = rng.integers(0, VOCAB, PROMPT + 1).astype(np.int32)
    bounds = {"max_rows": 4, "max_tokens": 128, "step_tokens": 256, "max_samples": 64}
    expected: list[tuple[object, ...]] = []
    for ranks in (1, 2):
        (tmp_path / str(ranks)).mkdir()
        with StepRunner(index, tmp_path / str(ranks), ranks=ranks, **bounds) as runner:
            if not expected:
                runner.write_row(0, prompt)
                for p, logits in enumerate(runner.prefill(0, PROMPT, PROMPT, samples_each=True)):
                    values, ids, best = reference.logprobs(logits, TOP)
                    token = int(prompt[p + 1])
                    expected.append((rank(logits, token), float(values[token]), ids.tolist(), best.tolist()))
            for chunk in (1, 5, PROMPT):
                # The sampler's parameters have no effect on the scores.
                runner.write_row(0, prompt, scored=TOP + 1, temperature=1.3, repetition=1.4, logprobs=1)
                found = []
                for start in range(0, PROMPT, chunk):
                    count = min(chunk, PROMPT - start)
                    runner.write_row(1, rng.integers(0, VOCAB, 40), temperature=1.0)
                    runner.run([(1, 0, 40, 1), (0, start, count, count)])
                    found += scores(runner, 0, count, 1)
                assert found == expected
                assert runner.steps.tokens[0, : PROMPT + 1].tolist() == prompt.tolist()
            # After the prompt the row samples as any other.
            runner.write_row(2, prompt)
            runner.prefill(2, PROMPT, 9)
            runner.write_row(2, prompt)  # again: the last chunk's sample has overwritten the token after it
            sampled = [runner.run([(row, PROMPT, 1, 1)])[0] for row in (0, 2)]
            assert runner.steps.tokens[0, PROMPT + 1] == sampled[0]
            runner.write_row(0, prompt, scored=1)
            assert runner.run([(0, PROMPT, 1, 1)])[0] == sampled[1]
