"""An orchestrator and two agents with a tiny model, all real processes."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from starling.cli import cli
from tests.e2e.conftest import share_caches
from tests.fleet.agent_process import Agent, publish_tiny
from tests.orchestrator.fleet import Fleet
from tools.tiny_gguf import SHAPES, Shape

NAMES = ("one", "two")
SECTIONS = {"auth": {"api_keys": [{"key": "sk-mine", "tenant": "mine"}]}}
MINE = {"Authorization": "Bearer sk-mine"}
# Engines refuse what they would not finish in the time of a request: on a busy machine many streams take long.
UNHURRIED = {"request_timeout_ms": 3_600_000}
# A lease, or a silence, that outlasts any pause of a busy machine: after a shorter one an agent serves nothing.
PATIENT = {"poll_ms": 50, "wait_ms": 60_000, "silent_ms": 600_000}


class Host(Agent):
    """An agent, and the calls with which an orchestrator moves sessions."""

    def move(self, session: str, step: str, move: str, other: str) -> None:
        body = {"tenant": "mine", "session": session, "step": step, "move": move, "agent_id": other}
        status, answer = self.call("/move_session", model_id="tiny", **body)
        assert status == 200, answer

    def sessions(self) -> dict[str, str]:
        """States by id."""
        status, answer = self.call("/list_sessions", model_id="tiny")
        assert status == 200, answer
        return {one["session"]: one["state"] for one in answer["sessions"]}

    def kill(self) -> None:
        """The agent, with which its engine ends; then a successor, with its model."""
        assert self.process is not None
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.start().wait_ready()
        status, answer = self.call("/load_model", model_id="tiny")
        assert status == 200, answer


class Hosts:
    """An orchestrator and two agents with a model."""

    def __init__(
        self,
        base: Path,
        sections: dict[str, Any] = SECTIONS,
        *,
        shape: Shape = SHAPES["small"],
        cache_mb: Mapping[str, int] = {},
        **orchestrator: Any,
    ) -> None:
        """`shape`: of the model. `cache_mb`: of the KV arenas of agents. `orchestrator`: keys of its section."""
        blobs = base / "blobs"
        publish_tiny(base, blobs, shape=shape)
        self.fleet = Fleet(
            base / "o",
            {
                **sections,
                "fleet": {"blobs": str(blobs), "orchestrator": {**PATIENT, **orchestrator}},
            },
        )
        self.agents: dict[str, Host] = {}
        for name in NAMES:
            home = base / name
            home.mkdir()
            share_caches(home)
            (home / "fleet-token").write_text(self.fleet.secret)
            (home / "fleet-token").chmod(0o600)
            store = f"sqlite:{self.fleet.home / 'fleet.db'}"
            agent = {"id": name, "lease_ms": 600_000}
            config = {
                "server": UNHURRIED,
                "cache": {"max_size_mb": cache_mb.get(name, 32)},
                "fleet": {"store": store, "blobs": str(blobs), "agent": agent},
            }
            self.agents[name] = Host(home, config)

    def __enter__(self) -> Hosts:
        for agent in self.agents.values():
            agent.start()
        for agent in self.agents.values():
            agent.wait_ready()
            status, answer = agent.call("/load_model", model_id="tiny")
            assert status == 200, answer
        self.wait_ready(self.fleet)
        return self

    def __exit__(self, *exc: object) -> None:
        self.fleet.process.kill()
        self.fleet.process.wait()
        for agent in self.agents.values():
            agent.stop()

    def wait_ready(self, fleet: Fleet) -> None:
        fleet.wait(
            lambda state: (
                [
                    one["health"] == "READY" and [model["cache_state"] for model in one["loaded_models"]] == ["READY"]
                    for one in state["agents"]
                ]
                == [True, True]
            )
        )

    def cordon(self, name: str, cordoned: bool, drain: bool = False) -> None:
        headers = {"Authorization": f"Bearer {self.fleet.secret}"}
        body = {"agent": name, "cordoned": cordoned, "drain": drain}
        assert self.fleet.post("/v1/fleet/cordon", body, headers).status == 200
        self.fleet.wait(
            lambda state: all(one["cordoned"] is cordoned for one in state["agents"] if one["agent_id"] == name)
        )

    def run(self, *words: str) -> Any:
        environment = {"STARLING_HOME": str(self.fleet.home), "STARLING_CONFIG": str(self.fleet.home / "starling.yaml")}
        url = f"http://127.0.0.1:{self.fleet.port}"
        return CliRunner().invoke(cli, ["fleet", *words, "--url", url], env=environment)

    def holders(self, session: str) -> list[str]:
        return [name for name, agent in self.agents.items() if agent.sessions().get(session) == "held"]
