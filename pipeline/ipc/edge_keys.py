"""Key file of tcp:// edges: two CURVE key pairs that all processes of a server share.

    STATE_DIR/edge-keys.json   0600, one JSON object
    ├── binder      key pair of the binding side (ROUTER); connecting sides know its public key
    └── connector   key pair of the connecting side (DEALER); binding sides admit only its public key

The file is made by the first process that needs it, under a lock, and placed by rename: of several processes that start
at once one generates the keys and the others read them.  Keys are Z85 text, as in every CURVE implementation.
"""

from __future__ import annotations

import fcntl
import os
import stat
from pathlib import Path

import msgspec
import zmq

from pipeline.errors import ConfigError
from pipeline.files import sync_directory, temporary_path
from shm.decoding import DECODE_ERRORS

FILE_NAME = "edge-keys.json"
_MOST_BYTES = 4096  # of the file


class KeyPair(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A CURVE key pair: 40 characters of Z85 each."""

    public: str
    secret: str

    def __repr__(self) -> str:
        return f"KeyPair(public={self.public!r})"


class EdgeKeys(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The keys of both sides of every tcp:// edge."""

    binder: KeyPair
    connector: KeyPair


def generate() -> EdgeKeys:
    """New keys. Raises `ConfigError` when libzmq lacks CURVE."""
    if not zmq.has("curve"):
        raise ConfigError("edges: tcp:// needs CURVE, which this libzmq lacks; use ipc:// edges or a wheel of pyzmq")
    return EdgeKeys(_generate_pair(), _generate_pair())


def load_or_create(directory: Path) -> EdgeKeys:
    """The keys in `directory`, which are generated if there are none. Raises `ConfigError`."""
    path = directory / FILE_NAME
    try:
        try:
            return _read(path)
        except FileNotFoundError:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            try:
                return _read(path)
            except FileNotFoundError:
                return _create(path)
        finally:
            os.close(fd)
    except OSError as error:
        raise ConfigError(
            f"edges: {path} cannot be read or made: {error.strerror}; tcp:// edges need its keys: mend the directory "
            f"(server.state_dir) or use ipc:// edges",
            param="server.state_dir",
        ) from None


def _generate_pair() -> KeyPair:
    public, secret = zmq.curve_keypair()
    return KeyPair(public.decode(), secret.decode())


def _create(path: Path) -> EdgeKeys:
    """Called under the lock, so that no other process writes the temporary file. Raises `OSError`."""
    keys = generate()
    temporary = temporary_path(path)
    temporary.unlink(missing_ok=True)  # of a process that was killed here
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(msgspec.json.format(msgspec.json.encode(keys)) + b"\n")
        file.flush()
        os.fsync(fd)
    os.rename(temporary, path)
    sync_directory(path.parent)
    return keys


def _read(path: Path) -> EdgeKeys:
    """Raises `FileNotFoundError`, `OSError`, `ConfigError` (readable for others, damaged)."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode) or info.st_uid != os.getuid() or stat.S_IMODE(info.st_mode) & 0o077:
            raise ConfigError(
                f"edges: {path} has mode {stat.S_IMODE(info.st_mode):o} and owner {info.st_uid}, expected a file of "
                f"user {os.getuid()} that only this user can read: its keys may be known; remove it to make new ones, "
                f"or chmod 600 it"
            )
        raw = os.read(fd, _MOST_BYTES)
    finally:
        os.close(fd)
    try:
        keys = msgspec.json.decode(raw, type=EdgeKeys)
        is_valid = all(_public_of(pair) == pair.public for pair in (keys.binder, keys.connector))
    except (*DECODE_ERRORS, ValueError, zmq.ZMQError):
        is_valid = False
    if not is_valid:
        raise ConfigError(
            f"edges: {path} holds no valid key pairs; copy it again from the machine that made it, or remove it to "
            f"make new ones"
        )
    return keys


def _public_of(pair: KeyPair) -> str:
    return bytes(zmq.curve_public(pair.secret.encode())).decode()
