"""Hugging Face directories that are refused: what does not fit the graph, is damaged, or is too large.

The message names what to change.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from pipeline.models.model_directory import MAX_SMALL_BYTES
from stages.worker.checkpoint.prepare_source import prepare_source
from tests.worker.huggingface_files import change, refusal, replace_weights
from tools.tiny_hf import write_directory


@pytest.fixture
def llama(tiny_gguf, tmp_path: Path) -> Path:  # type: ignore[no-untyped-def]
    return write_directory(tiny_gguf("odd", "F16"), tmp_path / "hf")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt"])
def test_pickled_weights_are_refused_by_name(llama: Path, name: str) -> None:
    (llama / "model.safetensors").rename(llama / name)
    assert f"{name} holds pickled weights, which can run any code" in refusal(llama)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"architectures": ["BloomForCausalLM"]}, "architectures is \"['BloomForCausalLM']\", expected one of Llama"),
        ({"hidden_size": None}, "config.json: hidden_size is missing, expected a whole number"),
        ({"hidden_size": "96"}, "config.json: hidden_size is '96', expected a whole number"),
        ({"vocab_size": 9}, "vocab_size is '9', expected 261, the rows of 'model.embed_tokens.weight'"),
        (
            {"model_type": "mistral"},
            "model_type is 'mistral', expected llama beside architectures ['LlamaForCausalLM']",
        ),
        ({"hidden_act": "gelu"}, "config.json: hidden_act is 'gelu', expected one of silu, swish"),
        (
            {"quantization_config": {"quant_method": "gptq"}},
            "expected none (unquantized F32, F16 or BF16 weights), found",
        ),
        (
            {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
            "rope_scaling.rope_type is 'dynamic', expected default",
        ),
        ({"num_key_value_heads": 2}, "llama.attention.head_count is 3, expected a multiple of head_count_kv (2)"),
        (
            {"num_hidden_layers": 4},
            "'model.layers.3.input_layernorm.weight' (blk.3.attn_norm.weight) is missing",
        ),
        (
            {"intermediate_size": 96},
            "'model.layers.0.mlp.gate_proj.weight' (blk.0.ffn_gate.weight) has shape [160, 96]",
        ),
    ],
)
def test_a_configuration_that_does_not_fit_is_refused(llama: Path, fields: dict[str, object], message: str) -> None:
    change(llama / "config.json", **fields)
    assert message in refusal(llama)


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("attn_logit_softcapping", 50.0, "none"),
        ("final_logit_softcapping", 30.0, "none"),
        ("query_pre_attn_scalar", 144, "none"),
        ("attention_multiplier", 0.5, "none"),
        ("embedding_multiplier", 12.0, "1"),
        ("logits_scaling", 8, "1"),
        ("logit_scale", 0.0625, "1"),
        ("use_bidirectional_attention", True, "false"),
        ("use_parallel_residual", True, "false"),
        ("use_qk_norm", True, "false"),
        ("no_rope_layers", [1, 0], "[]"),
        ("attention_chunk_size", 8192, "none"),
        ("compression_config", {"format": "int-quantized"}, "none"),
        ("layer_types", ["full_attention", "sliding_attention"], "full_attention in every layer"),
    ],
)
def test_a_switch_that_the_graph_does_not_have_is_refused(llama: Path, key: str, value: object, expected: str) -> None:
    change(llama / "config.json", **{key: value})
    assert f"config.json: {key} is {str(value)!r}, expected {expected}; this model cannot be served" in refusal(llama)


def test_switches_without_an_effect_are_accepted(llama: Path, tmp_path: Path) -> None:
    change(llama / "config.json", logit_scale=1.0, use_qk_norm=False, no_rope_layers=[], clip_qkv=None)
    change(llama / "config.json", layer_types=["full_attention"] * 2, add_cross_attention=False)
    (tmp_path / "models").mkdir(exist_ok=True)
    assert prepare_source(llama, tmp_path / "models").architecture == "llama"


def test_tensors_that_do_not_fit_are_refused(llama: Path) -> None:
    replace_weights(llama, model__extra__weight=("F16", np.zeros((2, 2), np.float16)))
    assert "tensor 'model.extra.weight' (model.extra.weight) is not part of this architecture's graph" in refusal(llama)
    replace_weights(llama, model__extra__weight=None, lm_head__weight=None)
    assert "tensor 'lm_head.weight' is missing, and" in refusal(llama)
    change(llama / "config.json", tie_word_embeddings=True)
    index = prepare_source(llama, llama.parent / "models")
    assert index.head_name == "token_embd.weight"


def test_weights_of_other_types_are_refused(llama: Path) -> None:
    replace_weights(llama, model__norm__weight=("I64", np.zeros(96, np.int64)))
    assert "tensor 'model.norm.weight' is I64, expected F32, F16, BF16; use an unquantized checkpoint" in refusal(llama)


def test_a_number_is_no_vector(llama: Path) -> None:
    replace_weights(llama, model__norm__weight=("F32", np.zeros((), np.float32)))
    message = "tensor 'model.norm.weight' has shape [], expected a vector or a matrix with values; fetch the file again"
    assert message in refusal(llama)


def test_a_template_that_is_no_text_is_refused(llama: Path) -> None:
    change(llama / "tokenizer_config.json", chat_template=7)
    assert "tokenizer_config.json: chat_template is '7', expected a text, or a list of templates" in refusal(llama)


def test_weights_beyond_a_type_are_refused(llama: Path) -> None:
    large = np.full((96, 96), 1e6, np.float32)
    replace_weights(llama, model__layers__0__self_attn__o_proj__weight=("F32", large))
    message = (
        "tensor 'model.layers.0.self_attn.o_proj.weight' (blk.0.attn_output.weight), rows 0 to 95: 1e+06, beyond F16"
    )
    assert message in refusal(llama, "f16")
    large[:] = np.nan
    replace_weights(llama, model__layers__0__self_attn__o_proj__weight=("F32", large))
    assert "rows 0 to 95: a value that is not finite; expected finite weights" in refusal(llama, "q8_0")


def test_damaged_files_are_refused(llama: Path) -> None:
    path = llama / "model.safetensors"
    raw = path.read_bytes()
    for damaged, message in (
        (b"", "file size is 0 bytes, expected at least 10"),
        (raw[:5000], "needs bytes"),
        (b"\xff" * 8 + raw[8:], "header length is 18446744073709551615, expected at most"),
        (raw[:8] + b"[" + raw[9:], "header is not JSON"),
    ):
        path.write_bytes(damaged)
        assert message in refusal(llama)


def test_tensors_that_share_bytes_are_refused(llama: Path) -> None:
    """A small file could name the same bytes for every layer, and fill a disk."""
    path = llama / "model.safetensors"
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    header["lm_head.weight"] = header["model.embed_tokens.weight"]
    changed = json.dumps(header).encode()
    path.unlink()
    path.write_bytes(len(changed).to_bytes(8, "little") + changed + raw[8 + length :])
    message = refusal(llama)
    assert "model.safetensors: tensor 'lm_head.weight' begins at byte" in message
    assert "inside 'model.embed_tokens.weight', which ends at" in message


@pytest.mark.parametrize("name", ["chat_template.jinja", "tokenizer_config.json"])
def test_small_files_that_are_too_large_are_not_read(llama: Path, name: str) -> None:
    with (llama / name).open("ab") as file:
        file.truncate(MAX_SMALL_BYTES + 1)
    assert f"{name} has 268,435,457 bytes, expected at most 268,435,456" in refusal(llama)


def test_shards_must_be_complete(tiny_gguf, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    directory = write_directory(tiny_gguf("odd", "F16"), tmp_path / "hf", shards=2)
    index = directory / "model.safetensors.index.json"
    listed = json.loads(index.read_text())
    (directory / "model-00002-of-00002.safetensors").rename(tmp_path / "aside")
    assert "model-00002-of-00002.safetensors is missing, and model.safetensors.index.json lists it" in refusal(
        directory
    )
    (tmp_path / "aside").rename(directory / "model-00002-of-00002.safetensors")
    index.write_text(json.dumps({"weight_map": listed["weight_map"] | {"lm_head.weight": "../model.safetensors"}}))
    assert "weight_map names '../model.safetensors', expected a .safetensors file of the directory" in refusal(
        directory
    )
    index.unlink()
    assert "has 2 safetensors files and no model.safetensors.index.json" in refusal(directory)


def test_a_changed_file_is_another_model(llama: Path) -> None:
    folder = llama.parent / "models"
    folder.mkdir()
    first = prepare_source(llama, folder)
    change(llama / "config.json", rope_theta=20000.0)
    second = prepare_source(llama, folder)
    assert first.digest != second.digest and second.hyper.rope_base == 20000.0
    assert prepare_source(llama, folder).digest == second.digest


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rope_theta": 10**400}, "rope_theta is 1000000"),
        ({"rope_theta": 0.5}, "rope base is 0.5, expected a number from 1.0 to 1e30"),
        ({"rms_norm_eps": -1.0}, "attention.layer_norm_rms_epsilon is -1.0, expected 0 to below 1"),
        ({"head_dim": 1 << 30}, "head_dim is '1073741824', expected 1 to 4096 rotated values"),
        ({"num_attention_heads": 0}, "llama.attention.head_count is 0, expected 1 to 4096"),
        ({"max_position_embeddings": 1 << 62}, "max_position_embeddings is 4611686018427387904, expected at most"),
    ],
)
def test_numbers_beyond_their_bounds_are_refused(llama: Path, fields: dict[str, object], message: str) -> None:
    change(llama / "config.json", **fields)
    assert message in refusal(llama)
    assert not (llama.parent / "models" / "digests.json").exists(), "no file is hashed before all is checked"
