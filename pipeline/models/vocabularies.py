"""Which vocabularies of GGUF files can be served: checked before a file is ingested, and when its index is opened."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Protocol

from pipeline.models.charsmap import read_charsmap
from pipeline.models.pretokenizers import NOT_BYTE_LEVEL, PRETOKENIZERS
from shm.checkpoint import VOCABULARY_REVISION

BYTE_LEVEL, SENTENCEPIECE, WORDPIECE, UNIGRAM = "gpt2", "llama", "bert", "t5"
# Values of tokenizer.ggml.model.
KINDS = {
    BYTE_LEVEL: "byte-level BPE",
    SENTENCEPIECE: "SentencePiece BPE",
    WORDPIECE: "WordPiece",
    UNIGRAM: "SentencePiece unigram",
}
SPACE = "\u2581"  # stands for a space in the tokens of SentencePiece, and begins a word in those of WordPiece
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # tokenizer.ggml.token_type (GGUF specification)

# Names of tokens that end a turn, or a text. Many files give only one of the two as their end: chats end with the
# first kind, texts that are completed with the second, behind which an unrelated text begins.
_ENDS = (
    *("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<turn|>", "<|end|>", "<|end_of_turn|>"),
    *("<|END_OF_TURN_TOKEN|>", "<|endofturn|>", "<end_of_utterance>", "<EOT>", "[EOT]"),
    *("<|endoftext|>", "<|end_of_text|>"),
)
_HARMONY = "<|return|>"  # a vocabulary with this token uses <|end|> within an answer


def named_ends(special: Mapping[str, int]) -> list[int]:
    """Return the ids of the control and user-defined tokens that end a turn or a text, by their names."""
    names = [name for name in _ENDS if name != "<|end|>" or _HARMONY not in special]
    return [special[name] for name in names if name in special]


def byte_name(byte: int) -> str:
    """Return the text of the token that stands for a byte in a SentencePiece vocabulary."""
    return f"<0x{byte:02X}>"


class VocabularyData(Protocol):
    """What of a file's `tokenizer.*` keys is checked; as `TokenizerData`."""

    @property
    def model(self) -> str: ...  # noqa: D102
    @property
    def pre(self) -> str: ...  # noqa: D102
    @property
    def tokens(self) -> Sequence[str]: ...  # noqa: D102
    @property
    def types(self) -> Sequence[int]: ...  # noqa: D102
    @property
    def scores(self) -> Sequence[float]: ...  # noqa: D102
    @property
    def unknown(self) -> int: ...  # noqa: D102
    @property
    def revision(self) -> int: ...  # noqa: D102
    @property
    def charsmap(self) -> bytes: ...  # noqa: D102


def vocabulary_problem(data: VocabularyData, pretokenizer: str = "") -> str:
    """Return why a vocabulary cannot be reproduced exactly, with the key, its value and what is supported; "": it can.

    pretokenizer: of the model's configuration, instead of the file's `tokenizer.ggml.pre`.
    """
    if data.model not in KINDS:
        supported = ", ".join(f"{kind!r} ({name})" for kind, name in KINDS.items())
        return f"tokenizer.ggml.model is {data.model[:60]!r}; supported: {supported}; use another model"
    if not data.tokens:
        return "tokenizer.ggml.tokens is missing or empty; fetch or convert the file again"
    if len(data.types) not in (0, len(data.tokens)):
        return (
            f"tokenizer.ggml.token_type has {len(data.types)} entries for {len(data.tokens)} tokens; fetch or convert "
            f"the file again"
        )
    if data.model == WORDPIECE:
        return _wordpiece_problem(data)
    if data.model == UNIGRAM:
        return _unigram_problem(data)
    return _byte_level_problem(data, pretokenizer) if data.model == BYTE_LEVEL else _sentencepiece_problem(data)


def _wordpiece_problem(data: VocabularyData) -> str:
    if not any(text.startswith(SPACE) for text in data.tokens):
        return (
            f"tokenizer.ggml.tokens has no token that begins with {SPACE!r}, as those of the beginnings of words do; "
            f"convert the file again"
        )
    if not 0 <= data.unknown < len(data.tokens):
        return "tokenizer.ggml.unknown_token_id names no token for unknown words; fetch or convert the file again"
    return ""


def _byte_level_problem(data: VocabularyData, pretokenizer: str) -> str:
    if data.pre in NOT_BYTE_LEVEL:
        return (
            f"tokenizer.ggml.pre is {data.pre!r}: its tokens consist of characters, expected bytes, so that no other "
            f"pre-tokenizer can stand in; use another model"
        )
    if pretokenizer and pretokenizer not in PRETOKENIZERS:
        return f"models[].pretokenizer is {pretokenizer[:60]!r}; supported: {', '.join(sorted(PRETOKENIZERS))}"
    if not pretokenizer and data.pre not in PRETOKENIZERS:
        return (
            f"tokenizer.ggml.pre is {data.pre[:60]!r}; supported: {', '.join(sorted(PRETOKENIZERS))}; if the model "
            f"splits text as one of these does, name it in models[].pretokenizer"
        )
    return ""


def _unigram_problem(data: VocabularyData) -> str:
    problem = _scores_problem(data)
    if problem:
        return problem
    if any(math.isinf(score) for score in data.scores):
        return "tokenizer.ggml.scores has an infinite value; fetch or convert the file again"
    if data.types and NORMAL not in data.types:
        return "tokenizer.ggml.token_type has no normal token; fetch or convert the file again"
    if not 0 <= data.unknown < len(data.tokens):
        return "tokenizer.ggml.unknown_token_id names no token for unknown characters; fetch or convert the file again"
    try:
        read_charsmap(data.charsmap)
    except ValueError as error:
        return f"tokenizer.ggml.precompiled_charsmap cannot be used: {error}; fetch or convert the file again"
    return ""


def _scores_problem(data: VocabularyData) -> str:
    if len(data.scores) != len(data.tokens):
        return (
            f"tokenizer.ggml.scores has {len(data.scores)} entries for {len(data.tokens)} tokens; fetch or convert the "
            f"file again"
        )
    if any(math.isnan(score) for score in data.scores):
        return "tokenizer.ggml.scores has a value that is not a number; fetch or convert the file again"
    return ""


def _sentencepiece_problem(data: VocabularyData) -> str:
    if data.revision < VOCABULARY_REVISION:
        return "its index was made by an older release; `starling prepare` ingests the file again"
    problem = _scores_problem(data)
    if problem:
        return problem
    known = set(data.tokens)
    if SPACE not in known:
        return f"tokenizer.ggml.tokens has no {SPACE!r}, which stands for the space; fetch or convert the file again"
    missing = [byte for byte in range(256) if byte_name(byte) not in known]
    if missing and not 0 <= data.unknown < len(data.tokens):
        return (
            f"tokenizer.ggml.tokens has no {byte_name(missing[0])!r} ({len(missing)} such tokens are missing), and "
            f"tokenizer.ggml.unknown_token_id names no token for unknown characters; fetch or convert the file again"
        )
    return ""
