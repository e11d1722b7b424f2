"""The secret that agents and orchestrators share: a file, and the header `Authorization: Bearer TOKEN`.

The first process that needs the file makes it, readable for its user alone, and places it in one step: of several that
start at once, all use the same one.  On other machines the operator puts a copy of it.

A scraper gets a token that is computed from it and that opens `/metrics` alone.  The chart of Kubernetes and the
documentation compute the same one.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import re
import secrets
import stat
from pathlib import Path

from pipeline.errors import ConfigError, Unauthenticated
from pipeline.files import make_directory, sync_directory

_TOKEN = re.compile(r"[!-~]{32,256}")
_MOST_BYTES = 4096  # of the file


def load_or_create(path: Path) -> str:
    """The token in `path`, which is made if it does not exist. Raises `ConfigError`."""
    try:
        try:
            return _read(path)
        except FileNotFoundError:
            make_directory(path.parent)
            _create(path)
            return _read(path)
    except OSError as error:
        raise ConfigError(
            f"fleet.token: {path} cannot be read or made: {error.strerror}; mend the directory, or set fleet.token",
            "fleet.token",
        ) from None


def load(path: Path) -> str:
    """The token in `path`; "" if there is no file. Raises `ConfigError`."""
    try:
        return _read(path)
    except FileNotFoundError:
        return ""
    except OSError as error:
        raise ConfigError(f"fleet.token: {path} cannot be read: {error.strerror}", "fleet.token") from None


def authorization(token: str) -> dict[str, str]:
    """The header with which a request carries the token."""
    return {"Authorization": f"Bearer {token}"}


def is_carried(header: str | None, token: str) -> bool:
    """Whether the header carries the token; False for "". Takes constant time."""
    scheme, _, given = (header or "").partition(" ")
    presented = given.strip().encode("utf-8", "surrogateescape")
    is_equal = hmac.compare_digest(presented, token.encode())
    return is_equal and bool(token) and scheme.lower() == "bearer"


def for_metrics(token: str) -> str:
    """The token that reads metrics; "" of "". The fleet's token cannot be computed from it: that is a random one."""
    return hashlib.sha256(f"starling-metrics:{token}".encode()).hexdigest() if token else ""


def reads_metrics(header: str | None, token: str) -> bool:
    """Whether the header carries the fleet's token `token`, or the one for its metrics. Takes constant time."""
    found = [is_carried(header, one) for one in (token, for_metrics(token))]
    return any(found)


def check(header: str | None, token: str) -> None:
    """Raise `Unauthenticated` unless the header `Authorization` carries the token ("": none is accepted).

    Takes constant time.
    """
    if not header:
        raise Unauthenticated("no token: send the header Authorization: Bearer TOKEN with the contents of fleet.token")
    if not token:
        raise Unauthenticated("no token is accepted here: use TLS (fleet.tls)")
    if not is_carried(header, token):
        raise Unauthenticated("unknown token; all machines of a fleet need the same file fleet.token")


def _create(path: Path) -> None:
    """Place a new token unless another process has done so. Raises `OSError`."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(fd, "w") as file:
            file.write(secrets.token_urlsafe(32) + "\n")
            file.flush()
            os.fsync(fd)
        with contextlib.suppress(FileExistsError):
            os.link(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_directory(path.parent)


def _read(path: Path) -> str:
    """Raises `OSError`, `ConfigError` (readable for others, or no token)."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        info = os.fstat(fd)
        mode = stat.S_IMODE(info.st_mode)
        if not stat.S_ISREG(info.st_mode) or info.st_uid != os.getuid() or mode & 0o077:
            raise ConfigError(
                f"fleet.token: {path} has mode {mode:o} and owner {info.st_uid}, expected a file of user {os.getuid()} "
                f"that only this user can read: chmod 600 it, or remove it on all machines to make a new one",
                "fleet.token",
            )
        token = os.read(fd, _MOST_BYTES).decode("ascii", "replace").strip()
    finally:
        os.close(fd)
    if not _TOKEN.fullmatch(token):
        raise ConfigError(
            f"fleet.token: {path} has no token: expected one line of 32 to 256 printable characters without spaces",
            "fleet.token",
        )
    return token
