"""Object files of jitted functions in a directory, with the SHA-256 of their bytes. Knows nothing of numba.

NAME.o        an ELF relocatable object (object_code.py)
NAME.symbol   the name of the function in it, and the object's SHA-256; written last: without it nothing is stored
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

from pipeline.native.object_code import ObjectCode, ObjectCodeError


def symbol_path(directory: Path, name: str) -> Path:
    """Exists if the function is stored."""
    return directory / f"{name}.symbol"


def store(directory: Path, name: str, code: bytes, symbol: str) -> None:
    """Store a function. Several processes may do so at once."""
    described = f"{symbol} {hashlib.sha256(code).hexdigest()}"
    with _locked(directory):  # two that compile a function get other bytes
        for path, data in ((directory / f"{name}.o", code), (symbol_path(directory, name), described.encode())):
            part = path.with_name(f".{path.name}.{os.getpid()}")
            part.write_bytes(data)
            part.replace(path)


def load(directory: Path, name: str) -> tuple[ObjectCode, int]:
    """The code of a stored function, and its address; the caller keeps the code as long as it is called.

    Removes what is damaged. Raises `ObjectCodeError`.
    """
    path = symbol_path(directory, name)
    try:
        try:
            symbol, digest, raw = _read(directory, name)
        except ObjectCodeError:
            with _locked(directory):  # another process may store the function again just now
                symbol, digest, raw = _read(directory, name)
        code = ObjectCode(raw)
        code.digest = digest
        return code, code.address(symbol)
    except (OSError, ValueError, ObjectCodeError) as error:
        if not isinstance(error, OSError):  # it may be readable the next time
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
        raise ObjectCodeError(f"kernel {name!r} in {directory} cannot be loaded: {error}") from None


def _read(directory: Path, name: str) -> tuple[str, str, bytes]:
    """The function's name, and SHA-256 and bytes of its object. Raises `ObjectCodeError`, `OSError`, `ValueError`."""
    symbol, digest = symbol_path(directory, name).read_text().split()
    raw = (directory / f"{name}.o").read_bytes()
    if hashlib.sha256(raw).hexdigest() != digest:
        raise ObjectCodeError("its bytes are not those that were stored")
    return symbol, digest, raw


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Keep other processes from storing functions there; where the file system has no locks, it does not."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)
