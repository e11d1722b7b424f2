"""Requests that take longer than they may."""

from __future__ import annotations

from stages.gateway.requests.state import RequestState

OVERTIME_S = 0.3  # the gateway ends a request so long after its deadline; the scheduler normally ends it before


def timeout_message(request: RequestState, now: float, waiting: bool) -> str:
    """The message for a request whose time is over. `waiting`: it has no token yet."""
    seconds = now - request.started_at
    if waiting:
        return (
            f"no token after {seconds:.1f} s, the time a request may take (server.request_timeout_ms); "
            f"try again when it is less busy"
        )
    return (
        f"not finished after {seconds:.1f} s, the time a request may take (server.request_timeout_ms); "
        f"ask for fewer tokens"
    )
