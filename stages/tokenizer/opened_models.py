"""Vocabulary and chat template of a checkpoint, built from its index once per process."""

from __future__ import annotations

from pathlib import Path

from pipeline.errors import ModelUnavailable
from pipeline.protocol import messages as m
from shm.checkpoint import CheckpointError, load_index
from stages.tokenizer.service import TokenizerModel
from stages.tokenizer.template import ChatTemplate
from stages.tokenizer.vocabulary import TokenizerSpec, Vocabulary

_opened: dict[Path, TokenizerModel] = {}  # by index file: a checkpoint is immutable


def open_model(index_path: Path) -> TokenizerModel:
    """Build vocabulary and template from a checkpoint's index. Raises `StarlingError`.

    The result is cached: versions of a model with the same checkpoint share it, and so do `preload` and the stage.
    """
    if index_path in _opened:
        return _opened[index_path]
    try:
        index = load_index(index_path)
    except (CheckpointError, OSError) as error:
        raise ModelUnavailable(str(error), param="model") from None
    t = index.tokenizer
    vocabulary = Vocabulary(TokenizerSpec(t.model, t.pre, t.tokens, t.types, t.merges, t.bos, t.eos, t.eot, t.add_bos))
    template = None
    if t.chat_template:
        bos, eos = (vocabulary.token_bytes(i).decode("utf-8", "replace") for i in (t.bos, t.eos))
        template = ChatTemplate(t.chat_template, bos, eos, control_names=vocabulary.control_names)
    described = m.Described(
        "",
        "",
        index.digest,
        vocabulary.size,
        index.hyper.context_length,
        vocabulary.eos_ids,
        template is not None,
        index.architecture,
        index.parameters,
        int(index_path.stat().st_mtime),
        index.tokenizer_digest,
    )
    model = _opened[index_path] = TokenizerModel(vocabulary, template, described)
    return model


def is_open(index_path: Path) -> bool:
    """Whether `open_model` would return at once."""
    return index_path in _opened


def close_except(digests: set[str]) -> None:
    """Forget the checkpoints of other digests."""
    for path in [path for path in _opened if path.stem not in digests]:
        _opened.pop(path, None)
