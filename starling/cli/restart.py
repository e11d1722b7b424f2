"""`starling restart`: restart stages one after the other, each of them ready again before the next one.

The stage's supervisor restarts it on SIGHUP: the stage ends in order, and its successor starts when no process of it is
left. Requests in flight pause and continue. The gateway's connections end with it; therefore its requests finish first,
while new connections wait for the successor, and `all` excludes the gateway unless --with-gateway is given.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import click

from pipeline.config import paths
from pipeline.config.load import load
from pipeline.config.schema import Config
from pipeline.errors import StarlingError
from pipeline.ipc import control
from pipeline.models import versions, worker_groups
from pipeline.observe import status
from pipeline.runtime.process import EXIT_FATAL
from starling.cli import completion, terminal
from starling.cli.down import supervisor_of
from starling.cli.drain import ALL, drained
from starling.cli.options import exit_codes, timeout_option
from starling.cli.stage import STAGES

TIMEOUT_S = 120.0
POLL_S = 0.05
GATEWAY_TIMEOUT_S = 1.0
SPARE_S = 10.0  # beyond the timeout, until a gateway that was not restarted accepts connections again


@click.command(
    epilog=exit_codes(
        {
            0: "every stage is ready again",
            1: "a stage is not ready again (those after it were not restarted), or requests were ended with an error",
            2: "no such stage",
        }
    )
)
@click.argument("target", metavar="STAGE|all", shell_complete=completion.restart_targets)
@timeout_option(TIMEOUT_S, "How long each stage may take to be ready again.", least_s=0.1)
@timeout_option(30.0, "How long streams may take to finish before the gateway restarts.", name="--drain-timeout")
@click.option("--with-gateway", is_flag=True, help="With all: restart the gateway too, as the last one.")
def restart(target: str, timeout: float, drain_timeout: float, with_gateway: bool) -> int:
    """Restart STAGE, or all in turn, without a failed request.

    STAGE is tokenizer, scheduler, kv, worker (all models), worker-MODEL or gateway. Streams in flight pause and
    continue with the same bytes. Connections end with the gateway: its requests finish first, and new connections wait
    for its successor, which continues responses in the background.
    """
    config = load()
    run_dir = paths.run_dir(config)
    code = 0
    for record in chosen(config, run_dir, target, with_gateway):
        begun = time.monotonic()
        if record.stage == "gateway":
            click.echo("gateway: waiting for streams to finish ...")
            left = handed_over(run_dir, drain_timeout)
            if left:
                click.echo(f"gateway: {left} requests not finished within {drain_timeout:g} s were ended with an error")
                code = EXIT_FATAL
        problem = restarted(config, run_dir, record, time.monotonic() + timeout)
        if problem:
            terminal.complain(f"{record.stage} is not ready after {timeout:g} s: {problem}")
            return EXIT_FATAL
        click.echo(f"{record.stage}: ready again after {time.monotonic() - begun:.1f} s")
    if target == ALL and not with_gateway:
        click.echo("gateway: not restarted, because connections end with it (--with-gateway lets them finish first)")
    return code


def handed_over(run_dir: Path, timeout_s: float) -> int:
    """Let the gateway finish its requests. Returns the number of requests that did not finish in time.

    Meanwhile new connections wait for the successor if the supervisor holds the listening socket; otherwise they are
    refused (503).
    """
    deadline = time.monotonic() + timeout_s
    try:
        state = control.call(run_dir, "gateway", {"op": "handover", "timeout_s": timeout_s + SPARE_S})
    except StarlingError as error:
        if error.code != "CONFLICT":
            raise
        is_exit = leaves_requests(control.call(run_dir, "gateway", {"op": "state"}))
        return drained(run_dir, ALL, timeout_s, keep=False, is_exit=is_exit, count=unfinished)[0]
    while not state["handed_over"] and time.monotonic() < deadline:
        time.sleep(POLL_S)
        state = control.call(run_dir, "gateway", {"op": "state"})
    return unfinished(state)


def leaves_requests(state: dict[str, Any]) -> bool:
    """Whether the gateway leaves requests to its successor. One of an earlier release refuses to be asked for that."""
    return "unfinished" in state


def unfinished(state: dict[str, Any], target: str = ALL) -> int:
    """Requests that a restart of the gateway would end. A gateway of an earlier release counts those with a client."""
    return int(state["unfinished"] if leaves_requests(state) else state["in_flight"])


def chosen(config: Config, run_dir: Path, target: str, with_gateway: bool) -> list[status.StageStatus]:
    """Records of the stages to restart, in order. Raises `StarlingError` if one of them cannot be restarted."""
    loaded = [one for one in versions.read(config).versions if one.state != "loading"]
    there = [group for one in loaded for group in worker_groups.of_version(config, one)]
    workers = [one.stage for one in there]
    of_model = [one.stage for one in there if target == f"worker-{one.settings.slug}"]  # all its versions
    names = {ALL: ["tokenizer", "scheduler", "kv", *workers], "worker": workers}.get(target, of_model or [target])
    if target == ALL and with_gateway:
        names.append("gateway")
    known = [*(name for name in STAGES if name != "worker"), *workers]
    found = {record.stage: record for record in status.read_all(run_dir)}
    for name in names:
        if name not in known:
            raise click.BadParameter(f"{name!r} is not a stage; expected all, worker, {', '.join(known)}")
        if name not in found and has_given_up(run_dir, name):
            found[name] = never_began(name)
        if name not in found:
            raise StarlingError("MODEL_UNAVAILABLE", f"{name} is not running; `starling status` shows what runs")
        if not supervisor_of(found[name]) and not has_given_up(run_dir, name):
            raise StarlingError(
                "MODEL_UNAVAILABLE",
                f"{name} runs without `starling supervise`; restart it with the program that started it "
                f"(systemctl restart starling-{name.partition('-')[0]})",
            )
    return [found[name] for name in names]


def restarted(config: Config, run_dir: Path, old: status.StageStatus, deadline: float) -> str:
    """Restart a stage and wait until the whole server is as ready as before. Returns "" or what is missing."""
    if is_unloaded(config, old):
        return ""
    supervisor = supervisor_of(old)
    try:
        if not supervisor and has_given_up(run_dir, old.stage):
            versions.request_start(run_dir, old.stage)
            return until_ready(config, run_dir, old, deadline)
    except OSError as error:
        return f"{run_dir} cannot be written: {error.strerror}"
    if not supervisor:
        return "its supervisor is gone"
    try:
        fd = os.pidfd_open(supervisor)
        try:
            signal.pidfd_send_signal(fd, signal.SIGHUP)
        finally:
            os.close(fd)
    except ProcessLookupError:
        return "" if is_unloaded(config, old) else "its supervisor is gone"
    return until_ready(config, run_dir, old, deadline)


def has_given_up(run_dir: Path, stage: str) -> bool:
    """Is it a worker group without a supervisor, which the pool starts again at its own time or when asked?"""
    return stage.startswith("worker") and versions.read_failure(run_dir, stage) is not None


def never_began(stage: str) -> status.StageStatus:
    """The record of a worker group that failed before it wrote one."""
    return status.StageStatus(
        stage=stage,
        pid=0,
        ticks=0,
        epoch=0,
        uptime_s=0.0,
        progress=0,
        busy=False,
        ready=False,
        reason="",
        written=0.0,
        alive=False,
    )


def until_ready(config: Config, run_dir: Path, old: status.StageStatus, deadline: float) -> str:
    """Wait until the whole server is ready with a successor of `old`. Returns "" or what is missing."""
    # Peers report each other from the last heartbeat: the server must be ready for longer than that takes.
    settled_s = 3 * config.server.heartbeat_ms / 1000
    ready_since = float("inf")
    problem = ""
    while (now := time.monotonic()) < deadline:
        if is_unloaded(config, old):
            return ""
        problem = missing(run_dir, old)
        if problem:
            ready_since = float("inf")
        elif now - (ready_since := min(ready_since, now)) >= settled_s:
            return ""
        time.sleep(POLL_S)
    return problem or "the server was ready only for a moment"


def is_unloaded(config: Config, old: status.StageStatus) -> bool:
    """Has the version of the model that this worker serves been unloaded meanwhile, for example by a reload?"""
    loaded = versions.read(config).versions
    stages = [group.stage for one in loaded for group in worker_groups.of_version(config, one)]
    return old.stage.startswith("worker") and old.stage not in stages


def missing(run_dir: Path, old: status.StageStatus) -> str:
    """Why the server is not ready with a successor of `old`; "" if it is.

    Drains do not count, nor does a server without a model: it served no request before.
    """
    for record in status.read_all(run_dir):
        if record.stage == old.stage and record.epoch <= old.epoch:
            return "it has not ended yet" if record.alive else "it has ended and has not started yet"
        if not (record.alive and record.ready):
            return f"{record.stage}: {record.reason or 'not running'}"
    if not (run_dir / f"{old.stage}.status").exists():
        return "it has ended and has not started yet"
    try:
        state = control.call(run_dir, "gateway", {"op": "state"}, GATEWAY_TIMEOUT_S)
    except StarlingError as error:
        return error.message
    if state["draining"] or not state["instances"]:
        return ""
    return str(state["readiness"]["reason"] or "")
