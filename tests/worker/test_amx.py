"""AMX tiles: what their instructions are, and that everything around them gives the bytes of the other paths.

`STARLING_ISA=tiles` is the same kernels with tiles that are emulated by jitted code.  With `amx` the compiled tile
instructions themselves are executed, by the CPU or by an emulated machine (tests/amx_machine).
`tests/worker/test_matmul.py` multiplies with both, too.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numba import njit

from stages.worker import activations_arena as act
from stages.worker.checkpoint.layout import groups_of
from stages.worker.kernels import amx, amx_gemm, amx_tiles, compiled
from stages.worker.kernels import parameter_block as pb
from stages.worker.kernels.amx_verdict import tile_thresholds
from stages.worker.kernels.buffer_sizes import (
    CHUNK,
    CHUNKS_BYTES,
    CODE_BYTES,
    MATMUL_BYTES,
    PRODUCT,
    SPILL_BYTES,
    unpacked_bytes_of,
)
from stages.worker.kernels.build import COMPILER
from stages.worker.kernels.features import ALL_FORMATS
from stages.worker.kernels.formats import BY_ID, FORMATS, QUANTIZED, QuantizedFormat
from stages.worker.kernels.formats.description import RUNS
from stages.worker.kernels.projections import project
from tests.worker.conftest import IsaEnvironment
from tests.worker.instruction_sets import available_isas, tile_isas
from tests.worker.matrices import activations, aligned, awkward, multiply, pack, random_matrix
from tools.bench.phases import static_cycles


@pytest.mark.parametrize(("halves", "runs"), [(False, 8), (True, 4)])
def test_the_configuration_is_as_the_cpu_reads_it(halves: bool, runs: int) -> None:
    data = b"".join(word.to_bytes(4, "little") for word in amx_tiles.configuration(halves))
    assert len(data) == 64
    assert data[0] == 1  # the palette of 8 tiles of at most 16 rows of 64 bytes
    assert not any(data[1:16])
    assert not any(data[32:48])
    assert not any(data[56:])
    shapes = [(data[48 + i], int.from_bytes(data[16 + 2 * i : 18 + 2 * i], "little")) for i in range(8)]
    sums, values, codes = (16, 64), (16, 4 * runs), (runs, 64)  # rows, bytes of a row
    assert shapes == [sums, sums, values, values, codes, codes, (0, 0), (0, 0)]


# ------------------------------------------------------------------ instructions


@pytest.fixture(scope="module")
def assembly() -> dict[str, str]:
    """For a CPU with AMX, by a process that cannot run it."""
    return static_cycles.tile_assembly()


def basic_blocks(assembly: str) -> list[list[str]]:
    """The instructions of each block, blanks removed."""
    return [["".join(line.split()) for line in block] for block in static_cycles.basic_blocks(assembly)]


# Of a step of an even product i: i + 2 multiplied, i + 3 loaded, i + 1 stored in the middle of the scaling; then of an
# odd one. AT&T order: unsigned codes, signed values, sums.
PAIR_OF_STEPS = [
    "tilezero%tmm0",
    "tdpbsud%tmm4,%tmm2,%tmm0",
    "tileloadd%tmm3",
    "tileloadd%tmm5",
    "tilestored%tmm1",
    "tilezero%tmm1",
    "tdpbsud%tmm5,%tmm3,%tmm1",
    "tileloadd%tmm2",
    "tileloadd%tmm4",
    "tilestored%tmm0",
]


def without_address(instruction: str) -> str:
    if instruction.startswith("tileloadd"):
        return "tileloadd" + instruction[instruction.rindex("%") :]
    return instruction.split(",(")[0].split(",1024(")[0]


@pytest.mark.slow
@pytest.mark.skipif("vnni" not in available_isas(), reason="compiles the kernels of VNNI and more")
@pytest.mark.parametrize("name", [*static_cycles.KERNELS, *static_cycles.STREAMING])
def test_the_main_loop_is_one_block_in_the_order_of_the_pipeline(assembly: dict[str, str], name: str) -> None:
    loops = [block for block in basic_blocks(assembly[name]) if sum("tilestored" in line for line in block) == 2]
    assert len(loops) == 1
    loop = loops[0]
    assert [without_address(line) for line in loop if "tmm" in line] == PAIR_OF_STEPS
    # The f32 operations of 8 tokens each lie before and after each store.
    stores = [i for i, line in enumerate(loop) if "tilestored" in line]
    operations = [sum(line.startswith("vfmadd") for line in part) for part in (loop[: stores[0]], loop[stores[1] :])]
    operations.append(sum(line.startswith("vfmadd") for line in loop[stores[0] : stores[1]]))
    has_minimums = static_cycles.SCALES[name].minimum if name in static_cycles.STREAMING else "minimums" in name
    eight_tokens = 8 * (3 if has_minimums else 2)
    assert operations == [eight_tokens, eight_tokens, 2 * eight_tokens]
    # Near the end the operands are those of the next call: four addresses are chosen without a branch.
    assert sum(line.startswith("cmov") for line in loop) == 4
    # What tokens are scaled by comes from memory, and is not spread from a register for each.
    assert not any(line.startswith(("vbroadcast", "vcvtsi2ss", "vpermps")) for line in loop)
    if name in static_cycles.STREAMING:
        # The vectors of an unpacked block before the first tiles; those of a second one between the stores.
        scales = static_cycles.SCALES[name]
        vectors = RUNS + scales.parts * (1 + scales.minimum)
        first = next(i for i, line in enumerate(loop) if "tmm" in line)
        unpacked = [
            sum(static_cycles.is_vector_store(line) for line in part)
            for part in (loop[:first], loop[stores[0] : stores[1]])
        ]
        totals = int(scales.halves and scales.minimum)  # a vector in each step
        assert unpacked == [vectors + totals, totals if scales.halves else vectors]


# ------------------------------------------------------------------ operations on tiles


def products_of_tiles() -> str:
    """What the slots of `spill` hold after instructions in an order that shows which tiles keep what, against NumPy."""
    load_even, multiply_even, store_even = amx_tiles.EVEN
    load_odd, multiply_odd, store_odd = amx_tiles.ODD
    configure = amx_tiles.configure

    @njit
    def run(spill, halves, x, y, u, v):
        configure(spill, halves)
        load_even(spill, x, u)
        load_odd(spill, y, v)
        multiply_even(spill)
        load_even(spill, y, u)
        multiply_odd(spill)
        store_even(spill)
        store_odd(spill)

    @njit
    def run_again(spill):
        multiply_even(spill)
        store_even(spill)
        store_odd(spill)

    rng = np.random.default_rng(1)
    for halves, n in ((False, 32), (True, 16)):
        x, y, u, v = (aligned(1024) for _ in range(4))
        for buffer in (x, y, u, v):
            buffer[:] = rng.integers(0, 256, buffer.size)
        spill = aligned(SPILL_BYTES)

        def product(values: np.ndarray, codes: np.ndarray, n: int = n) -> list[list[int]]:
            by_row = codes[: 16 * n].reshape(n // 4, 16, 4).transpose(1, 0, 2).reshape(16, n)
            signed = values[:512].view(np.int8).reshape(16, 32)[:, :n].astype(np.int32)
            return (signed @ by_row.astype(np.int32).T).tolist()

        def slot(i: int, spill: np.ndarray = spill) -> list[list[int]]:
            return spill[PRODUCT * i :][:PRODUCT].view(np.int32).reshape(16, 16).tolist()

        run(spill.ctypes.data, halves, *(buffer.ctypes.data for buffer in (x, y, u, v)))
        assert (slot(0), slot(1)) == (product(x, u), product(y, v))
        spill[: 2 * PRODUCT] = 0
        run_again(spill.ctypes.data)
        assert (slot(0), slot(1)) == (product(y, u), product(y, v))
    return "equal"


TILE_ISAS = tile_isas()


@pytest.mark.slow
@pytest.mark.parametrize("isa", TILE_ISAS)
def test_tiles_keep_what_was_loaded_and_multiplied(isa: str, isa_environment: IsaEnvironment) -> None:
    code = "from tests.worker import test_amx as t; print(t.products_of_tiles())"
    assert run_with(isa_environment(isa), code) == "equal"


def calls_that_begin_the_next_one() -> str:
    """Of two calls the first begins three products of the second, which needs the codes of these no more."""

    @njit
    def call(kind, halves, u, blocks, x, out, spill, is_begun, next_u, next_x):
        if not is_begun:
            amx_tiles.configure(spill, halves)
        amx.quantized_16(kind, u, blocks, x, out, 64, True, spill, u, 0, is_begun, next_u, next_x)

    rng = np.random.default_rng(3)
    for fmt in (fmt for fmt in QUANTIZED if fmt.name in ("Q4_0", "Q4_1", "Q6_K", "Q2_K")):
        name, blocks, halves = fmt.name, 4, bool(fmt.scales.halves)
        records, stride = activations(awkward(16, 32 * blocks, rng), fmt)
        x, spill = pack(records, stride, 32 * blocks, 16), aligned(SPILL_BYTES)
        chunks = [aligned(blocks * unpacked_bytes_of(fmt)) for _ in range(2)]
        for chunk in chunks:
            lines = chunk.reshape(blocks, -1)
            lines[:, :CODE_BYTES] = rng.integers(0, fmt.codes.largest + 1, (blocks, CODE_BYTES))
            scales = rng.standard_normal((blocks, (lines.shape[1] - CODE_BYTES) // 4)).astype(np.float32)
            lines[:, CODE_BYTES:] = scales.view(np.uint8)

        def product(
            i: int,
            is_begun: bool = False,
            begins: bool = False,
            fmt: QuantizedFormat = fmt,
            blocks: int = blocks,
            halves: bool = halves,
            chunks: list[np.ndarray] = chunks,
            x: np.ndarray = x,
            spill: np.ndarray = spill,
        ) -> bytes:
            out, (u, v) = aligned(1024), (chunks[i].ctypes.data, chunks[1 - i].ctypes.data)
            at = x.ctypes.data
            next_x = at if begins else 0
            call(fmt.id, halves, u, blocks, at, out.ctypes.data, spill.ctypes.data, is_begun, v, next_x)
            return out.tobytes()

        expected = [product(i) for i in range(2)]
        assert product(0, begins=True) == expected[0], name
        begun = chunks[1].reshape(blocks, -1)
        for b, end in enumerate((CODE_BYTES, CODE_BYTES // 2) if halves else (CODE_BYTES,) * 3):
            begun[b, :end] ^= 1
        assert product(1, is_begun=True) == expected[1], name
        assert product(1) != expected[1], name
    return "equal"


@pytest.mark.slow
@pytest.mark.parametrize("isa", TILE_ISAS)
def test_a_call_begins_the_products_of_the_next_one(isa: str, isa_environment: IsaEnvironment) -> None:
    code = "from tests.worker import test_amx as t; print(t.calls_that_begin_the_next_one())"
    assert run_with(isa_environment(isa), code) == "equal"


@njit
def _tiles_and_steps(tokens, gap, n, unit):
    return amx_gemm._tiles(tokens, gap), amx_gemm._chunk_blocks(n, unit)


def test_chunks_are_even_where_that_is_possible() -> None:
    steps = [_tiles_and_steps(16, 0, n, 1)[1] for n in range(1, 200)]
    assert all(0 < step <= min(n, CHUNK) for n, step in enumerate(steps, 1))
    assert all(step % 2 == 0 for n, step in enumerate(steps, 1) if n > CHUNK)
    assert _tiles_and_steps(16, 0, 64, 8)[1] == 16


def test_few_last_tokens_have_no_tile() -> None:
    assert [_tiles_and_steps(tokens, 64, 8, 1)[0] for tokens in (0, 1, 2, 8, 9, 16, 17, 18, 25)] == [
        0,
        1,
        0,
        0,
        1,
        1,
        2,
        1,
        2,
    ]


# ------------------------------------------------------------------ products


def run_with(environment: dict[str, str], code: str) -> str:
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(command, env=COMPILER | os.environ | environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.slow
@pytest.mark.parametrize("isa", TILE_ISAS)
def test_tiles_are_used_from_the_threshold_of_a_format_on(isa: str, isa_environment: IsaEnvironment) -> None:
    """Only formats for which AMX is faster use it, from as many tokens on; the bytes of all formats stay equal."""
    code = "from tests.worker import test_amx as t; print(t.tiles_and_digests_by_choice())"
    by_choice = json.loads(run_with(isa_environment(isa), code))
    expected = {"": {}, "Q4_1:33,Q6_K,Q8_0:48": {"Q4_1": 33, "Q6_K": 16, "Q8_0": 48}}
    assert {choice: tiles for choice, (tiles, _) in by_choice.items()} == expected
    assert len({digest for _, digest in by_choice.values()}) == 1


def tiles_and_digests_by_choice() -> str:
    """By choice of formats, as JSON: from how many tokens on each format's products store sums of tiles, of those that
    ever do, and a digest of all products.

    One process with one set of kernels: a group's choice is in its arena.
    """

    @njit
    def run(params, kind, w, columns, groups, floats, records, stride, packed, tokens, out, out_stride):
        project(params, kind, w, columns, 0, floats, records, stride, packed, tokens, out, out_stride, 0, groups)

    control, params, scratch = (
        np.zeros(act.CONTROL_WORDS, np.int64),
        np.zeros(pb.WORDS, np.int64),
        aligned(MATMUL_BYTES),
    )
    params[pb.TILES_FROM] = control.ctypes.data + 8 * act.TILES_FROM
    params[pb.MULTIPLY] = scratch.ctypes.data
    compiled.load_extra("matmul", lambda name, done, of: None)
    params[pb.MATMUL] = compiled._load("matmul", "any")[1]
    found = {}
    for choice in ("", "Q4_1:33,Q6_K,Q8_0:48"):
        os.environ["STARLING_AMX_FORMATS"] = choice
        act.set_thresholds(control, tile_thresholds() if choice else ())
        rng, tiles, digest = np.random.default_rng(5), dict[str, int](), hashlib.sha256()
        for fmt in BY_ID.values():
            m = random_matrix(fmt.name, 32, 1, rng)
            for tokens in (*range(2, 18), *range(31, 50)):
                x = rng.standard_normal((tokens, m.columns)).astype(np.float32)
                given, stride = activations(x, m.fmt)
                packed = pack(given, stride, m.columns, tokens) if isinstance(m.fmt, QuantizedFormat) else aligned(64)
                out = np.zeros((tokens, 32), np.float32)
                scratch[:] = 0
                numbers = (a.ctypes.data for a in (x, given))
                run(
                    params.ctypes.data,
                    m.fmt.id,
                    m.stream.ctypes.data,
                    m.columns,
                    2,
                    *numbers,
                    stride,
                    packed.ctypes.data,
                    tokens,
                    out.ctypes.data,
                    128,
                )
                digest.update(out.tobytes())
                if scratch[CHUNKS_BYTES:].any():
                    tiles.setdefault(fmt.name, tokens)
        found[choice] = tiles, digest.hexdigest()
    return json.dumps(found)


@pytest.mark.slow
@pytest.mark.parametrize("isa", TILE_ISAS)
def test_the_choice_does_not_matter(isa: str, isa_environment: IsaEnvironment) -> None:
    """Determinism: it depends on the batch, so a token's products must not depend on it."""
    code = "from tests.worker import test_amx as t; t.products_whatever_the_choice(); print('equal')"
    assert run_with(isa_environment(isa), code) == "equal"


