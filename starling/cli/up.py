"""`starling up`: check, prepare, start all stages under honcho, and print a banner when the server is ready.

`up` runs honcho on the Procfile, in its own process (procfile_runner.py); honcho merges the output of the stages. `up`
waits until the gateway's /ready answers 200. After the end of all stages it removes what they left
(pipeline/supervise/cleanup.py), so that no socket and no arena stays after Ctrl-C.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import click

from pipeline import procfs
from pipeline.api.key_file import key_path
from pipeline.config import paths, server_cores
from pipeline.config.load import load
from pipeline.config.schema import Config
from pipeline.errors import ConfigError, ResourceError
from pipeline.faults import points
from pipeline.models import capacity, control_cores
from pipeline.observe import status
from pipeline.runtime import arena_dir, directory_lock
from pipeline.runtime import run_dir as rundir
from pipeline.runtime.directory_lock import ServerLocks
from pipeline.runtime.process import AWAITED_VARIABLE, EXIT_FATAL, ORPHANS_VARIABLE, die_with_parent
from pipeline.supervise import cleanup, listen_fd
from pipeline.supervise.unix_listener import socket_path
from starling.cli import interrupts
from starling.cli.bounded_output import BoundedOutput
from starling.cli.forked_supervisor import ensure_room
from starling.cli.honcho_patch import SIGNALS
from starling.cli.options import exit_codes
from starling.cli.prepare import prepare_all
from starling.cli.prepare_apart import prepare_apart
from starling.cli.procfile_runner import run_procfile
from starling.cli.stage import STAGES
from starling.cli.users_lock import LastUser
from starling.doctor.finding import disk_bytes

PROCFILE = Path(__file__).resolve().parent.parent.parent / "Procfile"
WAITING_S = 5.0  # before it prints which stages are not ready
ANSWER_S = 1.0  # for each step of the answer of /ready; then it is asked again


@click.command(
    epilog=exit_codes(
        {
            0: "ended on request, once all stages had been started",
            1: "a stage was given up, or still runs; or a model was not prepared, and a retry may cure that",
            78: "the configuration or the machine must be changed first",
            143: "ended by SIGTERM before the stages were started (129: SIGHUP, 130: SIGINT)",
        }
    )
)
@click.option(
    "--while-used",
    is_flag=True,
    hidden=True,
    help="End when no `starling run` or `starling chat` uses the server.",
)
@click.option("--with-parent", is_flag=True, hidden=True, help="End when the process that started it ends.")
@click.option("--standby", is_flag=True, hidden=True, help="Wait on stdin for the home of the server.")
def up(while_used: bool, with_parent: bool, standby: bool) -> int:
    """Prepare the models, start every stage, run until Ctrl-C.

    On Ctrl-C (SIGINT, SIGTERM or SIGHUP) streams in flight finish first. A second Ctrl-C kills all stages.
    """
    ensure_room()
    if with_parent:
        die_with_parent()
        os.environ[ORPHANS_VARIABLE] = os.environ[AWAITED_VARIABLE] = "1"  # an agent starts it for a request
    begun = procfs.started_at(os.getpid()) or time.time()
    if standby:
        from starling.cli.standby import wait_for_home  # imports every stage

        if not wait_for_home():
            return 0
        begun = time.time()
    timeline = Timeline(begun)
    interrupts.raise_ended()  # until honcho handles them
    config = load()
    check_faults(os.environ)
    timeline.reached("command")
    run_dir = rundir.prepare(paths.run_dir(config))
    only_one = rundir.StageLock(run_dir, "up")
    last_user = LastUser(run_dir) if while_used else None
    held: ServerLocks | None = None
    try:
        server_cores.check(config, server_cores.of(config))
        check_port(config)
        check_certificate(config)
        moved = choose_arena_dir(config)  # before a long download
        prepare_apart(config, prepare_all)
        timeline.reached("models")
        place_arenas(config, run_dir, moved or choose_arena_dir(config))  # the sizes of all arenas are known now
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # until honcho handles them: all is removed after its end
        arena_dir.prepare(config)
        held = ServerLocks(config, run_dir)  # for its whole life, so that no gap between two stages loses them
        watcher = _Watcher(config, run_dir, timeline)
        drain_s = config.server.drain_timeout_ms / 1000
        code = run_procfile(write_procfile(run_dir), os.environ, run_dir, watcher.check, drain_s, last_user)
    finally:
        if held is not None:
            held.release()
        only_one.release()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    still_running = cleanup.sweep(run_dir, paths.arena_dir(config), wait_s=5.0)
    if still_running:
        click.echo(f"up: {still_running} is still running; `starling status` shows it", err=True)
    return code or (EXIT_FATAL if still_running else 0)


# ------------------------------------------------------------------ before the start


def check_faults(env: Mapping[str, str]) -> None:
    """Raises `ConfigError` for an invalid fault plan, with which every stage would end."""
    if plan := env.get(points.VARIABLE, ""):
        from pipeline.faults import plan as faultplan

        faultplan.parse(plan)


def check_port(config: Config) -> None:
    """Raises `ConfigError` with the reason if a process cannot listen on the configured address."""
    host, port = config.server.host, config.server.port
    if not host:
        return
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
            f"server.host, server.port: cannot listen on {host}:{port}: {error.strerror}; stop the program that uses "
            f"it or choose another port, for example STARLING_SERVER__PORT={port + 1 if port < 65535 else 8080}",
            param="server.port",
        ) from None


def check_certificate(config: Config) -> None:
    """Raises `ConfigError` if the server cannot use its certificate."""
    if config.server.tls_cert:
        from pipeline.tls.certificate import files_of, read_certificate  # OpenSSL's memory, only for TLS

        if (files := files_of(config)) is not None:
            read_certificate(files)


def choose_arena_dir(config: Config, shm: Path = Path("/dev/shm")) -> Path | None:
    """A directory for the arenas in the home if /dev/shm is too small, as in containers, else None.

    Raises `ResourceError` with the sizes if they do not fit there either.
    """
    need = sum(capacity.need(config, model) for model in config.preloaded)
    home = paths.arena_parent(config, shm)
    there = home / paths.arena_name(config)
    # Arenas of a killed server count as free space: they are adopted or replaced.
    free = _free(home) + disk_bytes(there)
    if free >= need:
        return None
    advice = (
        "make them smaller (kv_cache_mb or max_batch_size of a model, STARLING_CACHE__MAX_SIZE_MB) or move them "
        "(STARLING_SERVER__ARENA_DIR)"
    )
    other = paths.home_arena_parent()
    if config.server.arena_dir or _free(other) + disk_bytes(other / paths.arena_name(config)) < need:
        raise ResourceError(f"the arenas need {need >> 20} MB, and {home} has {free >> 20} MB free; {advice}")
    click.echo(
        f"{home} has {free >> 20} MB free and the arenas need {need >> 20} MB: they go to {other}, which is "
        f"slower; {advice}"
    )
    return other


def place_arenas(config: Config, run_dir: Path, parent: Path | None) -> None:
    """Record where the arenas are, for all stages and commands, and remove those that a killed server has elsewhere."""
    before = {paths.arena_dir(config)}
    if recorded := paths.recorded_arena_parent(run_dir):  # server.arena_dir may have been set since
        before.add(recorded / paths.arena_name(config))
    if any(directory_lock.is_held(folder) for folder in before):  # by stages that this command has not started
        return
    for folder in before - {(parent or paths.arena_parent(config)) / paths.arena_name(config)}:
        cleanup.remove_arenas(folder)
    arena_dir.record_parent(run_dir, parent)  # last: the record says where they were


def _free(path: Path) -> int:
    while not path.exists() and path != path.parent:
        path = path.parent
    return shutil.disk_usage(path).free


def write_procfile(run_dir: Path) -> Path:
    """The repository's Procfile, or an equal one in the run directory if the package was installed without it."""
    if PROCFILE.is_file():
        return PROCFILE
    lines = [f"{name}: exec starling supervise {name}" for name in STAGES]
    procfile = run_dir / "Procfile"
    procfile.write_text("\n".join(lines) + "\n")
    return procfile


