"""Vocabularies of Hugging Face directories: ids are those of the `tokenizers` library, by all of their files."""

from __future__ import annotations

import base64
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from pipeline.errors import ConfigError
from stages.tokenizer.vocabulary import TokenizerSpec, Vocabulary
from stages.worker.checkpoint.prepare_source import prepare_source
from stages.worker.huggingface import sentencepiece_model
from stages.worker.huggingface.config import CheckpointDirectoryError, Config
from stages.worker.huggingface.pretokenizer_match import find_pretokenizer
from stages.worker.huggingface.vocabulary import read_vocabulary
from starling.vocabulary_check import check_vocabulary
from tests.tokenizer.trained import unigram_spec
from tools.tiny_hf import write_directory

BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
ENDS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + ENDS
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
WORDS = rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*%s"
CASELESS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
SYMBOLS = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def chain(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "pretokenizers": list(parts)}


DIGITS = {"type": "Digits", "individual_digits": True}
# As the published files describe them.
PUBLISHED = {
    "gpt-2": BYTE_LEVEL | {"use_regex": True},
    "smollm": chain(DIGITS, BYTE_LEVEL | {"use_regex": True}),
    "llama-bpe": chain(split(LLAMA3), BYTE_LEVEL),
    "qwen2": chain(split(LLAMA3.replace("{1,3}", "")), BYTE_LEVEL),
    "tekken": chain(split(WORDS % ("", "") + r"|\p{N}" + SYMBOLS), BYTE_LEVEL),
    "gpt-4o": chain(split(WORDS % (CASELESS, CASELESS) + r"|\p{N}{1,3}" + SYMBOLS), BYTE_LEVEL),
}


def load(pre: dict[str, Any] | None, **model: Any) -> Tokenizer:
    file = {"version": "1.0", "added_tokens": [], "pre_tokenizer": pre, "decoder": BYTE_LEVEL}
    return Tokenizer.from_str(json.dumps(file | {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []} | model}))


@pytest.mark.parametrize("name", list(PUBLISHED))
def test_published_pretokenizers_are_found(name: str) -> None:
    whole_pieces = name in ("llama-bpe", "tekken")
    assert find_pretokenizer(Path("t"), load(PUBLISHED[name]), whole_pieces) == name


@pytest.mark.parametrize("pre", [None, {"type": "Whitespace"}, BYTE_LEVEL, chain(split(r"\w+"), BYTE_LEVEL)])
def test_an_unknown_pretokenizer_is_refused(pre: dict[str, Any] | None) -> None:
    with pytest.raises(CheckpointDirectoryError, match="as none of the known ones does; if you know"):
        find_pretokenizer(Path("t"), load(pre), False)


# ------------------------------------------------------------------ SentencePiece

WORDS_TEXT = "the then other in is it we he her there thin hint a b c d e f g h i n o r s t w"


