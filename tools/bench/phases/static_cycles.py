"""`python -m tools.bench.phases.static_cycles`: predicts cycles of the matrix products' inner loops with llvm-mca.

For CPUs that are not here: the kernels are compiled for Sapphire Rapids, without running them, and llvm-mca
schedules the instructions of each main loop.  It is a prediction: all data are in the first-level cache,
branches cost nothing, and a loop never ends.  Needs llvm-mca (Debian: `llvm-19`).  What the cycles mean for whole steps
is in amx_steps.py.

LLVM's model of Sapphire Rapids does 512-bit f32 instructions on one port.  That is what was measured beside tile
instructions, whose loops it is used for; dot products without tiles use the two ports of Ice Lake's model.  Neither
knows tiles (all their instructions have a latency of 100, four begin in a cycle), so each is replaced by what it takes
from others:

    tileloadd     a load for each row, two a cycle
    tilestored    a store for each of 16 rows
    tdpbsud       nothing, but no product takes less than 16 cycles
    tilezero      nothing
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from typing import Any, NamedTuple

import click

from stages.worker.kernels.formats import QUANTIZED
from stages.worker.kernels.formats.description import RUNS
from tools.bench.phases import amx_steps
from tools.bench.phases.amx_steps import Cycles

TILE_CPU, DOT_CPU = "sapphirerapids", "icelake-server"
KERNELS = ("_whole_of_starts", "_whole_of_minimums", "_half_of_starts", "_half_of_minimums")
STREAMING = ("Q4_0", "Q4_1", "Q4_K", "Q6_K", "Q2_K", "Q8_0")
PROGRAMS = (*(f"llvm-mca-{version}" for version in range(21, 16, -1)), "llvm-mca")
DOTS = (6, 4, 2)  # tokens of gemm.py's tiles
A_TILES, TILE_ROWS, PRODUCT_CYCLES, ITERATIONS = (2, 3), 16, 16, 200
MACS = 16 * 16 * 32
SCALES = {fmt.name: fmt.scales for fmt in QUANTIZED}

# Prints assembly by name as JSON. In a process of its own, which cannot run the kernels: the first import settles on
# the host's CPU; numba reads the environment when it is imported after that.
_EMIT = f"""
import json, os
import stages.worker
os.environ |= {{"NUMBA_CPU_NAME": CPU, "NUMBA_CPU_FEATURES": FEATURES}}
from numba import types
from stages.worker.kernels import amx, gemm, unpack
from stages.worker.kernels.formats import FORMATS
found, integer = {{}}, types.int64
def add(name, kernel, signature):
    kernel.compile(signature)
    found[name] = kernel.inspect_asm(kernel.signatures[0])
if "amx-tile" in FEATURES:
    for name in {KERNELS}:
        signature = (*(integer,) * 6, types.boolean, *(integer,) * 3, types.boolean, *(integer,) * 2)
        add(name, getattr(amx, name), signature)
    for name in {STREAMING}:
        add(name, amx._streaming(FORMATS[name]), (integer,) * 13)
else:
    for tokens in {DOTS}:
        add(str(tokens), getattr(gemm, f"_quantized_{{tokens}}"), (*(integer,) * 9, types.boolean, *(integer,) * 3))
    for name in {STREAMING}:
        add(name, unpack._quantized(FORMATS[name]), (integer,) * 4)
print(json.dumps(found))
"""


def assembly(cpu: str, features: str) -> dict[str, str]:
    """The kernels' assembly for another CPU, by name."""
    code = f"CPU, FEATURES = {cpu!r}, {features!r}\n{_EMIT}"
    environment = os.environ | {"STARLING_ISA": "vnni"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], env=environment, stdout=subprocess.PIPE, text=True, check=True
    )
    found: dict[str, str] = json.loads(done.stdout)
    return found


def tile_assembly() -> dict[str, str]:
    """Assembly of the kernels with AMX tiles."""
    return assembly(TILE_CPU, "+amx-tile,+amx-int8")


def basic_blocks(text: str) -> list[list[str]]:
    """The instructions of each block without labels and jumps inside."""
    blocks: list[list[str]] = [[]]
    for line in text.splitlines():
        instruction = line.split("#")[0].strip()
        if instruction.endswith(":"):
            blocks.append([])
        elif instruction and not instruction.startswith("."):
            blocks[-1].append(instruction)
            if instruction.startswith("j"):
                blocks.append([])
    return blocks


def main_loop(text: str) -> list[str]:
    """The loop of two products of a kernel with tiles."""
    [loop] = [block for block in basic_blocks(text) if sum("tilestored" in line for line in block) == 2]
    return loop


def _dots_of_a_block(text: str, tokens: int, minimums: bool) -> list[str]:
    """What a block of 32 takes in a tile of so many tokens and two row groups; minimums are in the block behind it."""
    blocks = basic_blocks(text)
    [at] = [i for i, block in enumerate(blocks) if sum("vpdpbusd" in line for line in block) == 16 * tokens]
    return blocks[at] + (blocks[at + 1] if minimums else [])


def is_vector_store(instruction: str) -> bool:
    """Whether it stores 16 lanes to memory that is not of the stack: the vectors that registers have no room for."""
    _, _, to = instruction.rpartition(",")
    return instruction.startswith("vmov") and "%zmm" in instruction and instruction.endswith(")") and "%rsp" not in to


