"""Where things are. Pure functions of the configuration and the environment: nothing is created.

STARLING_HOME (~/.starling)
├── models/    GGUF files, checkpoints (.idx, .bin), digests
├── run/       sockets, readiness files; 0700        (server.run_dir)
├── state/     journal, saved pages, sessions        (server.state_dir)
├── cache/     compiled kernels
└── logs/
/dev/shm/starling-UID-XXXXXXXXXXXX/                  (server.arena_dir)
    arenas; the twelve digits name the run directory, so two servers never meet
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

from pipeline.config.schema import Config
from pipeline.errors import ConfigError

SOCKET_PATH_MAX = 106  # bytes; sun_path holds 108 with its final zero, and ZeroMQ takes one more

Env = Mapping[str, str]


def home(env: Env = os.environ) -> Path:
    """STARLING_HOME, by default ~/.starling."""
    given = env.get("STARLING_HOME", "")
    base = Path(given) if given else Path(env.get("HOME") or os.path.expanduser("~")) / ".starling"
    return Path(os.path.abspath(base.expanduser()))


def models_dir(env: Env = os.environ) -> Path:
    return home(env) / "models"


def cache_dir(env: Env = os.environ) -> Path:
    return home(env) / "cache"


def logs_dir(env: Env = os.environ) -> Path:
    return home(env) / "logs"


def run_dir(config: Config, env: Env = os.environ) -> Path:
    return _configured(config.server.run_dir) or home(env) / "run"


def state_dir(config: Config, env: Env = os.environ) -> Path:
    return _configured(config.server.state_dir) or home(env) / "state"


def arena_dir(config: Config, env: Env = os.environ, shm: Path = Path("/dev/shm")) -> Path:
    """One directory for each run directory, with a name that every start finds again."""
    run = os.path.realpath(run_dir(config, env))
    name = f"starling-{os.getuid()}-{hashlib.sha256(os.fsencode(run)).hexdigest()[:12]}"
    return (_configured(config.server.arena_dir) or shm) / name


def edge_address(config: Config, edge: str, env: Env = os.environ) -> str:
    """The ZeroMQ address of an edge. Raises `ConfigError` when a socket's path would be too long."""
    given = config.edges.get(edge)
    address = given or f"ipc://{run_dir(config, env) / edge}.sock"
    if address.startswith("ipc://"):
        length = len(os.fsencode(address.removeprefix("ipc://")))
        if length > SOCKET_PATH_MAX:
            key = f"edges.{edge}" if given else "server.run_dir"
            raise ConfigError(
                f"{key}: the socket path {address.removeprefix('ipc://')!r} has {length} bytes, and the "
                f"system allows {SOCKET_PATH_MAX}; choose a shorter directory",
                param=key,
            )
    return address


def _configured(path: str) -> Path | None:
    return Path(os.path.abspath(Path(path).expanduser())) if path else None
