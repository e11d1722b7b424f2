"""Which agents may load a model for an answer that has begun, or an adapter: those with the right files. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

from pipeline.api.adapter_names import adapted_digest, base_of
from pipeline.fleet.bodies import HeartbeatResponse
from pipeline.fleet.model_states import HELD_STATES
from stages.orchestrator.decisions import AgentScore
from stages.orchestrator.interfaces import NodeView
from stages.orchestrator.score import loaded


class Published(NamedTuple):
    """What routing uses of a catalog's entry."""

    digest: str  # of the model's file
    nbytes: int
    adapter_digest: str = ""  # of an adapter, whose model has `digest`; "": it is a model
    at: int = 0  # s since 1970 when it was published; 0: its manifest does not say


def is_host(details: HeartbeatResponse, model: str, published: Published | None) -> bool:
    """Whether the agent has an engine for the model, or is getting one: for an adapter in the right version."""
    running = loaded(details, base_of(model))
    is_held = running is not None and running.model_state in HELD_STATES
    return is_held and not has_other_version(details, model, published)


def has_other_version(details: HeartbeatResponse, model: str, published: Published | None) -> bool:
    """Whether the agent has another version of an adapter's model than the published one: it must leave first."""
    running = loaded(details, base_of(model))
    if ":" not in model or published is None or running is None or running.model_state not in HELD_STATES:
        return False
    return bool(published.digest and running.digest) and running.digest != published.digest


def may_become(details: HeartbeatResponse, model: str, version: str, published: Published | None) -> bool:
    """Whether the agent, once it has loaded the model, may go on with an answer of that version.

    Compared are files, and the arithmetic that the agent's engines report. The KV type, or the digest of another
    engine's files, is known when it runs.
    """
    kind, is_text, _ = version.partition(":")  # see `text_kind_of`
    if is_text:
        return any(one.engine == kind and model in one.names for one in details.cached_models)
    running = [one.numerics for one in details.loaded_models if one.model_state == "READY" and one.numerics]
    if running and not any(version.endswith(f"-{numerics}") for numerics in running):
        return False
    if published is None:
        return any(model in one.names and version.startswith(f"{one.digest}-") for one in details.cached_models)
    digest = published.digest
    if published.adapter_digest:
        digest = adapted_digest(digest, published.adapter_digest)
    return bool(digest) and version.startswith(f"{digest}-")


def of_published(
    candidates: list[AgentScore], table: Mapping[str, NodeView], model: str, published: Published | None
) -> list[AgentScore]:
    """The agents that serve the published version of an adapter; all, if none does: another version was published."""
    if published is None or not published.adapter_digest:
        return candidates
    digest = adapted_digest(published.digest, published.adapter_digest)
    found = [(one, loaded(table[one.agent_id].details, model)) for one in candidates]
    return [one for one, running in found if running is not None and running.digest == digest] or candidates


def nearest(
    candidates: list[AgentScore], model: str, hosts: Collection[str], begun: Collection[str]
) -> list[AgentScore]:
    """Of the agents that may load a model those that have begun, for any orchestrator; of an adapter those that have
    its model; or all. An engine that starts again counts as begun.

    So a model that is asked for at several orchestrators, and adapters of one model that are asked for at the same
    time, do not start it on several agents.  `hosts`: agents that have the model, or are getting it; `begun`: those
    that get it for this orchestrator.
    """
    held = [one for one in candidates if one.agent_id in hosts]
    loading = [one for one in candidates if one.agent_id in begun]
    return [one for one in held if one.state in HELD_STATES] or held or loading or candidates
