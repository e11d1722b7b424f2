"""A Hugging Face directory gives the checkpoint that a GGUF file with the same weights gives.

Length: every test changes the same small directory in one place, with the same helpers.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import gguf
import msgspec
import numpy as np
import pytest

from pipeline.errors import ConfigError
from pipeline.models.model_directory import MAX_SMALL_BYTES
from shm.checkpoint import Index, bin_path
from stages.worker.checkpoint.prepare_source import prepare_source
from stages.worker.huggingface.safetensors import SafetensorsFile
from starling.vocabulary_check import check_vocabulary
from tests.tokenizer.trained import unigram_spec
from tools.tiny_gguf import LARGE, SHAPES, write_model
from tools.tiny_hf import CLASSES, write_directory, write_safetensors
from tools.vocabulary_gguf import add_vocabulary

FAMILIES = [name for name in SHAPES if name not in (*LARGE, "partial")]  # no class of llama rotates part of a head


def folder_of(tmp_path: Path) -> Path:
    folder = tmp_path / "models"
    folder.mkdir(exist_ok=True)
    return folder


def written(folder: Path, index: Index) -> bytes:
    return bin_path(folder / f"{index.digest}.idx").read_bytes()


@pytest.mark.parametrize("shape", FAMILIES)
def test_the_same_weights_give_the_same_checkpoint(tiny_gguf, tmp_path: Path, shape: str) -> None:  # type: ignore[no-untyped-def]
    """Norms of Gemma are within a factor of 2 of 1, so that taking 1 away is exact."""
    source = tiny_gguf(shape, "F16")
    directory = write_directory(source, tmp_path / "hf", shards=3)
    folder = folder_of(tmp_path)
    expected, found = prepare_source(source, folder), prepare_source(directory, folder)
    assert found.architecture == expected.architecture == SHAPES[shape].architecture
    assert found.hyper == expected.hyper and found.pooling == expected.pooling
    assert found.tensors == expected.tensors
    assert written(folder, found) == written(folder, expected)
    assert found.digest != expected.digest
    ours, theirs = found.tokenizer, expected.tokenizer
    assert msgspec.structs.replace(ours, revision=0) == msgspec.structs.replace(theirs, revision=0)


def test_every_architecture_is_tried() -> None:
    assert {SHAPES[shape].architecture for shape in FAMILIES} == set(CLASSES)


# ------------------------------------------------------------------ models of embeddings


@pytest.fixture(scope="module")
def xlm_roberta(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GGUF file of the bert graph with a unigram vocabulary."""
    spec = unigram_spec(True, True)
    shape = SHAPES["bert"]._replace(vocab_size=len(spec.tokens))
    path = tmp_path_factory.mktemp("xlm") / "xlm.gguf"

    def add_keys(writer: gguf.GGUFWriter) -> None:
        add_vocabulary(writer, spec)

    return write_model(path, shape, "F16", add_vocabulary=add_keys)


