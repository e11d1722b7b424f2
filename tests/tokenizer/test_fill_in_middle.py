"""Fill in the middle: the model's tokens by metadata or by name, the prompt, and models that have none."""

from __future__ import annotations

from array import array
from pathlib import Path

import gguf
import pytest

from pipeline.config.schema import ModelConfig
from pipeline.protocol import messages as m
from stages.tokenizer.fill_in_middle import FillInMiddle
from stages.tokenizer.opened_models import ModelSource, build_model
from stages.tokenizer.vocabulary import TokenizerSpec, Vocabulary
from stages.worker.checkpoint.prepare import prepare_checkpoint
from tests.tokenizer.byte_vocabulary import byte_spec
from tests.tokenizer.test_service import service
from tests.tokenizer.trained import byte_level_spec
from tools.tiny_gguf import SHAPES, write_model
from tools.vocabulary_gguf import add_vocabulary

QWEN = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>", "<|file_sep|>"]
STARCODER = ["<fim_middle>", "<fim_prefix>", "<fim_suffix>", "<fim_pad>"]
DEEPSEEK = ["<｜fim▁hole｜>", "<｜fim▁begin｜>", "<｜fim▁end｜>"]


def spec_with(names: list[str], kind: int = 3, **changes: object) -> TokenizerSpec:
    spec = byte_spec()
    return spec._replace(tokens=[*spec.tokens, *names], types=[*spec.types, *[kind] * len(names)], **changes)


N = len(byte_spec().tokens)


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (QWEN, FillInMiddle(N, N + 1, N + 2, (N + 3, N + 4))),
        (STARCODER, FillInMiddle(N + 1, N + 2, N, (N + 3,))),
        (DEEPSEEK, FillInMiddle(N + 1, N, N + 2)),
        (QWEN[:2], None),
        (["<tool_call>"], None),
    ],
    ids=["qwen", "starcoder", "deepseek", "without a middle", "another"],
)
@pytest.mark.parametrize("kind", [3, 4], ids=["control", "user-defined"])
def test_the_families_are_known_by_their_tokens(names: list[str], expected: FillInMiddle | None, kind: int) -> None:
    assert Vocabulary(spec_with(names, kind)).fill_in_middle == expected


def test_ordinary_tokens_of_these_names_do_not_count() -> None:
    assert Vocabulary(spec_with(QWEN, 1)).fill_in_middle is None


def test_the_metadata_comes_first() -> None:
    spec = spec_with(QWEN, fim=(N + 4, N + 3, N + 1), fim_ends=(N, N, -1))
    assert Vocabulary(spec).fill_in_middle == FillInMiddle(N + 4, N + 3, N + 1, (N,))
    assert (
        Vocabulary(spec_with(QWEN, fim=(N, N + 1, 10**6))).fill_in_middle == Vocabulary(spec_with(QWEN)).fill_in_middle
    )


def reply(vocabulary: Vocabulary, text: str, suffix: str, **fields: object) -> m.Frame | None:
    return service(vocabulary).reply(m.Encode("1", "m", text, suffix=suffix, **fields))  # type: ignore[arg-type]


def test_the_prompt_has_both_texts_between_the_tokens() -> None:
    vocabulary = Vocabulary(spec_with(QWEN, add_bos=True))
    before, after = (vocabulary.encode(text, False) for text in ("hello <|fim_middle|>", " end<s>"))
    expected = [0, N, *before, N + 1, *after, N + 2]
    assert reply(vocabulary, "hello <|fim_middle|>", " end<s>") == m.Encoded("1", tuple(expected))
    without = reply(vocabulary, "hello <|fim_middle|>", " end<s>", add_bos=False)
    assert without == m.Encoded("1", tuple(expected[1:]))
    assert reply(vocabulary, "", "x") == m.Encoded("1", (0, N, N + 1, *vocabulary.encode("x", False), N + 2))
    limited = reply(vocabulary, "abc", "abc", token_limit=9)
    assert limited == m.Encoded("1", (), too_many=10, is_exact=True)
    assert reply(vocabulary, "abc" * 4, "abc", token_limit=9) == m.Encoded("1", (), too_many=12, is_exact=False)
    assert isinstance(reply(vocabulary, "abc", "abc", token_limit=10), m.Encoded)


def test_a_model_without_the_tokens_refuses_by_name() -> None:
    failed = reply(Vocabulary(byte_spec()), "a", "b")
    assert isinstance(failed, m.TokenizerFailed)
    assert (failed.code, failed.param) == ("INVALID_REQUEST", "suffix")
    assert "'m' has no tokens" in failed.message


def test_the_bos_token_is_not_needed() -> None:
    assert FillInMiddle(1, 2, 3).prompt(array("i", [7]), array("i", [8, 9]), -1) == array("i", [1, 7, 2, 8, 9, 3])


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (("fim_pre", "fim_suf", "fim_mid", "fim_pad"), FillInMiddle(7, 8, 9, (10,))),
        (("prefix", "suffix", "middle", "fim_sep"), FillInMiddle(7, 8, 9, (10,))),
        (("fim_pre", "fim_suf"), None),
    ],
)
def test_a_files_metadata_reaches_the_tokenizer(
    names: tuple[str, ...], expected: FillInMiddle | None, tmp_path: Path
) -> None:
    def vocabulary(writer: gguf.GGUFWriter) -> None:
        add_vocabulary(writer, byte_level_spec())
        for i, name in enumerate(names):
            writer.add_uint32(f"tokenizer.ggml.{name}_token_id", 7 + i)

    path = write_model(tmp_path / "m.gguf", SHAPES["small"]._replace(vocab_size=1500), add_vocabulary=vocabulary)
    configured = ModelConfig(name="m", path=str(path))
    model = build_model(ModelSource.of(prepare_checkpoint(configured, tmp_path / "models"), configured))
    assert model.vocabulary.fill_in_middle == expected
    assert model.described.fim_ends == (expected.ends if expected is not None else ())
