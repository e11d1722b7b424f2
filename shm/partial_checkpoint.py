"""The unfinished `.bin` of an interrupted conversion, and the list of its complete tensors.

    PARTIAL/bin       tensors, as they will be in the `.bin`
    PARTIAL/tensors   JSON, a line each: first what is converted, then every tensor whose bytes are complete

A conversion goes on after the last listed tensor whose bytes have its checksum, so that neither a killed process nor a
lost power supply leads to wrong bytes.  If something else is converted than was, it starts again.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import msgspec

from shm.checkpoint import Tensor
from shm.decoding import DECODE_ERRORS
from shm.tensor_checksum import TensorChecksum

_CHUNK = 1 << 20  # bytes read at a time


class PartialCheckpoint:
    """The directory of one conversion. One process uses it at a time; the caller holds a lock."""

    def __init__(self, directory: Path, what: str) -> None:
        """`what` describes everything that the bytes depend on."""
        self.directory, self._what = directory, what
        self.bin_path = directory / "bin"
        self._list_path = directory / "tensors"
        self._list: IO[bytes] | None = None

    def open(self) -> list[Tensor]:
        """The complete tensors, in order; what follows them in the file is removed. Raises `OSError`."""
        self.directory.mkdir(parents=True, exist_ok=True)
        found = list(self._complete())
        if not found:
            self.bin_path.unlink(missing_ok=True)
        else:
            os.truncate(self.bin_path, found[-1].offset + found[-1].nbytes)
        self._list = open(self._list_path, "wb", buffering=0)  # noqa: SIM115
        self._write(self._what)
        for tensor in found:
            self.add(tensor)
        return found

    def add(self, tensor: Tensor) -> None:
        """List a tensor whose bytes were written."""
        self._write(tensor)

    def _write(self, value: object) -> None:
        assert self._list is not None
        self._list.write(msgspec.json.encode(value) + b"\n")

    def _complete(self) -> Iterator[Tensor]:
        try:
            lines = self._list_path.read_bytes().split(b"\n")
            file = open(self.bin_path, "rb")  # noqa: SIM115
        except FileNotFoundError:
            return
        with file, contextlib.suppress(*DECODE_ERRORS):  # the last line may be torn
            if msgspec.json.decode(lines[0], type=str) != self._what:
                return
            for line in lines[1:-1]:
                tensor = msgspec.json.decode(line, type=Tensor)
                if _checksum(file, tensor) != tensor.checksum:
                    return
                yield tensor

    def close(self) -> None:
        """Close the list; the files stay."""
        if self._list is not None:
            self._list.close()
            self._list = None

    def remove(self) -> None:
        """Remove all of it."""
        self.close()
        shutil.rmtree(self.directory, ignore_errors=True)


def _checksum(file: IO[bytes], tensor: Tensor) -> str:
    file.seek(tensor.offset)
    digest, left = TensorChecksum(), tensor.nbytes
    while left > 0 and (chunk := file.read(min(_CHUNK, left))):
        digest.update(chunk)
        left -= len(chunk)
    return digest.text if not left else ""
