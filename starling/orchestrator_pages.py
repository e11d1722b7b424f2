"""The description of an orchestrator's API: the operations that a server has too are described as there."""

from __future__ import annotations

from collections.abc import Mapping

from pipeline.api.json_body import to_json
from pipeline.config.schema import Config
from stages.orchestrator.pages import PageFile, Pages, Routes

DOCS_FILES = ("docs.html", "docs.css", "docs.js", "page.css", "dom.js", "icon.svg")


def make_pages(config: Config) -> Pages:
    """For `stages.orchestrator.stage.main`. Nothing is imported or read before the first request for it."""

    def describe(routes: Routes, needs_key: bool) -> PageFile:
        from stages.gateway.openapi.document import make_document
        from stages.gateway.web import make_file

        metrics_path = config.metrics.endpoint if config.metrics.enabled else ""
        document = make_document(routes, metrics_path=metrics_path, needs_key=needs_key)
        document["info"]["description"] = "An orchestrator: one address in front of a fleet of inference servers."
        return PageFile(*make_file(to_json(document), "application/json"))

    def read() -> Mapping[str, PageFile]:
        from stages.gateway.web import files

        if not config.server.enable_page:
            return {}
        return {name: PageFile(*file) for name, file in files().items() if name in DOCS_FILES}

    return Pages(describe, read)
