"""Templates for files without one: by family, named in the log; a configured one comes before both."""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec
import pytest

from pipeline.models.vocabulary_tables import make_tables
from shm import checkpoint
from stages.tokenizer.fallback_templates import _BY_TOKENS, fallback_template
from stages.tokenizer.opened_models import ModelSource, build_model
from tests.tokenizer.trained import byte_level_spec, sentencepiece_spec

MESSAGES = [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}]
# What the families' own templates make of a system message and a question.
PROMPTS = {
    "llama-3": (
        "<s><|start_header_id|>system<|end_header_id|>\n\nS<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nU"
        "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
    ),
    "chatml": "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\n",
    "gemma": "<s><start_of_turn>user\nS\n\nU<end_of_turn>\n<start_of_turn>model\n",
    "phi-3": "<|system|>\nS<|end|>\n<|user|>\nU<|end|>\n<|assistant|>\n",
    "granite": (
        "<|start_of_role|>system<|end_of_role|>S<|end_of_text|>\n<|start_of_role|>user<|end_of_role|>U<|end_of_text|>\n"
        "<|start_of_role|>assistant<|end_of_role|>"
    ),
    "command-r": (
        "<s><|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>S<|END_OF_TURN_TOKEN|><|START_OF_TURN_TOKEN|><|USER_TOKEN|>U"
        "<|END_OF_TURN_TOKEN|><|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>"
    ),
    "mistral": "<s>[INST] S\n\nU [/INST]",
    "llama-2": "<s>[INST] <<SYS>>\nS\n<</SYS>>\n\nU [/INST]",
}
TOKENS = {family.name: family.tokens for family in _BY_TOKENS} | {"llama-2": ()}


def tokenizer_data(name: str) -> checkpoint.TokenizerData:
    """A vocabulary without other families' tokens, and with those of one as control tokens."""
    spec = sentencepiece_spec() if name == "llama-2" else byte_level_spec()
    tokens = [token.replace("<|im_", "<extra_").replace("[INST]", "[extra]") for token in spec.tokens]
    data = (spec.model, spec.pre, [*tokens, *TOKENS[name]], [*spec.types, *[3] * len(TOKENS[name])], list(spec.merges))
    scores = [*spec.scores, *[0.0] * len(TOKENS[name])] if spec.scores else []
    special = (1 if name == "llama-2" else 0, 2 if name == "llama-2" else 1, -1, 0, -1)
    return checkpoint.TokenizerData(*data, scores, *special, False, False, "", 1)


def write_index(
    path: Path, architecture: str, data: checkpoint.TokenizerData, *tensors: checkpoint.Tensor
) -> ModelSource:
    hyper = checkpoint.Hyper(2, 64, 2, 2, 32, 64, 128, 4096, 1e-5, 32, "halves", "silu")
    raw = msgspec.Raw(data.packed())
    nbytes = sum(tensor.nbytes for tensor in tensors)
    args = (checkpoint.VERSION, "ab" * 32, architecture, "m", 1, 68, nbytes, hyper, raw, [*tensors])
    index = checkpoint.Index(*args, pieces=[0] * bool(tensors))
    checkpoint.write_index(path, index, make_tables(data))
    return ModelSource(path)


@pytest.mark.parametrize("name", PROMPTS)
def test_a_family_has_its_template_and_the_log_names_it(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = write_index(tmp_path / "m.idx", "llama", tokenizer_data(name))
    with caplog.at_level(logging.WARNING, "starling.tokenizer"):
        template = build_model(source).template
    assert template is not None
    assert template.render(MESSAGES).text == PROMPTS[name]
    (record,) = (record for record in caplog.records if "no chat template" in record.message)
    assert (record.__dict__["architecture"], record.__dict__["template"]) == ("llama", name)


def test_a_model_is_described_with_the_format_of_most_of_its_weights(tmp_path: Path) -> None:
    tensors = [
        checkpoint.Tensor("a", 1, 256, "F32", "rows", 0, 1024, ""),
        checkpoint.Tensor("b", 32, 64, "Q4_1", "groups", 1024, 1280, ""),
        checkpoint.Tensor("c", 1, 256, "F32", "rows", 2304, 128, ""),
    ]
    source = write_index(tmp_path / "m.idx", "llama", tokenizer_data("chatml"), *tensors)
    assert build_model(source).described.quantization == "Q4_1"


def test_a_configured_template_comes_first(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    data = msgspec.structs.replace(tokenizer_data("chatml"), chat_template="file's")
    source = write_index(tmp_path / "m.idx", "llama", data)
    (tmp_path / "own.jinja").write_text("own's")
    for settings, expected in (("", "file's"), ("{{ 'given' }}", "given"), (str(tmp_path / "own.jinja"), "own's")):
        template = build_model(source._replace(chat_template=settings)).template
        assert template is not None and template.render(MESSAGES).text == expected
    assert not caplog.records


def test_an_unknown_family_has_none(tmp_path: Path) -> None:
    data = tokenizer_data("llama-2")
    assert fallback_template("llama", data) and not fallback_template("olmo2", data)
    assert build_model(write_index(tmp_path / "m.idx", "olmo2", data)).template is None
