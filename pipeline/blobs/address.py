"""From `fleet.blobs` to a store. An address is checked when the configuration is read, without a connection."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import unquote, urlsplit

from pipeline.blobs.cloud import SCHEMES, CloudStore
from pipeline.blobs.folder import FolderStore
from pipeline.blobs.http import HttpStore
from pipeline.blobs.interface import BlobStore
from pipeline.config import paths
from pipeline.config.schema import Config
from pipeline.config.user_home import expand_user
from pipeline.coordination.address import SERVERS


def open_store(config: Config, env: paths.Env = os.environ) -> BlobStore:
    """The store of the configuration; nothing is connected. Raises `ConfigError`."""
    return _open(config.fleet.blobs, config, env)


def open_all(config: Config, env: paths.Env = os.environ) -> list[BlobStore]:
    """The store of the configuration and its mirrors. Raises `ConfigError`."""
    return [_open(address, config, env) for address in (config.fleet.blobs, *config.fleet.mirrors)]


def open_responses(config: Config, env: paths.Env = os.environ) -> BlobStore | None:
    """The store of a fleet's responses; None: there is none that all orchestrators share. Raises `ConfigError`."""
    address = config.fleet.orchestrator.responses
    if address:
        return _open(address, config, env, is_private=True)
    # Without an address all orchestrators are on one machine, and share its directories.
    return (
        None if config.fleet.store.startswith(SERVERS) else FolderStore(paths.home(env) / "responses", is_private=True)
    )


def open_without_credentials(config: Config, addresses: Iterable[str], env: paths.Env = os.environ) -> list[BlobStore]:
    """The stores of those addresses that need no credentials: directories and web servers."""
    return [_open(address, config, env) for address in addresses if not needs_credentials(address)]


def needs_credentials(address: str) -> bool:
    """Whether the store of that address is a bucket."""
    return urlsplit(address).scheme in SCHEMES


def _open(address: str, config: Config, env: paths.Env, *, is_private: bool = False) -> BlobStore:
    scheme = urlsplit(address).scheme if "://" in address else ""
    if scheme in ("http", "https"):
        return HttpStore(address)
    if scheme in SCHEMES:
        is_own = address in (config.fleet.blobs, config.fleet.orchestrator.responses)
        endpoint = config.fleet.blobs_endpoint if is_own else ""
        return CloudStore(address, endpoint, config.fleet.blobs_region if is_own else "")
    given = unquote(urlsplit(address).path) if scheme == "file" else address
    root = Path(os.path.abspath(expand_user(given, env))) if given else paths.home(env) / "blobs"
    return FolderStore(root, is_private=is_private)
