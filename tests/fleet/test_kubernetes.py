"""The chart and the launcher for Kubernetes: real helm and kubectl, and the schemas of Kubernetes.

`kubectl` and `helm` talk to `kube_api.py`: no cluster is needed, and none is claimed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from base64 import b64decode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from click.testing import CliRunner

from pipeline.config.load import resolve
from pipeline.config.schema import FleetConfig, KubernetesConfig
from pipeline.errors import ConfigError, NotFound, StarlingError
from pipeline.fleet import token
from starling.cli.fleet import fleet
from starling.launchers.kubernetes import CHART, KubernetesLauncher, _values_of
from tests.fleet.peers import program
from tools.checks.markdown import blocks as blocks_of

ROOT = Path(__file__).parents[2]
MANIFESTS = ROOT / "configs" / "kubernetes"
PROBES = ("startupProbe", "livenessProbe", "readinessProbe")
OPERATORS = [{"kind": "User", "name": "alice"}, {"kind": "ServiceAccount", "name": "ci", "namespace": "x"}]
VERSIONS = ("1.25.0", "1.29.0", "1.33.0", "1.37.0")
BUCKET = {"blobs": "s3://models/starling"}
MOST = {
    "blobsClaim": "models",
    "store": "etcd://etcd.example:2379",
    "config": {"rate_limits": {"requests_per_minute": 60}, "fleet": {"agent": {"max_models": 2}}},
    "credentialsSecret": "bucket",
    "imagePullSecrets": [{"name": "registry"}],
    "token": {"existingSecret": "token"},
    "apiKeys": {"existingSecret": "keys"},
    "orchestrator": {
        "nodeSelector": {"role": "front"},
        "podAnnotations": {"a": "b"},
        "serviceAnnotations": {"c": "d"},
        "serviceType": "LoadBalancer",
        "tolerations": [{"key": "front", "operator": "Exists"}],
    },
    "agent": {
        "kind": "DaemonSet",
        "nodeSelector": {"nvme": "true"},
        "podAnnotations": {"a": "b"},
        "tolerations": [{"key": "models", "operator": "Exists"}],
    },
    "serviceAccount": {"annotations": {"role": "reader"}},
    "networkPolicy": {
        "clients": [{"namespaceSelector": {"matchLabels": {"web": "true"}}}],
        "monitoring": [{"namespaceSelector": {"matchLabels": {"prometheus": "true"}}}],
        "blobPorts": [443, 9000],
    },
    "rbac": {"operators": OPERATORS},
}
VALUES: dict[str, dict[str, Any]] = {
    "bucket": BUCKET,
    "most": MOST,
    "open": {**BUCKET, "networkPolicy": {"enabled": False}, "agent": {"storageClassName": "local-nvme"}},
}


def template(values: dict[str, Any], name: str = "starling") -> subprocess.CompletedProcess[str]:
    command = [program("helm"), "template", name, str(CHART), "--namespace", "starling", "--values", "-"]
    return subprocess.run(command, input=yaml.safe_dump(values), capture_output=True, text=True)


def rendered(values: dict[str, Any], name: str = "starling") -> list[dict[str, Any]]:
    done = template(values, name)
    assert done.returncode == 0, done.stderr
    return [one for one in yaml.safe_load_all(done.stdout) if one]


def of_kind(objects: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [one for one in objects if one["kind"] == kind]


@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES)
def test_the_chart_is_valid_for_every_kubernetes(values: dict[str, Any]) -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="not installed: make fleet-peers").validate
    objects = rendered(values)
    assert len(objects) >= 11
    for version in VERSIONS:
        for one in objects:
            validate(one, version, strict=True)


@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES)
def test_the_parts_of_the_chart_fit_together(values: dict[str, Any]) -> None:
    check_objects(rendered(values, "my-fleet"))


def test_the_manifests_fit_together() -> None:
    check_objects([one for one in yaml.safe_load_all((MANIFESTS / "fleet.yaml").read_text()) if one])


def test_the_manifests_are_the_chart() -> None:
    found = template(yaml.safe_load((MANIFESTS / "values.yaml").read_text()))
    assert found.stdout == (MANIFESTS / "fleet.yaml").read_text(), (
        "helm template starling starling/launchers/chart --namespace starling --values configs/kubernetes/values.yaml"
    )


def check_objects(objects: list[dict[str, Any]]) -> None:
    """Names that one object uses of another exist, and the configuration is one of this version."""
    names = {(one["kind"], one["metadata"]["name"]) for one in objects}
    assert len(names) == len(objects)
    [config] = of_kind(objects, "ConfigMap")
    workloads = [one for kind in ("Deployment", "StatefulSet", "DaemonSet") for one in of_kind(objects, kind)]
    assert len(workloads) >= 2
    labels = []
    for one in workloads:
        template, pod = one["spec"]["template"], one["spec"]["template"]["spec"]
        labels.append(template["metadata"]["labels"])
        assert_selects(one["spec"]["selector"]["matchLabels"], [template["metadata"]["labels"]])
        volumes = {volume["name"] for volume in pod["volumes"]} if "volumes" in pod else set()
        volumes |= {claim["metadata"]["name"] for claim in one["spec"].get("volumeClaimTemplates", ())}
        containers = pod["containers"] + pod.get("initContainers", [])
        used = {mount["name"] for container in containers for mount in container.get("volumeMounts", ())}
        assert used == volumes
        for volume in pod.get("volumes", ()):
            if "configMap" in volume:
                assert volume["configMap"]["name"] == config["metadata"]["name"]
        if one["kind"] == "StatefulSet":
            assert ("Service", one["spec"]["serviceName"]) in names
        if "serviceAccountName" in pod:
            assert ("ServiceAccount", pod["serviceAccountName"]) in names
        for container in containers:
            ports = {port["name"] for port in container.get("ports", ())}
            probes = [container[name]["httpGet"]["port"] for name in PROBES if name in container]
            assert set(probes) == ports  # none in an init container
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
            assert container["securityContext"]["readOnlyRootFilesystem"]
            assert "limits" in container["resources"]
            environment = {
                variable["name"]: variable.get("value", "10.0.0.7")
                for variable in container.get("env", ())
                if "__" in variable["name"]
            }
            if "STARLING_CONFIG" in str(container.get("env")):
                text = yaml.safe_load(config["data"]["fleet.yaml"])
                resolved = resolve(text, environment)
                port = resolved.fleet.agent.port if container["name"] == "agent" else resolved.fleet.orchestrator.port
                assert [one["containerPort"] for one in container["ports"]] == [port]
    for service in of_kind(objects, "Service"):
        assert_selects(service["spec"]["selector"], labels)
    for budget in of_kind(objects, "PodDisruptionBudget"):
        assert_selects(budget["spec"]["selector"]["matchLabels"], labels)
    for policy in of_kind(objects, "NetworkPolicy"):
        assert_selects(policy["spec"]["podSelector"]["matchLabels"], labels)
        peers = [peer for rule in policy["spec"]["ingress"] for peer in rule.get("from", ())]
        peers += [peer for rule in policy["spec"]["egress"] for peer in rule.get("to", ())]
        for peer in peers:
            if "podSelector" in peer:
                assert_selects(peer["podSelector"]["matchLabels"], labels)


def assert_selects(selector: dict[str, str], labels: list[dict[str, str]]) -> None:
    assert sum(selector.items() <= one.items() for one in labels) == 1, selector


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "set blobs to the store of published models"),
        ({**BUCKET, "etcd": {"enabled": False}}, "set store to the address of your etcd"),
        ({**BUCKET, "agent": {"kind": "Job"}}, "agent.kind is Job; it must be StatefulSet or DaemonSet"),
    ],
)
def test_values_that_cannot_work_are_refused(values: dict[str, Any], message: str) -> None:
    done = template(values)
    assert done.returncode != 0
    assert message in done.stderr


def test_a_scraper_gets_the_token_that_reads_metrics_alone() -> None:
    objects = rendered({**BUCKET, "monitoring": {"podMonitor": True, "labels": {"release": "prometheus"}}}, "my-fleet")
    check_objects(objects)
    [secret] = of_kind(objects, "Secret")
    made, derived = (b64decode(secret["data"][key]).decode() for key in ("fleet-token", "metrics-token"))
    assert derived == token.for_metrics(made)
    monitors = of_kind(objects, "PodMonitor")
    pods = [one["spec"]["template"] for kind in ("Deployment", "StatefulSet") for one in of_kind(objects, kind)]
    jobs = set()
    for monitor in monitors:
        assert monitor["metadata"]["labels"]["release"] == "prometheus"
        selector = monitor["spec"]["selector"]["matchLabels"].items()
        [pod] = [one for one in pods if selector <= one["metadata"]["labels"].items()]
        [endpoint] = monitor["spec"]["podMetricsEndpoints"]
        assert endpoint["port"] in [port["name"] for port in pod["spec"]["containers"][0]["ports"]]
        found = endpoint["authorization"]["credentials"]
        assert found == {"name": secret["metadata"]["name"], "key": "metrics-token"}
        jobs.add(endpoint["relabelings"][0]["replacement"])
    config = yaml.safe_load((ROOT / "configs" / "prometheus" / "fleet.yml").read_text())
    assert jobs == {job["job_name"] for job in config["scrape_configs"]}
    assert not of_kind(rendered(BUCKET), "PodMonitor")


def test_a_scraper_is_admitted_beside_clients() -> None:
    """The pods of each PodMonitor admit `networkPolicy.monitoring`; without `clients` orchestrators admit all."""
    clients, monitoring = ([{"namespaceSelector": {"matchLabels": {name: "true"}}}] for name in ("web", "prometheus"))
    for given in ([], clients):
        policy = {"clients": given, "monitoring": monitoring}
        objects = rendered({**BUCKET, "monitoring": {"podMonitor": True}, "networkPolicy": policy})
        policies = of_kind(objects, "NetworkPolicy")
        rules_of = {str(one["spec"]["podSelector"]): one["spec"]["ingress"] for one in policies}
        admitted = [rules_of[str(one["spec"]["selector"])] for one in of_kind(objects, "PodMonitor")]
        assert len(admitted) == 2
        assert all(any("from" not in rule or monitoring[0] in rule["from"] for rule in rules) for rules in admitted)
    [orchestrator] = [one for one in policies if "-orchestrator" in one["metadata"]["name"]]
    assert orchestrator["spec"]["ingress"][0]["from"] == clients + monitoring


def test_only_agents_that_store_models_have_room_for_them() -> None:
    """NVMe and /dev/shm: of each agent, for a StatefulSet by claims, for a DaemonSet of the node."""
    for values, kind in ((BUCKET, "StatefulSet"), (MOST, "DaemonSet")):
        [agent] = [one for one in of_kind(rendered(values), kind) if one["metadata"]["name"].endswith("-agent")]
        pod = agent["spec"]["template"]["spec"]
        mounts = {one["mountPath"]: one["name"] for one in pod["containers"][0]["volumeMounts"]}
        volumes = {one["name"]: one for one in pod["volumes"]}
        assert volumes[mounts["/dev/shm"]]["emptyDir"]["medium"] == "Memory"
        claims = [one["metadata"]["name"] for one in agent["spec"].get("volumeClaimTemplates", ())]
        home = mounts["/var/lib/starling"]
        assert home in claims if kind == "StatefulSet" else "hostPath" in volumes[home]


@pytest.mark.parametrize(("values", "names"), [(BUCKET, ["agent", "orchestrator"]), (MOST, ["orchestrator"])])
def test_a_daemon_set_has_no_budget(values: dict[str, Any], names: list[str]) -> None:
    """It has no subresource `scale`: Kubernetes could not count its pods, and would let none go."""
    budgets = [one["metadata"]["name"] for one in of_kind(rendered(values), "PodDisruptionBudget")]
    assert sorted(budgets) == [f"starling-{name}" for name in names]


class Cluster:
    """An API server for one test, and the environment that leads to it."""

    def __init__(self, api: Any, folder: Path) -> None:
        self.api = api
        path = os.pathsep.join(sorted({str(Path(program(name)).parent) for name in ("helm", "kubectl")}))
        self.env = {"PATH": path, "HOME": str(folder), "KUBECONFIG": str(api.kubeconfig(folder / "kubeconfig"))}

    def launcher(self, **options: Any) -> KubernetesLauncher:
        return KubernetesLauncher(FleetConfig(blobs="s3://models/starling", **options), self.env)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed: make fleet-peers")
    from tests.fleet.kube_api import KubeApi

    with KubeApi() as api:
        yield Cluster(api, tmp_path)


@pytest.mark.slow
def test_the_launcher_installs_scales_lists_and_removes_a_fleet(cluster: Cluster, tmp_path: Path) -> None:
    file = tmp_path / "values.yaml"
    file.write_text(yaml.safe_dump({"agent": {"replicas": 2, "storage": "1Ti"}}))
    launcher = cluster.launcher(kubernetes=KubernetesConfig(namespace="models", release="blue", values=str(file)))
    launcher.start(None)
    assert [(one.agent_id, one.host, one.state, one.restarts) for one in launcher.list()] == [
        ("blue-agent-0", "node-0", "running", 0),
        ("blue-agent-1", "node-1", "running", 1),
    ]
    [secret] = [one for one in cluster.api.of_kind("Secret") if one["metadata"]["name"] == "blue-token"]
    launcher.start(3)
    assert [one.agent_id for one in launcher.list()] == ["blue-agent-0", "blue-agent-1", "blue-agent-2"]
    [kept] = [one for one in cluster.api.of_kind("Secret") if one["metadata"]["name"] == "blue-token"]
    assert kept["data"] == secret["data"]
    [config] = cluster.api.of_kind("ConfigMap")
    assert yaml.safe_load(config["data"]["fleet.yaml"])["fleet"]["blobs"] == "s3://models/starling"
    for follow in (False, True):
        assert list(launcher.logs("blue-agent-1", 2, follow=follow)) == ["second line", "third line"]
    with pytest.raises(NotFound, match="no agent 'blue-agent-7'"):
        list(launcher.logs("blue-agent-7", 2, follow=False))
    launcher.stop()
    launcher.stop()
    assert [one["kind"] for one in cluster.api.objects.values()] == ["Namespace"]
    assert launcher.list() == ()
    assert cluster.api.invalid == []


@pytest.mark.parametrize("agent", [{"kind": "DaemonSet"}, {"kind": "DaemonSet", "replicas": 2}])
def test_the_agents_of_a_daemon_set_cannot_be_counted(agent: dict[str, Any], tmp_path: Path) -> None:
    """Refused before helm is called, as nothing of the number would reach the cluster."""
    file = tmp_path / "values.yaml"
    file.write_text(yaml.safe_dump({"agent": agent}))
    fleet = FleetConfig(blobs="s3://models/starling", kubernetes=KubernetesConfig(values=str(file)))
    launcher = KubernetesLauncher(fleet, {"PATH": str(tmp_path)})
    with pytest.raises(ConfigError, match="--agents 3.*DaemonSet.*nodeSelector"):
        launcher.start(3)
    with pytest.raises(ConfigError, match="needs helm"):
        launcher.start(None)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(3))
def test_the_documented_commands_run(number: int, cluster: Cluster, tmp_path: Path) -> None:
    """Each block of docs/fleet.md in a new cluster, as it stands; it has the fleet's objects then."""
    blocks = [one for one in blocks_of((ROOT / "docs/fleet.md").read_text()) if one.info == "sh kubernetes"]
    assert len(blocks) == 3
    for name in ("starling", "configs"):
        (tmp_path / name).symlink_to(ROOT / name)
    path = os.pathsep.join((cluster.env["PATH"], str(Path(sys.executable).parent), os.environ["PATH"]))
    env = {**cluster.env, "PATH": path, "STARLING_HOME": str(tmp_path / "home"), "PYTHONPATH": str(ROOT)}
    env["STARLING_FLEET__BLOBS"] = "s3://models/starling"
    command = ["bash", "-euo", "pipefail", "-c", blocks[number].text]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert cluster.api.invalid == []
    [agent] = [one for one in cluster.api.of_kind("StatefulSet") if one["metadata"]["name"] == "starling-agent"]
    used = used_secrets([*cluster.api.of_kind("Deployment"), *cluster.api.of_kind("StatefulSet")])
    assert "starling-token" in used
    assert used <= {one["metadata"]["name"] for one in cluster.api.of_kind("Secret")}
    if number == 0:
        assert {"bucket", "keys"} <= used
        assert agent["spec"]["replicas"] == 3
        assert [f"starling-agent-{number}" in done.stdout for number in range(4)] == [True, True, True, False]


