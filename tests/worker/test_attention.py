"""Attention and elementwise kernels equal the exact reference byte for byte, for any pages and blocks."""

from __future__ import annotations

from collections.abc import Callable

import numba
import numpy as np
import pytest

from shm.pages import KvGeometry
from stages.worker.kernels import attention, attention_units
from stages.worker.kernels import attention_blocks as blocks
from stages.worker.kernels import elementwise as ew
from stages.worker.kernels.buffer_sizes import BLOCK_ROWS, attention_words
from stages.worker.kernels.simd import JIT
from stages.worker.rope import rope_tables
from tools.reference import arithmetic, exact_forward
from tools.reference.fma import fma

pytestmark = pytest.mark.slow

SIZES = (1, 2, 3, 15, 16, 17, 31, 33, 63, 65, 576)
Kernel = Callable[..., None]
BLOCKS = (8, 24, attention.DIRECT_ROWS + 6)  # of some of these K and V are read from their pages, of others converted
WRITE = {"f16": ew.write_kv_f16, "f32": ew.write_kv_f32, "int8": ew.write_kv_int8}


def at(array: np.ndarray) -> int:
    return array.ctypes.data


def values(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Many magnitudes, some exact halves and zeros."""
    x = rng.standard_normal(shape) * np.exp2(rng.integers(-6, 7, shape))
    x[rng.random(shape) < 0.05] = 0.0
    return x.astype(np.float32)


def same(a: np.ndarray, b: np.ndarray) -> None:
    np.testing.assert_array_equal(a.view(np.uint32), b.astype(np.float32).view(np.uint32))


@pytest.mark.parametrize("n", SIZES)
def test_elementwise_equals_the_twin(n: int) -> None:
    rng = np.random.default_rng(n)
    x, w, y = values(rng, n), values(rng, n), np.full(n + 1, 7, np.float32)
    ew.rms_norm(at(x), at(w), at(y), n, np.float32(1e-5))
    same(y[:n], arithmetic.rms_norm(x, w, np.float32(1e-5)))
    ew.silu_times(at(x), at(w), at(y), n)
    same(y[:n], arithmetic.silu(x) * w)
    ew.gelu_times(at(x), at(w), at(y), n)
    same(y[:n], arithmetic.gelu(x) * w)
    total = x.copy()
    ew.add(at(total), at(w), n)
    same(total, x + w)
    ew.gelu(at(x), at(y), n)
    same(y[:n], arithmetic.gelu(x))
    y[:n] = x
    ew.scale(at(y), np.float32(1.7), n)
    same(y[:n], x * np.float32(1.7))
    y[:n] = x
    ew.soft_cap(at(y), np.float32(3), n)
    same(y[:n], arithmetic.soft_cap(x, np.float32(3)))
    assert y[n] == 7  # nothing past the end


@pytest.mark.parametrize("n", [32, 96, 576])
def test_norms_equal_the_twin(n: int) -> None:
    rng, eps = np.random.default_rng(n), np.float32(1e-5)
    x, w, b, y = values(rng, n), values(rng, n), values(rng, n), np.full(n + 1, 7, np.float32)
    ew.layer_norm(at(x), at(w), at(b), at(y), n, eps)
    same(y[:n], arithmetic.layer_norm(x, w, b, eps))
    ew.layer_norm(at(x), at(w), 0, at(y), n, eps)
    same(y[:n], arithmetic.layer_norm(x, w, None, eps))
    ew.rms_norm_part(at(x), n, eps, at(x) + 64, at(w), at(y), 16)
    same(y[:16], arithmetic.rms_norm(x, np.roll(w, 16), eps)[16:32])
    total = x.copy()
    ew.add_scaled(at(total), at(w), np.float32(0.22), n)
    same(total, fma(w, np.float32(0.22), x))
    assert y[n] == 7


@pytest.mark.parametrize(("pairs", "kernel"), [("neighbours", ew.rotate), ("halves", ew.rotate_neox)])
@pytest.mark.parametrize("n_rot", [2, 16, 30, 32, 64, 80])
def test_rope_equals_the_reference_implementation(n_rot: int, pairs: str, kernel: Kernel) -> None:
    rng = np.random.default_rng(n_rot)
    tables = rope_tables(10000.0, n_rot, 4096)
    x, y = values(rng, 3, 1, 96), np.zeros((3, 1, 96), np.float32)
    positions = np.array([0, 255, 3071])
    cosine, sine = np.zeros((3, n_rot // 2), np.float32), np.zeros((3, n_rot // 2), np.float32)
    for i, p in enumerate(positions):
        high, low = p // 256, p % 256
        rows = (tables.cos_hi[high], tables.sin_hi[high], tables.cos_lo[low], tables.sin_lo[low])
        ew.rope_angles(*(at(r) for r in rows), at(cosine[i]), at(sine[i]), n_rot // 2)
        kernel(at(x[i]), at(y[i]), at(cosine[i]), at(sine[i]), n_rot, 96)
    expected = exact_forward.rotations(tables, positions)
    same(cosine, expected[0])
    same(y, exact_forward.rotate(x, *expected, pairs))


class Cache:
    """One layer of two kv heads in scattered pages."""

    def __init__(self, kv_type: str, head_dim: int, page_tokens: int, k: np.ndarray, v: np.ndarray) -> None:
        n = len(k)
        self.geometry = g = KvGeometry(1, 2, head_dim, page_tokens, kv_type)
        n_pages = -(-n // page_tokens)
        self.table = np.random.default_rng(1).permutation(n_pages + 3)[:n_pages].astype(np.int32)
        self.pages = np.full((n_pages + 3, g.page_bytes), 0xFF, np.uint8)
        scratch = np.zeros(1024, np.float32)
        for head in range(2):
            for p in range(n):
                key = at(self.pages) + int(self.table[p // page_tokens]) * g.page_bytes + head * g.head_bytes
                value = key + g.head_bytes // 2
                kp, vp = k[p, head].copy(), v[p, head].copy()
                WRITE[kv_type](at(kp), at(vp), key, value, p % page_tokens, page_tokens, head_dim, at(scratch))

    def attend(self, q: np.ndarray, first: int, block: int, cap: float = 0.0, window: int = 0) -> np.ndarray:
        """q (n, heads, head_dim), in blocks of at most `block` queries."""
        g, (n, heads, d) = self.geometry, q.shape
        group = heads // 2
        scratch = np.zeros(attention_words(d), np.float32)
        out = np.zeros((n, heads * d), np.float32)
        scale = np.array([1 / np.sqrt(d), 0, cap, 0], np.float32)
        run = attention.ENTRIES[g.kv_type]
        for head in range(2):
            for t in range(0, n, block):
                some = np.ascontiguousarray(q[t : t + block, head * group : (head + 1) * group])
                scratch[: some.size] = some.ravel()
                run(
                    at(scratch),
                    at(self.pages),
                    head * g.head_bytes,
                    g.page_bytes,
                    at(self.table),
                    first + t,
                    len(some),
                    group,
                    d,
                    g.page_tokens,
                    at(scale),
                    at(out) + 4 * (t * heads + head * group) * d,
                    4 * heads * d,
                    -1,
                    window,
                    1,
                    0,
                )
        return out

    def attend_both(self, q: np.ndarray, position: int, cap: float = 0.0, window: int = 0) -> np.ndarray:
        """q (1, heads, head_dim): one query's heads of both kv heads in one call, which takes them split by split."""
        g, (_, heads, d) = self.geometry, q.shape
        group = heads // 2
        scratch = np.zeros(attention_words(d), np.float32)
        scratch[: q.size] = q.ravel()
        out = np.zeros((1, heads * d), np.float32)
        scale = np.array([1 / np.sqrt(d), 0, cap, 0], np.float32)
        pages, table = at(self.pages), at(self.table)
        run = attention.ENTRIES[g.kv_type]
        run(
            at(scratch), pages, 0, g.page_bytes, table, position, 1, group, d, g.page_tokens, at(scale), at(out),
            4 * group * d, -1, window, 2, g.head_bytes,
        )  # fmt: skip
        return out


@pytest.mark.parametrize("kv_type", ["f16", "f32", "int8"])
@pytest.mark.parametrize(
    ("head_dim", "group", "page_tokens", "length", "block"),
    [
        (64, 3, 32, 600, 8),
        (64, 3, 256, 513, 5),
        (32, 1, 16, 65, 24),
        (128, 4, 64, 290, 1),
        (96, 2, 16, 33, 7),
        (64, 5, 128, 257, 3),
        (160, 1, 16, 17, 3),
        (256, 4, 32, 530, 12),
        (160, 3, 32, 300, 16),  # three parts of the dims
        (64, 1, 32, 400, 130),  # the first rows of a block see fewer positions than the last ones
        (256, 1, 64, 450, 192),  # as many rows as a block may have
        (128, 7, 32, 400, 27),  # almost as many, in tiles of which the last is not full
        (64, 1, 32, 120, attention.DIRECT_ROWS),
        (64, 1, 32, 120, attention.DIRECT_ROWS + 1),
        (64, 1, 32, 40, attention.DIRECT_SCALED_ROWS),
        (64, 1, 32, 40, attention.DIRECT_SCALED_ROWS + 1),
    ],
)
def test_attention_equals_the_twin(
    kv_type: str, head_dim: int, group: int, page_tokens: int, length: int, block: int
) -> None:
    compare_with_the_twin(kv_type, head_dim, group, page_tokens, length, block)


@pytest.mark.parametrize("kv_type", ["f16", "f32"])  # blocks of int8 are of 32 dims
def test_dims_that_are_no_whole_columns_equal_the_twin(kv_type: str) -> None:
    compare_with_the_twin(kv_type, 80, 3, 32, 530, 16)


def compare_with_the_twin(kv_type: str, head_dim: int, group: int, page_tokens: int, length: int, block: int) -> None:
    rng = np.random.default_rng(head_dim)
    k, v = values(rng, length, 2, head_dim), values(rng, length, 2, head_dim)
    k[3, 0, :5], v[4, 1, 2] = 1e6, -1e6  # overflows f16
    queries = min(max(40, block), length)
    q = values(rng, queries, 2 * group, head_dim) * np.float32(0.05)
    first = length - queries
    cache = Cache(kv_type, head_dim, page_tokens, k, v)
    expected = exact_forward.attention(q, arithmetic.stored(k, kv_type), arithmetic.stored(v, kv_type), first)
    same(cache.attend(q, first, block), expected)
    same(cache.attend(q[-1:], length - 1, 1), expected[-1:])
    same(cache.attend_both(q[-1:], length - 1), expected[-1:])


@pytest.mark.parametrize(
    ("heads", "kv_heads", "ranks", "count"),
    [
        (32, 8, 2, 16),
        (9, 3, 2, 20),
        (32, 8, 4, 512),
        (12, 12, 2, 50),
        (4, 1, 4, 12),
        (24, 1, 3, 5),
        (8, 8, 3, 1),
        (9, 3, 2, 512),
        (9, 3, 4, 512),
        (12, 12, 2, 512),
        (14, 2, 2, 512),
        (16, 8, 3, 64),
        (28, 4, 3, 200),
    ],
)
def test_blocks_of_a_chunk_are_even_shares(heads: int, kv_heads: int, ranks: int, count: int) -> None:
    """No rank computes more than a quarter more than the average: neither rows, nor scores behind 110 positions."""
    group = heads // kv_heads
    block = attention_units.block_queries(count, group, kv_heads, ranks)
    assert 1 <= block <= BLOCK_ROWS // group
    rows, scores = [0] * ranks, [0] * ranks
    for head in range(kv_heads):
        for begin in range(0, count, block):
            of = attention_units.rank_of_block(head, begin, count, block, ranks)
            end = min(count, begin + block)
            rows[of] += group * (end - begin)
            scores[of] += group * sum(range(111 + begin, 111 + end))
    assert sum(rows) == heads * count
    assert max(rows) <= 1.25 * sum(rows) / ranks
    assert max(scores) <= 1.25 * sum(scores) / ranks


@pytest.mark.parametrize(("kv_heads", "ranks"), [(8, 1), (8, 2), (8, 3), (3, 2), (2, 5), (1, 4)])
@pytest.mark.parametrize("unit", [0, 1, 7])
def test_every_head_of_a_single_query_has_one_rank(kv_heads: int, ranks: int, unit: int) -> None:
    shares = [list(range(*attention_units.own_heads.py_func(rank, ranks, kv_heads, unit))) for rank in range(ranks)]
    assert sorted(head for heads in shares for head in heads) == list(range(kv_heads))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@pytest.mark.parametrize("kv_type", ["f16", "int8"])
@pytest.mark.parametrize(
    ("head_dim", "group", "length", "block", "window", "cap"),
    [
        (64, 3, 600, 8, 256, 0.0),  # a whole split is out of sight
        (64, 4, 570, 12, 300, 0.0),  # rows of a block begin in different splits
        (64, 1, 530, 24, 1, 0.0),
        (64, 1, 530, 60, 30, 0.0),  # longer than the window
        (96, 3, 530, 60, 200, 1.5),
        (32, 2, 300, 12, 7, 2.0),  # queries of a block share no position
        (64, 3, 70, 5, 20, 0.0),
        (256, 2, 290, 4, 100, 0.5),
        (64, 3, 290, 8, 0, 3.0),
        (96, 1, 40, 1, 1000, 0.0),  # longer than the sequence
    ],
)
def test_windows_and_caps_equal_the_twin(
    kv_type: str, head_dim: int, group: int, length: int, block: int, window: int, cap: float
) -> None:
    rng = np.random.default_rng(window)
    k, v = values(rng, length, 2, head_dim), values(rng, length, 2, head_dim)
    queries = min(60, length)
    q = values(rng, queries, 2 * group, head_dim) * np.float32(0.05)
    first = length - queries
    cache = Cache(kv_type, head_dim, 32, k, v)
    how = exact_forward.Scores(np.float32(1 / np.sqrt(head_dim)), np.float32(cap), window)
    k_stored, v_stored = arithmetic.stored(k, kv_type), arithmetic.stored(v, kv_type)
    expected = exact_forward.attention(q, k_stored, v_stored, first, how)
    same(cache.attend(q, first, block, cap, window), expected)
    same(cache.attend(q[-1:], length - 1, 1, cap, window), expected[-1:])
    same(cache.attend_both(q[-1:], length - 1, cap, window), expected[-1:])
    plain = exact_forward.attention(q, k_stored, v_stored, first)
    assert (plain != expected).any() == (cap > 0 or 0 < window < length)


@pytest.mark.parametrize("page_tokens", [16, 32, 64, 128, 256])
def test_what_is_prefetched_next_ends_with_the_row(page_tokens: int) -> None:
    """K of each 16 of the first 192 positions of a split; behind the row's last position its last 16 again."""
    pages, head_at, page_bytes, width = 1 << 40, 1 << 13, 1 << 20, 2
    for length in (1, 15, 16, 17, 40, 64, 65, 191, 192, 193, 256, 257, 300, 448, 449, 600):
        n_pages = -(-length // page_tokens)
        table = np.full(n_pages + 12, 1 << 18, np.int32)  # pages of no address that is expected
        table[:n_pages] = np.random.default_rng(length).permutation(n_pages)
        for split in range(-1, 4):
            to = np.full(13, -1)
            attention.set_next_prefetch(
                at(to), pages, head_at, page_bytes, at(table), split, length - 1, page_tokens, width
            )
            expected = np.zeros(12, np.int64)
            if 0 <= 256 * split < length:
                positions = np.minimum(256 * split + 16 * np.arange(12), (length - 1) // 16 * 16)
                numbers = table[positions // page_tokens].astype(np.int64)
                expected = pages + numbers * page_bytes + head_at + positions % page_tokens * width
            np.testing.assert_array_equal(to, [*expected, -1])


def test_functions_for_several_widths_have_names_of_their_own() -> None:
    """Else code for two types of cache, which two processes compiled, is mixed up in the process that loads both."""
    functions = {blocks.convert_column, blocks.convert_part, blocks.wide, blocks.thin}
    assert len({function.py_func.__qualname__ for function in functions}) == len(functions)


@pytest.mark.parametrize("block", BLOCKS)
def test_a_nan_outside_of_the_window_has_no_effect(block: int) -> None:
    """Whether or not a query that sees it is computed in the same block."""
    rng = np.random.default_rng(1)
    k, v, q = (values(rng, 110, 2, 64) for _ in range(3))
    expected = Cache("f16", 64, 32, k, v).attend(q, 0, block, window=10)
    k[20, 1, 3], v[21, 1, 5] = np.nan, np.nan
    out = Cache("f16", 64, 32, k, v).attend(q, 0, block, window=10)
    same(out[:20], expected[:20])
    same(out[31:], expected[31:])
    assert np.isnan(out[20:31, 64:]).any(axis=1).all()


@pytest.mark.parametrize("kv_type", ["f16", "f32", "int8"])
@pytest.mark.parametrize("what", ["k", "v"])
@pytest.mark.parametrize("lane", [0, 17, 63])
@pytest.mark.parametrize("block", BLOCKS)
def test_a_nan_in_the_cache_does_not_become_a_number(kv_type: str, what: str, lane: int, block: int) -> None:
    rng = np.random.default_rng(lane)
    k, v, q = (values(rng, 100, 2, 64) for _ in range(3))
    expected = Cache(kv_type, 64, 32, k, v).attend(q, 0, block)
    (k if what == "k" else v)[21, 1, lane] = np.nan
    out = Cache(kv_type, 64, 32, k, v).attend(q, 0, block)
    same(out[:21], expected[:21])
    same(out[:, :64], expected[:, :64])  # of the other head
    damaged = out[21:, 64:]
    assert np.isnan(damaged).all() if what == "k" else np.isnan(damaged[:, lane]).all()


@pytest.mark.parametrize("kv_type", ["f16", "int8"])
@pytest.mark.parametrize("value", [np.inf, 1e30, 8_319_009.0, 8_319_008.0, 8_319_007.0, 65_505.0])
@pytest.mark.parametrize("block", BLOCKS)
def test_overflow_saturates(kv_type: str, value: float, block: int) -> None:
    rng = np.random.default_rng(1)
    k, v, q = (values(rng, 100, 2, 64) for _ in range(3))
    q *= np.float32(1e-6)
    k[21, 1, 40], v[22, 0, 3] = value, -value
    k_stored, v_stored = arithmetic.stored(k, kv_type), arithmetic.stored(v, kv_type)
    assert np.isfinite(k_stored).all()
    same(Cache(kv_type, 64, 32, k, v).attend(q, 0, block), exact_forward.attention(q, k_stored, v_stored, 0))


def test_compiled_code_does_not_contract() -> None:
    """a * b + c is rounded twice unless fma is written."""

    @numba.njit(**{**JIT, "cache": False})
    def twice(a, b, c):
        return a * b + c

    a = np.float32(1 + 2**-23)
    assert twice(a, a, np.float32(-1)) == np.float32(a * a) - np.float32(1)
