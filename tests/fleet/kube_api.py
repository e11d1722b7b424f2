"""The part of a Kubernetes API server that `helm` and `kubectl` need to install a chart and to read pods.

Objects are kept in memory.  Every object that is created must be valid for the schemas of Kubernetes, strictly.  In the
place of its controllers, each StatefulSet has the pods that it asks for at once.
"""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import kubernetes_validate
import yaml

VERSION = "1.32.0"
KINDS = {
    "v1": {
        "ConfigMap": "configmaps",
        "Namespace": "namespaces",
        "Pod": "pods",
        "Secret": "secrets",
        "Service": "services",
        "ServiceAccount": "serviceaccounts",
    },
    "apps/v1": {"DaemonSet": "daemonsets", "Deployment": "deployments", "StatefulSet": "statefulsets"},
    "networking.k8s.io/v1": {"NetworkPolicy": "networkpolicies"},
    "policy/v1": {"PodDisruptionBudget": "poddisruptionbudgets"},
    "rbac.authorization.k8s.io/v1": {"Role": "roles", "RoleBinding": "rolebindings"},
}
LOG = ["first line", "second line", "third line"]


class KubeApi:
    """A server on loopback. A context manager."""

    def __init__(self) -> None:
        self.objects: dict[str, dict[str, Any]] = {}  # by path
        self.invalid: list[str] = []
        self.lock = threading.Lock()
        api = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self) -> None:
                length = int(self.headers.get("Content-Length", 0))
                given = self.rfile.read(length)
                with api.lock:  # helm makes several objects of a kind at once
                    status, body = api.call(self.command, self.path, given)
                    raw = body.encode() if isinstance(body, str) else json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Type", "text/plain" if isinstance(body, str) else "application/json")
                self.send_header("Content-Length", str(len(raw)))
                self.end_headers()
                self.wfile.write(raw)

            def __getattr__(self, name: str) -> Any:
                if name.startswith("do_"):
                    return self.answer
                raise AttributeError(name)

            def log_message(self, *arguments: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True

    def __enter__(self) -> KubeApi:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def kubeconfig(self, path: Path) -> Path:
        """Write a kubeconfig for this server."""
        host, port = self._server.server_address[:2]
        cluster = {"name": "test", "cluster": {"server": f"http://{host!s}:{port}"}}
        context = {"name": "test", "context": {"cluster": "test", "user": "test"}}
        user = {"name": "test", "user": {"token": "test"}}
        config = {"clusters": [cluster], "contexts": [context], "users": [user], "current-context": "test"}
        path.write_text(yaml.safe_dump({"apiVersion": "v1", "kind": "Config", **config}))
        return path

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        return [one for one in self.objects.values() if one["kind"] == kind]

    def call(self, method: str, target: str, raw: bytes) -> tuple[int, Any]:
        url = urlsplit(target)
        path, query = url.path, parse_qs(url.query)
        if (found := _discovery(path)) is not None:
            return 200, found
        if path.endswith("/log"):
            return 200, "\n".join(LOG[-int(query.get("tailLines", ["99"])[0]) :]) + "\n"
        if method == "POST":
            return self._create(path, _decode(raw))
        if method == "GET" and path.rsplit("/", 1)[-1] in {name for kinds in KINDS.values() for name in kinds.values()}:
            return 200, self._list(path, query.get("labelSelector", [""])[0])
        if path not in self.objects:
            return 404, _status(404, "NotFound")
        if method == "DELETE":
            gone = self.objects.pop(path)
            self._control()
            return 200, gone
        if method in ("PATCH", "PUT"):
            _merge(self.objects[path], _decode(raw)) if method == "PATCH" else self._put(path, _decode(raw))
            self._control()
        return 200, self.objects[path]

    def _create(self, path: str, given: dict[str, Any]) -> tuple[int, Any]:
        name = f"{path}/{given['metadata']['name']}"
        if name in self.objects:
            return 409, _status(409, "AlreadyExists")
        try:
            kubernetes_validate.validate(given, VERSION, strict=True)
        except kubernetes_validate.ValidationError as error:
            self.invalid.append(f"{given['kind']}: {error}")
            return 422, _status(422, "Invalid")
        self._put(name, given)
        self._control()
        return 201, self.objects[name]

    def _put(self, path: str, given: dict[str, Any]) -> None:
        parts = path.split("/")
        namespace = {"namespace": parts[parts.index("namespaces") + 1]} if "namespaces" in parts[:-2] else {}
        given["metadata"] = {**given["metadata"], **namespace, "uid": path, "resourceVersion": "1"}
        self.objects[path] = given

    def _list(self, path: str, selector: str) -> dict[str, Any]:
        wanted = dict(one.split("=") for one in selector.split(",") if one)
        found = [
            one
            for name, one in self.objects.items()
            if name.rsplit("/", 1)[0] == path
            and all(one["metadata"].get("labels", {}).get(key) == value for key, value in wanted.items())
        ]
        kind, version = next(
            (f"{kind}List", version)
            for version, kinds in KINDS.items()
            for kind, plural in kinds.items()
            if path.endswith(f"/{plural}")
        )
        return {"kind": kind, "apiVersion": version, "metadata": {"resourceVersion": "1"}, "items": found}

    def _control(self) -> None:
        """Have the pods that the StatefulSets ask for."""
        for name in [name for name, one in self.objects.items() if one["kind"] == "Pod"]:
            del self.objects[name]
        for path, owner in [*self.objects.items()]:
            if owner["kind"] != "StatefulSet":
                continue
            base = path.partition("/namespaces/")[2].partition("/")[0]
            for number in range(owner["spec"]["replicas"]):
                name = f"{owner['metadata']['name']}-{number}"
                template = owner["spec"]["template"]
                self._put(
                    f"/api/v1/namespaces/{base}/pods/{name}",
                    {
                        "apiVersion": "v1",
                        "kind": "Pod",
                        "metadata": {"name": name, "labels": template["metadata"]["labels"]},
                        "spec": {**template["spec"], "nodeName": f"node-{number}"},
                        "status": {
                            "phase": "Running",
                            "containerStatuses": [
                                {"name": one["name"], "ready": True, "restartCount": number}
                                for one in template["spec"]["containers"]
                            ],
                        },
                    },
                )


def _discovery(path: str) -> dict[str, Any] | None:
    if path == "/openapi/v3":
        roots = {_root(version): {"serverRelativeURL": f"/openapi/v3/{_root(version)}"} for version in KINDS}
        return {"paths": roots}
    if path.startswith("/openapi/v3/"):
        version = path.removeprefix("/openapi/v3/").partition("/")[2]
        return {"openapi": "3.0.0", "info": {"title": "test", "version": "1"}, "paths": _validating(version)}
    if path == "/version":
        return {"major": "1", "minor": "32", "gitVersion": f"v{VERSION}", "platform": "linux/amd64"}
    if path == "/api":
        return {"kind": "APIVersions", "versions": ["v1"]}
    if path == "/apis":
        groups = [one.split("/")[0] for one in KINDS if "/" in one]
        versions = [{"groupVersion": f"{one}/v1", "version": "v1"} for one in groups]
        listed = [
            {"name": group, "versions": [version], "preferredVersion": version}
            for group, version in zip(groups, versions)
        ]
        return {"kind": "APIGroupList", "apiVersion": "v1", "groups": listed}
    version = path.removeprefix("/apis/").removeprefix("/api/")
    if version not in KINDS:
        return None
    verbs = ["create", "delete", "get", "list", "patch", "update"]
    resources = [
        {"name": name, "singularName": kind.lower(), "kind": kind, "namespaced": kind != "Namespace", "verbs": verbs}
        for kind, name in KINDS[version].items()
    ]
    return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": version, "resources": resources}


def _root(version: str) -> str:
    return f"apis/{version}" if "/" in version else f"api/{version}"


def _validating(version: str) -> dict[str, Any]:
    """Says of each kind that the server validates the fields of objects that are changed."""
    group, _, name = version.rpartition("/")
    return {
        f"/{_root(version)}/{plural}/{{name}}": {
            "patch": {
                "parameters": [{"name": "fieldValidation", "in": "query"}],
                "x-kubernetes-group-version-kind": {"group": group, "version": name, "kind": kind},
            }
        }
        for kind, plural in KINDS[version].items()
    }


def _decode(raw: bytes) -> dict[str, Any]:
    """A body in JSON, or a Secret (Helm keeps a release in one) or Namespace in Kubernetes' protobuf."""
    if not raw.startswith(b"k8s\0"):
        return dict(json.loads(raw))
    unknown = dict(_fields(raw[4:]))
    kind = dict(_fields(unknown[1]))[2].decode()
    secret: dict[str, Any] = {"apiVersion": "v1", "kind": kind, "metadata": {"labels": {}}}
    for number, value in _fields(unknown[2]):
        if number == 1:
            for inner, what in _fields(value):
                if inner == 1:
                    secret["metadata"]["name"] = what.decode()
                elif inner == 11:
                    label = dict(_fields(what))
                    secret["metadata"]["labels"][label[1].decode()] = label[2].decode()
        elif number == 2 and kind == "Secret":
            entry = dict(_fields(value))
            secret.setdefault("data", {})[entry[1].decode()] = base64.b64encode(entry[2]).decode()
        elif number == 3 and kind == "Secret":
            secret["type"] = value.decode()
    return secret


def _fields(raw: bytes) -> Iterator[tuple[int, bytes]]:
    """Numbers and values of the fields of a protobuf message that have a length."""
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = raw[at]
            at += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    while at < len(raw):
        tag = varint()
        size = varint()
        if tag & 7 == 2:
            yield tag >> 3, raw[at : at + size]
            at += size


def _status(code: int, reason: str) -> dict[str, Any]:
    status = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure"}
    return {**status, "message": reason, "reason": reason, "code": code}


def _merge(into: dict[str, Any], patch: dict[str, Any]) -> None:
    for name, value in patch.items():
        if name.startswith("$"):
            continue
        if value is None:
            into.pop(name, None)
        elif isinstance(value, dict) and isinstance(into.get(name), dict):
            _merge(into[name], value)
        else:
            into[name] = value
