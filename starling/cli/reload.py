"""`starling load`, `reload` and `unload`: models come, are replaced and go while the server runs.

The gateway makes the change (stages/gateway/versions/loader.py); the command polls until it is complete. The command
draws the id of the change, so that it can poll a restarted gateway as well. `change` is the same as a function.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import msgspec

from pipeline.config import paths
from pipeline.config.load import load as load_config
from pipeline.errors import ConfigError, ModelUnavailable, ResourceError, StarlingError
from pipeline.ipc import control
from pipeline.observe.status import read_all
from pipeline.runtime.process import EXIT_CONFIG, EXIT_FATAL, EXIT_USAGE
from starling.cli.durations import Seconds

LOAD_TIMEOUT_S = 600.0
UNLOAD_TIMEOUT_S = 30.0
POLL_S = 0.05
AWAY_S = 30.0  # how long the gateway may not answer: it is being restarted
SPARE_S = 15.0  # beyond the time, for the gateway to say that it is over

CODES = (
    "Exit codes: 0 done; 1 it could not be done (a version that served goes on serving), or no gateway answers; "
    "2 there is no such model; 78 there is no memory for it, or its file is not what it must be. The reason is on "
    "stderr, with --json in `error` too."
)

_JSON = click.option("--json", "as_json", is_flag=True, help="How it ended, as JSON.")


def _timeout(default: float, help: str) -> Callable[[Any], Any]:
    return click.option(
        "--timeout",
        type=Seconds(),
        default=default,
        show_default=True,
        metavar="S",
        help=help,
    )


@click.command(epilog=CODES)
@click.argument("model")
@click.option("--path", default="", metavar="FILE", help="A GGUF file; default: the one that it has.")
@_timeout(LOAD_TIMEOUT_S, "For the new version to be ready; then the old one stays.")
@click.option("--wait", is_flag=True, help="Return only when the old version has been unloaded.")
@_JSON
def reload(model: str, path: str, timeout: float, wait: bool, as_json: bool) -> int:
    """Replace MODEL by another version of it, without a failed request.

    The new version is loaded beside the old one and gets new requests once it has answered a self-test.
    Streams in flight finish on the old one, then it is unloaded. Sessions go on where the tokenizer is the
    same; otherwise their next turn is refused (409). Without --path the model's file is read anew.
    """
    return _run("reload", model, timeout, as_json, wait, path=_absolute(path))


@click.command(epilog=CODES)
@click.argument("model")
@click.option("--path", default="", metavar="FILE", help="A GGUF file; default: as MODEL is configured.")
@click.option(
    "--kv-cache-mb",
    type=click.IntRange(min=1),
    default=None,
    metavar="MB",
    help="Of its KV arena; default: as configured.",
)
@_timeout(LOAD_TIMEOUT_S, "For it to be ready.")
@_JSON
def load(model: str, path: str, kv_cache_mb: int | None, timeout: float, as_json: bool) -> int:
    """Load MODEL into the running server.

    One that is not configured needs its file (--path) and gets the settings that models have by default. It
    stays loaded until `starling unload` or the end of the server; to have it at the next start too,
    configure it.
    """
    return _run("load", model, timeout, as_json, path=_absolute(path), kv_cache_mb=kv_cache_mb or 0)


@click.command(
    epilog="Exit codes: 0 unloaded, everything had finished; 1 some requests were ended (their clients got an error "
    "that says so), or no gateway answers; 2 there is no such model."
)
@click.argument("model")
@_timeout(UNLOAD_TIMEOUT_S, "For streams to finish; then they are ended.")
@_JSON
def unload(model: str, timeout: float, as_json: bool) -> int:
    """Take MODEL out of the running server.

    It takes no more requests (503, then 404), its streams finish, its processes and memory are given back.
    """
    return _run("unload", model, timeout, as_json)


def _absolute(path: str) -> str:
    return os.path.abspath(os.path.expanduser(path)) if path else ""


def _run(op: str, model: str, timeout_s: float, as_json: bool, wait: bool = False, **fields: Any) -> int:
    config = load_config()
    run_dir = paths.run_dir(config)
    phase = ""

    def say(state: dict[str, Any]) -> None:
        nonlocal phase
        now = state["change"].get("phase", "")
        if now and now != phase and not as_json:
            click.echo(f"{model}: {now}")
        phase = now

    begun = time.monotonic()
    try:
        state = change(run_dir, op, model, timeout_s, say, **fields)
        if wait and state["change"]["previous"]:
            state = gone(run_dir, state, time.monotonic() + timeout_s)
    except StarlingError as error:
        if as_json:
            click.echo(_json({"ok": False, "op": op, "model": model, "error": error.body()["error"]}))
        click.echo(f"starling: {error.message}", err=True)
        if error.code == "MODEL_NOT_FOUND":
            return EXIT_USAGE  # a name that was given
        is_ours = isinstance(error, ConfigError | ResourceError) or error.code in _TO_BE_CHANGED
        return EXIT_CONFIG if is_ours else EXIT_FATAL
    done = state["change"]
    took_s = round(time.monotonic() - begun, 2)
    left = next((one["in_flight"] for one in state["instances"] if one["instance"] == done["previous"]), 0)
    if as_json:
        fields = {name: done[name] for name in ("op", "model", "instance", "digest", "previous", "ended")}
        click.echo(_json({"ok": not done["ended"], **fields, "previous_in_flight": left, "took_s": took_s}))
    elif op == "unload":
        late = f"; {done['ended']} not finished within {timeout_s:g} s, ended with an error" if done["ended"] else ""
        click.echo(f"unloaded {model}{late}")
    else:
        goes = f"; {done['previous']} is unloaded when {left} requests have ended" if left else ""
        click.echo(f"{model} is served by {done['instance']} ({done['digest'][:16]}) after {took_s:.1f} s{goes}")
    return EXIT_FATAL if done["ended"] else 0


_TO_BE_CHANGED = ("INSUFFICIENT_RESOURCES", "CONFIG", "INVALID_REQUEST")


def _json(value: Any) -> str:
    return msgspec.json.format(msgspec.json.encode(value)).decode()


# ------------------------------------------------------------------ as functions


def change(
    run_dir: Path,
    op: str,
    model: str,
    timeout_s: float = LOAD_TIMEOUT_S,
    say: Callable[[dict[str, Any]], object] = lambda state: None,
    clock: Callable[[], float] = time.monotonic,
    pause: Callable[[float], None] = time.sleep,
    **fields: Any,
) -> dict[str, Any]:
    """`op` ("load", "reload", "unload") of a model, to its end; the gateway's state, with the `change`.

    `fields`: `path` (absolute), `kv_cache_mb`.  `say` hears every answer.  Raises the `StarlingError` that it
    ended with; `ModelUnavailable` when no gateway answers for `AWAY_S`.
    """
    fields = {name: value for name, value in fields.items() if value}
    request = {
        "op": op,
        "target": model,
        "timeout_s": timeout_s,
        "change": secrets.token_hex(8),
        "wait": False,
        **fields,
    }
    deadline = clock() + timeout_s + SPARE_S
    answered = clock()
    while True:
        try:
            state = control.call(run_dir, "gateway", request)
            answered = clock()
            say(state)
            if state["change"]["done"]:
                return state
        except control.Unreachable:
            # The first answer tells that there is a server at all; later it may be away for a moment.
            if clock() - answered > AWAY_S or not _is_alive(run_dir):
                raise
        if clock() >= deadline:
            raise ModelUnavailable(f"{op} of {model} is not over after {timeout_s + SPARE_S:g} s; it goes on")
        pause(POLL_S)


def _is_alive(run_dir: Path) -> bool:
    """Has some stage of the server a live process? Then its gateway will be back."""
    return any(record.alive for record in read_all(run_dir))


def gone(
    run_dir: Path,
    state: dict[str, Any],
    deadline: float,
    clock: Callable[[], float] = time.monotonic,
    pause: Callable[[float], None] = time.sleep,
) -> dict[str, Any]:
    """Wait until the version that was replaced is unloaded; the gateway's state, with the `change`."""
    done = state["change"]
    while any(one["instance"] == done["previous"] for one in state["instances"]):
        if clock() >= deadline:
            raise ModelUnavailable(f"{done['previous']} still has requests in flight; it goes when they have ended")
        pause(POLL_S)
        try:
            state = {**control.call(run_dir, "gateway", {"op": "state"}), "change": done}
        except control.Unreachable:
            continue
    return state
