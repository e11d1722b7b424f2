"""The description of an orchestrator's API: the operations that a server has too are described as there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from pipeline.api.json_body import to_json
from pipeline.config.schema import Config
from stages.orchestrator.pages import PageFile, Pages, Routes

DOCS_FILES = ("docs.html", "docs.css", "docs.js", "page.css", "dom.js", "icon.svg")


class _Probe(NamedTuple):
    """A path that a server has too, and whose answer is another one here."""

    schema_name: str
    summary: str
    members: dict[str, Any]  # their schemas
    example: dict[str, Any]


PROBES = {
    "/health": _Probe(
        "Health",
        "Liveness.",
        {"status": {"const": "healthy"}, "uptime_seconds": {"type": "number", "minimum": 0}},
        {"status": "healthy", "uptime_seconds": 60.5},
    ),
    "/ready": _Probe(
        "Readiness",
        "Whether a request can be served.",
        {
            "ready": {"type": "boolean"},
            "reason": {"type": "string"},
            "agents": {"type": "integer", "minimum": 0},
            "models": {"type": "integer", "minimum": 0},
            "in_flight": {"type": "integer", "minimum": 0},
            "overloaded": {"type": "boolean"},
            "waiting": {"type": "integer", "minimum": 0},
            "waiting_full": {"type": "boolean"},
        },
        {
            "ready": True,
            "reason": "",
            "agents": 2,
            "models": 3,
            "in_flight": 5,
            "overloaded": False,
            "waiting": 0,
            "waiting_full": False,
        },
    ),
}


def make_pages(config: Config) -> Pages:
    """For `stages.orchestrator.stage.main`. Nothing is imported or read before the first request for it."""

    def describe(routes: Routes, needs_key: bool) -> PageFile:
        from stages.gateway.openapi.document import make_document
        from stages.gateway.web import make_file

        metrics_path = config.metrics.endpoint if config.metrics.enabled else ""
        document = make_document(routes, metrics_path=metrics_path, needs_key=needs_key)
        document["info"]["description"] = "An orchestrator: one address in front of a fleet of inference servers."
        schemas = document["components"]["schemas"] = dict(document["components"]["schemas"])
        for path, probe in PROBES.items():
            schemas[probe.schema_name] = {
                "type": "object",
                "properties": probe.members,
                "required": list(probe.members),
            }
            operation = document["paths"][path]["get"]
            operation["summary"] = probe.summary
            operation["responses"]["200"]["content"]["application/json"]["example"] = probe.example
        return PageFile(*make_file(to_json(document), "application/json"))

    def read() -> Mapping[str, PageFile]:
        from stages.gateway.web import files

        if not config.server.enable_page:
            return {}
        return {name: PageFile(*file) for name, file in files().items() if name in DOCS_FILES}

    return Pages(describe, read)
