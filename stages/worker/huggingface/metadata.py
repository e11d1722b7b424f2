"""The hyper-parameters of `config.json` as the keys that GGUF files have, and the RoPE factors as their tensors.

Bounds are checked where GGUF files are checked (stages/worker/checkpoint/hyperparameters.py).  Here, what the graph
could not express is refused: an activation, a scaling of positions, or a switch that would be ignored.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from stages.worker.checkpoint.architectures import ARCHITECTURES
from stages.worker.checkpoint.source import REVISED
from stages.worker.huggingface.config import Config
from stages.worker.huggingface.families import FAMILIES, PATTERN, SOME, Family

Metadata = dict[str, Any]
_MAX_ROTATED = 4096  # values of a head; more than the graph allows
_NOMIC_CONTEXT = 2048  # the class's default of max_trained_positions
# Switches of NomicBertModel, all of which have to be off, and the class's defaults.
_NOMIC_FLAGS = {
    "qkv_proj_bias": True,
    "mlp_fc1_bias": True,
    "mlp_fc2_bias": True,
    "prenorm": False,
    "causal": False,
    "parallel_block": False,
    "parallel_block_tied_norm": False,
    "use_rms_norm": False,
    "rotary_emb_interleaved": False,
}


_LONGROPE_CONTEXT = 4096  # Phi-3's default of original_max_position_embeddings
_CAPPED, _SCALED = ("gemma2", "gemma3"), ("granite", "granitemoe")


class _Switch(NamedTuple):
    """A field that changes a model's numbers: its values without an effect, and the architectures that read it."""

    neutral: tuple[object, ...] = ()
    read_by: tuple[str, ...] = ()


# Fields of `transformers` that a class's graph may have, and this one has not: they are refused, and not ignored.
_SWITCHES = {
    "add_cross_attention": _Switch((False,)),
    "alibi": _Switch((False,)),
    "attention_chunk_size": _Switch(),
    "attention_multiplier": _Switch((), _SCALED),
    "attn_logit_softcapping": _Switch((), _CAPPED),
    "clip_qkv": _Switch(),
    "compression_config": _Switch(),
    "embedding_multiplier": _Switch((1,), _SCALED),
    "final_logit_softcapping": _Switch((), _CAPPED),
    "logit_scale": _Switch((1,)),
    "logits_scaling": _Switch((1,), _SCALED),
    "no_rope_layers": _Switch(([],)),
    "qk_layernorm": _Switch((False,), ("stablelm",)),
    "query_pre_attn_scalar": _Switch((), _CAPPED),
    "residual_multiplier": _Switch((1,), _SCALED),
    "use_bidirectional_attention": _Switch((False,)),
    "use_parallel_residual": _Switch((False,), ("stablelm",)),
    "use_qk_norm": _Switch((False,)),
}


def family_of(config: Config) -> tuple[str, Family]:
    """The model class that the configuration names. Raises `CheckpointDirectoryError`."""
    names = config.items("architectures", [])
    name = str(names[0]) if names else ""
    if name not in FAMILIES:
        raise config.refuse("architectures", f"one of {', '.join(FAMILIES)}")
    family = FAMILIES[name]
    if config.has("model_type") and config.text("model_type") not in family.model_types:
        # `transformers` would take another class, by this name.
        raise config.refuse("model_type", f"{' or '.join(family.model_types)} beside architectures [{name!r}]")
    return name, family


