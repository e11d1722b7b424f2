"""What the journal of a test's server holds."""

from __future__ import annotations

from stages.gateway.requests.journal import FILE, RequestEnd, parse
from stages.gateway.requests.spec import RequestSpec
from tests.gateway.server import Server


def journaled(server: Server) -> list[RequestSpec]:
    """The requests in the journal of a server."""
    (path,) = server.home.rglob(FILE)
    return [value for _, value, _ in parse(path.read_bytes()) if isinstance(value, RequestSpec)]


def ended(server: Server) -> set[str]:
    """The requests of which the journal of a server has the end."""
    (path,) = server.home.rglob(FILE)
    return {value.id for _, value, _ in parse(path.read_bytes()) if isinstance(value, RequestEnd)}


def prompt(spec: RequestSpec) -> str:
    """The text of the first prompt, of which each byte is a token."""
    return bytes(memoryview(spec.prompts[0]).cast("i").tolist()).decode()
