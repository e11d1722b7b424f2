"""Where files are. Nothing is created: the paths follow from the configuration and the environment.

STARLING_HOME (~/.starling)
├── models/    GGUF files, checkpoints (.idx, .bin), digests
├── run/       sockets, status records, locks; 0700  (server.run_dir)
├── state/     journal, saved pages, sessions        (server.state_dir)
├── blobs/     published models                       (fleet.blobs)
├── responses/ stored by orchestrators                (fleet.orchestrator.responses)
├── agent/     state of the agent, and a home for each of its engines (agents/ID with fleet.agent.id)
├── engines/   run directories of the agents' engines
├── fleet/     what `starling fleet up` runs on this machine
├── fleet.db   who is in the fleet                    (fleet.store)
├── fleet-token  secret of agents and orchestrators   (fleet.token)
├── cache/     compiled kernels
└── logs/
/dev/shm/starling-UID-XXXXXXXXXXXX/                  (server.arena_dir)
    arenas; the twelve digits are derived from the run directory, so that two servers never share arenas.  If another
    user has taken that name, a random one is recorded in RUN_DIR/arena-name (pipeline/runtime/arena_dir.py).  If
    /dev/shm is too small, the directory above is STARLING_HOME/arenas, which RUN_DIR/arena-parent then names
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections.abc import Mapping
from pathlib import Path

from pipeline.config.path_rules import REASON, has_unknown_user
from pipeline.config.schema import Config
from pipeline.config.user_home import expand_user, user_home
from pipeline.errors import ConfigError

Env = Mapping[str, str]

ARENA_NAME_FILE, ARENA_PARENT_FILE = "arena-name", "arena-parent"  # in the run directory


def home(env: Env = os.environ) -> Path:
    """STARLING_HOME, by default ~/.starling. Raises `ConfigError`."""
    given = env.get("STARLING_HOME", "")
    if has_unknown_user(given) and given != "~" and not given.startswith("~/"):
        raise ConfigError(f"STARLING_HOME = {given!r}: {REASON}", "STARLING_HOME")
    base = expand_user(given, env) if given else user_home(env, "set HOME or STARLING_HOME") / ".starling"
    return Path(os.path.abspath(base))


def models_dir(env: Env = os.environ) -> Path:
    """GGUF files and checkpoints."""
    return home(env) / "models"


def pulled_names(env: Env = os.environ) -> frozenset[str]:
    """The file names of the records of pulled models, without their suffix (pipeline/models/registry.py)."""
    try:
        return frozenset(name.removesuffix(".json") for name in os.listdir(models_dir(env) / "names"))
    except OSError:
        return frozenset()


def cache_dir(env: Env = os.environ) -> Path:
    """Compiled kernels."""
    return home(env) / "cache"


def logs_dir(env: Env = os.environ) -> Path:
    """Log files of all stages."""
    return home(env) / "logs"


def agent_logs_dir(env: Env = os.environ) -> Path:
    """Log files of the agents that have a configured id: several may run in one home."""
    return logs_dir(env) / "agents"


def run_dir(config: Config, env: Env = os.environ) -> Path:
    """Sockets, status records and locks."""
    return _configured(config.server.run_dir) or home(env) / "run"


def state_dir(config: Config, env: Env = os.environ) -> Path:
    """State that survives a restart of the server."""
    return _configured(config.server.state_dir) or home(env) / "state"


def fleet_token(config: Config, env: Env = os.environ) -> Path:
    """The file with the secret that agents and orchestrators share."""
    return _configured(config.fleet.token) or home(env) / "fleet-token"


def agent_dir(config: Config, env: Env = os.environ) -> Path:
    """State of the agent, and the homes of its engines: several agents of one home differ by their id."""
    name = config.fleet.agent.id
    return home(env) / "agents" / name if name else home(env) / "agent"


def arena_dir(config: Config, env: Env = os.environ, shm: Path = Path("/dev/shm")) -> Path:
    """One directory per run directory, with the same name at every start."""
    parent = _configured(config.server.arena_dir) or recorded_arena_parent(run_dir(config, env)) or shm
    return parent / arena_name(config, env)


def arena_name(config: Config, env: Env = os.environ) -> str:
    """The name of the arena directory, wherever it is."""
    run = os.path.realpath(run_dir(config, env))
    with contextlib.suppress(OSError, UnicodeDecodeError):
        name = (Path(run) / ARENA_NAME_FILE).read_text()
        if re.fullmatch(rf"starling-{os.getuid()}-[0-9a-f]{{32}}", name):
            return name
    return f"starling-{os.getuid()}-{hashlib.sha256(os.fsencode(run)).hexdigest()[:12]}"


def arena_parent(config: Config, shm: Path = Path("/dev/shm")) -> Path:
    """The directory in which a server makes its own for arenas, unless that is too small."""
    return _configured(config.server.arena_dir) or shm


def home_arena_parent(env: Env = os.environ) -> Path:
    """The directory in which `starling up` lets a server make its own for arenas if /dev/shm is too small."""
    return home(env) / "arenas"


def recorded_arena_parent(run: Path) -> Path | None:
    """The directory that `pipeline.runtime.arena_dir.record_parent` has recorded; None if it has recorded none."""
    with contextlib.suppress(OSError):
        path = os.fsdecode((run / ARENA_PARENT_FILE).read_bytes())
        if os.path.isabs(path):
            return Path(path)
    return None


def _configured(path: str) -> Path | None:
    return Path(os.path.abspath(expand_user(path))) if path else None