def hyper_parameters(config: Config, family: Family) -> tuple[Metadata, dict[str, np.ndarray]]:
    """GGUF metadata, and the tensors of RoPE factors, f32. Raises `CheckpointDirectoryError`."""
    arch = family.architecture
    if config.has("quantization_config"):
        method = config.table("quantization_config").text("quant_method", "unknown")
        raise config.refuse("quantization_config", f"none (unquantized F32, F16 or BF16 weights), found {method!r}")
    _refuse_switches(config, arch)
    activation = config.text(family.activation_key, "")
    if family.activation_key == "hidden_activation" and activation == "gelu":
        raise config.refuse(
            "hidden_activation", f"one of {', '.join(one for one in family.activations if one != 'gelu')}"
        )
    # Gemma's hidden_act means tanh's approximation, also where it is gelu.
    activation = activation or config.text("hidden_act", family.activations[0])
    if arch == "nomic-bert":
        activation = config.text(family.activation_key)
    if activation not in family.activations:
        raise config.refuse(
            family.activation_key if config.has(family.activation_key) else "hidden_act",
            f"one of {', '.join(family.activations)}",
        )
    sizes = _gpt2_sizes(config) if arch in ("gpt2", "nomic-bert") else _sizes(config, family)
    norm = "attention.layer_norm_epsilon" if ARCHITECTURES[arch].norm == "layer" else "attention.layer_norm_rms_epsilon"
    keys: Metadata = {**sizes, norm: config.number(family.norm_key, family.norm_eps)}
    tensors: dict[str, np.ndarray] = {}
    if not ARCHITECTURES[arch].is_causal:
        keys |= _bert(config, family)
    elif arch != "gpt2":
        keys |= _switches(config, family, keys)
        positions, tensors = _positions(config, family, keys)
        keys |= positions
    found = {f"{arch}.{key}": value for key, value in keys.items()}
    if ARCHITECTURES[arch].is_causal and not config.flag("is_causal", True):
        found |= {f"{arch}.attention.causal": False, REVISED: True}
    return found, tensors


def _refuse_switches(config: Config, architecture: str) -> None:
    switches = dict(_SWITCHES)
    if not ARCHITECTURES[architecture].is_causal:
        switches |= dict.fromkeys(("is_decoder", "is_causal"), _Switch((False,)))
    if architecture == "starcoder2":
        switches["norm_type"] = _Switch(("layer_norm",))
    for key, switch in switches.items():
        if config.has(key) and architecture not in switch.read_by and config.fields[key] not in switch.neutral:
            raise config.refuse(key, str(switch.neutral[0]).lower() if switch.neutral else "none")


def _check_layer_types(config: Config, arch: str, has_window: bool) -> None:
    """Only graphs with a pattern of windows have layers of two kinds."""
    full, local = "full_attention", "sliding_attention"
    allowed = (full, local) if arch in _CAPPED else (local,) if has_window else (full,)
    if any(kind not in allowed for kind in config.items("layer_types", [])):
        raise config.refuse("layer_types", f"{' or '.join(allowed)} in every layer")


