"""The model classes of `transformers` that can be read: their architecture, tensor names, and how values differ.

A class's tensors are those of the GGUF architecture under other names, and some are stored in another form, which
llama.cpp's converter changes too (https://github.com/ggml-org/llama.cpp/blob/master/convert_hf_to_gguf.py):

    permuted      q and k of classes whose GGUF graph rotates neighbours (2i, 2i+1): the files have the two halves of
                  a head one after the other
    plus_one      norms that the model adds 1 to
    transposed    matrices that are stored as (inputs, outputs)
    experts       a tensor for each expert, which are one below the other in a GGUF file
    halves        a tensor of which each expert's (or all) rows are two tensors of a GGUF file, one below the other
"""

from __future__ import annotations

import re
from typing import NamedTuple

import numpy as np

_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_QK_NORMS = {"self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm"}
_POST_NORMS = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_OLMO2 = {name: part for name, part in _LAYER.items() if name != "input_layernorm"} | {
    "post_attention_layernorm": "post_attention_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_PHI3 = _LAYER | {"self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up"}
_STARCODER2 = _LAYER | {"mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down"}
_GPT2 = {
    "ln_1": "attn_norm",
    "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output",
    "ln_2": "ffn_norm",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
}
_ROUTER = "ffn_gate_inp"
_EXPERTS = {"gate_proj": "ffn_gate_exps", "up_proj": "ffn_up_exps", "down_proj": "ffn_down_exps"}
_ATTENTION = {name: part for name, part in _LAYER.items() if not name.startswith("mlp.")}
_MIXTRAL = _ATTENTION | {"block_sparse_moe.gate": _ROUTER}
_MOE = _ATTENTION | {"mlp.gate": _ROUTER}
_QWEN2_MOE = _MOE | {
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
}
_GRANITE_MOE = _ATTENTION | {
    "block_sparse_moe.router.layer": _ROUTER,
    "block_sparse_moe.output_linear": "ffn_down_exps",
    "shared_mlp.output_linear": "ffn_down_shexp",
}
_BERT = {
    "attention.self.query": "attn_q",
    "attention.self.key": "attn_k",
    "attention.self.value": "attn_v",
    "attention.output.dense": "attn_output",
    "attention.output.LayerNorm": "attn_output_norm",
    "intermediate.dense": "ffn_up",
    "output.dense": "ffn_down",
    "output.LayerNorm": "layer_output_norm",
}
_BERT_TOP = {
    "embeddings.word_embeddings": "token_embd",
    "embeddings.position_embeddings": "position_embd",
    "embeddings.token_type_embeddings": "token_types",
    "embeddings.LayerNorm": "token_embd_norm",
}
# Of models that score pairs; `classifier` has one row.
_BERT_SCORE = {"pooler.dense": "cls", "classifier": "cls.output"}
_ROBERTA_SCORE = {"classifier.dense": "cls", "classifier.out_proj": "cls.output"}
_NOMIC_BERT = {
    "attn.Wqkv": "attn_qkv",
    "attn.out_proj": "attn_output",
    "norm1": "attn_output_norm",
    "mlp.fc11": "ffn_up",
    "mlp.fc12": "ffn_gate",
    "mlp.fc2": "ffn_down",
    "norm2": "layer_output_norm",
}
# Of these models only the hidden states are used.
_HEADS = r"(pooler|cls|lm_head)\..*|embeddings\.position_ids"
_TOP = {"embed_tokens": "token_embd", "norm": "output_norm"}
_SILU = ("silu", "swish")
_GELU = ("gelu_pytorch_tanh", "gelu_new", "gelu_fast")


EVERY, SOME, PATTERN = "every layer", "some layers", "by a pattern"
QKV, QKVO = ("attn_q", "attn_k", "attn_v"), ("attn_q", "attn_k", "attn_v", "attn_output")
_FFN = ("ffn_gate", "ffn_up", "ffn_down")


class BiasFlag(NamedTuple):
    """A field that says which matrices have biases, and its default."""

    parts: tuple[str, ...]
    default: bool = False


_ATTENTION_BIAS = {"attention_bias": BiasFlag(QKVO)}
_BOTH_BIASES = _ATTENTION_BIAS | {"mlp_bias": BiasFlag(_FFN)}


class Family(NamedTuple):
    """One model class. `layer` and `top`: names without layer number, `.weight` and `.bias`, to those of the GGUF."""

    architecture: str
    layer: dict[str, str] = _LAYER
    top: dict[str, str] = _TOP
    prefix: str = "model."
    layers: str = "layers."
    activations: tuple[str, ...] = _SILU
    activation_key: str = "hidden_act"
    norm_key: str = "rms_norm_eps"
    permuted: tuple[str, ...] = ()
    plus_one: bool = False
    transposed: tuple[str, ...] = ()
    is_tied: bool = False  # the default of tie_word_embeddings
    model_types: tuple[str, ...] = ()  # `model_type` of configurations of this class
    # The class's defaults, for fields that a configuration leaves out. None: there is none, or it depends on others.
    rotated_part: float | None = None  # partial_rotary_factor; None: the class rotates whole heads
    norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    context: int | None = None
    kv_heads: int | None = None  # None: as many as query heads
    head_dim: int | None = None  # None: hidden_size / num_attention_heads
    window: int | None = None  # sliding_window
    windows: str = ""  # which layers have it: EVERY, SOME (qwen), PATTERN (gemma), "": the class has no windows
    biases: tuple[str, ...] = ()  # matrices that always have one
    bias_flags: dict[str, BiasFlag] = {}
    # Of a mixture of experts: `experts_in` is what is before an expert's number, `experts` maps what is behind it.
    experts_in: str = ""
    experts: dict[str, str] = {}
    halves: dict[str, tuple[str, str]] = {}
    experts_key: str = "num_experts"  # how many each layer has
    expert_width_key: str = "intermediate_size"
    normalizes: bool | None = None  # what norm_topk_prob has to be; None: the class has no such switch
    unused: str = ""  # pattern of tensors that the graph does without
    skips_padding: bool = False  # positions begin behind the padding token's id


_BERT_FAMILY = Family(
    "bert",
    _BERT,
    _BERT_TOP,
    prefix="bert.",
    layers="encoder.layer.",
    activations=("gelu", *_GELU),
    norm_key="layer_norm_eps",
    is_tied=True,
    unused=_HEADS,
    model_types=("bert",),
    norm_eps=1e-12,
    biases=(*QKVO, "ffn_up", "ffn_down"),
)
_POSITION_IDS = r"embeddings\.position_ids"
_XLM_ROBERTA = _BERT_FAMILY._replace(prefix="roberta.", skips_padding=True, model_types=("xlm-roberta",))
_LLAMA = Family("llama", permuted=("attn_q", "attn_k"), model_types=("llama",), context=2048, bias_flags=_BOTH_BIASES)
_MISTRAL = _LLAMA._replace(
    model_types=("mistral",), context=131072, kv_heads=8, window=4096, windows=EVERY, bias_flags={}
)
_QWEN = Family("qwen2", context=32768, window=4096, windows=SOME)
_GEMMA = Family(
    "gemma",
    activations=(*_GELU, "gelu"),
    activation_key="hidden_activation",
    plus_one=True,
    is_tied=True,
    model_types=("gemma",),
    context=8192,
    kv_heads=16,
    head_dim=256,
    bias_flags=_ATTENTION_BIAS,
)
_GRANITE_EXPERTS = Family(
    "granitemoe",
    _GRANITE_MOE,
    permuted=("attn_q", "attn_k"),
    halves={
        "block_sparse_moe.input_linear": ("ffn_gate_exps", "ffn_up_exps"),
        "shared_mlp.input_linear": ("ffn_gate_shexp", "ffn_up_shexp"),
    },
    experts_key="num_local_experts",
    model_types=("granitemoe",),
    context=2048,
    bias_flags=_ATTENTION_BIAS,
)

FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": _LLAMA,
    "MistralForCausalLM": _MISTRAL,
    "MixtralForCausalLM": _MISTRAL._replace(
        model_types=("mixtral",),
        norm_eps=1e-5,
        rope_theta=1e6,
        window=None,
        layer=_MIXTRAL,
        experts_in="block_sparse_moe.experts.",
        experts={"w1": "ffn_gate_exps", "w3": "ffn_up_exps", "w2": "ffn_down_exps"},
        experts_key="num_local_experts",
    ),
    "Qwen2ForCausalLM": _QWEN._replace(model_types=("qwen2",), kv_heads=32, biases=QKV),
    "Qwen2MoeForCausalLM": _QWEN._replace(
        architecture="qwen2moe",
        layer=_QWEN2_MOE,
        experts_in="mlp.experts.",
        experts=_EXPERTS,
        expert_width_key="moe_intermediate_size",
        normalizes=False,
        model_types=("qwen2_moe",),
        kv_heads=16,
        bias_flags={"qkv_bias": BiasFlag(QKV, True)},
    ),
    "Qwen3MoeForCausalLM": _QWEN._replace(
        architecture="qwen3moe",
        layer=_MOE | _QK_NORMS,
        experts_in="mlp.experts.",
        experts=_EXPERTS,
        expert_width_key="moe_intermediate_size",
        normalizes=True,
        model_types=("qwen3_moe",),
        kv_heads=4,
        bias_flags=_ATTENTION_BIAS,
    ),
    "OlmoeForCausalLM": Family(
        "olmoe",
        _MOE | _QK_NORMS,
        experts_in="mlp.experts.",
        experts=_EXPERTS,
        normalizes=False,
        model_types=("olmoe",),
        norm_eps=1e-5,
        context=4096,
        bias_flags=_ATTENTION_BIAS,
    ),
    "Qwen3ForCausalLM": _QWEN._replace(
        architecture="qwen3",
        layer=_LAYER | _QK_NORMS,
        model_types=("qwen3",),
        kv_heads=32,
        head_dim=128,
        bias_flags=_ATTENTION_BIAS,
    ),
    "GemmaForCausalLM": _GEMMA,
    "Gemma2ForCausalLM": _GEMMA._replace(
        architecture="gemma2",
        layer=_LAYER | _POST_NORMS,
        model_types=("gemma2",),
        kv_heads=4,
        window=4096,
        windows=PATTERN,
    ),
    "Gemma3ForCausalLM": _GEMMA._replace(
        architecture="gemma3",
        layer=_LAYER | _POST_NORMS | _QK_NORMS,
        model_types=("gemma3_text",),
        context=131072,
        kv_heads=4,
        rope_theta=1e6,
        window=4096,
        windows=PATTERN,
    ),
    "Phi3ForCausalLM": Family(
        "phi3", _PHI3, model_types=("phi3",), rotated_part=1.0, norm_eps=1e-5, context=4096, windows=EVERY
    ),
    "GraniteForCausalLM": Family(
        "granite",
        permuted=("attn_q", "attn_k"),
        model_types=("granite",),
        context=2048,
        bias_flags=_BOTH_BIASES,
    ),
    "GraniteMoeForCausalLM": _GRANITE_EXPERTS,
    "GraniteMoeSharedForCausalLM": _GRANITE_EXPERTS._replace(model_types=("granitemoeshared",)),
    "Olmo2ForCausalLM": Family(
        "olmo2",
        _OLMO2 | _QK_NORMS,
        model_types=("olmo2",),
        norm_eps=1e-5,
        context=2048,
        bias_flags=_ATTENTION_BIAS,
    ),
    "StableLmForCausalLM": Family(
        "stablelm",
        norm_key="layer_norm_eps",
        model_types=("stablelm",),
        rotated_part=0.25,
        norm_eps=1e-5,
        context=4096,
        kv_heads=32,
        bias_flags={"use_qkv_bias": BiasFlag(QKV)},
    ),
    "Starcoder2ForCausalLM": Family(
        "starcoder2",
        _STARCODER2,
        norm_key="norm_epsilon",
        activations=_GELU,
        is_tied=True,
        model_types=("starcoder2",),
        norm_eps=1e-5,
        context=4096,
        kv_heads=2,
        windows=EVERY,
        bias_flags={"use_bias": BiasFlag((*QKVO, "ffn_up", "ffn_down"), True)},
    ),
    "GPT2LMHeadModel": Family(
        "gpt2",
        _GPT2,
        {"wte": "token_embd", "wpe": "position_embd", "ln_f": "output_norm"},
        prefix="transformer.",
        layers="h.",
        activations=_GELU,
        activation_key="activation_function",
        norm_key="layer_norm_epsilon",
        transposed=("attn_qkv", "attn_output", "ffn_up", "ffn_down"),
        is_tied=True,
        model_types=("gpt2",),
        norm_eps=1e-5,
        biases=("attn_qkv", "attn_output", "ffn_up", "ffn_down"),
    ),
    "BertModel": _BERT_FAMILY,
    "BertForMaskedLM": _BERT_FAMILY,
    "BertForSequenceClassification": _BERT_FAMILY._replace(top=_BERT_TOP | _BERT_SCORE, unused=_POSITION_IDS),
    "XLMRobertaModel": _XLM_ROBERTA,
    "XLMRobertaForMaskedLM": _XLM_ROBERTA,
    "XLMRobertaForSequenceClassification": _XLM_ROBERTA._replace(
        top=_BERT_TOP | _ROBERTA_SCORE, unused=rf"pooler\..*|{_POSITION_IDS}"
    ),
    "NomicBertModel": Family(
        "nomic-bert",
        _NOMIC_BERT,
        {
            "embeddings.word_embeddings": "token_embd",
            "embeddings.token_type_embeddings": "token_types",
            "emb_ln": "token_embd_norm",
        },
        prefix="bert.",
        layers="encoder.layers.",
        activations=("swiglu",),
        activation_key="activation_function",
        norm_key="layer_norm_epsilon",
        is_tied=True,
        unused=_HEADS,
        model_types=("nomic_bert",),
        norm_eps=1e-5,
    ),
}

