"""Pre-tokenizers: how text is split before byte-pair merges, for each value of `tokenizer.ggml.pre`.

A GGUF file names its pre-tokenizer.  The patterns are those that each model family was trained with (GPT-2: Radford
et al. 2019; Llama 3 and Qwen2: their published `tokenizer.json`).  The patterns of a pre-tokenizer are applied in
order; text between matches is a piece of its own.
"""

from __future__ import annotations

from typing import NamedTuple

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_CONTRACTION = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_LLAMA3 = _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN_UPPER = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
_TEKKEN_LOWER = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
_TEKKEN = _TEKKEN_UPPER + "|" + _TEKKEN_LOWER + r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT4O = (
    _TEKKEN_UPPER
    + _CONTRACTION
    + "?|"
    + _TEKKEN_LOWER
    + _CONTRACTION
    + r"?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class PreTokenizer(NamedTuple):
    """Patterns in the order in which they split a text."""

    patterns: tuple[str, ...]
    # A piece that is itself a token is not merged from smaller ones (Llama 3).
    whole_pieces: bool = False


_GROUPS: dict[PreTokenizer, tuple[str, ...]] = {
    PreTokenizer((_GPT2,)): (
        "gpt-2",
        "phi-2",
        "mpt",
        "olmo",
        "jais",
        "jina-es",
        "jina-de",
        "jina-v2-es",
        "jina-v2-de",
        "jina-v2-code",
        "gigachat",
        "roberta-bpe",
        "trillion",
    ),
    PreTokenizer((r"\p{N}", _GPT2)): (
        "smollm",
        "starcoder",
        "refact",
        "command-r",
        "codeshell",
        "exaone",
        "minerva-7b",
    ),
    PreTokenizer((_LLAMA3,), True): ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral"),
    PreTokenizer((_LLAMA3,)): ("dbrx", "smaug-bpe", "chatglm-bpe", "glm4"),
    PreTokenizer((_QWEN2,)): ("qwen2", "deepseek-r1-qwen", "stablelm2", "hunyuan", "megrez"),
    PreTokenizer((_TEKKEN,), True): ("tekken",),
    PreTokenizer((_GPT4O,)): ("gpt-4o", "llama4"),
}

PRETOKENIZERS: dict[str, PreTokenizer] = {name: pre for pre, names in _GROUPS.items() for name in names}
