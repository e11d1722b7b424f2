"""`starling restart`: stages one after the other, each ready again before the next is touched.

The stage's supervisor does it (SIGHUP): the stage ends in order, everything of it is gone before its
successor starts.  What is in flight waits and goes on; only the gateway's own connections cannot outlive
it, so they finish first while new ones wait for the successor, and `all` leaves it alone unless told.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import click

from pipeline.config import paths
from pipeline.config.load import load
from pipeline.config.schema import Config
from pipeline.errors import StarlingError
from pipeline.ipc import control
from pipeline.models import versions
from pipeline.observe import status
from pipeline.runtime.process import EXIT_FATAL
from starling.cli.down import supervisor_of
from starling.cli.drain import ALL, drained
from starling.cli.durations import Seconds
from starling.cli.stage import STAGES

TIMEOUT_S = 120.0
POLL_S = 0.05
GATEWAY_TIMEOUT_S = 1.0
SPARE_S = 10.0  # beyond the time, until a gateway that nobody restarts accepts again


@click.command(
    epilog="Exit codes: 0 every one is ready again; 1 one is not (those after it were left as they are), or "
    "requests had to be ended for the gateway."
)
@click.argument("target", metavar="STAGE|all")
@click.option(
    "--timeout",
    type=Seconds(0.1),
    default=TIMEOUT_S,
    show_default=True,
    metavar="S",
    help="For each stage to be ready again.",
)
@click.option(
    "--drain-timeout",
    type=Seconds(),
    default=30.0,
    show_default=True,
    metavar="S",
    help="For streams to finish before the gateway restarts.",
)
@click.option("--with-gateway", is_flag=True, help="With all: the gateway too, at last.")
def restart(target: str, timeout: float, drain_timeout: float, with_gateway: bool) -> int:
    """Restart STAGE, or all one by one, without a failed request.

    STAGE is tokenizer, scheduler, kv, worker (every model's), worker-MODEL or gateway. Streams in flight
    pause and go on with the same bytes. Connections end with the gateway: what is in flight finishes
    first, and who connects meanwhile waits for its successor.
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
                click.echo(f"gateway: {left} not finished within {drain_timeout:g} s, ended with an error")
                code = EXIT_FATAL
        problem = restarted(config, run_dir, record, time.monotonic() + timeout)
        if problem:
            click.echo(f"starling: {record.stage} is not ready after {timeout:g} s: {problem}", err=True)
            return EXIT_FATAL
        click.echo(f"{record.stage}: ready again after {time.monotonic() - begun:.1f} s")
    if target == ALL and not with_gateway:
        click.echo("gateway: left as it is, for connections end with it (--with-gateway drains it first)")
    return code


def handed_over(run_dir: Path, timeout_s: float) -> int:
    """Make the gateway finish; how many requests it could not.

    New connections wait for its successor meanwhile, if the supervisor holds the socket; otherwise they
    are refused (503).
    """
    deadline = time.monotonic() + timeout_s
    try:
        state = control.call(run_dir, "gateway", {"op": "handover", "timeout_s": timeout_s + SPARE_S})
    except StarlingError as error:
        if error.code != "CONFLICT":
            raise
        return drained(run_dir, ALL, timeout_s, keep=False)[0]
    while not state["handed_over"] and time.monotonic() < deadline:
        time.sleep(POLL_S)
        state = control.call(run_dir, "gateway", {"op": "state"})
    return int(state["in_flight"])


def chosen(config: Config, run_dir: Path, target: str, with_gateway: bool) -> list[status.StageStatus]:
    """Records of the stages to restart, in order. Raises `StarlingError` when one cannot be restarted."""
    there = [one for one in versions.read(config).versions if one.state != "loading"]
    workers = [one.stage for one in there]
    of_model = [one.stage for one in there if target == f"worker-{one.settings.slug}"]  # whatever versions it has now
    names = {ALL: ["tokenizer", "scheduler", "kv", *workers], "worker": workers}.get(target, of_model or [target])
    if target == ALL and with_gateway:
        names.append("gateway")
    known = [*(name for name in STAGES if name != "worker"), *workers]
    found = {record.stage: record for record in status.read_all(run_dir)}
    for name in names:
        if name not in known:
            raise click.BadParameter(f"{name!r} is no stage; there are all, worker, {', '.join(known)}")
        if name not in found:
            raise StarlingError("MODEL_UNAVAILABLE", f"{name} is not running; `starling status` shows what is")
        if not supervisor_of(found[name]):
            raise StarlingError(
                "MODEL_UNAVAILABLE",
                f"{name} runs without a supervisor of ours; whoever started it can restart it "
                f"(systemctl restart starling-{name.partition('-')[0]})",
            )
    return [found[name] for name in names]


def restarted(config: Config, run_dir: Path, old: status.StageStatus, deadline: float) -> str:
    """Restart and wait until the whole server is as ready as before; "" or what is missing."""
    if is_unloaded(config, old):
        return ""
    supervisor = supervisor_of(old)
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
    # What peers say of each other is as old as a heartbeat: ready must last longer than that.
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
    return problem or "it was ready for a moment only"


def is_unloaded(config: Config, old: status.StageStatus) -> bool:
    """Of a worker: its version of the model went meanwhile, as one does that a reload has replaced."""
    return old.stage.startswith("worker") and old.stage not in [one.stage for one in versions.read(config).versions]


def missing(run_dir: Path, old: status.StageStatus) -> str:
    """Why the server is not ready with a successor of `old`; "" when it is. Drains, and that no model is loaded,
    do not count: nobody was served before.
    """
    for record in status.read_all(run_dir):
        if record.stage == old.stage and record.epoch <= old.epoch:
            return "it has not ended yet" if record.alive else "it has ended and not started yet"
        if not (record.alive and record.ready):
            return f"{record.stage}: {record.reason or 'not running'}"
    if not (run_dir / f"{old.stage}.status").exists():
        return "it has ended and not started yet"
    try:
        state = control.call(run_dir, "gateway", {"op": "state"}, GATEWAY_TIMEOUT_S)
    except StarlingError as error:
        return error.message
    if state["draining"] or not state["instances"]:
        return ""
    return str(state["readiness"]["reason"] or "")
