"""Agents as pods: the chart in chart/ is installed by `helm`, and pods are read with `kubectl`.

Both programs find the cluster as they always do (KUBECONFIG, the current context).  The chart brings the whole fleet:
orchestrators, agents and, unless `store` names another one, etcd.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml

from pipeline.config.schema import FleetConfig
from pipeline.config.user_home import expand_user
from pipeline.errors import ConfigError, NotFound
from starling.launchers import programs
from starling.launchers.interface import LaunchedAgent, State, log_lines

CHART = Path(__file__).parent / "chart"
CALL_S = 300.0  # for one call of helm or kubectl
REQUEST_S = 60  # that kubectl waits for the cluster to answer
HTTPS_PORT = 443
_FAILING = ("CrashLoopBackOff", "ImagePullBackOff", "ErrImagePull", "CreateContainerConfigError", "InvalidImageName")


class KubernetesLauncher:
    """The fleet of one Helm release. `env`: of helm and kubectl."""

    def __init__(self, fleet: FleetConfig, env: Mapping[str, str] = os.environ) -> None:
        self._fleet = fleet
        self._cluster = fleet.kubernetes
        self._env = dict(env)

    def start(self, agents: int | None) -> None:
        """Install the chart, or change what is installed. Raises `StarlingError`."""
        name = self._cluster.release
        files, own = ["--values", "-"], dict[str, Any]()
        if self._cluster.values:
            path = expand_user(self._cluster.values)
            if not path.is_file():
                raise ConfigError(
                    f"fleet.kubernetes.values: {path} does not exist; name a YAML file", "fleet.kubernetes.values"
                )
            files += ["--values", str(path)]
            own = _values_of(path)
            if agents is not None and _is_daemon_set(own):
                raise ConfigError(
                    f"--agents {agents}: agent.kind in {path} is DaemonSet, which has an agent on each node that "
                    "agent.nodeSelector chooses; leave --agents out and label nodes, or set agent.kind to StatefulSet",
                    "fleet.kubernetes.values",
                )
        self._helm(
            *("upgrade", "--install", "--create-namespace", name, str(CHART), *files),
            *(() if agents is None else ("--set", f"agent.replicas={agents}")),
            stdin=json.dumps(self._defaults(own)),
        )

    def stop(self) -> None:
        """Uninstall the release. The volumes of agents stay. Raises `StarlingError`."""
        self._helm("uninstall", self._cluster.release, "--ignore-not-found")

    def list(self) -> tuple[LaunchedAgent, ...]:
        """The pods of agents. Raises `StarlingError`."""
        found = json.loads(self._kubectl("get", "pods", "--selector", self._selector(), "--output", "json"))
        return tuple(sorted(map(_agent, found["items"]), key=lambda one: one.agent_id))

    def logs(self, agent_id: str, lines: int, *, follow: bool) -> Iterator[str]:
        """The lines of the agent's pod. Raises `NotFound`, `StarlingError`."""
        pods = json.loads(self._kubectl("get", "pods", "--selector", self._selector(), "--output", "json"))["items"]
        pod = next((one["metadata"]["name"] for one in pods if _agent(one).agent_id == agent_id), None)
        if pod is None:
            raise NotFound(f"there is no agent {agent_id!r}; `starling fleet launched` lists them")
        command = self._command("kubectl", "logs", pod, "--container", "agent", "--tail", str(lines))
        if not follow:
            yield from log_lines(self._call((*command, f"--request-timeout={REQUEST_S}s")))
            return
        yield from programs.follow([*command, "--follow"], self._env)

    def _defaults(self, own: Mapping[str, Any]) -> dict[str, Any]:
        """Values from the configuration, which those of a file, `own`, replace."""
        values: dict[str, Any] = {}
        ports: dict[str, Any] = {}  # to which pods may connect, where the chart's defaults do not have them
        if "://" in self._fleet.blobs and not self._fleet.blobs.startswith("file://"):
            values["blobs"] = self._fleet.blobs
            options = {"blobs_endpoint": self._fleet.blobs_endpoint, "blobs_region": self._fleet.blobs_region}
            values["config"] = {"fleet": {name: value for name, value in options.items() if value}}
            address = urlsplit(self._fleet.blobs_endpoint or self._fleet.blobs)
            port = address.port or (80 if address.scheme == "http" else HTTPS_PORT)
            if "blobs" not in own and port != HTTPS_PORT:
                ports["blobPorts"] = [HTTPS_PORT, port]
        if self._fleet.store.startswith(("etcd://", "redis://")):
            values["store"] = self._fleet.store
            if "store" not in own:
                ports["storePort"] = urlsplit(self._fleet.store).port
        return {**values, "networkPolicy": ports} if ports else values

    def _selector(self) -> str:
        labels = {"name": "starling", "instance": self._cluster.release, "component": "agent"}
        return ",".join(f"app.kubernetes.io/{name}={value}" for name, value in labels.items())

    def _helm(self, *arguments: str, stdin: str = "") -> str:
        return self._call(self._command("helm", *arguments), stdin)

    def _kubectl(self, *arguments: str) -> str:
        return self._call(self._command("kubectl", *arguments, f"--request-timeout={REQUEST_S}s"))

    def _command(self, program: str, *arguments: str) -> tuple[str, ...]:
        path = programs.find(program, "kubernetes", self._env)
        context = self._cluster.context
        option = [f"--{'kube-' if program == 'helm' else ''}context={context}"] if context else []
        return (path, f"--namespace={self._cluster.namespace}", *option, *arguments)

    def _call(self, command: tuple[str, ...], stdin: str = "") -> str:
        """What the program prints. Raises `StarlingError` with what it says of its failure."""
        return programs.call(command, self._env, CALL_S, "; is the cluster up?", stdin)


def _values_of(path: Path) -> dict[str, Any]:
    """The values of a file; none of one that cannot be read, of which helm says why."""
    try:
        found = yaml.safe_load(path.read_text("utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return found if isinstance(found, dict) else {}


def _is_daemon_set(own: Mapping[str, Any]) -> bool:
    agent = own.get("agent")
    return isinstance(agent, dict) and agent.get("kind") == "DaemonSet"


def _agent(pod: Mapping[str, Any]) -> LaunchedAgent:
    """The agent of a pod: its id is what the chart gives it, the node's name in a DaemonSet."""
    status = pod.get("status", {})
    containers = status.get("containerStatuses", [])
    waiting = [one.get("state", {}).get("waiting", {}).get("reason", "") for one in containers]
    state: State = "starting"
    if status.get("phase") == "Failed" or any(reason in _FAILING for reason in waiting):
        state = "failed"
    elif containers and all(one.get("ready") for one in containers):
        state = "running"
    node = pod.get("spec", {}).get("nodeName", "")
    owner = next((one["kind"] for one in pod["metadata"].get("ownerReferences", ())), "")
    return LaunchedAgent(
        agent_id=node if owner == "DaemonSet" and node else pod["metadata"]["name"],
        host=node,
        state=state,
        restarts=sum(one.get("restartCount", 0) for one in containers),
    )
