"""A vocabulary of all 256 bytes and three merges, small enough to build in each test."""

from __future__ import annotations

from pipeline.models.vocabulary_tables import byte_alphabet
from stages.tokenizer.vocabulary import TokenizerSpec

ALPHABET = {byte: character for character, byte in byte_alphabet().items()}


def byte_spec(**changes: object) -> TokenizerSpec:
    """All 256 bytes, three merges, three special tokens."""
    words = ["<s>", "</s>", "<tool>", *(ALPHABET[b] for b in range(256)), "he", "ll", "hell"]
    types = [3, 3, 4] + [1] * 259
    spec = TokenizerSpec("gpt2", "gpt-2", words, types, ["h e", "l l", "he ll"], bos=0, eos=1)
    return spec._replace(**changes)
