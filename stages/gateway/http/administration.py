"""Which paths are for administrators, and which need a key at all."""

from __future__ import annotations

from aiohttp import web

from pipeline.errors import Forbidden
from stages.gateway.http.context import CALLER

LOAD_ADAPTER, UNLOAD_ADAPTER = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"  # vLLM's
ADAPTERS = "/lora-adapters"  # llama-server's
_OTHER_SERVERS = (LOAD_ADAPTER, UNLOAD_ADAPTER, ADAPTERS)


def needs_key(path: str) -> bool:
    """Whether a key is checked, if the server has keys."""
    return path.startswith("/v1/") or path == ADAPTERS


def is_administration(path: str) -> bool:
    """Whether the handler requires an administrator; a key needs no other scope for it."""
    return path.startswith("/v1/admin/") or path in _OTHER_SERVERS


def require_admin(request: web.Request) -> None:
    """Raise `Forbidden` unless the caller is an administrator."""
    if not request[CALLER].is_admin:
        raise Forbidden(
            "this needs an API key with the scope admin, or with `admin: true` in the configuration; on the server's "
            "machine, use `starling`"
        )
