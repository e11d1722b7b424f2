"""What the routing table says of a model on an agent: read once for each table, and not for each request. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

from pipeline.api.adapter_names import base_of
from pipeline.fleet.bodies import LoadedModel
from stages.orchestrator.adapter_hosts import Published
from stages.orchestrator.held_prefixes import engine_name
from stages.orchestrator.interfaces import NodeView
from stages.orchestrator.score import Residence, loaded, residence, text_kind_of, version_of

MAX_PLACES = 4096  # of one table: agents times models that requests have named

_UNPUBLISHED = Published("", 0)


class ModelPlace(NamedTuple):
    """A model on an agent."""

    published: Published | None  # the catalog's entry
    running: LoadedModel | None  # the agent's entry of it, whatever its state
    queue: LoadedModel | None  # in whose engine a request waits: of an adapter that is not ready, its model's
    engine: str  # name of the engine, by which prefixes are known; "": it has none
    where: Residence
    versions: tuple[str, ...]  # of answers that go on there


class ModelPlaces:
    """Those of one table."""

    def __init__(self, holders: Mapping[str, Collection[str]] | None = None) -> None:
        """`holders`: agents that give the pieces of a file to others, by its digest."""
        self._holders = holders or {}
        self._found: dict[tuple[str, str], ModelPlace] = {}

    def find(self, view: NodeView, model: str, published: Published | None) -> ModelPlace:
        """The model on the agent of a row of the table."""
        found = self._found.get((view.agent_id, model))
        if found is None or found.published is not published:
            if len(self._found) >= MAX_PLACES:
                self._found.clear()
            found = self._found[view.agent_id, model] = self._place(view, model, published)
        return found

    def _place(self, view: NodeView, model: str, published: Published | None) -> ModelPlace:
        details, entry = view.details, published or _UNPUBLISHED
        running = loaded(details, model)
        # An adapter is where its model is: it is small beside that.
        name = model if running is not None and running.model_state == "READY" else base_of(model)
        return ModelPlace(
            published=published,
            running=running,
            queue=loaded(details, name),
            engine=engine_name(view.agent_id, running) if running is not None else "",
            where=residence(details, name, entry.digest, entry.nbytes, self._holders.get(entry.digest, ())),
            versions=(version_of(running), text_kind_of(running)) if running is not None else (),
        )
