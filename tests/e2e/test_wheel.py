"""The package as users install it: a wheel in an environment of its own, away from the repository."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from tests.e2e.conftest import share_caches
from tests.e2e.server import ROOT, PlainServer
from tests.e2e.up_server import Up
from tools.tiny_gguf import SHAPES, write_model

pytestmark = pytest.mark.slow
PACKAGES = ("pipeline", "shm", "stages", "starling")
BODY = {"prompt": [1, 2, 3], "max_tokens": 8, "ignore_eos": True, "seed": 1, "model": "tiny"}


def run(*command: str | Path, cwd: Path | None = None) -> str:
    done = subprocess.run(command, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy: setuptools leaves files of its own beside what it packs."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    for name in PACKAGES:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    pip = (sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index")
    run(*pip, "--wheel-dir", folder, source)
    (built,) = folder.glob("starling-*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `bin` of an environment with the wheel, and the dependencies of this one."""
    folder = tmp_path_factory.mktemp("environment")
    run(sys.executable, "-m", "venv", "--without-pip", folder)
    python = folder / "bin" / "python"
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder).strip())
    # A path alone: the .pth files there, and so the editable installation, are not read.
    (site / "dependencies.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    run(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index", wheel)
    where = run(python, "-c", "import starling, stages; print(starling.__file__, stages.__file__)", cwd=folder)
    assert all(Path(path).is_relative_to(site) for path in where.split())
    return folder / "bin"


def test_the_wheel_has_what_serves_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
    files = [path for top in PACKAGES for path in (ROOT / top).rglob("*") if path.is_file()]
    assert packed == {str(path.relative_to(ROOT)) for path in files if path.parent.name != "__pycache__"}


def test_it_serves_with_the_same_bytes(installed: Path, tmp_path: Path) -> None:
    path = write_model(tmp_path / "tiny.gguf", SHAPES["small"])
    config = {"models": [{"name": "tiny", "path": str(path), "kv_cache_mb": 16}]}
    answers = []
    for kind in (PlainServer, Up):
        home = tmp_path / str(len(answers))  # short, because sockets are made below it
        home.mkdir()
        share_caches(home)
        server = kind(home, config)
        if isinstance(server, Up):
            server.command = (str(installed / "starling"), "up")
            server.directory = home
            del server.environment["PYTHONPATH"]
            server.environment["PATH"] = f"{installed}:/usr/bin:/bin"
        with server:
            answers.append(server.post("/v1/generate", **BODY)["choices"])
            code = server.stop(signal.SIGINT)
            assert code == (0 if kind is Up else 130)  # honcho's own
        assert server.leftovers() == []
    assert answers[0] == answers[1]


def test_it_uses_the_kernels_that_the_repository_has_compiled(installed: Path, tmp_path: Path) -> None:
    code = "from stages.worker.kernels import features; print(features.cache_dir())"
    pythons = (installed / "python", sys.executable)
    ours, theirs = (run(python, "-W", "ignore", "-c", code, cwd=tmp_path) for python in pythons)
    assert ours == theirs
