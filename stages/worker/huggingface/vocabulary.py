"""The vocabulary of a checkpoint directory as the `tokenizer.*` keys of a GGUF file.

`tokenizer.json` (the `tokenizers` library's file) comes first, otherwise `tokenizer.model` (SentencePiece's).  A
byte-level vocabulary needs the name of its pre-tokenizer, which pretokenizer_match.py finds.  In a SentencePiece
vocabulary of `tokenizer.json` the order of merges takes the place of scores: the score of a token is minus the rank of
the first merge that makes it, so that the best pair of both is the same.  A unigram vocabulary of `tokenizer.json`
has its scores and SentencePiece's table of character replacements; whether spaces are merged is found by encoding some.
"""

from __future__ import annotations

import base64
import binascii
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Encoding

from pipeline.models.vocabularies import (
    BYTE,
    BYTE_LEVEL,
    CONTROL,
    NORMAL,
    SENTENCEPIECE,
    UNIGRAM,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    WORDPIECE,
    byte_name,
    named_ends,
)
from pipeline.models.vocabulary_tables import NAMED
from stages.worker.checkpoint.source import REVISED
from stages.worker.checkpoint.vocabulary import STRIPS_LEFT, STRIPS_RIGHT
from stages.worker.huggingface import config as json_files
from stages.worker.huggingface import sentencepiece_model, tokenizer_library
from stages.worker.huggingface.config import UNSUPPORTED, CheckpointDirectoryError, Config
from stages.worker.huggingface.pretokenizer_match import find_pretokenizer

_SPECIALS = ("bos", "eos", "unk", "pad")
_GGUF_NAMES = {"unk": "unknown", "pad": "padding"}
_SPACE = "▁"
_WITHIN = "##"  # before the tokens of WordPiece that do not begin a word
_UNUSED_SCORE = -10000.0  # as llama.cpp's converter has it
_MAX_IDS = 1 << 20  # several times the largest vocabulary published; each takes some 100 bytes of memory
_EOS = "tokenizer.ggml.eos_token_id"


def read_vocabulary(directory: Path, config: Config, rows: int, pretokenizer: str = "") -> dict[str, Any]:
    """The keys. Raises `CheckpointDirectoryError`, `OSError`.

    rows: of the embedding; ids without a token get an unused one.  pretokenizer: its name, if it need not be found.
    """
    if not 1 <= rows <= _MAX_IDS:
        raise CheckpointDirectoryError(
            f"{config.path}: vocab_size, or the number of the embedding's rows, is {rows:,}, expected 1 to "
            f"{_MAX_IDS:,}; {UNSUPPORTED}"
        )
    settings = json_files.read(directory / "tokenizer_config.json") or Config(directory / "tokenizer_config.json", {})
    file = json_files.read(directory / "tokenizer.json")
    if file is not None:
        keys = _TokenizerJson(file, rows).keys(settings, pretokenizer)
    elif (directory / "tokenizer.model").is_file():
        keys = _sentencepiece_keys(directory, settings, rows)
    else:
        raise CheckpointDirectoryError(
            f"{directory} has neither tokenizer.json nor tokenizer.model; fetch one of them too"
        )
    ids = {token: i for i, token in reversed(list(enumerate(keys["tokenizer.ggml.tokens"])))}
    keys |= _special_ids(directory, config, settings, ids, keys)
    template = _chat_template(directory, settings)
    if template:
        keys["tokenizer.chat_template"] = template
    return keys


