"""Commands without standard streams, a working directory, a home or a writable disk: one message, no traceback."""

from __future__ import annotations

import os
import pty
import pwd
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.blobs.address import open_without_credentials
from pipeline.blobs.folder import FolderStore
from pipeline.config import paths
from pipeline.config.load import find_file, resolve
from pipeline.config.schema import ModelConfig
from pipeline.config.user_home import expand_user
from pipeline.errors import ConfigError
from pipeline.models import store
from pipeline.tls.certificate import files_of

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 240


def command(script: str, *words: str, cwd: Path | None = None, **env: str) -> subprocess.CompletedProcess[str]:
    """The real command, which `script` runs as "$@"."""
    return subprocess.run(
        ["bash", "-c", script, "bash", sys.executable, "-m", "starling", *words],
        env={**os.environ, "PYTHONPATH": str(ROOT), **env},
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- 2>&-", "<&- >&- 2>&-"])
def test_a_closed_standard_stream_is_an_empty_one(home: Path, closed: str) -> None:
    done = command(f'"$@" {closed}', "run", "absent", "hello")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    if "2>" not in closed:
        assert "absent" in done.stderr


def test_children_inherit_the_streams_that_were_missing(home: Path) -> None:
    code = """if True:
        import os, subprocess, sys
        from starling.cli.run_command import run_program
        def check():
            child = "import os; [os.fstat(number) for number in range(3)]"
            return subprocess.call([sys.executable, "-c", child], close_fds=True)
        run_program(check)
    """
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    script = ["bash", "-c", '"$@" <&- >&- 2>&-', "bash", sys.executable, "-c", code]
    assert subprocess.run(script, env=env, timeout=LIMIT_S, check=False).returncode == 0


def test_a_deleted_working_directory_has_no_configuration(home: Path, tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    done = command('rmdir ../gone; "$@"', "config", "--json", cwd=tmp_path / "gone")
    assert (done.returncode, done.stderr) == (0, "")
    (tmp_path / "gone").mkdir()
    done = command('rmdir ../gone; "$@"', "config", cwd=tmp_path / "gone", STARLING_HOME="relative")
    assert done.returncode == 78
    assert done.stderr.startswith("starling: the working directory has been deleted")


CODES = {"ENOSPC": 78, "EROFS": 78, "EIO": 1}


@pytest.mark.parametrize("name", CODES)
def test_an_error_of_the_file_system_is_one_message(home: Path, tmp_path: Path, name: str) -> None:
    code = f"""if True:
        import errno, os
        from starling.cli.run_command import run_program
        def fail():
            raise OSError(errno.{name}, os.strerror(errno.{name}), "/some/file")
        run_program(fail)
    """
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    line = [sys.executable, "-c", code]
    done = subprocess.run(line, env=env, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (CODES[name], 1)
    assert done.stderr.startswith("starling: /some/file: ")


def test_an_empty_home_is_that_of_the_user_database(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "")
    own = Path(pwd.getpwuid(os.getuid()).pw_dir)
    assert paths.home({"HOME": ""}) == own / ".starling"
    assert paths.home({}) == own / ".starling"
    assert paths.home({"HOME": "", "STARLING_HOME": "~/x"}) == own / "x"
    config = resolve({"server": {"run_dir": "~/r", "tls_cert": "~/c", "tls_key": "~/k"}}, {})
    assert paths.run_dir(config) == own / "r"
    assert (files := files_of(config)) is not None and files.cert == str(own / "c")
    assert store.gguf_path(ModelConfig(name="m", path="file://~/m.gguf"), Path("models")) == own / "m.gguf"
    assert find_file(env={"HOME": "", "STARLING_CONFIG": "~/x.yaml"}) == own / "x.yaml"
    blobs = open_without_credentials(config, ["~/b"])[0]
    assert isinstance(blobs, FolderStore) and blobs.path("catalog/m.json") == own / "b" / "catalog" / "m.json"


def test_without_any_home_the_error_names_the_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.setattr("pwd.getpwuid", refuse)
    for env in ({}, {"HOME": ""}):
        with pytest.raises(ConfigError, match="set HOME or STARLING_HOME"):
            paths.home(env)
        with pytest.raises(ConfigError, match="set HOME, or write the whole path"):
            expand_user("~/x", env)
        with pytest.raises(ConfigError, match="no such user"):
            paths.home({"STARLING_HOME": "~no-such-user/x", **env})
    assert paths.home({"STARLING_HOME": "/data"}) == Path("/data")
    monkeypatch.delenv("HOME", raising=False)
    with pytest.raises(ConfigError, match=r"server\.state_dir = '~/x'"):
        resolve({"server": {"state_dir": "~/x"}}, {"STARLING_HOME": "/data"})


EDITOR = """
from starling.cli.chat import _Editor
print(ascii(_Editor(None).line(False)))
"""


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
def test_a_line_that_is_not_utf8_is_asked_for_again(errors: str) -> None:
    """`surrogateescape` is what Python has in the locales C and C.UTF-8."""
    own, terminal = pty.openpty()
    env = {**os.environ, "PYTHONPATH": str(ROOT), "LC_ALL": "C.UTF-8", "PYTHONIOENCODING": f"utf-8:{errors}"}
    env["TERM"] = "dumb"
    with subprocess.Popen(
        [sys.executable, "-c", EDITOR], env=env, stdin=terminal, stdout=terminal, stderr=terminal
    ) as process:
        os.close(terminal)
        shown = b""
        for wanted, typed in (
            (b">>> ", b"a\xff\xfeb\r"),
            (b"is not UTF-8", b""),
            (b">>> ", b"coffee\r"),
            (b"'coffee'", b""),
        ):
            while wanted not in shown:
                shown += os.read(own, 4096)  # EIO: the process has ended
            shown = shown.partition(wanted)[2]
            os.write(own, typed)
        assert process.wait(LIMIT_S) == 0
    os.close(own)
