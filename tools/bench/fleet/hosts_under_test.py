"""Agents on hosts of their own, each of which is a network namespace, so that a host can die as if its power was cut.

The program that uses it runs in namespaces of its own (`COMMAND`), with which everything here ends.  The orchestrator
and the clients are on one host, and a bridge joins all of them.  The link of a host is cut, so that none of its
connections can be closed, and then all its processes are killed.
"""

from __future__ import annotations

import shutil
import subprocess
from typing import Self

from pipeline.config.schema import DEMO_MODEL
from tools.bench.fleet.fleet_under_test import FleetUnderTest, kill

# The mount is what `ip netns` needs: names of namespaces of this program alone.
COMMAND = ("unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
PREPARE = ("mount", "-t", "tmpfs", "tmpfs", "/run")
NETWORK = "10.77.0"
FRONT = f"{NETWORK}.1"
SILENT_MS = 3000  # fleet.orchestrator.silent_ms, its default


def are_permitted() -> bool:
    """Whether this process may make network namespaces."""
    if any(shutil.which(name) is None for name in ("unshare", "ip", "mount")):
        return False
    return not subprocess.run([*COMMAND, *PREPARE], capture_output=True).returncode


def _run(*command: str) -> None:
    subprocess.run(command, check=True)


def connect_hosts(names: list[str]) -> None:
    """Make a host of each name, and a bridge to this one."""
    _run(*PREPARE)
    _run("ip", "link", "set", "lo", "up")
    _run("ip", "link", "add", "bridge", "type", "bridge")
    _run("ip", "addr", "add", f"{FRONT}/24", "dev", "bridge")
    _run("ip", "link", "set", "bridge", "up")
    for number, name in enumerate(names):
        _run("ip", "netns", "add", name)
        _run("ip", "link", "add", f"to-{name}", "type", "veth", "peer", "name", "eth0", "netns", name)
        _run("ip", "link", "set", f"to-{name}", "master", "bridge", "up")
        _run("ip", "-n", name, "addr", "add", f"{_address(number)}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            _run("ip", "-n", name, "link", "set", device, "up")


def _address(number: int) -> str:
    return f"{NETWORK}.{11 + number}"


class HostsUnderTest(FleetUnderTest):
    """A fleet whose agents are on hosts of their own. The namespaces must exist."""

    def __init__(self, names: list[str]) -> None:
        self._names = names
        self._hosts: dict[str, subprocess.Popen[bytes]] = {}
        super().__init__(len(names), silent_ms=SILENT_MS)

    def _start(self) -> subprocess.Popen[bytes]:
        if self._spawn("starling", "publish", DEMO_MODEL).wait():
            raise RuntimeError("the demo model was not published; see `starling publish`")
        orchestrator = self._spawn("starling", "orchestrator")
        for name in self._names:
            self._start_agent(name)
        return orchestrator

    def _start_agent(self, name: str) -> None:
        address = {"STARLING_FLEET__AGENT__HOST": _address(self._names.index(name))}
        before = ("ip", "netns", "exec", name)
        self._hosts[name] = self._spawn("starling", "agent", "--id", name, before=before, env=address)

    def __enter__(self) -> Self:
        count = len(self._names)
        try:
            self.wait_until(lambda state: len(state.get("agents", ())) == count and bool(state["models"]))
            self._call(self.address, "POST", "/v1/fleet/place", {"model": DEMO_MODEL, "replicas": count})
        except BaseException:
            self.close()
            raise
        return super().__enter__()

    def kill_host(self, agent: str) -> None:
        """Cut the host's link, then kill its processes."""
        _run("ip", "link", "set", f"to-{agent}", "down")
        process = self._hosts[agent]
        kill(self.tree(process.pid))
        process.wait()

    def restore_host(self, agent: str) -> None:
        """The host is connected, and its agent started."""
        _run("ip", "link", "set", f"to-{agent}", "up")
        self._start_agent(agent)

    def close(self) -> None:
        """End the fleet and remove its home."""
        for process in self._hosts.values():
            process.terminate()
        for process in self._hosts.values():
            process.wait()
        super().close()
