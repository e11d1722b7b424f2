"""A Ray cluster of three nodes, and agents on two of them: a program for test_ray.py, in namespaces of its own.

It has the only network interface `lo`, and every process ends with it.  The last line is a JSON object.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pipeline import procfs
from pipeline.config.load import load
from pipeline.coordination.address import open_store
from pipeline.errors import StarlingError
from pipeline.fleet.records import agent_key, decode
from starling.launchers.ray_cluster import RayLauncher

HEAD, NODES = "127.0.0.1", ("127.0.0.2", "127.0.0.3")
WAIT_S = 240.0
POLL_S = 0.2
AGENT = "ray-agent-1"


def bring_up_loopback() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        flags = struct.unpack("16sh", fcntl.ioctl(one, 0x8913, struct.pack("16sh", b"lo", 0))[:18])[1]
        fcntl.ioctl(one, 0x8914, struct.pack("16sh", b"lo", flags | 1))


def start_node(address: str, folder: Path) -> None:
    command = [Path(sys.executable).parent / "ray", "start", f"--node-ip-address={address}", "--num-cpus=1"]
    command += ["--object-store-memory=80000000", "--disable-usage-stats"]
    if address == HEAD:
        command += ["--head", "--port=6379", "--include-dashboard=false", f"--temp-dir={folder}", "--resources={}"]
    else:
        command += [f"--address={HEAD}:6379", '--resources={"agent": 2}']
    with (folder / f"{address}.log").open("wb") as log:
        done = subprocess.run(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, (folder / f"{address}.log").read_text()


def processes(*words: str) -> Iterator[int]:
    """Those with all of the words in their command."""
    for name in os.listdir("/proc"):
        if name.isdigit():
            command = " ".join(procfs.command(int(name)))
            if all(word in command for word in words):
                yield int(name)


def until(what: str, holds: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + WAIT_S
    while not (found := holds()):
        assert time.monotonic() < deadline, f"not within {WAIT_S:g} s: {what}"
        time.sleep(POLL_S)
    print(f"{time.monotonic():.1f} {what}", flush=True)
    return found


def kill(pids: Iterator[int]) -> int:
    killed = 0
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            killed += 1
    return killed


def children(parents: list[int]) -> list[int]:
    stats = {int(name): procfs.read_stat(int(name)) for name in os.listdir("/proc") if name.isdigit()}
    found = [pid for pid, stat in stats.items() if stat is not None and stat.parent in parents]
    return [*found, *children(found)] if found else []


def registered(agent_id: str) -> str:
    """The agent's URL in the coordination store; "" when it has none."""

    async def read() -> str:
        async with open_store(load()) as store:
            entry = await store.get(agent_key(agent_id))
            return decode(agent_key(agent_id), entry.value).url if entry is not None else ""

    return asyncio.run(read())


def main(folder: Path) -> dict[str, Any]:
    bring_up_loopback()
    for address in (HEAD, *NODES):
        start_node(address, folder)
    fleet = load().fleet
    launcher = RayLauncher(fleet)

    def of(agent_id: str) -> Any:
        return next((one for one in launcher.list() if one.agent_id == agent_id and one.state == "running"), None)

    launcher.start(1)
    first = until("an agent runs", lambda: of(AGENT))
    url = until("it is registered", lambda: registered(AGENT))
    assert url.startswith(f"http://{first.host}:"), url

    assert kill(processes("starling agent", AGENT)) == 1
    again = until("the agent is started again", lambda: (one := of(AGENT)) and one.restarts == 1 and one)
    assert again.host == first.host

    # Its node dies: the raylet, its workers, and what these hold.
    raylets = [*processes("/raylet ", f"--node_ip_address={first.host}")]
    assert kill(iter([*raylets, *children(raylets)])) > 1
    moved = until("the agent runs elsewhere", lambda: (one := of(AGENT)) and one.host != first.host and one)
    elsewhere = until(
        "it is registered there", lambda: (found := registered(AGENT)).startswith(f"http://{moved.host}:") and found
    )

    launcher.start(2)
    until("two agents run", lambda: of(AGENT) and of("ray-agent-2"))
    lines = until("the agent has a log", lambda: list(launcher.logs(AGENT, 3, follow=False)))
    following = launcher.logs(AGENT, 1, follow=True)
    assert next(following)
    launcher.start(1)
    until("one agent runs", lambda: [one.agent_id for one in launcher.list()] == [AGENT])
    launcher.stop()
    until("the actor is gone", lambda: launcher.list() == ())
    until("the agent has ended", lambda: not list(processes("starling agent")))

    # Who has no token gets no answer.
    env = {**os.environ, "RAY_AUTH_TOKEN": "b" * 32}
    refused = subprocess.run([sys.executable, __file__, "connect"], env=env, capture_output=True, text=True)
    return {
        "first": first.host,
        "moved": moved.host,
        "url": elsewhere,
        "lines": len(lines),
        "refused": refused.returncode != 0 and "no Ray cluster" in refused.stdout,
    }


if __name__ == "__main__":
    if sys.argv[1] == "connect":
        try:
            RayLauncher(load().fleet).list()
        except StarlingError as error:
            print(error.message)
            sys.exit(1)
        sys.exit(0)
    print(json.dumps(main(Path(sys.argv[1]))))
