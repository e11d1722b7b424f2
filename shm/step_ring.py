"""The steps arena: the hot edge between the scheduler and the ranks of one worker group.

A *row* is the state of one running sequence: its tokens, its page table, its parameters.  A *slot*
is one step: which rows, which positions, where samples go.  Because tokens live in rows, a step
needs no values of the step before it: the input at position p is `tokens[row, p]`, which the
worker itself wrote when it sampled it.  So the scheduler may publish step n+1 before n is done.

Step numbers grow from 1 for the arena's lifetime; step s lives in slot `s % SLOTS`.  The scheduler
publishes by storing `control[HEAD] = s` (release); rank 0 acknowledges with `control[DONE] = s`
(release) once all ranks are through, and rings if `control[WAKE_AT]` is between 1 and s.  At most
`SLOTS - 1` steps are unacknowledged.  A step that is
repeated after a worker's death finds the same tokens and writes the same bytes.

Writers (law 3): the scheduler writes everything, but for
    rank 0      control[DONE], [PROGRESS], [WORKER_SLEEPING], [WORKER_GENERATION]; `timing`
    each rank   control[RANK_LINES + 8 * rank ...], its own cache line
    one rank    the outputs (`out_*`) of a sample, and with them `tokens[row, start + count]` for
                an entry with `samples == 1`, before DONE moves
A row's parameters, table and known tokens stand before the first slot that names the row is
published; the row is used again only when no unacknowledged slot names it.  Whoever takes a row for
another sequence first stores a non-zero `row_ints[row, SERIAL]` that was never used before (it grows
from the clock's ns at start) and then the tokens: a reader that copies tokens and then still finds
the serial it knows has copied that sequence's (kv hashes pages late; with 0 it hashes none).  Table
entries and tokens past those that published steps read may be appended at any time.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np

from shm.arena import Arena, align

KIND = "steps"
LAYOUT = 2
SLOTS = 16  # twice what may be unacknowledged: an observer finds the past steps, too
MAX_TOP = 20  # top logprobs of a sample
MAX_BIAS = 300  # logit_bias entries of a sequence
MAX_MASK = 32  # stop ids of a sequence
MAX_RANKS = 64

# Indices into `control` (u64): one cache line (8 words) for each writer and purpose.
HEAD = 0  # scheduler: last published step
GENERATION = 8  # scheduler: the ring's generation
STOP = 9  # scheduler: non-zero asks the ranks to leave after the steps they have
WAKE_AT = 16  # scheduler: it sleeps, and wants a doorbell once this step is done; 0: it is awake
DONE = 24  # rank 0: last finished step
PROGRESS = 32  # rank 0: grows with every layer of every step
WORKER_GENERATION = 33  # rank 0: the generation it serves
WORKER_SLEEPING = 40  # rank 0: it wants a StepBell doorbell
BARRIER = 48  # rank 0: reserved for barriers, 16 words
RANK_LINES = 64  # each rank: 8 words of its own
CONTROL_WORDS = RANK_LINES + 8 * MAX_RANKS

# Columns of `entries` (i32)
ROW, START, COUNT, SAMPLES, SAMPLE_BASE, ENTRY_FLAGS = range(6)
ENTRY_WORDS = 8

# Columns of `slot_head` (i64)
SLOT_STEP, SLOT_GENERATION, SLOT_ENTRIES, SLOT_SAMPLES = range(4)
SLOT_WORDS = 8

# Columns of `row_ints` (i64): parameters of a sequence
(SEED, CHOICE, OUTPUT_START, TOP_K, LOGPROBS, MIN_TOKENS, IGNORE_EOS, N_BIAS, N_MASK, ORDER) = range(10)
SERIAL = 10
ROW_INTS = 16

# Sampler steps by name (`Sampling.order`) and by the number that stands for them in ORDER
SAMPLER_STEPS = {"mask": 1, "repetition": 2, "temperature": 3, "top_k": 4, "top_p": 5, "penalties": 6}
DEFAULT_ORDER = ("mask", "repetition", "temperature", "top_k", "top_p", "penalties")

# Columns of `row_floats` (f32)
(TEMPERATURE, TOP_P, REPETITION, FREQUENCY, PRESENCE) = range(5)
ROW_FLOATS = 8


class StepsGeometry(NamedTuple):
    """What both sides must agree on; stands in the arena's header."""

    max_rows: int  # sequences that hold state at once (more than max_entries: run-ahead, preemption)
    max_entries: int  # sequences in one step
    max_samples: int  # sampled positions in one step (speculation samples several of a sequence)
    max_tokens: int  # tokens of a sequence (context length)
    max_pages: int  # page table entries of a sequence

    def as_meta(self) -> dict[str, int]:
        return {**self._asdict(), "slots": SLOTS, "max_top": MAX_TOP, "max_bias": MAX_BIAS}