def used_secrets(value: Any) -> set[str]:
    """Names of the secrets that pods read, in anything of workloads."""
    if isinstance(value, list):
        return set().union(*map(used_secrets, value))
    if not isinstance(value, dict):
        return set()
    named = [one for key, one in value.items() if key in ("secret", "secretRef", "secretKeyRef")]
    found = {str(one.get("secretName") or one.get("name")) for one in named}
    return found.union(*map(used_secrets, value.values()))


@pytest.mark.slow
def test_failures_of_helm_are_shown(cluster: Cluster, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"values: .*/missing\.yaml does not exist"):
        cluster.launcher(kubernetes=KubernetesConfig(values=str(tmp_path / "missing.yaml"))).start(1)
    with pytest.raises(StarlingError, match='context "nowhere" does not exist'):
        cluster.launcher(kubernetes=KubernetesConfig(context="nowhere")).start(1)
    with pytest.raises(StarlingError, match="set blobs to the store of published models"):
        KubernetesLauncher(FleetConfig(), cluster.env).start(1)


def test_pods_may_connect_to_the_store_and_the_blobs_of_the_configuration(tmp_path: Path) -> None:
    """On the ports that their addresses name, unless the file of values names another store."""
    plain = FleetConfig(blobs="s3://models/starling")
    assert "networkPolicy" not in KubernetesLauncher(plain, {})._defaults({})
    found = FleetConfig(store="redis://cache:6379/models", blobs="s3://models", blobs_endpoint="http://minio:9000")
    values = KubernetesLauncher(found, {})._defaults({})
    assert (values["store"], values["blobs"]) == (found.store, found.blobs)
    assert values["networkPolicy"] == {"storePort": 6379, "blobPorts": [443, 9000]}
    file = tmp_path / "values.yaml"
    file.write_text("store: etcd://etcd:2379\nblobs: s3://other\n")
    assert "networkPolicy" not in KubernetesLauncher(found, {})._defaults(_values_of(file))
    file.write_text("{")
    assert _values_of(file) == _values_of(tmp_path / "missing.yaml") == {}


