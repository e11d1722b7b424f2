"""Compares the vocabulary that was read from a Hugging Face directory with the directory's own tokenizer."""

from __future__ import annotations

from pathlib import Path

from pipeline.errors import ConfigError
from shm.checkpoint import TokenizerData

# The pre-tokenizers split these as every family does.
_TEXTS = (
    "The quick brown fox jumps over the lazy dog, and it's 3.14 o'clock.",
    "def f(x):\n    return [x + 1 for _ in range(10)]  # why?\n\n",
    "  two spaces,\ta tab and a line\nends",
    "Grüße aus Köln, naïve café",
    "привет мир, как дела",
    "你好，世界",
    "😀 → ½",
)


def check_vocabulary(data: TokenizerData, directory: Path) -> None:
    """Raise `ConfigError` unless both give the same ids for some texts, without special tokens."""
    from stages.tokenizer.opened_models import spec_of
    from stages.tokenizer.vocabulary import Vocabulary
    from stages.worker.huggingface import tokenizer_library
    from stages.worker.huggingface.config import CheckpointDirectoryError

    path = directory / "tokenizer.json"
    if not path.is_file():
        return
    ours = Vocabulary(spec_of(data))
    try:
        theirs = tokenizer_library.load(path)
        all_expected = [tokenizer_library.encode(theirs, path, text, False).ids for text in _TEXTS]
    except CheckpointDirectoryError as error:
        raise ConfigError(str(error), "model") from None
    for text, expected in zip(_TEXTS, all_expected, strict=True):
        found = ours.encode(text, parse_special=False)
        if found != expected:
            at = next((i for i, (a, b) in enumerate(zip(found, expected)) if a != b), min(len(found), len(expected)))
            raise ConfigError(
                f"{path}: {text!r} has the ids {_shown(found, at)} by the vocabulary that was read ({data.model}, "
                f"{data.pre}) and {_shown(expected, at)} by the file, from token {at} on; name another "
                f"pre-tokenizer (models[].pretokenizer, or --pretokenizer of starling ingest), or use another model",
                "pretokenizer",
            )


def _shown(ids: list[int], at: int) -> str:
    return str(ids[max(0, at - 1) : at + 3])
