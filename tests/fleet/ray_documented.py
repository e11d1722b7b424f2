"""The commands of docs/fleet.md for Ray, as they stand but for addresses: a program for test_ray.py, in namespaces.

The last line is a JSON object: the agents that `starling fleet launched` shows while the documented orchestrator runs.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.fleet.ray_scenario import bring_up_loopback, processes, until
from tools.checks import markdown

PAGE = Path(__file__).parents[2] / "docs" / "fleet.md"
TOKEN = "/etc/starling/ray-token"


def commands(folder: Path) -> str:
    """The block of the page, with a token in `folder` and the addresses of this machine."""
    (text,) = [block.text for block in markdown.blocks(PAGE.read_text()) if block.info == "sh ray"]
    assert TOKEN in text
    return text.replace(TOKEN, str(folder / "token")).replace("10.0.0.1", "127.0.0.1")


def starling(*words: str) -> str:
    environment = {
        **os.environ,
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(Path(sys.argv[1]) / "token"),
        "STARLING_FLEET__RAY__ADDRESS": "127.0.0.1:6379",
    }
    command = [sys.executable, "-m", "starling", *words]
    return subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout


def main(folder: Path) -> list[dict[str, Any]]:
    bring_up_loopback()
    token = folder / "token"
    token.write_text("a" * 32)
    token.chmod(0o600)
    log = folder / "output"
    with log.open("w") as output:
        shell = subprocess.Popen(
            ["bash", "-euxc", commands(folder)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )

    def is_ready() -> bool:
        assert shell.poll() is None, log.read_text()
        return " is ready at " in log.read_text()

    def launched() -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads(starling("fleet", "launched", "--launcher", "ray", "--json"))
        return [one for one in found if one["state"] == "running"]

    until("the orchestrator is ready", is_ready)
    agents = until("an agent runs", launched)
    os.killpg(shell.pid, signal.SIGINT)
    assert shell.wait(60) in (0, -signal.SIGINT), log.read_text()
    starling("fleet", "down", "--launcher", "ray")
    until("the agent has ended", lambda: not list(processes("starling agent")))
    return agents


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))))
