"""Packed activations: each field of each record is at the place that the layout gives it."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.worker.kernels.buffer_sizes import PACKED, RECORD, packed_bytes
from stages.worker.kernels.formats import FORMATS
from stages.worker.kernels.quantize_activations import SCALE, ZERO
from tests.worker.matrices import activations, awkward, pack


@settings(deadline=None)
@given(tokens=st.integers(1, 50), columns=st.integers(1, 200), seed=st.integers(0, 2**32 - 1))
def test_every_field_is_at_its_place(tokens: int, columns: int, seed: int) -> None:
    records, stride = activations(awkward(tokens, columns, np.random.default_rng(seed)), FORMATS["Q4_0"])
    packed = pack(records, stride, columns, tokens)
    blocks, lanes = -(-columns // 32), -(-tokens // 16) * 16
    assert packed.size == packed_bytes(tokens, columns) == lanes // 16 * blocks * PACKED
    by_16 = packed.reshape(-1, blocks, PACKED)
    values = by_16[..., : 16 * SCALE].reshape(-1, blocks, 16, SCALE)
    fields = by_16[..., 16 * SCALE :].reshape(-1, blocks, (ZERO - SCALE) // 4, 16, 4)
    for t in range(lanes):
        if t < tokens:
            expected = records.reshape(tokens, stride)[t, : blocks * RECORD].reshape(blocks, RECORD)
        else:
            expected = np.full((blocks, RECORD), 0xA5, np.uint8)  # as before
        assert values[t // 16, :, t % 16].tobytes() == expected[:, :SCALE].tobytes()
        assert fields[t // 16, :, :, t % 16].tobytes() == expected[:, SCALE:ZERO].tobytes()
