"""Writes small random models as GGUF files, for tests and benchmarks: a shape for each supported architecture.

    python -m tools.tiny_gguf model.gguf --shape grouped --format Q4_K_M --seed 7

The weights are noise; everything else is valid: blocks of every quantization, a byte-level BPE vocabulary whose
merges were counted on a text, special tokens, a chat template.  The same arguments give the
same bytes.  Quantized blocks are drawn directly (random codes, plausible scales) instead of quantizing floats:
that is fast enough for a billion parameters, reaches every code, and works for formats that the `gguf` package can
read but not write.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import click
import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type

from pipeline.models.vocabularies import SPACE
from tools.reference.blocks import BLOCKS, DENSE


class Shape(NamedTuple):
    """Hyper-parameters of a model. Widths are multiples of 32; `head_dim * n_heads` need not be `width`."""

    n_layers: int
    width: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    hidden: int
    vocab_size: int
    tied: bool = True
    context_length: int = 2048
    rope_base: float = 10000.0
    long_context: bool = False  # with the frequency factors of Llama 3
    architecture: str = "llama"
    n_rot: int = 0  # values of a head that RoPE rotates; 0: all
    window: int = 0  # of layers with a sliding window; 0: the key is missing
    rope_scaling: str = ""  # "linear", "yarn" or "longrope", each by 4
    n_experts: int = 0  # `hidden` is the width of one; 0: no mixture of experts
    n_experts_used: int = 0
    shared_hidden: int = 0  # width of the shared expert; 0: there is none
    score_layers: int = 0  # of the head that scores pairs: 1, or 2 with a dense layer; 0: there is none
    score_classes: int = 1  # scores of a pair


SHAPES = {
    "small": Shape(2, 64, 2, 1, 32, 96, 300),
    "odd": Shape(3, 96, 3, 3, 32, 160, 261, tied=False),
    "grouped": Shape(2, 160, 6, 2, 64, 224, 515, rope_base=100000.0),
    "super": Shape(2, 256, 4, 2, 64, 512, 307, tied=False, rope_base=500000.0, long_context=True),
    "wide": Shape(1, 256, 4, 1, 128, 256, 333, context_length=8192),
    "biased": Shape(2, 128, 4, 2, 32, 192, 277, rope_base=1000000.0, architecture="qwen2"),
    "partial": Shape(2, 128, 4, 2, 64, 192, 269, tied=False, n_rot=32),
    "windowed": Shape(2, 128, 4, 1, 32, 192, 269, window=300),
    "linear": Shape(2, 64, 2, 1, 32, 96, 263, rope_scaling="linear"),
    "yarn": Shape(2, 64, 2, 1, 32, 96, 263, context_length=8192, rope_scaling="yarn"),
    "qwen3": Shape(2, 128, 4, 2, 64, 192, 277, rope_base=1000000.0, architecture="qwen3"),
    "gemma": Shape(2, 128, 4, 1, 64, 256, 283, architecture="gemma"),
    "gemma2": Shape(2, 128, 2, 1, 256, 192, 283, architecture="gemma2", window=24),
    "gemma3": Shape(6, 64, 4, 2, 32, 96, 283, rope_base=1e6, architecture="gemma3", window=300, rope_scaling="linear"),
    "phi3": Shape(2, 96, 3, 3, 32, 160, 271, tied=False, architecture="phi3"),
    "phi3-long": Shape(
        2, 64, 2, 1, 32, 96, 271, tied=False, context_length=8192, architecture="phi3", rope_scaling="longrope"
    ),
    "granite": Shape(2, 128, 4, 2, 32, 192, 271, architecture="granite"),
    "olmo2": Shape(2, 128, 4, 2, 32, 192, 271, tied=False, architecture="olmo2"),
    "stablelm": Shape(2, 128, 4, 4, 32, 192, 271, tied=False, architecture="stablelm", n_rot=8),
    "starcoder2": Shape(2, 128, 4, 2, 32, 256, 271, architecture="starcoder2"),
    "gpt2": Shape(2, 128, 4, 4, 32, 256, 271, context_length=640, architecture="gpt2"),
    "mixtral": Shape(2, 64, 2, 1, 32, 96, 271, tied=False, n_experts=8, n_experts_used=2),
    "qwen2moe": Shape(
        2, 128, 4, 2, 32, 96, 271, False, architecture="qwen2moe", n_experts=12, n_experts_used=4, shared_hidden=160
    ),
    "qwen3moe": Shape(2, 128, 4, 2, 64, 64, 277, False, architecture="qwen3moe", n_experts=40, n_experts_used=8),
    "granitemoe": Shape(
        2, 128, 4, 2, 32, 96, 271, architecture="granitemoe", n_experts=8, n_experts_used=3, shared_hidden=64
    ),
    "olmoe": Shape(2, 128, 4, 4, 32, 64, 271, tied=False, architecture="olmoe", n_experts=16, n_experts_used=5),
    "bert": Shape(2, 128, 4, 4, 32, 192, 290, context_length=512, architecture="bert"),
    "reranker": Shape(2, 128, 4, 4, 32, 192, 290, context_length=512, architecture="bert", score_layers=2),
    "nomic-bert": Shape(2, 96, 3, 3, 32, 160, 290, rope_base=1000.0, architecture="nomic-bert"),
    "llama-1b": Shape(16, 2048, 32, 8, 64, 8192, 128256, True, 131072, 500000.0, True),
    "llama-3b": Shape(28, 3072, 24, 8, 128, 8192, 128256, True, 131072, 500000.0, True),
    "llama-8b": Shape(32, 4096, 32, 8, 128, 14336, 128256, False, 131072, 500000.0, True),
}
LARGE = ("llama-1b", "llama-3b", "llama-8b")  # for benchmarks: those of Llama 3.2 and 3.1

# Per tensor, by the last part of its name before ".weight"; "" is every other matrix.
RECIPES = {
    **{t.name: {"": t} for t in (*DENSE, *BLOCKS)},
    "Q4_K_M": {"": Type.Q4_K, "attn_v": Type.Q6_K, "ffn_down": Type.Q6_K, "token_embd": Type.Q6_K, "output": Type.Q6_K},
    "Q5_K_M": {"": Type.Q5_K, "attn_v": Type.Q6_K, "ffn_down": Type.Q6_K, "token_embd": Type.Q6_K, "output": Type.Q6_K},
    "Q4_0_M": {
        "": Type.Q4_0,
        "attn_k": Type.Q5_0,
        "ffn_up": Type.Q5_1,
        "attn_output": Type.F16,
        "token_embd": Type.Q8_0,
        "output": Type.BF16,
        "ffn_up_exps": Type.F16,
        "ffn_down_exps": Type.Q5_1,
        "ffn_down_shexp": Type.BF16,
    },
    "Q4_1_M": {"": Type.Q4_1, "token_embd": Type.Q6_K, "output": Type.Q6_K},
}
BERTS = ("bert", "nomic-bert")
WORDPIECE_SPECIALS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_CHAT_TEMPLATE = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content']"
    " + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_TEXT = """
