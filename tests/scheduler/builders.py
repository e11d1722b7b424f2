"""Sequences in a given state, for tests of single parts."""

from __future__ import annotations

from stages.scheduler.core.sequence import SequenceState
from stages.scheduler.policy.tenant import Tenant

from .peers import submission


def sequence(name: str = "a", n: int = 10, output: int = 20, tenant: Tenant | None = None) -> SequenceState:
    """A new sequence with a prompt of `n` tokens; the name, read as a number, is its order."""
    frame = submission(name, [1] * n, output)
    return SequenceState(frame, b"g", tenant or Tenant("t", 1.0), 0.0, int(name, 36))


def scheduled(name: str, n: int, computed: int, output: int = 20, tenant: Tenant | None = None) -> SequenceState:
    """A sequence of which `computed` positions are computed, with pages for all others."""
    made = sequence(name, n, output, tenant)
    made.run.computed = made.run.planned = computed
    made.run.leased = 10_000
    return made
