"""The Unix socket on which the gateway listens, and the lock that makes its holder the only one.

PATH        the socket (server.unix_socket), with the mode server.unix_socket_mode from its first moment
PATH.lock   locked for as long as a process listens; what a dead server has left at PATH is removed only under it
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import stat
from pathlib import Path

from pipeline.config.schema import Config
from pipeline.config.user_home import expand_user
from pipeline.errors import ConfigError

BACKLOG = 1024
MAX_PATH = 107  # bytes, of sockaddr_un
_PARAM = "server.unix_socket"


class UnixListener:
    """A listening socket. `close` it in the process that has made it."""

    def __init__(self, path: Path, mode: int) -> None:
        """Lock, remove what a dead server has left, and listen. Raises `ConfigError`."""
        self.path = path
        self._lock = _lock(path)
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            _remove_stale(path)
            os.fchmod(self.socket.fileno(), mode)  # Linux gives the file this mode, less the umask
            self.socket.bind(str(path))
            os.chmod(path, mode)
            self.socket.listen(BACKLOG)
        except OSError as error:
            self.close()
            raise ConfigError(
                f"{_PARAM}: cannot listen on {path}: {error.strerror or error}; correct the path, or let this user "
                f"write its directory",
                _PARAM,
            ) from None
        except ConfigError:
            self.close()
            raise

    def close(self) -> None:
        """Stop listening, remove the file and release the lock."""
        listens = bool(self.socket.fileno() >= 0 and self.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
        self.socket.close()
        if listens:
            with contextlib.suppress(OSError):
                self.path.unlink()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def listener_of(config: Config) -> UnixListener | None:
    """The listener of the configuration; None without one. Raises `ConfigError`."""
    server = config.server
    if not server.unix_socket:
        return None
    return UnixListener(socket_path(config), int(server.unix_socket_mode, 8))


def socket_path(config: Config) -> Path:
    """Where the server listens; only with `server.unix_socket`."""
    return Path(os.path.abspath(expand_user(config.server.unix_socket)))


def peer_uid(connection: socket.socket) -> int:
    """The user at the other end of a connection. Raises `OSError`."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)  # pid, uid, gid
    return int.from_bytes(credentials[4:8], "little")


def _lock(path: Path) -> int:
    """A descriptor that holds the lock. The file stays: unlinking a locked file would allow two holders."""
    try:
        fd = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise ConfigError(
            f"{_PARAM}: {path}.lock cannot be made: {error.strerror}; name a path in a directory of this user", _PARAM
        ) from None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        message = f"{_PARAM}: another server listens on {path}: stop it, or name another path"
        raise ConfigError(message, _PARAM) from None
    return fd


def _remove_stale(path: Path) -> None:
    try:
        info = path.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(info.st_mode) or info.st_uid != os.getuid():
        raise ConfigError(f"{_PARAM}: {path} exists and is no socket of user {os.getuid()}: name another path", _PARAM)
    path.unlink()
