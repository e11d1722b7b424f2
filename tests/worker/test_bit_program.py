"""Packing by moving bits gives the bytes of the definition in layout.py, for every format."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from stages.worker.checkpoint.bit_program import BitProgram, NoProgram, pack_rows, program_of
from stages.worker.checkpoint.layout import pack
from stages.worker.kernels.formats import FORMATS, QUANTIZED


@pytest.mark.parametrize("name", list(FORMATS))
@pytest.mark.parametrize(("rows", "units"), [(1, 1), (16, 3), (33, 2), (80, 5)])
def test_the_bytes_are_those_of_the_definition(name: str, rows: int, units: int) -> None:
    fmt = FORMATS[name]
    source = np.random.default_rng([rows, units]).integers(0, 256, (rows, units * fmt.source_bytes), np.uint8)
    for given in (source, source[::-1]):
        expected = np.concatenate(list(pack(given, fmt)))
        found = np.concatenate(pack_rows(given, fmt))
        assert found.shape == expected.shape
        assert found.tobytes() == expected.tobytes()


@pytest.mark.parametrize("fmt", QUANTIZED, ids=lambda fmt: fmt.name)
def test_every_quantized_format_only_moves_bits(fmt) -> None:  # type: ignore[no-untyped-def]
    assert program_of(fmt.name) is not None


def test_a_format_that_does_more_is_left_to_the_definition() -> None:
    fmt = FORMATS["Q8_0"]

    def squared(rows: np.ndarray) -> np.ndarray:
        return np.concatenate(list(pack(rows * rows, fmt)))

    with pytest.raises(NoProgram, match="Q8_0"):
        BitProgram(dataclasses.replace(fmt), squared)
