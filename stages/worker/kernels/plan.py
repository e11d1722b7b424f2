"""The plan of a step: rank 0 reads the slot, checks every number in it, and writes what all ranks then use.

Nothing that the scheduler wrote is used unchecked: rows, positions, counts, sample places, page
numbers and token ids are compared with their bounds, and the page tables are copied, so that no later change
can lead a kernel astray.  An entry that fails gets `BAD_ENTRY` as its tokens and is left out.

In i64 words at PLAN:

    0   entries kept   1  tokens   2  samples   3  whether any entry computes more than one position
    4   slot           5  whether any partial results of attention are used
    8   entries: ENTRY_PLAN words each: row, start, count, samples, sample_base, first token, first partial
        (-1: none), byte of its page table at PLAN_TABLES
    then tokens: position, id, entry (3 words each), then samples: token, place in the outputs, entry.
"""

from __future__ import annotations

from numba import njit

from shm import step_ring
from shm.pages import SEGMENT
from stages.worker.kernels import parameter_block as c
from stages.worker.kernels.entries import INNER
from stages.worker.kernels.parameter_block import word
from stages.worker.kernels.simd import get_i32, get_i64, put_i32, put_i64

BAD_ENTRY = -2
ENTRIES_KEPT, TOKENS, SAMPLES, HAS_CHUNKS, SLOT, HAS_PARTIALS = range(6)
HEAD = 8
(P_ROW, P_START, P_COUNT, P_SAMPLES, P_SAMPLE_BASE, P_TOKEN, P_PARTIAL, P_TABLE) = range(8)
ENTRY_PLAN = 8
TOKEN_PLAN = 3
SAMPLE_PLAN = 3
SPLIT_UNITS = 16  # with fewer (entry, kv head) units than this, segments are units of their own

_SLOTS, _SLOT_WORDS, _ENTRY_WORDS = step_ring.SLOTS, step_ring.SLOT_WORDS, step_ring.ENTRY_WORDS
_N_ENTRIES, _STEP = step_ring.SLOT_ENTRIES, step_ring.SLOT_STEP
_ROW, _START, _COUNT, _SAMPLES, _BASE = (
    step_ring.ROW,
    step_ring.START,
    step_ring.COUNT,
    step_ring.SAMPLES,
    step_ring.SAMPLE_BASE,
)


def plan_words(max_entries: int, max_tokens: int, max_samples: int) -> int:
    return HEAD + ENTRY_PLAN * max_entries + TOKEN_PLAN * max_tokens + SAMPLE_PLAN * max_samples


@njit(**INNER)
def entry_at(ctx, entry):
    return word(ctx, c.PLAN) + 8 * (HEAD + ENTRY_PLAN * entry)


@njit(**INNER)
def token_at(ctx, token):
    return word(ctx, c.PLAN) + 8 * (HEAD + ENTRY_PLAN * word(ctx, c.MAX_ENTRIES) + TOKEN_PLAN * token)


@njit(**INNER)
def sample_at(ctx, sample):
    words = HEAD + ENTRY_PLAN * word(ctx, c.MAX_ENTRIES) + TOKEN_PLAN * word(ctx, c.STEP_TOKENS)
    return word(ctx, c.PLAN) + 8 * (words + SAMPLE_PLAN * sample)


@njit(**INNER)
def _is_sound(ctx, row, start, count, samples, base, n_tokens, n_samples):
    """Whether the numbers of an entry are within their bounds; pages and ids are looked at later."""
    return (
        0 <= row < word(ctx, c.MAX_ROWS)
        and start >= 0
        and 1 <= count <= word(ctx, c.STEP_TOKENS) - n_tokens
        and start + count <= min(word(ctx, c.MAX_POSITIONS), word(ctx, c.MAX_TOKENS))
        and 0 <= samples <= min(count, word(ctx, c.STEP_SAMPLES) - n_samples)
        and (samples == 0 or 0 <= base <= word(ctx, c.MAX_SAMPLES) - samples)
    )


@njit(**INNER)
def _copy_table(ctx, row, entry, positions):
    """Copy the page table that `positions` positions need; False when a page does not exist."""
    page_tokens = word(ctx, c.PAGE_TOKENS)
    n = (positions + page_tokens - 1) // page_tokens
    if n > word(ctx, c.MAX_PAGES):
        return False
    source = word(ctx, c.TABLES) + row * word(ctx, c.TABLES_STRIDE)
    target = word(ctx, c.PLAN_TABLES) + entry * word(ctx, c.TABLES_STRIDE)
    n_pages = word(ctx, c.N_PAGES)
    for i in range(n):
        page = get_i32(source + 4 * i)
        if page < 0 or page >= n_pages:
            return False
        put_i32(target + 4 * i, page)
    return True


