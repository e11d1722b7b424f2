"""Marks of reasoning and the variables that switch it, by chat template and by configuration."""

from __future__ import annotations

from pathlib import Path

import gguf
import msgspec
import pytest

from pipeline.config.schema import ModelConfig
from stages.tokenizer.opened_models import ModelSource, build_model
from stages.tokenizer.template import ChatTemplate
from stages.worker.checkpoint.prepare import prepare_checkpoint
from tests.tokenizer.chat_templates import CHATML, CHATML_TOOLS
from tests.tokenizer.trained import byte_level_spec
from tools.tiny_gguf import SHAPES, write_model
from tools.vocabulary_gguf import add_vocabulary

THINK = ("<think>", "</think>")
QWEN3 = (
    CHATML_TOOLS + "{%- if enable_thinking is defined and enable_thinking is false %}"
    "{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}"
)
DEEPSEEK = (
    "{% if not thinking is defined %}{% set thinking = false %}{% endif %}{{ messages[-1].content }}"
    "{% if thinking %}{{ '<think>' }}{% else %}{{ '</think>' }}{% endif %}"
)
GPT = "{% if reasoning_effort is not defined %}{% set reasoning_effort = 'medium' %}{% endif %}{{ reasoning_effort }}"
GRANITE = ("Here is my thought process:", "Here is my response:")
OWN = "{% set thinking = messages[0].thinking %}{{ thinking }}{{ messages[0].enable_thinking }}[/THINK]"


@pytest.mark.parametrize(
    ("source", "marks", "switches"),
    [
        (CHATML, (), ()),
        (CHATML_TOOLS, THINK, ()),
        (QWEN3, THINK, ("enable_thinking",)),
        (DEEPSEEK, THINK, ("thinking",)),
        (GPT, (), ("reasoning_effort",)),
        (OWN, ("[THINK]", "[/THINK]"), ()),
        ("{% if enable_thinking %}x{% endif %}{{ reasoning_effort }}", (), ("enable_thinking", "reasoning_effort")),
        (f"{GRANITE[0]} a {GRANITE[1]} b", GRANITE, ()),
    ],
)
def test_marks_and_switches(source: str, marks: tuple[str, ...], switches: tuple[str, ...]) -> None:
    template = ChatTemplate(source)
    assert (template.reasoning, template.thinking_switches) == (marks, switches)


@pytest.mark.parametrize(
    ("configured", "expected"), [("auto", THINK), ("none", ()), ("<r> </r>", ("<r>", "</r>")), (None, THINK)]
)
def test_the_configuration_comes_first(configured: str | None, expected: tuple[str, ...], tmp_path: Path) -> None:
    def vocabulary(writer: gguf.GGUFWriter) -> None:
        add_vocabulary(writer, byte_level_spec())
        writer.add_chat_template(QWEN3)

    shape = SHAPES["small"]._replace(vocab_size=1500)
    path = write_model(tmp_path / "m.gguf", shape, add_vocabulary=vocabulary)
    more = {} if configured is None else {"reasoning": configured}
    model = ModelConfig(name="m", path=str(path), **more)
    described = build_model(ModelSource.of(prepare_checkpoint(model, tmp_path / "models"), model)).described
    assert (described.reasoning, described.thinking_switches) == (expected, ("enable_thinking",))


@pytest.mark.parametrize("value", ["", "<think>", "a b c", "on", "a  b"])
def test_a_configured_value_is_two_marks(value: str) -> None:
    with pytest.raises(msgspec.ValidationError, match="reasoning"):
        msgspec.convert({"name": "m", "reasoning": value}, ModelConfig)