the quick brown fox jumps over the lazy dog and then the dog sleeps in the warm sun of the afternoon while
the fox thinks about other things that foxes think about when there is nothing else to do in the forest
one two three four five six seven eight nine ten user assistant system there were never any questions
"""


# ------------------------------------------------------------------ vocabulary


def vocabulary(size: int, seed: int = 0) -> tuple[list[str], list[int], list[str]]:
    """Tokens, their GGUF types and merges: the special tokens, all bytes, then merges.

    Merges are counted on a small text as long as it has pairs; beyond that, random pairs of tokens.
    Raises `ValueError` below 260 entries (256 bytes, three special tokens, one merge).
    """
    if size < 256 + len(SPECIALS) + 1:
        raise ValueError(f"vocab_size is {size}, expected at least {256 + len(SPECIALS) + 1}")
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    stand_ins = [chr(b) for b in printable] + [chr(0x100 + i) for i in range(256 - len(printable))]
    tokens = [*SPECIALS, *stand_ins]
    known, merges = set(tokens), []
    words = [["\u0120", *word] for word in _TEXT.split()]  # U+0120 stands for the space
    rng = np.random.default_rng([seed, size])
    while len(tokens) < size:
        words = [word for word in words if len(word) > 1]
        if words:
            pairs = Counter(pair for word in words for pair in pairwise(word))
            left, right = min(pairs, key=lambda pair: (-pairs[pair], pair))
            words = [_merged(word, left, right) for word in words]
        else:
            left, right = (tokens[i] for i in rng.integers(len(SPECIALS), len(tokens), 2))
        if left + right not in known and len(left + right) <= 24:
            known.add(left + right)
            tokens.append(left + right)
            merges.append(f"{left} {right}")
    types = [gguf.TokenType.CONTROL] * len(SPECIALS) + [gguf.TokenType.NORMAL] * (size - len(SPECIALS))
    return tokens, [int(t) for t in types], merges


def _merged(word: list[str], left: str, right: str) -> list[str]:
    out: list[str] = []
    for part in word:
        if out and out[-1] == left and part == right:
            out[-1] = left + right
        else:
            out.append(part)
    return out


# ------------------------------------------------------------------ tensors


def random_tensor(kind: Type, rows: int, columns: int, rng: np.random.Generator, spread: float) -> np.ndarray:
    """Random values of standard deviation about `spread` as a tensor of a format.

    F32 and F16: (rows, columns); the others (rows, bytes of a row) u8.
    """
    if kind in DENSE:
        values = rng.standard_normal((rows, columns), np.float32) * np.float32(spread)
        return gguf.quantize(values, kind)
    values_per_block, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = rows * (columns // values_per_block)
    raw = np.frombuffer(rng.bytes(blocks * size), np.uint8).reshape(blocks, size).copy()
    vary = rng.uniform(0.5, 1.5, (2, blocks))
    # Uniform codes of n steps have deviation n / sqrt(12); of sub-scales up to s, about s / sqrt(3).
    _, steps, sub_scale, d_at, m_at, _, has_exponent = BLOCKS[kind]
    d = spread * math.sqrt(12) / steps / sub_scale * vary[0]
    if has_exponent:
        raw[:, d_at] = np.clip(np.rint(np.log2(d)) + 128, 0, 255)
        return raw.reshape(rows, -1)
    raw[:, d_at : d_at + 2] = d.astype(np.float16).view(np.uint8).reshape(-1, 2)
    if m_at is not None:
        # The middle of the codes becomes about zero; K-quants subtract their minimums.
        middle = d * (steps - 1) / 2 * (0.9 + 0.2 * (vary[1] - 0.5))
        m = middle if sub_scale > 1 else -middle
        raw[:, m_at : m_at + 2] = m.astype(np.float16).view(np.uint8).reshape(-1, 2)
    return raw.reshape(rows, -1)


def tensor_plan(shape: Shape, recipe: str) -> list[tuple[str, Type, int, int]]:
    """(name, format, rows, columns) of every tensor in the file's order; rows 0 for a vector.

    The rows of a layer's experts are counted together.
    """
    formats = RECIPES[recipe]

    def matrix(name: str, rows: int, columns: int) -> tuple[str, Type, int, int]:
        kind = formats.get(name.rsplit(".", 1)[-1], formats[""])
        if columns % gguf.GGML_QUANT_SIZES[kind][0]:
            kind = BLOCKS[kind].narrow or kind
        return f"{name}.weight", kind, rows, columns

    def vector(name: str, columns: int) -> tuple[str, Type, int, int]:
        return f"{name}.weight", Type.F32, 0, columns

    def bias(name: str, columns: int) -> tuple[str, Type, int, int]:
        return f"{name}.bias", Type.F32, 0, columns

    def norm(name: str) -> list[tuple[str, Type, int, int]]:
        layer_norm = arch in ("stablelm", "starcoder2", "gpt2", *BERTS)
        return [vector(name, width), *([bias(name, width)] if layer_norm else ())]

    def linear(rows: dict[str, int], columns: int, has_bias: bool) -> list[tuple[str, Type, int, int]]:
        biases = [bias(name, n) for name, n in rows.items()] if has_bias else []
        return [*(matrix(name, n, columns) for name, n in rows.items()), *biases]

    def experts(block: str) -> list[tuple[str, Type, int, int]]:
        n, shared = shape.n_experts, shape.shared_hidden
        router = (f"{block}ffn_gate_inp.weight", Type.F32, n, width)
        found = [router, *(matrix(f"{block}ffn_{name}_exps", n * hidden, width) for name in ("gate", "up"))]
        found.append(matrix(f"{block}ffn_down_exps", n * width, hidden))
        if shared:
            found += [vector(f"{block}ffn_gate_inp_shexp", width)] if arch == "qwen2moe" else []
            found += [matrix(f"{block}ffn_{name}_shexp", shared, width) for name in ("gate", "up")]
            found.append(matrix(f"{block}ffn_down_shexp", width, shared))
        return found

    arch, width, hidden = shape.architecture, shape.width, shape.hidden
    q, kv = shape.n_heads * shape.head_dim, shape.n_kv_heads * shape.head_dim
    all_biases, is_bert = arch in ("starcoder2", "gpt2", "bert"), arch in BERTS
    plan = [matrix("token_embd", shape.vocab_size, width)]
    if is_bert:
        plan += [("token_types.weight", Type.F32, 2, width), *norm("token_embd_norm")]
    if arch in ("gpt2", "bert"):
        plan.append(matrix("position_embd", shape.context_length, width))
    if shape.long_context:
        plan.append(vector("rope_freqs", shape.head_dim // 2))
    if shape.rope_scaling == "longrope":
        plan += [vector(f"rope_factors_{length}", shape.head_dim // 2) for length in ("long", "short")]
    for layer in range(shape.n_layers):
        block = f"blk.{layer}."
        qkv = {f"{block}attn_q": q, f"{block}attn_k": kv, f"{block}attn_v": kv}
        if arch in ("phi3", "gpt2", "nomic-bert"):
            qkv = {f"{block}attn_qkv": q + 2 * kv}
        if arch == "phi3":
            up = {f"{block}ffn_up": 2 * hidden}
        else:
            up = {f"{block}ffn_up": hidden} if all_biases else {f"{block}ffn_gate": hidden, f"{block}ffn_up": hidden}
        plan += norm(f"{block}attn_norm") if arch != "olmo2" and not is_bert else []
        plan += linear(qkv, width, all_biases or arch in ("qwen2", "qwen2moe", "stablelm"))
        if arch in ("qwen3", "qwen3moe", "gemma3", "olmo2", "olmoe"):
            sizes = (q, kv) if arch.startswith("olmo") else (shape.head_dim, shape.head_dim)
            plan += [vector(f"{block}attn_{x}_norm", n) for x, n in zip("qk", sizes, strict=True)]
        plan += linear({f"{block}attn_output": width}, q, all_biases)
        has_post_norms = arch in ("gemma2", "gemma3", "olmo2")
        plan += [vector(f"{block}post_attention_norm", width)] if has_post_norms else []
        plan += norm(f"{block}attn_output_norm") if is_bert else []
        plan += norm(f"{block}ffn_norm") if arch != "olmo2" and not is_bert else []
        if shape.n_experts:
            plan += experts(block)
        else:
            plan += linear(up, width, all_biases)
            plan += linear({f"{block}ffn_down": width}, hidden, all_biases)
        plan += [vector(f"{block}post_ffw_norm", width)] if has_post_norms else []
        plan += norm(f"{block}layer_output_norm") if is_bert else []
    plan += norm("output_norm") if not is_bert else []
    if shape.score_layers == 2:
        plan += linear({"cls": width}, width, has_bias=True)
    if shape.score_layers:
        n = shape.score_classes
        plan += [("cls.output.weight", Type.F32, n, width), bias("cls.output", n)]
    return plan if shape.tied else [*plan, matrix("output", shape.vocab_size, width)]


def rope_factors(shape: Shape) -> np.ndarray:
    """The divisors of Llama 3.2 for its longer context (factor 32, from 8,192): (head_dim / 2,) f32."""
    factor, low, high, before = 32.0, 1.0, 4.0, 8192
    divisors = []
    for i in range(shape.head_dim // 2):
        wavelength = 2 * math.pi * shape.rope_base ** (2 * i / shape.head_dim)
        smooth = min(1.0, max(0.0, (before / wavelength - low) / (high - low)))
        divisors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(divisors, np.float32)


# ------------------------------------------------------------------ the file


def _add_positions(writer: gguf.GGUFWriter, shape: Shape) -> None:
    if shape.architecture in ("gpt2", "bert"):
        return
    writer.add_rope_dimension_count(shape.n_rot or shape.head_dim)
    writer.add_rope_freq_base(shape.rope_base)
    if shape.rope_scaling in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(shape.rope_scaling))
        writer.add_rope_scaling_factor(4.0)
    if shape.rope_scaling in ("yarn", "longrope"):
        writer.add_rope_scaling_orig_ctx_len(shape.context_length // 4)
    if shape.rope_scaling == "longrope":
        writer.add_rope_scaling_attn_factors(1.19)


def _add_switches(writer: gguf.GGUFWriter, shape: Shape) -> None:
    """The metadata that only some architectures have."""
    arch = shape.architecture
    if arch in BERTS:
        writer.add_causal_attention(False)
        writer.add_pooling_type(gguf.PoolingType.RANK if shape.score_layers else gguf.PoolingType.MEAN)
        writer.add_token_type_count(2)
    if shape.score_layers:  # what llama.cpp writes between and behind two texts
        writer.add_add_eos_token(True)
        writer.add_add_sep_token(False)
    if arch in ("stablelm", "starcoder2", "gpt2", *BERTS):
        writer.add_layer_norm_eps(1e-5)
    else:
        writer.add_layer_norm_rms_eps(1e-5)
    if shape.window:
        writer.add_sliding_window(shape.window)
    if arch == "gemma2":
        writer.add_attn_logit_softcapping(2.0)  # small: so that caps change these scores and logits
        writer.add_final_logit_softcapping(8.0)
    if shape.n_experts:
        writer.add_expert_count(shape.n_experts)
        writer.add_expert_used_count(shape.n_experts_used)
        if arch in ("qwen2moe", "qwen3moe"):
            writer.add_expert_feed_forward_length(shape.hidden)
        if shape.shared_hidden:
            writer.add_expert_shared_feed_forward_length(shape.shared_hidden)
    if arch in ("granite", "granitemoe"):
        writer.add_embedding_scale(12.0)
        writer.add_residual_scale(0.22)
        writer.add_attention_scale(0.125)
        writer.add_logit_scale(2.0)
    if arch == "stablelm":
        writer.add_parallel_residual(False)


def add_byte_level_vocabulary(writer: gguf.GGUFWriter, size: int, seed: int) -> None:
    """Add `vocabulary` and a chat template to a file."""
    tokens, types, merges = vocabulary(size, seed)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(SPECIALS.index("<|im_start|>"))
    writer.add_eos_token_id(SPECIALS.index("<|im_end|>"))
    writer.add_unk_token_id(SPECIALS.index("<|endoftext|>"))
    writer.add_add_bos_token(False)
    writer.add_chat_template(_CHAT_TEMPLATE)


def wordpiece_tokens(size: int) -> list[str]:
    """The special tokens of BERT; letters, marks and digits, within a word and at its beginning; then parts of words.

    Raises `ValueError` when there are fewer than `size`.
    """
    characters = [chr(code) for code in range(0x21, 0x7F) if not chr(code).isupper()]
    tokens = [
        *WORDPIECE_SPECIALS,
        *(f"{SPACE}{c}" for c in characters),
        *characters,
        f"{SPACE}\u00df",
        f"{SPACE}\u65e5",
    ]
    words = dict.fromkeys(_TEXT.split())
    parts = [part for word in words for part in (SPACE + word, SPACE + word[:3], word[-3:], word[1:])]
    tokens = list(dict.fromkeys([*tokens, *parts]))
    if len(tokens) < size:
        raise ValueError(f"size is {size}, expected at most {len(tokens)}")
    return tokens[:size]


def add_wordpiece_vocabulary(writer: gguf.GGUFWriter, size: int) -> None:
    """Add `wordpiece_tokens` to a file."""
    writer.add_tokenizer_model("bert")
    writer.add_token_list(wordpiece_tokens(size))
    n = len(WORDPIECE_SPECIALS)
    writer.add_token_types([int(gguf.TokenType.CONTROL)] * n + [int(gguf.TokenType.NORMAL)] * (size - n))
    for add, name in (
        (writer.add_bos_token_id, "[CLS]"),
        (writer.add_eos_token_id, "[SEP]"),
        (writer.add_sep_token_id, "[SEP]"),
        (writer.add_unk_token_id, "[UNK]"),
        (writer.add_pad_token_id, "[PAD]"),
        (writer.add_mask_token_id, "[MASK]"),
    ):
        add(WORDPIECE_SPECIALS.index(name))


def write_model(
    path: Path,
    shape: Shape,
    recipe: str = "Q4_1",
    seed: int = 0,
    real_layers: int = 0,
    add_vocabulary: Callable[[gguf.GGUFWriter], None] | None = None,
    equal_layers: bool = False,
) -> Path:
    """Write a model; tensors go to the file one by one. Returns `path`.

    `equal_layers`: all layers have the values of the first, so that a model of billions is written in minutes. Its
    speed is that of other values; what it says is of no use.

    `add_vocabulary`: adds the `tokenizer.*` keys; None: those of `vocabulary`, a byte-level one, or of WordPiece.

    `real_layers`: those beyond the first so many add nothing (0: all add something). Such a model says what the
    same one with only its first layers says, and takes longer for it.
    """
    writer = gguf.GGUFWriter(path, shape.architecture)
    writer.add_name(f"random {recipe}")
    writer.add_context_length(shape.context_length)
    writer.add_embedding_length(shape.width)
    writer.add_block_count(shape.n_layers)
    writer.add_feed_forward_length(shape.hidden)
    writer.add_head_count(shape.n_heads)
    writer.add_head_count_kv(shape.n_kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    _add_positions(writer, shape)
    _add_switches(writer, shape)
    writer.add_vocab_size(shape.vocab_size)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    if add_vocabulary is not None:
        add_vocabulary(writer)
    elif shape.architecture in BERTS:
        add_wordpiece_vocabulary(writer, shape.vocab_size)
    else:
        add_byte_level_vocabulary(writer, shape.vocab_size, seed)

    plan = tensor_plan(shape, recipe)
    for name, kind, rows, columns in plan:
        values, size = gguf.GGML_QUANT_SIZES[kind]
        dims: tuple[int, ...] = (rows, columns) if rows else (columns,)
        if "_exps" in name:
            dims = (shape.n_experts, rows // shape.n_experts, columns)
        writer.add_tensor_info(name, dims, np.dtype(np.float32), max(rows, 1) * columns // values * size, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    own, idle = np.random.default_rng(seed), np.random.default_rng([seed, real_layers])
    first: dict[tuple[str, Type], np.ndarray] = {}  # matrices of the first layer, by the rest of their names
    for name, kind, rows, columns in plan:
        layer = int(name.split(".")[1]) if name.startswith("blk.") else -1
        is_idle = 0 < real_layers <= layer
        rng = idle if is_idle else own  # so that the others are those of the model without idle layers
        if name == "rope_freqs.weight":
            data = rope_factors(shape)
        elif name.startswith("rope_factors"):
            data = rng.uniform(1.0, 8.0 if "long" in name else 1.5, columns).astype(np.float32)
        elif name.endswith(".bias"):
            data = rng.standard_normal(columns, np.float32) * np.float32(0.3)
        elif rows == 0:
            data = rng.uniform(0.8, 1.2, columns).astype(np.float32)
        else:
            # Logits of a few units make some tokens likelier than others; activations stay near 1.
            # Routers choose clearly: what is nearly a tie, another engine's roundings decide otherwise.
            gain = 3.0 if name in ("token_embd.weight", "output.weight") or "ffn_gate_inp" in name else 1.0
            key = (name.split(".", 2)[-1], kind)
            is_repeated = equal_layers and layer > 0 and key in first
            data = first[key] if is_repeated else random_tensor(kind, rows, columns, rng, gain / math.sqrt(columns))
            if equal_layers and layer == 0:
                first[key] = data
            if is_idle and name.endswith(("attn_output.weight", "ffn_down.weight")):
                data = np.zeros_like(data)
        writer.write_tensor_data(data)
    writer.close()
    return path


@click.command()
@click.argument("path", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--shape", type=click.Choice(list(SHAPES)), default="small", show_default=True)
@click.option("--format", "recipe", type=click.Choice(list(RECIPES)), default="Q4_1", show_default=True)
@click.option("--seed", default=0, show_default=True)
def main(path: Path, shape: str, recipe: str, seed: int) -> None:
    """Write a random model to PATH."""
    write_model(path, SHAPES[shape], recipe, seed)
    click.echo(f"{path}: {path.stat().st_size:,} bytes, shape {shape}, {recipe}, seed {seed}")


if __name__ == "__main__":
    main()