# ------------------------------------------------------------------ while it runs


class Timeline:
    """When each phase of the start was reached; `str` shows all, in order, in seconds since the command began."""

    def __init__(self, begun: float) -> None:
        """`begun`: s since 1970."""
        self._begun = begun
        self._reached: dict[str, float] = {}

    def reached(self, phase: str, at: float = 0.0) -> None:
        """`phase` has ended, now or at `at` (s since 1970); only the first call for a phase counts."""
        self._reached.setdefault(phase, at or time.time())

    def __str__(self) -> str:
        order = sorted(self._reached.items(), key=lambda item: item[1])
        return "Started: " + ", ".join(f"{phase} {at - self._begun:.2f}" for phase, at in order) + " s."


class _Watcher:
    """Checks whether the server is ready, and prints the banner or the stages that are not ready."""

    def __init__(self, config: Config, run_dir: Path, timeline: Timeline) -> None:
        self._timeline = timeline
        self._config = config
        self._run_dir = run_dir
        self._begun = time.monotonic()
        self._reported: list[str] = []
        self._is_kept = False

    def check(self) -> bool:
        """True once the server is ready; prints the banner then. For when all processes have been started."""
        if not self._is_kept:
            self._is_kept = True
            control_cores.keep_parent(self._config)
        took = time.monotonic() - self._begun
        records = [record for record in status.read_all(self._run_dir) if record.alive]
        waiting = [f"{record.stage} ({record.reason or 'starting'})" for record in records if not record.ready]
        for record in records:
            if record.ready:
                self._timeline.reached(record.stage, record.written)
        # Requested only when every stage is ready, because the gateway logs every request. One that has not recorded
        # that it runs does not answer yet, and this process would wait for it, and print nothing meanwhile.
        has_gateway = any(record.stage == "gateway" for record in records)
        if has_gateway and not waiting and _answers_ready(self._config):
            self._timeline.reached("/ready")
            _print(banner(self._config, took) + f"\n{self._timeline}\n")
            return True
        if took > WAITING_S and waiting and waiting != self._reported:
            self._reported = waiting
            _print("waiting for " + ", ".join(waiting))
        return False