def sentencepiece_vocabulary() -> tuple[list[str], list[tuple[str, str]]]:
    """Tokens, and merges in the order of `transformers`: every pair that makes a token, best token first."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    letters = ["▁", *sorted(set(WORDS_TEXT.replace(" ", "")))]
    merged = ["▁t", "he", "▁the", "in", "er", "th", "▁i", "re", "▁a", "hin", "thin", "there", "▁there", "▁th", "▁▁"]
    merged += ["is", "▁b", "▁w", "▁he", "▁in"]
    known = {*tokens, *letters, *merged}
    merges = [
        (one[:at], one[at:]) for one in merged for at in range(1, len(one)) if one[:at] in known and one[at:] in known
    ]
    return [*tokens, *merged, *letters], merges


def tokenizer_json(prefix: bool) -> dict[str, Any]:
    tokens, merges = sentencepiece_vocabulary()
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    normalizers = [{"type": "Prepend", "prepend": "▁"}, replace] if prefix else [replace]
    special = {"special": True, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {
        "version": "1.0",
        "added_tokens": [{"id": i, "content": tokens[i], **special} for i in range(3)],
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "decoder": {"type": "ByteFallback"},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
        },
        "model": {
            "type": "BPE",
            "unk_token": "<unk>",
            "fuse_unk": True,
            "byte_fallback": True,
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": [" ".join(pair) for pair in merges],
        },
    }


def vocabulary_of(keys: dict[str, Any]) -> Vocabulary:
    def get(key: str, default: Any = -1) -> Any:
        return keys.get(f"tokenizer.ggml.{key}", default)

    return Vocabulary(
        TokenizerSpec(
            get("model"),
            get("pre", ""),
            get("tokens"),
            get("token_type").tolist(),
            get("merges", []),
            get("bos_token_id"),
            get("eos_token_id"),
            scores=get("scores", None).tolist(),
            unknown=get("unknown_token_id"),
            add_bos=get("add_bos_token", None),
            add_space_prefix=get("add_space_prefix", None),
            charsmap=get("precompiled_charsmap", np.zeros(0, np.uint8)).tobytes(),
            merges_spaces=get("remove_extra_whitespaces", None),
        )
    )


@pytest.fixture(scope="module", params=[True, False])
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Vocabulary]:
    """The library's tokenizer and ours, with and without a space before a text."""
    directory = tmp_path_factory.mktemp("sentencepiece")
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer_json(request.param)))
    (directory / "tokenizer_config.json").write_text('{"bos_token": "<s>", "eos_token": {"content": "</s>"}}')
    n = len(sentencepiece_vocabulary()[0])
    keys = read_vocabulary(directory, Config(directory / "config.json", {}), n + 5)
    assert keys["tokenizer.ggml.add_space_prefix"] == request.param
    assert keys["tokenizer.ggml.add_bos_token"] and keys["tokenizer.ggml.bos_token_id"] == 1
    assert keys["tokenizer.ggml.eos_token_id"] == 2 and keys["tokenizer.ggml.unknown_token_id"] == 0
    assert keys["tokenizer.ggml.tokens"][-1] == f"[PAD{n + 4}]"
    return Tokenizer.from_file(str(directory / "tokenizer.json")), vocabulary_of(keys)


@settings(deadline=None, max_examples=150)
@given(text=st.text(alphabet="thernisabw  é你\n😀", min_size=1, max_size=40))
def test_sentencepiece_ids_are_the_librarys(both: tuple[Tokenizer, Vocabulary], text: str) -> None:
    theirs, ours = both
    assert ours.encode(text, parse_special=False) == theirs.encode(text, add_special_tokens=False).ids
    assert ours.encode(text, parse_special=False, add_bos=True) == theirs.encode(text).ids


def field(number: int, value: bytes | int | float) -> bytes:
    """A field of a protocol buffer."""
    if isinstance(value, bytes):
        return varint(number << 3 | 2) + varint(len(value)) + value
    if isinstance(value, float):
        return varint(number << 3 | 5) + struct.pack("<f", value)
    return varint(number << 3) + varint(value)


def varint(value: int) -> bytes:
    out = b""
    while value > 127:
        out, value = out + bytes([value & 127 | 128]), value >> 7
    return out + bytes([value])


def sentencepiece_file(model_type: int = 2, prefix: bool = True) -> bytes:
    tokens, _ = sentencepiece_vocabulary()
    kinds = {"<unk>": 2, "<s>": 3, "</s>": 3}
    pieces = b""
    for i, token in enumerate(tokens):
        kind = 6 if token.startswith("<0x") else kinds.get(token, 1)
        pieces += field(1, field(1, token.encode()) + field(2, float(-i)) + field(3, kind))
    return pieces + field(2, field(3, model_type)) + field(3, field(1, b"identity") + field(3, int(prefix)))


