"""What a command takes from the user's working directory: the variables in `.env`, and no module."""

from __future__ import annotations

import ast
import itertools
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import pipeline
import shm
import stages
import starling
from pipeline.config.schema import DEMO_MODEL
from stages.agent.engines import kernel_build, starling_engine
from starling.cli import env_file, stage
from starling.launchers.child import Child

ROOT = Path(__file__).resolve().parents[2]
MODULES = ("click", "json", "llvmlite", "msgspec", "numpy", "pip", "pipeline", "stages", "starling", "yaml")
TRAP = (
    "import pathlib\npathlib.Path(__file__).parents[1].joinpath('executed').write_text(__file__)\nraise SystemExit(3)\n"
)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A working directory with a module of each name, which leaves a file when it is imported."""
    folder = tmp_path / "project"
    for name in MODULES:
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text(TRAP)
    return folder


def environment(home: Path, **variables: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "STARLING_HOME": str(home), **variables}


@pytest.mark.parametrize("package", [pipeline, shm, stages, starling], ids=lambda package: package.__name__)
def test_every_python_is_started_without_the_working_directory(package: ModuleType) -> None:
    """`sys.executable` is followed by -P, or by arguments that have it."""
    wrong, files = [], 0
    for folder in package.__path__:
        for file in Path(folder).rglob("*.py"):
            files += 1
            for node in ast.walk(ast.parse(file.read_text())):
                arguments: list[ast.expr] = []
                if isinstance(node, ast.List | ast.Tuple):
                    arguments = node.elts
                elif isinstance(node, ast.Call):
                    arguments = node.args
                texts = [ast.unparse(one) for one in arguments]
                for before, after in itertools.pairwise(texts):
                    if before == "sys.executable" and after not in ("'-P'", "*PROBE", "*sys.orig_argv[1:]", "again"):
                        wrong.append(f"{file}:{node.lineno}: {after}")
    assert files
    assert wrong == []


@pytest.mark.parametrize("kind", ["stage", "fleet", "kernels", "engine", "standby"])
def test_a_command_starts_in_any_directory(project: Path, tmp_path: Path, kind: str) -> None:
    command = {
        "stage": (*stage._COMMAND, "--help"),
        "fleet": (*Child("agent", ["agent", "--help"], {})._command,),
        "kernels": (*kernel_build.COMMAND, "--help"),
        "engine": (*starling_engine.COMMAND, "--help"),
        "standby": (*starling_engine.STANDBY_COMMAND, "--help"),
    }[kind]
    done = subprocess.run(command, cwd=project, env=environment(tmp_path), capture_output=True, text=True)
    assert not (project / "executed").exists()
    assert (done.returncode, done.stderr) == (0, "")
    assert "Usage: " in done.stdout


def settings(home: Path, folder: Path, **variables: str) -> Any:
    """The configuration of a command in `folder`."""
    command = [sys.executable, "-m", "starling", "config", "--json"]
    env = environment(home, **variables)
    return json.loads(subprocess.run(command, cwd=folder, env=env, capture_output=True, check=True).stdout)


def test_every_command_has_the_settings_of_the_env_file(tmp_path: Path) -> None:
    """`run` and `status` look for the server that `up` starts. The environment takes precedence."""
    (tmp_path / ".env").write_text("# it's ours\nSTARLING_SERVER__PORT = 9009\nSTARLING_SERVER__HOST='::1'\nnothing\n")
    assert settings(tmp_path, tmp_path)["server"]["port"] == 9009
    found = settings(tmp_path, tmp_path, STARLING_SERVER__PORT="9010")["server"]
    assert (found["port"], found["host"]) == (9010, "::1")
    (tmp_path / ".env").unlink()
    (tmp_path / ".env").mkdir()
    assert settings(tmp_path, tmp_path)["server"]["port"] == 8080


def test_up_checks_the_port_of_the_env_file(tmp_path: Path) -> None:
    """It checked another one than its stages used, and then waited for ever for that."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        (tmp_path / ".env").write_text(f"STARLING_SERVER__PORT={port}\n")
        command = [sys.executable, "-m", "starling", "up"]
        done = subprocess.run(command, cwd=tmp_path, env=environment(tmp_path), capture_output=True, text=True)
    assert done.returncode == 78
    assert f"cannot listen on 127.0.0.1:{port}" in done.stderr


