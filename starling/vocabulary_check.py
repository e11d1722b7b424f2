"""Compares the vocabulary that was read from a Hugging Face directory with the directory's own tokenizer."""

from __future__ import annotations

import logging
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


_BESIDE = "word{}word\n{}\n word {} word\n\n{}"  # {}: a special token, between words and white space

log = logging.getLogger("starling.checkpoint")


def check_vocabulary(data: TokenizerData, directory: Path) -> None:
    """Raise `ConfigError` unless both give the same ids for some texts, without and with special tokens."""
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

        def differs(text: str, parse_special: bool) -> str:
            expected = tokenizer_library.encode(theirs, path, text, False).ids
            return _difference(data, text, ours.encode(text, parse_special), expected)

        for text in _TEXTS:
            if difference := differs(text, False):
                raise ConfigError(
                    f"{path}: {difference}; name another pre-tokenizer (models[].pretokenizer, or "
                    "--pretokenizer of starling ingest), or use another model",
                    "pretokenizer",
                )
        is_normalized = {token.content: token.normalized for token in theirs.get_added_tokens_decoder().values()}
        for name in filter(is_normalized.__contains__, ours.control_names):
            difference = differs(_BESIDE.replace("{}", name), True)
            # Normalized names are searched for in a text that has been changed; models in use have such tokens.
            if difference and is_normalized[name]:
                log.warning("a special token has other ids", extra={"path": str(path), "reason": difference})
            elif difference:
                raise ConfigError(
                    f"{path}: special token {name[:60]!r} is not found as the file says: {difference}; use another "
                    f"model",
                    "model",
                )
    except CheckpointDirectoryError as error:
        raise ConfigError(str(error), "model") from None


def _difference(data: TokenizerData, text: str, found: list[int], expected: list[int]) -> str:
    """What is different; "": nothing."""
    if found == expected:
        return ""
    at = next((i for i, (a, b) in enumerate(zip(found, expected)) if a != b), min(len(found), len(expected)))
    return (
        f"{text!r} has the ids {_shown(found, at)} by the vocabulary that was read ({data.model}, {data.pre}) and "
        f"{_shown(expected, at)} by the file, from token {at} on"
    )


def _shown(ids: list[int], at: int) -> str:
    return str(ids[max(0, at - 1) : at + 3])