def _special_ids(
    directory: Path, config: Config, settings: Config, ids: dict[str, int], keys: dict[str, Any]
) -> dict[str, int]:
    """Ids of the special tokens: by name, then by number."""
    special_map = json_files.read(directory / "special_tokens_map.json")
    generation = json_files.read(directory / "generation_config.json")
    found: dict[str, int] = {}
    for name in _SPECIALS:
        to = f"tokenizer.ggml.{_GGUF_NAMES.get(name, name)}_token_id"
        for source in (settings, special_map):
            token = source.fields.get(f"{name}_token") if source is not None else None
            text = token.get("content") if isinstance(token, dict) else token
            if isinstance(text, str) and text in ids:
                found.setdefault(to, ids[text])
        for source in (generation, config):
            for number in _numbers(source, f"{name}_token_id"):
                if 0 <= number < len(ids):
                    found.setdefault(to, number)
    # A model may end its answers with several tokens. Those whose names end a turn count without a key.
    named, others = named_ends(ids), _numbers(generation, "eos_token_id")
    eos = keys.get(_EOS, found.get(_EOS, -1))
    if found.get(_EOS, eos) != eos:  # the token that ends a text is another one
        others.append(found[_EOS])
        found |= {_EOS: eos, REVISED: True}
    ends = [one for one in others if one != eos and 0 <= one < len(ids)]
    if ends:
        found["tokenizer.ggml.eot_token_id"] = ([one for one in ends if one not in named] or ends)[-1]
    unknown = "tokenizer.ggml.unknown_token_id"
    if unknown in keys:
        found[unknown] = keys[unknown]
    return found


def _numbers(source: Config | None, key: str) -> list[int]:
    value = source.fields.get(key) if source is not None else None
    values = value if isinstance(value, list) else [value]
    return [one for one in values if isinstance(one, int) and not isinstance(one, bool)]


def _chat_template(directory: Path, settings: Config) -> str:
    """The template of a file of its own, otherwise the one in the tokenizer's settings."""
    path = directory / "chat_template.jinja"
    if path.is_file():
        json_files.check_size(path)
        try:
            return path.read_text("utf-8")
        except UnicodeDecodeError:
            raise CheckpointDirectoryError(f"{path} is not UTF-8; fetch it again") from None
    own = json_files.read(directory / "chat_template.json")
    for source in (own, settings):
        value = source.fields.get("chat_template") if source is not None else None
        if isinstance(value, str):
            return value
        if isinstance(value, list):  # several by name
            named = {one.get("name"): one.get("template") for one in value if isinstance(one, dict)}
            if isinstance(named.get("default"), str):
                return str(named["default"])
        elif source is not None and value is not None:
            raise source.refuse("chat_template", "a text, or a list of templates with names")
    return ""


