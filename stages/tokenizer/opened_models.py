"""Vocabulary and chat template of a checkpoint, built from its index once per process."""

from __future__ import annotations

import logging
from pathlib import Path

from pipeline.errors import ModelUnavailable, StarlingError
from pipeline.protocol import messages as m
from shm.checkpoint import CheckpointError, Index, load_index
from stages.tokenizer.service import TokenizerModel
from stages.tokenizer.template import ChatTemplate
from stages.tokenizer.vocabulary import TokenizerSpec, Vocabulary

log = logging.getLogger("starling.tokenizer")

_opened: dict[Path, TokenizerModel] = {}  # by index file: a checkpoint is immutable
_unusable: dict[Path, tuple[int, str]] = {}  # by index file: when it was written (ns since 1970), and what is wrong


class UnusableModel(ModelUnavailable):
    """A checkpoint's index is damaged or not supported: waiting does not help."""


def open_model(index_path: Path) -> TokenizerModel:
    """Build vocabulary and template from a checkpoint's index. Raises `ModelUnavailable`, `UnusableModel`.

    The result is cached: versions of a model with the same checkpoint share it, and so do `preload` and the stage.  A
    file that cannot be used is read again when it has changed.
    """
    if index_path in _opened:
        return _opened[index_path]
    try:
        written_ns = index_path.stat().st_mtime_ns
        known_ns, reason = _unusable.get(index_path, (0, ""))
        if known_ns == written_ns:
            raise UnusableModel(reason, param="model")
        model = _opened[index_path] = build_model(index_path)
    except OSError as error:
        raise ModelUnavailable(str(error), param="model") from None
    except UnusableModel as error:
        if index_path not in _unusable:
            log.error("a model cannot be used", extra={"path": str(index_path), "reason": error.message})
        _unusable[index_path] = written_ns, error.message
        raise
    _unusable.pop(index_path, None)
    return model


def build_model(index_path: Path) -> TokenizerModel:
    """As `open_model`, without its cache. Raises `UnusableModel` and `OSError`, whatever the file holds."""
    try:
        return _build(index_path, load_index(index_path))
    except CheckpointError as error:
        raise UnusableModel(str(error), param="model") from None
    except StarlingError as error:
        raise UnusableModel(error.message, param="model") from None
    except OSError:
        raise
    except Exception as error:  # of the library: the file is not trusted
        reason = f"{index_path}: its vocabulary cannot be used ({type(error).__name__}: {error})"
        raise UnusableModel(reason, param="model") from None


def _build(index_path: Path, index: Index) -> TokenizerModel:
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
        tool_format=template.tool_format if template is not None else "",
    )
    return TokenizerModel(vocabulary, template, described)


def is_open(index_path: Path) -> bool:
    """Whether `open_model` would return at once."""
    return index_path in _opened


def close_except(digests: set[str]) -> None:
    """Forget the checkpoints of other digests."""
    for models in (_opened, _unusable):
        for path in [path for path in models if path.stem not in digests]:
            models.pop(path, None)
