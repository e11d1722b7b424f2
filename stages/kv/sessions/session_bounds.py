"""Bounds on the sessions of a model: how many, and how many bytes of tokens, in all and for each tenant. Pure.

A tenant has at most `per_tenant` sessions.  The last quarter of all sessions is for tenants that have less than their
equal part, so that a tenant that opens as many as it can leaves room for the others.  Bytes are bounded in the same
way.  They are checked before a turn begins: the turns in progress may exceed the bound by one context each.
"""

from __future__ import annotations

from typing import NamedTuple

RESERVE_DIVISOR = 4  # the reserve is a quarter of all


class SessionBounds(NamedTuple):
    """The bounds of one model. 0 bytes: no bound."""

    max_sessions: int
    max_tokens: int  # of one session
    per_tenant: int = 0  # sessions; 0: `max_sessions`
    n_tenants: int = 1  # configured; each has an equal part
    max_bytes: int = 0  # tokens of all sessions

    def refuses_session(self, held: int, held_by_tenant: int) -> str:
        """The bound that a further session of the tenant would exceed; "" for none."""
        if held >= self.max_sessions:
            return f"{self.max_sessions} sessions are held (max_sessions)"
        most = self.per_tenant or self.max_sessions
        if held_by_tenant >= most:
            return f"{most} sessions are held for this API key's tenant (cache.max_sessions_per_tenant)"
        if self._exceeds_part(held + 1, held_by_tenant + 1, self.max_sessions):
            return (
                f"{held} of {self.max_sessions} sessions are held (max_sessions), {held_by_tenant} of them for this "
                "tenant: the others are reserved for tenants with fewer"
            )
        return ""

    def refuses_bytes(self, held: int, held_by_tenant: int) -> str:
        """The bound on bytes that the tenant has reached; "" for none."""
        if not self.max_bytes:
            return ""
        if held >= self.max_bytes or self._exceeds_part(held, held_by_tenant, self.max_bytes):
            return f"the sessions' tokens take {held >> 10} KiB of {self.max_bytes >> 10} (cache.session_mb)"
        return ""

    def _exceeds_part(self, held: int, held_by_tenant: int, total: int) -> bool:
        if self.n_tenants < 2:
            return False
        reserve = total // RESERVE_DIVISOR
        return held > total - reserve and held_by_tenant > max(1, total // self.n_tenants)