def _unpacking(text: str, name: str) -> tuple[list[str], float]:
    """The longest loop that unpacks, and how many blocks of 16 rows it unpacks."""
    loop = max(basic_blocks(text), key=lambda block: sum(map(is_vector_store, block)))
    scales = SCALES[name]
    return loop, sum(map(is_vector_store, loop)) / (RUNS + scales.parts * (1 + scales.minimum))


def without_tiles(loop: list[str], halves: bool) -> list[str]:
    """A loop whose tile instructions are replaced as the top of the file says."""
    found = []
    for line in loop:
        name = line.split()[0]
        if name == "tileloadd":
            rows = TILE_ROWS if int(line[-1]) in A_TILES else 4 if halves else 8
            found += ["prefetcht0 (%rax)"] * rows
        elif name == "tilestored":
            found += ["movq %rax, (%rax)"] * TILE_ROWS
        elif name not in ("tilezero", "tdpbsud") and not name.startswith("j"):
            found.append(line)
    return found


class Prediction(NamedTuple):
    """Of one iteration of a loop."""

    cycles: float
    ports: dict[str, float]  # cycles in which each port is used


def found_program(named: str | None) -> str:
    """The llvm-mca that is named, or that of the PATH. Raises `UsageError` without one that knows Sapphire Rapids."""
    program = named or next(filter(None, map(shutil.which, PROGRAMS)), None)
    if program is None:
        raise click.UsageError("llvm-mca is not on the PATH: install the package llvm-19, or name it with --llvm-mca")
    if not all(port.startswith("SPR") for port in schedule(program, ["vpaddd %zmm0, %zmm1, %zmm2"], TILE_CPU).ports):
        raise click.UsageError(f"{program} has no model of Sapphire Rapids: take that of LLVM 17 or later")
    return program


def schedule(program: str, lines: list[str], cpu: str, features: tuple[str, ...] = ()) -> Prediction:
    """What llvm-mca finds for a loop of these instructions. `features`: of LLVM, besides those of `cpu`."""
    command = [program, f"-mcpu={cpu}", *(f"-mattr={one}" for one in features), f"-iterations={ITERATIONS}", "--json"]
    done = subprocess.run(command, input="\n".join(lines) + "\n", stdout=subprocess.PIPE, text=True, check=True)
    report: dict[str, Any] = json.loads(done.stdout)
    region, names = report["CodeRegions"][0], report["TargetInfo"]["Resources"]
    pressures = region["ResourcePressureView"]["ResourcePressureInfo"]
    ports = {names[p["ResourceIndex"]]: p["ResourceUsage"] for p in pressures if p["InstructionIndex"] == len(lines)}
    return Prediction(region["SummaryView"]["TotalCycles"] / ITERATIONS, ports)


def _row(name: str, cycles: float, found: Prediction, blocks: float, ghz: float, multiplies: bool = True) -> str:
    busiest, used = max(found.ports.items(), key=lambda item: item[1])
    rate = f"{MACS * ghz / cycles:5.0f} GMAC/s" if multiplies else " " * 12
    return f"{name:<36}{cycles:6.1f} cycles {cycles / ghz:6.1f} ns {rate}   {busiest} {used / blocks:.1f}"


@click.command()
@click.option("--llvm-mca", "program", help="The program, of LLVM 17 or later; default: that of the PATH.")
@click.option("--ghz", default=3.7, show_default=True, help="Of the predicted CPU.")
def main(program: str | None, ghz: float) -> None:
    """Predict cycles for 16 tokens x 16 rows x a block of 32, how long the busiest port works meanwhile, and steps."""
    program = found_program(program)
    cycles: dict[str, float] = {}
    for name, text in tile_assembly().items():
        halves = SCALES[name].halves if name in SCALES else name.startswith("_half")
        found = schedule(program, without_tiles(main_loop(text), halves), TILE_CPU)
        blocks: float = 1 if halves else 2  # of the loop: one has two products in a format of halves
        label = f"tiles, {name[1:].replace('_', ' ')}" if name[0] == "_" else f"tiles and unpacking, {name}"
        cycles[name] = max(found.cycles / blocks, 2 * PRODUCT_CYCLES / blocks)
        click.echo(_row(label, cycles[name], found, blocks, ghz))
    unpacking, dots = {}, {}
    for name, text in assembly(DOT_CPU, "").items():
        if name in STREAMING:
            loop, blocks = _unpacking(text, name)
            found = schedule(program, without_tiles(loop, False), DOT_CPU)
            unpacking[name] = found.cycles / blocks
            click.echo(_row(f"unpacking alone, {name}", found.cycles / blocks, found, blocks, ghz, False))
            continue
        for minimums in (False, True):
            found = schedule(program, _dots_of_a_block(text, int(name), minimums), DOT_CPU)
            blocks = 2 * int(name) / 16  # as many products of 16 tokens
            label = f"dot products of {name} tokens" + (", minimums" if minimums else "")
            click.echo(_row(label, found.cycles / blocks, found, blocks, ghz))
            dots[int(name)] = found.cycles / (2 * int(name))  # with minimums, which come last
    tiles = {"Q4_1": cycles["_whole_of_minimums"], "Q8_0": cycles["_whole_of_starts"]}
    click.echo("\nthe demo model on two cores of the Xeon:")
    click.echo("\n".join(amx_steps.lines(Cycles(tiles, cycles, unpacking, dots, ghz))))


if __name__ == "__main__":
    main()
