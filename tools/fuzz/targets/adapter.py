"""LoRA adapters: GGUF files, PEFT directories and prepared files, up to the memory that kernels read.

byte 0   0: a GGUF file; 1: adapter_config.json and adapter_model.safetensors; 2: a prepared file
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import msgspec
import numpy as np

from pipeline.errors import ConfigError
from shm.checkpoint import Hyper, Index, Tensor
from stages.worker.adapters.adapter import pairs_of
from stages.worker.adapters.gguf_adapter import read_gguf_adapter
from stages.worker.adapters.memory import AdapterMemory
from stages.worker.adapters.peft_adapter import read_peft_adapter
from stages.worker.adapters.prepared import decode, encode
from tools.fuzz.parts import join, scratch, split, written
from tools.fuzz.target import Target
from tools.tiny_hf import write_safetensors

WIDTH = 32
DIGEST = "cd" * 32
MATRICES = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
BASE = Index(
    2,
    "ab" * 32,
    "llama",
    "tiny",
    0,
    0,
    0,
    Hyper(1, WIDTH, 2, 2, 16, WIDTH, 300, 64, 1e-5, 16, "neighbours", "silu"),
    msgspec.Raw(b""),
    [Tensor(f"blk.0.{name}.weight", WIDTH, WIDTH, "F32", "groups", 0, 0, "") for name in MATRICES],
)


def run(data: bytes) -> None:
    """Read, prepare, read back and load an adapter."""
    kind, rest = (data[:1] or b"\0")[0] % 3, data[1:]
    if kind == 2:
        AdapterMemory(BASE, [decode(Path(f"{DIGEST}.lora"), rest)])
        return
    if kind == 0:
        changes = read_gguf_adapter(written("adapter.gguf", rest), "llama")
    else:
        config, weights = (*split(rest, 2), b"", b"")[:2]
        directory = scratch() / "peft"
        directory.mkdir(exist_ok=True)
        (directory / "adapter_config.json").write_bytes(config)
        (directory / "adapter_model.safetensors").write_bytes(weights)
        changes = read_peft_adapter(directory, BASE)
    pairs = pairs_of(Path("adapter"), changes, BASE, 64)
    prepared = decode(Path(f"{DIGEST}.lora"), encode(pairs, 1, 1 << 20, "adapter"))
    assert len(prepared.header.pairs) == len(pairs)
    AdapterMemory(BASE, [prepared])


def _matrices() -> dict[str, np.ndarray]:
    draw = np.random.default_rng(1)
    return {"A": draw.standard_normal((2, WIDTH), np.float32), "B": draw.standard_normal((WIDTH, 2), np.float32)}


def _gguf(name: str, dtype: type = np.float32) -> bytes:
    path = scratch() / "seed.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", 4.0)
    for half, values in _matrices().items():
        writer.add_tensor(f"{name}.weight.lora_{half.lower()}", values.astype(dtype))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes()


def _peft(module: str, **more: Any) -> bytes:
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "bias": "none"} | more
    path = scratch() / "seed.safetensors"
    write_safetensors(path, {f"{module}.lora_{half}.weight": ("F32", one) for half, one in _matrices().items()})
    return join([json.dumps(config).encode(), path.read_bytes()])


def seeds() -> Iterator[bytes]:
    """Adapters of one matrix, of each kind and type, and one that was prepared."""
    for name in ("blk.0.attn_q", "blk.0.ffn_down"):
        yield b"\0" + _gguf(name)
    yield b"\0" + _gguf("blk.0.attn_v", np.float16)
    for module in ("base_model.model.model.layers.0.self_attn.q_proj", "model.layers.0.mlp.up_proj"):
        yield b"\1" + _peft(module, use_rslora=True)
    pairs = pairs_of(Path("a"), read_gguf_adapter(written("adapter.gguf", _gguf("blk.0.attn_k")), "llama"), BASE, 64)
    yield b"\2" + encode(pairs, 1, 1 << 20, "adapter")


TARGET = Target(
    run,
    seeds,
    errors=(ConfigError,),
    modules=(
        "stages.worker.adapters.adapter",
        "stages.worker.adapters.gguf_adapter",
        "stages.worker.adapters.memory",
        "stages.worker.adapters.peft_adapter",
        "stages.worker.adapters.prepared",
    ),
    max_bytes=4096,
    memory_mb=64,
)
