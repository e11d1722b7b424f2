"""`starling drain` and `starling resume`: stop admission, let streams finish, take requests again."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import msgspec

from pipeline.config import paths
from pipeline.config.load import load
from pipeline.config.schema import Config
from pipeline.errors import Conflict, ModelNotFound
from pipeline.ipc import control
from pipeline.models import versions
from pipeline.runtime.process import EXIT_FATAL, EXIT_OK
from starling.cli.durations import Seconds
from starling.cli.stage import STAGES

ALL = "all"
TIMEOUT_S = 30.0
POLL_S = 0.1
LAST_WORDS_S = 5.0  # beyond the time, for the ended ones to be told


@click.command(
    epilog="Exit codes: 0 drained, everything had finished; 1 some requests were ended (their clients got an "
    "error that says so), or no gateway answers; 2 there is no such stage or model."
)
@click.argument("target", default=ALL, metavar="[STAGE|MODEL|all]")
@click.option(
    "--timeout",
    type=Seconds(),
    default=TIMEOUT_S,
    show_default=True,
    metavar="S",
    help="For streams to finish; then they are ended.",
)
@click.option("--json", "as_json", is_flag=True, help="The state after it as JSON.")
def drain(target: str, timeout: float, as_json: bool) -> int:
    """Take no more requests: 503 DRAINING with Retry-After, and /ready says why.

    Waits until what is in flight has finished. It stays drained until `starling resume`, also when the
    gateway restarts. Every stage serves every request, but for a worker, which serves its model: draining
    a worker drains that model, draining another stage everything.
    """
    config = load()
    run_dir = paths.run_dir(config)
    name = admission(config, target)
    if not as_json:
        click.echo(f"draining {name} ...")
    ended, state = drained(run_dir, name, timeout)
    words = "`starling resume` takes requests again"
    if ended:
        words = f"{ended} not finished within {timeout:g} s, ended with an error"
    return _tell(state, as_json, f"drained {name}; {words}", is_done=not ended)


@click.command(
    epilog="Exit codes: 0 requests are taken; 1 something else is drained still, or no gateway answers; "
    "2 there is no such stage or model."
)
@click.argument("target", default=ALL, metavar="[STAGE|MODEL|all]")
@click.option("--json", "as_json", is_flag=True, help="The state after it as JSON.")
def resume(target: str, as_json: bool) -> int:
    """Take requests again after `starling drain`; "all" lifts every drain."""
    config = load()
    name = admission(config, target)
    state = control.call(paths.run_dir(config), "gateway", {"op": "resume", "target": name})
    left = ", ".join(state["draining"])
    return _tell(state, as_json, f"still drained: {left}" if left else f"resumed {name}", is_done=not left)


def _tell(state: dict[str, Any], as_json: bool, words: str, is_done: bool) -> int:
    """The gateway's state, or what is to be said of it; the exit code."""
    click.echo(msgspec.json.format(msgspec.json.encode(state)).decode() if as_json else words)
    return EXIT_OK if is_done else EXIT_FATAL


def admission(config: Config, target: str) -> str:
    """What the gateway must refuse for it: `ALL` or a model. Raises `ModelNotFound`."""
    instances = versions.read(config).versions
    names = list(dict.fromkeys(one.name for one in instances))
    if target in names:
        return target
    if target == ALL or (target in STAGES and target != "worker"):
        return ALL
    if target == "worker" and len(names) == 1:
        return names[0]
    for one in instances:
        if target in (one.stage, one.id, f"worker-{one.settings.slug}"):
            return one.name
    if target == "worker" and names:
        reason = "'worker' is every model's: name the model, or its worker"
    else:
        reason = f"{target!r} is no stage and no model"
    stages = [name for name in STAGES if name != "worker"]
    workers = dict.fromkeys(one.stage for one in instances)
    raise ModelNotFound(f"{reason}; there are {', '.join((ALL, *stages, *names, *workers))}")


def drained(
    run_dir: Path,
    target: str,
    timeout_s: float,
    keep: bool = True,
    clock: Callable[[], float] = time.monotonic,
    pause: Callable[[float], None] = time.sleep,
) -> tuple[int, dict[str, Any]]:
    """Drain and wait: how many were not finished when the time was up, and the gateway's state.

    `keep` False: the gateway's own restart lifts it.
    """
    request = {"op": "drain", "target": target, "timeout_s": timeout_s, "keep": keep}
    state = control.call(run_dir, "gateway", request)
    deadline = clock() + timeout_s + LAST_WORDS_S
    while in_flight(state, target) and clock() < deadline:
        pause(POLL_S)
        state = control.call(run_dir, "gateway", {"op": "state"})
    drain = state["draining"].get(target)
    if drain is None:
        raise Conflict(f"{target} was resumed, or unloaded, by somebody else before it was drained")
    return drain["ended"], state


def in_flight(state: dict[str, Any], target: str) -> int:
    return int(state["in_flight"] if target == ALL else state["models"].get(target, 0))
