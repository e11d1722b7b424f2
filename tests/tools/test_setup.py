"""Setting up: the lock files, `make`, and the messages when something is missing."""

from __future__ import annotations

import ast
import contextlib
import fcntl
import importlib.metadata
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import time
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
COMPILER = "locks/requirements-peers-compiler.lock"  # of `make peers-native` where no other one has AMX
ALONE = "locks/setup.lock"  # nothing of the project is in it
CLIENTS = "locks/requirements-clients.lock"  # of an environment without the project


def pinned(lock: str) -> dict[str, str]:
    """Versions in a lock file, by package name."""
    return dict(re.findall(r"^([a-z0-9-]+)==([^\s;]+)", (ROOT / lock).read_text(), re.M))


@pytest.mark.parametrize("lock", [*LOCKS, COMPILER, CLIENTS])
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
    assert names(project["dependency-groups"]["peers-compiler"]) == set(pinned(COMPILER))
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
        'if [ "$2" = venv ]; then mkdir -p "$3/bin"; touch "$3/bin/pip"; '
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
        pytest.param(":env:.no-index='1'" + "\n" * 200_000, "exit 0", ["pip", "pip"], id="more than a pipe holds"),
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
            *" compileall "*) echo compile >>{calls} ;;
        esac
        """
    )
    (tmp_path / "venv_python").chmod(0o755)
    result = setup(
        tmp_path,
        'if [ "$2" = venv ]; then mkdir -p "$3/bin"; touch "$3/bin/pip"; '
        f'cp {tmp_path}/venv_python "$3/bin/python"; fi',
        PATH=f"{tmp_path}:{os.environ['PATH']}",
    )
    assert result.returncode == 0, result.stderr
    found = calls.read_text().split()
    assert [call for call in found if call != "compile"] == used
    assert ("uv has failed" in result.stdout) == ({*used} == {"uv", "pip"})
    assert found.count("compile") == 2  # the project's modules, and the packages


@pytest.mark.parametrize(("pip", "asked"), [('touch "${6%python}pip"', ["base"]), ("exit 1", ["base", "ensurepip"])])
def test_pip_comes_from_the_python_that_makes_the_environment_or_from_its_copy(
    tmp_path: Path, pip: str, asked: list[str]
) -> None:
    calls = tmp_path / "calls"
    (tmp_path / "venv_python").write_text(f'#!/bin/bash\n[ "$2" != ensurepip ] || echo ensurepip >>{calls}\n')
    (tmp_path / "venv_python").chmod(0o755)
    result = setup(
        tmp_path,
        f"""case "$*" in
            "-m venv "*) mkdir -p "$3/bin"; cp {tmp_path}/venv_python "$3/bin/python" ;;
            *" config list") echo "global.no-index='1'" ;; # uv is not used
            *" install "*) echo base >>{calls}; {pip} ;;
        esac""",
    )
    assert result.returncode == 0, result.stderr
    assert calls.read_text().split() == asked


def own_tools(tmp_path: Path) -> Path:
    """A folder for PATH with the programs that the set-up calls, and without uv."""
    tools = tmp_path / "tools"
    tools.mkdir()
    for tool in ("awk", "bash", "cat", "cp", "cut", "dirname", "grep", "mkdir", "nproc", "rm", "tail", "tee", "touch"):
        (tools / tool).symlink_to(shutil.which(tool) or tool)
    return tools


def locked(text: str) -> list[str]:
    """The packages of a lock file, each of which must have hashes, and be in the lock file of the set-up."""
    entries = re.findall(r"^([a-z]+)==.*((?:\n    --hash=sha256:.*)+)", text, re.M)
    assert "".join(text.split()) in "".join((ROOT / ALONE).read_text().split())
    return [name for name, _ in entries]


@pytest.mark.parametrize(
    ("configuration", "has_uv", "base", "uv"),
    [
        ("", False, ["uv"], ["pip"]),
        ("", True, [], ["pip"]),
        ("global.index-url='https://packages.example.org'", False, ["pip"], []),
    ],
)
def test_uv_is_fetched_only_where_it_is_used_and_missing_and_fetches_pip(
    tmp_path: Path, configuration: str, has_uv: bool, base: list[str], uv: list[str]
) -> None:
    tools, by_base, by_uv = own_tools(tmp_path), tmp_path / "by base", tmp_path / "by uv"
    by_base.touch()
    by_uv.touch()
    (tmp_path / "venv_python").write_text("#!/bin/bash\n")
    (tmp_path / "uv").write_text(f"#!/bin/bash\n[[ $* != *' -r -' ]] || cat >'{by_uv}'\n")
    for program in ("venv_python", "uv"):
        (tmp_path / program).chmod(0o755)
    if has_uv:
        (tools / "uv").symlink_to(tmp_path / "uv")
    result = setup(
        tmp_path,
        f"""case "$*" in
            "-m venv "*) mkdir -p "$3/bin"; cp {tmp_path}/venv_python "$3/bin/python" ;;
            *" config list") echo "{configuration}" ;;
            *" install "*) cat >'{by_base}'; cp {tmp_path}/uv "${{6%python}}"; touch "${{6%python}}pip" ;;
        esac""",
        PATH=str(tools),
    )
    assert result.returncode == 0, result.stderr
    assert (locked(by_base.read_text()), locked(by_uv.read_text())) == (base, uv)


def test_where_the_python_at_hand_has_no_pip_its_copy_fetches_pip_and_uv(tmp_path: Path) -> None:
    calls = tmp_path / "calls"
    (tmp_path / "uv").write_text(f"#!/bin/bash\necho uv >>{calls}\n")
    (tmp_path / "venv_python").write_text(
        f"""#!/bin/bash
        case "$*" in
            *" ensurepip "*) echo ensurepip >>{calls}; touch "${{0%python}}pip" ;;
            *" install "*) echo "pip ${{!#}}" >>{calls}; cp {tmp_path}/uv "${{0%python}}uv" ;;
        esac
        """
    )
    for program in ("venv_python", "uv"):
        (tmp_path / program).chmod(0o755)
    result = setup(
        tmp_path,
        f"""case "$2" in
            venv) mkdir -p "$3/bin"; cp {tmp_path}/venv_python "$3/bin/python" ;;
            pip) exit 1 ;;
        esac""",
        PATH=str(own_tools(tmp_path)),
    )
    assert result.returncode == 0, result.stderr
    assert calls.read_text().splitlines() == ["ensurepip", f"pip {ALONE}", "uv", "uv"]


@pytest.mark.parametrize(
    ("configuration", "environment", "trusted", "proxy"),
    [
        ("global.cert='{here}/a'", {}, "a", ""),
        (
            "global.cert='{here}/a'\nglobal.proxy='http://proxy:1'",
            {"REQUESTS_CA_BUNDLE": "{here}/b"},
            "a",
            "http://proxy:1",
        ),
        (":env:.cert='{here}/b'\nglobal.cert='{here}/a'\ninstall.cert='{here}/a'", {}, "b", ""),
        ("global.cert='{here}/a'\ninstall.cert='{here}/b'", {"HTTPS_PROXY": "http://other:2"}, "b", "http://other:2"),
        ("global.cert='{here}/a'", {"SSL_CERT_FILE": "{here}/b"}, "b", ""),
        ("", {"REQUESTS_CA_BUNDLE": "{here}/a", "CURL_CA_BUNDLE": "{here}/b"}, "a", ""),
        ("global.cert='{here}/missing'", {"CURL_CA_BUNDLE": "{here}/b"}, "b", ""),
    ],
)
def test_uv_trusts_the_certificates_of_pip_and_takes_its_proxy(
    tmp_path: Path, configuration: str, environment: dict[str, str], trusted: str, proxy: str
) -> None:
    for name in ("a", "b"):
        (tmp_path / name).touch()
    calls = tmp_path / "calls"
    (tmp_path / "uv").write_text(f'#!/bin/bash\necho "$SSL_CERT_FILE,$HTTPS_PROXY" >>{calls}\n')
    (tmp_path / "uv").chmod(0o755)
    cleared = dict.fromkeys(("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "HTTPS_PROXY"), "")
    result = setup(
        tmp_path,
        f"""case "$*" in
            "-m venv "*) mkdir -p "$3/bin"; printf '#!/bin/bash\\n' >"$3/bin/python"; chmod +x "$3/bin/python" ;;
            *" config list") echo "{configuration.format(here=tmp_path)}" ;;
        esac""",
        **cleared | {name: value.format(here=tmp_path) for name, value in environment.items()},
        PATH=f"{tmp_path}:{os.environ['PATH']}",
    )
    assert result.returncode == 0, result.stderr
    assert calls.read_text().split() == [f"{tmp_path}/{trusted},{proxy}"] * 2  # the packages, and the project


def test_an_environment_that_was_there_stays_when_it_gets_no_pip(tmp_path: Path) -> None:
    python = tmp_path / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/bash\n[ "$1" = -c ] || { echo "Temporary failure in name resolution"; exit 1; }\n')
    python.chmod(0o755)
    result = setup(tmp_path, '[ "$1" = -c ]')
    assert result.returncode != 0
    assert python.exists()
    assert "Temporary failure in name resolution" in result.stderr
    assert f"{tmp_path}/venv has no pip, and none could be installed" in result.stderr


def test_a_set_up_that_fails_ends_what_compiles(tmp_path: Path) -> None:
    """Also the processes that compileall has started: one of them holds the pipe."""
    (tmp_path / "venv" / "bin").mkdir(parents=True)
    (tmp_path / "venv" / "bin" / "pip").touch()
    started = tmp_path / "started"
    python = tmp_path / "venv" / "bin" / "python"
    python.write_text(
        f"""#!/bin/bash
        case "$*" in
            *" compileall "*) sleep 1000 & touch {started}; wait ;;
            *" config list") echo ":env:.no-index='1'" ;;
            *" install "*) until [ -e {started} ]; do sleep 0.05; done; exit 1 ;;
        esac
        """
    )
    python.chmod(0o755)
    ours, theirs = os.pipe()
    with os.fdopen(ours, "rb") as pipe:
        command = [ROOT / "tools" / "setup_venv.sh", tmp_path / "venv", "locks/requirements.lock"]
        result = subprocess.run(command, pass_fds=[theirs], capture_output=True, text=True, timeout=60)
        os.close(theirs)
        assert result.returncode != 0
        assert select.select([pipe], [], [], 60)[0]
        assert pipe.read() == b""


@pytest.mark.skipif(not shutil.which("flock"), reason="flock is not installed")
def test_two_set_ups_of_a_folder_take_turns_and_ctrl_c_ends_one_that_waits(tmp_path: Path) -> None:
    command = [ROOT / "tools" / "setup_venv.sh", tmp_path / "venv", "locks/requirements.lock"]
    first = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(first, fcntl.LOCK_EX)
    try:
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        ) as second:
            assert second.stdout is not None
            assert second.stdout.readline() == f"Waiting until another set-up in {tmp_path} has ended\n"
            os.killpg(second.pid, signal.SIGINT)
            assert second.wait(60) != 0
            assert second.stdout.read() == ""
    finally:
        os.close(first)
    assert not (tmp_path / "venv").exists()


def test_ctrl_c_is_the_end_also_where_pip_handles_it(tmp_path: Path) -> None:
    """pip exits with 1 then; no other way to install is tried."""
    (tmp_path / "venv" / "bin").mkdir(parents=True)
    (tmp_path / "venv" / "bin" / "pip").touch()
    python = tmp_path / "venv" / "bin" / "python"
    python.write_text(
        """#!/bin/bash
        case "$*" in
            *" config list") echo ":env:.no-index='1'" ;;
            *" install "*) trap 'exit 1' INT; echo pip >&2; sleep 1000 & wait ;;
        esac
        """
    )
    python.chmod(0o755)
    command = [ROOT / "tools" / "setup_venv.sh", tmp_path / "venv", "locks/requirements.lock"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as running:
        log = tmp_path / "venv" / "install.log"
        deadline = time.monotonic() + 60
        try:
            while not (log.exists() and "pip" in log.read_text()):
                assert time.monotonic() < deadline
                time.sleep(0.02)
            os.killpg(running.pid, signal.SIGINT)
            assert running.wait(60) == 130
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(running.pid, signal.SIGKILL)  # what it waits for ignores SIGINT


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
