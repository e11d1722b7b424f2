"""The step arena as the scheduler writes and reads it. Layout and protocol: shm/step_ring.py.

Written in Python without a compiler (`shm/words.py`): importing one would cost half a second of the
pause that clients notice when the scheduler restarts.

Small integers move through memoryviews and `struct`: at these sizes half the cost of numpy's indexing.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence as Items

from pipeline.protocol.messages import Logprob, Sampling
from shm import step_ring as sh
from shm import words
from shm.step_ring import Steps, StepsGeometry

_ENTRY = struct.Struct("=6i")
_SLOT = struct.Struct("=4q")
_ENTRY_BYTES = 4 * sh.ENTRY_WORDS
_SLOT_BYTES = 8 * sh.SLOT_WORDS
_U64 = (1 << 64) - 1


class Ring:
    """One model's step arena, scheduler's side."""

    def __init__(self, steps: Steps, geometry: StepsGeometry, serial: int) -> None:
        """`serial`: larger than any this arena's file has seen (the clock's ns)."""
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
        """No worker is attached: forget what it did not finish. Returns the next step's number."""
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
        return words.load(self._control, sh.PROGRESS)

    @property
    def served_generation(self) -> int:
        """The attachment that the worker has taken up last."""
        return words.load(self._control, sh.WORKER_GENERATION)

    @property
    def has_worker(self) -> bool:
        """The worker has the arenas of this generation: what is published is computed."""
        return self.served_generation == self.generation

    @property
    def worker_sleeps(self) -> bool:
        return words.load(self._control, sh.WORKER_SLEEPING) != 0

    def sleep(self, step: int) -> int:
        """Ask for a doorbell once `step` is done; returns the last acknowledged step as it stands after asking."""
        words.store(self._control, sh.WAKE_AT, step)
        words.fence()
        return words.load(self._control, sh.DONE)

    def wake(self) -> None:
        words.store(self._control, sh.WAKE_AT, 0)

    # -------------------------------------------------------------- rows

    def write_row(
        self,
        row: int,
        tokens: array[int],
        prompt_len: int,
        sampling: Sampling,
        choice: int,
        stop_ids: Items[int],
    ) -> None:
        """A sequence's parameters and known tokens, before anybody is told of the row."""
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
        for i, token in enumerate(sorted(stop_ids)):
            s.mask_ids[row, i] = token
        for i, (token, bias) in enumerate(sampling.logit_bias):
            s.bias_ids[row, i] = token
            s.bias[row, i] = bias

    def write_tokens(self, row: int, start: int, tokens: array[int]) -> None:
        """Tokens from position `start` on. Raises `ValueError` where the row ends."""
        if start + len(tokens) > self._tokens_stride:
            raise ValueError(f"row {row} holds {self._tokens_stride} tokens, not {start + len(tokens)}")
        at = row * self._tokens_stride + start
        self._tokens[at : at + len(tokens)] = memoryview(tokens)

    def write_table(self, row: int, start: int, pages: tuple[int, ...]) -> None:
        """Page numbers from table entry `start` on."""
        self._steps.tables[row, start : start + len(pages)] = pages

    # -------------------------------------------------------------- steps

    def publish(self, entries: list[tuple[int, int, int, int]]) -> int:
        """The next step: (row, start, count, samples) each. Returns its number.

        Outputs of entry i stand behind those of the entries before it, `samples` each.
        """
        number = self.head + 1
        slot = number % sh.SLOTS
        at = slot * self._entries_stride
        base = 0
        pack, buffer = _ENTRY.pack_into, self._entries
        for row, start, count, samples in entries:
            pack(buffer, at, row, start, count, samples, base, 0)
            at += _ENTRY_BYTES
            base += samples
        _SLOT.pack_into(self._slot_head, slot * _SLOT_BYTES, number, self.generation, len(entries), base)
        self.head = number
        words.store(self._control, sh.HEAD, number)
        words.fence()  # before the caller looks whether the worker sleeps
        return number

    def outputs(self, number: int, count: int) -> Items[int]:
        """The sampled tokens of an acknowledged step (i32)."""
        at = number % sh.SLOTS * self.geometry.max_samples
        return self._out_token[at : at + count]

    def logprob(self, number: int, sample: int, top: int) -> Logprob:
        """Of one sample, with the `top` highest."""
        slot = number % sh.SLOTS
        s = self._steps
        value = float(s.out_logprob[slot, sample])
        if top <= 0:
            return Logprob(value)
        ids = s.out_top_id[slot, sample, :top].tolist()
        return Logprob(value, tuple(zip(ids, s.out_top_lp[slot, sample, :top].tolist(), strict=True)))

    def took_us(self, number: int) -> float:
        """From the worker's begin to its end of an acknowledged step; 0: it does not say."""
        at = number % sh.SLOTS * 4
        return (self._timing[at + 2] - self._timing[at + 1]) / 1000
