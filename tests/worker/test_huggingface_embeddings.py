"""Hugging Face directories of embeddings: pooling, modules, the end of a text and the direction of attention."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.errors import ConfigError
from pipeline.models.model_directory import MODULES, POOLING
from shm.checkpoint import Index
from stages.worker.checkpoint.directory_conversion import DirectoryConversion
from stages.worker.checkpoint.one_pass import revision_of
from stages.worker.checkpoint.prepare_source import prepare_source
from stages.worker.huggingface.source import HuggingFaceSource
from tests.worker.conftest import TinyGguf
from tests.worker.huggingface_files import change, folder_of, refusal
from tools.tiny_hf import write_directory

FLAGS = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken")
WIDTH = {"embedding_dimension": 128}


def legacy(*names: str) -> dict[str, object]:
    """A file that was written before it had `pooling_mode`."""
    return {"word_embedding_dimension": 128} | {f"pooling_mode_{name}": name in names for name in FLAGS}


@pytest.fixture
def bert(tiny_gguf: TinyGguf, tmp_path: Path) -> Path:
    return write_directory(tiny_gguf("bert", "F16"), tmp_path / "hf")


def write_modules(directory: Path, *kinds: str) -> None:
    """`modules.json` as sentence-transformers write it, of classes with their packages."""
    entries = []
    for i, kind in enumerate(kinds):
        name = kind.rpartition(".")[2]
        entries.append({"idx": i, "name": str(i), "path": f"{i}_{name}" if i else "", "type": kind})
    (directory / MODULES).write_text(json.dumps(entries))


# ------------------------------------------------------------------ pooling


@pytest.mark.parametrize(
    ("fields", "number", "revision"),
    [
        (WIDTH | {"pooling_mode": "mean", "include_prompt": True}, 1, 4),
        (WIDTH | {"pooling_mode": ["cls"]}, 2, 4),
        (WIDTH | {"pooling_mode": "lasttoken", "include_prompt": False}, 3, 4),
        (WIDTH | {"pooling_mode": "cls", "pooling_mode_mean_tokens": True}, 2, 4),
        (legacy(), 1, 4),
        (legacy("mean_tokens"), 1, 1),
        (legacy("cls_token"), 2, 1),
        (legacy("lasttoken") | {"include_prompt": True}, 3, 1),
    ],
)
def test_the_pooling_of_sentence_transformers(
    bert: Path, fields: dict[str, object], number: int, revision: int
) -> None:
    """Digests stay where older releases found the same."""
    (bert / POOLING).write_text(json.dumps(fields))
    source = HuggingFaceSource(bert)
    assert (source.metadata["bert.pooling_type"], revision_of(source)) == (number, revision)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"pooling_mode": "max"}, "config.json: pooling_mode is 'max', expected one of mean, cls, lasttoken"),
        ({"pooling_mode": ["mean", "cls"]}, "pooling_mode is \"['mean', 'cls']\", expected one of mean"),
        ({"pooling_mode": [["mean"]]}, "pooling_mode is \"[['mean']]\", expected one of mean"),
        (legacy("max_tokens"), "pooling_mode_max_tokens is 'True', expected false"),
        (legacy("weightedmean_tokens"), "pooling_mode_weightedmean_tokens is 'True', expected false"),
        (legacy("mean_tokens", "mean_sqrt_len_tokens"), "pooling_mode_mean_sqrt_len_tokens is 'True', expected false"),
        (legacy("mean_tokens", "cls_token"), "_cls_token is 'True', expected false beside pooling_mode_mean_tokens"),
        (legacy("cls_token") | {"include_prompt": False}, "include_prompt is 'False', expected true, or the mode"),
    ],
)
def test_a_pooling_that_the_engine_has_not_is_refused(bert: Path, fields: dict[str, object], message: str) -> None:
    (bert / POOLING).write_text(json.dumps(fields))
    assert message in refusal(bert)


# ------------------------------------------------------------------ modules

OLD, NEW = "sentence_transformers.models.", "sentence_transformers.sentence_transformer.modules."


@pytest.mark.parametrize(
    "kinds",
    [
        [f"{OLD}Transformer", f"{OLD}Pooling"],
        ["sentence_transformers.base.modules.transformer.Transformer", f"{NEW}pooling.Pooling", f"{NEW}Normalize"],
    ],
)
def test_modules_of_the_engine_change_nothing(bert: Path, kinds: list[str]) -> None:
    folder = folder_of(bert.parent)
    before = prepare_source(bert, folder)
    write_modules(bert, *kinds)
    assert prepare_source(bert, folder).digest == before.digest


@pytest.mark.parametrize(
    ("kinds", "message"),
    [
        (
            [f"{OLD}Transformer", f"{OLD}Pooling", f"{OLD}Dense", f"{OLD}Normalize"],
            f"modules.json: [2].type is '{OLD}Dense', expected Transformer, Pooling or Normalize of sentence_transf",
        ),
        (["own_code.Transformer", f"{OLD}Pooling"], "[0].type is 'own_code.Transformer', expected Transformer"),
        ([f"{OLD}Transformer", f"{OLD}SpladePooling"], f"[1].type is '{OLD}SpladePooling', expected Transformer"),
        ([f"{OLD}Pooling"], "[0].path is '', expected '1_Pooling'"),
    ],
)
def test_modules_that_the_engine_has_not_are_refused(bert: Path, kinds: list[str], message: str) -> None:
    write_modules(bert, *kinds)
    assert message in refusal(bert)
    with pytest.raises(ConfigError) as caught:  # before weights are fetched
        DirectoryConversion(bert.parent).check(bert)
    assert message in caught.value.message


def test_modules_without_a_pooling_make_no_embedding(bert: Path) -> None:
    write_modules(bert, f"{OLD}Transformer", "sentence_transformers.cross_encoder.modules.Other")
    assert HuggingFaceSource(bert).metadata["bert.pooling_type"] == 1


def test_the_file_of_a_listed_pooling_is_needed(bert: Path) -> None:
    write_modules(bert, f"{OLD}Transformer", f"{OLD}Pooling")
    (bert / POOLING).unlink()
    assert "1_Pooling/config.json is missing, and modules.json lists it; fetch it" in refusal(bert)
    (bert / MODULES).write_text("{}")
    assert "modules.json is not a JSON list of objects" in refusal(bert)


# ------------------------------------------------------------------ the end of a text


def template(*ends: tuple[str, int]) -> dict[str, Any]:
    """A post-processor that appends tokens to a text."""
    text = [{"Sequence": {"id": "A", "type_id": 0}}, *({"SpecialToken": {"id": t, "type_id": 0}} for t, _ in ends)]
    tokens = {name: {"id": name, "ids": [i], "tokens": [name]} for name, i in ends}
    return {"type": "TemplateProcessing", "single": text, "pair": text, "special_tokens": tokens}


@pytest.fixture
def qwen3(tiny_gguf: TinyGguf, tmp_path: Path) -> Path:
    """Its tokens 0, 1 and 2 are `<|endoftext|>`, `<|im_start|>` and `<|im_end|>`, the EOS."""
    return write_directory(tiny_gguf("qwen3", "F16"), tmp_path / "hf")


def ends_of(directory: Path) -> tuple[int, int, bool, int]:
    """(EOS, EOT, whether texts that are embedded end with the EOS, revision) of a directory's checkpoint."""
    index: Index = prepare_source(directory, folder_of(directory.parent))
    data = index.tokenizer
    return data.eos, data.eot, index.adds_eos, revision_of(HuggingFaceSource(directory))


