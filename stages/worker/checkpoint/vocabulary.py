"""Reads the `tokenizer.*` keys of a GGUF file, and refuses a vocabulary that cannot be served."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from pipeline.models.vocabularies import BYTE_LEVEL, SENTENCEPIECE, UNIGRAM, WORDPIECE, vocabulary_problem
from pipeline.models.vocabulary_tables import NAMED
from shm.checkpoint import STRIPPING_REVISION, VOCABULARY_REVISION, TokenizerData
from shm.named_stripping import has_named_stripping, named_stripping
from stages.worker.checkpoint.gguf import AGAIN, GgufError
from stages.worker.checkpoint.source import Source

_NONE = 0xFFFFFFFF  # published files write "none" as -1 or as its unsigned form
_IDS = ("bos", "eos", "eot", "unknown", "padding")
# Of fill in the middle, and as older files call them.
_FIM_IDS = {"fim_pre": "prefix", "fim_suf": "suffix", "fim_mid": "middle"}
_FIM_ENDS = ("fim_pad", "fim_rep", "fim_sep")
# Each kind's own ids, where a file does not give them.
_OWN_IDS = {
    SENTENCEPIECE: {"unknown": 0, "bos": 1, "eos": 2},
    WORDPIECE: {"unknown": 100, "bos": 101, "eos": 102, "padding": 0},
    UNIGRAM: {"padding": 0, "eos": 1, "unknown": 2},
}
# Other names of the keys in files of WordPiece: a text is between these two ("seperator" is the key's spelling).
_WORDPIECE_KEYS = {"bos": "cls", "eos": "seperator"}
# Keys of Hugging Face directories alone, which state what llama.cpp finds by a model's name.
STRIPS_RIGHT, STRIPS_LEFT = "starling.tokenizer.strips_right", "starling.tokenizer.strips_left"


def read_vocabulary(file: Source, pretokenizer: str = "") -> TokenizerData:
    """Return the vocabulary, special ids and template of a file. Raises `GgufError`.

    pretokenizer: of the model's configuration, accepted in place of the file's `tokenizer.ggml.pre`.
    """
    reader = _Reader(file)
    kind = reader.get("model", str, "none")
    tokens = reader.texts("tokens")
    reader.check_count("tokens", len(tokens))
    own = _OWN_IDS.get(kind, {})
    ids = {name: reader.token_id(name, own.get(name, -1)) for name in _IDS}
    if kind == WORDPIECE:
        ids |= {name: reader.token_id(key, ids[name]) for name, key in _WORDPIECE_KEYS.items()}
    fim = tuple(reader.token_id(name, reader.token_id(old, -1)) for name, old in _FIM_IDS.items())
    fim_ends = tuple(token for name in _FIM_ENDS if (token := reader.token_id(name, -1)) >= 0)
    pre, types = reader.get("pre", str, "default"), reader.numbers("token_type", "iu")
    special = [(text, i) for i, (text, one) in enumerate(zip(tokens, types)) if one in NAMED]
    stripping = _stripping(file, pre, special)
    data = TokenizerData(
        model=kind,
        pre=pre,
        tokens=tokens,
        types=types,
        merges=reader.texts("merges"),
        scores=reader.numbers("scores", "fi"),
        bos=ids["bos"],
        eos=ids["eos"],
        eot=ids["eot"],
        unknown=ids["unknown"],
        padding=ids["padding"],
        add_bos=reader.flag("add_bos_token"),
        add_space_prefix=reader.flag("add_space_prefix"),
        chat_template=reader.template(),
        revision=stripping.revision,
        fim=fim if min(fim) >= 0 else (),
        fim_ends=fim_ends,
        charsmap=reader.charsmap() if kind == UNIGRAM else b"",
        merges_spaces=reader.flag("remove_extra_whitespaces") if kind == UNIGRAM else None,
        strips_right=stripping.right,
        strips_left=stripping.left,
        strips_unicode=stripping.is_unicode,
    )
    problem = vocabulary_problem(data, pretokenizer)
    if kind == BYTE_LEVEL and "tokenizer.ggml.merges" not in file.metadata:
        problem = problem or f"tokenizer.ggml.merges is missing; {AGAIN}"
    if problem:
        raise GgufError(f"{file.path}: {problem}")
    return data


class _Stripping(NamedTuple):
    """As in `TokenizerData`: the special tokens that take white space."""

    revision: int
    right: tuple[int, ...]
    left: tuple[int, ...]
    is_unicode: bool | None


def _stripping(file: Source, pre: str, special: list[tuple[str, int]]) -> _Stripping:
    """Return what a directory states, or what a GGUF file's name implies."""
    name = file.metadata.get("general.name")
    if is_stated := STRIPS_RIGHT in file.metadata:
        right, left = tuple(file.metadata[STRIPS_RIGHT]), tuple(file.metadata[STRIPS_LEFT])
    else:
        right, left = named_stripping(name if isinstance(name, str) else "", pre, special)
    # An index whose name implies tokens that take white space is complete with this revision alone; a file without a
    # name is named after its path.
    is_named = has_named_stripping(name if isinstance(name, str) else file.path.name, pre)
    revision = STRIPPING_REVISION if right or left or is_named else VOCABULARY_REVISION
    return _Stripping(revision, right, left, True if is_stated and (right or left) else None)


