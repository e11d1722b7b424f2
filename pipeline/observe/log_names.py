"""The names that every log line about a request has, in every stage: whose it is, and what computes it."""

from __future__ import annotations


def log_names(request_id: str, model: str, tenant: str, session_id: str) -> dict[str, str | None]:
    """Fields of a log line; "" stands for what is not known or does not exist, and becomes null."""
    return {
        "request_id": request_id or None,
        "model": model or None,
        "tenant": tenant or None,
        "session_id": session_id or None,
    }
