"""Typed access to a JSON file of a checkpoint directory, with errors that name the file and the field."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from pipeline.models.model_directory import MAX_SMALL_BYTES
from shm.decoding import DECODE_ERRORS

_MAX_INTEGER, _MAX_NUMBER = 1 << 40, 1e30  # closer bounds are those of the graph
UNSUPPORTED = "this model cannot be served; use another one"


class CheckpointDirectoryError(ValueError):
    """A Hugging Face checkpoint cannot be used. The message names file, field or tensor, value, bound and remedy."""


class Config:
    """The object of a JSON file. `path` names it in messages."""

    def __init__(self, path: Path, fields: dict[str, Any], prefix: str = "") -> None:
        self.path, self.fields, self._prefix = path, fields, prefix

    def _label(self, key: str) -> str:
        return f"{self.path}: {self._prefix}{key}"

    def has(self, key: str) -> bool:
        """Whether the field is there and not null."""
        return self.fields.get(key) is not None

    def _get(self, key: str, kind: type, shown: str, default: Any) -> Any:
        value = self.fields.get(key)
        value = default if value is None else value
        if value is None:
            raise CheckpointDirectoryError(f"{self._label(key)} is missing, expected {shown}; fetch the file again")
        kinds = (int, float) if kind is float else kind
        if not isinstance(value, kinds) or (isinstance(value, bool) and kind is not bool):
            raise CheckpointDirectoryError(f"{self._label(key)} is {str(value)[:60]!r}, expected {shown}")
        return value

    def _bounded(self, key: str, value: Any, most: float) -> Any:
        if not -most <= value <= most:
            raise CheckpointDirectoryError(f"{self._label(key)} is {str(value)[:60]}, expected at most {most:g}")
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        """A whole number."""
        return int(self._bounded(key, self._get(key, int, "a whole number", default), _MAX_INTEGER))

    def number(self, key: str, default: float | None = None) -> float:
        """A number."""
        return float(self._bounded(key, self._get(key, float, "a number", default), _MAX_NUMBER))

    def flag(self, key: str, default: bool) -> bool:
        """True or false."""
        return bool(self._get(key, bool, "true or false", default))

    def text(self, key: str, default: str | None = None) -> str:
        """A text."""
        return str(self._get(key, str, "a text", default))

    def items(self, key: str, default: list[Any] | None = None) -> list[Any]:
        """A list."""
        return list(self._get(key, list, "a list", default))

    def table(self, key: str) -> Config:
        """An object within this one; one without fields if it is missing."""
        return Config(self.path, self._get(key, dict, "an object", {}), f"{self._prefix}{key}.")

    def refuse(self, key: str, expected: str) -> CheckpointDirectoryError:
        """The error for a value that cannot be served."""
        return CheckpointDirectoryError(
            f"{self._label(key)} is {str(self.fields.get(key))[:60]!r}, expected {expected}; {UNSUPPORTED}"
        )


def check_size(path: Path) -> None:
    """Raise `CheckpointDirectoryError` if a file is too large to be read at once; `OSError`."""
    size = path.stat().st_size
    if size > MAX_SMALL_BYTES:
        raise CheckpointDirectoryError(f"{path} has {size:,} bytes, expected at most {MAX_SMALL_BYTES:,}")


def read(path: Path) -> Config | None:
    """The object of a JSON file; None if there is no such file. Raises `CheckpointDirectoryError`, `OSError`."""
    fields = _decoded(path, dict[str, Any], "object")
    return None if fields is None else Config(path, fields)


def read_list(path: Path) -> list[Config] | None:
    """The objects that a JSON file lists; None if there is no such file. Raises as `read`."""
    entries = _decoded(path, list[dict[str, Any]], "list of objects")
    return None if entries is None else [Config(path, one, f"[{i}].") for i, one in enumerate(entries)]


def _decoded(path: Path, kind: Any, shown: str) -> Any:
    try:
        check_size(path)
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except FileNotFoundError:
        return None
    except DECODE_ERRORS as error:
        raise CheckpointDirectoryError(f"{path} is not a JSON {shown} ({error}); fetch the file again") from None
