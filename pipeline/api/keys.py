"""API keys: from an `Authorization` or `X-Api-Key` header to the tenant that sends the request."""

from __future__ import annotations

import hashlib
import hmac
from typing import NamedTuple

from pipeline.config.schema import Config
from pipeline.errors import Unauthenticated

DEFAULT_TENANT = "default"  # the one tenant of a server without keys


class Caller(NamedTuple):
    """The owner of an API key, as configured."""

    tenant: str
    priority: int = 0
    is_admin: bool = False
    salt: str = ""  # of the tenant's cached pages and answers; "": shared

    def salted(self, request_salt: str) -> str:
        """Return the cache salt of a request that gives `request_salt`.

        The tenant's salt and a NUL precede it.  No request can give such a salt, because a salt has no NUL.
        """
        return f"{self.salt}\0{request_salt}" if self.salt else request_salt


class Keys:
    """The configured API keys, stored as digests. A presented key is compared with every one in constant time."""

    def __init__(self, config: Config) -> None:
        self._keys = [
            (_digest(key.key), Caller(key.owner, key.priority, key.admin, config.tenant_salt(key.owner)))
            for key in config.auth.api_keys
        ]

    def __bool__(self) -> bool:
        """Whether keys are configured."""
        return bool(self._keys)

    def caller(self, authorization: str | None, api_key: str | None = None) -> Caller:
        """Return the owner of the key in an `Authorization` header, or in `X-Api-Key`. Raises `Unauthenticated`."""
        if not self._keys:
            return Caller(DEFAULT_TENANT)
        if not authorization and api_key:
            authorization = f"Bearer {api_key}"
        if not authorization:
            raise Unauthenticated("no API key: send the header Authorization: Bearer KEY, or X-Api-Key: KEY")
        scheme, _, key = authorization.strip().partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise Unauthenticated("the Authorization header is not of the form: Bearer KEY")
        presented = _digest(key.strip())
        found: Caller | None = None
        for digest, caller in self._keys:
            if hmac.compare_digest(digest, presented):
                found = caller
        if found is None:
            raise Unauthenticated("unknown API key; check the key, or ask the server's operator")
        return found


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
