"""AMX tiles: what their instructions are, and that everything around them gives the bytes of the other paths.

`tests/worker/test_matmul.py` multiplies with `STARLING_ISA=tiles`, which is the same kernels with emulated tiles, and
with `amx` where there are some.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numba import njit

from stages.worker.checkpoint.layout import groups_of
from stages.worker.kernels import amx_tiles
from stages.worker.kernels.buffer_sizes import CHUNKS_BYTES, MATMUL_BYTES, PRODUCT, SPILL_BYTES
from stages.worker.kernels.build import COMPILER
from stages.worker.kernels.features import ALL_FORMATS
from stages.worker.kernels.formats import FORMATS, QUANTIZED
from stages.worker.kernels.formats.description import RUNS
from tests.worker.instruction_sets import available_isas
from tests.worker.matrices import aligned, awkward, digest_of_products, multiply, random_matrix


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

KERNELS = ("_whole_of_starts", "_whole_of_minimums", "_half_of_starts", "_half_of_minimums")
STREAMING = ("Q4_0", "Q4_K", "Q6_K", "Q2_K", "Q8_0")  # each mix, whole units, and codes that are only copied


# The kernels' assembly for a CPU with AMX, by name, as JSON: in a process of its own, which cannot run them. The first
# import settles on the host's CPU; numba reads the environment when it is imported after that.
ASSEMBLY = f"""
import json, os
import stages.worker
os.environ |= {{"NUMBA_CPU_NAME": "sapphirerapids", "NUMBA_CPU_FEATURES": "+amx-tile,+amx-int8"}}
from numba import types
from stages.worker.kernels import amx
from stages.worker.kernels.formats import FORMATS
found = {{}}
for name in {KERNELS}:
    kernel = getattr(amx, name)
    kernel.compile((*(types.int64,) * 6, types.boolean, *(types.int64,) * 3))
    found[name] = kernel.inspect_asm(kernel.signatures[0])
for name in {STREAMING}:
    kernel = amx._streaming(FORMATS[name])
    kernel.compile((types.int64,) * 10)
    found[name] = kernel.inspect_asm(kernel.signatures[0])
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def assembly() -> dict[str, str]:
    found: dict[str, str] = json.loads(run_with({"STARLING_ISA": "vnni"}, ASSEMBLY))
    return found


def basic_blocks(assembly: str) -> list[list[str]]:
    """The instructions of each block without labels and jumps inside, blanks removed."""
    blocks: list[list[str]] = [[]]
    for line in assembly.splitlines():
        instruction = "".join(line.split("#")[0].split())
        if instruction.endswith(":"):
            blocks.append([])
        elif instruction and not instruction.startswith("."):
            blocks[-1].append(instruction)
            if instruction.startswith("j"):
                blocks.append([])
    return blocks


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


def is_vector_store(instruction: str) -> bool:
    """Whether it stores 16 lanes to memory that is not of the stack: the vectors that registers have no room for."""
    _, _, to = instruction.rpartition(",")
    return instruction.startswith("vmov") and "%zmm" in instruction and instruction.endswith(")") and "%rsp" not in to


@pytest.mark.slow
@pytest.mark.skipif("vnni" not in available_isas(), reason="compiles the kernels of VNNI and more")
@pytest.mark.parametrize("name", KERNELS + STREAMING)
def test_the_main_loop_is_one_block_in_the_order_of_the_pipeline(assembly: dict[str, str], name: str) -> None:
    loops = [block for block in basic_blocks(assembly[name]) if sum("tilestored" in line for line in block) == 2]
    assert len(loops) == 1
    loop = loops[0]
    assert [without_address(line) for line in loop if "tmm" in line] == PAIR_OF_STEPS
    # The f32 operations of 8 tokens each lie before and after each store.
    stores = [i for i, line in enumerate(loop) if "tilestored" in line]
    operations = [sum(line.startswith("vfmadd") for line in part) for part in (loop[: stores[0]], loop[stores[1] :])]
    operations.append(sum(line.startswith("vfmadd") for line in loop[stores[0] : stores[1]]))
    has_minimums = FORMATS[name].scales.minimum if name in STREAMING else "minimums" in name
    eight_tokens = 8 * (3 if has_minimums else 2)
    moved = 8 if name == "Q2_K" else 0  # LLVM moves the minimums of 8 tokens behind the next store
    assert operations == [eight_tokens - moved, eight_tokens + moved, 2 * eight_tokens]
    if name in STREAMING:
        # The vectors of an unpacked block before the first tiles; those of a second one between the stores.
        fmt = FORMATS[name]
        vectors = RUNS + fmt.scales.parts * (1 + fmt.scales.minimum)
        first = next(i for i, line in enumerate(loop) if "tmm" in line)
        unpacked = [sum(is_vector_store(line) for line in part) for part in (loop[:first], loop[stores[0] : stores[1]])]
        assert unpacked == [vectors, 0 if fmt.scales.halves else vectors]


# ------------------------------------------------------------------ emulation


def products_of_emulated_tiles() -> str:
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


@pytest.mark.slow
@pytest.mark.skipif("tiles" not in available_isas(), reason="the emulation multiplies with VNNI")
def test_emulated_tiles_keep_what_was_loaded_and_multiplied() -> None:
    code = "from tests.worker import test_amx as t; print(t.products_of_emulated_tiles())"
    assert run_with({"STARLING_ISA": "tiles"}, code) == "equal"


# ------------------------------------------------------------------ products


TILE_ISAS = [isa for isa in available_isas() if isa in ("amx", "tiles")]


def run_with(environment: dict[str, str], code: str) -> str:
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(command, env=COMPILER | os.environ | environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("isa", TILE_ISAS)
def test_tiles_are_used_from_the_threshold_of_a_format_on(isa: str) -> None:
    """Only formats for which AMX is faster use it, from as many tokens on; the bytes of all formats stay equal."""
    environment = {"STARLING_ISA": isa, "STARLING_AMX_FORMATS": "Q4_1:33,Q6_K,Q8_0:48"}
    found = run_with(environment, "from tests.worker import test_amx as t; print(t.first_tokens_by_tiles())")
    assert json.loads(found) == {"Q4_1": 33, "Q6_K": 16, "Q8_0": 48}
    code = "from tests.worker.matrices import digest_of_products as d; print(d())"
    assert run_with(environment, code) == digest_of_products()


def first_tokens_by_tiles() -> str:
    """From how many tokens on products write where AMX stores its sums, by format, as JSON: of those that ever do."""
    rng = np.random.default_rng(5)
    found = {}
    for fmt in QUANTIZED:
        m = random_matrix(fmt.name, 32, 1, rng)
        for tokens in range(2, 50):
            scratch = aligned(MATMUL_BYTES)
            multiply(m, rng.standard_normal((tokens, m.columns)).astype(np.float32), scratch=scratch)
            if scratch[CHUNKS_BYTES:].any():
                found[fmt.name] = tokens
                break
    return json.dumps(found)


@pytest.mark.slow
@pytest.mark.parametrize("isa", TILE_ISAS)
def test_the_choice_does_not_matter(isa: str) -> None:
    """Determinism: it depends on the batch, so a token's products must not depend on it."""
    code = "from tests.worker import test_amx as t; t.products_whatever_the_choice(); print('equal')"
    assert run_with({"STARLING_ISA": isa}, code) == "equal"


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
