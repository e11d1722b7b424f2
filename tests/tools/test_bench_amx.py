"""Steps of a CPU with AMX, predicted: known answers, and those that docs/performance.md has."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.bench.phases import amx_steps

CYCLES = amx_steps.Cycles(
    tiles={"Q4_1": 51.6, "Q8_0": 34.6},
    streaming={"Q4_1": 65.6, "Q8_0": 47.1},
    unpacking={"Q4_1": 9.1, "Q8_0": 9.1},
    dots={2: 7.94, 4: 6.98, 6: 6.39},
    ghz=3.7,
)


def test_a_step_with_amx_takes_its_products_or_the_reading_of_weights_and_the_rest() -> None:
    assert CYCLES.tiles_of(64, "Q4_1") == pytest.approx(65.6 + 3 * 51.6)
    assert CYCLES.tiles_of(512, "Q4_1") == pytest.approx(9.1 + 32 * 51.6)
    assert CYCLES.products_s(8, "Q4_1", 512e9) == pytest.approx((9.1 + 8 * 6.98) / 3.7 / 2)
    sixteen = amx_steps.batch(CYCLES, 16)
    assert sixteen.rate(1.0) == sixteen.rate(0.78) == pytest.approx(16 / (sixteen.read_s + sixteen.rest_s))
    assert sixteen.rate(0.5) == pytest.approx(16 / (2 * sixteen.products_s + sixteen.rest_s))
    whole, one = amx_steps.prefill(CYCLES, 4096), amx_steps.prefill(CYCLES, 512)
    assert whole.products_s == pytest.approx(8 * one.products_s)
    assert whole.rest_s > 8 * one.rest_s  # positions attend to those of the chunks before theirs
    assert amx_steps.prefill(CYCLES, 4096, attention=amx_steps.FMA).rest_s < whole.rest_s


def test_predicted_cells_are_those_of_the_page() -> None:
    lines = amx_steps.lines(CYCLES)
    page = (Path(__file__).parents[2] / "docs" / "performance.md").read_text()
    section = page[page.index("### Targets on a CPU with AMX") : page.index("### How AMX is used")]
    for row in amx_steps.ROWS:
        assert f"| {row.work} | {row.target:g}x |" in section.replace("batch 1, ", "")
    assert "batch 8: 1,624 to 1,910 tokens/s, 3.0 to 3.5 times llama.cpp; target 3.5" in lines
    assert "batch 32: 2,460 to 3,399 tokens/s, 3.0 to 4.2 times llama.cpp; target 4" in lines
    assert "2,048 cached: 239 tokens/s, 3.4 times llama.cpp; target 3.5" in lines
    assert "HTTP, clients 1, prompts of 100: 1.6 to 1.7 times llama-server; target 2.2" in lines
    for line in lines:
        if " times " in line:
            ratio = line.split(" times ")[0].split(", ")[-1].split(": ")[-1]
            assert " to ".join(f"{one}x" for one in ratio.split(" to ")) in section, line
