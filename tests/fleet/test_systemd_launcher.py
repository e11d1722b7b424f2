"""The launcher for systemd. `systemctl` and `journalctl` are scripts: no systemd runs where the tests run."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from pipeline.config.load import resolve
from pipeline.errors import ConfigError, NotFound, StarlingError
from starling.cli.fleet import fleet
from starling.launchers.interface import LaunchedAgent
from starling.launchers.select import open_launcher
from starling.launchers.systemd import UNIT, SystemdLauncher

SYSTEMCTL = """#!/bin/sh
cd "${0%/*}"
echo "$@" >> calls
case "$*" in
*" show "*) exec cat shown ;;
*) [ ! -e failure ] || { cat failure >&2; exit 1; } ;;
esac
"""
JOURNALCTL = """#!/bin/sh
cd "${0%/*}"
echo "$@" >> calls
exec cat journal
"""
SHOW = f"show {UNIT} --property=LoadState,ActiveState,NRestarts,StatusText"


class Host:
    """A host whose systemd says what the test sets."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name, text in (("systemctl", SYSTEMCTL), ("journalctl", JOURNALCTL)):
            (folder / name).write_text(text)
            (folder / name).chmod(0o755)
        self.env = {"PATH": f"{folder}:/usr/bin:/bin", "LC_ALL": "C.UTF-8"}
        self.launcher = SystemdLauncher(self.env)
        self.says()

    def says(self, active: str = "inactive", load: str = "loaded", status: str = "", restarts: str = "0") -> None:
        """What `systemctl show` prints. It names no property that its release does not have."""
        text = f"LoadState={load}\nActiveState={active}\nNRestarts={restarts}\nStatusText={status}\n"
        (self.folder / "shown").write_text(text)

    def calls(self) -> list[str]:
        """Of systemctl and journalctl since the last look."""
        path = self.folder / "calls"
        lines = path.read_text().splitlines() if path.exists() else []
        path.unlink(missing_ok=True)
        return [line.removeprefix("--no-ask-password ") for line in lines]


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


def test_the_unit_is_enabled_and_disabled(host: Host) -> None:
    host.launcher.start(None)
    assert host.calls() == [SHOW, f"enable --now {UNIT}"]
    host.launcher.start(1)
    host.calls()
    host.launcher.stop()
    assert host.calls() == [SHOW, f"disable --now {UNIT}"]


@pytest.mark.parametrize(
    ("active", "status", "expected"),
    [
        ("active", "agent gpu-1", ("gpu-1", "running")),
        ("deactivating", "agent gpu-1", ("gpu-1", "running")),  # its streams finish
        ("activating", "", (UNIT, "starting")),
        ("failed", "", (UNIT, "failed")),
    ],
)
def test_the_agent_is_listed_with_the_id_that_it_says(
    host: Host, active: str, status: str, expected: tuple[str, str]
) -> None:
    host.says(active, status=status, restarts="3")
    (found,) = host.launcher.list()
    assert found == LaunchedAgent(agent_id=expected[0], host="localhost", state=expected[1], restarts=3)  # type: ignore[arg-type]


def test_a_unit_that_is_stopped_is_no_agent(host: Host) -> None:
    assert host.launcher.list() == ()
    host.says(load="not-found")
    assert host.launcher.list() == ()
    host.says("active", restarts="[not set]")
    assert [one.restarts for one in host.launcher.list()] == [0]


def test_the_journal_is_the_log(host: Host) -> None:
    host.says("active", status="agent gpu-1")
    record = '{"event": "a\u2028b"}'
    (host.folder / "journal").write_text(f"{record}\nsecond\n")
    command = f"--no-pager --quiet --output=cat --unit={UNIT} --lines=9"
    for name, follow in (("gpu-1", False), ("gpu-1", True), (UNIT, False)):
        assert list(host.launcher.logs(name, 9, follow=follow)) == [record, "second"]
        assert host.calls()[1] == command + (" --follow" if follow else "")
    with pytest.raises(NotFound, match="there is no agent 'gpu-2'"):
        list(host.launcher.logs("gpu-2", 9, follow=False))


def test_what_cannot_be_started_is_refused_with_the_remedy(host: Host) -> None:
    with pytest.raises(ConfigError, match=r"--agents 2: .* one agent on a host"):
        host.launcher.start(2)
    assert host.calls() == []
    (host.folder / "failure").write_text("Access denied\n")
    with pytest.raises(StarlingError, match="systemctl has failed: Access denied"):
        host.launcher.start(1)
    host.says(load="not-found")
    with pytest.raises(ConfigError, match=r"not installed: UNITS=fleet configs/systemd/install\.sh"):
        host.launcher.start(1)
    host.calls()
    host.launcher.stop()  # nothing runs
    assert host.calls() == [SHOW]
    with pytest.raises(ConfigError, match="the launcher systemd needs systemctl, which is not in PATH"):
        SystemdLauncher({"PATH": str(host.folder / "empty")}).list()


def test_the_configuration_names_it(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    config = resolve({"fleet": {"launcher": "systemd"}}, {})
    assert isinstance(open_launcher(config), SystemdLauncher)
    monkeypatch.setenv("PATH", host.env["PATH"])
    monkeypatch.setenv("STARLING_HOME", str(host.folder))
    done = CliRunner().invoke(fleet, ["up", "--launcher", "systemd"])
    assert f"enable --now {UNIT}" in host.calls(), done.output
    assert "start `starling orchestrator` where clients are to reach the fleet" in done.output
