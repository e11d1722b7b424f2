"""Where files are. Pure functions of the configuration and the environment: nothing is created.

STARLING_HOME (~/.starling)
├── models/    GGUF files, checkpoints (.idx, .bin), digests
├── run/       sockets, status records, locks; 0700  (server.run_dir)
├── state/     journal, saved pages, sessions        (server.state_dir)
├── cache/     compiled kernels
└── logs/
/dev/shm/starling-UID-XXXXXXXXXXXX/                  (server.arena_dir)
    arenas; the twelve digits are derived from the run directory, so that two servers never share arenas
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

from pipeline.config.schema import Config

Env = Mapping[str, str]


def home(env: Env = os.environ) -> Path:
    """STARLING_HOME, by default ~/.starling."""
    given = env.get("STARLING_HOME", "")
    base = Path(given) if given else Path(env.get("HOME") or os.path.expanduser("~")) / ".starling"
    return Path(os.path.abspath(base.expanduser()))


def models_dir(env: Env = os.environ) -> Path:
    """GGUF files and checkpoints."""
    return home(env) / "models"


def cache_dir(env: Env = os.environ) -> Path:
    """Compiled kernels."""
    return home(env) / "cache"


def logs_dir(env: Env = os.environ) -> Path:
    """Log files of all stages."""
    return home(env) / "logs"


def run_dir(config: Config, env: Env = os.environ) -> Path:
    """Sockets, status records and locks."""
    return _configured(config.server.run_dir) or home(env) / "run"


def state_dir(config: Config, env: Env = os.environ) -> Path:
    """State that survives a restart of the server."""
    return _configured(config.server.state_dir) or home(env) / "state"


def arena_dir(config: Config, env: Env = os.environ, shm: Path = Path("/dev/shm")) -> Path:
    """One directory per run directory, with the same name at every start."""
    run = os.path.realpath(run_dir(config, env))
    name = f"starling-{os.getuid()}-{hashlib.sha256(os.fsencode(run)).hexdigest()[:12]}"
    return (_configured(config.server.arena_dir) or shm) / name


def _configured(path: str) -> Path | None:
    return Path(os.path.abspath(Path(path).expanduser())) if path else None
