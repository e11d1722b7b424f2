"""AMX tiles: what their instructions are, and that everything around them gives the bytes of the other paths.

`tests/worker/test_matmul.py` multiplies with `STARLING_ISA=tiles`, which is the same kernels with the tile
product itself computed by VNNI, and with `amx` where there is one.
"""

from __future__ import annotations

import os
import subprocess
import sys

import llvmlite.binding as llvm
import numpy as np
import pytest
from llvmlite import ir

from stages.worker.kernels import amx, gemm
from stages.worker.kernels.buffer_sizes import MATMUL_BYTES
from stages.worker.kernels.formats import QUANTIZED
from tests.worker.instruction_sets import available_isas
from tests.worker.matrices import aligned, digest_of_products, multiply, random_matrix


def shapes() -> list[tuple[int, int]]:
    """Rows and bytes of a row of each tile, as the CPU reads them."""
    data = b"".join(word.to_bytes(4, "little") for word in amx.configuration())
    assert len(data) == 64
    assert data[0] == 1  # the palette of 8 tiles of at most 16 rows of 64 bytes
    assert not any(data[1:16])
    assert not any(data[32:48])
    assert not any(data[56:])
    return [(data[48 + i], int.from_bytes(data[16 + 2 * i : 18 + 2 * i], "little")) for i in range(8)]


@pytest.mark.parametrize(("sums", "a", "b", "vectors"), [(0, 2, 4, 8), (1, 3, 5, 8), (0, 6, 7, 4), (1, 6, 7, 4)])
def test_a_product_is_five_instructions(sums: int, a: int, b: int, vectors: int) -> None:
    tiles = shapes()
    assert tiles[sums] == (16, 64)
    assert tiles[a] == (16, 4 * vectors)  # 16 tokens, 4 bytes for each code vector
    assert tiles[b] == (vectors, 64)
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    module = ir.Module()
    word = ir.IntType(64)
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [word] * 4), "product")
    builder = ir.IRBuilder(function.append_basic_block())
    amx._emit_tiles(sums, a, b, vectors)(builder, *function.args)
    builder.ret_void()
    target = llvm.Target.from_triple("x86_64-pc-linux-gnu")
    machine = target.create_target_machine(cpu="sapphirerapids", features="+amx-int8,+amx-tile", opt=3)
    assembly = machine.emit_assembly(llvm.parse_assembly(str(module))).splitlines()
    tile_lines = [line.split(None, 1) for line in assembly if "tmm" in line]
    assert [name for name, _ in tile_lines] == ["tilezero", "tileloadd", "tileloadd", "tdpbsud", "tilestored"]
    operands = [text.replace(" ", "") for _, text in tile_lines]
    assert operands[0] == f"%tmm{sums}"
    assert operands[1].endswith(f",%tmm{a}")
    assert operands[2].endswith(f",%tmm{b}")
    assert operands[3] == f"%tmm{b},%tmm{a},%tmm{sums}"  # AT&T: unsigned codes, signed values, sums
    assert operands[4].startswith(f"%tmm{sums},")


TILE_ISAS = [isa for isa in available_isas() if isa in ("amx", "tiles")]


def run_with(environment: dict[str, str], code: str) -> str:
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("isa", TILE_ISAS)
def test_formats_without_tiles_do_not_touch_the_stored_sums(isa: str) -> None:
    """Only formats for which AMX is faster use it; the bytes of all formats stay equal."""
    environment = {"STARLING_ISA": isa, "STARLING_AMX_FORMATS": "Q4_1,Q6_K"}
    assert run_with(environment, "from tests.worker import test_amx as t; print(t.formats_by_tiles())") == "Q4_1 Q6_K"
    code = "from tests.worker.matrices import digest_of_products as d; print(d())"
    assert run_with(environment, code) == digest_of_products()


def formats_by_tiles() -> str:
    """The formats whose products of 16 tokens write the area of scratch where AMX stores its sums."""
    rng = np.random.default_rng(5)
    found = []
    for fmt in QUANTIZED:
        m = random_matrix(fmt.name, 32, 1, rng)
        scratch = aligned(MATMUL_BYTES)
        multiply(m, rng.standard_normal((16, m.columns)).astype(np.float32), scratch=scratch)
        if scratch[gemm.CHUNKS_BYTES :].any():
            found.append(fmt.name)
    return " ".join(sorted(found))