def start(folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a command in `folder`."""
    command = [sys.executable, "-P", "-m", "starling", *arguments]
    return subprocess.run(command, cwd=folder, env=environment(folder, **variables), capture_output=True, text=True)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"A=1\nSTARLING_KEY=hunter2's\n", ".env, line 2: No closing quotation"),
        (b"A='\n\nexport STARLING_KEY=hunter2\xff\n", ".env, line 3: it is not UTF-8"),
        (b"STARLING_KEY=hunter2\0\n", ".env, line 1: a zero byte"),
        (b"STARLING_KEY\x0c=hunter2\n", ".env, line 1: a control character"),
        (b"\nSTARLING_KEY=\x0chunter2\n", ".env, line 2: a control character"),
    ],
)
def test_a_setting_in_the_env_file_that_cannot_be_parsed_is_one_message(
    tmp_path: Path, content: bytes, reason: str
) -> None:
    (tmp_path / ".env").write_bytes(content)
    done = start(tmp_path, "config")
    assert (done.returncode, done.stdout) == (78, "")
    assert done.stderr.startswith(f"starling: {reason}")
    assert done.stderr.count("\n") == 1
    assert "hunter2" not in done.stderr


def test_lines_of_another_program_in_the_env_file_do_not_count(tmp_path: Path) -> None:
    (tmp_path / ".env").write_bytes(
        b"PASSWORD=it's\nHF_TOKEN=it's\nKEY=\"-----BEGIN\nEND-----\"\nA=\xff\nB=\0\nexport STARLING_SERVER__PORT=9009\n"
    )
    done = start(tmp_path, "config", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["server"]["port"] == 9009


def test_variables_of_the_env_file_that_starling_does_not_use_reach_no_process(tmp_path: Path) -> None:
    """`PYTHONPATH=.`, which an editor reads, would let every child import modules of the working directory."""
    left_out = ("PYTHONPATH", "PYTHONSTARTUP", "LD_PRELOAD", "LD_LIBRARY_PATH", "PATH", "HOME", "IFS", "PASSWORD")
    used = ("STARLING_HOME", "LLM_ENGINE_PORT", "PORT", "NO_COLOR", "HF_TOKEN", "AWS_REGION", "https_proxy")
    file = tmp_path / ".env"
    file.write_text("".join(f"{prefix}{name}=.\n" for name in (*left_out, *used) for prefix in ("", "export ")))
    assert env_file.read(file) == dict.fromkeys(used, ".")


def test_lines_of_the_env_file_end_as_on_other_systems_and_have_one_variable(tmp_path: Path) -> None:
    file = tmp_path / ".env"
    file.write_bytes(b"DEBUG=1\rSTARLING_A=1\rPYTHONPATH=.\r\nSTARLING_B=2\r\n")
    assert env_file.read(file) == {"STARLING_A": "1", "STARLING_B": "2"}
    file.write_text("STARLING_A=1\u2028LD_PRELOAD=a.so\n")
    assert env_file.read(file) == {"STARLING_A": "1"}
    file.write_text("HF_TOKEN\f=1\nSTARLING_B=2\n")
    assert env_file.read(file) == {"STARLING_B": "2"}


def test_settings_of_the_env_file_may_be_empty_and_follow_a_byte_order_mark(tmp_path: Path) -> None:
    """As empty as in the environment, where the server refuses a port without a number."""
    file = tmp_path / ".env"
    file.write_bytes(b"\xef\xbb\xbfSTARLING_A=1\nSTARLING_B=\nexport STARLING_C = # 2\nSTARLING_D=''\nSSL_CERT_FILE=\n")
    assert env_file.read(file) == {"STARLING_A": "1", "STARLING_B": "", "STARLING_C": "", "STARLING_D": ""}
    file.write_text("STARLING_SERVER__PORT= # 9000\n")
    done = start(tmp_path, "config", "--json")
    assert (done.returncode, done.stdout) == (78, "")
    assert "server.port" in done.stderr


@pytest.mark.parametrize(("command", "is_warned"), [("up", True), ("config", False), ("down", False)])
def test_an_env_file_that_this_user_cannot_read_stops_no_command(tmp_path: Path, command: str, is_warned: bool) -> None:
    (tmp_path / ".env").symlink_to(".env")  # root cannot read it either
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        done = start(tmp_path, command, STARLING_SERVER__PORT=port)
    assert ("starling: .env: cannot read it: " in done.stderr) == is_warned
    if is_warned:  # it gets as far as its port, which another program has
        assert f"cannot listen on 127.0.0.1:{port}" in done.stderr
    else:
        assert (done.returncode, done.stderr) == (0, "")


def test_the_server_of_a_command_starts_in_any_directory(project: Path, tmp_path: Path) -> None:
    """It gets as far as its port, which another program has."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        env = environment(tmp_path / "home", STARLING_SERVER__PORT=str(port))
        command = [sys.executable, "-P", "-m", "starling", "run", DEMO_MODEL, "hello"]
        done = subprocess.run(command, cwd=project, env=env, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert not (project / "executed").exists()
    assert f"cannot listen on 127.0.0.1:{port}" in done.stderr
    assert done.returncode == 78
