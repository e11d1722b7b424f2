"""Everything from one command: check, prepare, start the stages under honcho, say when it is ready.

`up` itself serves nothing.  It runs `honcho start` on the Procfile (foreman.py; honcho brings the stages'
output together) and waits until the gateway's /ready answers.  When honcho is over it removes what the
stages left (leftovers.py), so that Ctrl-C leaves nothing behind.
"""

from __future__ import annotations

import http.client
import os
import shutil
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import click

from pipeline.config import paths
from pipeline.config.load import load
from pipeline.config.schema import Config
from pipeline.errors import ConfigError, ResourceError
from pipeline.faults import points
from pipeline.models import capacity
from pipeline.observe import status
from pipeline.runtime import run_dir as rundir
from pipeline.runtime.process import EXIT_FATAL
from pipeline.supervise import cleanup, listen_fd
from starling.cli.broken_pipe import silence
from starling.cli.honcho_runner import Foreman
from starling.cli.prepare import prepare_all
from starling.cli.stage import STAGES

PROCFILE = Path(__file__).resolve().parent.parent.parent / "Procfile"
PATIENCE_S = 5.0  # before it says what it waits for


@click.command(
    epilog="Exit codes: 0 ended as it was told to; 1 a stage was given up, or still runs; 78 the configuration or the "
    "machine must be changed first."
)
def up() -> int:
    """Prepare what is missing, start every stage, and run until Ctrl-C."""
    config = load()
    check_faults(os.environ)
    run_dir = rundir.prepare(paths.run_dir(config))
    only_one = rundir.StageLock(run_dir, "up")
    try:
        check_port(config)
        env = {**os.environ, **choose_arena_dir(config)}
        prepare_all(config)
        watcher = _Watcher(config, run_dir)
        code = Foreman(write_procfile(run_dir), env).run(watcher.look)
    finally:
        only_one.release()
    arena_dir = paths.arena_dir(load(env=env), env)
    still_running = cleanup.sweep(run_dir, arena_dir, wait_s=5.0)
    if still_running:
        click.echo(f"up: {still_running} is still running; `starling status` shows it", err=True)
    return code or (EXIT_FATAL if still_running else 0)


# ------------------------------------------------------------------ before the start


def check_faults(env: Mapping[str, str]) -> None:
    """Raises `ConfigError` for a plan of faults that cannot be meant so: each stage would end with it."""
    if plan := env.get(points.VARIABLE, ""):
        from pipeline.faults import plan as faultplan

        faultplan.parse(plan)


def check_port(config: Config) -> None:
    """Raises `ConfigError` when nobody could listen there, with the reason."""
    host, port = config.server.host, config.server.port
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen(1)
    except OSError as error:
        raise ConfigError(
            f"server.host, server.port: cannot listen on {host}:{port}: {error.strerror}; end what uses it "
            f"or choose another port, for example STARLING_SERVER__PORT={port + 1 if port < 65535 else 8080}",
            param="server.port",
        ) from None


def choose_arena_dir(config: Config, shm: Path = Path("/dev/shm")) -> dict[str, str]:
    """Environment that moves the arenas out of a /dev/shm too small for them (as containers have).

    Raises `ResourceError`, with the numbers, when they fit nowhere.
    """
    need = sum(config.kv_cache_bytes(model) for model in config.models) + (capacity.ARENA_SPARE_MB << 20)
    home = Path(config.server.arena_dir or shm)
    there = paths.arena_dir(config)
    # What a killed server has left counts as free: it is adopted or replaced.
    left = sum(path.stat().st_size for path in there.glob("*")) if there.is_dir() else 0
    free = _free(home) + left
    if free >= need:
        return {}
    advice = (
        "make them smaller (kv_cache_mb of a model, STARLING_CACHE__MAX_SIZE_MB) or move them "
        "(STARLING_SERVER__ARENA_DIR)"
    )
    other = paths.home() / "arenas"
    if config.server.arena_dir or _free(other.parent) < need:
        raise ResourceError(f"the arenas need {need >> 20} MB, and {home} has {free >> 20} MB free; {advice}")
    click.echo(
        f"{home} has {free >> 20} MB free and the arenas need {need >> 20} MB: they go to {other}, which is "
        f"slower; {advice}"
    )
    return {"STARLING_SERVER__ARENA_DIR": str(other)}


def _free(path: Path) -> int:
    while not path.exists() and path != path.parent:
        path = path.parent
    return shutil.disk_usage(path).free


def write_procfile(run_dir: Path) -> Path:
    """The Procfile at the top, or the same in the run directory where this was installed without it."""
    if PROCFILE.is_file():
        return PROCFILE
    lines = [f"{name}: exec starling supervise {name}" for name in STAGES]
    procfile = run_dir / "Procfile"
    procfile.write_text("\n".join(lines) + "\n")
    return procfile


# ------------------------------------------------------------------ while it runs


class _Watcher:
    """Asks whether the server is ready, and says so once; or what it waits for."""

    def __init__(self, config: Config, run_dir: Path) -> None:
        self._config = config
        self._run_dir = run_dir
        self._begun = time.monotonic()
        self._said: list[str] = []

    def look(self) -> bool:
        """Is it ready? Prints the banner then."""
        took = time.monotonic() - self._begun
        records = [record for record in status.read_all(self._run_dir) if record.alive]
        waiting = [f"{record.stage} ({record.reason or 'starting'})" for record in records if not record.ready]
        # Asked only when nothing else is missing: the gateway logs every request.
        if records and not waiting and _answers_ready(self._config):
            _say(banner(self._config, took))
            return True
        if took > PATIENCE_S and waiting and waiting != self._said:
            self._said = waiting
            _say("waiting for " + ", ".join(waiting))
        return False


def _say(text: str) -> None:
    try:
        click.echo(text)
    except OSError:
        silence(sys.stdout)


def _answers_ready(config: Config) -> bool:
    connection = http.client.HTTPConnection(listen_fd.reachable(config.server.host), config.server.port, timeout=1.0)
    try:
        connection.request("GET", "/ready")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def banner(config: Config, took_s: float) -> str:
    """What a newcomer needs: where it is, and a line to paste."""
    url = listen_fd.url(config)
    key = " \\\n    -H 'Authorization: Bearer YOUR-API-KEY'" if config.auth.api_keys else ""
    messages = '[{"role": "user", "content": "Tell me a short story."}]'
    return (
        f"\nStarling is ready at {url} ({took_s:.1f} s). Try it:\n\n"
        f"  curl -N {url}/v1/chat/completions{key} \\\n"
        f"    -H 'Content-Type: application/json' \\\n"
        f'    -d \'{{"model": "{config.models[0].name}", "stream": true,\n'
        f'         "messages": {messages}}}\'\n\n'
        "Ctrl-C ends it.\n"
    )
