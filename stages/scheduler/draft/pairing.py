"""Pairing: which version drafts for which (`models[].draft_model`), updated as versions and workers change. Pure.

A model version gets its draft tokens from the serving version of its draft model.  Both workers report a digest of
what their token ids mean.  While the digests differ, or one is not known yet, the version runs without a draft model.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping

from pipeline.models.versions import VersionTable
from stages.scheduler.core.version_runner import VersionRunner
from stages.scheduler.draft.proposer import DraftLink
from stages.scheduler.policy.core_sharing import Claim, overlap

log = logging.getLogger("starling.scheduler")


class DraftPairs:
    """The pairs of all loaded versions. Runners are given by version id."""

    def __init__(self) -> None:
        self._draft_of: dict[str, str] = {}  # version: version of its draft model
        self._reported: set[tuple[str, str]] = set()  # pairs whose different vocabularies are logged already

    def update(self, versions: VersionTable, runners: Mapping[str, VersionRunner]) -> None:
        """Call after a version or a worker has come or gone."""
        self._draft_of.clear()
        self._reported = {pair for pair in self._reported if runners.keys() >= set(pair)}
        for version in versions.versions:
            runner, name = runners.get(version.id), version.settings.draft_model
            if runner is None:
                continue
            serving = versions.serving(name) if name else None
            draft = runners.get(serving.id) if serving is not None else None
            if draft is None or not self._have_same_vocabulary(runner, draft):
                runner.engine.proposer.set_link(None)
                continue
            self._draft_of[runner.name] = draft.name
            runner.engine.proposer.set_link(DraftLink(draft.engine.drafts, overlap(runner.cores, draft.cores)))

    def _have_same_vocabulary(self, runner: VersionRunner, draft: VersionRunner) -> bool:
        if not runner.vocabulary or not draft.vocabulary:
            return False
        if runner.vocabulary == draft.vocabulary:
            return True
        pair = runner.name, draft.name
        if pair not in self._reported:
            self._reported.add(pair)
            log.warning(
                "models[].draft_model has a different vocabulary and is not used",
                extra={"model": runner.name, "draft_model": draft.name},
            )
        return False

    def update_allowed(self, claims: Iterable[Claim], runners: Mapping[str, VersionRunner]) -> None:
        """Call in each round: no version drafts on cores that other models want, or with a stalled worker."""
        claims = list(claims)
        for name, draft in self._draft_of.items():
            cores = runners[draft].cores
            others = (claim for claim in claims if claim.name not in (name, draft))
            is_wanted = any(overlap(claim.cores, cores) for claim in others)
            runners[name].engine.proposer.is_allowed = not is_wanted and not runners[draft].problem
