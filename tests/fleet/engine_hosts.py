"""A fleet of real processes whose agents run one model of another engine: an orchestrator and agents by id."""

from __future__ import annotations

import http.client
import json
import re
from typing import Any, Generic, TypeVar

from pipeline.fleet import token
from tests.fleet.agent_process import Agent
from tests.orchestrator.fleet import Fleet

MINE, OTHER = {"Authorization": "Bearer sk-mine"}, {"Authorization": "Bearer sk-other"}
KEYS = [{"key": "sk-mine", "tenant": "mine"}, {"key": "sk-other", "tenant": "other"}]
AnyAgent = TypeVar("AnyAgent", bound=Agent)


class Hosts(Generic[AnyAgent]):
    """The fleet, and its agents by id."""

    def __init__(self, fleet: Fleet, agents: dict[str, AnyAgent]) -> None:
        self.fleet = fleet
        self.agents = agents

    def ready(self) -> None:
        """Wait until the model is ready at both agents."""
        self.fleet.wait(lambda state: [_is_ready(one) for one in state["agents"]] == [True, True])

    def serving(self, request_id: str) -> tuple[AnyAgent, AnyAgent]:
        """The agent that was sent a request last, and the other one."""
        why = self.fleet.get(f"/v1/fleet/why/{request_id}", token.authorization(self.fleet.secret)).json
        name = why["choices"][-1]["agent_id"]
        (other,) = [one for one in self.agents if one != name]
        return self.agents[name], self.agents[other]

    def open(self, path: str, body: dict[str, Any]) -> tuple[http.client.HTTPConnection, Any]:
        connection = self.fleet.connect()
        headers = {"Content-Type": "application/json", **MINE}
        connection.request("POST", path, json.dumps(body).encode(), headers)
        return connection, connection.getresponse()


def _is_ready(agent: dict[str, Any]) -> bool:
    models = agent.get("loaded_models", [])
    return agent["health"] == "READY" and any(one["cache_state"] == "READY" for one in models)


def texts(stream: bytes) -> list[str]:
    """The texts of a stream's events."""
    found = []
    for event in re.findall(rb"^data: (\{.*)$", stream, re.M):
        for choice in json.loads(event).get("choices", []):
            found.append(choice.get("text") or choice.get("delta", {}).get("content") or "")
    return [one for one in found if one]
