"""A worker group inside one process: for tests, benchmarks and preparing kernels. No sockets, no scheduler.

    with Engine(index_path, directory, ranks=2) as engine:
        engine.write_row(0, tokens, temperature=0.0)
        engine.run([(0, 0, len(tokens), 1)])        # (row, start, count, samples)
        engine.token(0, len(tokens)), engine.logits(0)

It plays the scheduler's and kv's parts in the simplest way: a row's pages are its own for ever.  Ranks are
threads; the jitted code they run lets go of Python's lock.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np

from shm import barrier, words
from shm import step_ring as sh
from shm.arena import Arena
from shm.pages import KIND as KV_KIND
from shm.pages import LAYOUT as KV_LAYOUT
from shm.pages import KvGeometry, kv_arena_bytes, kv_views
from stages.worker import activations_arena as act
from stages.worker.kernels import build, rank_loop
from stages.worker.model import Arenas, Model, RankTable

FOLLOW_NS = 60_000_000_000  # in jitted code without a turn
NO_LIMIT_NS = 3_600_000_000_000
_COLUMNS = {
    "seed": sh.SEED,
    "choice": sh.CHOICE,
    "output_start": sh.OUTPUT_START,
    "top_k": sh.TOP_K,
    "logprobs": sh.LOGPROBS,
    "min_tokens": sh.MIN_TOKENS,
    "ignore_eos": sh.IGNORE_EOS,
}
_FLOAT_COLUMNS = {
    "temperature": sh.TEMPERATURE,
    "top_p": sh.TOP_P,
    "repetition": sh.REPETITION,
    "frequency": sh.FREQUENCY,
    "presence": sh.PRESENCE,
}


class Engine:
    """Arenas of its own in `directory`, and `ranks` threads. A context manager."""

    def __init__(
        self,
        index_path: Path,
        directory: Path,
        *,
        ranks: int = 1,
        kv_type: str = "f16",
        page_tokens: int = 32,
        max_rows: int = 32,
        max_tokens: int = 0,
        step_tokens: int = 512,
        max_samples: int = 32,
        profile: bool = False,
        table_seed: int = 0,
    ) -> None:
        """`max_tokens`: of a row, 0 for the model's context; `table_seed`: which pages a row gets."""
        build.build(kv_type)
        self.model = Model(index_path)
        h = self.model.hyper
        max_tokens = max_tokens or h.context_length
        n_tables = -(-max_tokens // page_tokens)
        sg = sh.StepsGeometry(max_rows, max_rows, max_samples, max_tokens, n_tables)
        kg = KvGeometry(h.n_layers, h.n_kv_heads, h.head_dim, page_tokens, kv_type)
        kg.check()
        n_pages = max_rows * n_tables
        geometry = act.ActivationsGeometry(
            step_tokens, max_samples, max_rows, n_tables, min(max_tokens, h.context_length), ranks
        )
        digest = self.model.digest
        self._steps_arena, self.steps = sh.create_steps(directory / "engine.steps", sg, digest)
        kv = Arena.create(
            directory / "engine.kv", KV_KIND, KV_LAYOUT, kv_arena_bytes(kg, n_pages), dict(kg._asdict()), digest
        )
        shared = act.create_activations(directory / "engine.act", geometry, h, digest)
        self._arenas = (self._steps_arena, kv, shared)
        arenas = Arenas(self.steps, sg, kv_views(kv, kg, n_pages), kg, shared, geometry)
        self.tables = [RankTable(self.model, arenas, rank, profile) for rank in range(ranks)]
        order = np.random.default_rng(table_seed).permutation(n_pages).astype(np.int32)
        self.steps.tables[:] = order.reshape(max_rows, n_tables)
        self.geometry, self.ranks = geometry, ranks
        self._control = shared.buffer.ctypes.data
        self._take_turns = rank_loop.take_turns
        barrier.reset(self._control + 8 * act.BARRIER, self._control + 8 * act.LINES, ranks)
        self._turn = self._step = 0
        self._slot = 0
        self._leaving = False
        self._threads = [threading.Thread(target=self._follow, args=(t,), daemon=True) for t in self.tables[1:]]
        for thread in self._threads:
            thread.start()

    # -------------------------------------------------------------- rows and steps

    def write_row(self, row: int, tokens: Sequence[int] | np.ndarray, **parameters: Any) -> None:
        """The row's tokens and parameters: those of `row_ints` and `row_floats` in lower case, `order`,
        `mask_ids`, `bias`. Neutral unless given; `output_start` is the end of the tokens."""
        s = self.steps
        s.tokens[row, : len(tokens)] = tokens
        s.row_ints[row], s.row_floats[row] = 0, 0
        given = {"output_start": len(tokens), "logprobs": -1, "top_p": 1.0, "repetition": 1.0} | parameters
        for name, value in given.items():
            if name in _COLUMNS:
                s.row_ints[row, _COLUMNS[name]] = value
            elif name in _FLOAT_COLUMNS:
                s.row_floats[row, _FLOAT_COLUMNS[name]] = value
            elif name == "mask_ids":
                s.row_ints[row, sh.N_MASK] = len(value)
                s.mask_ids[row, : len(value)] = value
            elif name == "bias":
                s.row_ints[row, sh.N_BIAS] = len(value)
                for i, (token, bias) in enumerate(value):
                    s.bias_ids[row, i], s.bias[row, i] = token, bias
            elif name != "order":
                raise TypeError(f"unknown parameter {name!r}")
        s.row_ints[row, sh.ORDER] = sh.pack_order(given.get("order", ()))

    def publish(self, entries: Sequence[tuple[int, int, int, int]]) -> int:
        """Write the next step's slot: (row, start, count, samples) each; its number."""
        self._step += 1
        self._slot = self._step % sh.SLOTS
        base = 0
        for i, (row, start, count, samples) in enumerate(entries):
            self.steps.entries[self._slot, i, : sh.ENTRY_FLAGS + 1] = (row, start, count, samples, base, 0)
            base += max(samples, 0)
        self.steps.slot_head[self._slot, : sh.SLOT_SAMPLES + 1] = (self._step, 1, len(entries), base)
        words.store(self.steps.control, sh.HEAD, self._step)
        return self._step

    def compute(self) -> int:
        """Run the step published last (again, if need be); how many entries were refused."""
        self._turn += 2
        refused = self._take_turns(
            self.tables[0].address, self._control, self._turn, self._step, self.steps.timing.ctypes.data, 0, 0, -1
        )
        if refused == rank_loop.LOST:
            raise RuntimeError("the group was given up")
        words.store(self.steps.control, sh.DONE, self._step)
        return int(refused)

    def follow(self, steps: Sequence[Sequence[tuple[int, int, int, int]]], bell: int = -1) -> list[list[int]]:
        """Publish steps, fewer than there are slots, and compute one after the other as a worker does: the sampled
        tokens of each. `bell`: a connected socket, rung as `turns.take_turns` says. Raises `RuntimeError` when
        entries are refused, or a ring does not get through."""
        first = self._step + 1
        for entries in steps:
            self.publish(entries)
        self._turn += 2
        refused = self._take_turns(
            self.tables[0].address,
            self._control,
            self._turn,
            first,
            self.steps.timing.ctypes.data,
            NO_LIMIT_NS,
            self.steps.control.ctypes.data,
            bell,
        )
        done = words.load(self.steps.control, sh.DONE)
        self._turn += 2 * (done - first)
        if refused or done != self._step:
            raise RuntimeError(
                f"step {done}: {refused} entries were refused, nobody could be woken, or the group was given up"
            )
        return [
            [int(t) for t in self.steps.out_token[(first + i) % sh.SLOTS, : sum(samples for *_, samples in entries)]]
            for i, entries in enumerate(steps)
        ]

    def run(self, entries: Sequence[tuple[int, int, int, int]]) -> list[int]:
        """Publish and compute; the sampled tokens."""
        self.publish(entries)
        self.compute()
        return self.outputs(sum(samples for *_, samples in entries))

    # -------------------------------------------------------------- results

    def outputs(self, n: int) -> list[int]:
        """Sampled tokens of the last step."""
        return [int(t) for t in self.steps.out_token[self._slot, :n]]

    def logits(self, sample: int) -> np.ndarray:
        """A copy of one sample's logits (vocab,) f32, in the order of the step's samples."""
        h = self.model.hyper
        stride = act.strides(h)[act.c.LOGITS_STRIDE] // 4
        at = act.offsets(self.geometry, h)[0][act.c.LOGITS]
        all_rows = self._arenas[2].view(at, (self.geometry.step_samples, stride), np.float32)
        return all_rows[sample, : h.vocab_size].copy()

    def prefill(self, row: int, n: int, chunk: int, samples_each: bool = False) -> list[np.ndarray]:
        """Compute positions 0 .. n-1 of a row, `chunk` at a time; the logits of the last position, or of
        every one."""
        found = []
        for start in range(0, n, chunk):
            count = min(chunk, n - start)
            samples = count if samples_each else int(start + count == n)
            self.run([(row, start, count, samples)])
            found += [self.logits(i) for i in range(samples)]
        return found

    # -------------------------------------------------------------- life

    def _follow(self, table: RankTable) -> None:
        turn = 0
        while not self._leaving:
            turn = self._take_turns(table.address, self._control, turn, 0, 0, FOLLOW_NS, 0, -1)
            if turn == rank_loop.LOST or turn & 1:
                return

    def close(self) -> None:
        """End the threads, unmap and remove the arenas. Idempotent."""
        self._leaving = True
        if self._threads:
            rank_loop.announce(self._control, self._turn + 1, self.ranks)
        for thread in self._threads:
            thread.join()
        self._threads = []
        for arena in self._arenas:
            arena.close()
            arena.unlink()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