# Names of norms' tensors in checkpoints of the first BERT models.
_OLD_KINDS = {"gamma": "weight", "beta": "bias"}
# Tensors that hold no weights: tables that the graph computes itself.
_COMPUTED = re.compile(r"(.*\.)?(rotary_emb\.inv_freq|attn\.(masked_)?bias)")


def gguf_name(family: Family, name: str) -> str:
    """The GGUF name of a tensor; "" for one that is no weight; its own name if the graph has no such tensor."""
    if _COMPUTED.fullmatch(name):
        return ""
    if family.unused and re.fullmatch(family.unused, name.removeprefix(family.prefix)):
        return ""
    body, _, kind = name.rpartition(".")
    if body.endswith("LayerNorm"):
        kind = _OLD_KINDS.get(kind, kind)
    if kind not in ("weight", "bias"):
        return name
    if body == "lm_head":
        return f"output.{kind}"
    body = body.removeprefix(family.prefix)
    if body in family.top:
        return f"{family.top[body]}.{kind}"
    if body.startswith(family.layers):
        number, _, part = body.removeprefix(family.layers).partition(".")
        if _is_number(number) and part in family.layer:
            return f"blk.{int(number)}.{family.layer[part]}.{kind}"
    return name


class Place(NamedTuple):
    """Where a tensor is in the GGUF file: its name, an expert's number, and which half of the stored rows it is."""

    name: str
    expert: int = -1
    half: int = -1