@settings(max_examples=100, deadline=None, database=None, derandomize=True)
@given(
    name=st.sampled_from(sorted(ALL_FORMATS)),
    rows=st.integers(1, 70),
    blocks=st.integers(1, 40),
    batches=st.lists(st.tuples(st.integers(2, 150), st.booleans()), min_size=1, max_size=3),
    split=st.integers(0, 5),
    seed=st.integers(0, 2**32 - 1),
)
@example(name="Q8_0", rows=33, blocks=1, batches=[(16, True), (17, True), (31, True)], split=1, seed=1)
@example(name="Q4_1", rows=33, blocks=19, batches=[(18, True), (20, True), (21, True)], split=0, seed=2)
@example(name="Q6_K", rows=48, blocks=40, batches=[(63, True), (64, True), (65, True)], split=2, seed=3)
@example(name="Q2_K", rows=17, blocks=24, batches=[(72, True), (73, True), (32, True)], split=0, seed=4)
@example(name="Q4_K", rows=20, blocks=144, batches=[(97, True), (97, False)], split=1, seed=5)  # three passes
def products_whatever_the_choice(
    name: str, rows: int, blocks: int, batches: list[tuple[int, bool]], split: int, seed: int
) -> None:
    """Batches of tokens, with tiles or without, against one token at a time."""
    rng = np.random.default_rng(seed)
    m = random_matrix(name, rows, -(-blocks * 32 // FORMATS[name].unit), rng)
    x = awkward(max(tokens for tokens, _ in batches), m.columns, rng)
    alone = np.concatenate([multiply(m, x[i : i + 1]) for i in range(len(x))])
    for tokens, by_tiles in batches:
        scratch = aligned(MATMUL_BYTES)
        y = multiply(m, x[:tokens], min(split, groups_of(rows)), scratch, by_tiles)
        assert scratch[CHUNKS_BYTES:].any() == (by_tiles and tokens >= 16)
        assert y.tobytes() == alone[:tokens].tobytes(), (tokens, by_tiles)
