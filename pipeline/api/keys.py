"""API keys: from an `Authorization` or `X-Api-Key` header to the tenant that sends the request, and what it may do.

Keys are configured (`auth.api_keys`) or in the key file (key_file.py), which is followed while the server runs.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Collection
from typing import NamedTuple

from pipeline.api.key_file import SCOPES, KeyFile, KeyLimits, StoredKey, digest_of
from pipeline.api.key_follower import KeyFollower
from pipeline.config.schema import Config
from pipeline.errors import Forbidden, StorageUnavailable, Unauthenticated
from pipeline.runtime.file_watch import FileWatch

DEFAULT_TENANT = "default"  # the one tenant of a server without keys
MODELS, ADMIN, METRICS = SCOPES
NO_LIMITS = KeyLimits()
_KEY = "key "  # before the id of a key that is a principal of its own: no tenant or address has a space


class Caller(NamedTuple):
    """The owner of an API key."""

    tenant: str
    priority: int = 0
    is_admin: bool = False
    salt: str = ""  # of the tenant's cached pages and answers; "": shared
    key_id: str = ""  # of a key of the key file
    scopes: Collection[str] = (MODELS,)
    has_own_share: bool = False  # the key has a bound of its own on requests in flight

    @property
    def principal(self) -> str:
        """Whom the bounds on requests in flight and on bytes apply to."""
        return _KEY + self.key_id if self.has_own_share else self.tenant

    def require(self, scope: str) -> None:
        """Raises `Forbidden` if the key lacks the scope."""
        if scope not in self.scopes:
            has = ", ".join(self.scopes)
            raise Forbidden(f"this needs an API key with the scope {scope}; this one has {has}")

    def salted(self, request_salt: str) -> str:
        """Return the cache salt of a request that gives `request_salt`.

        The tenant's salt and a NUL precede it.  No request can give such a salt, because a salt has no NUL.
        """
        return f"{self.salt}\0{request_salt}" if self.salt else request_salt


_ANYONE = Caller(DEFAULT_TENANT)


class Keys:
    """All API keys, as digests. A presented key is compared with every configured one in constant time."""

    def __init__(self, config: Config, file: KeyFile | None = None) -> None:
        """`file`: the server's key file; None: only configured keys count."""
        self._config = config
        self._file = file
        self.follower = KeyFollower(file, watch=FileWatch(file.path) if file is not None else None)
        self._keys = [
            (
                _digest(key.key),
                Caller(
                    key.owner,
                    key.priority,
                    key.admin,
                    config.tenant_salt(key.owner),
                    scopes=SCOPES if key.admin else (MODELS,),
                ),
            )
            for key in config.auth.api_keys
        ]

    def __bool__(self) -> bool:
        """Whether requests need a key."""
        return bool(self._keys) or (self._file is not None and self._file.exists)

    @property
    def errors(self) -> int:
        """Changes of the key file that could not be used, since the process started."""
        return self._file.errors if self._file is not None else 0

    def caller(self, authorization: str | None, api_key: str | None = None) -> Caller:
        """Return the owner of the key in an `Authorization` header, or in `X-Api-Key`.

        Await `follower.refresh()` before. Raises `Unauthenticated`, or `StorageUnavailable` for an unknown key while
        the key file cannot be read.
        """
        if not self:
            return _ANYONE
        if not authorization and api_key:
            authorization = f"Bearer {api_key}"
        if not authorization:
            raise Unauthenticated("no API key: send the header Authorization: Bearer KEY, or X-Api-Key: KEY")
        scheme, _, key = authorization.strip().partition(" ")
        key = key.strip()
        if scheme.lower() != "bearer" or not key:
            raise Unauthenticated("the Authorization header is not of the form: Bearer KEY")
        presented = _digest(key)
        found: Caller | None = None
        for digest, caller in self._keys:
            if hmac.compare_digest(digest, presented):
                found = caller
        if found is None and self._file is not None and (stored := self._file.find(digest_of(key))) is not None:
            found = self._caller_of(stored)
        if found is None and self._file is not None and self._file.problem:
            raise StorageUnavailable("the server cannot read its key file; ask its operator", retry_after_s=10.0)
        if found is None:
            raise Unauthenticated("unknown API key; check the key, or ask the server's operator")
        return found

    def shows_tenants(self, authorization: str | None, api_key: str | None) -> bool:
        """Whether the metrics that these headers ask for name tenants. Await `follower.refresh()` before.

        Raises `Unauthenticated`, and `Forbidden` for a key of the key file without the scope.
        """
        if self and not authorization and not api_key:
            return False
        caller = self.caller(authorization, api_key)
        if caller.key_id:
            caller.require(METRICS)
        return not self or METRICS in caller.scopes

    def salts(self) -> dict[str, str]:
        """The salts of all tenants that have keys, by their names. Await `follower.refresh()` before."""
        if not self:
            return {DEFAULT_TENANT: ""}
        stored = {one.tenant for one in self._file.keys.values()} if self._file is not None else set()
        found = {one.tenant: one.salt for _, one in self._keys}
        return {name: tenant_salt(self._config, name, has_key_file=True) for name in stored} | found

    def limits(self, key_id: str) -> KeyLimits:
        """The limits of a key of the key file; none for other keys, and for a key that has been revoked."""
        key = self._file.keys.get(key_id) if self._file is not None and key_id else None
        return key.limits if key is not None else NO_LIMITS

    def concurrent(self, principal: str) -> int:
        """Most requests in flight at a server of a tenant, an address or a key with a bound of its own."""
        server, share = self._config.server, self._config.concurrent_per_tenant()
        is_fixed = bool(server.max_concurrent_per_tenant)
        return self.share_of(principal, server.max_concurrent_requests, share, is_fixed=is_fixed)

    def share_of(self, principal: str, total: int, share: int, *, is_fixed: bool = False) -> int:
        """How many of `total` requests in flight may be of a principal. `share`: of a tenant or an address.

        is_fixed: the share was configured; else it leaves room for the tenants of the key file.
        """
        if principal.startswith(_KEY):
            return min(total, self.limits(principal.removeprefix(_KEY)).max_concurrent or total)
        if self.has_file and not is_fixed:
            return min(share, total - total // 4)  # there may be other tenants than the configured one
        return share

    @property
    def has_file(self) -> bool:
        """Whether `starling keys` has made keys, which may be of other tenants than the configured ones."""
        return self._file is not None and self._file.exists

    def part_of(self, tenant: str, total: int) -> int:
        """How much of what a server stores may be of a tenant: all, if no request can be of another one."""
        only = self._config.tenants or {DEFAULT_TENANT}
        return self.share_of(tenant, total, total if only == {tenant} else total - total // 4)

    def _caller_of(self, key: StoredKey) -> Caller:
        return Caller(
            key.tenant,
            key.priority,
            ADMIN in key.scopes,
            tenant_salt(self._config, key.tenant, has_key_file=True),
            key.id,
            key.scopes,
            key.limits.max_concurrent is not None,
        )


def tenant_salt(config: Config, tenant: str, *, has_key_file: bool) -> str:
    """The salt that separates a tenant's cached pages; "": they are shared."""
    if tenant in config.tenants:
        return config.tenant_salt(tenant)
    if not config.tenants and not has_key_file:
        return ""
    return f"\x01{tenant}"


def is_key(principal: str) -> bool:
    """Whether the principal is a key with a bound of its own."""
    return principal.startswith(_KEY)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