def test_xlm_roberta_has_positions_behind_the_padding(xlm_roberta: Path, tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    directory = write_directory(xlm_roberta, tmp_path / "hf")
    expected = prepare_source(xlm_roberta, folder)
    found = prepare_source(directory, folder, check_vocabulary=check_vocabulary)
    assert found.hyper == expected.hyper and found.hyper.context_length == SHAPES["bert"].context_length
    assert found.tensors == expected.tensors and written(folder, found) == written(folder, expected)
    assert (found.pooling, found.adds_eos) == ("mean", True)
    ours, theirs = found.tokenizer, expected.tokenizer
    assert (ours.charsmap, ours.scores, ours.merges_spaces) == (theirs.charsmap, theirs.scores, True)
    assert (ours.bos, ours.eos, ours.unknown) == (theirs.bos, theirs.eos, theirs.unknown)


def test_an_xlm_roberta_that_scores_pairs(tmp_path: Path) -> None:
    """Its head is in other tensors than that of BERT."""
    spec, folder = unigram_spec(True, True), folder_of(tmp_path)
    shape = SHAPES["reranker"]._replace(vocab_size=len(spec.tokens))
    source = write_model(tmp_path / "xlm.gguf", shape, "F16", add_vocabulary=partial(add_vocabulary, spec=spec))
    directory = write_directory(source, tmp_path / "hf")
    expected, found = prepare_source(source, folder), prepare_source(directory, folder)
    assert found.hyper.scores_pairs and found.hyper == expected.hyper and found.pooling == "rank"
    assert found.tensors == expected.tensors and written(folder, found) == written(folder, expected)


def test_heads_are_not_needed_and_prefixes_do_not_matter(tiny_gguf, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    directory, folder = write_directory(tiny_gguf("bert", "F16"), tmp_path / "hf"), folder_of(tmp_path)
    expected = prepare_source(directory, folder, check_vocabulary=check_vocabulary)
    tensors = {f"bert.{name}": value for name, value in stored_tensors(directory).items()}
    head = ("F16", np.ones((4, 128), np.float16))
    extra = {"cls.predictions.decoder.weight": head, "bert.pooler.dense.weight": head}
    ids = {"bert.embeddings.position_ids": ("I64", np.zeros((1, 4), np.int64))}
    (directory / "model.safetensors").unlink()
    write_safetensors(directory / "model.safetensors", tensors | extra | ids)
    change(directory / "config.json", architectures=["BertForMaskedLM"])
    found = prepare_source(directory, folder)
    assert found.tensors == expected.tensors and written(folder, found) == written(folder, expected)


@pytest.mark.parametrize(
    ("shape", "fields", "message"),
    [
        ("bert", {"position_embedding_type": "relative_key"}, "position_embedding_type is 'relative_key', expected"),
        ("bert", {"hidden_act": "relu"}, "hidden_act is 'relu', expected one of gelu"),
        ("nomic-bert", {"prenorm": True}, "prenorm is 'True', expected false"),
        ("nomic-bert", {"rotary_emb_fraction": 0.5}, "rotary_emb_fraction is '0.5', expected 1"),
        ("nomic-bert", {"architectures": ["NomicBertForPreTraining"]}, "expected one of Llama"),
    ],
)
def test_models_of_embeddings_that_cannot_be_expressed_are_refused(
    tiny_gguf, tmp_path: Path, shape: str, fields: dict[str, object], message: str
) -> None:  # type: ignore[no-untyped-def]
    directory = write_directory(tiny_gguf(shape, "F16"), tmp_path / "hf")
    change(directory / "config.json", **fields)
    assert message in refusal(directory)


def test_lengths_of_the_tokenizer_do_not_matter(tiny_gguf, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """Files of sentence-transformers fill every text to 128 tokens, and cut longer ones."""
    directory, folder = write_directory(tiny_gguf("bert", "F16"), tmp_path / "hf"), folder_of(tmp_path)
    expected = prepare_source(directory, folder, check_vocabulary=check_vocabulary).tokenizer
    fixed = {"strategy": {"Fixed": 128}, "direction": "Right", "pad_to_multiple_of": None}
    change(
        directory / "tokenizer.json",
        padding=fixed | {"pad_id": 0, "pad_type_id": 0, "pad_token": "[PAD]"},
        truncation={"max_length": 3, "strategy": "LongestFirst", "stride": 0},
    )
    assert prepare_source(directory, folder, check_vocabulary=check_vocabulary).tokenizer == expected


CLEANS = {"clean_text": True, "handle_chinese_chars": True, "strip_accents": None}


@pytest.mark.parametrize(
    ("normalizer", "message"),
    [
        ({"type": "BertNormalizer", **CLEANS, "lowercase": False}, "normalizer.lowercase is 'False', expected true"),
        ({"type": "Lowercase"}, "normalizer.type is 'Lowercase', expected 'BertNormalizer'"),
    ],
)
def test_wordpiece_with_capitals_is_refused(
    tiny_gguf, tmp_path: Path, normalizer: dict[str, object], message: str
) -> None:  # type: ignore[no-untyped-def]
    directory = write_directory(tiny_gguf("bert", "F16"), tmp_path / "hf")
    change(directory / "tokenizer.json", normalizer=normalizer)
    assert message in refusal(directory)


# ------------------------------------------------------------------ mixtures of experts


@pytest.fixture
def experts(tiny_gguf, tmp_path: Path) -> Path:  # type: ignore[no-untyped-def]
    return write_directory(tiny_gguf("qwen3moe", "F16"), tmp_path / "hf")


@pytest.mark.parametrize("shape", ["mixtral", "granitemoe", "qwen2moe"])
def test_quantized_experts_are_those_of_the_file(tiny_gguf, tmp_path: Path, shape: str) -> None:  # type: ignore[no-untyped-def]
    source = tiny_gguf(shape, "F16")
    folder = folder_of(tmp_path)
    found = prepare_source(write_directory(source, tmp_path / "hf", shards=4), folder, "q8_0")
    expected = prepare_source(source, folder, "q8_0")
    assert found.tensors == expected.tensors and written(folder, found) == written(folder, expected)


def test_a_router_of_another_type_becomes_f32(experts: Path) -> None:
    name = "model__layers__0__mlp__gate__weight"
    kind, values = stored_tensors(experts)[name.replace("__", ".")]
    assert kind == "F32"
    rounded, folder = values.astype(np.float16), folder_of(experts.parent)
    replace_weights(experts, **{name: ("F16", rounded)})
    found = prepare_source(experts, folder)
    replace_weights(experts, **{name: ("F32", rounded.astype(np.float32))})
    expected = prepare_source(experts, folder)
    assert found.tensors == expected.tensors and written(folder, found) == written(folder, expected)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"norm_topk_prob": False}, "norm_topk_prob is 'False', expected true"),
        ({"mlp_only_layers": [0]}, "mlp_only_layers is '[0]', expected none (experts in every layer)"),
        ({"decoder_sparse_step": 2}, "decoder_sparse_step is '2', expected 1"),
        ({"moe_intermediate_size": 96}, "'model.layers.0.mlp.experts.0.gate_proj.weight' (blk.0.ffn_gate_exps.weight)"),
        ({"num_experts_per_tok": None}, "num_experts_per_tok is missing"),
    ],
)
def test_mixtures_that_the_graph_cannot_express_are_refused(
    experts: Path, fields: dict[str, object], message: str
) -> None:
    change(experts / "config.json", **fields)
    assert message in refusal(experts)


