"""The step ring: the scheduler's access to a model's step arena. Layout and protocol: shm/step_ring.py.

Uses no compiled code (`shm/words.py` is Python): importing a compiler would add half a second to the pause that
clients notice when the scheduler restarts.  Small integers move through memoryviews and `struct`, which take half the
time of NumPy's indexing at these sizes.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence

import numpy as np

from pipeline.protocol.messages import Logprob, Sampling
from shm import step_ring as sh
from shm import words
from shm.step_ring import Steps, StepsGeometry

_ENTRY = struct.Struct("=8i")
_SLOT = struct.Struct("=4q")
_ENTRY_BYTES = 4 * sh.ENTRY_WORDS
_SLOT_BYTES = 8 * sh.SLOT_WORDS
_U64 = (1 << 64) - 1


class Ring:
    """One model's step arena. The scheduler is its only writer, except for what shm/step_ring.py lists."""

    def __init__(self, steps: Steps, geometry: StepsGeometry, serial: int) -> None:
        """`serial` must be larger than every serial number in the arena's file, such as the clock in ns."""
        g = self.geometry = geometry
        self._steps = steps
        self._serial = serial
        self._control = steps.control
        self._slot_head = steps.slot_head.reshape(-1).view("u1").data
        self._entries = steps.entries.reshape(-1).view("u1").data
        self._entries_stride = g.max_entries * _ENTRY_BYTES
        self._tokens = steps.tokens.reshape(-1).data
        self._tokens_stride = g.max_tokens + 1
        self._out_token = steps.out_token.reshape(-1).data
        self._timing = steps.timing.reshape(-1).data
        self.head = words.load(self._control, sh.DONE)  # last published step
        self.generation = 0

    # -------------------------------------------------------------- control words

    def start(self, generation: int) -> int:
        """Discard unacknowledged steps; no worker may be attached. Returns the number of the next step."""
        self.generation = generation
        self.head = words.load(self._control, sh.DONE)
        words.store(self._control, sh.GENERATION, generation)
        words.store(self._control, sh.HEAD, self.head)
        return self.head + 1

    @property
    def done(self) -> int:
        """Last acknowledged step."""
        return words.load(self._control, sh.DONE)

    @property
    def progress(self) -> int:
        """Counter that the worker increments with every layer."""
        return words.load(self._control, sh.PROGRESS)

    @property
    def served_generation(self) -> int:
        """Generation of the attachment that the worker serves."""
        return words.load(self._control, sh.WORKER_GENERATION)

    @property
    def has_worker(self) -> bool:
        """The worker has mapped the arenas of this generation and computes published steps."""
        return self.served_generation == self.generation

    @property
    def worker_sleeps(self) -> bool:
        """The worker must be woken by a frame after the next publication."""
        return words.load(self._control, sh.WORKER_SLEEPING) != 0

    def sleep(self, step: int) -> int:
        """Request a doorbell at the end of `step`. Returns the last acknowledged step, read after the request."""
        words.store(self._control, sh.WAKE_AT, step)
        words.fence()
        return words.load(self._control, sh.DONE)

    def wake(self) -> None:
        """Withdraw the request for a doorbell."""
        words.store(self._control, sh.WAKE_AT, 0)

    # -------------------------------------------------------------- rows

    def write_row(
        self,
        row: int,
        tokens: array[int],
        prompt_len: int,
        sampling: Sampling,
        choice: int,
        stop_ids: Sequence[int],
        breakers: bytes = b"",
        prompt_logprobs: int = -1,
        adapter: str = "",
    ) -> None:
        """Write a sequence's parameters and known tokens. Must precede every frame and step that names the row.

        `breakers`: as in `Submit`, of the size of a token mask. `prompt_logprobs`, `adapter`: likewise.
        """
        s = self._steps
        ints, floats = s.row_ints[row], s.row_floats[row]
        self._serial += 1
        ints[sh.SERIAL] = self._serial
        words.fence()
        self.write_tokens(row, 0, tokens)
        seed = sampling.seed & _U64
        ints[sh.SEED] = seed - (1 << 64) if seed >> 63 else seed
        ints[sh.CHOICE] = choice
        ints[sh.OUTPUT_START] = prompt_len
        ints[sh.TOP_K] = sampling.top_k
        ints[sh.LOGPROBS] = sampling.logprobs
        ints[sh.MIN_TOKENS] = sampling.min_tokens
        ints[sh.IGNORE_EOS] = sampling.ignore_eos
        ints[sh.N_BIAS] = len(sampling.logit_bias)
        ints[sh.N_MASK] = len(stop_ids)
        ints[sh.ORDER] = sh.pack_order(sampling.order)
        floats[sh.TEMPERATURE] = sampling.temperature
        floats[sh.TOP_P] = sampling.top_p
        floats[sh.REPETITION] = sampling.repetition_penalty
        floats[sh.FREQUENCY] = sampling.frequency_penalty
        floats[sh.PRESENCE] = sampling.presence_penalty
        floats[sh.MIN_P] = sampling.min_p
        floats[sh.TYPICAL_P] = sampling.typical_p
        floats[sh.TOP_N_SIGMA] = sampling.top_n_sigma
        floats[sh.DRY_MULTIPLIER] = sampling.dry_multiplier
        floats[sh.DRY_BASE] = sampling.dry_base
        floats[sh.XTC_PROBABILITY] = sampling.xtc_probability
        floats[sh.XTC_THRESHOLD] = sampling.xtc_threshold
        ints[sh.DRY_ALLOWED] = sampling.dry_allowed_length
        ints[sh.DRY_LAST_N] = sampling.dry_penalty_last_n
        ints[sh.HAS_BREAKERS] = bool(breakers)
        ints[sh.SCORED] = prompt_logprobs + 1
        ints[sh.ADAPTER] = sh.adapter_tag(adapter)
        if breakers:
            s.breakers[row] = np.frombuffer(breakers, "<u4")
        for i, token in enumerate(sorted(stop_ids)):
            s.mask_ids[row, i] = token
        for i, (token, bias) in enumerate(sampling.logit_bias):
            s.bias_ids[row, i] = token
            s.bias[row, i] = bias

    def serial(self, row: int) -> int:
        """Serial number of the sequence that the row was written for last."""
        return int(self._steps.row_ints[row, sh.SERIAL])

    def write_tokens(self, row: int, start: int, tokens: array[int]) -> None:
        """Write tokens from position `start` on. Raises `ValueError` if they exceed the row."""
        if start + len(tokens) > self._tokens_stride:
            raise ValueError(f"row {row} holds {self._tokens_stride} tokens, not {start + len(tokens)}")
        at = row * self._tokens_stride + start
        self._tokens[at : at + len(tokens)] = memoryview(tokens)

    def has_mask(self, row: int, epoch: int, known: int) -> bool:
        """The mask for the token after `known` tokens of the row is there, with this epoch."""
        return int(self._steps.mask_ready[row, known % sh.MASK_SLOTS]) == sh.mask_tag(epoch, known)

    def is_mask_begun(self, row: int) -> bool:
        """The mask process was computing a mask for the row's sequence when it ended."""
        return bool((self._steps.mask_ready[row] == sh.begun_tag(self.serial(row))).any())

    def clear_begun_masks(self) -> bool:
        """Remove what a mask process that has ended left of a mask that it was computing. False: it left nothing."""
        ready = self._steps.mask_ready
        begun = ready < 0
        ready[begun] = 0
        return bool(begun.any())

    def write_table(self, row: int, start: int, pages: tuple[int, ...]) -> None:
        """Write page numbers from index `start` of the row's page table on. Page -1, which no step reads, becomes 0."""
        self._steps.tables[row, start : start + len(pages)] = np.maximum(pages, 0)

    # -------------------------------------------------------------- steps

    def publish(
        self, entries: list[tuple[int, int, int, int, int]], pooled: Sequence[tuple[int, int, int]] = ()
    ) -> int:
        """Publish the next step of entries (row, start, count, samples, epoch of masks). Returns its number.

        The outputs of the entries follow each other in the same order, `samples` each.  `pooled`: index of an entry,
        first position to pool and how many, in the order of the sums.
        """
        number = self.head + 1
        slot = number % sh.SLOTS
        at = slot * self._entries_stride
        base = 0
        pack, buffer = _ENTRY.pack_into, self._entries
        for row, start, count, samples, epoch in entries:
            pack(buffer, at, row, start, count, samples, base, epoch, 0, 0)
            at += _ENTRY_BYTES
            base += samples
        if pooled:
            self._write_pooled(slot, pooled)
        _SLOT.pack_into(self._slot_head, slot * _SLOT_BYTES, number, self.generation, len(entries), base)
        self.head = number
        words.store(self._control, sh.HEAD, number)
        words.fence()  # before the caller reads `worker_sleeps`
        return number

    def _write_pooled(self, slot: int, pooled: Sequence[tuple[int, int, int]]) -> None:
        entries = self._steps.entries[slot]
        for place, (index, first, count) in enumerate(pooled):
            entries[index, sh.SAMPLE_BASE] = place
            entries[index, sh.POOL_FIRST], entries[index, sh.POOL_COUNT] = first, count

    def pooled_sums(self, number: int, place: int, count: int) -> np.ndarray | None:
        """The sums (width,) i64 of `count` pooled positions of an acknowledged step; None: they are not valid."""
        slot = number % sh.SLOTS
        if int(self._steps.pool_states[slot, place]) != count:
            return None
        return self._steps.pooled[slot, place]

    def outputs(self, number: int, count: int) -> Sequence[int]:
        """The first `count` sampled tokens of an acknowledged step (i32)."""
        at = number % sh.SLOTS * self.geometry.max_samples
        return self._out_token[at : at + count]

    def logprob(self, number: int, sample: int, top: int) -> Logprob:
        """Log probability of one sample of an acknowledged step, and the `top` highest ones."""
        slot = number % sh.SLOTS
        s = self._steps
        value = float(s.out_logprob[slot, sample])
        if top <= 0:
            return Logprob(value)
        ids = s.out_top_id[slot, sample, :top].tolist()
        return Logprob(value, tuple(zip(ids, s.out_top_lp[slot, sample, :top].tolist(), strict=True)))

    def scores(self, number: int, sample: int, count: int, top: int) -> bytes | None:
        """The scores of `count` prompt tokens of an acknowledged step, from output `sample` on; None: not valid.

        4-byte words of each, little-endian: rank (i32), log probability (f32), then `top` times id (i32) and log
        probability (f32).
        """
        s, at = self._steps, (number % sh.SLOTS, slice(sample, sample + count))
        words = np.empty((count, 2 + 2 * top), "<i4")
        words[:, 0] = s.out_token[at]
        words[:, 1] = s.out_logprob[at].view(np.int32)
        words[:, 2::2] = s.out_top_id[at][:, :top]
        words[:, 3::2] = s.out_top_lp[at].view(np.int32)[:, :top]
        return words.tobytes() if count and int(words[:, 0].min()) > 0 else None

    def took_us(self, number: int) -> float:
        """Time that the worker took for an acknowledged step; 0: not measured."""
        at = number % sh.SLOTS * 4
        return (self._timing[at + 2] - self._timing[at + 1]) / 1000
