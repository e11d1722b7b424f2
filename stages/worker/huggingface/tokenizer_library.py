"""Opens `tokenizer.json` with the `tokenizers` library, whose failures become errors that name the file.

The file is not trusted.  Where the library does not check it, it panics: that is no `Exception`, and its class cannot
be imported.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tokenizers import Encoding, Tokenizer

from stages.worker.huggingface.config import CheckpointDirectoryError


def load(path: Path) -> Tokenizer:
    """The file's tokenizer, without the lengths that it fills or cuts texts to. Raises `CheckpointDirectoryError`."""
    with _failures(f"{path} cannot be read"):
        tokenizer = Tokenizer.from_file(str(path))
        tokenizer.no_padding()
        tokenizer.no_truncation()
        return tokenizer


def encode(tokenizer: Tokenizer, path: Path, text: str, with_special: bool) -> Encoding:
    """Raises `CheckpointDirectoryError`, which names the file."""
    with _failures(f"{path} cannot encode {text!r}"):
        return tokenizer.encode(text, add_special_tokens=with_special)


@contextmanager
def _failures(what: str) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise CheckpointDirectoryError(f"{what}: {str(error)[:200]}; fetch the file again") from None