def places(family: Family, name: str) -> list[Place]:
    """Where a stored tensor's rows are in the GGUF file; none for one that is no weight."""
    body, _, kind = name.removeprefix(family.prefix + family.layers).rpartition(".")
    number, _, part = body.partition(".")
    if name.startswith(family.prefix + family.layers) and _is_number(number) and kind == "weight":
        if part in family.halves:
            return [Place(f"blk.{int(number)}.{to}.weight", half=i) for i, to in enumerate(family.halves[part])]
        expert, _, matrix = part.removeprefix(family.experts_in).partition(".")
        if part.startswith(family.experts_in) and _is_number(expert) and matrix in family.experts:
            return [Place(f"blk.{int(number)}.{family.experts[matrix]}.weight", int(expert))]
    to = gguf_name(family, name)
    return [Place(to)] if to else []


def _is_number(text: str) -> bool:
    """Whether a part of a name is a number, and one that a model may have."""
    return text.isdecimal() and len(text) < 7


def part_of(name: str) -> str:
    """The part of a GGUF name that is neither layer nor kind: "attn_q" of "blk.3.attn_q.bias"; "": there is none."""
    return name.rpartition(".")[0].rpartition(".")[2]


def neighbours(rows: int, heads: int) -> np.ndarray:
    """Which stored row each row is, if the two halves of each head are to alternate."""
    return np.arange(rows).reshape(heads, 2, -1).swapaxes(1, 2).reshape(-1)
