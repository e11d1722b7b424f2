"""`starling drain` and `starling resume`: refuse new requests while streams finish, and accept requests again."""

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
from pipeline.models import versions, worker_groups
from pipeline.runtime.process import EXIT_FATAL, EXIT_OK
from starling.cli import completion
from starling.cli.options import exit_codes, json_option, timeout_option
from starling.cli.stage import STAGES

ALL = "all"
TIMEOUT_S = 30.0
POLL_S = 0.1
FINAL_ERRORS_S = 5.0  # beyond the timeout, for the gateway to send errors to the clients of unfinished requests


@click.command(
    epilog=exit_codes(
        {
            0: "drained; every request had finished",
            1: "requests were ended with an error (503 DRAINING), or no gateway answers",
            2: "no such stage or model",
        }
    )
)
@click.argument("target", default=ALL, metavar="[TARGET]", shell_complete=completion.drain_targets)
@timeout_option(TIMEOUT_S, "How long requests in flight may take to finish.")
@json_option("Print the gateway's state afterwards as JSON.")
def drain(target: str, timeout: float, as_json: bool) -> int:
    """Refuse new requests and wait for the others to finish.

    New requests get 503 DRAINING with Retry-After, and /ready answers 503. After --timeout the gateway ends the
    remaining requests with an error. The drain lasts until `starling resume`, also across restarts of the gateway.

    TARGET is a model, a stage, or "all" (the default). A worker serves one model: draining it drains that model. All
    other stages serve every model: draining one of them drains the whole server.
    """
    config = load()
    run_dir = paths.run_dir(config)
    name = admission(config, target)
    if not as_json:
        click.echo(f"draining {name} ...")
    ended, state = drained(run_dir, name, timeout)
    result = "`starling resume` accepts requests again"
    if ended:
        result = f"{ended} requests not finished within {timeout:g} s were ended with an error"
    return _print_state(state, as_json, f"drained {name}; {result}", is_done=not ended)


@click.command(
    epilog=exit_codes(
        {
            0: "the server accepts requests",
            1: "another drain is still in force, or no gateway answers",
            2: "no such stage or model",
        }
    )
)
@click.argument("target", default=ALL, metavar="[TARGET]", shell_complete=completion.drain_targets)
@json_option("Print the gateway's state afterwards as JSON.")
def resume(target: str, as_json: bool) -> int:
    """Accept requests again after `starling drain`.

    TARGET is what was drained: a model, a stage, or "all" (the default), which lifts every drain.
    """
    config = load()
    name = admission(config, target)
    state = control.call(paths.run_dir(config), "gateway", {"op": "resume", "target": name})
    left = ", ".join(state["draining"])
    return _print_state(state, as_json, f"still drained: {left}" if left else f"resumed {name}", is_done=not left)


def _print_state(state: dict[str, Any], as_json: bool, summary: str, is_done: bool) -> int:
    """Print the gateway's state as JSON, or its summary. Returns the exit code."""
    click.echo(msgspec.json.format(msgspec.json.encode(state)).decode() if as_json else summary)
    return EXIT_OK if is_done else EXIT_FATAL


def admission(config: Config, target: str) -> str:
    """The drain that `target` stands for: `ALL`, or the name of a model. Raises `ModelNotFound`."""
    instances = versions.read(config).versions
    names = list(dict.fromkeys(one.name for one in instances))
    if target in names:
        return target
    if target == ALL or (target in STAGES and target != "worker"):
        return ALL
    if target == "worker" and len(names) == 1:
        return names[0]
    groups = [group for one in instances for group in worker_groups.of_version(config, one)]
    for one in groups:
        if target in (one.stage, one.id, f"worker-{one.settings.slug}"):
            return one.name
    if target == "worker" and names:
        reason = "'worker' stands for the workers of all models: name one model, or its worker"
    else:
        reason = f"{target!r} is neither a stage nor a model"
    stages = [name for name in STAGES if name != "worker"]
    workers = dict.fromkeys(one.stage for one in groups)
    raise ModelNotFound(f"{reason}; there are {', '.join((ALL, *stages, *names, *workers))}")


def drained(
    run_dir: Path,
    target: str,
    timeout_s: float,
    keep: bool = True,
    *,
    is_exit: bool = False,
    count: Callable[[dict[str, Any], str], int] | None = None,
    clock: Callable[[], float] = time.monotonic,
    pause: Callable[[float], None] = time.sleep,
) -> tuple[int, dict[str, Any]]:
    """Drain `target` and wait. Returns the number of requests that were ended, and the gateway's state.

    With `keep` False the drain ends when the gateway restarts. `is_exit`: it restarts then, so requests that its
    successor continues are not ended. `count`: the requests to wait for; by default all of `target`. Raises `Conflict`
    if the drain was lifted meanwhile.
    """
    request = {"op": "drain", "target": target, "timeout_s": timeout_s, "keep": keep}
    if is_exit:
        request["exit"] = True
    state = control.call(run_dir, "gateway", request)
    deadline, count = clock() + timeout_s + FINAL_ERRORS_S, count or in_flight
    while count(state, target) and clock() < deadline:
        pause(POLL_S)
        state = control.call(run_dir, "gateway", {"op": "state"})
    drain = state["draining"].get(target)
    if drain is None:
        raise Conflict(f"{target} was resumed or unloaded by another command before it was drained")
    return drain["ended"], state


def in_flight(state: dict[str, Any], target: str) -> int:
    """Requests in flight of a model, or of all; 0 for a model that has been unloaded. Those without a client count.

    Of all they are an estimate, but 0 only if there are none: a request may count as one of HTTP and as one of a model.
    """
    models: dict[str, int] = state["models"]
    return max(int(state["in_flight"]), sum(models.values())) if target == ALL else models.get(target, 0)
