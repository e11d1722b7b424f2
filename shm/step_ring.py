"""The step arena: the ring of steps and the table of rows between the scheduler and the ranks of one worker group.

A *row* is the state of one running sequence: its tokens, its page table, its parameters.  A *slot* is one step of the
ring: its rows, their positions, and the places of its samples.  Tokens live in rows, so a step needs no values of the
previous step: the input at position p is `tokens[row, p]`, which the worker itself wrote when it sampled that token.
The scheduler can therefore publish step n+1 before step n is done.

    slot        s % SLOTS          states of step s
                                   unpublished  HEAD < s           only the scheduler reads or writes the slot
                                   published    DONE < s <= HEAD   the ranks read it and write its outputs
                                   done         s <= DONE          the outputs are final, until step s + SLOTS
                                                                   is written

Step numbers grow from 1 for the lifetime of the arena.  The scheduler publishes by storing `control[HEAD] = s`
(release).  Rank 0 acknowledges by storing `control[DONE] = s` (release) after all ranks have finished, and sends a
doorbell if `control[WAKE_AT]` is between 1 and s.  At most `SLOTS - 1` steps are unacknowledged.  A step that is
repeated after a worker's death reads the same tokens and writes the same bytes.

The scheduler writes everything except
    rank 0      control[DONE], [PROGRESS], [WORKER_SLEEPING], [WORKER_GENERATION]; `timing`
    the mask process of the scheduler  `masks`, `mask_ready`
    one rank    the outputs (`out_*`) of a sample, and with them `tokens[row, start + count]` for an entry with
                `samples == 1`, before DONE moves; likewise the outputs (`pool*`) of a pooled entry

The scheduler writes a row's parameters, page table and known tokens before it publishes the first slot that names the
row, and reuses the row only when no unacknowledged slot names it.  To give a row to another sequence it first stores a
non-zero `row_ints[row, SERIAL]` that was never used before (serials grow from the clock's ns at start), then the
tokens.  A reader that copies tokens and afterwards still finds the expected serial has copied that sequence's tokens:
`kv` hashes pages late in this way, and hashes none for serial 0.  The scheduler may append table entries and tokens
beyond those that published steps read at any time.

A row whose output is constrained has token masks.  The mask for the token after n tokens is in slot n % MASK_SLOTS of
the row, and valid when `mask_ready` has the tag (epoch, n) of the entry that samples the token.  It is written while
the step computes; a sample whose mask does not come in time is NO_MASK and is computed again in a later step.

A sample before OUTPUT_START, in a row with SCORED, draws nothing: the token after it is known.  It is *scored*: its
outputs are the token's rank, its log probability and the SCORED - 1 highest ones.

A *pooled* entry samples nothing: the final hidden states of some of its positions are summed up, for embeddings.  Its
SAMPLE_BASE is its place in `pooled`, which no other entry of the step has.  Sums are of fixed-point numbers, so that
the sum over a prompt is the same however steps divide it.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np

from shm.arena import Arena, ArenaError, align
from shm.sampler_steps import DEFAULT_ORDER, SAMPLER_STEPS

KIND = "steps"
LAYOUT = 6
SLOTS = 16  # twice the steps that may be unacknowledged, so that an observer still finds finished ones
MAX_TOP = 20  # top logprobs of a sample
MAX_BIAS = 300  # logit_bias entries of a sequence
MAX_MASK = 32  # stop ids of a sequence
MAX_RANKS = 64
MASK_SLOTS = 8  # token masks of a row: of its next position and of up to 7 draft tokens
MAX_POOLED = 8  # pooled entries of a step
POOL_SCALE = 30  # binary digits after the point of a pooled value
MAX_HIDDEN = 32768.0  # of the magnitude of a pooled value
MAX_POOLED_POSITIONS = 1 << 17  # of one sum, which then fits into 63 bits
NO_MASK = -3  # output of a sample whose token mask was not there in time, and of those that depend on it

# Indices into `control` (u64): one cache line (8 words) for each writer and purpose.
HEAD = 0  # scheduler: last published step
GENERATION = 8  # scheduler: the ring's generation
WAKE_AT = 16  # scheduler: it sleeps until a doorbell after this step; 0: it is awake
DONE = 24  # rank 0: last finished step
PROGRESS = 32  # rank 0: grows with every layer of every step
WORKER_GENERATION = 33  # rank 0: the generation that it serves
WORKER_SLEEPING = 40  # rank 0: non-zero while it sleeps until a doorbell
CONTROL_WORDS = 64 + 8 * MAX_RANKS  # the rest is unused: barriers are in the activations arena
assert CONTROL_WORDS == 576

# Columns of `entries` (i32)
ROW, START, COUNT, SAMPLES, SAMPLE_BASE, ENTRY_FLAGS, POOL_FIRST, POOL_COUNT = range(8)
ENTRY_WORDS = 8

# Columns of `slot_head` (i64)
SLOT_STEP, SLOT_GENERATION, SLOT_ENTRIES, SLOT_SAMPLES = range(4)
SLOT_WORDS = 8

# Columns of `row_ints` (i64): parameters of a sequence
(SEED, CHOICE, OUTPUT_START, TOP_K, LOGPROBS, MIN_TOKENS, IGNORE_EOS, N_BIAS, N_MASK, ORDER) = range(10)
SERIAL = 10
(DRY_ALLOWED, DRY_LAST_N, HAS_BREAKERS) = range(11, 14)
SCORED = 14
ADAPTER = 15
ROW_INTS = 16

# Columns of `row_floats` (f32)
(TEMPERATURE, TOP_P, REPETITION, FREQUENCY, PRESENCE) = range(5)
(MIN_P, TYPICAL_P, TOP_N_SIGMA, DRY_MULTIPLIER, DRY_BASE, XTC_PROBABILITY, XTC_THRESHOLD) = range(5, 12)
ROW_FLOATS = 16


class StepsGeometry(NamedTuple):
    """The geometry that both sides must agree on; stored in the arena's header."""

    max_rows: int  # sequences with state (more than max_entries: run-ahead, preemption)
    max_entries: int  # sequences in one step
    max_samples: int  # sampled positions in one step (speculative decoding samples several of a sequence)
    max_tokens: int  # tokens of a sequence (context length)
    max_pages: int  # page table entries of a sequence
    mask_words: int = 0  # u32 words of a token mask; 0: rows have no masks
    pooled_width: int = 0  # values of a hidden state; 0: entries cannot be pooled

    def as_meta(self) -> dict[str, int]:
        """The fields that `attach` compares."""
        return {**self._asdict(), "slots": SLOTS, "max_top": MAX_TOP, "max_bias": MAX_BIAS}


