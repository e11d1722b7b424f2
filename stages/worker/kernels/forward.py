"""A whole step in one jitted function: what every rank runs between two doorbells.

    run_step(ctx)

Ranks split matrices by groups of 16 rows, and norms, attention and samples by token, unit and row.  A value
is computed by one rank, in an order that does not depend on the split, so no rank count changes a bit.
They meet where data crosses:

    plan ready | embedding | per layer: q, k, v | [keys of chunks] | mixed heads | x | gated | x | ... logits | done

With few tokens every rank norms and quantizes for itself (NORM is its own then); with many they share the
work and meet once more.  Nothing is allocated here; the table `ctx` says where everything is (context.py).
"""

from __future__ import annotations

from numba import njit

from shm import step_ring
from shm.atomics import atomic_add, cycles, store_release
from shm.barrier import wait
from shm.pages import SEGMENT
from stages.worker.kernels import attention
from stages.worker.kernels import elementwise as ew
from stages.worker.kernels import parameter_block as c
from stages.worker.kernels import plan as p
from stages.worker.kernels.entries import INNER, MERGED, call_entry, run_entry
from stages.worker.kernels.format_traits import IS_DENSE, group_bytes, trait
from stages.worker.kernels.parameter_block import word
from stages.worker.kernels.quantize_activations import RECORD, quantize_row
from stages.worker.kernels.simd import get_f32, get_i32, get_i64, prefetch, put_f32, put_i32, put_i64

GROUP = 16
GATED_BYTES = 64 * 1024  # of gate, and of up: what is computed at once before the two are multiplied
ASK_BYTES = 8192  # of weights that are asked for at a barrier
MIN_CHUNK = 2  # groups: 32 rows make a record
PHASES = ("embed", "norm", "qkv", "keys", "attention", "output", "gate_up", "down", "head", "sample", "wait")
(EMBED, NORM, QKV, KEYS, ATTENTION, OUTPUT, GATE_UP, DOWN, HEAD, SAMPLE, WAIT) = range(len(PHASES))
_OUTPUT_START, _MAX_TOP = 8 * step_ring.OUTPUT_START, step_ring.MAX_TOP
_ROW_INTS, _ROW_FLOATS, _MAX_MASK = 8 * step_ring.ROW_INTS, 4 * step_ring.ROW_FLOATS, 4 * step_ring.MAX_MASK
_MAX_BIAS = 4 * step_ring.MAX_BIAS
_P_ENTRIES, _P_TOKENS, _P_SAMPLES, _P_CHUNKS, _P_SLOT = (p.ENTRIES_KEPT, p.TOKENS, p.SAMPLES, p.HAS_CHUNKS, p.SLOT)


def gated_bytes(max_tokens: int) -> int:
    """Scratch for gate and up of one chunk of rows."""
    return 2 * max(GATED_BYTES, max_tokens * MIN_CHUNK * GROUP * 4)


# ------------------------------------------------------------------ shares, barriers, clocks


@njit(**INNER)
def _share(ctx, n):
    """This rank's part of 0 .. n-1."""
    rank, ranks = word(ctx, c.RANK), word(ctx, c.RANKS)
    return n * rank // ranks, n * (rank + 1) // ranks


