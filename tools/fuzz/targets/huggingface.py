"""Hugging Face directories: configuration, vocabulary and header of the weights, then what ingest derives from them.

byte 0   0: config.json, tokenizer.json, tokenizer_config.json and the header of model.safetensors; 1: tokenizer.model
         in place of tokenizer.json; 2: a whole model.safetensors
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import Any

import numpy as np

from stages.worker.checkpoint.gguf import GgufError
from stages.worker.checkpoint.ingest import check_head
from stages.worker.checkpoint.source import vector
from stages.worker.huggingface.config import CheckpointDirectoryError
from stages.worker.huggingface.safetensors import SafetensorsFile
from stages.worker.huggingface.source import HuggingFaceSource
from tools.charsmap_writer import write_charsmap
from tools.fuzz.parts import join, scratch, split, written
from tools.fuzz.target import Target

PADDING = bytes(1 << 16)  # where the tensors lie


def run(data: bytes) -> None:
    """Open the directory, check its head, and read its tensors."""
    kind, rest = data[:1] or b"\0", data[1:]
    if kind[0] % 3 == 2:
        for stored in SafetensorsFile(written("model.safetensors", rest)).tensors.values():
            assert stored.nbytes <= len(rest)
        return
    config, vocabulary, settings, header = (*split(rest, 4), b"", b"", b"", b"")[:4]
    directory = scratch() / "directory"
    directory.mkdir(exist_ok=True)
    names = ("tokenizer.json", "tokenizer.model")
    (directory / names[kind[0] % 3]).write_bytes(vocabulary)
    (directory / names[1 - kind[0] % 3]).unlink(missing_ok=True)
    (directory / "config.json").write_bytes(config)
    (directory / "tokenizer_config.json").write_bytes(settings)
    (directory / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + PADDING)
    source = HuggingFaceSource(directory)
    check_head(source)
    for info in source.tensors.values():
        if len(info.shape) == 1:
            assert vector(source, info).nbytes == info.nbytes
        else:
            assert source.rows(info)[0:16].nbytes <= info.nbytes


def _header(shapes: dict[str, tuple[int, ...]]) -> bytes:
    header: dict[str, Any] = {}
    at = 0
    for name, shape in shapes.items():
        end = at + 2 * int(np.prod(shape))
        header[name] = {"dtype": "F16", "shape": shape, "data_offsets": [at, end]}
        at = end
    return json.dumps(header).encode()


def _shapes() -> dict[str, tuple[int, ...]]:
    layer = "model.layers.0."
    return {
        "model.embed_tokens.weight": (300, 32),
        "model.norm.weight": (32,),
        f"{layer}input_layernorm.weight": (32,),
        f"{layer}post_attention_layernorm.weight": (32,),
        **{f"{layer}self_attn.{name}_proj.weight": (32, 32) for name in "qkvo"},
        **{f"{layer}mlp.{name}_proj.weight": (32, 32) for name in ("gate", "up", "down")},
    }


def _with_experts(name: str) -> dict[str, tuple[int, ...]]:
    block = "model.layers.0.block_sparse_moe."
    shapes = {one: shape for one, shape in _shapes().items() if ".mlp." not in one}
    if name == "Mixtral":
        experts = {f"{block}experts.{i}.w{n}.weight": (32, 32) for i in range(2) for n in (1, 2, 3)}
        return shapes | {f"{block}gate.weight": (2, 32)} | experts
    return shapes | {
        f"{block}router.layer.weight": (2, 32),
        f"{block}input_linear.weight": (2, 64, 32),
        f"{block}output_linear.weight": (2, 32, 32),
    }


def seeds() -> Iterator[bytes]:
    """A llama with all kinds of vocabularies, others with scaled positions, and mixtures of experts."""
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
    }
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    model = {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": ["a b"]}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": byte_level,
        "decoder": byte_level,
        "model": model,
    }
    llama3 = {"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4}
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    gemma = {"sliding_window": 16, "layer_types": ["sliding_attention"], "rope_parameters": {"full_attention": {}}}
    settings = json.dumps({"eos_token": "ab", "add_bos_token": False, "chat_template": "{{ messages }}"}).encode()
    header, vocabulary = _header(_shapes()), json.dumps(tokenizer).encode()
    for changes in (
        {},
        {"rope_scaling": {**llama3, "original_max_position_embeddings": 32}},
        {"rope_scaling": yarn, "architectures": ["Qwen2ForCausalLM"]},
        {"architectures": ["Gemma3ForCausalLM"], "head_dim": 16, **gemma},
    ):
        yield b"\0" + join([json.dumps(config | changes).encode(), vocabulary, settings, header])
    table = base64.b64encode(write_charsmap({"A": "a"})).decode()
    unigram = {
        "normalizer": {"type": "Precompiled", "precompiled_charsmap": table},
        "pre_tokenizer": {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "always"},
        "model": {"type": "Unigram", "unk_id": 0, "vocab": [["<unk>", 0.0], ["\u2581", -1.0], ["a", -2.5]]},
    }
    yield b"\0" + join([json.dumps(config).encode(), json.dumps(unigram).encode(), settings, header])
    few = {"num_local_experts": 2, "num_experts_per_tok": 1}
    for name in ("Mixtral", "GraniteMoe"):
        changed = config | few | {"architectures": [f"{name}ForCausalLM"]}
        yield b"\0" + join([json.dumps(changed).encode(), vocabulary, settings, _header(_with_experts(name))])
    piece = b"\x0a\x0a\x0a\x03\xe2\x96\x81\x15\0\0\x80\xbf"
    spm = piece + b"\x12\x02\x18\x02" + b"\x1a\x02\x18\x01"
    yield b"\1" + join([json.dumps(config).encode(), spm, settings, header])
    yield b"\2" + len(header).to_bytes(8, "little") + header + bytes(1 << 14)


TARGET = Target(
    run,
    seeds,
    errors=(CheckpointDirectoryError, GgufError),
    modules=(
        "stages.worker.huggingface.config",
        "stages.worker.huggingface.directory",
        "stages.worker.huggingface.families",
        "stages.worker.huggingface.metadata",
        "stages.worker.huggingface.safetensors",
        "stages.worker.huggingface.sentencepiece_model",
        "stages.worker.huggingface.source",
        "stages.worker.huggingface.vocabulary",
    ),
    max_bytes=32768,
    memory_mb=1024,
)