class Steps(NamedTuple):
    """Views of the arena, in the order of the file. A plain tuple of arrays, which jitted code accepts.

    control     (CONTROL_WORDS,) u64
    slot_head   (SLOTS, SLOT_WORDS) i64    step, generation, entries, samples
    entries     (SLOTS, max_entries, ENTRY_WORDS) i32
                row; start: first position computed; count: positions computed; samples: how many
                of the last of them are sampled (0: a chunk of the prompt; 1: decoding; more:
                verification of draft tokens); sample_base: index of their first output;
                flags: the epoch of the row's token masks, 0: its samples need none;
                pool_first, pool_count: the computed positions that are pooled, counted from `start`
    out_token   (SLOTS, max_samples) i32   -1 where the logits were not finite, or NO_MASK; the rank of a scored
                token, from 1
    out_logprob (SLOTS, max_samples) f32
    out_top_id  (SLOTS, max_samples, MAX_TOP) i32
    out_top_lp  (SLOTS, max_samples, MAX_TOP) f32
    timing      (SLOTS, 4) i64             CLOCK_MONOTONIC ns: seen, begun, finished; spare
    row_ints    (max_rows, ROW_INTS) i64   ORDER: sampler steps, 4 bits each, lowest first, 0 ends;
                SERIAL: identifies the row's sequence uniquely (see above); SCORED: 0: prompt tokens are not
                scored, n: they are, with n - 1 top logprobs; ADAPTER: tag of the sequence's LoRA adapter
                (`adapter_tag`), 0: none
    row_floats  (max_rows, ROW_FLOATS) f32
    mask_ids    (max_rows, MAX_MASK) i32   stop ids (masked while min_tokens or ignore_eos applies)
    bias_ids    (max_rows, MAX_BIAS) i32
    bias        (max_rows, MAX_BIAS) f32
    tables      (max_rows, max_pages) i32  page numbers
    tokens      (max_rows, max_tokens + 1) i32
    mask_ready  (max_rows, MASK_SLOTS) i64             tag of the mask beside it, 0: none, < 0: being
                computed (`begun_tag`)
    masks       (max_rows, MASK_SLOTS, mask_words) u32 bit t % 32 of word t // 32: token t may be sampled
    pool_states (SLOTS, MAX_POOLED) i32    outcome of a pooled entry: the positions pooled, -1 where a value was not
                finite or beyond MAX_HIDDEN, -2 for a refused entry
    pooled      (SLOTS, MAX_POOLED, pooled_width) i64  sums of final hidden states, in units of 2^-POOL_SCALE
    breakers    (max_rows, mask_words) u32 bit t % 32 of word t // 32: token t breaks repetitions (DRY);
                only if HAS_BREAKERS
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
    mask_ready: np.ndarray
    masks: np.ndarray
    pool_states: np.ndarray
    pooled: np.ndarray
    breakers: np.ndarray


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
        ((g.max_rows, MASK_SLOTS), np.int64),
        ((g.max_rows, MASK_SLOTS, g.mask_words), np.uint32),
        ((SLOTS, MAX_POOLED), np.int32),
        ((SLOTS, MAX_POOLED, g.pooled_width), np.int64),
        ((g.max_rows, g.mask_words), np.uint32),
    ]


def mask_words(vocab_size: int) -> int:
    """u32 words of a token mask."""
    return -(-vocab_size // 32)


def mask_tag(epoch: int, known: int) -> int:
    """The tag of the mask for the token after `known` tokens. An epoch names one continuation of a row's tokens."""
    return (epoch << 32) | known


