"""Fill in the middle: the tokens by which a model completes the place between a prefix and a suffix.

A file names them in its metadata (`tokenizer.ggml.fim_pre_token_id` and so on).  In files that do not, they are found
by the names that the families of models give these tokens.  Pure.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import NamedTuple


class FillInMiddle(NamedTuple):
    """Token ids. `ends`: they end a text that is filled in, besides the model's own ends."""

    prefix: int
    suffix: int
    middle: int
    ends: tuple[int, ...] = ()

    def prompt(self, before: array[int], after: array[int], bos: int) -> array[int]:
        """Return the prompt for the text between two others; `bos` -1: it has no BOS token."""
        begin = [bos, self.prefix] if bos >= 0 else [self.prefix]
        return array("i", [*begin, *before, self.suffix, *after, self.middle])


class _Names(NamedTuple):
    """How a family of models calls the tokens."""

    prefix: str
    suffix: str
    middle: str
    ends: tuple[str, ...] = ()


# By the models' own documentation. The order of the prompt is the same for all: prefix, suffix, middle.
_FAMILIES = (
    # Qwen2.5-Coder, Qwen3-Coder, CodeGemma
    _Names(
        "<|fim_prefix|>",
        "<|fim_suffix|>",
        "<|fim_middle|>",
        ("<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<|file_separator|>"),
    ),
    _Names("<fim_prefix>", "<fim_suffix>", "<fim_middle>", ("<fim_pad>", "<file_sep>")),  # StarCoder, Granite code
    _Names("<fim-prefix>", "<fim-suffix>", "<fim-middle>", ("<fim-pad>",)),  # SantaCoder
    _Names("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    _Names("▁<PRE>", "▁<SUF>", "▁<MID>", ("▁<EOT>",)),  # Code Llama
    _Names("<PRE>", "<SUF>", "<MID>", ("<EOT>",)),
    _Names("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM
)


def find_fill_in_middle(
    special: Mapping[str, int], size: int, given: Sequence[int], ends: Sequence[int]
) -> FillInMiddle | None:
    """Return a vocabulary's tokens; None if it has none.

    special: control and user-defined tokens by name.  size: of the vocabulary.
    given: ids of prefix, suffix and middle in the file's metadata, -1 where missing; `ends`: those that the file gives
    to end such a text.
    """
    if len(given) == 3 and all(0 <= token < size for token in given):
        prefix, suffix, middle = given
        return FillInMiddle(prefix, suffix, middle, tuple(dict.fromkeys(token for token in ends if 0 <= token < size)))
    for names in _FAMILIES:
        if {names.prefix, names.suffix, names.middle} <= special.keys():
            known_ends = [*(special[name] for name in names.ends if name in special), *ends]
            return FillInMiddle(
                special[names.prefix], special[names.suffix], special[names.middle], tuple(dict.fromkeys(known_ends))
            )
    return None