def _sizes(config: Config, family: Family) -> Metadata:
    width, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    default = family.head_dim or (width // heads if heads > 0 else None)
    head_dim = config.integer("head_dim", default)
    kv_heads = heads if family.kv_heads is None or "num_key_value_heads" in config.fields else family.kv_heads
    return {
        "context_length": config.integer("max_position_embeddings", family.context),
        "embedding_length": width,
        "block_count": config.integer("num_hidden_layers"),
        "feed_forward_length": config.integer("intermediate_size"),
        "attention.head_count": heads,
        "attention.head_count_kv": config.integer("num_key_value_heads", kv_heads),
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
    }


def _gpt2_sizes(config: Config) -> Metadata:
    for key, expected in (("scale_attn_weights", True), ("scale_attn_by_inverse_layer_idx", False)):
        if config.flag(key, expected) != expected:
            raise config.refuse(key, str(expected).lower())
    width = config.integer("n_embd")
    return {
        "context_length": config.integer("n_positions"),
        "embedding_length": width,
        "block_count": config.integer("n_layer"),
        "feed_forward_length": config.integer("n_inner", 4 * width),
        "attention.head_count": config.integer("n_head"),
    }


def position_offset(config: Config, family: Family) -> int:
    """How many rows of the position embedding no text has."""
    return config.integer("pad_token_id", 1) + 1 if family.skips_padding else 0


def _bert(config: Config, family: Family) -> Metadata:
    """Of models of embeddings."""
    keys: Metadata = {"attention.causal": False}
    if family.architecture == "bert":
        if config.text("position_embedding_type", "absolute") != "absolute":
            raise config.refuse("position_embedding_type", "'absolute'")
        keys["context_length"] = config.integer("max_position_embeddings") - position_offset(config, family)
        return keys
    for key, default in _NOMIC_FLAGS.items():
        if config.flag(key, default):
            raise config.refuse(key, "false")
    if config.number("rotary_emb_fraction", 0.0) != 1:
        raise config.refuse("rotary_emb_fraction", "1 (RoPE of all of a head)")
    for key in ("rotary_emb_scale_base", "rotary_scaling_factor"):
        if config.has(key):
            raise config.refuse(key, "null")
    if config.integer("moe_every_n_layers", 0):
        raise config.refuse("moe_every_n_layers", "0 (no experts)")
    keys["rope.freq_base"] = config.number("rotary_emb_base", 10000.0)
    # Published configurations have four times the positions that the model was trained with.
    trained = config.integer("max_trained_positions", _NOMIC_CONTEXT)
    keys["context_length"] = min(config.integer("n_positions"), trained)
    return keys


def _switches(config: Config, family: Family, sizes: Metadata) -> Metadata:
    """What only some architectures have."""
    arch, keys = family.architecture, Metadata()
    window = _window(config, family, sizes["block_count"])
    if window:
        keys["attention.sliding_window"] = window
    _check_layer_types(config, arch, bool(window))
    if arch in ("granite", "granitemoe"):
        keys["embedding_scale"] = config.number("embedding_multiplier", 1.0)
        keys["residual_scale"] = config.number("residual_multiplier", 1.0)
        keys["attention.scale"] = config.number("attention_multiplier", 1.0)
        keys["logit_scale"] = config.number("logits_scaling", 1.0)
    if arch == "stablelm":
        for key in ("use_parallel_residual", "qk_layernorm"):
            if config.flag(key, False):
                raise config.refuse(key, "false")
    if arch in ("gemma2", "gemma3"):
        keys |= _gemma(config, family, sizes)
    if family.experts or family.halves:
        keys |= _mixture(config, family)
    return keys


def _window(config: Config, family: Family, n_layers: int) -> int:
    """The positions that layers with a window attend to; 0: no layer has one."""
    given = config.fields.get("sliding_window", family.window)
    window = config.integer("sliding_window", family.window) if given is not None else 0
    if not family.windows:
        if config.has("sliding_window"):
            raise config.refuse("sliding_window", "null: the class has no windows")
        return 0
    if family.windows == PATTERN and not window:
        raise config.refuse("sliding_window", "a number of positions")
    if family.windows != SOME:
        return window
    if not config.flag("use_sliding_window", False):
        return 0
    if family.architecture == "qwen2moe":
        raise config.refuse("use_sliding_window", "false")
    first = config.integer("max_window_layers", 28) if family.architecture != "qwen3moe" else 0
    if window and 0 < first < n_layers and not config.has("layer_types"):
        raise config.refuse("max_window_layers", f"0 or at least {n_layers} (the same for all layers)")
    return window if first < n_layers or config.has("layer_types") else 0


def _mixture(config: Config, family: Family) -> Metadata:
    """The experts of each layer."""
    keys: Metadata = {
        "expert_count": config.integer(_experts_key(config, family)),
        "expert_used_count": config.integer("num_experts_per_tok"),
    }
    if family.expert_width_key != "intermediate_size":
        keys["expert_feed_forward_length"] = config.integer(family.expert_width_key)
    if family.architecture == "qwen2moe":
        keys["expert_shared_feed_forward_length"] = config.integer("shared_expert_intermediate_size")
    if family.architecture == "granitemoe" and config.integer("shared_intermediate_size", 0):
        keys["expert_shared_feed_forward_length"] = config.integer("shared_intermediate_size")
    if family.normalizes is not None and config.flag("norm_topk_prob", False) != family.normalizes:
        raise config.refuse("norm_topk_prob", str(family.normalizes).lower())
    if config.integer("decoder_sparse_step", 1) != 1:
        raise config.refuse("decoder_sparse_step", "1 (experts in every layer)")
    if config.items("mlp_only_layers", []):
        raise config.refuse("mlp_only_layers", "none (experts in every layer)")
    if config.has("clip_qkv"):
        raise config.refuse("clip_qkv", "none")
    return keys


def _experts_key(config: Config, family: Family) -> str:
    """The field with the number of experts, which has two names in `transformers`."""
    other = "num_experts" if family.experts_key == "num_local_experts" else "num_local_experts"
    if (
        config.has(family.experts_key)
        and config.has(other)
        and config.fields[other] != config.fields[family.experts_key]
    ):
        raise config.refuse(other, f"{config.fields[family.experts_key]}, as {family.experts_key}")
    return other if config.has(other) else family.experts_key


def _gemma(config: Config, family: Family, sizes: Metadata) -> Metadata:
    keys = Metadata()
    for key, to in (
        ("attn_logit_softcapping", "attn_logit_softcapping"),
        ("final_logit_softcapping", "final_logit_softcapping"),
    ):
        if config.has(key):
            keys[to] = config.number(key)
        elif family.architecture == "gemma2" and key in config.fields:
            keys[to] = 0.0  # null: none. Without the field both the class and the graph have a cap.
    if family.architecture == "gemma3" and config.has("attn_logit_softcapping"):
        raise config.refuse("attn_logit_softcapping", "null")
    heads, head_dim = sizes["attention.head_count"], sizes["attention.key_length"]
    is_wide = sizes["block_count"] == ARCHITECTURES[family.architecture].wide_scale_layers
    expected = sizes["embedding_length"] // heads if is_wide else head_dim
    if config.number("query_pre_attn_scalar", 256) != expected:
        raise config.refuse("query_pre_attn_scalar", str(expected))
    if config.has("layer_types"):
        local = [kind == "sliding_attention" for kind in config.items("layer_types")]
        keys["attention.sliding_window_pattern"] = np.array(local, np.bool_)
    elif family.architecture == "gemma3" and config.has("sliding_window_pattern"):
        keys["attention.sliding_window_pattern"] = config.integer("sliding_window_pattern")
    return keys


# ------------------------------------------------------------------ positions


def _positions(config: Config, family: Family, sizes: Metadata) -> tuple[Metadata, dict[str, np.ndarray]]:
    head_dim = sizes["attention.key_length"]
    rope, local = _rope_tables(config)
    whole = family.rotated_part if family.rotated_part is not None else 1.0
    part = config.number("partial_rotary_factor", rope.number("partial_rotary_factor", whole))
    if family.rotated_part is None and part != 1:
        raise (config if config.has("partial_rotary_factor") else rope).refuse("partial_rotary_factor", "1")
    n_rot = int(head_dim * part)
    if not 0 < n_rot <= _MAX_ROTATED:
        raise config.refuse("head_dim", f"1 to {_MAX_ROTATED} rotated values, found {n_rot}")
    base = rope.number("rope_theta", config.number("rope_theta", family.rope_theta))
    keys: Metadata = {"rope.dimension_count": n_rot, "rope.freq_base": base}
    if family.architecture == "gemma3":
        keys["rope.freq_base_swa"] = local.number("rope_theta", config.number("rope_local_base_freq", 10000.0))
    kind = rope.text("rope_type", rope.text("type", "default"))
    tensors: dict[str, np.ndarray] = {}
    match kind:
        case "default":
            pass
        case "linear":
            keys |= {"rope.scaling.type": "linear", "rope.scaling.factor": rope.number("factor")}
        case "llama3":
            tensors["rope_freqs.weight"] = _llama3_factors(config, rope, base, n_rot)
        case "yarn":
            keys |= _yarn(config, rope, sizes["context_length"])
        case "longrope" | "su":
            original = config.integer(
                "original_max_position_embeddings",
                rope.integer("original_max_position_embeddings", _LONGROPE_CONTEXT),
            )
            tensors = {
                f"rope_factors_{length}.weight": _factors(rope, f"{length}_factor", n_rot)
                for length in ("long", "short")
            }
            for key in ("short_mscale", "long_mscale"):
                if rope.has(key):
                    raise rope.refuse(key, "none")
            ratio = sizes["context_length"] / original if original > 0 else 1.0
            magnitude = math.sqrt(1 + math.log(ratio) / math.log(original)) if ratio > 1 and original > 1 else 1.0
            keys |= {
                "rope.scaling.type": "longrope",
                "rope.scaling.original_context_length": original,
                "rope.scaling.attn_factor": rope.number("attention_factor", magnitude),
            }
        case _:
            raise rope.refuse(
                "rope_type" if rope.has("rope_type") else "type", "default, linear, llama3, yarn or longrope"
            )
    return keys, tensors


def _rope_tables(config: Config) -> tuple[Config, Config]:
    """The settings of positions: of layers that see all positions, and of those with a window."""
    for key in ("rope_parameters", "rope_scaling"):  # transformers 5 and 4
        if config.has(key):
            table = config.table(key)
            if table.has("full_attention"):
                return table.table("full_attention"), table.table("sliding_attention")
            return table, Config(config.path, {})
    return Config(config.path, {}), Config(config.path, {})


def _yarn(config: Config, rope: Config, context: int) -> Metadata:
    factor = rope.number("factor")
    for key in ("mscale", "mscale_all_dim"):
        if rope.has(key):
            raise rope.refuse(key, "none")
    usual = 0.1 * math.log(factor) + 1 if factor > 1 else 1.0
    if abs(rope.number("attention_factor", usual) - usual) > 1e-6:
        raise rope.refuse("attention_factor", f"{usual:g}")
    if not rope.flag("truncate", True):
        raise rope.refuse("truncate", "true")
    original = rope.integer("original_max_position_embeddings", context)
    return {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": factor,
        "rope.scaling.original_context_length": original,
        "rope.scaling.yarn_beta_fast": rope.number("beta_fast", 32.0),
        "rope.scaling.yarn_beta_slow": rope.number("beta_slow", 1.0),
    }


def _llama3_factors(config: Config, rope: Config, base: float, n_rot: int) -> np.ndarray:
    """The divisors of the frequencies by Llama 3.1: long waves are stretched, short ones stay."""
    factor, low, high = rope.number("factor"), rope.number("low_freq_factor"), rope.number("high_freq_factor")
    original = rope.integer("original_max_position_embeddings")
    if not 0 < low < high:
        raise rope.refuse("high_freq_factor", f"more than low_freq_factor ({low:g}), which is more than 0")
    if factor <= 0 or base <= 0 or original <= 0:
        raise rope.refuse("factor", "positive factors")
    divisors = []
    for i in range(0, n_rot, 2):
        wavelength = 2 * math.pi * base ** (i / n_rot)
        smooth = min(1.0, max(0.0, (original / wavelength - low) / (high - low)))
        divisors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(divisors, np.float32)


def _factors(rope: Config, key: str, n_rot: int) -> np.ndarray:
    values = rope.items(key)
    if len(values) != n_rot // 2 or not all(isinstance(one, (int, float)) and 0 <= one < 1e30 for one in values):
        raise rope.refuse(key, f"{n_rot // 2} numbers")
    return np.array(values, np.float32)