def test_a_sentencepiece_file_gives_the_same_ids(tmp_path: Path, both: tuple[Tokenizer, Vocabulary]) -> None:
    theirs, ours = both
    prefix = ours.encode("a", parse_special=False) == [ours.encode("▁a", parse_special=False)[-1]]
    assert theirs.encode("a", add_special_tokens=False).ids == ours.encode("a", parse_special=False)
    for adds_space in (True, False):
        (tmp_path / "tokenizer.model").write_bytes(sentencepiece_file(prefix=adds_space))
        keys = read_vocabulary(tmp_path, Config(tmp_path / "config.json", {"bos_token_id": 1, "eos_token_id": 2}), 400)
        found = vocabulary_of(keys)
        if adds_space == prefix:
            for text in ("the other there", "he is in  there", "é thin 你"):
                assert found.encode(text, parse_special=False) == ours.encode(text, parse_special=False)
        assert keys["tokenizer.ggml.add_space_prefix"] == adds_space
        assert (found.bos, found.eos) == (1, 2)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (sentencepiece_file(model_type=3), r"model_type is 3, expected 1 \(unigram\) or 2 \(BPE\)"),
        (sentencepiece_file()[:-3], "truncated"),
        (b"\x0b", "wire type 3"),
        (b"", "it has no pieces"),
        (sentencepiece_file(1) + field(2, field(35, 1)), "byte_fallback is 1, expected 0 in a unigram model"),
        (sentencepiece_file(1) + field(3, field(2, 1)), "precompiled_charsmap is not bytes"),
        (field(2, field(3, 2)), "it has no pieces"),
        (field(1, field(1, b"a") + field(3, 9)), "piece 'a' is of type 9, expected 1 to 6"),
    ],
)
def test_files_that_are_no_sentencepiece_models(data: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sentencepiece_model.parse(data)


# ------------------------------------------------------------------ unigram


def unigram_json() -> dict[str, Any]:
    """As the files of XLM-RoBERTa: spaces are merged, texts are between <s> and </s>."""
    spec = unigram_spec()
    special = {"special": True, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    space = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
    around = [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    return {
        "version": "1.0",
        "added_tokens": [{"id": i, "content": spec.tokens[i], **special} for i in (0, 1, spec.unknown)],
        "normalizer": {
            "type": "Sequence",
            "normalizers": [
                {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(spec.charsmap).decode()},
                {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "},
            ],
        },
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "WhitespaceSplit"}, space]},
        "decoder": space,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [*around, {"SpecialToken": {"id": "</s>", "type_id": 0}}],
            "pair": [*around, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {
                name: {"id": name, "ids": [i], "tokens": [name]} for i, name in enumerate(("<s>", "</s>"))
            },
        },
        "model": {
            "type": "Unigram",
            "unk_id": spec.unknown,
            "vocab": [[text, score] for text, score, kind in zip(spec.tokens, spec.scores, spec.types, strict=True)],
            "byte_fallback": False,
        },
    }


@pytest.fixture(scope="module")
def unigrams(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Vocabulary]:
    """The library's tokenizer and ours."""
    directory = tmp_path_factory.mktemp("unigram")
    (directory / "tokenizer.json").write_text(json.dumps(unigram_json()))
    keys = read_vocabulary(directory, Config(directory / "config.json", {}), len(unigram_spec().tokens) + 3)
    assert keys["tokenizer.ggml.add_space_prefix"] and keys["tokenizer.ggml.remove_extra_whitespaces"]
    assert keys["tokenizer.ggml.add_bos_token"] and keys["tokenizer.ggml.add_eos_token"]
    assert (keys["tokenizer.ggml.bos_token_id"], keys["tokenizer.ggml.eos_token_id"]) == (0, 1)
    assert keys["tokenizer.ggml.precompiled_charsmap"].tobytes() == unigram_spec().charsmap
    return Tokenizer.from_file(str(directory / "tokenizer.json")), vocabulary_of(keys)


@settings(deadline=None, max_examples=300)
@given(text=st.text(alphabet="the rnisabw  é你日本\nＡ２ﬁ…", max_size=40))
def test_unigram_ids_are_the_librarys(unigrams: tuple[Tokenizer, Vocabulary], text: str) -> None:
    theirs, ours = unigrams
    assert ours.encode(text, parse_special=False) == theirs.encode(text, add_special_tokens=False).ids
    assert [*ours.encode(text, parse_special=False, add_bos=True), 1] == theirs.encode(text).ids


def test_unigram_files_that_cannot_be_expressed_are_refused(tmp_path: Path) -> None:
    def read(**changes: Any) -> None:
        file = unigram_json()
        (tmp_path / "tokenizer.json").write_text(json.dumps(file | {"model": file["model"] | changes}))
        read_vocabulary(tmp_path, Config(tmp_path / "config.json", {}), 5000)

    read()
    for changes, message in (
        ({"byte_fallback": True}, "byte_fallback is 'True', expected false in a Unigram model"),
        ({"vocab": [["a", "x"]]}, r"entry 0 of model.vocab is .* expected a text and a number"),
        ({"unk_id": None}, "unk_id is missing|cannot be read"),
    ):
        with pytest.raises(CheckpointDirectoryError, match=message):
            read(**changes)


@pytest.mark.parametrize("table", ["abc", base64.b64encode(b"\x10\0\0\0" + b"\xff" * 16 + b"a\0").decode()])
def test_a_table_that_the_library_panics_at_is_refused(tmp_path: Path, table: str) -> None:
    file = unigram_json()
    file["normalizer"] = {"type": "Precompiled", "precompiled_charsmap": table}
    (tmp_path / "tokenizer.json").write_text(json.dumps(file))
    with pytest.raises(
        CheckpointDirectoryError, match=r"tokenizer.json cannot (be read|encode 'a'): .*; fetch the file"
    ):
        read_vocabulary(tmp_path, Config(tmp_path / "config.json", {}), 5000)


def test_a_unigram_file_of_sentencepiece_gives_the_same_vocabulary(tmp_path: Path) -> None:
    spec, pieces = unigram_spec(True, True), b""
    for text, score, kind in zip(spec.tokens, spec.scores, spec.types, strict=True):
        pieces += field(1, field(1, text.encode()) + field(2, score) + field(3, kind))
    rules = field(1, b"nmt_nfkc") + field(2, spec.charsmap) + field(3, 1) + field(4, 1)
    (tmp_path / "tokenizer.model").write_bytes(pieces + field(2, field(3, 1)) + field(3, rules))
    keys = read_vocabulary(tmp_path, Config(tmp_path / "config.json", {}), len(spec.tokens))
    found, ours = vocabulary_of(keys), Vocabulary(spec)
    assert keys["tokenizer.ggml.model"] == "t5"
    for text in ("the other  there ", "ﬁ　Ａ…", "你日本 e\u0301"):
        assert found.encode(text, parse_special=False) == ours.encode(text, parse_special=False)


# ------------------------------------------------------------------ directories


def test_templates_and_ends_of_answers(tiny_gguf, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    directory = write_directory(tiny_gguf("odd", "F16"), tmp_path / "hf")
    folder = tmp_path / "models"
    folder.mkdir()
    settings_path = directory / "tokenizer_config.json"
    fields = json.loads(settings_path.read_text())
    fields["chat_template"] = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "listed"}]
    settings_path.write_text(json.dumps(fields))
    (directory / "generation_config.json").write_text('{"eos_token_id": [2, 0]}')
    data = prepare_source(directory, folder).tokenizer
    assert (data.chat_template, data.eos, data.eot) == ("listed", 2, 0)
    # Of several ends the key has one that is not found by its name.
    settings_path.write_text(json.dumps(fields | {"eos_token": "<|endoftext|>"}))
    (directory / "generation_config.json").write_text('{"eos_token_id": [0, 1, 2]}')
    data = prepare_source(directory, folder).tokenizer
    assert (data.tokens[:3], data.eos, data.eot) == (["<|endoftext|>", "<|im_start|>", "<|im_end|>"], 0, 1)
    (directory / "chat_template.jinja").write_text("of a file")
    assert prepare_source(directory, folder).tokenizer.chat_template == "of a file"


