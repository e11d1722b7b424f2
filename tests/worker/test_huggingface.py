"""A Hugging Face directory gives the checkpoint that a GGUF file with the same weights gives."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import gguf
import msgspec
import numpy as np
import pytest

from pipeline.errors import ConfigError
from stages.worker.checkpoint.prepare_source import prepare_source
from starling.vocabulary_check import check_vocabulary
from tests.tokenizer.trained import unigram_spec
from tests.worker.huggingface_files import change, folder_of, refusal, replace_weights, stored_tensors, written
from tools.tiny_gguf import LARGE, SHAPES, write_model
from tools.tiny_hf import CLASSES, write_directory, write_safetensors
from tools.vocabulary_gguf import add_vocabulary

FAMILIES = [name for name in SHAPES if name not in (*LARGE, "partial")]  # no class of llama rotates part of a head


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


def test_norms_of_the_first_bert_models_have_other_names(tiny_gguf, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    directory, folder = write_directory(tiny_gguf("bert", "F16"), tmp_path / "hf"), folder_of(tmp_path)
    expected = prepare_source(directory, folder)
    tensors = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): value
        for name, value in stored_tensors(directory).items()
    }
    assert "embeddings.LayerNorm.gamma" in tensors and "encoder.layer.0.output.LayerNorm.beta" in tensors
    (directory / "model.safetensors").unlink()
    write_safetensors(directory / "model.safetensors", tensors)
    found = prepare_source(directory, folder)
    assert found.tensors == expected.tensors and written(folder, found) == written(folder, expected)


@pytest.mark.parametrize(
    ("shape", "fields", "message"),
    [
        ("bert", {"is_causal": True}, "is_causal is 'True', expected false"),
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