def test_the_experts_of_a_layer_are_complete_and_alike(tiny_gguf, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    source = tiny_gguf("mixtral", "F16")
    directory = write_directory(source, tmp_path / "hf")
    name = "model__layers__1__block_sparse_moe__experts__3__w1__weight"
    good = stored_tensors(directory)[name.replace("__", ".")]
    replace_weights(directory, **{name: None})
    assert "that of expert 3 is missing" in refusal(directory)
    replace_weights(directory, **{name: ("F16", good[1][:-1])})
    assert "experts.3.w1.weight' is F16 [95, 64], expected that of" in refusal(directory)
    replace_weights(directory, **{name: good, name.replace("__3__", "__03__"): good})
    assert "is of an expert that has one" in refusal(directory)


# ------------------------------------------------------------------ weight types

MIX = {  # what --quant means: of matrices, of the head
    "f16": ("F16", "F16"),
    "q8_0": ("Q8_0", "Q8_0"),
    "q4_0": ("Q4_0", "Q8_0"),
    "q4_1": ("Q4_1", "Q8_0"),
}


def quantized_gguf(source: Path, path: Path, matrices: str, head: str) -> Path:
    """A copy of a GGUF whose matrices the `gguf` package has quantized."""
    reader = gguf.GGUFReader(source)
    names = {tensor.name for tensor in reader.tensors}
    head_name = "output.weight" if "output.weight" in names else "token_embd.weight"
    writer = gguf.GGUFWriter(path, "llama")
    for tensor in reader.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type).reshape(tensor.shape[::-1].tolist())
        if values.ndim < 2:
            writer.add_tensor(tensor.name, values)
        else:
            kind = gguf.GGMLQuantizationType[head if tensor.name == head_name else matrices]
            writer.add_tensor(tensor.name, gguf.quantize(values.astype(np.float32), kind), raw_dtype=kind)
    writer.add_name("replaced")
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", "general.name"):
            continue
        kinds = field.types
        writer.add_key_value(name, field.contents(), kinds[0], kinds[-1] if len(kinds) > 1 else None)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("quant", list(MIX))
