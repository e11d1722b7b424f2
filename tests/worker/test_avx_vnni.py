"""The kernels of AVX-VNNI as compiled, on any CPU; `dots` runs the same kernels with emulated dot products.

That `dots`, and `avx-vnni` on a CPU that has it, give the bytes of all others is in test_matmul.py.
"""

from __future__ import annotations

import re

import pytest

from tools.bench.phases.avx_vnni_cycles import DOTS, FORMATS, assembly, inner_loop, multiplies

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def compiled() -> dict[str, str]:
    return assembly("avx-vnni")


@pytest.mark.parametrize("tokens", list(DOTS))
@pytest.mark.parametrize("name", FORMATS)
def test_each_dot_product_is_one_instruction(compiled: dict[str, str], name: str, tokens: str) -> None:
    loop = inner_loop(compiled[f"{name} {tokens}"])
    found = [line for line in loop if multiplies(line)]
    assert len(found) == DOTS[tokens]
    # VEX encodes it on a CPU without AVX-512: three of the registers 0 to 15, of 256 bits.
    register = r"%ymm(?:[0-9]|1[0-5])"
    of_256_bits = re.compile(rf"\{{vex\}}\s+vpdpbusd\s+{register}, {register}, {register}")
    assert all(of_256_bits.fullmatch(" ".join(line.split())) for line in found)
    assert "zmm" not in compiled[f"{name} {tokens}"]


@pytest.mark.parametrize("name", FORMATS)
def test_codes_are_the_unsigned_operand(compiled: dict[str, str], name: str) -> None:
    """The first operand, as written here, is signed: a value that is in all lanes. The second one holds codes."""
    broadcast: dict[str, bool] = {}
    for line in inner_loop(compiled[f"{name} 1"]):
        registers = re.findall(r"%ymm\d+", line)
        if multiplies(line):
            values, codes, _ = registers
            assert (broadcast[values], broadcast[codes]) == (True, False)
        elif registers:
            broadcast[registers[-1]] = "vpbroadcastd" in line


def test_without_it_the_same_loops_multiply_pairs() -> None:
    found = assembly("portable")
    assert all("vpdpbusd" not in text for text in found.values())
    assert sum("vpmaddubsw" in line for line in inner_loop(found["Q4_0 2"])) == DOTS["2"]
