"""`X-Starling-Weights: DIGEST`: the request is to be computed by these weights alone, as `adapted_digest` names them.

An orchestrator sends it with requests for an adapter: another one may have got its name in the same engine since the
agent's last report, and a stream that goes on elsewhere must not mix the answers of two.
"""

from __future__ import annotations

from pipeline.errors import InvalidRequest, ModelUnavailable

HEADER = "X-Starling-Weights"


def read(given: str | None) -> str:
    """The digest that a request asks for; "": it asks for none. Raises `InvalidRequest`."""
    if given is not None and (len(given) != 64 or not set(given) <= set("0123456789abcdef")):
        raise InvalidRequest(f"{HEADER} is {given[:80]!r}; send a SHA-256 in lower-case hex, or leave it out", HEADER)
    return given or ""


def check(wanted: str, digest: str, model: str) -> None:
    """Raises `ModelUnavailable` if a request wants other weights than those that would compute it."""
    if wanted and wanted != digest:
        raise ModelUnavailable(
            f"{model} has other weights here ({digest[:16]}...) than the request asks for ({wanted[:16]}...); "
            "try another server",
            HEADER,
        )
