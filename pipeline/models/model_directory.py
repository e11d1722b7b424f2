"""Which files of a repository a model directory needs, by their names; pure.

A model directory has a configuration, a vocabulary and weights in safetensors (stages/worker/huggingface/directory.py
opens it).  Files in sub-folders are other forms of the model, except for `POOLING`.
"""

from __future__ import annotations

from collections.abc import Collection

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"  # lists the tensors of several files
WEIGHTS = "model.safetensors"
SAFETENSORS = ".safetensors"
MODULES, POOLING = "modules.json", "1_Pooling/config.json"  # of sentence-transformers
VOCABULARIES = ("tokenizer.json", "tokenizer.model")
# Besides the weights, what a prepared model is made of.
SMALL_FILES = (
    CONFIG,
    *VOCABULARIES,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "generation_config.json",
    "chat_template.jinja",
    "chat_template.json",
    MODULES,
    POOLING,
)
MAX_SMALL_BYTES = 1 << 28  # of each of them and of the index; the largest tokenizer.json published has 34 MB
MAX_WEIGHT_FILES = 1024

# Weight types of `--quant`, and the bytes of a value of most matrices.
QUANTS = {"q4_0": 18 / 32, "q4_1": 20 / 32, "q4_k_m": 144 / 256, "q8_0": 34 / 32, "f16": 2.0}
DEFAULT_QUANT = "q4_k_m"  # of a repository, as among GGUF files: little loss, and a quarter of the bytes for each token


def has_weights(names: Collection[str]) -> bool:
    """Whether the repository's own folder has safetensors."""
    return any(name.endswith(SAFETENSORS) for name in names if "/" not in name)


def small_files(names: Collection[str]) -> list[str]:
    """The small files that the repository has."""
    return [name for name in SMALL_FILES if name in names]


def missing(names: Collection[str]) -> str:
    """What a model directory cannot do without and the repository has not; "" if it has all."""
    if CONFIG not in names:
        return CONFIG
    return "" if any(name in names for name in VOCABULARIES) else " or ".join(VOCABULARIES)


def weight_files(names: Collection[str], listed: Collection[str]) -> list[str]:
    """The files of the weights. Raises `ValueError`, which says why there are none.

    listed: what the index lists; empty without an index.
    """
    if listed:
        if len(listed) > MAX_WEIGHT_FILES:
            raise ValueError(f"{INDEX} lists {len(listed):,} files, expected at most {MAX_WEIGHT_FILES:,}")
        for name in sorted(listed):
            if "/" in name or not name.endswith(SAFETENSORS):
                raise ValueError(f"{INDEX} lists {name[:120]!r}, expected {SAFETENSORS} files of the same folder")
            if name not in names:
                raise ValueError(f"{INDEX} lists {name!r}, which the repository has not")
        return sorted(listed)
    found = sorted(name for name in names if name.endswith(SAFETENSORS) and "/" not in name)
    if WEIGHTS in found:
        return [WEIGHTS]
    if len(found) != 1:
        raise ValueError(f"it has {len(found)} files of safetensors and no {INDEX}, which lists their tensors")
    return found


def expected_bytes(weight_bytes: int, value_bytes: int, quant: str) -> int:
    """Bytes of the converted model, nearly; `value_bytes`: of a value of the weights."""
    return int(weight_bytes * QUANTS[quant] / value_bytes)