def test_ids_are_compared_before_anything_is_written(tiny_gguf, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    directory = write_directory(tiny_gguf("odd", "F16"), tmp_path / "hf")
    folder = tmp_path / "models"
    folder.mkdir()
    assert prepare_source(directory, folder, check_vocabulary=check_vocabulary).tokenizer.pre == "gpt-2"
    before = set(folder.iterdir())
    file = json.loads((directory / "tokenizer.json").read_text())
    file["normalizer"] = {"type": "Lowercase"}  # which a GGUF file cannot express
    (directory / "tokenizer.json").write_text(json.dumps(file))
    with pytest.raises(ConfigError, match=r"The quick .* by the vocabulary that was read \(gpt2, gpt-2\) and"):
        prepare_source(directory, folder, check_vocabulary=check_vocabulary)
    assert set(folder.iterdir()) == before


def test_a_token_beyond_the_embedding_is_refused(tiny_gguf, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    directory = write_directory(tiny_gguf("odd", "F16"), tmp_path / "hf")
    file = json.loads((directory / "tokenizer.json").read_text())
    file["added_tokens"].append(file["added_tokens"][0] | {"id": 261, "content": "<more>"})
    (directory / "tokenizer.json").write_text(json.dumps(file))
    with pytest.raises(ConfigError, match=r"token '<more>' has id 261, expected 0 to 260 \(rows of the embedding\)"):
        prepare_source(directory, tmp_path)
