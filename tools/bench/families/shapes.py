"""Shapes of the same size for every architecture: as many weights that a token reads, as much attention.

All have 20 layers of width 768 and heads of 768 values together.  What an architecture spends otherwise (K and V for
each head, no gate, several experts), the width of its FFN makes up for.  Heads are as wide as in published models.

A position's K and V are as large as those of the llama graph beside it, too: that has K and V of each head where the
architecture has them (`base_of`), as Llama 2 does.  They are three times as many bytes to write and to read.
"""

from __future__ import annotations

from typing import NamedTuple

from tools.tiny_gguf import Shape, tensor_plan

BASE, BASE_ALL_HEADS = "llama", "llama2"
WIDTH, LAYERS, VOCAB, CONTEXT, HIDDEN = 768, 20, 32000, 2048, 2048
NOT_GATED = ("starcoder2", "gpt2", "bert")
ENCODERS = ("bert", "nomic-bert")


class Traits(NamedTuple):
    """What the shape of an architecture has of its own."""

    kv_heads: int = 4
    head_dim: int = 64
    n_rot: int = 0
    window: int = 0
    experts: tuple[int, int] = (0, 0)  # all, those of one token
    shared: int = 0  # part of the FFN that is the shared expert's, in 1/8


FAMILIES = {
    "llama": Traits(),
    "llama2": Traits(kv_heads=0),
    "mistral": Traits(window=512),  # a llama graph in which every layer has a window
    "qwen2": Traits(),
    "qwen3": Traits(head_dim=128, kv_heads=2),
    "gemma": Traits(head_dim=256, kv_heads=1),
    "gemma2": Traits(head_dim=256, kv_heads=1, window=512),
    "gemma3": Traits(head_dim=256, kv_heads=1, window=512),
    "phi3": Traits(kv_heads=0, head_dim=96),
    "granite": Traits(),
    "olmo2": Traits(kv_heads=0, head_dim=128),
    "stablelm": Traits(kv_heads=0, n_rot=16),
    "starcoder2": Traits(kv_heads=2, head_dim=128),
    "gpt2": Traits(kv_heads=0),
    "mixtral": Traits(experts=(8, 2)),
    "qwen2moe": Traits(experts=(16, 4), shared=4),
    "qwen3moe": Traits(head_dim=128, kv_heads=2, experts=(32, 4)),
    "granitemoe": Traits(experts=(16, 4)),
    "olmoe": Traits(kv_heads=0, head_dim=128, experts=(16, 4)),
    "bert": Traits(kv_heads=0),
    "nomic-bert": Traits(kv_heads=0),
}


def shape_of(family: str, layers: int = LAYERS) -> Shape:
    """The shape of a family: its FFN is as wide as makes its layers as large as those of `BASE`."""
    t = FAMILIES[family]
    architecture = {"llama2": "llama", "mistral": "llama", "mixtral": "llama"}.get(family, family)
    heads = WIDTH // t.head_dim
    kv_heads = t.kv_heads or heads
    attention = 2 * WIDTH * WIDTH + 2 * WIDTH * kv_heads * t.head_dim
    whole = 2 * WIDTH * WIDTH + 2 * WIDTH * 256 + 3 * WIDTH * HIDDEN
    ffn = (whole - attention) / (WIDTH * (2 if architecture in NOT_GATED else 3))
    n_experts, n_used = t.experts
    shared = round(ffn * t.shared / 8 / 32) * 32
    hidden = round((ffn - shared) / max(1, n_used) / 32) * 32
    return Shape(
        layers,
        WIDTH,
        heads,
        kv_heads,
        t.head_dim,
        hidden,
        VOCAB if architecture not in ENCODERS else 290,
        tied=True,
        context_length=CONTEXT,
        architecture=architecture,
        n_rot=t.n_rot,
        window=t.window,
        n_experts=n_experts,
        n_experts_used=n_used,
        shared_hidden=shared,
    )


def base_of(family: str) -> str:
    """The llama graph that a family is compared with."""
    return BASE_ALL_HEADS if FAMILIES[family].kv_heads == 0 and family != BASE_ALL_HEADS else BASE


def weights_of_layers(shape: Shape) -> int:
    """How many weights of its layers a token reads."""
    total = 0
    for name, _, rows, columns in tensor_plan(shape, "Q4_0"):
        if name.startswith("blk."):
            used = (shape.n_experts_used, shape.n_experts) if "_exps." in name else (1, 1)
            total += max(rows, 1) * columns * used[0] // used[1]
    return total