def test_missing_programs_are_named(tmp_path: Path) -> None:
    launcher = KubernetesLauncher(FleetConfig(), {"PATH": str(tmp_path)})
    with pytest.raises(ConfigError, match="needs helm, which is not in PATH"):
        launcher.start(1)
    with pytest.raises(ConfigError, match="needs kubectl, which is not in PATH"):
        launcher.list()


def test_a_line_of_a_log_ends_at_a_newline_alone(tmp_path: Path) -> None:
    """A record in JSON may contain other ends of lines of Unicode. `kubectl` is a script."""
    record = '{"event": "a\u2028b\x0cc\x85d"}'
    (tmp_path / "log").write_text(f"{record}\nsecond\n")
    pod = {"metadata": {"name": "a-0"}, "spec": {"nodeName": "n"}, "status": {}}
    (tmp_path / "pods").write_text(json.dumps({"items": [pod]}))
    script = tmp_path / "kubectl"
    script.write_text(f'#!/bin/sh\ncase "$*" in *" logs "*) cat {tmp_path}/log ;; *) cat {tmp_path}/pods ;; esac\n')
    script.chmod(0o755)
    launcher = KubernetesLauncher(FleetConfig(), {"PATH": f"{tmp_path}:/usr/bin:/bin", "LC_ALL": "C.UTF-8"})
    [agent] = launcher.list()
    for follow in (False, True):
        assert list(launcher.logs(agent.agent_id, 9, follow=follow)) == [record, "second"]


def test_replicas_are_placed_by_a_running_fleet() -> None:
    command = fleet.commands["up"]
    assert isinstance(command, click.Command)
    done = CliRunner().invoke(command, ["--launcher", "kubernetes", "--replicas", "2"])
    assert done.exit_code == 2
    assert "use `starling fleet place` in a cluster" in done.output