@njit(**INNER)
def _copy_tokens(ctx, row, start, count, entry, first):
    """Plan the entry's tokens; False when an id is none of the vocabulary's."""
    source = word(ctx, c.TOKENS) + row * word(ctx, c.TOKENS_STRIDE)
    vocab = word(ctx, c.VOCAB)
    for i in range(count):
        token = get_i32(source + 4 * (start + i))
        if token < 0 or token >= vocab:
            return False
        at = token_at(ctx, first + i)
        put_i64(at, start + i)
        put_i64(at + 8, token)
        put_i64(at + 16, entry)
    return True


@njit(**INNER)
def _refuse(ctx, slot, samples, base):
    """Say so in the places of the entry's samples, as far as these exist."""
    if base < 0 or samples < 1:
        return
    out = word(ctx, c.OUT_TOKEN) + slot * word(ctx, c.OUT_STRIDE)
    for i in range(base, min(base + samples, word(ctx, c.MAX_SAMPLES))):
        put_i32(out + 4 * i, BAD_ENTRY)


@njit(**INNER)
def make_plan(ctx, step):
    """The plan of `step`, for rank 0; returns how many entries were refused, -1 for a slot of another step."""
    slot = step % _SLOTS
    head = word(ctx, c.SLOT_HEAD) + 8 * _SLOT_WORDS * slot
    plan = word(ctx, c.PLAN)
    put_i64(plan + 8 * SLOT, slot)
    for i in (ENTRIES_KEPT, TOKENS, SAMPLES, HAS_CHUNKS, HAS_PARTIALS):
        put_i64(plan + 8 * i, 0)
    if get_i64(head + 8 * _STEP) != step:
        return -1
    entries = word(ctx, c.ENTRIES) + slot * word(ctx, c.ENTRIES_STRIDE)
    kept = n_tokens = n_samples = refused = chunks = 0
    for i in range(min(max(get_i64(head + 8 * _N_ENTRIES), 0), word(ctx, c.MAX_ENTRIES))):
        at = entries + 4 * _ENTRY_WORDS * i
        row, start, count = get_i32(at + 4 * _ROW), get_i32(at + 4 * _START), get_i32(at + 4 * _COUNT)
        samples, base = get_i32(at + 4 * _SAMPLES), get_i32(at + 4 * _BASE)
        if not (
            _is_sound(ctx, row, start, count, samples, base, n_tokens, n_samples)
            and _copy_table(ctx, row, kept, start + count)
            and _copy_tokens(ctx, row, start, count, kept, n_tokens)
        ):
            _refuse(ctx, slot, samples, base)
            refused += 1
            continue
        entry = entry_at(ctx, kept)
        put_i64(entry + 8 * P_ROW, row)
        put_i64(entry + 8 * P_START, start)
        put_i64(entry + 8 * P_COUNT, count)
        put_i64(entry + 8 * P_SAMPLES, samples)
        put_i64(entry + 8 * P_SAMPLE_BASE, base)
        put_i64(entry + 8 * P_TOKEN, n_tokens)
        put_i64(entry + 8 * P_PARTIAL, -1)
        put_i64(entry + 8 * P_TABLE, kept * word(ctx, c.TABLES_STRIDE))
        for j in range(samples):
            sample = sample_at(ctx, n_samples + j)
            put_i64(sample, n_tokens + count - samples + j)
            put_i64(sample + 8, base + j)
            put_i64(sample + 16, kept)
        if count > 1:
            chunks = 1
        kept += 1
        n_tokens += count
        n_samples += samples
    put_i64(plan + 8 * ENTRIES_KEPT, kept)
    put_i64(plan + 8 * TOKENS, n_tokens)
    put_i64(plan + 8 * SAMPLES, n_samples)
    put_i64(plan + 8 * HAS_CHUNKS, chunks)
    if kept * word(ctx, c.N_KV_HEADS) < SPLIT_UNITS:
        _share_segments(ctx, kept)
    return refused


@njit(**INNER)
def _share_segments(ctx, kept):
    """Give entries of one query and several segments places for partial results, while there are any."""
    used = 0
    heads = word(ctx, c.N_HEADS)
    for i in range(kept):
        entry = entry_at(ctx, i)
        segments = word(entry, P_START) // SEGMENT + 1
        if word(entry, P_COUNT) == 1 and segments > 1 and used + segments * heads <= word(ctx, c.N_PARTIALS):
            put_i64(entry + 8 * P_PARTIAL, used)
            used += segments * heads
    put_i64(word(ctx, c.PLAN) + 8 * HAS_PARTIALS, 1 if used else 0)
