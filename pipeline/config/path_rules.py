"""Paths that name the home directory of a user whom the machine does not have."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from pipeline.config.schema import Config
from pipeline.config.user_home import expand_user
from pipeline.errors import ConfigError

REASON = "there is no such user; write the whole path"


def problems(config: Config) -> Iterator[tuple[str, str, str]]:
    """Key, value and reason of each problem."""
    server, fleet = config.server, config.fleet
    given = {
        "server.unix_socket": server.unix_socket,
        "server.tls_cert": server.tls_cert,
        "server.tls_key": server.tls_key,
        "server.tls_client_ca": server.tls_client_ca,
        "server.run_dir": server.run_dir,
        "server.state_dir": server.state_dir,
        "server.arena_dir": server.arena_dir,
        "fleet.store": fleet.store,
        "fleet.token": fleet.token,
        "fleet.blobs": fleet.blobs,
        "fleet.orchestrator.responses": fleet.orchestrator.responses,
        "fleet.kubernetes.values": fleet.kubernetes.values,
    }
    for index, model in enumerate(config.models):
        given[f"models.{index}.path"] = model.path
        given[f"models.{index}.spill_path"] = model.spill_path
        given[f"models.{index}.chat_template"] = "" if "{" in model.chat_template else model.chat_template
        for number, adapter in enumerate(model.adapters):
            given[f"models.{index}.adapters.{number}.path"] = adapter.path
    for key, path in given.items():
        if has_unknown_user(path.removeprefix("file://").removeprefix("sqlite:")):
            yield key, repr(path), REASON


def has_unknown_user(path: str) -> bool:
    """Whether the path begins with ~USER and there is no such user, or with ~ and the user's home is not known."""
    try:
        return path.startswith("~") and str(expand_user(path)) == str(Path(path))
    except ConfigError:
        return True
