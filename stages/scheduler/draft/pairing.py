"""Which model drafts for which: `models[].draft_model`, as instances and workers come and go. Pure.

A version of a model gets its drafts from the version of its draft model that serves.  Both workers say by a digest
what their token ids mean; where that differs, or is not known yet, there is no pair, and the model goes on without.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping

from pipeline.models.versions import VersionTable
from stages.scheduler.core.model_version import Host
from stages.scheduler.draft.proposer import Link
from stages.scheduler.policy.core_sharing import Claim, overlap

log = logging.getLogger("starling.scheduler")


class Pairs:
    """Of all hosts."""

    def __init__(self) -> None:
        self._draft_of: dict[str, str] = {}  # instances
        self._unlike: set[tuple[str, str]] = set()  # pairs of which it has been said that they do not fit

    def look(self, version_table: VersionTable, hosts: Mapping[str, Host]) -> None:
        """Call when an instance or a worker has come or gone."""
        self._draft_of.clear()
        self._unlike = {pair for pair in self._unlike if hosts.keys() >= set(pair)}
        for one in version_table.versions:
            host, name = hosts.get(one.id), one.settings.draft_model
            if host is None:
                continue
            serving = version_table.serving(name) if name else None
            draft = hosts.get(serving.id) if serving is not None else None
            if draft is None or not self._fit(host, draft):
                host.engine.drafts.link_to(None)
                continue
            self._draft_of[host.name] = draft.name
            host.engine.drafts.link_to(Link(draft.engine.companions, overlap(host.cores, draft.cores)))

    def _fit(self, host: Host, draft: Host) -> bool:
        if host.vocabulary and draft.vocabulary and host.vocabulary != draft.vocabulary:
            if (host.name, draft.name) not in self._unlike:
                self._unlike.add((host.name, draft.name))
                log.warning(
                    "models[].draft_model has another vocabulary: it drafts nothing",
                    extra={"model": host.name, "draft_model": draft.name},
                )
            return False
        return bool(host.vocabulary and draft.vocabulary)

    def mind(self, claims: Iterable[Claim], hosts: Mapping[str, Host]) -> None:
        """Each round: nobody drafts on cores that others want, or with a worker that stands."""
        claims = list(claims)
        for name, draft in self._draft_of.items():
            cores = hosts[draft].cores
            others = (claim for claim in claims if claim.name not in (name, draft))
            is_wanted = any(overlap(claim.cores, cores) for claim in others)
            hosts[name].engine.drafts.is_allowed = not is_wanted and not hosts[draft].problem
