"""The kernels that pack and quantize weights give the bytes of their definitions in NumPy."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.models.store import no_progress
from shm.checkpoint import bin_path, load_index
from stages.worker.checkpoint import pack_compiled, quantize_compiled
from stages.worker.checkpoint.bit_program import pack_rows
from stages.worker.checkpoint.fit_k_compiled import choose_fits
from stages.worker.checkpoint.pack_compiled import choose_packer, pack_rows_compiled
from stages.worker.checkpoint.prepare_source import prepare_source
from stages.worker.checkpoint.quantize import NotFinite
from stages.worker.checkpoint.quantize_compiled import SIMPLE, choose_quantizer, quantize_rows, quantize_rows_compiled
from stages.worker.checkpoint.quantize_k import PLAIN
from stages.worker.kernels import compiled, stored_code
from stages.worker.kernels.formats import FORMATS
from tests.properties import examples
from tools.tiny_gguf import Shape, write_model

pytestmark = pytest.mark.slow

DENSE = ("F32", "F16", "BF16")
SHAPE = Shape(2, 256, 4, 2, 64, 512, 512, context_length=64)


def dense_bytes(values: np.ndarray, dense: str) -> np.ndarray:
    """(rows, columns) f32 as (rows, row bytes) u8."""
    if dense == "BF16":
        return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    with np.errstate(over="ignore"):
        return values.astype(np.float16 if dense == "F16" else np.float32).view(np.uint8)


@pytest.mark.parametrize("name", list(FORMATS))
@pytest.mark.parametrize(("rows", "units"), [(1, 1), (16, 3), (33, 2), (80, 5)])
def test_packed_bytes_are_those_of_the_definition(name: str, rows: int, units: int) -> None:
    fmt = FORMATS[name]
    pack = choose_packer(1 << 40, no_progress)
    assert pack is pack_rows_compiled
    source = np.random.default_rng([rows, units]).integers(0, 256, (rows, units * fmt.source_bytes), np.uint8)
    for given_rows in (source, source[::-1]):
        expected, found = np.concatenate(pack_rows(given_rows, fmt)), np.concatenate(pack(given_rows, fmt))
        assert found.shape == expected.shape
        assert found.tobytes() == expected.tobytes()


@settings(deadline=None, max_examples=examples(150))
@given(
    name=st.sampled_from(list(SIMPLE)),
    dense=st.sampled_from(DENSE),
    seed=st.integers(0, 2**32 - 1),
    exponent=st.integers(-140, 20),
    steps=st.sampled_from([0, 0, 1, 2, 7]),
    zeros=st.sampled_from(["", "", "plus", "minus", "both"]),
)
def test_quantized_bytes_are_those_of_the_definition(
    name: str, dense: str, seed: int, exponent: int, steps: int, zeros: str
) -> None:
    """With `steps` the values are a few multiples of a number: ties in magnitude, flat blocks."""
    quantize = choose_quantizer(1 << 40, no_progress)
    assert quantize is quantize_rows_compiled
    rng = np.random.default_rng(seed)
    values = rng.standard_normal((3, 96)).astype(np.float32)
    values = np.round(values * steps) if steps else values
    values = (values * np.float64(2.0**exponent)).astype(np.float32)
    if zeros:
        values[1] = np.abs(values[1])
        values[1, :40] = -0.0 if zeros == "minus" else 0.0
        values[1, 5:40:3] = 0.0 if zeros == "plus" else -0.0
    raw = dense_bytes(values, dense)
    try:
        expected = quantize_rows(raw, dense, name)
    except NotFinite as error:
        with pytest.raises(NotFinite, match=re.escape(str(error).split(",")[0])):
            quantize(raw, dense, name)
        return
    found = quantize(raw, dense, name)
    assert found.shape == expected.shape
    assert found.tobytes() == expected.tobytes()


@pytest.mark.parametrize("name", list(SIMPLE))
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("at", [0, 15, 16, 31, 95])
def test_a_weight_that_is_not_finite_is_found(name: str, value: float, at: int) -> None:
    values = np.linspace(-1, 1, 96, dtype=np.float32)[None].copy()
    values[0, at] = value
    with pytest.raises(NotFinite):
        choose_quantizer(1 << 40, no_progress)(values.view(np.uint8), "F32", name)


@pytest.mark.parametrize("quant", ["", "q4_0", "q4_1", "q8_0"])
def test_a_checkpoint_has_the_same_bytes(quant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_model(tmp_path / "model.gguf", SHAPE, "F16" if quant else "Q4_K_M")
    calls = []
    for module, kernel in ((pack_compiled, "pack_units"), (quantize_compiled, "quantize_blocks")):
        own = getattr(compiled, kernel)
        monkeypatch.setattr(
            compiled, kernel, lambda *arguments, own=own, kernel=kernel: [calls.append(kernel), own(*arguments)][1]
        )
        monkeypatch.setattr(module, "WORTH_BYTES", 1)
    made = {}
    for folder in ("kernels", "plain"):
        (tmp_path / folder).mkdir()
        if folder == "plain":
            monkeypatch.setattr(stored_code, "symbol_path", lambda name, kv_type: tmp_path / "absent")
            monkeypatch.setattr(pack_compiled, "WORTH_BYTES", 1 << 40)
            monkeypatch.setattr(quantize_compiled, "WORTH_BYTES", 1 << 40)
            assert set(calls) == ({"pack_units", "quantize_blocks"} if quant else {"pack_units"})
            calls.clear()
        index = prepare_source(source, tmp_path / folder, quant=quant)
        made[folder] = bin_path(tmp_path / folder / f"{index.digest}.idx").read_bytes()
        assert load_index(tmp_path / folder / f"{index.digest}.idx").pieces == index.pieces
    assert not calls
    assert made["kernels"] == made["plain"]


def test_the_kernels_are_used_where_they_are_stored_and_compiled_where_it_is_worth_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from stages.worker.kernels import pack_units, quantize_blocks  # import the compiler

    assert compiled.PACK_ARGUMENTS == pack_units.ENTRY_ARGUMENTS
    assert compiled.QUANTIZE_ARGUMENTS == quantize_blocks.ENTRY_ARGUMENTS
    kinds = (quantize_blocks.Q8_0, quantize_blocks.SIGNED, quantize_blocks.WITH_MINIMUM)
    assert kinds == (quantize_compiled._Q8_0, quantize_compiled._SIGNED, quantize_compiled._WITH_MINIMUM)
    numbers = {"F32": quantize_blocks.F32, "F16": quantize_blocks.F16, "BF16": quantize_blocks.BF16}
    assert {name: number for name, (number, _) in quantize_compiled._DENSE.items()} == numbers
    choose_packer(1 << 40, no_progress)
    choose_quantizer(1 << 40, no_progress)
    monkeypatch.setattr(compiled.build, "build", None)  # they are stored
    assert choose_packer(1, no_progress) is pack_rows_compiled
    assert choose_quantizer(1, no_progress) is quantize_rows_compiled
    monkeypatch.setattr(stored_code, "symbol_path", lambda name, kv_type: tmp_path / "absent")
    assert choose_packer(1, no_progress) is pack_rows
    assert choose_quantizer(1, no_progress) is quantize_rows


@pytest.mark.parametrize("error", [RuntimeError("a compiler was killed"), OSError("No space left on device")])
def test_weights_are_converted_without_kernels_where_the_compiler_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise error

    monkeypatch.setattr(stored_code, "symbol_path", lambda name, kv_type: tmp_path / "absent")
    monkeypatch.setattr(compiled.build, "build", fail)
    assert choose_packer(1 << 40, no_progress) is pack_rows
    assert choose_quantizer(1 << 40, no_progress) is quantize_rows
    assert choose_fits(1 << 40, no_progress) is PLAIN
