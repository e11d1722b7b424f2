"""AMX tiles: what their instructions are, and that everything around them gives the bytes of the other paths.

`tests/worker/test_matmul.py` multiplies with `STARLING_ISA=tiles`, which is the same kernels with the tile
product itself computed by VNNI, and with `amx` where there is one.
"""

from __future__ import annotations

import os
import subprocess
import sys

import llvmlite.binding as llvm
import pytest
from llvmlite import ir

from stages.worker.kernels import amx
from tests.worker.instruction_sets import available_isas


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


@pytest.mark.parametrize("isa", [isa for isa in available_isas() if isa in ("amx", "tiles")])
def test_the_probe_compares_bytes(isa: str) -> None:
    code = "from stages.worker.kernels.amx_probe import compare; print(compare(1)[0])"
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(command, env=os.environ | {"STARLING_ISA": isa}, capture_output=True, text=True)
    assert done.stdout.split() == ["True"], done.stderr
