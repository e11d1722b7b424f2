"""Special tokens that take the white space beside them because of a model's name, as llama.cpp has it.

A GGUF file has no key for this.  Independent of how texts are encoded.
"""

from __future__ import annotations

from collections.abc import Iterable

_PHI3 = ("phi-3", "phi3")
_JINA = ("jina-v2-de", "jina-v2-es", "jina-v2-code")
_MODERN_BERT = "modern-bert"
_LEFT_ALONE = frozenset({"<unk>", "<s>", "<|endoftext|>"})  # of Phi-3
Ids = tuple[int, ...]


def has_named_stripping(name: str, pre: str) -> bool:
    """Whether `named_stripping` depends on the tokens of a model with this name and pre-tokenizer."""
    return _is_phi3(name) or _mask(name, pre) is not None


def named_stripping(name: str, pre: str, special: Iterable[tuple[str, int]]) -> tuple[Ids, Ids]:
    """Return the ids that take the white space behind them, and those that take what is before them.

    name: `general.name`.  pre: `tokenizer.ggml.pre`.  special: texts and ids of the control, unknown and user-defined
    tokens.
    """
    if (mask := _mask(name, pre)) is not None:
        return (), tuple(i for text, i in special if text == mask)
    if _is_phi3(name):
        return tuple(i for text, i in special if text not in _LEFT_ALONE), ()
    return (), ()


def _is_phi3(name: str) -> bool:
    return any(part in name.lower() for part in _PHI3)


def _mask(name: str, pre: str) -> str | None:
    """The mask token, of models where it takes the white space before it."""
    if any(part in pre for part in _JINA):
        return "<mask>"
    return "[MASK]" if _MODERN_BERT in name.lower() and not _is_phi3(name) else None
