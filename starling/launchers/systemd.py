"""The agent of this host as the unit that `UNITS=fleet configs/systemd/install.sh` installs.

systemd starts it again when it ends or hangs, and at the boot of the host.  A host has one, with all of its models.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping

from pipeline.errors import ConfigError, NotFound
from starling.launchers import programs
from starling.launchers.interface import LaunchedAgent, State, log_lines

UNIT = "starling-agent.service"
SHOW_S = 30.0  # for systemctl and journalctl to print what is known
_PROPERTIES = ("LoadState", "ActiveState", "NRestarts", "StatusText")
_STATES: Mapping[str, State] = {"active": "running", "deactivating": "running", "failed": "failed"}  # others: starting


class SystemdLauncher:
    """The agent's unit of this host. `env`: of systemctl and journalctl."""

    def __init__(self, env: Mapping[str, str] = os.environ) -> None:
        self._env = env

    def start(self, agents: int | None) -> None:
        """Start the agent, now and at each boot; returns when it has registered. Raises `StarlingError`."""
        if agents not in (None, 1):
            raise ConfigError(
                f"--agents {agents}: the launcher systemd runs one agent on a host, which has all its models; start "
                "one on each further host, or use another --launcher",
                "fleet.launcher",
            )
        if self._show()["LoadState"] == "not-found":
            raise ConfigError(
                f"{UNIT} is not installed: UNITS=fleet configs/systemd/install.sh, as root", "fleet.launcher"
            )
        # Without a limit here: the unit's own ones hold, and a shorter one would leave the change half-done.
        self._systemctl("enable", "--now", UNIT, timeout_s=None)

    def stop(self) -> None:
        """End the agent, and start it at no boot. Raises `StarlingError`."""
        if self._show()["LoadState"] != "not-found":
            self._systemctl("disable", "--now", UNIT, timeout_s=None)

    def list(self) -> tuple[LaunchedAgent, ...]:
        """The agent, unless its unit is stopped. Raises `StarlingError`."""
        shown = self._show()
        active = shown["ActiveState"]
        if active in ("", "inactive"):
            return ()
        restarts = shown["NRestarts"]
        return (
            LaunchedAgent(
                agent_id=_agent_id(shown),
                host="localhost",
                state=_STATES.get(active, "starting"),
                restarts=int(restarts) if restarts.isdecimal() else 0,
            ),
        )

    def logs(self, agent_id: str, lines: int, *, follow: bool) -> Iterator[str]:
        """The lines of the unit in the journal, which stay when it ends. Raises `NotFound`, `StarlingError`."""
        if agent_id not in (UNIT, _agent_id(self._show())):
            raise NotFound(f"there is no agent {agent_id!r}; `starling fleet launched` lists the one of this host")
        program = programs.find("journalctl", "systemd", self._env)
        command = [program, "--no-pager", "--quiet", "--output=cat", f"--unit={UNIT}", f"--lines={lines}"]
        if follow:
            yield from programs.follow([*command, "--follow"], self._env)
        else:
            yield from log_lines(programs.call(command, self._env, SHOW_S))

    def _show(self) -> dict[str, str]:
        """What systemd says of the unit; "": nothing."""
        printed = self._systemctl("show", UNIT, f"--property={','.join(_PROPERTIES)}", timeout_s=SHOW_S)
        found = dict(line.partition("=")[::2] for line in log_lines(printed))
        return {name: found.get(name, "") for name in _PROPERTIES}

    def _systemctl(self, *arguments: str, timeout_s: float | None) -> str:
        program = programs.find("systemctl", "systemd", self._env)
        return programs.call([program, "--no-ask-password", *arguments], self._env, timeout_s)


def _agent_id(shown: Mapping[str, str]) -> str:
    """The agent's id, which it says when it is ready (starling/cli/agent.py); until then its unit."""
    kind, _, name = shown["StatusText"].partition(" ")
    return name if kind == "agent" and name else UNIT
