"""From `fleet.store` to a coordination store."""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import urlsplit

from pipeline.config import paths
from pipeline.config.schema import Config
from pipeline.config.user_home import expand_user
from pipeline.coordination.interface import CoordinationStore
from pipeline.errors import ConfigError

NAMESPACE = "starling"  # of the keys on etcd and Redis, unless the address names another
SERVERS = ("etcd://", "redis://")


def open_store(config: Config, env: paths.Env = os.environ) -> CoordinationStore:
    """The store of the configuration; the caller closes it.

    A SQLite file is created, servers are not yet connected. Raises `ConfigError`, `StorageUnavailable`.
    """
    address = config.fleet.store
    if address.startswith(SERVERS):
        url = urlsplit(address)
        if not url.hostname or not url.port:
            raise ConfigError(f"fleet.store = {address!r}: expected {url.scheme}://HOST:PORT", "fleet.store")
        namespace = url.path.strip("/") or NAMESPACE
        if url.scheme == "etcd":
            from pipeline.coordination.etcd_store import EtcdStore

            return EtcdStore(url.hostname, url.port, f"{namespace}/")
        from pipeline.coordination.redis_store import RedisStore

        username, password = env.get("REDIS_USERNAME", ""), env.get("REDIS_PASSWORD", "")
        return RedisStore(url.hostname, url.port, namespace, username=username, password=password)
    from pipeline.coordination.sqlite_store import SqliteStore

    given = address.removeprefix("sqlite:")
    return SqliteStore(Path(os.path.abspath(expand_user(given, env))) if given else paths.home(env) / "fleet.db")
