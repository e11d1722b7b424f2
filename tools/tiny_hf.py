"""Writes a small GGUF model as a Hugging Face directory with the same weights, for tests.

    python -m tools.tiny_hf model.gguf DIRECTORY

The GGUF comes from tools/tiny_gguf.py, with weights of F16, BF16 or F32.  Names, fields and orders are those of the
`transformers` classes: halves of heads one after the other, norms of Gemma less 1, matrices of GPT-2 as (inputs,
outputs).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click
import gguf
import numpy as np

from tools.tiny_hf_vocabulary import write_json, write_vocabulary

CLASSES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "granite": "GraniteForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "stablelm": "StableLmForCausalLM",
    "starcoder2": "Starcoder2ForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "qwen2moe": "Qwen2MoeForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM",
    "granitemoe": "GraniteMoeSharedForCausalLM",
    "olmoe": "OlmoeForCausalLM",
    "bert": "BertModel",
    "nomic-bert": "NomicBertModel",
}
XLM_ROBERTA = "XLMRobertaModel"  # bert with a unigram vocabulary
_SCORES = {"cls": "pooler.dense", "cls.output": "classifier"}  # of a model that scores pairs
_XLM_SCORES = {"cls": "classifier.dense", "cls.output": "classifier.out_proj"}
_XLM_PADDING = 1  # its padding token; positions begin behind it
MIXTRAL = "MixtralForCausalLM"  # llama with experts
_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_GPT2_TOP = {"token_embd": "transformer.wte", "position_embd": "transformer.wpe", "output_norm": "transformer.ln_f"}
_BERT_TOP = {
    "token_embd": "embeddings.word_embeddings",
    "position_embd": "embeddings.position_embeddings",
    "token_types": "embeddings.token_type_embeddings",
}
_BERT = {
    "attn_q": "attention.self.query",
    "attn_k": "attention.self.key",
    "attn_v": "attention.self.value",
    "attn_output": "attention.output.dense",
    "attn_output_norm": "attention.output.LayerNorm",
    "ffn_up": "intermediate.dense",
    "ffn_down": "output.dense",
    "layer_output_norm": "output.LayerNorm",
}
_NOMIC_BERT = {
    "attn_qkv": "attn.Wqkv",
    "attn_output": "attn.out_proj",
    "attn_output_norm": "norm1",
    "ffn_up": "mlp.fc11",
    "ffn_gate": "mlp.fc12",
    "ffn_down": "mlp.fc2",
    "layer_output_norm": "norm2",
}
_USUAL = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_EXPERTS = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
_QWEN_EXPERTS = {"ffn_gate_inp": "mlp.gate", "ffn_gate_inp_shexp": "mlp.shared_expert_gate"} | {
    f"ffn_{name}_shexp": f"mlp.shared_expert.{own}" for name, own in _EXPERTS.items()
}
_OWN = {
    "llama": {"ffn_gate_inp": "block_sparse_moe.gate"},
    "qwen2moe": _QWEN_EXPERTS,
    "qwen3moe": _QWEN_EXPERTS,
    "olmoe": _QWEN_EXPERTS,
    "granitemoe": {
        "ffn_gate_inp": "block_sparse_moe.router.layer",
        "ffn_gate_exps": "block_sparse_moe.input_linear",
        "ffn_down_exps": "block_sparse_moe.output_linear",
        "ffn_gate_shexp": "shared_mlp.input_linear",
        "ffn_down_shexp": "shared_mlp.output_linear",
    },
    "gemma2": {"ffn_norm": "pre_feedforward_layernorm"},
    "gemma3": {"ffn_norm": "pre_feedforward_layernorm"},
    "phi3": {"ffn_up": "mlp.gate_up_proj"},
    "starcoder2": {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
    "gpt2": {
        "attn_norm": "ln_1",
        "attn_qkv": "attn.c_attn",
        "attn_output": "attn.c_proj",
        "ffn_norm": "ln_2",
        "ffn_up": "mlp.c_fc",
        "ffn_down": "mlp.c_proj",
    },
}


def write_directory(source: Path, directory: Path, shards: int = 1, dtype: str = "") -> Path:
    """Write the model of a GGUF. Returns `directory`.

    shards: number of weight files, with an index if more than one.  dtype: of the matrices, "F32" or "BF16"; default:
    theirs.
    """
    directory.mkdir(parents=True, exist_ok=True)
    reader = gguf.GGUFReader(source)
    values = {name: field.contents() for name, field in reader.fields.items()}
    arch = values["general.architecture"]
    tensors = dict(_tensors(reader, values, arch))
    if dtype:
        tensors = {name: (dtype, _cast(*one, dtype)) if one[1].ndim > 1 else one for name, one in tensors.items()}
    is_unigram = values["tokenizer.ggml.model"] == "t5"
    if arch in ("bert", "nomic-bert"):
        config = _bert_config(values, arch, is_unigram)
        pooling = values[f"{arch}.pooling_type"]
        if pooling != gguf.PoolingType.RANK:
            (directory / "1_Pooling").mkdir(exist_ok=True)
            modes = {"pooling_mode_mean_tokens": pooling == 1, "pooling_mode_cls_token": pooling == 2}
            write_json(directory / "1_Pooling" / "config.json", modes)
    else:
        config = _gpt2_config(values) if arch == "gpt2" else _config(values, arch, reader)
    name = CLASSES[arch]
    if arch == "llama" and f"{arch}.expert_count" in values:
        name = MIXTRAL
    elif arch == "llama" and f"{arch}.attention.sliding_window" in values:
        name = "MistralForCausalLM"
    name = XLM_ROBERTA if arch == "bert" and is_unigram else name
    if f"{arch}.pooling_type" in values and values[f"{arch}.pooling_type"] == gguf.PoolingType.RANK:
        name = name.replace("Model", "ForSequenceClassification")
    config |= {"architectures": [name], "tie_word_embeddings": "lm_head.weight" not in tensors}
    config["vocab_size"] = len(values["tokenizer.ggml.tokens"])
    if arch == "stablelm":
        config["use_qkv_bias"] = any(name.endswith("q_proj.bias") for name in tensors)
    write_json(directory / "config.json", config)
    write_vocabulary(directory, values)
    _write_weights(directory, tensors, shards)
    return directory


def _cast(dtype: str, array: np.ndarray, to: str) -> np.ndarray:
    """The nearest values of another type; BF16 by cutting off."""
    wide = (array.astype(np.uint32) << 16).view(np.float32) if dtype == "BF16" else array.astype(np.float32)
    return wide if to == "F32" else (wide.view(np.uint32) >> 16).astype(np.uint16)


# ------------------------------------------------------------------ tensors


def _tensors(
    reader: gguf.GGUFReader, values: Mapping[str, Any], arch: str
) -> Iterator[tuple[str, tuple[str, np.ndarray]]]:
    """(name, (element type, array)); BF16 as u16."""
    heads = {"attn_q": values[f"{arch}.attention.head_count"], "attn_k": values[f"{arch}.attention.head_count_kv"]}
    for tensor in reader.tensors:
        if tensor.name.startswith("rope_"):
            continue
        kind = tensor.tensor_type.name
        array = np.array(tensor.data)
        if kind == "BF16":
            array = array.view(np.uint16)
        array = array.reshape([int(n) for n in tensor.shape[::-1]])
        body, _, suffix = tensor.name.rpartition(".")
        part = body.rpartition(".")[2]
        if arch in ("llama", "granite", "granitemoe") and part in heads:
            n = heads[part]
            array = array.reshape(n, array.shape[0] // n // 2, 2, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)
        if arch.startswith("gemma") and part.endswith("norm"):
            array = array - np.float32(1)
        if arch == "gpt2" and body.startswith("blk.") and array.ndim == 2:
            array = np.ascontiguousarray(array.T)
        if body == "position_embd" and values["tokenizer.ggml.model"] == "t5":
            array = np.concatenate([np.full_like(array[: _XLM_PADDING + 1], 7), array])
        if part == "ffn_gate_inp_shexp":
            array = array.reshape(1, -1)
        if arch == "granitemoe" and part.startswith("ffn_gate_") and part != "ffn_gate_inp":
            gates = array
            continue
        if arch == "granitemoe" and part.startswith("ffn_up_"):  # behind the gates
            body, array = body.replace("ffn_up", "ffn_gate"), np.concatenate([gates, array], axis=-2)
        elif part.endswith("_exps") and arch != "granitemoe":
            prefix, own = f"model.layers.{body.split('.')[1]}.", part.removeprefix("ffn_").removesuffix("_exps")
            for number, expert in enumerate(array):
                yield f"{prefix}{_expert_name(arch, own, number)}.{suffix}", (kind, expert)
            continue
        scores = _XLM_SCORES if values["tokenizer.ggml.model"] == "t5" else _SCORES
        yield f"{scores.get(body) or module_name(body, arch)}.{suffix}", (kind, array)


def _expert_name(arch: str, part: str, number: int) -> str:
    if arch == "llama":
        return f"block_sparse_moe.experts.{number}.{ {'gate': 'w1', 'up': 'w3', 'down': 'w2'}[part] }"
    return f"mlp.experts.{number}.{_EXPERTS[part]}"


def module_name(body: str, arch: str) -> str:
    """The name of a tensor of a GGUF file, without its suffix, in the `transformers` class."""
    if arch in ("bert", "nomic-bert"):
        if body == "token_embd_norm":
            return "embeddings.LayerNorm" if arch == "bert" else "emb_ln"
        if not body.startswith("blk."):
            return _BERT_TOP[body]
        _, layer, part = body.split(".", 2)
        return (
            f"encoder.layer.{layer}.{_BERT[part]}" if arch == "bert" else f"encoder.layers.{layer}.{_NOMIC_BERT[part]}"
        )
    if not body.startswith("blk."):
        return (_GPT2_TOP if arch == "gpt2" else _TOP)[body]
    _, layer, part = body.split(".", 2)
    prefix = "transformer.h" if arch == "gpt2" else "model.layers"
    return f"{prefix}.{layer}.{(_USUAL | _OWN.get(arch, {}))[part]}"


def write_safetensors(path: Path, tensors: Mapping[str, tuple[str, np.ndarray]]) -> None:
    """Write a file: the length of the header, the header, the arrays."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, (kind, array) in tensors.items():
        header[name] = {"dtype": kind, "shape": list(array.shape), "data_offsets": [at, at + array.nbytes]}
        at += array.nbytes
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    with path.open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        for _, array in tensors.values():
            file.write(np.ascontiguousarray(array).data)