class _Reader:
    """Typed access to the keys."""

    def __init__(self, file: Source) -> None:
        self._file, self._metadata = file, file.metadata
        self._rows = file.tensors["token_embd.weight"].shape[0]

    def get(self, key: str, kind: type, default: Any) -> Any:
        value = self._metadata.get(f"tokenizer.ggml.{key}", default)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise GgufError(
                f"{self._file.path}: tokenizer.ggml.{key} is {str(value)[:60]!r}, expected {kind.__name__}; {AGAIN}"
            )
        return value

    def flag(self, key: str) -> bool | None:
        return None if f"tokenizer.ggml.{key}" not in self._metadata else bool(self.get(key, bool, False))

    def template(self) -> str:
        value = self._metadata.get("tokenizer.chat_template", "")
        if not isinstance(value, str):
            raise GgufError(f"{self._file.path}: tokenizer.chat_template is {str(value)[:60]!r}, expected str; {AGAIN}")
        return value

    def charsmap(self) -> bytes:
        value = self._metadata.get("tokenizer.ggml.precompiled_charsmap")
        if value is None or (isinstance(value, (list, np.ndarray)) and not len(value)):
            return b""
        if not isinstance(value, np.ndarray) or value.dtype.itemsize != 1 or value.dtype.kind not in "iu":
            raise GgufError(f"{self._file.path}: tokenizer.ggml.precompiled_charsmap is not a list of bytes; {AGAIN}")
        return value.tobytes()

    def token_id(self, name: str, default: int) -> int:
        value = int(self.get(f"{name}_token_id", int, default))
        # A default may be outside of a small vocabulary.
        if value == _NONE or (value == default and value >= self._rows):
            return -1
        if value >= self._rows:
            raise GgufError(
                f"{self._file.path}: tokenizer.ggml.{name}_token_id is {value}, expected less than {self._rows}; "
                f"{AGAIN}"
            )
        return value

    def texts(self, key: str) -> list[str]:
        value = self._metadata.get(f"tokenizer.ggml.{key}", [])
        if isinstance(value, np.ndarray) and not value.size:
            return []
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise GgufError(f"{self._file.path}: tokenizer.ggml.{key} is not a list of texts; {AGAIN}")
        return value

    def numbers(self, key: str, kinds: str) -> list[Any]:
        value = self._metadata.get(f"tokenizer.ggml.{key}")
        if value is None:
            return []
        if not isinstance(value, np.ndarray) or value.dtype.kind not in kinds:
            raise GgufError(
                f"{self._file.path}: tokenizer.ggml.{key} is not a list of "
                f"{'numbers' if 'f' in kinds else 'whole numbers'}; {AGAIN}"
            )
        self.check_count(key, len(value))
        return value.tolist()

    def check_count(self, key: str, count: int) -> None:
        if count > self._rows:
            raise GgufError(
                f"{self._file.path}: tokenizer.ggml.{key} has {count} entries, expected at most {self._rows} "
                f"(rows of 'token_embd.weight'); {AGAIN}"
            )
