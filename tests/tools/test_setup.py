"""Setting up: the lock files, `make`, and the messages when something is missing."""

from __future__ import annotations

import ast
import importlib.metadata
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LOCKS = (
    "locks/requirements.lock",
    "locks/requirements-dev.lock",
    "locks/requirements-peers.lock",
    "locks/requirements-peers-native.lock",
    "locks/requirements-api.lock",
    "locks/setup.lock",
)
ALONE = "locks/setup.lock"  # nothing of the project is in it
CLIENTS = "locks/requirements-clients.lock"  # of an environment without the project


def pinned(lock: str) -> dict[str, str]:
    """Versions in a lock file, by package name."""
    return dict(re.findall(r"^([a-z0-9-]+)==([^\s;]+)", (ROOT / lock).read_text(), re.M))


@pytest.mark.parametrize("lock", [*LOCKS, CLIENTS])
def test_locks_are_pinned_hashed_and_name_no_index(lock: str) -> None:
    text = (ROOT / lock).read_text()
    entries = [entry for entry in re.split(r"\n(?=[a-z0-9])", text) if not entry.startswith("#")]
    assert entries
    for entry in entries:
        assert re.match(r"[a-z0-9-]+==\S+ ", entry), entry
        assert "--hash=sha256:" in entry
    assert "://" not in text
    assert "--index" not in text


def test_locks_contain_every_dependency() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())

    def names(requirements: list[str]) -> set[str]:
        return {re.split(r"[<>=\[]", requirement)[0].lower() for requirement in requirements}

    runtime = names(project["project"]["dependencies"]) | names(project["dependency-groups"]["build"])
    assert runtime <= set(pinned("locks/requirements.lock"))
    assert names(project["dependency-groups"]["dev"]) <= set(pinned("locks/requirements-dev.lock"))
    assert names(project["dependency-groups"]["peers"]) <= set(pinned("locks/requirements-peers.lock"))
    assert names(project["dependency-groups"]["setup"]) <= set(pinned(ALONE))
    assert names(project["dependency-groups"]["clients"]) <= set(pinned(CLIENTS))
    assert names(project["dependency-groups"]["api-examples"]) <= set(pinned("locks/requirements-api.lock"))


@pytest.mark.parametrize("lock", [lock for lock in LOCKS[1:] if lock != ALONE])
def test_locks_agree(lock: str) -> None:
    assert pinned("locks/requirements.lock").items() <= pinned(lock).items()


def test_make_without_a_target_lists_every_target() -> None:
    listing = subprocess.run(["make", "-s"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    targets = re.findall(r"^([a-z-]+):.*##", (ROOT / "Makefile").read_text(), re.M)
    assert {"serve", "test", "check", "bench", "clean"} <= set(targets)
    for target in targets:
        assert re.search(rf"^  {target} ", listing, re.M)
    assert max(len(line) for line in listing.splitlines()) <= 100


def setup(tmp_path: Path, python: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the set-up with the shell script `python` as its interpreter."""
    fake = tmp_path / "python"
    fake.write_text(f"#!/bin/bash\n{python}\n")
    fake.chmod(0o755)
    return subprocess.run(
        [ROOT / "tools" / "setup_venv.sh", tmp_path / "venv", "locks/requirements.lock"],
        env={**os.environ, "PYTHON": str(fake), **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_an_old_python_is_refused(tmp_path: Path) -> None:
    result = setup(tmp_path, '[ "$1" = -V ] && echo "Python 3.9.1"; exit 1')
    assert result.returncode != 0
    assert f"PYTHON={tmp_path}/python is Python 3.9.1; Python 3.11 or newer is needed." in result.stderr


def test_without_the_venv_module_the_error_names_the_package(tmp_path: Path) -> None:
    result = setup(tmp_path, '[ "$1" = -V ] && echo "Python 3.11.2"; [ "$1" != -m ]')
    assert result.returncode != 0
    assert "cannot create a virtual environment" in result.stderr
    assert "apt install python3-venv" in result.stderr
    assert not (tmp_path / "venv").exists()


@pytest.mark.parametrize(
    ("log", "message"),
    [
        ("ERROR: THESE PACKAGES DO NOT MATCH THE HASHES", "other files than locks/requirements.lock names"),
        ("ERROR: No matching distribution found for aiohttp", "Is there a network and a package index?"),
    ],
)
def test_packages_that_cannot_be_fetched(tmp_path: Path, log: str, message: str) -> None:
    # "Creates" an environment whose pip prints `log` and fails.
    venv_python = f'[ "$1" = -c ] && exit 0; echo "{log}"; exit 1'
    result = setup(
        tmp_path,
        'if [ "$2" = venv ]; then mkdir -p "$3/bin"; '
        f"printf '#!/bin/bash\\n%s\\n' '{venv_python}' >\"$3/bin/python\"; chmod +x \"$3/bin/python\"; fi",
    )
    assert result.returncode != 0
    assert log in result.stderr
    assert message in result.stderr


@pytest.mark.parametrize(
    ("configuration", "uv", "used"),
    [
        ("", "exit 0", ["uv", "uv"]),
        ("", "exit 2", ["uv", "pip", "pip"]),
        ("global.index-url='https://packages.example.org'", "exit 0", ["pip", "pip"]),
        (":env:.no-index='1'", "exit 0", ["pip", "pip"]),
        ("global.extra-index-url='https://packages.example.org'", "exit 0", ["uv", "uv"]),
    ],
)
def test_uv_installs_unless_pip_has_an_index_of_its_own(
    tmp_path: Path, configuration: str, uv: str, used: list[str]
) -> None:
    calls = tmp_path / "calls"
    (tmp_path / "uv").write_text(f"#!/bin/bash\necho uv >>{calls}\n{uv}\n")
    (tmp_path / "uv").chmod(0o755)
    (tmp_path / "venv_python").write_text(
        f"""#!/bin/bash
        case "$*" in
            *" config list") echo "{configuration}" ;;
            *" install "*) echo pip >>{calls} ;;
        esac
        """
    )
    (tmp_path / "venv_python").chmod(0o755)
    result = setup(
        tmp_path,
        f'if [ "$2" = venv ]; then mkdir -p "$3/bin"; cp {tmp_path}/venv_python "$3/bin/python"; fi',
        PATH=f"{tmp_path}:{os.environ['PATH']}",
    )
    assert result.returncode == 0, result.stderr
    assert calls.read_text().split() == used


def test_the_product_needs_its_dependencies_and_no_development_tool() -> None:
    """Every package that a module of the product imports is a dependency in pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    allowed = {re.split(r"[<>=\[]", requirement)[0].lower() for requirement in project["dependencies"]}
    for requirements in project["optional-dependencies"].values():  # imported where they are used: may be missing here
        allowed |= {re.split(r"[<>=\[]", requirement)[0].lower() for requirement in requirements}
    allowed |= {"llvmlite"}  # numba's compiler, of the version that numba asks for
    own = {"shm", "pipeline", "stages", "starling"}
    distributions = importlib.metadata.packages_distributions()
    for path in (path for package in own for path in (ROOT / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module or ""]
            for top in {name.partition(".")[0] for name in names} - own - sys.stdlib_module_names:
                found = {name.lower().replace("_", "-") for name in distributions.get(top, [top])}
                assert found & allowed, f"{path.relative_to(ROOT)} imports {top}"