def _write_weights(directory: Path, tensors: Mapping[str, tuple[str, np.ndarray]], shards: int) -> None:
    if shards == 1:
        write_safetensors(directory / "model.safetensors", tensors)
        return
    names = list(tensors)
    weight_map: dict[str, str] = {}
    for number in range(shards):
        file = f"model-{number + 1:05}-of-{shards:05}.safetensors"
        own = names[number::shards]
        write_safetensors(directory / file, {name: tensors[name] for name in own})
        weight_map |= dict.fromkeys(own, file)
    write_json(directory / "model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map})


# ------------------------------------------------------------------ configuration


def _config(values: Mapping[str, Any], arch: str, reader: gguf.GGUFReader) -> dict[str, Any]:
    def get(key: str, default: Any = None) -> Any:
        value = values.get(f"{arch}.{key}", default)
        return float(np.format_float_positional(value, unique=True)) if isinstance(value, np.float32) else value

    config: dict[str, Any] = {
        "hidden_size": get("embedding_length"),
        "num_hidden_layers": get("block_count"),
        "intermediate_size": get("feed_forward_length"),
        "num_attention_heads": get("attention.head_count"),
        "num_key_value_heads": get("attention.head_count_kv"),
        "head_dim": get("attention.key_length"),
        "max_position_embeddings": get("context_length"),
        "rope_theta": get("rope.freq_base"),
        "hidden_act": "silu",
    }
    if arch in ("stablelm", "starcoder2"):
        config["layer_norm_eps" if arch == "stablelm" else "norm_epsilon"] = get("attention.layer_norm_epsilon")
    else:
        config["rms_norm_eps"] = get("attention.layer_norm_rms_epsilon")
    if arch.startswith("gemma"):
        config["hidden_activation"] = "gelu_pytorch_tanh"
    if arch == "starcoder2":
        config["hidden_act"] = "gelu_pytorch_tanh"
    if get("rope.dimension_count") != get("attention.key_length"):
        config["partial_rotary_factor"] = get("rope.dimension_count") / get("attention.key_length")
    if get("attention.sliding_window"):
        config["sliding_window"] = get("attention.sliding_window")
    if arch in ("gemma2", "gemma3"):
        config["query_pre_attn_scalar"] = get("attention.key_length")
    if arch == "gemma2":
        config["attn_logit_softcapping"] = get("attn_logit_softcapping")
        config["final_logit_softcapping"] = get("final_logit_softcapping")
    if get("expert_count"):
        few = arch in ("llama", "granitemoe")
        config["num_local_experts" if few else "num_experts"] = get("expert_count")
        config["num_experts_per_tok"] = get("expert_used_count")
        config["norm_topk_prob"] = arch == "qwen3moe"
        config["moe_intermediate_size"] = get("expert_feed_forward_length")
        shared = "shared_expert_intermediate_size" if arch == "qwen2moe" else "shared_intermediate_size"
        config[shared] = get("expert_shared_feed_forward_length")
    if arch in ("granite", "granitemoe"):
        config["embedding_multiplier"], config["residual_multiplier"] = get("embedding_scale"), get("residual_scale")
        config["attention_multiplier"], config["logits_scaling"] = get("attention.scale"), get("logit_scale")
    config["rope_scaling"] = _rope_scaling(get, reader)
    if get("rope.scaling.original_context_length"):
        config["original_max_position_embeddings"] = get("rope.scaling.original_context_length")
    return config


def _rope_scaling(get: Any, reader: gguf.GGUFReader) -> dict[str, Any] | None:
    tensors = {tensor.name: np.array(tensor.data) for tensor in reader.tensors}
    kind = get("rope.scaling.type")
    if "rope_factors_long.weight" in tensors:
        factors = {f"{n}_factor": tensors[f"rope_factors_{n}.weight"].tolist() for n in ("long", "short")}
        return {"rope_type": "longrope", "attention_factor": get("rope.scaling.attn_factor"), **factors}
    if "rope_freqs.weight" in tensors:  # as tools/tiny_gguf.py writes them
        numbers = {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        return {"rope_type": "llama3", "original_max_position_embeddings": 8192, **numbers}
    if kind is None:
        return None
    return {
        "type": kind,
        "factor": get("rope.scaling.factor"),
        **({"original_max_position_embeddings": get("rope.scaling.original_context_length")} if kind == "yarn" else {}),
    }


def _gpt2_config(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "n_embd": values["gpt2.embedding_length"],
        "n_layer": values["gpt2.block_count"],
        "n_head": values["gpt2.attention.head_count"],
        "n_inner": values["gpt2.feed_forward_length"],
        "n_positions": values["gpt2.context_length"],
        "layer_norm_epsilon": float(
            np.format_float_positional(np.float32(values["gpt2.attention.layer_norm_epsilon"]), unique=True)
        ),
        "activation_function": "gelu_new",
    }


def _bert_config(values: Mapping[str, Any], arch: str, is_unigram: bool) -> dict[str, Any]:
    def get(key: str) -> Any:
        return values[f"{arch}.{key}"]

    eps = float(np.format_float_positional(np.float32(get("attention.layer_norm_epsilon")), unique=True))
    if arch == "bert":
        return {
            "hidden_size": get("embedding_length"),
            "num_hidden_layers": get("block_count"),
            "intermediate_size": get("feed_forward_length"),
            "num_attention_heads": get("attention.head_count"),
            "max_position_embeddings": get("context_length") + (_XLM_PADDING + 1 if is_unigram else 0),
            "pad_token_id": _XLM_PADDING if is_unigram else 0,
            "layer_norm_eps": eps,
            "hidden_act": "gelu",
            "position_embedding_type": "absolute",
        }
    return {
        "n_embd": get("embedding_length"),
        "n_layer": get("block_count"),
        "n_head": get("attention.head_count"),
        "n_inner": get("feed_forward_length"),
        "n_positions": 4 * get("context_length"),  # as the published ones
        "layer_norm_epsilon": eps,
        "activation_function": "swiglu",
        "rotary_emb_base": get("rope.freq_base"),
        "rotary_emb_fraction": 1.0,
        **dict.fromkeys(("qkv_proj_bias", "mlp_fc1_bias", "mlp_fc2_bias", "prenorm", "causal"), False),
    }


@click.command()
@click.argument("source", type=click.Path(path_type=Path, dir_okay=False, exists=True))
@click.argument("directory", type=click.Path(path_type=Path, file_okay=False))
@click.option("--shards", default=1, show_default=True)
def main(source: Path, directory: Path, shards: int) -> None:
    """Write the model of the GGUF SOURCE to DIRECTORY."""
    write_directory(source, directory, shards)


if __name__ == "__main__":
    main()
