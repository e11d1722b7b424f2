"""What a GGUF file says of itself: architecture, quantization, context length. Reads its header only."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from pipeline.errors import ConfigError, StorageUnavailable
from pipeline.models.hub import quantization_of

# general.file_type, from the GGUF specification.
_FILE_TYPES = {
    0: "F32",
    1: "F16",
    2: "Q4_0",
    3: "Q4_1",
    7: "Q8_0",
    8: "Q5_0",
    9: "Q5_1",
    10: "Q2_K",
    11: "Q3_K_S",
    12: "Q3_K_M",
    13: "Q3_K_L",
    14: "Q4_K_S",
    15: "Q4_K_M",
    16: "Q5_K_S",
    17: "Q5_K_M",
    18: "Q6_K",
    25: "IQ4_NL",
    30: "IQ4_XS",
    32: "BF16",
    38: "MXFP4_MOE",
}


def read_facts(path: Path) -> dict[str, Any]:
    """Fields of `pipeline.models.registry.Record`.

    Raises `ConfigError` for a file that is damaged or incomplete, `StorageUnavailable` if it cannot be read now.
    """
    from stages.worker.checkpoint.gguf import GgufError, GgufFile

    try:
        file = GgufFile(path)
    except GgufError as error:
        raise ConfigError(str(error).removeprefix(f"{path}: "), "source") from None
    except OSError as error:
        raise StorageUnavailable(f"{path} cannot be read: {error.strerror}; it is kept for the next try") from None
    metadata = file.metadata
    architecture = metadata.get("general.architecture")
    architecture = architecture[:64] if isinstance(architecture, str) else ""
    context = metadata.get(f"{architecture}.context_length")
    kind = metadata.get("general.file_type")
    quantization = _FILE_TYPES.get(kind, "") if isinstance(kind, int) else ""
    return {
        "architecture": architecture,
        "quantization": quantization or quantization_of(path.name) or _most_common(file.tensors.values()),
        "context_length": context if isinstance(context, int) and context > 0 else 0,
    }


def _most_common(tensors: Any) -> str:
    """The format of most bytes."""
    nbytes: Counter[str] = Counter()
    for tensor in tensors:
        nbytes[tensor.format.name] += tensor.nbytes
    return nbytes.most_common(1)[0][0] if nbytes else ""
