"""Single steps of a model in this process, for tests and benchmarks of the kernels.

    with StepRunner(index_path, directory, ranks=2) as runner:
        runner.write_row(0, tokens, temperature=0.0)
        runner.run([(0, 0, len(tokens), 1)])        # entries: (row, start, count, samples)
        runner.tokens(1), runner.logits(0)

Steps are computed by `starling.worker_group`, as in `starling.Embedded`; in place of the scheduler and the KV
manager the caller composes each step, and every row owns a fixed set of pages.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np

from pipeline.models.store import no_progress
from shm import step_ring as sh
from shm import words
from shm.checkpoint import Checkpoint
from shm.pages import KvGeometry, create_kv
from stages.worker import activations_arena as act
from stages.worker.adapters.memory import AdapterMemory
from stages.worker.adapters.prepared import Prepared
from stages.worker.checkpoint.weight_copies import copy_weights
from stages.worker.kernels import build, stored_code
from stages.worker.model import Arenas, Model
from starling.worker_group import WorkerGroup

Entry = tuple[int, int, int, int]  # row, first position, positions, samples
PooledEntry = tuple[int, int, int, int, int]  # row, first position, positions, first pooled one of them, pooled
_COLUMNS = {
    "seed": sh.SEED,
    "choice": sh.CHOICE,
    "output_start": sh.OUTPUT_START,
    "top_k": sh.TOP_K,
    "logprobs": sh.LOGPROBS,
    "min_tokens": sh.MIN_TOKENS,
    "ignore_eos": sh.IGNORE_EOS,
    "dry_allowed": sh.DRY_ALLOWED,
    "dry_last_n": sh.DRY_LAST_N,
    "scored": sh.SCORED,
}
_FLOAT_COLUMNS = {
    "temperature": sh.TEMPERATURE,
    "top_p": sh.TOP_P,
    "repetition": sh.REPETITION,
    "frequency": sh.FREQUENCY,
    "presence": sh.PRESENCE,
    "min_p": sh.MIN_P,
    "typical_p": sh.TYPICAL_P,
    "top_n_sigma": sh.TOP_N_SIGMA,
    "dry_multiplier": sh.DRY_MULTIPLIER,
    "dry_base": sh.DRY_BASE,
    "xtc_probability": sh.XTC_PROBABILITY,
    "xtc_threshold": sh.XTC_THRESHOLD,
}


class StepRunner:
    """Arenas in `directory` and a worker group on them. A context manager.

    `steps` are the views of the steps arena, `slot` is the slot of the step published last.
    """

    def __init__(
        self,
        index_path: Path,
        directory: Path,
        *,
        ranks: int = 1,
        clusters: Sequence[int] = (),
        nodes: Sequence[int] = (),
        kv_type: str = "f16",
        page_tokens: int = 32,
        max_rows: int = 32,
        max_tokens: int = 0,
        step_tokens: int = 512,
        max_samples: int = 32,
        profile: bool = False,
        table_seed: int = 0,
        adapters: Sequence[Prepared] = (),
    ) -> None:
        """`max_tokens`: positions of a row, 0 for the model's context; `table_seed` draws which pages a row owns.

        `clusters`: the number of ranks of each cluster of their barrier; none: it has no clusters.
        `nodes`: likewise of each emulated memory node, whose ranks have weights of their own.
        Compiles kernels that are not in the cache.
        """
        checkpoint = Checkpoint(index_path)
        memory = AdapterMemory(checkpoint.index, adapters) if adapters else None
        self.model = Model(checkpoint, memory)
        h = self.model.hyper
        build.build(kv_type, extra=stored_code.extra_entries(h, memory is not None))
        max_tokens = max_tokens or h.context_length
        kv_geometry = KvGeometry.of(h, page_tokens, kv_type)
        row_pages = kv_geometry.groups.n_pages(-(-max_tokens // page_tokens))
        n_pages = max_rows * row_pages
        steps_geometry = sh.StepsGeometry(
            max_rows, max_rows, max_samples, max_tokens, row_pages, sh.mask_words(h.vocab_size), h.width
        )
        self.geometry = act.ActivationsGeometry(
            step_tokens,
            max_samples,
            max_rows,
            row_pages,
            min(max_tokens, h.context_length),
            ranks,
            memory.max_rank if memory is not None else 0,
            max(1, len(nodes)),
        )
        digest = self.model.digest
        steps_arena, self.steps = sh.create_steps(directory / "runner.steps", steps_geometry, digest)
        kv_arena, kv = create_kv(directory / "runner.kv", kv_geometry, n_pages, digest, 1, grows=True)
        kv_arena.reserve(kv_arena.buffer.nbytes, huge=True)
        activations = act.create_activations(directory / "runner.act", self.geometry, h, digest)
        self.activations = activations
        self._arenas = (steps_arena, kv_arena, activations)
        self.pages = kv.pages  # (n_pages, page_bytes) u8
        arenas = Arenas(self.steps, steps_geometry, kv, kv_geometry, activations, self.geometry)
        everywhere = [sorted(os.sched_getaffinity(0)) for _ in nodes]
        weights = copy_weights(checkpoint, everywhere, no_progress)
        copies = [Model(checkpoint, memory, data) for data in weights]
        self.group = WorkerGroup(self.model, arenas, profile, clusters, nodes, copies)
        order = np.random.default_rng(table_seed).permutation(n_pages).astype(np.int32)
        self.steps.tables[:] = order.reshape(max_rows, row_pages)
        self.epochs: dict[int, int] = {}  # by row: of its token masks, see `write_mask`
        self.slot = 0
        self._step = 0

    # -------------------------------------------------------------- rows and steps

    def write_row(self, row: int, tokens: Sequence[int] | np.ndarray, **parameters: Any) -> None:
        """Write a row's tokens and sampling parameters.

        Parameters are the columns of `row_ints` and `row_floats` in lower case, `order`, `mask_ids`, `breakers`, `bias`
        and `adapter` (a digest); the default of each has no effect, that of `output_start` is the number of tokens.
        Raises `TypeError` for an unknown name.
        """
        s = self.steps
        s.tokens[row, : len(tokens)] = tokens
        s.row_ints[row], s.row_floats[row] = 0, 0
        given = {"output_start": len(tokens), "logprobs": -1, "top_p": 1.0, "repetition": 1.0} | parameters
        for name, value in given.items():
            if name in _COLUMNS:
                s.row_ints[row, _COLUMNS[name]] = value
            elif name in _FLOAT_COLUMNS:
                s.row_floats[row, _FLOAT_COLUMNS[name]] = value
            elif name == "adapter":
                s.row_ints[row, sh.ADAPTER] = sh.adapter_tag(value)
            elif name == "mask_ids":
                s.row_ints[row, sh.N_MASK] = len(value)
                s.mask_ids[row, : len(value)] = value
            elif name == "breakers":
                s.row_ints[row, sh.HAS_BREAKERS] = 1
                s.breakers[row] = 0
                for token in value:
                    s.breakers[row, token // 32] |= np.uint32(1 << token % 32)
            elif name == "bias":
                s.row_ints[row, sh.N_BIAS] = len(value)
                for i, (token, bias) in enumerate(value):
                    s.bias_ids[row, i], s.bias[row, i] = token, bias
            elif name != "order":
                raise TypeError(f"unknown parameter {name!r}")
        s.row_ints[row, sh.ORDER] = sh.pack_order(given.get("order", ()))

    def write_mask(self, row: int, known: int, allowed: Iterable[int]) -> None:
        """Allow only these ids after `known` tokens of the row, whose samples need masks from now on."""
        epoch, slot = self.epochs.setdefault(row, 1), known % sh.MASK_SLOTS
        mask = self.steps.masks[row, slot]
        mask[:] = 0
        for token in allowed:
            mask[token // 32] |= np.uint32(1 << token % 32)
        self.steps.mask_ready[row, slot] = sh.mask_tag(epoch, known)

    def publish(self, entries: Sequence[Entry]) -> int:
        """Write the next step's slot and publish it; returns its number."""
        self._step += 1
        self.slot = self._step % sh.SLOTS
        base = 0
        for i, (row, start, count, samples) in enumerate(entries):
            epoch = self.epochs.get(row, 0)
            self.steps.entries[self.slot, i] = (row, start, count, samples, base, epoch, 0, 0)
            base += max(samples, 0)
        self.steps.slot_head[self.slot, : sh.SLOT_SAMPLES + 1] = (self._step, 1, len(entries), base)
        words.store(self.steps.control, sh.HEAD, self._step)
        return self._step

    @property
    def step(self) -> int:
        """Number of the step published last."""
        return self._step

    def compute(self) -> int:
        """Compute the step published last (again, if it is computed already); returns how many entries were refused."""
        return self.group.compute(self._step)

    def pool(self, entries: Sequence[PooledEntry], others: Sequence[Entry] = ()) -> np.ndarray:
        """Publish and compute one step of pooled entries, behind `others`; returns their sums (entries, width) i64.

        Raises `ValueError` when one of them was not pooled.
        """
        self.publish([*others, *((row, start, count, 0) for row, start, count, _, _ in entries)])
        for place, (*_, first, pooled) in enumerate(entries):
            entry = self.steps.entries[self.slot, len(others) + place]
            entry[sh.SAMPLE_BASE], entry[sh.POOL_FIRST], entry[sh.POOL_COUNT] = place, first, pooled
        self.compute()
        states = self.steps.pool_states[self.slot, : len(entries)].tolist()
        if states != [entry[-1] for entry in entries]:
            raise ValueError(f"outcomes of the pooled entries: {states}")
        return self.steps.pooled[self.slot, : len(entries)].copy()

    def run(self, entries: Sequence[Entry]) -> list[int]:
        """Publish and compute one step; returns the sampled tokens."""
        self.publish(entries)
        self.compute()
        return self.tokens(sum(samples for *_, samples in entries))

    def run_all(self, steps: Sequence[Sequence[Entry]], bell: int = -1) -> list[list[int]]:
        """Publish several steps, fewer than the ring has slots, and compute them without Python in between.

        Returns the sampled tokens of each step.  `bell` as in `WorkerGroup.compute_ready`.  Raises `RuntimeError`
        when entries are refused or the last step was not reached.
        """
        first = self._step + 1
        for entries in steps:
            self.publish(entries)
        done, refused = self.group.compute_ready(first, bell)
        if refused or done != self._step:
            raise RuntimeError(f"stopped after step {done} of {self._step}: {refused} entries were refused")
        return [
            [int(t) for t in self.steps.out_token[(first + i) % sh.SLOTS, : sum(samples for *_, samples in entries)]]
            for i, entries in enumerate(steps)
        ]

    # -------------------------------------------------------------- results

    def tokens(self, n: int) -> list[int]:
        """The first `n` sampled tokens of the last step."""
        return [int(t) for t in self.steps.out_token[self.slot, :n]]

    def logits(self, sample: int) -> np.ndarray:
        """A copy of one sample's logits (vocab,) f32; samples count in the order of the step's entries."""
        h = self.model.hyper
        stride = act.strides(h)[act.c.LOGITS_STRIDE] // 4
        at = act.offsets(self.geometry, h)[0][act.c.LOGITS]
        all_rows = self.activations.view(at, (self.geometry.step_samples, stride), np.float32)
        return all_rows[sample, : h.vocab_size].copy()

    def prefill(self, row: int, n: int, chunk: int, samples_each: bool = False) -> list[np.ndarray]:
        """Compute positions 0 to n - 1 of a row, `chunk` at a time; returns the last position's logits.

        With `samples_each`, returns the logits of every position.
        """
        found = []
        for start in range(0, n, chunk):
            count = min(chunk, n - start)
            samples = count if samples_each else int(start + count == n)
            self.run([(row, start, count, samples)])
            found += [self.logits(i) for i in range(samples)]
        return found

    def close(self) -> None:
        """End the threads, unmap and remove the arenas. Idempotent."""
        self.group.close()
        for arena in self._arenas:
            arena.close()
            arena.unlink()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