@pytest.mark.parametrize("shape", ["odd", "small"])
def test_quantized_weights_are_those_of_the_gguf_package(tiny_gguf, tmp_path: Path, shape: str, quant: str) -> None:  # type: ignore[no-untyped-def]
    source = tiny_gguf(shape, "BF16" if shape == "odd" else "F32")
    folder = folder_of(tmp_path)
    directory = write_directory(source, tmp_path / "hf")
    expected = prepare_source(quantized_gguf(source, tmp_path / "q.gguf", *MIX[quant]), folder)
    found, from_gguf = prepare_source(directory, folder, quant), prepare_source(source, folder, quant)
    assert written(folder, found) == written(folder, from_gguf) == written(folder, expected)
    assert found.tensors == expected.tensors
    assert len({found.digest, from_gguf.digest, expected.digest}) == 3


@pytest.mark.parametrize(("shape", "usual", "finer"), [("super", "Q4_K", "Q6_K"), ("odd", "Q5_0", "Q8_0")])
def test_the_mix_of_q4_k_m(tiny_gguf, tmp_path: Path, shape: str, usual: str, finer: str) -> None:  # type: ignore[no-untyped-def]
    source = tiny_gguf(shape, "F16")
    index = prepare_source(write_directory(source, tmp_path / "hf"), folder_of(tmp_path), "q4_k_m")
    found = {tensor.name: tensor.format for tensor in index.tensors if tensor.layout == "groups"}
    last = f"blk.{SHAPES[shape].n_layers - 1}"
    better = {"output.weight", f"{last}.attn_v.weight", f"{last}.ffn_down.weight"}
    better |= {f"blk.2.{name}.weight" for name in ("attn_v", "ffn_down") if shape == "odd"}
    assert {name for name, kind in found.items() if kind == finer} == better
    assert {kind for name, kind in found.items() if name not in better} == {usual}


@pytest.mark.parametrize("dtype", ["F32", "BF16"])
def test_weights_keep_their_type(tiny_gguf, tmp_path: Path, dtype: str) -> None:  # type: ignore[no-untyped-def]
    directory = write_directory(tiny_gguf("odd", "F32"), tmp_path / "hf", dtype=dtype)
    index = prepare_source(directory, folder_of(tmp_path))
    assert {tensor.format for tensor in index.tensors if tensor.layout == "groups"} == {dtype}


def test_a_quantized_file_is_not_quantized_again(tiny_gguf, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    message = r"tensor 'token_embd.weight' is Q4_1, expected F32, F16 or BF16 for --quant; leave --quant out"
    with pytest.raises(ConfigError, match=message):
        prepare_source(tiny_gguf("small", "Q4_1"), folder_of(tmp_path), "q8_0")


# ------------------------------------------------------------------ refusals


@pytest.fixture
def llama(tiny_gguf, tmp_path: Path) -> Path:  # type: ignore[no-untyped-def]
    return write_directory(tiny_gguf("odd", "F16"), tmp_path / "hf")


def change(path: Path, **fields: object) -> None:
    """Replace fields of a JSON file; None removes one."""
    values = json.loads(path.read_text()) | fields
    path.write_text(json.dumps({key: value for key, value in values.items() if value is not None}))


def refusal(directory: Path, quant: str = "") -> str:
    folder = directory.parent / "models"
    folder.mkdir(exist_ok=True)
    with pytest.raises(ConfigError) as caught:
        prepare_source(directory, folder, quant)
    assert not list(folder.glob("*.bin")) and not list(folder.glob("*.idx"))
    return caught.value.message


def stored_tensors(directory: Path) -> dict[str, tuple[str, np.ndarray]]:
    """The weights of a directory of one file."""
    kinds = {"F16": "<f2", "F32": "<f4", "BF16": "<u2"}
    return {
        name: (
            stored.dtype,
            np.ascontiguousarray(stored.data).reshape(-1).view(kinds[stored.dtype]).reshape(stored.shape),
        )
        for name, stored in SafetensorsFile(directory / "model.safetensors").tensors.items()
    }


def replace_weights(directory: Path, **changes: tuple[str, np.ndarray] | None) -> None:
    """Write the weights again with some tensors changed or (None) left out; `__` stands for a dot."""
    tensors = stored_tensors(directory)
    for name, value in changes.items():
        tensors.pop(name.replace("__", "."), None)
        if value is not None:
            tensors[name.replace("__", ".")] = value
    path = directory / "model.safetensors"
    path.unlink()  # the map of the old file stays as it is
    write_safetensors(path, tensors)


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