@njit(**INNER)
def _hidden_share(ctx):
    """This rank's groups of rows of gate and up: whole records of what comes out."""
    first, end = _share(ctx, word(ctx, c.FFN) // (MIN_CHUNK * GROUP))
    return first * MIN_CHUNK, end * MIN_CHUNK


@njit(**INNER)
def _begin(ctx):
    return cycles() if word(ctx, c.PHASES) else 0


@njit(**INNER)
def _spent(ctx, phase, since):
    """Count the cycles since `since` for a phase, when phases are counted; the time now."""
    phases = word(ctx, c.PHASES)
    if phases == 0:
        return 0
    now = cycles()
    put_i64(phases + 8 * phase, get_i64(phases + 8 * phase) + now - since)
    return now


@njit(**INNER)
def _meet(ctx):
    since = _begin(ctx)
    together = wait(word(ctx, c.BARRIER), word(ctx, c.LINES), word(ctx, c.RANK), word(ctx, c.RANKS))
    _spent(ctx, WAIT, since)
    return together


@njit(**INNER)
def _meet_before(ctx, kind, w, columns, share, skip):
    """As `_meet`, asking meanwhile for the weights that come next: of the matrix at `w`, this rank's `share` of
    groups of rows from byte `skip` of it on.  Without it memory rests at every barrier."""
    group = group_bytes(kind, columns)
    ask = w + share[0] * group + skip
    ask_end = min(ask + ASK_BYTES, w + share[1] * group)
    since = _begin(ctx)
    together = wait(word(ctx, c.BARRIER), word(ctx, c.LINES), word(ctx, c.RANK), word(ctx, c.RANKS), ask, ask_end)
    _spent(ctx, WAIT, since)
    return together


@njit(**INNER)
def _meet_before_output(ctx, layer, skip):
    columns = word(ctx, c.N_HEADS) * word(ctx, c.HEAD_DIM)
    return _meet_before(
        ctx, word(layer, c.O_FORMAT), word(layer, c.O), columns, _share(ctx, word(ctx, c.WIDTH) // GROUP), skip
    )


# ------------------------------------------------------------------ embedding and norms


@njit(**MERGED)
def _embed(ctx, tokens):
    """X and TURNS of this rank's tokens."""
    first, end = _share(ctx, tokens)
    width, pairs = word(ctx, c.WIDTH), word(ctx, c.N_ROT) // 2
    for t in range(first, end):
        at = p.token_at(ctx, t)
        position, token = get_i64(at), get_i64(at + 8)
        x = word(ctx, c.X) + 4 * t * width
        run_entry(word(ctx, c.EMBED_ROW), (word(ctx, c.EMBEDDING_FORMAT), word(ctx, c.EMBEDDING), width, token, x))
        high, low = position // 256 * pairs * 4, position % 256 * pairs * 4
        turns = word(ctx, c.TURNS) + t * word(ctx, c.TURNS_STRIDE)
        ew.turn(
            word(ctx, c.COS_HI) + high,
            word(ctx, c.SIN_HI) + high,
            word(ctx, c.COS_LO) + low,
            word(ctx, c.SIN_LO) + low,
            turns,
            turns + word(ctx, c.TURNS_STRIDE) // 2,
            pairs,
        )


@njit(**MERGED)
def _norm(ctx, weight, rows, of_samples):
    """Norm and quantize X (of samples: their rows of it). True; False: the group is given up.

    The result is at `_normed`, `_normed_q`.
    """
    few = rows <= c.FEW
    first, end = (0, rows) if few else _share(ctx, rows)
    width = word(ctx, c.WIDTH)
    eps = get_f32(ctx + 8 * c.EPS)
    normed, records = _normed(ctx, rows), _normed_q(ctx, rows)
    for i in range(first, end):
        t = get_i64(p.sample_at(ctx, i)) if of_samples else i
        y = normed + 4 * i * width
        ew.rms_norm(word(ctx, c.X) + 4 * t * width, weight, y, width, eps)
        quantize_row(y, width, records + i * word(ctx, c.NORM_Q_STRIDE))
    return few or _meet(ctx)


@njit(**INNER)
def _normed(ctx, rows):
    return word(ctx, c.OWN_NORM) if rows <= c.FEW else word(ctx, c.NORM)


@njit(**INNER)
def _normed_q(ctx, rows):
    return word(ctx, c.OWN_NORM_Q) if rows <= c.FEW else word(ctx, c.NORM_Q)


@njit(**INNER)
def _project(ctx, kind, w, columns, rows, floats, records, records_stride, tokens, out, out_stride, first, end):
    """Groups first .. end-1 of a matrix times what its format wants: f32 rows or records."""
    x, stride = records, records_stride
    if trait(kind, IS_DENSE):
        x, stride = floats, 4 * columns
    scratch = word(ctx, c.MULTIPLY)
    run_entry(word(ctx, c.MATMUL), (kind, w, columns, first, end, x, stride, tokens, out, out_stride, scratch))


# ------------------------------------------------------------------ q, k, v


@njit(**INNER)
def _project_normed(ctx, kind, w, bias, rows, tokens, out):
    """This rank's groups of q, k or v, with their bias, for all tokens, into QKV at `out`."""
    width = word(ctx, c.WIDTH)
    stride = word(ctx, c.QKV_STRIDE)
    first, end = _share(ctx, rows // GROUP)
    _project(
        ctx,
        kind,
        w,
        width,
        rows,
        _normed(ctx, tokens),
        _normed_q(ctx, tokens),
        word(ctx, c.NORM_Q_STRIDE),
        tokens,
        out,
        stride,
        first,
        end,
    )
    if bias:
        for t in range(tokens):
            ew.add(out + t * stride + 64 * first, bias + 64 * first, GROUP * (end - first))


@njit(**MERGED)
def _qkv(ctx, layer, tokens):
    dim = word(ctx, c.HEAD_DIM)
    q_rows, kv_rows = word(ctx, c.N_HEADS) * dim, word(ctx, c.N_KV_HEADS) * dim
    out = word(ctx, c.QKV)
    _project_normed(ctx, word(layer, c.Q_FORMAT), word(layer, c.Q), word(layer, c.Q_BIAS), q_rows, tokens, out)
    out += 4 * q_rows
    _project_normed(ctx, word(layer, c.K_FORMAT), word(layer, c.K), word(layer, c.K_BIAS), kv_rows, tokens, out)
    out += 4 * kv_rows
    _project_normed(ctx, word(layer, c.V_FORMAT), word(layer, c.V), word(layer, c.V_BIAS), kv_rows, tokens, out)


@njit(**INNER)
def _rotate(ctx, token, x, y):
    turns = word(ctx, c.TURNS) + token * word(ctx, c.TURNS_STRIDE)
    sine = turns + word(ctx, c.TURNS_STRIDE) // 2
    if word(ctx, c.HALVES):
        ew.rotate_halves(x, y, turns, sine, word(ctx, c.N_ROT), word(ctx, c.HEAD_DIM))
    else:
        ew.rotate(x, y, turns, sine, word(ctx, c.N_ROT), word(ctx, c.HEAD_DIM))


@njit(**INNER)
def _pack_queries(ctx, token, queries, kv_head, scratch):
    """The rotated queries of a block into Q of the attention scratch: rows (query, head of the group)."""
    dim = word(ctx, c.HEAD_DIM)
    group = word(ctx, c.N_HEADS) // word(ctx, c.N_KV_HEADS)
    to = scratch
    for t in range(token, token + queries):
        x = word(ctx, c.QKV) + t * word(ctx, c.QKV_STRIDE) + 4 * kv_head * group * dim
        for g in range(group):
            _rotate(ctx, t, x + 4 * g * dim, to)
            to += 4 * dim


@njit(**INNER)
def _table(ctx, entry):
    return word(ctx, c.PLAN_TABLES) + word(entry, p.P_TABLE)


# ------------------------------------------------------------------ what follows attention


@njit(**INNER)
def _quantize_mixed(ctx, token, kv_head):
    """The records of a group's heads, when these are whole records."""
    n = word(ctx, c.N_HEADS) // word(ctx, c.N_KV_HEADS) * word(ctx, c.HEAD_DIM)
    if n % 32 == 0:
        x = word(ctx, c.MIXED) + token * word(ctx, c.MIXED_STRIDE) + 4 * kv_head * n
        to = word(ctx, c.MIXED_Q) + token * word(ctx, c.MIXED_Q_STRIDE) + kv_head * n // 32 * RECORD
        quantize_row(x, n, to)


@njit(**MERGED)
def _output(ctx, layer, tokens):
    """X += W_o mixed, this rank's rows."""
    columns = word(ctx, c.N_HEADS) * word(ctx, c.HEAD_DIM)
    _residual(
        ctx,
        word(layer, c.O_FORMAT),
        word(layer, c.O),
        columns,
        word(ctx, c.MIXED),
        word(ctx, c.MIXED_Q),
        word(ctx, c.MIXED_Q_STRIDE),
        tokens,
    )


@njit(**INNER)
def _residual(ctx, kind, w, columns, floats, records, records_stride, tokens):
    """X += W y, this rank's rows."""
    width = word(ctx, c.WIDTH)
    first, end = _share(ctx, width // GROUP)
    x, y = word(ctx, c.X), word(ctx, c.Y)
    _project(ctx, kind, w, columns, width, floats, records, records_stride, tokens, y, 4 * width, first, end)
    for t in range(tokens):
        at = 4 * t * width + 64 * first
        ew.add(x + at, y + at, GROUP * (end - first))


@njit(**MERGED)
def _gate_up(ctx, layer, tokens):
    """HIDDEN of this rank's rows: act(W_gate x) * (W_up x), and its records."""
    width, ffn = word(ctx, c.WIDTH), word(ctx, c.FFN)
    floats, records, stride = _normed(ctx, tokens), _normed_q(ctx, tokens), word(ctx, c.NORM_Q_STRIDE)
    first, end = _hidden_share(ctx)
    at_once = max(MIN_CHUNK, GATED_BYTES // (64 * tokens) // MIN_CHUNK * MIN_CHUNK)
    gate = word(ctx, c.GATED)
    keep = trait(word(layer, c.DOWN_FORMAT), IS_DENSE) != 0
    while first < end:
        n = min(at_once, end - first)
        up = gate + 64 * tokens * n
        # matmul writes group g at 64 * g: let the first one land at the start.
        _project(
            ctx,
            word(layer, c.GATE_FORMAT),
            word(layer, c.GATE),
            width,
            ffn,
            floats,
            records,
            stride,
            tokens,
            gate - 64 * first,
            64 * n,
            first,
            first + n,
        )
        _project(
            ctx,
            word(layer, c.UP_FORMAT),
            word(layer, c.UP),
            width,
            ffn,
            floats,
            records,
            stride,
            tokens,
            up - 64 * first,
            64 * n,
            first,
            first + n,
        )
        for t in range(tokens):
            y = up + t * 64 * n
            if keep:
                y = word(ctx, c.HIDDEN) + 4 * t * ffn + 64 * first
            if word(ctx, c.GELU):
                ew.gelu_times(gate + t * 64 * n, up + t * 64 * n, y, GROUP * n)
            else:
                ew.silu_times(gate + t * 64 * n, up + t * 64 * n, y, GROUP * n)
            if not keep:
                to = word(ctx, c.HIDDEN_Q) + t * word(ctx, c.HIDDEN_Q_STRIDE) + first // 2 * RECORD
                quantize_row(y, GROUP * n, to)
        first += n


@njit(**MERGED)
def _down(ctx, layer, tokens):
    _residual(
        ctx,
        word(layer, c.DOWN_FORMAT),
        word(layer, c.DOWN),
        word(ctx, c.FFN),
        word(ctx, c.HIDDEN),
        word(ctx, c.HIDDEN_Q),
        word(ctx, c.HIDDEN_Q_STRIDE),
        tokens,
    )


# ------------------------------------------------------------------ head and samples


@njit(**MERGED)
def _head(ctx, samples):
    vocab, width = word(ctx, c.VOCAB), word(ctx, c.WIDTH)
    first, end = _share(ctx, (vocab + GROUP - 1) // GROUP)
    _project(
        ctx,
        word(ctx, c.HEAD_FORMAT),
        word(ctx, c.HEAD),
        width,
        vocab,
        _normed(ctx, samples),
        _normed_q(ctx, samples),
        word(ctx, c.NORM_Q_STRIDE),
        samples,
        word(ctx, c.LOGITS),
        word(ctx, c.LOGITS_STRIDE),
        first,
        end,
    )


@njit(**MERGED)
def _sample(ctx, index):
    """Draw one sample: its outputs in the slot and, of an entry with one sample, the row's next token."""
    slot = word(word(ctx, c.PLAN), _P_SLOT)
    planned = p.sample_at(ctx, index)
    token_index, place, entry = get_i64(planned), get_i64(planned + 8), p.entry_at(ctx, get_i64(planned + 16))
    row, samples = word(entry, p.P_ROW), word(entry, p.P_SAMPLES)
    known = get_i64(p.token_at(ctx, token_index)) + 1
    tokens = word(ctx, c.TOKENS) + row * word(ctx, c.TOKENS_STRIDE)
    ints = word(ctx, c.ROW_INTS_AT) + row * _ROW_INTS
    out = slot * word(ctx, c.OUT_STRIDE) + 4 * place
    token = call_entry(
        word(ctx, c.DRAW),
        (
            word(ctx, c.LOGITS) + index * word(ctx, c.LOGITS_STRIDE),
            word(ctx, c.VOCAB),
            tokens,
            known,
            get_i64(ints + _OUTPUT_START),
            ints,
            word(ctx, c.ROW_FLOATS_AT) + row * _ROW_FLOATS,
            word(ctx, c.MASK_IDS) + row * _MAX_MASK,
            word(ctx, c.BIAS_IDS) + row * _MAX_BIAS,
            word(ctx, c.BIAS) + row * _MAX_BIAS,
            word(ctx, c.SAMPLER),
            word(ctx, c.OUT_LOGPROB) + out,
            word(ctx, c.OUT_TOP_ID) + _MAX_TOP * out,
            word(ctx, c.OUT_TOP_LP) + _MAX_TOP * out,
        ),
    )
    put_i32(word(ctx, c.OUT_TOKEN) + out, token)
    if samples == 1:
        put_i32(tokens + 4 * known, token)


# ------------------------------------------------------------------ the step


@njit(**INNER)
def write_key(ctx, entry, token, kv_head, head_at, scratch):
    """K and V of one token and kv head into its page."""
    dim, page_tokens = word(ctx, c.HEAD_DIM), word(ctx, c.PAGE_TOKENS)
    position = get_i64(p.token_at(ctx, token))
    number = get_i32(_table(ctx, entry) + 4 * (position // page_tokens))
    at = word(ctx, c.PAGES) + number * word(ctx, c.PAGE_BYTES) + head_at
    k = word(ctx, c.QKV) + token * word(ctx, c.QKV_STRIDE) + 4 * (word(ctx, c.N_HEADS) + kv_head) * dim
    v = k + 4 * word(ctx, c.N_KV_HEADS) * dim
    _rotate(ctx, token, k, scratch)
    half = word(ctx, c.HEAD_BYTES) // 2
    slot, width = position % page_tokens, word(ctx, c.KV_WIDTH)
    if width == 2:
        ew.write_kv_f16(scratch, v, at, at + half, slot, page_tokens, dim, scratch + 4 * dim)
    elif width == 4:
        ew.write_kv_f32(scratch, v, at, at + half, slot, page_tokens, dim, scratch + 4 * dim)
    else:
        ew.write_kv_int8(scratch, v, at, at + half, slot, page_tokens, dim, scratch + 4 * dim)


@njit(**INNER)
def ask_for_page(ctx, entry, head_at):
    """Prefetch the lines of the page that a single query's K will be written to, and read with."""
    position, page_tokens = word(entry, p.P_START), word(ctx, c.PAGE_TOKENS)
    number = get_i32(_table(ctx, entry) + 4 * (position // page_tokens))
    at = word(ctx, c.PAGES) + number * word(ctx, c.PAGE_BYTES) + head_at
    step = word(ctx, c.KV_WIDTH) * page_tokens
    at += position % page_tokens * word(ctx, c.KV_WIDTH)
    for d in range(word(ctx, c.HEAD_DIM)):
        prefetch(at + d * step)


@njit(**MERGED)
def write_keys(ctx, layer):
    """K and V of this rank's share of the tokens of entries with several."""
    heads = word(ctx, c.N_KV_HEADS)
    first, end = _share(ctx, word(word(ctx, c.PLAN), _P_TOKENS))
    for t in range(first, end):
        entry = p.entry_at(ctx, get_i64(p.token_at(ctx, t) + 16))
        if word(entry, p.P_COUNT) > 1:
            for head in range(heads):
                at = (layer * heads + head) * word(ctx, c.HEAD_BYTES)
                write_key(ctx, entry, t, head, at, word(ctx, c.ATTENTION))


@njit(**MERGED)
def merge_segments(ctx, entry, token, kv_head, segments, scratch):
    """The partial results of a query's group, in ascending order, to MIXED."""
    dim, heads = word(ctx, c.HEAD_DIM), word(ctx, c.N_HEADS)
    group = heads // word(ctx, c.N_KV_HEADS)
    size = 4 * (dim + GROUP)
    for g in range(group):
        head = kv_head * group + g
        for s in range(segments):
            at = word(ctx, c.PARTIALS) + size * (word(entry, p.P_PARTIAL) + s * heads + head)
            attention.merge(scratch + 64, scratch, at + 64, get_f32(at), get_f32(at + 4), dim, s == 0)
        out = word(ctx, c.MIXED) + token * word(ctx, c.MIXED_STRIDE) + 4 * head * dim
        attention.finish(scratch + 64, scratch, out, dim)


@njit(**INNER)
def announce_unit(ctx, layer, entry, head, segment):
    """Tell attention what this rank reads next: a segment's K of a single query, or nothing (segment -1)."""
    dim, kv_heads = word(ctx, c.HEAD_DIM), word(ctx, c.N_KV_HEADS)
    head_at = (layer * kv_heads + head) * word(ctx, c.HEAD_BYTES)
    attention.announce(
        attention.table_at(word(ctx, c.ATTENTION), dim) + attention.AFTER,
        word(ctx, c.PAGES),
        head_at,
        word(ctx, c.PAGE_BYTES),
        _table(ctx, entry),
        segment,
        word(entry, p.P_START),
        word(ctx, c.PAGE_TOKENS),
        word(ctx, c.KV_WIDTH),
    )


@njit(**MERGED)
def attend_part(ctx, entry, token, kv_head, head_at, index, segments, arrivals):
    """One segment of a single query; whoever is the last of its segments merges them."""
    dim, heads = word(ctx, c.HEAD_DIM), word(ctx, c.N_HEADS)
    group = heads // word(ctx, c.N_KV_HEADS)
    scratch = word(ctx, c.ATTENTION)
    _pack_queries(ctx, token, 1, kv_head, scratch)
    run_entry(
        word(ctx, c.ATTEND),
        (
            scratch,
            word(ctx, c.PAGES),
            head_at,
            word(ctx, c.PAGE_BYTES),
            _table(ctx, entry),
            word(entry, p.P_START),
            1,
            group,
            dim,
            word(ctx, c.PAGE_TOKENS),
            ctx + 8 * c.SCORE_SCALE,
            0,
            0,
            index,
        ),
    )
    o = scratch + 4 * attention.ROWS * (dim + SEGMENT)
    state = o + 8 * attention.ROWS * dim
    for g in range(group):
        at = word(entry, p.P_PARTIAL) + index * heads + kv_head * group + g
        at = word(ctx, c.PARTIALS) + 4 * (dim + GROUP) * at
        put_f32(at, get_f32(state + 16 * g + 8))
        put_f32(at + 4, get_f32(state + 16 * g + 12))
        attention.copy(o + 4 * g * dim, at + 64, dim)
    if atomic_add(arrivals, 1) == segments - 1:
        store_release(arrivals, 0)
        merge_segments(ctx, entry, token, kv_head, segments, scratch)
        _quantize_mixed(ctx, token, kv_head)


@njit(**MERGED)
def attend_queries(ctx, entry, token, first, queries, kv_head, head_at):
    """A block of queries of one sequence from position `first` on."""
    dim, group = word(ctx, c.HEAD_DIM), word(ctx, c.N_HEADS) // word(ctx, c.N_KV_HEADS)
    scratch = word(ctx, c.ATTENTION)
    _pack_queries(ctx, token, queries, kv_head, scratch)
    out = word(ctx, c.MIXED) + token * word(ctx, c.MIXED_STRIDE) + 4 * kv_head * group * dim
    run_entry(
        word(ctx, c.ATTEND),
        (
            scratch,
            word(ctx, c.PAGES),
            head_at,
            word(ctx, c.PAGE_BYTES),
            _table(ctx, entry),
            first,
            queries,
            group,
            dim,
            word(ctx, c.PAGE_TOKENS),
            ctx + 8 * c.SCORE_SCALE,
            out,
            word(ctx, c.MIXED_STRIDE),
            -1,
        ),
    )
    for t in range(token, token + queries):
        _quantize_mixed(ctx, t, kv_head)


@njit(**MERGED)
def attend(ctx, layer):
    """This rank's units: every one's place in the enumeration says whose it is."""
    rank, ranks = word(ctx, c.RANK), word(ctx, c.RANKS)
    kv_heads = word(ctx, c.N_KV_HEADS)
    block = attention.ROWS // (word(ctx, c.N_HEADS) // kv_heads)
    unit, entries = 0, word(word(ctx, c.PLAN), _P_ENTRIES)
    for e in range(entries):
        entry = p.entry_at(ctx, e)
        start, count, token = word(entry, p.P_START), word(entry, p.P_COUNT), word(entry, p.P_TOKEN)
        segments = start // SEGMENT + 1
        for head in range(kv_heads):
            head_at = (layer * kv_heads + head) * word(ctx, c.HEAD_BYTES)
            if word(entry, p.P_PARTIAL) >= 0:
                for index in range(segments):
                    if unit % ranks == rank:
                        if index == segments - 1:
                            ask_for_page(ctx, entry, head_at)
                            write_key(ctx, entry, token, head, head_at, word(ctx, c.ATTENTION))
                        after = index + ranks
                        if head + after // segments < kv_heads:
                            announce_unit(ctx, layer, entry, head + after // segments, after % segments)
                        else:
                            announce_unit(ctx, layer, entry, head, -1)
                        arrivals = word(ctx, c.ARRIVALS) + 64 * (e * kv_heads + head)
                        attend_part(ctx, entry, token, head, head_at, index, segments, arrivals)
                    unit += 1
                continue
            for begin in range(0, count, block):
                if unit % ranks == rank:
                    if count == 1:
                        ask_for_page(ctx, entry, head_at)
                        write_key(ctx, entry, token, head, head_at, word(ctx, c.ATTENTION))
                        after, following = head + ranks, entry
                        if after >= kv_heads and e + 1 < entries:
                            after, following = after - kv_heads, p.entry_at(ctx, e + 1)
                        if after < kv_heads and word(following, p.P_COUNT) == 1:
                            announce_unit(ctx, layer, following, after, 0)
                        else:
                            announce_unit(ctx, layer, entry, head, -1)
                    queries = min(block, count - begin)
                    attend_queries(ctx, entry, token + begin, start + begin, queries, head, head_at)
                unit += 1


@njit(**MERGED)
def quantize_straddling(ctx, tokens):
    """Records that span groups of heads are made when all heads are there. False: given up."""
    heads, dim = word(ctx, c.N_HEADS), word(ctx, c.HEAD_DIM)
    if heads // word(ctx, c.N_KV_HEADS) * dim % 32 == 0:
        return True
    first, end = _share(ctx, tokens)
    for t in range(first, end):
        x = word(ctx, c.MIXED) + t * word(ctx, c.MIXED_STRIDE)
        quantize_row(x, heads * dim, word(ctx, c.MIXED_Q) + t * word(ctx, c.MIXED_Q_STRIDE))
    return _meet(ctx)


@njit(**MERGED)
def run_layer(ctx, index, tokens, chunks):
    layer = word(ctx, c.LAYERS) + 8 * c.LAYER_WORDS * index
    now = _begin(ctx)
    if not _norm(ctx, word(layer, c.ATTN_NORM), tokens, False):
        return False
    now = _spent(ctx, NORM, now)
    _qkv(ctx, layer, tokens)
    now = _spent(ctx, QKV, now)
    if not _meet_before_output(ctx, layer, 0):
        return False
    if chunks:
        now = _begin(ctx)
        write_keys(ctx, index)
        now = _spent(ctx, KEYS, now)
        if not _meet(ctx):
            return False
    now = _begin(ctx)
    attend(ctx, index)
    now = _spent(ctx, ATTENTION, now)
    if not (_meet_before_output(ctx, layer, ASK_BYTES) and quantize_straddling(ctx, tokens)):
        return False
    now = _begin(ctx)
    _output(ctx, layer, tokens)
    now = _spent(ctx, OUTPUT, now)
    width, ffn = word(ctx, c.WIDTH), word(ctx, c.FFN)
    if not _meet_before(ctx, word(layer, c.GATE_FORMAT), word(layer, c.GATE), width, _hidden_share(ctx), 0):
        return False
    now = _begin(ctx)
    if not _norm(ctx, word(layer, c.FFN_NORM), tokens, False):
        return False
    now = _spent(ctx, NORM, now)
    _gate_up(ctx, layer, tokens)
    now = _spent(ctx, GATE_UP, now)
    if not _meet_before(ctx, word(layer, c.DOWN_FORMAT), word(layer, c.DOWN), ffn, _share(ctx, width // GROUP), 0):
        return False
    now = _begin(ctx)
    _down(ctx, layer, tokens)
    _spent(ctx, DOWN, now)
    if index + 1 < word(ctx, c.N_LAYERS):
        layer += 8 * c.LAYER_WORDS
        share = _share(ctx, word(ctx, c.N_HEADS) * word(ctx, c.HEAD_DIM) // GROUP)
        return _meet_before(ctx, word(layer, c.Q_FORMAT), word(layer, c.Q), width, share, 0)
    share = _share(ctx, (word(ctx, c.VOCAB) + GROUP - 1) // GROUP)
    return _meet_before(ctx, word(ctx, c.HEAD_FORMAT), word(ctx, c.HEAD), width, share, 0)


@njit(**INNER)
def run_step(ctx):
    """The planned step, on every rank. False: the group is given up and the step is not done."""
    plan = word(ctx, c.PLAN)
    tokens, samples, chunks = word(plan, _P_TOKENS), word(plan, _P_SAMPLES), word(plan, _P_CHUNKS)
    rank, ranks = word(ctx, c.RANK), word(ctx, c.RANKS)
    progress = word(ctx, c.PROGRESS_AT)
    if tokens:
        now = _begin(ctx)
        _embed(ctx, tokens)
        _spent(ctx, EMBED, now)
        if not _meet(ctx):
            return False
        for index in range(word(ctx, c.N_LAYERS)):
            if not run_layer(ctx, index, tokens, chunks):
                return False
            if rank == 0:
                store_release(progress, get_i64(progress) + 1)
    if samples:
        now = _begin(ctx)
        if not _norm(ctx, word(ctx, c.FINAL_NORM), samples, True):
            return False
        now = _spent(ctx, NORM, now)
        _head(ctx, samples)
        _spent(ctx, HEAD, now)
        if not _meet(ctx):
            return False
        now = _begin(ctx)
        for i in range(rank, samples, ranks):
            _sample(ctx, i)
        _spent(ctx, SAMPLE, now)
    if rank == 0:
        store_release(progress, get_i64(progress) + 1)
    return _meet(ctx)
