"""One round over the models of a scheduler: each completes its steps, then publishes as far as others leave it cores.

Models on the same cores take turns (policy/core_sharing.py); a model alone on its cores publishes ahead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from stages.scheduler.core.version_runner import VersionRunner
from stages.scheduler.draft.pairing import DraftPairs
from stages.scheduler.policy.core_sharing import Claim, CoreShares, allowed_depth, overlap


class Rounds:
    """`runners`: by version; the stage adds and removes them. `send_outbox` sends the frames of one to the gateways."""

    def __init__(
        self, runners: Mapping[str, VersionRunner], pairs: DraftPairs, send_outbox: Callable[[VersionRunner], None]
    ) -> None:
        self._runners = runners
        self._pairs = pairs
        self._send_outbox = send_outbox
        self._shares = CoreShares()

    def run(self, now: float) -> None:
        """Every version completes its steps, then publishes."""
        runners = self._runners
        self._set_alone()
        claims: dict[str, Claim] = {}
        order: list[str] = []
        if len(runners) > 1:
            idle: list[Claim] = []
            for name, runner in runners.items():
                runner.complete(now)
                claim = runner.claim()
                if runner.wants_cores(now):
                    claims[name] = claim
                else:
                    idle.append(claim)
            self._pairs.update_allowed(claims.values(), runners)
            # Also of one: it is not charged with computing alone.
            order = self._shares.order(list(claims.values()), idle)
        else:
            self._shares.forget()  # else a model that is loaded later starves this one
        if len(claims) < 2:
            for runner in runners.values():
                runner.set_allowed_depth(runner.engine.steps.pacing.depth)
                runner.complete(now)
                if runner.has_step_everywhere:
                    # The gateway writes the tokens to clients while the next steps are composed on another core.
                    self._send_outbox(runner)
                runner.run_round(now)
            return
        depth = 0
        waiting: set[str] = set()  # for cores that are in use: those that are free are kept for them
        for name in [*order, *(name for name in runners if name not in claims)]:
            runner = runners[name]
            if name in claims:
                depth = allowed_depth(claims[name], list(claims.values()), runner.engine.steps.pacing.depth, waiting)
                runner.set_allowed_depth(depth)
                if not depth and not claims[name].is_computing:
                    waiting.add(name)
            runner.run_round(now)
            if name in claims:
                claims[name] = runner.claim()
                if depth and not claims[name].is_computing:
                    self._shares.pass_over(name)

    def _set_alone(self) -> None:
        """A model that is idle now may want its cores before a step ends that is composed now."""
        runners = self._runners.values()
        for runner in runners:
            others = (other for other in runners if other is not runner)
            runner.set_alone(not any(overlap(runner.cores, other.cores) for other in others))