class Steps(NamedTuple):
    """Views of the arena, in the order of the file. A plain tuple of arrays: jitted code takes it.

    control     (CONTROL_WORDS,) u64
    slot_head   (SLOTS, SLOT_WORDS) i64    step, generation, entries, samples
    entries     (SLOTS, max_entries, ENTRY_WORDS) i32
                row; start: first position computed; count: positions computed; samples: how many
                of the last of them are sampled (0: a chunk of the prompt; 1: the usual; more:
                verification of draft tokens); sample_base: where their outputs go
    out_token   (SLOTS, max_samples) i32   -1 where the logits were not finite
    out_logprob (SLOTS, max_samples) f32
    out_top_id  (SLOTS, max_samples, MAX_TOP) i32
    out_top_lp  (SLOTS, max_samples, MAX_TOP) f32
    timing      (SLOTS, 4) i64             CLOCK_MONOTONIC ns: seen, begun, finished; spare
    row_ints    (max_rows, ROW_INTS) i64   ORDER: sampler steps, 4 bits each, lowest first, 0 ends;
                SERIAL: names the row's sequence for ever (see above)
    row_floats  (max_rows, ROW_FLOATS) f32
    mask_ids    (max_rows, MAX_MASK) i32   stop ids (masked while min_tokens or ignore_eos say so)
    bias_ids    (max_rows, MAX_BIAS) i32
    bias        (max_rows, MAX_BIAS) f32
    tables      (max_rows, max_pages) i32  page numbers
    tokens      (max_rows, max_tokens + 1) i32
    """

    control: np.ndarray
    slot_head: np.ndarray
    entries: np.ndarray
    out_token: np.ndarray
    out_logprob: np.ndarray
    out_top_id: np.ndarray
    out_top_lp: np.ndarray
    timing: np.ndarray
    row_ints: np.ndarray
    row_floats: np.ndarray
    mask_ids: np.ndarray
    bias_ids: np.ndarray
    bias: np.ndarray
    tables: np.ndarray
    tokens: np.ndarray


def _fields(g: StepsGeometry) -> list[tuple[tuple[int, ...], type]]:
    return [
        ((CONTROL_WORDS,), np.uint64),
        ((SLOTS, SLOT_WORDS), np.int64),
        ((SLOTS, g.max_entries, ENTRY_WORDS), np.int32),
        ((SLOTS, g.max_samples), np.int32),
        ((SLOTS, g.max_samples), np.float32),
        ((SLOTS, g.max_samples, MAX_TOP), np.int32),
        ((SLOTS, g.max_samples, MAX_TOP), np.float32),
        ((SLOTS, 4), np.int64),
        ((g.max_rows, ROW_INTS), np.int64),
        ((g.max_rows, ROW_FLOATS), np.float32),
        ((g.max_rows, MAX_MASK), np.int32),
        ((g.max_rows, MAX_BIAS), np.int32),
        ((g.max_rows, MAX_BIAS), np.float32),
        ((g.max_rows, g.max_pages), np.int32),
        ((g.max_rows, g.max_tokens + 1), np.int32),
    ]


def pack_order(names: tuple[str, ...]) -> int:
    """Sampler steps as ORDER holds them; empty: the default order. `KeyError` names an unknown one."""
    packed = 0
    for place, name in enumerate(names or DEFAULT_ORDER):
        packed |= SAMPLER_STEPS[name] << (4 * place)
    return packed


def steps_bytes(g: StepsGeometry) -> int:
    """Size of the arena's contents in bytes."""
    return sum(align(int(np.prod(s, dtype=np.int64)) * np.dtype(t).itemsize) for s, t in _fields(g))


def _views(arena: Arena, g: StepsGeometry) -> Steps:
    offset, views = 0, []
    for shape, dtype in _fields(g):
        view = arena.view(offset, shape, dtype)
        views.append(view)
        offset += align(view.nbytes)
    return Steps(*views)


def blank_steps(g: StepsGeometry) -> Steps:
    """The same arrays in private memory, zeroed: for simulations and tests of one process."""
    return Steps(*(np.zeros(shape, dtype) for shape, dtype in _fields(g)))


def create_steps(path: Path, g: StepsGeometry, digest: bytes, generation: int = 1) -> tuple[Arena, Steps]:
    """The scheduler's call. Raises `ArenaError` when it does not fit."""
    arena = Arena.create(path, KIND, LAYOUT, steps_bytes(g), g.as_meta(), digest, generation)
    steps = _views(arena, g)
    steps.control[GENERATION] = generation
    return arena, steps


def attach_steps(path: Path, digest: bytes | None = None, own: bool = False) -> tuple[Arena, Steps, StepsGeometry]:
    """Everybody else's call (and a restarted scheduler's, with `own`)."""
    arena = Arena.attach(path, KIND, LAYOUT, digest=digest, own=own)
    g = StepsGeometry(*(int(arena.meta[name]) for name in StepsGeometry._fields))
    return arena, _views(arena, g), g