def begun_tag(serial: int) -> int:
    """Instead of a tag while the mask is computed, for the sequence with that serial number (0: any): negative."""
    return -(serial or 1)


def pack_order(names: tuple[str, ...]) -> int:
    """Pack sampler steps for ORDER; empty: the default order. `KeyError` names an unknown step."""
    packed = 0
    for place, name in enumerate(names or DEFAULT_ORDER):
        packed |= SAMPLER_STEPS[name] << (4 * place)
    return packed


def adapter_tag(digest: str) -> int:
    """How a row names the adapter with that SHA-256 (hex): a positive i64; 0 for ""."""
    return (int(digest[:16], 16) >> 1) | 1 if digest else 0


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
    """The same arrays in private memory, zeroed: for simulations and tests in one process."""
    return Steps(*(np.zeros(shape, dtype) for shape, dtype in _fields(g)))


def create_steps(path: Path, g: StepsGeometry, digest: bytes, generation: int = 1) -> tuple[Arena, Steps]:
    """Create the arena; for the scheduler. Raises `ArenaError` when it does not fit."""
    arena = Arena.create(path, KIND, LAYOUT, steps_bytes(g), g.as_meta(), digest, generation)
    steps = _views(arena, g)
    steps.control[GENERATION] = generation
    return arena, steps


def attach_steps(path: Path, digest: bytes | None = None, own: bool = False) -> tuple[Arena, Steps, StepsGeometry]:
    """Attach to the arena; for ranks, observers and, with `own`, a restarted scheduler. Raises as `Arena.attach`."""
    arena = Arena.attach(path, KIND, LAYOUT, digest=digest, own=own)
    try:
        g = StepsGeometry(*(int(arena.meta[name]) for name in StepsGeometry._fields))
        return arena, _views(arena, g), g
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        arena.close()
        raise ArenaError(f"{path}: geometry in the header is unusable: {error!r}") from None
    except ArenaError:
        arena.close()
        raise
