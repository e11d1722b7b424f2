"""A LoRA adapter of a GGUF file for the references: what it adds to each product. Not the worker's reader."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import gguf
import numpy as np

from tools.reference.source import Source


class Added(NamedTuple):
    """y += scale * B (A x): A (rank, K) and B (rows, rank) f32."""

    a: np.ndarray
    b: np.ndarray
    scale: np.float32


class Adapter:
    """`added` by the name of the model's tensor, of the parts of a fused one too."""

    def __init__(self, path: Path, model: Source) -> None:
        reader = gguf.GGUFReader(path)
        alpha = float(reader.fields["adapter.lora.alpha"].contents())
        tensors = {t.name: gguf.dequantize(t.data, t.tensor_type).astype(np.float32) for t in reader.tensors}
        h = model.hyper
        q, kv = h.n_heads * h.head_dim, h.n_kv_heads * h.head_dim
        self.added: dict[str, Added] = {}
        for name, a in tensors.items():
            if not name.endswith(".lora_a"):
                continue
            body, b = name.removesuffix(".lora_a"), tensors[name.removesuffix("a") + "b"]
            scale = np.float32(alpha / len(a) if alpha else 1.0)
            parts = {body: slice(None)}
            if "attn_qkv" in body:
                rows = {"attn_q": slice(0, q), "attn_k": slice(q, q + kv), "attn_v": slice(q + kv, None)}
                parts = {body.replace("attn_qkv", one): part for one, part in rows.items()}
            elif "ffn_up" in body and len(b) == 2 * h.ffn_width:
                rows = {"ffn_gate": slice(0, h.ffn_width), "ffn_up": slice(h.ffn_width, None)}
                parts = {body.replace("ffn_up", one): part for one, part in rows.items()}
            for one, part in parts.items():
                self.added[one] = Added(a, np.ascontiguousarray(b[part]), scale)
