"""Writes a vocabulary into a GGUF file; alone, it is what llama.cpp loads with `vocab_only`."""

from __future__ import annotations

from pathlib import Path

import gguf

from stages.tokenizer.vocabulary import TokenizerSpec


def write_vocabulary(path: Path, spec: TokenizerSpec, name: str = "") -> Path:
    """Write a file of the vocabulary alone. Returns `path`. `name`: on which depends which tokens take white space."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name(name or "vocabulary")
    writer.add_vocab_size(len(spec.tokens))
    add_vocabulary(writer, spec)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def add_vocabulary(writer: gguf.GGUFWriter, spec: TokenizerSpec) -> None:
    """Add the `tokenizer.*` keys to a file."""
    writer.add_tokenizer_model(spec.model)
    writer.add_tokenizer_pre(spec.pre)
    writer.add_token_list(list(spec.tokens))
    writer.add_token_types(list(spec.types))
    if spec.merges or spec.model == "gpt2":
        writer.add_token_merges(list(spec.merges))
    if len(spec.scores):
        writer.add_token_scores(list(spec.scores))
    for add, value in (
        (writer.add_bos_token_id, spec.bos),
        (writer.add_eos_token_id, spec.eos),
        (writer.add_unk_token_id, spec.unknown),
        (writer.add_sep_token_id, spec.eos if spec.model == "bert" else -1),
    ):
        if value >= 0:
            add(value)
    if spec.add_bos is not None:
        writer.add_add_bos_token(spec.add_bos)
    if spec.add_space_prefix is not None:
        writer.add_add_space_prefix(spec.add_space_prefix)
    if spec.charsmap:
        writer.add_precompiled_charsmap(spec.charsmap)
    if spec.merges_spaces is not None:
        writer.add_remove_extra_whitespaces(spec.merges_spaces)