def test_a_text_ends_with_the_token_that_its_tokenizer_appends(qwen3: Path) -> None:
    """The former end remains one of answers."""
    assert ends_of(qwen3) == (2, -1, False, 1)
    change(qwen3 / "tokenizer.json", post_processor=template(("<|endoftext|>", 0)))
    assert ends_of(qwen3) == (0, 2, True, 4)
    (qwen3 / "generation_config.json").write_text('{"eos_token_id": [2, 0]}')
    assert ends_of(qwen3) == (0, 2, True, 4)
    change(qwen3 / "tokenizer.json", post_processor=template(("<|im_end|>", 2)))
    assert ends_of(qwen3) == (2, 0, True, 4)


def test_what_tokenizer_config_says_of_the_end_counts(qwen3: Path) -> None:
    change(qwen3 / "tokenizer.json", post_processor=template(("<|endoftext|>", 0)))
    change(qwen3 / "tokenizer_config.json", add_eos_token=False)
    assert ends_of(qwen3) == (2, -1, False, 1)
    change(qwen3 / "tokenizer_config.json", add_eos_token=True)
    assert ends_of(qwen3) == (0, 2, True, 4)
    change(qwen3 / "tokenizer.json", post_processor=template(("<|im_end|>", 2)))
    assert ends_of(qwen3) == (2, -1, True, 1)


# ------------------------------------------------------------------ the direction of attention


@pytest.mark.parametrize("shape", ["qwen3", "small", "gpt2"])
def test_a_decoder_whose_positions_attend_to_all_others(tiny_gguf: TinyGguf, tmp_path: Path, shape: str) -> None:
    directory, folder = write_directory(tiny_gguf(shape, "F16"), tmp_path / "hf"), folder_of(tmp_path)
    assert prepare_source(directory, folder).hyper.is_causal
    change(directory / "config.json", is_causal=True)
    assert revision_of(HuggingFaceSource(directory)) == 1
    change(directory / "config.json", is_causal=False)
    assert not prepare_source(directory, folder).hyper.is_causal
    assert revision_of(HuggingFaceSource(directory)) == 4


# ------------------------------------------------------------------ bounds


@pytest.mark.parametrize("n", [0, -1, (1 << 20) + 1])
def test_the_number_of_ids_is_bounded_before_weights_are_fetched(qwen3: Path, n: int) -> None:
    change(qwen3 / "config.json", vocab_size=n)
    with pytest.raises(ConfigError, match=f"embedding's rows, is {n:,}, expected 1 to 1,048,576; this model cannot"):
        DirectoryConversion(qwen3.parent).check(qwen3)
