"""The Unix socket of the gateway: its mode, its lock, and what a dead server has left."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.config.load import resolve
from pipeline.errors import ConfigError
from pipeline.supervise.unix_listener import MAX_PATH, UnixListener, peer_uid


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A short one, relative to the test's directory."""
    monkeypatch.chdir(tmp_path)
    return Path("api.sock")


@pytest.mark.parametrize("mode", [0o600, 0o660, 0o666])
def test_the_socket_has_its_mode_and_is_removed_at_the_end(path: Path, mode: int) -> None:
    before = os.umask(0o077)
    try:
        listener = UnixListener(path, mode)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == mode
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
        accepted, _ = listener.socket.accept()
        with accepted:
            assert peer_uid(accepted) == os.getuid()
    listener.close()
    assert not path.exists()


def test_a_second_server_is_refused_and_takes_nothing(path: Path) -> None:
    listener = UnixListener(path, 0o600)
    with pytest.raises(ConfigError, match="another server listens on api.sock"):
        UnixListener(path, 0o600)
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
    listener.close()


def test_what_a_killed_server_has_left_is_replaced(path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from pipeline.supervise.unix_listener import UnixListener\n"
        "held = UnixListener(Path(sys.argv[1]), 0o600); print(flush=True); time.sleep(600)"
    )
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, env=env) as other:
        assert other.stdout is not None
        other.stdout.readline()
        with pytest.raises(ConfigError, match="another server"):
            UnixListener(path, 0o600)
        other.send_signal(signal.SIGKILL)
    assert path.exists()
    UnixListener(path, 0o600).close()


@pytest.mark.parametrize("kind", ["file", "directory", "link"])
def test_anything_but_a_socket_stays(path: Path, kind: str) -> None:
    match kind:
        case "file":
            path.write_text("mine")
        case "directory":
            path.mkdir()
        case "link":
            path.symlink_to("elsewhere")
    with pytest.raises(ConfigError, match="is no socket of user"):
        UnixListener(path, 0o600)
    assert path.is_symlink() or path.exists()


def test_a_directory_that_does_not_exist_is_named(path: Path) -> None:
    with pytest.raises(ConfigError, match="missing/api.sock.lock cannot be made: No such file"):
        UnixListener(Path("missing") / path, 0o600)


@pytest.mark.parametrize(
    ("server", "words"),
    [
        ({"host": ""}, "server.host.*only with server.unix_socket may it be empty"),
        ({"unix_socket": "/" + "x" * MAX_PATH}, "server.unix_socket.*more than 107 bytes"),
        ({"unix_socket": "/s", "unix_socket_mode": "abc"}, "server.unix_socket_mode"),
        ({"unix_socket": "/s", "host": "", "tls_cert": "/c", "tls_key": "/k"}, "no TLS on the Unix socket"),
        ({"tls_client_ca": "/a"}, "server.tls_client_ca.*needs TLS"),
        ({"tls_client_ca": "/a", "tls_cert": "/c", "tls_key": "/k"}, "set it too"),
    ],
)
def test_combinations_that_cannot_work_are_refused(server: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        resolve({"server": server}, {})
