"""The key file of tcp:// edges: made once, private, never half-written, refused when it is damaged or readable."""

from __future__ import annotations

import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import zmq

from pipeline.errors import ConfigError
from pipeline.ipc import edge_keys

LOAD = """
import sys
from pathlib import Path
from pipeline.ipc import edge_keys
sys.stdin.readline()
print(edge_keys.load_or_create(Path(sys.argv[1])).binder.secret)
"""


def test_keys_are_made_once_and_only_for_this_user(tmp_path: Path) -> None:
    directory = tmp_path / "state"
    made = edge_keys.load_or_create(directory)
    path = directory / edge_keys.FILE_NAME
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert [one.name for one in directory.iterdir()] == [edge_keys.FILE_NAME]
    assert edge_keys.load_or_create(directory) == made
    assert zmq.curve_public(made.binder.secret.encode()).decode() == made.binder.public
    assert len({made.binder.public, made.binder.secret, made.connector.public, made.connector.secret}) == 4
    assert made.binder.secret not in repr(made)
    assert edge_keys.generate() != made


def test_processes_that_start_at_once_agree(tmp_path: Path) -> None:
    command = [sys.executable, "-c", LOAD, str(tmp_path)]
    processes = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in range(6)]
    for process in processes:
        assert process.stdin is not None
        process.stdin.write(b"\n")
        process.stdin.flush()
    found = {process.communicate(timeout=60)[0] for process in processes}
    assert found == {edge_keys.load_or_create(tmp_path).binder.secret.encode() + b"\n"}


@pytest.mark.parametrize("call", ["write", "fsync", "rename"])
def test_a_process_killed_while_it_makes_the_file_leaves_none_that_counts(tmp_path: Path, call: str) -> None:
    kill = f"""
import os, signal, sys
from pathlib import Path
from pipeline.ipc import edge_keys
def die(*args):
    os.kill(os.getpid(), signal.SIGKILL)
if {call!r} == "write":
    os.fdopen = die
else:
    os.{call} = die
edge_keys.load_or_create(Path(sys.argv[1]))
"""
    done = subprocess.run([sys.executable, "-c", kill, str(tmp_path)], check=False)
    assert done.returncode == -signal.SIGKILL
    assert not (tmp_path / edge_keys.FILE_NAME).exists()
    made = edge_keys.load_or_create(tmp_path)
    assert [one.name for one in tmp_path.iterdir()] == [edge_keys.FILE_NAME]
    assert edge_keys.load_or_create(tmp_path) == made


def test_a_file_that_others_can_read_is_refused(tmp_path: Path) -> None:
    edge_keys.load_or_create(tmp_path)
    path = tmp_path / edge_keys.FILE_NAME
    path.chmod(0o640)
    with pytest.raises(ConfigError, match=r"edge-keys.json has mode 640 .* remove it .*, or chmod 600 it"):
        edge_keys.load_or_create(tmp_path)
    path.unlink()
    path.mkdir(mode=0o700)
    with pytest.raises(ConfigError, match="expected a file"):
        edge_keys.load_or_create(tmp_path)


@pytest.mark.parametrize("damage", [b"", b"{}", b'{"binder"', b"\xff" * 100])
def test_a_damaged_file_is_refused_and_not_replaced(tmp_path: Path, damage: bytes) -> None:
    edge_keys.load_or_create(tmp_path)
    path = tmp_path / edge_keys.FILE_NAME
    path.write_bytes(damage)
    with pytest.raises(ConfigError, match="holds no valid key pairs; copy it again .* or remove it"):
        edge_keys.load_or_create(tmp_path)
    assert path.read_bytes() == damage


def test_a_public_key_of_another_pair_is_refused(tmp_path: Path) -> None:
    made, other = edge_keys.load_or_create(tmp_path), edge_keys.generate()
    path = tmp_path / edge_keys.FILE_NAME
    path.write_text(path.read_text().replace(made.binder.public, other.binder.public))
    with pytest.raises(ConfigError, match="no valid key pairs"):
        edge_keys.load_or_create(tmp_path)


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"edge-keys.json cannot be read or made: Not a directory; .*state_dir"):
        edge_keys.load_or_create(tmp_path / "file" / "state")
