"""The quantization formats that the kernels compute with: one module each, collected here.

A new format is a module that describes it (description.py), a line here, and an entry of the reference implementation
(tools/reference/blocks.py): ingest, every kernel and the tests follow from these.
"""

from __future__ import annotations

from stages.worker.kernels.formats.bf16 import BF16
from stages.worker.kernels.formats.description import BLOCK, GROUP, DenseFormat, Format, QuantizedFormat
from stages.worker.kernels.formats.f16 import F16
from stages.worker.kernels.formats.f32 import F32
from stages.worker.kernels.formats.iq4_nl import IQ4_NL
from stages.worker.kernels.formats.iq4_xs import IQ4_XS
from stages.worker.kernels.formats.mxfp4 import MXFP4
from stages.worker.kernels.formats.q2_k import Q2_K
from stages.worker.kernels.formats.q3_k import Q3_K
from stages.worker.kernels.formats.q4_0 import Q4_0
from stages.worker.kernels.formats.q4_1 import Q4_1
from stages.worker.kernels.formats.q4_k import Q4_K
from stages.worker.kernels.formats.q5_0 import Q5_0
from stages.worker.kernels.formats.q5_1 import Q5_1
from stages.worker.kernels.formats.q5_k import Q5_K
from stages.worker.kernels.formats.q6_k import Q6_K
from stages.worker.kernels.formats.q8_0 import Q8_0

__all__ = [
    "BLOCK",
    "BY_ID",
    "DENSE",
    "FORMATS",
    "GROUP",
    "QUANTIZED",
    "DenseFormat",
    "Format",
    "QuantizedFormat",
]

DENSE: tuple[DenseFormat, ...] = (F32, F16, BF16)
QUANTIZED: tuple[QuantizedFormat, ...] = (
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
    Q4_K,
    Q5_K,
    Q6_K,
    IQ4_NL,
    Q2_K,
    Q3_K,
    IQ4_XS,
    MXFP4,
)
FORMATS: dict[str, Format] = {f.name: f for f in (*DENSE, *QUANTIZED)}
BY_ID: dict[int, Format] = {f.id: f for f in FORMATS.values()}
