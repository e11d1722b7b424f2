"""Modules in the user's working directory are not imported by the programs that a command starts."""

from __future__ import annotations

import ast
import itertools
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import pipeline
import shm
import stages
import starling
from pipeline.config.schema import DEMO_MODEL
from stages.agent.engines import kernel_build, starling_engine
from starling.cli import stage
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