def _print(text: str) -> None:
    print(text, file=BoundedOutput(sys.stdout), flush=True)


def _answers_ready(config: Config) -> bool:
    # By hand: the HTTP client and what it imports would stay in memory for the server's whole life.
    try:
        with _connect(config) as plain, _secured(config, plain) as connection:
            connection.sendall(b"GET /ready HTTP/1.0\r\n\r\n")
            with connection.makefile("rb") as answer:
                return answer.readline().split()[1:2] == [b"200"]
    except (OSError, ConfigError):
        return False


def _connect(config: Config) -> socket.socket:
    if not config.server.unix_socket:
        return socket.create_connection((listen_fd.reachable(config.server.host), config.server.port), timeout=ANSWER_S)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(ANSWER_S)
        connection.connect(str(socket_path(config)))
    except OSError:
        connection.close()
        raise
    return connection


def _secured(config: Config, connection: socket.socket) -> socket.socket:
    if not config.server.tls_cert or config.server.unix_socket:
        return connection
    from pipeline.tls import trust

    return trust.own_server(config).wrap_socket(connection)


def banner(config: Config, took_s: float) -> str:
    """The server's URL and a request to paste into a shell."""
    url = listen_fd.url(config)
    has_keys = bool(config.auth.api_keys) or key_path(paths.state_dir(config)).exists()
    key = " \\\n    -H 'Authorization: Bearer YOUR-API-KEY'" if has_keys else ""
    messages = '[{"role": "user", "content": "Tell me a short story."}]'
    trusted = f"--cacert {config.server.tls_cert} " if config.server.tls_cert else ""
    target = url
    if not config.server.host:
        trusted, target = f"--unix-socket {socket_path(config)} ", "http://localhost"
    return (
        f"\nStarling is ready at {url} ({took_s:.1f} s). Try it:\n\n"
        f"  curl -N {trusted}{target}/v1/chat/completions{key} \\\n"
        f"    -H 'Content-Type: application/json' \\\n"
        f'    -d \'{{"model": "{config.models[0].name}", "stream": true,\n'
        f'         "messages": {messages}}}\'\n\n'
        "Ctrl-C ends it.\n"
    )
