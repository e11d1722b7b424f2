"""Writes small random LoRA adapters for a GGUF model, as GGUF files and as PEFT directories, for tests and benchmarks.

    python -m tools.tiny_adapter model.gguf adapter.gguf --rank 8 --seed 7
    python -m tools.tiny_adapter model.gguf DIRECTORY --peft

The matrices are noise of such a size that every changed product moves by about `strength` of its own size.  The same
arguments give the same bytes, and both forms the same adapter.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click
import gguf
import numpy as np

from tools.tiny_hf import module_name, write_safetensors

TARGETS = ("attn_q", "attn_k", "attn_v", "attn_qkv", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
DTYPES = ("F32", "F16", "BF16")


class Drawn(NamedTuple):
    """A (rank, columns) and B (rows, rank) f32 for the matrix `name`."""

    name: str
    a: np.ndarray
    b: np.ndarray


def _draw(
    model: gguf.GGUFReader, rank: int, alpha: float, seed: int, targets: Sequence[str], strength: float
) -> Iterator[Drawn]:
    rng = np.random.default_rng([seed, rank])
    for tensor in model.tensors:
        body = tensor.name.removesuffix(".weight")
        if body == tensor.name or not body.startswith("blk.") or body.split(".")[2] not in targets:
            continue
        columns, rows = (int(n) for n in tensor.shape[:2])
        a = rng.standard_normal((rank, columns), np.float32) / np.float32(math.sqrt(columns))
        gain = strength / math.sqrt(rank) / (alpha / rank if alpha else 1.0)
        yield Drawn(tensor.name, a, rng.standard_normal((rows, rank), np.float32) * np.float32(gain))


def _stored(values: np.ndarray, dtype: str) -> np.ndarray:
    """The nearest values of a type, BF16 by cutting off, as u16."""
    if dtype == "BF16":
        return (values.view(np.uint32) >> 16).astype(np.uint16)
    return values.astype(np.float32 if dtype == "F32" else np.float16)


def write_adapter(
    path: Path,
    model: Path,
    rank: int = 8,
    seed: int = 0,
    alpha: float = 16.0,
    dtype: str = "F32",
    targets: Sequence[str] = TARGETS,
    strength: float = 0.3,
) -> Path:
    """Write a GGUF adapter. `alpha` 0: a scale of 1. Returns `path`."""
    reader = gguf.GGUFReader(model)
    writer = gguf.GGUFWriter(path, str(reader.fields["general.architecture"].contents()))
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", alpha)
    kind = gguf.GGMLQuantizationType[dtype]
    for name, a, b in _draw(reader, rank, alpha, seed, targets, strength):
        for suffix, values in (("lora_a", a), ("lora_b", b)):
            stored = _stored(values, dtype)
            stored = stored.view(np.uint8) if dtype == "BF16" else stored
            writer.add_tensor(f"{name}.{suffix}", stored, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_peft(
    directory: Path,
    model: Path,
    rank: int = 8,
    seed: int = 0,
    alpha: float = 16.0,
    dtype: str = "F32",
    targets: Sequence[str] = TARGETS,
    strength: float = 0.3,
    **config: Any,
) -> Path:
    """Write the same adapter as a PEFT directory. `config`: more fields of its configuration. Returns `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    reader = gguf.GGUFReader(model)
    values = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("tokenizer")}
    arch = values["general.architecture"]
    heads = {"attn_q": values[f"{arch}.attention.head_count"], "attn_k": values[f"{arch}.attention.head_count_kv"]}
    tensors: dict[str, tuple[str, np.ndarray]] = {}
    for name, a, b in _draw(reader, rank, alpha, seed, targets, strength):
        body = name.removesuffix(".weight")
        n = heads.get(body.split(".")[2], 0)
        if arch in ("llama", "granite") and n:
            b = b.reshape(n, b.shape[0] // n // 2, 2, rank).swapaxes(1, 2).reshape(b.shape)
        for half, matrix in (("A", a), ("B", np.ascontiguousarray(b))):
            tensors[f"base_model.model.{module_name(body, arch)}.lora_{half}.weight"] = dtype, _stored(matrix, dtype)
    write_safetensors(directory / "adapter_model.safetensors", tensors)
    fields = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "use_rslora": False,
        "use_dora": False,
        "modules_to_save": None,
        "target_modules": sorted({module_name(f"blk.0.{one}", arch).split(".")[-1] for one in _names(reader, targets)}),
    }
    (directory / "adapter_config.json").write_text(json.dumps(fields | config, indent=1))
    return directory


def _names(reader: gguf.GGUFReader, targets: Sequence[str]) -> set[str]:
    parts = {t.name.split(".")[2] for t in reader.tensors if t.name.startswith("blk.0.")}
    return {one for one in targets if one in parts}


@click.command()
@click.argument("model", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--rank", default=8, show_default=True)
@click.option("--alpha", default=16.0, show_default=True)
@click.option("--dtype", type=click.Choice(DTYPES), default="F32", show_default=True)
@click.option("--seed", default=0, show_default=True)
@click.option("--strength", default=0.3, show_default=True)
@click.option("--peft", is_flag=True, help="Write a PEFT directory.")
def main(model: Path, path: Path, rank: int, alpha: float, dtype: str, seed: int, strength: float, peft: bool) -> None:
    """Write a random adapter for MODEL to PATH."""
    write = write_peft if peft else write_adapter
    write(path, model, rank, seed, alpha, dtype, strength=strength)
    click.echo(f"{path}: rank {rank}, {dtype}, seed {seed}")


if __name__ == "__main__":
    main()
