"""From `fleet.store` to a coordination store."""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import urlsplit

from pipeline.config import paths
from pipeline.config.schema import Config
from pipeline.coordination.interface import CoordinationStore
from pipeline.errors import ConfigError

NAMESPACE = "starling"  # of the keys on etcd, unless the address names another


def open_store(config: Config, env: paths.Env = os.environ) -> CoordinationStore:
    """The store of the configuration; the caller closes it.

    A SQLite file is created, etcd is not yet connected. Raises `ConfigError`, `StorageUnavailable`.
    """
    address = config.fleet.store
    if address.startswith("etcd://"):
        from pipeline.coordination.etcd_store import EtcdStore

        url = urlsplit(address)
        if not url.hostname or not url.port:
            raise ConfigError(f"fleet.store = {address!r}: expected etcd://HOST:PORT", "fleet.store")
        return EtcdStore(url.hostname, url.port, f"{url.path.strip('/') or NAMESPACE}/")
    from pipeline.coordination.sqlite_store import SqliteStore

    given = address.removeprefix("sqlite:")
    return SqliteStore(Path(os.path.abspath(Path(given).expanduser())) if given else paths.home(env) / "fleet.db")