class _Strips:
    """The added tokens that take the white space behind them or before them. `path`: of their file, for messages."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._right: set[int] = set()
        self._left: set[int] = set()

    def add(self, token: int, entry: dict[str, Any]) -> None:
        """Raises `CheckpointDirectoryError` for a token whose place in a text would not be found."""
        if entry.get("single_word"):
            raise CheckpointDirectoryError(
                f"{self._path}: added token {entry['content'][:60]!r} has single_word, expected false: it would be "
                f"found within words, too; use another model"
            )
        for flag, ids in (("rstrip", self._right), ("lstrip", self._left)):
            if entry.get(flag):
                ids.add(token)

    def keys(self) -> dict[str, Any]:
        return {STRIPS_RIGHT: tuple(sorted(self._right)), STRIPS_LEFT: tuple(sorted(self._left))}


# ------------------------------------------------------------------ tokenizer.json


class _TokenizerJson:
    def __init__(self, file: Config, rows: int) -> None:
        self._file, self._rows = file, rows
        self._model = model = file.table("model")
        kind = model.text("type", "BPE")
        if kind not in ("BPE", "Unigram", "WordPiece"):
            raise model.refuse("type", "'BPE', 'Unigram' or 'WordPiece'")
        self._is_unigram, self._is_wordpiece = kind == "Unigram", kind == "WordPiece"
        if model.has("dropout") and model.number("dropout") > 0:
            raise model.refuse("dropout", "none")
        for key in ("continuing_subword_prefix", "end_of_word_suffix"):
            expected = _WITHIN if self._is_wordpiece and key == "continuing_subword_prefix" else ""
            if model.text(key, expected) != expected:
                raise model.refuse(key, repr(expected) if expected else "none")
        self.tokens = [f"[PAD{i}]" for i in range(rows)]
        self.types = [UNUSED] * rows
        self.scores = [_UNUSED_SCORE] * rows
        self._vocab = self._unigram_vocab() if self._is_unigram else model.table("vocab").fields
        for text, token in self._vocab.items():
            self._place(_wordpiece_text(text) if self._is_wordpiece else text, token, NORMAL)
        self._is_byte_level = _has_type(file.fields.get("pre_tokenizer"), "ByteLevel") or _has_type(
            file.fields.get("decoder"), "ByteLevel"
        )
        self.strips = _Strips(file.path)
        for added in file.items("added_tokens", []):
            if not isinstance(added, dict) or not isinstance(added.get("content"), str):
                raise CheckpointDirectoryError(f"{file.path}: added_tokens has an entry without content")
            self._place(added["content"], added.get("id"), CONTROL if added.get("special") else USER_DEFINED)
            self.strips.add(added["id"], added)
        self._tokenizer = tokenizer_library.load(file.path)

    def _place(self, text: str, token: Any, kind: int) -> None:
        if not isinstance(token, int) or not 0 <= token < self._rows:
            raise CheckpointDirectoryError(
                f"{self._file.path}: token {text[:60]!r} has id {str(token)[:20]}, expected 0 to {self._rows - 1} "
                f"(rows of the embedding)"
            )
        self.tokens[token], self.types[token] = text, kind

    def _unigram_vocab(self) -> dict[str, Any]:
        """The ids of the tokens, whose scores are set too."""
        found: dict[str, Any] = {}
        for i, entry in enumerate(self._model.items("vocab")):
            is_pair = isinstance(entry, list) and len(entry) == 2 and isinstance(entry[0], str)
            if not is_pair or isinstance(entry[1], bool) or not _is_score(entry[1]):
                raise CheckpointDirectoryError(
                    f"{self._file.path}: entry {i} of model.vocab is {str(entry)[:60]!r}, expected a text and a number"
                )
            if i >= self._rows:
                raise CheckpointDirectoryError(
                    f"{self._file.path}: model.vocab has more than {self._rows} entries (rows of the embedding)"
                )
            self.scores[i] = float(entry[1])
            found[entry[0]] = i
        return found

    def keys(self, settings: Config, pretokenizer: str) -> dict[str, Any]:
        keys: dict[str, Any] = {"tokenizer.ggml.tokens": self.tokens} | self.strips.keys()
        pairs = [self._pair(entry) for entry in self._model.items("merges", [])]
        if self._is_wordpiece:
            return keys | self._wordpiece()
        if self._is_unigram:
            keys |= self._unigram()
        elif self._is_byte_level:
            keys["tokenizer.ggml.model"] = BYTE_LEVEL
            keys["tokenizer.ggml.pre"] = pretokenizer or find_pretokenizer(
                self._file.path, self._tokenizer, self._model.flag("ignore_merges", False)
            )
            keys["tokenizer.ggml.merges"] = [" ".join(pair) for pair in pairs]
        else:
            keys |= self._sentencepiece(pairs)
        keys["tokenizer.ggml.token_type"] = np.array(self.types, np.int32)
        with_added = self._encode("a", True).ids
        plain = self._encode("a", False).ids
        n = len(plain)
        at = next((i for i in range(len(with_added) - n + 1) if with_added[i : i + n] == plain), None)
        starts = with_added[:1] if at is None else with_added[:at]
        ends = [] if at is None else with_added[at + n :]
        keys["tokenizer.ggml.add_bos_token"] = settings.flag("add_bos_token", bool(starts) and with_added != plain)
        if keys["tokenizer.ggml.add_bos_token"] and starts and with_added != plain:
            keys["tokenizer.ggml.bos_token_id"] = starts[0]
        keys["tokenizer.ggml.add_eos_token"] = settings.flag("add_eos_token", bool(ends))
        if keys["tokenizer.ggml.add_eos_token"] and ends:
            keys[_EOS] = ends[0]
            if not self._is_unigram and not settings.has("add_eos_token"):
                keys[REVISED] = True
        return keys

    def _encode(self, text: str, with_special: bool) -> Encoding:
        return tokenizer_library.encode(self._tokenizer, self._file.path, text, with_special)

    def _pair(self, entry: Any) -> tuple[str, str]:
        parts = entry.split(" ") if isinstance(entry, str) else entry
        if not isinstance(parts, list) or len(parts) != 2 or not all(isinstance(part, str) for part in parts):
            raise CheckpointDirectoryError(
                f"{self._file.path}: merge {str(entry)[:60]!r} is not a pair of tokens; fetch the file again"
            )
        return parts[0], parts[1]

    def _wordpiece(self) -> dict[str, Any]:
        """The model lowers case and takes accents away, as llama.cpp always does."""
        normalizer = self._file.table("normalizer")
        if normalizer.text("type", "") != "BertNormalizer":
            raise normalizer.refuse("type", "'BertNormalizer'")
        for key in ("lowercase", "handle_chinese_chars", "clean_text"):
            if not normalizer.flag(key, True):
                raise normalizer.refuse(key, "true")
        if not normalizer.flag("strip_accents", True):
            raise normalizer.refuse("strip_accents", "true or null")
        unknown = self._vocab.get(self._model.text("unk_token", "[UNK]"), -1)
        plain, with_added = self._encode("a", False).ids, self._encode("a", True).ids
        if len(with_added) != len(plain) + 2:
            raise CheckpointDirectoryError(
                f"{self._file.path}: post_processor adds {len(with_added) - len(plain)} tokens to a text, expected one "
                f"at each end"
            )
        return {
            "tokenizer.ggml.model": WORDPIECE,
            "tokenizer.ggml.token_type": np.array(self.types, np.int32),
            "tokenizer.ggml.unknown_token_id": unknown,
            "tokenizer.ggml.cls_token_id": with_added[0],
            "tokenizer.ggml.seperator_token_id": with_added[-1],
        }

    def _unigram(self) -> dict[str, Any]:
        model = self._model
        if model.flag("byte_fallback", False):
            raise model.refuse("byte_fallback", "false in a Unigram model")
        unknown = model.integer("unk_id")
        if not 0 <= unknown < self._rows:
            raise model.refuse("unk_id", f"0 to {self._rows - 1}")
        self.types[unknown] = UNKNOWN
        first = self._encode("a", False).tokens[:1]
        return {
            "tokenizer.ggml.model": UNIGRAM,
            "tokenizer.ggml.pre": "default",
            "tokenizer.ggml.scores": np.array(self.scores, np.float32),
            "tokenizer.ggml.unknown_token_id": unknown,
            "tokenizer.ggml.add_space_prefix": bool(first) and first[0].startswith(_SPACE),
            "tokenizer.ggml.remove_extra_whitespaces": self._encode("a  a", False).ids
            == self._encode("a a", False).ids,
            "tokenizer.ggml.precompiled_charsmap": np.frombuffer(self._charsmap(), np.uint8),
        }

    def _charsmap(self) -> bytes:
        """The table of replacements; other normalizers only matter where ids differ, which is checked before ingest."""
        normalizer = self._file.fields.get("normalizer")
        parts: list[Any] = [normalizer]
        if isinstance(normalizer, dict) and normalizer.get("type") == "Sequence":
            listed = normalizer.get("normalizers")
            parts = listed if isinstance(listed, list) else []
        for part in parts:
            if isinstance(part, dict) and part.get("type") == "Precompiled":
                try:
                    return base64.b64decode(part.get("precompiled_charsmap") or "", validate=True)
                except (TypeError, ValueError, binascii.Error):
                    raise CheckpointDirectoryError(
                        f"{self._file.path}: normalizer.precompiled_charsmap is not Base64; fetch the file again"
                    ) from None
        return b""

    def _sentencepiece(self, pairs: list[tuple[str, str]]) -> dict[str, Any]:
        if not self._model.flag("byte_fallback", False):
            raise self._model.refuse("byte_fallback", "true, or a ByteLevel pre-tokenizer")
        names = {byte_name(byte) for byte in range(256)}
        for text, token in self._vocab.items():
            if text in names:
                self.types[token] = BYTE
        ranks: dict[str, int] = {}
        for rank, (left, right) in enumerate(pairs):
            ranks.setdefault(left + right, rank)
        unmerged = float(-len(pairs) - 1)
        scores = [-float(ranks[text]) if text in ranks else unmerged for text in self.tokens]
        first = self._encode("a", False).tokens[:1]
        keys: dict[str, Any] = {
            "tokenizer.ggml.model": SENTENCEPIECE,
            "tokenizer.ggml.scores": np.array(scores, np.float32),
            "tokenizer.ggml.add_space_prefix": bool(first) and first[0].startswith(_SPACE),
        }
        unknown = self._model.text("unk_token", "")
        if unknown in self._vocab:
            self.types[self._vocab[unknown]] = UNKNOWN
            keys["tokenizer.ggml.unknown_token_id"] = self._vocab[unknown]
        return keys


def _wordpiece_text(text: str) -> str:
    """A token as GGUF files write it: U+2581 begins a word, and nothing goes on with one."""
    if text.startswith("[") and text.endswith("]") and len(text) > 1:
        return text
    return text.removeprefix(_WITHIN) if text.startswith(_WITHIN) and text != _WITHIN else _SPACE + text


def _is_score(value: Any) -> bool:
    return isinstance(value, (int, float)) and -1e30 <= value <= 1e30


def _has_type(value: Any, name: str) -> bool:
    """Whether an object of this `type` is within a JSON value."""
    if isinstance(value, dict):
        return value.get("type") == name or any(_has_type(one, name) for one in value.values())
    return isinstance(value, list) and any(_has_type(one, name) for one in value)


# ------------------------------------------------------------------ tokenizer.model


def _sentencepiece_keys(directory: Path, settings: Config, rows: int) -> dict[str, Any]:
    path = directory / "tokenizer.model"
    model = sentencepiece_model.read(path)
    if len(model.pieces) > rows:
        raise CheckpointDirectoryError(
            f"{path} has {len(model.pieces)} pieces, expected at most {rows} (rows of the embedding)"
        )
    tokens, types, scores = [f"[PAD{i}]" for i in range(rows)], [UNUSED] * rows, [_UNUSED_SCORE] * rows
    for i, piece in enumerate(model.pieces):
        tokens[i], types[i], scores[i] = piece.text, piece.kind, piece.score
    added = json_files.read(directory / "added_tokens.json")
    for text, token in (added.fields if added is not None else {}).items():
        if not isinstance(token, int) or not 0 <= token < rows:
            raise CheckpointDirectoryError(
                f"{directory / 'added_tokens.json'}: {text[:60]!r} has id {str(token)[:20]}, expected 0 to {rows - 1}"
            )
        if token >= len(model.pieces):
            tokens[token], types[token] = text, USER_DEFINED
    strips = _Strips(settings.path)
    for number, entry in settings.table("added_tokens_decoder").fields.items():
        is_text = isinstance(entry, dict) and isinstance(entry.get("content"), str)
        if not is_text or not number.isdecimal() or int(number) >= rows:
            continue
        i = int(number)
        if entry.get("special") and types[i] in (UNUSED, USER_DEFINED):
            tokens[i], types[i] = entry["content"], CONTROL
        if types[i] in NAMED and tokens[i] == entry["content"]:
            strips.add(i, entry)
    keys: dict[str, Any] = strips.keys() | {
        "tokenizer.ggml.model": SENTENCEPIECE,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array(types, np.int32),
        "tokenizer.ggml.scores": np.array(scores, np.float32),
        "tokenizer.ggml.add_space_prefix": model.adds_space,
        "tokenizer.ggml.add_bos_token": settings.flag("add_bos_token", True),
        "tokenizer.ggml.add_eos_token": settings.flag("add_eos_token", False),
    }
    if model.is_unigram:
        keys |= {
            "tokenizer.ggml.model": UNIGRAM,
            "tokenizer.ggml.precompiled_charsmap": np.frombuffer(model.charsmap, np.uint8),
            "tokenizer.ggml.remove_extra_whitespaces": model.merges_spaces,
        }
    for i, kind in enumerate(types):
        if kind == UNKNOWN:
            keys["tokenizer.ggml.unknown_token_id"] = i
            break
    return keys
