"""The Debian package of docs/deploying.md: built, read by lintian, installed in a minimal Debian; `make test-deploy`.

The Debian has what the package depends on and nothing else. Its units are started as systemd would start them, and
stopped by SIGTERM. The demo model is put there, so that only kernels are made at the first start.
"""

from __future__ import annotations

import configparser
import contextlib
import http.client
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.config import paths
from pipeline.config.schema import DEMO_MODEL
from tests.docs.debian_root import RootShell, Unavailable, make_root
from tests.docs.page import DEPLOY_S
from tests.e2e.server import ROOT, STOP_S
from tools.checks import markdown
from tools.ports import free_port

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(2 * DEPLOY_S),
    pytest.mark.skipif(not os.environ.get("STARLING_TEST_DEPLOY"), reason="takes minutes: make test-deploy"),
]
RELEASES = {"3.11": "bookworm", "3.13": "trixie"}
CONFIGURATION, STATE = "etc/starling/starling.yaml", "var/lib/starling"
UNITS = "lib/systemd/system"
# The page's commands run as root in the Debian: `sudo` only changes the user, and no systemd runs to start units.
PROGRAMS = {
    "sudo": """#!/bin/bash
if [ "$1" = -u ]; then exec setpriv --reuid="$2" --regid="$2" --init-groups -- "${@:3}"; fi
exec "$@"
""",
    "systemctl": """#!/bin/bash
exec env SYSTEMD_OFFLINE=1 /usr/bin/systemctl "${@/#--now/--no-block}"
""",
}


def commands() -> tuple[list[str], list[str]]:
    """The lines of the page that install the package, and those that remove it."""
    text = (ROOT / "docs/deploying.md").read_text()
    install, remove = [
        [line.split("#")[0].strip() for line in block.text.splitlines()]
        for block in markdown.blocks(text)
        if block.info == "sh deploy dpkg"
    ]
    assert install[0] == "make deb"
    return install[1:], remove


@pytest.fixture(scope="module")
def package() -> Path:
    for program in ("dh", "lintian"):
        if not shutil.which(program):
            pytest.skip(f"not installed: {program}")
    # With MAKELEVEL the last line would be the directory that `make` leaves.
    of_make = ("MAKEFLAGS", "MAKELEVEL", "MAKEOVERRIDES")
    inherited = {name: value for name, value in os.environ.items() if name not in of_make}
    environment = {**inherited, "DEBFULLNAME": "Tests", "DEBEMAIL": "tests@debian.org"}
    done = subprocess.run(
        ["make", "deb"], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=DEPLOY_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return ROOT / done.stdout.splitlines()[-1]


@pytest.fixture
def root(package: Path, tmp_path: Path) -> Path:
    """A Debian with the dependencies of the package, and with the package as a file."""
    release = RELEASES.get("{}.{}".format(*sys.version_info))
    if release is None:
        pytest.skip("no release of Debian has this version of Python")
    fields = subprocess.run(
        ["dpkg-deb", "--field", package, "Depends"], capture_output=True, text=True, check=True
    ).stdout
    folder = tmp_path / "root"
    try:
        make_root(folder, release, [alternatives.split()[0] for alternatives in fields.split(",")])
    except Unavailable as e:
        pytest.skip(str(e))
    (folder / "dist").mkdir()
    shutil.copy(package, folder / "dist")
    for name, text in PROGRAMS.items():
        (folder / "usr/local/bin" / name).write_text(text)
        (folder / "usr/local/bin" / name).chmod(0o755)
    (folder / "etc/apt/apt.conf.d/answers").write_text('APT::Get::Assume-Yes "true";\n')
    return folder


class Unit:
    """A unit's command with its user, directory and variables; READY=1 is waited for, as systemd does."""

    def __init__(self, shell: RootShell, file: Path) -> None:
        parser = configparser.ConfigParser(strict=False, interpolation=None, delimiters=("=",))
        parser.optionxform = str  # type: ignore[assignment,method-assign]
        parser.read_string(file.read_text())
        service, text = parser["Service"], file.read_text()
        assert service["Type"] == "notify"
        self._shell = shell
        self.name = file.stem
        self.log = f"/var/log/{self.name}"
        self._ready = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        address = f"starling-test-{os.getpid()}-{self.name}"
        self._ready.bind(f"\0{address}")
        variables = [*re.findall(r"^Environment=(.*)$", text, re.MULTILINE), f"NOTIFY_SOCKET=@{address}"]
        user, group = service["User"], service["Group"]
        self.pid = int(
            shell.check(
                f"cd {service['WorkingDirectory']}\n"
                f"setpriv --reuid={user} --regid={group} --init-groups -- env {shlex.join(variables)} "
                f"{service['ExecStart']} >{self.log} 2>&1 &\necho $!"
            )
        )

    def wait_ready(self) -> None:
        self._ready.settimeout(DEPLOY_S)
        while b"READY=1" not in self._ready.recv(4096):
            pass
        self._ready.close()

    def stop(self) -> int:
        """The exit code after SIGTERM."""
        code, output = self._shell.run(
            f"kill -TERM {self.pid}; timeout {STOP_S} tail --pid={self.pid} -f /dev/null; wait {self.pid}"
        )
        assert "Traceback" not in output
        return code


def request(port: int, method: str, path: str, body: object = None) -> tuple[int, str]:
    headers = {"Content-Type": "application/json"}
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=120)) as connection:
        connection.request(method, path, None if body is None else json.dumps(body), headers)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()


