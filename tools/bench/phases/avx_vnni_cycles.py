"""`python -m tools.bench.phases.avx_vnni_cycles`: predicts what AVX-VNNI gains over AVX2 alone, with llvm-mca.

The matrix products are compiled for both instruction sets, without running them, and llvm-mca schedules the inner loop
of each with its model of Alder Lake's large cores, for a block of 32 values of 32 rows and two tokens, and of 16 rows
and one.  It is a prediction: all data are in the first-level cache, and a loop never ends.  The last line is JSON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import click

from tools.bench.phases.static_cycles import basic_blocks, found_program, schedule

CPU = "alderlake"
FORMATS = ("Q4_0", "Q4_1", "Q4_K", "Q5_K", "Q6_K", "Q8_0")
ISAS = ("portable", "avx-vnni")
DOTS = {"1": 16, "2": 64}  # instructions of 256 bits that multiply, by the tokens of a loop's block
_MULTIPLIES = ("vpmaddubsw", "vpdpbusd")

# Prints assembly by format and tokens as JSON. In a process of its own, which takes this CPU to have AVX-VNNI.
_EMIT = f"""
import json
from pipeline.runtime import cpu
real = cpu.fields
cpu.fields = lambda: dict(real(), flags=real().get("flags", "") + " avx_vnni")
import stages.worker
from numba import njit, types
from stages.worker.kernels import gemm, gemv
from stages.worker.kernels.formats import FORMATS
from stages.worker.kernels.simd import INLINE
found, integer = {{}}, types.int64
def add(name, kernel, arguments):
    kernel.compile((integer,) * arguments)
    found[name] = kernel.inspect_asm(kernel.signatures[0])
for name in {FORMATS}:
    kind = FORMATS[name].id
    @njit(**INLINE)
    def two(u, v, blocks, x, stride, out, out_stride, gap):
        gemm._quantized_2(kind, u, v, blocks, x, stride, out, out_stride, gap, False, u, v, 0)
    add(name + " 1", gemv._quantized(FORMATS[name]), 6)
    add(name + " 2", two, 8)
print(json.dumps(found))
"""


def assembly(isa: str) -> dict[str, str]:
    """The kernels' assembly for an instruction set, by "FORMAT TOKENS"."""
    environment = os.environ | {"STARLING_ISA": isa}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _EMIT], env=environment, stdout=subprocess.PIPE, text=True, check=True
    )
    found: dict[str, str] = json.loads(done.stdout)
    return found


def inner_loop(text: str) -> list[str]:
    """The instructions of the block of code that multiplies most."""
    loop = max(basic_blocks(text), key=lambda block: sum(map(multiplies, block)))
    return [line for line in loop if not line.startswith("j")]


def multiplies(instruction: str) -> bool:
    """Whether it multiplies codes and activations."""
    return any(name in instruction for name in _MULTIPLIES)


@click.command()
@click.option("--llvm-mca", "program", help="The program, of LLVM 17 or later; default: that of the PATH.")
def main(program: str | None) -> None:
    """Predict cycles of a block of the matrix products with AVX2 alone and with AVX-VNNI."""
    program = found_program(program)
    texts = {isa: assembly(isa) for isa in ISAS}
    found: dict[str, dict[str, float]] = {}
    click.echo(f"{'format, tokens':<16}" + "".join(f"{isa:>10}" for isa in ISAS) + f"{'gain':>8}")
    for name in texts[ISAS[0]]:
        cycles = [schedule(program, inner_loop(texts[isa][name]), CPU, ("+avxvnni",)).cycles for isa in ISAS]
        found[name] = dict(zip(ISAS, cycles, strict=True))
        click.echo(f"{name:<16}" + "".join(f"{n:10.1f}" for n in cycles) + f"{cycles[0] / cycles[1]:7.2f}x")
    click.echo(json.dumps(found))


if __name__ == "__main__":
    main()
