"""Writes the vocabulary of a GGUF file as `tokenizer.json` and `tokenizer_config.json`, for `tiny_hf.py`."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from pipeline.models.vocabularies import SPACE


def write_vocabulary(directory: Path, values: Mapping[str, Any]) -> None:
    """Write both files. `values`: the GGUF file's metadata."""
    {"bert": _write_wordpiece, "t5": _write_unigram}.get(values["tokenizer.ggml.model"], _write_byte_level)(
        directory, values
    )


def _added(tokens: list[str], ids: list[int]) -> list[dict[str, Any]]:
    flags = {"special": True, **dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)}
    return [{"id": i, "content": tokens[i], **flags} for i in ids]


def _enclosing(first: tuple[str, int], last: tuple[str, int]) -> dict[str, Any]:
    """The post-processor that puts a text between two tokens."""
    ends = [{"SpecialToken": {"id": name, "type_id": 0}} for name, _ in (first, last)]
    parts = [{"Sequence": {"id": name, "type_id": i}} for i, name in enumerate("AB")]
    return {
        "type": "TemplateProcessing",
        "single": [ends[0], parts[0], ends[1]],
        "pair": [ends[0], *parts, ends[1]],
        "special_tokens": {name: {"id": name, "ids": [i], "tokens": [name]} for name, i in (first, last)},
    }


def _special_names(values: Mapping[str, Any]) -> dict[str, str]:
    tokens = values["tokenizer.ggml.tokens"]
    keys = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    ids = {name: values.get(f"tokenizer.ggml.{key}_token_id") for name, key in keys.items()}
    return {f"{name}_token": tokens[i] for name, i in ids.items() if i is not None}


def _write_wordpiece(directory: Path, values: Mapping[str, Any]) -> None:
    """A vocabulary of BERT as tokenizer.json and tokenizer_config.json."""
    tokens, types = values["tokenizer.ggml.tokens"], values["tokenizer.ggml.token_type"]
    specials = [i for i, kind in enumerate(types) if kind == gguf.TokenType.CONTROL]
    names = [
        token if i in specials else token[1:] if token[0] == SPACE else f"##{token}" for i, token in enumerate(tokens)
    ]
    ends = [(tokens[i], int(i)) for i in (values["tokenizer.ggml.bos_token_id"], values["tokenizer.ggml.eos_token_id"])]
    flags = {"clean_text": True, "handle_chinese_chars": True, "strip_accents": None, "lowercase": True}
    tokenizer = {
        "version": "1.0",
        "added_tokens": _added(tokens, specials),
        "normalizer": {"type": "BertNormalizer", **flags},
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "post_processor": _enclosing(*ends),
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        "model": {
            "type": "WordPiece",
            "unk_token": tokens[values["tokenizer.ggml.unknown_token_id"]],
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100,
            "vocab": {name: i for i, name in enumerate(names)},
        },
    }
    write_json(directory / "tokenizer.json", tokenizer)
    write_json(directory / "tokenizer_config.json", _special_names(values))


def _write_unigram(directory: Path, values: Mapping[str, Any]) -> None:
    """A unigram vocabulary as tokenizer.json and tokenizer_config.json, as those of XLM-RoBERTa."""
    tokens, types = values["tokenizer.ggml.tokens"], values["tokenizer.ggml.token_type"]
    specials = [i for i, kind in enumerate(types) if kind in (gguf.TokenType.CONTROL, gguf.TokenType.UNKNOWN)]
    table = bytes(np.array(values["tokenizer.ggml.precompiled_charsmap"]).astype(np.uint8))
    ends = [(tokens[i], int(i)) for i in (values["tokenizer.ggml.bos_token_id"], values["tokenizer.ggml.eos_token_id"])]
    space = {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": "always", "split": True}
    several = {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "}
    tokenizer = {
        "version": "1.0",
        "added_tokens": _added(tokens, specials),
        "normalizer": {
            "type": "Sequence",
            "normalizers": [
                {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(table).decode()},
                several,
            ],
        },
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "WhitespaceSplit"}, space]},
        "decoder": space,
        "post_processor": _enclosing(*ends),
        "model": {
            "type": "Unigram",
            "unk_id": values["tokenizer.ggml.unknown_token_id"],
            "vocab": [[token, score] for token, score in zip(tokens, values["tokenizer.ggml.scores"], strict=True)],
            "byte_fallback": False,
        },
    }
    write_json(directory / "tokenizer.json", tokenizer)
    write_json(directory / "tokenizer_config.json", _special_names(values))


def _write_byte_level(directory: Path, values: Mapping[str, Any]) -> None:
    """A byte-level vocabulary as tokenizer.json and tokenizer_config.json."""
    tokens, types = values["tokenizer.ggml.tokens"], values["tokenizer.ggml.token_type"]
    specials = [i for i, kind in enumerate(types) if kind == gguf.TokenType.CONTROL]
    added = [
        {"id": i, "content": tokens[i], "special": True, **dict.fromkeys(("single_word", "lstrip", "rstrip"), False)}
        | {"normalized": False}
        for i in specials
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    tokenizer = {
        "version": "1.0",
        "added_tokens": added,
        "pre_tokenizer": byte_level,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "vocab": {token: i for i, token in enumerate(tokens)},  # the library numbers added tokens that it lacks
            "merges": [merge.split(" ") for merge in values["tokenizer.ggml.merges"]],
        },
    }
    write_json(directory / "tokenizer.json", tokenizer)
    settings: dict[str, Any] = {
        "bos_token": tokens[values["tokenizer.ggml.bos_token_id"]],
        "eos_token": {"content": tokens[values["tokenizer.ggml.eos_token_id"]]},
        "unk_token": tokens[values["tokenizer.ggml.unknown_token_id"]],
        "add_bos_token": bool(values["tokenizer.ggml.add_bos_token"]),
    }
    if "tokenizer.chat_template" in values:
        settings["chat_template"] = values["tokenizer.chat_template"]
    write_json(directory / "tokenizer_config.json", settings)


def write_json(path: Path, value: Any) -> None:
    """Write a value with NumPy's numbers as a file."""
    path.write_text(json.dumps(value, default=lambda number: number.item()), "utf-8")