def wait_answering(port: int) -> None:
    """Until every stage has found the others."""
    deadline = time.monotonic() + STOP_S
    while (found := request(port, "GET", "/ready"))[0] != 200:
        assert time.monotonic() < deadline, found
        time.sleep(0.1)


def installed(root: Path) -> Iterator[Path]:
    """Files that only the package has."""
    yield from (path for name in ("usr/lib/starling", UNITS) for path in (root / name).glob("**/*starling*"))


def test_lintian_finds_no_error(package: Path) -> None:
    done = subprocess.run(
        ["lintian", "--fail-on", "error,warning", package], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr


def test_it_serves_and_is_removed(root: Path) -> None:
    install, remove = commands()
    port = free_port()
    with RootShell(root) as shell:
        first, *others = install
        shell.check(first)
        assert not list(root.glob("etc/systemd/system/*/starling*"))  # an operator enables it
        assert "starling" in shell.check("id -nG starling")
        edited = root / CONFIGURATION
        edited.write_text(edited.read_text().replace("port: 8080", f"port: {port}"))
        shutil.copytree(paths.models_dir(), root / STATE / "models", ignore=shutil.ignore_patterns("*.lock"))
        shell.check(f"chown -R starling:starling /{STATE}")
        for line in others:
            shell.check(line)
        assert (root / "etc/systemd/system/multi-user.target.wants/starling.target").is_symlink()
        shell.check(f"systemd-analyze verify /{UNITS}/starling*.service /{UNITS}/starling*.target")

        wanted = re.findall(r"starling-\w+\.service", (root / UNITS / "starling.target").read_text())
        assert len(wanted) == 5
        units = [Unit(shell, root / UNITS / name) for name in wanted]
        for unit in units:
            unit.wait_ready()
        wait_answering(port)
        status, answer = request(
            port, "POST", "/v1/completions", {"model": DEMO_MODEL, "prompt": "The sky is", "max_tokens": 8}
        )
        assert status == 200, answer
        assert json.loads(answer)["usage"]["completion_tokens"] == 8
        assert "gateway" in shell.check(
            f"sudo -u starling env STARLING_HOME=/{STATE} STARLING_CONFIG=/{CONFIGURATION} starling status"
        )
        assert {unit.name: unit.stop() for unit in units} == {unit.name: 0 for unit in units}

        # The same package again, as an upgrade does it: what the operator has changed stays.
        shell.check("dpkg --install /dist/*.deb")
        assert f"port: {port}" in edited.read_text()
        shell.check(remove[0])
        assert list(installed(root)) == []
        assert edited.exists()
        assert (root / STATE / "models").is_dir()
        shell.check(remove[1])
        assert not edited.exists()
        assert not (root / STATE).exists()
        assert shell.run("dpkg --status starling")[0] != 0
