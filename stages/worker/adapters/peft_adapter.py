"""Adapters as directories of the PEFT library: `adapter_config.json` and `adapter_model.safetensors`.

    base_model.model.model.layers.3.self_attn.q_proj.lora_A.weight  (r, columns)      ....lora_B.weight  (rows, r)

The scale is lora_alpha / r, with `use_rslora` lora_alpha / sqrt(r).  Rows of q and k are put into the order of the
model's GGUF file.  What would change the answer and is not computed (DoRA, whole modules, biases) is refused by name.
Source: https://github.com/huggingface/peft/blob/main/src/peft/tuners/lora/config.py
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path

from pipeline.errors import ConfigError
from shm.checkpoint import Index
from stages.worker.adapters.adapter import PARAM, Change, Matrix
from stages.worker.huggingface import config as json_files
from stages.worker.huggingface.config import CheckpointDirectoryError, Config
from stages.worker.huggingface.families import FAMILIES, Family, gguf_name, neighbours, part_of
from stages.worker.huggingface.safetensors import ELEMENT_BYTES, SafetensorsFile, Stored
from stages.worker.kernels.formats import DENSE

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_TENSOR = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_([AB])(?:\.[A-Za-z0-9_-]+)?\.weight")
# Fields that must be absent, null, false, empty or the given value: otherwise the answer would differ.
_REFUSED = {
    "use_dora": "DoRA is not supported",
    "modules_to_save": "whole modules cannot be replaced by an adapter",
    "lora_bias": "biases of adapters are not supported",
    "alpha_pattern": "one lora_alpha for all modules is supported",
    "layer_replication": "layers cannot be repeated by an adapter",
    "trainable_token_indices": "embeddings cannot be changed by an adapter",
    "target_parameters": "only linear modules can be changed",
    "alora_invocation_tokens": "activated adapters (aLoRA) are not supported",
    "use_qalora": "QALoRA is not supported",
    "arrow_config": "Arrow is not supported",
}
# Values of `init_lora_weights` that leave the model's weights as they are. For others, such as pissa, olora, corda and
# loftq, PEFT takes the first A and B out of these, also when it loads.
_KEEP_BASE = ("gaussian", "eva", "orthogonal")


def read_peft_adapter(path: Path, base: Index) -> Iterator[Change]:
    """The changes of a PEFT directory for a prepared model. Raises `ConfigError`, `OSError`."""
    try:
        yield from _read(path, base)
    except CheckpointDirectoryError as error:
        raise ConfigError(str(error), PARAM) from None


def _read(path: Path, base: Index) -> Iterator[Change]:
    config = json_files.read(path / CONFIG)
    if config is None:
        raise ConfigError(f"{path} has no {CONFIG}; an adapter is a GGUF file, or a directory with {CONFIG}", PARAM)
    alpha, is_rooted = _checked(config)
    if not (path / WEIGHTS).is_file():
        pickled = "; adapter_model.bin is pickled, which can run any code, and is refused"
        hint = pickled if (path / "adapter_model.bin").exists() else ""
        raise ConfigError(f"{path / WEIGHTS} is missing{hint}", PARAM)
    family = _family(path, base.architecture)
    halves: dict[str, dict[str, tuple[str, Stored]]] = {}
    for name, stored in SafetensorsFile(path / WEIGHTS).tensors.items():
        found = _TENSOR.fullmatch(name)
        if found is None:
            raise ConfigError(
                f"{path / WEIGHTS}: tensor {name[:120]!r} is no matrix of LoRA; it is not supported", PARAM
            )
        halves.setdefault(found[1], {})[found[2]] = name, stored
    for module, both in halves.items():
        label = repr(next(iter(both.values()))[0][:120])
        if len(both) != 2:
            raise ConfigError(f"{path / WEIGHTS}: tensor {label} is alone; lora_A and lora_B belong together", PARAM)
        to = gguf_name(family, f"{module}.weight")
        a, b = (_matrix(path, *both[half]) for half in "AB")
        if to == f"{module}.weight":
            raise ConfigError(
                f"{path / WEIGHTS}: tensor {label} changes {module[:100]!r}, which no {base.architecture} model has; "
                f"adapters may change {', '.join(family.layer)}",
                PARAM,
            )
        heads = {"attn_q": base.hyper.n_heads, "attn_k": base.hyper.n_kv_heads}.get(part_of(to), 0)
        if heads and part_of(to) in family.permuted and b.shape[0] % (2 * heads) == 0:
            b = b._replace(rows=b.rows[neighbours(b.shape[0], heads)])
        rank = max(1, a.shape[0])
        yield Change(to.removesuffix(".weight"), label, a, b, alpha / (math.sqrt(rank) if is_rooted else rank))


def _checked(config: Config) -> tuple[float, bool]:
    """`lora_alpha` and `use_rslora`. Raises for what is not supported."""
    kind = config.text("peft_type", "")
    if kind != "LORA":
        raise ConfigError(f"{config.path}: peft_type is {kind[:60]!r}, expected 'LORA'", PARAM)
    for key, reason in _REFUSED.items():
        if config.fields.get(key):
            raise ConfigError(f"{config.path}: {key} is {str(config.fields[key])[:60]}; {reason}", PARAM)
    if (bias := config.text("bias", "none")) != "none":
        raise ConfigError(f"{config.path}: bias is {bias[:60]!r}, expected 'none': biases are not supported", PARAM)
    begun = config.fields.get("init_lora_weights")
    if isinstance(begun, str) and begun.lower() not in _KEEP_BASE:
        raise ConfigError(
            f"{config.path}: init_lora_weights is {begun[:60]!r}, for which PEFT also changes the model's own weights, "
            f"expected true, false or one of {', '.join(_KEEP_BASE)}; save the adapter as a plain one "
            f"(path_initial_model_for_weight_conversion)",
            PARAM,
        )
    rank = config.integer("r")
    if rank < 1:
        raise ConfigError(f"{config.path}: r is {rank}, expected at least 1", PARAM)
    return config.number("lora_alpha"), config.flag("use_rslora", False)


def _family(path: Path, architecture: str) -> Family:
    """The names of the modules of an architecture."""
    for family in FAMILIES.values():
        if family.architecture == architecture:
            return family
    known = ", ".join(sorted({family.architecture for family in FAMILIES.values()}))
    raise ConfigError(
        f"{path}: PEFT directories are read for {known}; the model is {architecture!r}: convert the adapter to GGUF",
        PARAM,
    )


def _matrix(path: Path, name: str, stored: Stored) -> Matrix:
    if stored.dtype not in ELEMENT_BYTES or len(stored.shape) != 2 or 0 in stored.shape:
        raise ConfigError(
            f"{path / WEIGHTS}: tensor {name[:120]!r} is {stored.dtype} {list(stored.shape)}, expected a matrix of "
            f"F32, F16 or BF16",
            PARAM,
        )
    return Matrix(stored.data, next(one for one in DENSE if one.name == stored.dtype))
