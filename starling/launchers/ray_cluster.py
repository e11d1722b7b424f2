"""Agents on the nodes of a Ray cluster: one detached actor each, which holds the agent's process.

An actor takes one of the resource `agent` of its node, so the nodes that are to have agents are started with it.  Ray
makes an actor again when it or its node dies.  A node that was only silent may come back with a second agent of the
same id: the coordination store gives the lease to one of them, and the other one does not serve.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from pipeline.config.schema import FleetConfig
from pipeline.errors import ConfigError, NotFound, StarlingError
from pipeline.extras import how_to_install
from starling.launchers.interface import LaunchedAgent, log_lines
from starling.launchers.ray_actor import AgentHolder

PREFIX = "ray-agent-"
RESOURCE = "agent"  # of a node: how many agents it may have
ANSWER_S = 10.0  # for an actor to answer
STOP_S = 120.0  # for an agent to end
POLL_S = 0.5


class RayLauncher:
    """The agents of one namespace of a cluster."""

    def __init__(self, fleet: FleetConfig) -> None:
        """Connects to the cluster. Raises `ConfigError` without Ray, `StarlingError` without a cluster."""
        try:
            import ray
        except ImportError:
            raise ConfigError(f"the launcher ray needs Ray: {how_to_install('ray')}", "fleet.launcher") from None
        self._ray: Any = ray
        self._fleet = fleet
        self._settings = fleet.ray
        if ray.is_initialized():
            return
        try:
            ray.init(
                address=self._settings.address or "auto",
                namespace=self._settings.namespace,
                log_to_driver=False,
                logging_level=logging.ERROR,
            )
        except Exception as error:  # Ray raises ConnectionError, RuntimeError, ValueError and errors of its own
            raise StarlingError("INTERNAL", f"no Ray cluster at {self._settings.address or 'auto'}: {error}") from None

    def start(self, agents: int | None) -> None:
        """Have an actor for each agent, by default one for each `agent` that the nodes have. Raises `StarlingError`."""
        room = int(self._ray.cluster_resources().get(RESOURCE, 0))
        if not room:
            raise StarlingError(
                "INTERNAL", """no node of the Ray cluster has room for an agent: ray start --resources '{"agent": 1}'"""
            )
        wanted = {f"{PREFIX}{number}" for number in range(1, (agents or room) + 1)}
        present = set(self._names())
        for name in sorted(present - wanted):
            self._end(name)
        remote = self._ray.remote(AgentHolder)
        for name in sorted(wanted - present):
            options = remote.options(
                name=name,
                lifetime="detached",
                max_restarts=-1,
                max_concurrency=8,
                num_cpus=0,
                resources={RESOURCE: 1},
                get_if_exists=True,
            )
            options.remote(name, self._environment())

    def stop(self) -> None:
        """End the agents and their actors. Raises `StarlingError`."""
        for name in self._names():
            self._end(name)

    def list(self) -> tuple[LaunchedAgent, ...]:
        """The actors, which answer where their agent is; those that do not answer are being placed."""
        names = self._names()
        calls = {name: actor.state.remote() for name in names if (actor := self._actor(name)) is not None}
        ready, _ = self._ray.wait([*calls.values()], num_returns=len(calls), timeout=ANSWER_S) if calls else ([], [])
        found = []
        for name in names:
            host, state, restarts = "", "starting", 0
            if calls.get(name) in ready:
                with suppress(self._ray.exceptions.RayError):
                    host, state, restarts = self._ray.get(calls[name])
            found.append(LaunchedAgent(agent_id=name, host=host, state=state, restarts=restarts))  # type: ignore[arg-type]
        return tuple(found)

    def logs(self, agent_id: str, lines: int, *, follow: bool) -> Iterator[str]:
        """The lines of the agent's log file on its node. Raises `NotFound`, `StarlingError`."""
        actor = self._actor(agent_id)
        if actor is None:
            raise NotFound(f"there is no agent {agent_id!r}; `starling fleet launched` lists them")
        data, position = self._ask(actor.log.remote(lines))
        yield from log_lines(data.decode("utf-8", "replace"))
        while follow:
            time.sleep(POLL_S)
            data, position = self._ask(actor.log_after.remote(position))
            yield from log_lines(data.decode("utf-8", "replace"))

    def _environment(self) -> dict[str, str]:
        """What of this machine's configuration agents elsewhere need. Secrets are not sent."""
        values = {"STORE": self._fleet.store, "BLOBS": self._fleet.blobs, "BLOBS_ENDPOINT": self._fleet.blobs_endpoint}
        return {f"STARLING_FLEET__{name}": value for name, value in values.items() if value}

    def _names(self) -> tuple[str, ...]:
        found = self._ray.util.list_named_actors()
        return tuple(sorted(name for name in found if name.startswith(PREFIX)))

    def _actor(self, name: str) -> Any:
        try:
            return self._ray.get_actor(name)
        except ValueError:
            return None

    def _end(self, name: str) -> None:
        actor = self._actor(name)
        if actor is None:
            return
        with suppress(self._ray.exceptions.RayError):  # an actor without a node has no agent to end
            self._ray.get(actor.stop.remote(), timeout=STOP_S)
        self._ray.kill(actor)

    def _ask(self, call: Any) -> Any:
        try:
            return self._ray.get(call, timeout=ANSWER_S)
        except self._ray.exceptions.RayError as error:
            raise StarlingError("INTERNAL", f"the node of the agent does not answer: {error}") from None
