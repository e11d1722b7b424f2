"""Logits of every position of a prompt, computed by the kernels."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from stages.worker.adapters.prepared import Prepared
from tools.step_runner import StepRunner


def kernel_logits(
    index_path: Path,
    directory: Path,
    tokens: np.ndarray,
    kv_type: str = "f16",
    chunk: int = 7,
    ranks: int = 1,
    others: int = 0,
    adapters: Sequence[Prepared] = (),
    nodes: Sequence[int] = (),
) -> np.ndarray:
    """(len(tokens), vocab) f32, `chunk` positions a step.

    `others`: so many other prompts are computed in the same steps, in chunks of other lengths.  `adapters`: the first
    one is that of the prompt; the others' are all of them in turn, and none.  `nodes`: how many of the ranks are on
    each emulated memory node.
    """
    n, found = len(tokens), []
    bounds = {"max_rows": 1 + others, "max_tokens": n, "step_tokens": 64 + 8 * others, "max_samples": 64}
    how = {"ranks": ranks, "nodes": nodes, "kv_type": kv_type, "adapters": adapters}
    with StepRunner(index_path, directory, **bounds, **how) as runner:  # type: ignore[arg-type]
        digests = [*(one.digest for one in adapters), ""]
        for row in range(1, 1 + others):
            runner.write_row(row, np.roll(tokens, row), adapter=digests[row % len(digests)])
        done = [0] * (1 + others)
        for start in range(0, n, chunk):
            count = min(chunk, n - start)
            runner.write_row(
                0, tokens, adapter=digests[0]
            )  # again: an entry with one sample has overwritten the token after its position
            entries = [(0, start, count, count)]
            for row in range(1, 1 + others):
                more = min(1 + row % 8, n - done[row])
                if more:
                    entries.insert(len(entries) * (row % 2), (row, done[row], more, 0))
                    done[row] += more
            runner.run(entries)
            found += [runner.logits(i) for i in range(count)]
    return np.array(found)


def same_bytes(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether two arrays have the same shape and bytes."""
    return a.shape == b.shape and a.tobytes() == b.tobytes()
