"""`starling load`, `reload` and `unload`: add, replace and remove models while the server runs.

The gateway makes the change (stages/gateway/versions/loader.py); the command polls until it is complete. The command
draws the id of the change, so that it can also poll a gateway that has been restarted. `change` does the same for
callers in Python.
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
from click.core import ParameterSource

from pipeline.config import paths
from pipeline.config.load import load as load_config
from pipeline.config.schema import Config, ModelConfig
from pipeline.config.user_home import expand_user
from pipeline.errors import ConfigError, ModelUnavailable, ResourceError, StarlingError
from pipeline.ipc import control
from pipeline.models import worker_groups
from pipeline.observe.status import read_all
from pipeline.runtime.process import EXIT_CONFIG, EXIT_FATAL, EXIT_USAGE
from starling.cli import completion, terminal
from starling.cli.options import exit_codes, json_option, timeout_option

LOAD_TIMEOUT_S = 600.0
UNLOAD_TIMEOUT_S = 30.0
POLL_S = 0.05  # at most, between two questions, if the gateway does not wait for news of the change by itself
RESTART_S = 30.0  # how long the gateway may not answer while it is being restarted
SPARE_S = 15.0  # beyond the timeout, for the gateway to report the end

CODES = exit_codes(
    {
        0: "success",
        1: "failure (the version that served before goes on serving), or no gateway answers",
        2: "no such model",
        78: "not enough memory for the version, or its file is invalid",
    }
)

_JSON = json_option("Print the result as JSON; `error` holds the reason of a failure.")


@click.command(epilog=CODES)
@click.argument("model", shell_complete=completion.model_names)
@click.option(
    "--path", default="", type=click.Path(), metavar="FILE", help="A GGUF file; default: the model's present file."
)
@timeout_option(LOAD_TIMEOUT_S, "How long the new version may take to be ready; after that the old one stays.")
@click.option("--wait", is_flag=True, help="Return only after the old version has been unloaded.")
@_JSON
def reload(model: str, path: str, timeout: float, wait: bool, as_json: bool) -> int:
    """Replace MODEL by a new version without a failed request.

    The new version is loaded beside the old one and gets all new requests once it has passed a self-test. Streams in
    flight finish on the old version, which is then unloaded. Sessions continue if the tokenizer is the same; otherwise
    their next turn is refused (409). Without --path the model's file is read again, of a pulled model the one that was
    pulled last.

    MODEL:ADAPTER replaces one adapter; the model's file and other adapters stay as they are.
    """
    return run("reload", model, timeout, as_json, wait, path=absolute(path))


@click.command(epilog=CODES)
@click.argument("model", shell_complete=completion.model_names)
@click.option("--path", default="", type=click.Path(), metavar="FILE", help="A GGUF file; default: the configured one.")
@click.option(
    "--kv-cache-mb",
    type=click.IntRange(min=1),
    default=None,
    metavar="MB",
    help="Size of the KV arena in MiB; default: as configured.",
)
@timeout_option(LOAD_TIMEOUT_S, "How long the model may take to be ready.")
@_JSON
def load(model: str, path: str, kv_cache_mb: int | None, timeout: float, as_json: bool) -> int:
    """Load MODEL into the running server.

    A model that is not configured needs --path and gets the default settings. It stays loaded until `starling unload`
    or the end of the server. Models that are loaded at every start belong in the configuration.

    MODEL:ADAPTER adds an adapter to a loaded model: a GGUF file, or a directory of the PEFT library.
    """
    return run("load", model, timeout, as_json, path=absolute(path), kv_cache_mb=kv_cache_mb or 0)


@click.command(
    epilog=exit_codes(
        {
            0: "unloaded; every request had finished",
            1: "requests were ended with an error (503 DRAINING), or no gateway answers",
            2: "no such model",
        }
    )
)
@click.argument("model", shell_complete=completion.model_names)
@timeout_option(UNLOAD_TIMEOUT_S, "How long requests in flight may take to finish; after that they are ended.")
@_JSON
def unload(model: str, timeout: float, as_json: bool) -> int:
    """Unload MODEL from the running server.

    New requests are refused (503, then 404). Streams in flight finish. Then the model's processes end and its memory
    is freed.

    MODEL:ADAPTER removes an adapter: new requests for it get 404, those in flight finish. --timeout is then how long
    the model may take to be ready without it; default: 600.
    """
    is_default = click.get_current_context().get_parameter_source("timeout") is ParameterSource.DEFAULT
    return run("unload", model, LOAD_TIMEOUT_S if is_default and ":" in model else timeout, as_json)


def absolute(path: str) -> str:
    """The path as the server takes it; "" for ""."""
    return os.path.abspath(expand_user(path)) if path else ""


def run(op: str, model: str, timeout_s: float, as_json: bool, wait: bool = False, **fields: Any) -> int:
    """Make a change, report it on the terminal and return the exit code. `fields`: as for `change`."""
    config = load_config()
    run_dir = paths.run_dir(config)
    phase = ""

    def print_phase(state: dict[str, Any]) -> None:
        nonlocal phase
        now = state["change"].get("phase", "")
        if now and now != phase and not as_json:
            click.echo(f"{model}: {now}")
        phase = now

    begun = time.monotonic()
    try:
        state = change(run_dir, op, model, timeout_s, print_phase, **fields)
        if wait and state["change"]["previous"]:
            state = gone(run_dir, state, time.monotonic() + timeout_s)
    except StarlingError as error:
        if as_json:
            click.echo(_json({"ok": False, "op": op, "model": model, "error": error.body()["error"]}))
        terminal.complain(error.message)
        if error.code == "MODEL_NOT_FOUND":
            return EXIT_USAGE  # the user gave the name
        needs_change = isinstance(error, ConfigError | ResourceError) or error.code in _CONFIG_CODES
        return EXIT_CONFIG if needs_change else EXIT_FATAL
    done = state["change"]
    took_s = round(time.monotonic() - begun, 2)
    left = next((one["in_flight"] for one in state["instances"] if one["instance"] == done["previous"]), 0)
    if op != "unload" and (note := kept_groups(config, state)):
        terminal.complain(note)
    if as_json:
        fields = {name: done[name] for name in ("op", "model", "instance", "digest", "previous", "ended")}
        click.echo(_json({"ok": not done["ended"], **fields, "previous_in_flight": left, "took_s": took_s}))
    elif op == "unload" and not done["previous"]:
        late = (
            f"; {done['ended']} requests not finished within {timeout_s:g} s were ended with an error"
            if done["ended"]
            else ""
        )
        click.echo(f"unloaded {model}{late}")
    elif op == "unload":
        click.echo(f"unloaded {model}; its requests in flight finish on {done['previous']}")
    else:
        later = f"; {done['previous']} is unloaded after its {left} requests" if left else ""
        click.echo(f"{model} is served by {done['instance']} ({done['digest'][:16]}) after {took_s:.1f} s{later}")
    return EXIT_FATAL if done["ended"] else 0


def kept_groups(config: Config, state: dict[str, Any]) -> str:
    """What to say if the new version has not as many worker groups as the configuration says here; "" otherwise.

    All processes of a server read the key when they start.
    """
    done = state["change"]
    name, setting = done["model"], config.performance.worker_groups
    loaded = next((one.get("worker_groups") for one in state["instances"] if one["instance"] == done["instance"]), None)
    wanted = worker_groups.count(config, config.model(name) or ModelConfig(name=name), name)
    if loaded in (None, wanted):
        return ""
    groups = "1 worker group" if loaded == 1 else f"{loaded} worker groups"
    return (
        f"{done['instance']} has {groups}; performance.worker_groups = {setting} means {wanted}: the server keeps its "
        "number until it ends, so stop all of it (`starling down`) and start it again"
    )


_CONFIG_CODES = ("INSUFFICIENT_RESOURCES", "CONFIG", "MODEL_DAMAGED", "INVALID_REQUEST")


def _json(value: Any) -> str:
    return msgspec.json.format(msgspec.json.encode(value)).decode()


# ------------------------------------------------------------------ without the command line


def change(
    run_dir: Path,
    op: str,
    model: str,
    timeout_s: float = LOAD_TIMEOUT_S,
    on_state: Callable[[dict[str, Any]], object] = lambda state: None,
    clock: Callable[[], float] = time.monotonic,
    pause: Callable[[float], None] = time.sleep,
    **fields: Any,
) -> dict[str, Any]:
    """Load, reload or unload a model (`op`) and wait for the end. Returns the gateway's state with the `change`.

    `fields` may hold `path` (absolute) and `kv_cache_mb`. `on_state` is called with every state that the gateway
    sends. Raises the `StarlingError` that the change failed with, or `ModelUnavailable` if no gateway answers for
    `RESTART_S`.
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
    begun = answered = clock()
    deadline = begun + timeout_s + SPARE_S
    while True:
        asked = clock()
        try:
            state = control.call(run_dir, "gateway", request)
            answered = clock()
            on_state(state)
            if state["change"]["done"]:
                return state
        except control.Unreachable:
            # While any stage runs, a gateway that does not answer may be restarting.
            if clock() - answered > RESTART_S or not _is_alive(run_dir):
                raise
        if clock() >= deadline:
            raise ModelUnavailable(f"{op} of {model} has not finished after {timeout_s + SPARE_S:g} s and continues")
        # A fifth of the time since the change began, less what the gateway has waited for news.
        pause(max(0.0, min(POLL_S, (asked - begun) / 5) - (clock() - asked)))


def _is_alive(run_dir: Path) -> bool:
    """Does any stage of the server run? Then its supervisor restarts the gateway as well."""
    return any(record.alive for record in read_all(run_dir))


def gone(
    run_dir: Path,
    state: dict[str, Any],
    deadline: float,
    clock: Callable[[], float] = time.monotonic,
    pause: Callable[[float], None] = time.sleep,
) -> dict[str, Any]:
    """Wait until the replaced version is unloaded. Returns the gateway's state with the `change`.

    Raises `ModelUnavailable` after `deadline` (of `clock`, s).
    """
    done = state["change"]
    while any(one["instance"] == done["previous"] for one in state["instances"]):
        if clock() >= deadline:
            raise ModelUnavailable(
                f"{done['previous']} still has requests in flight and is unloaded when they have ended"
            )
        pause(POLL_S)
        try:
            state = {**control.call(run_dir, "gateway", {"op": "state"}), "change": done}
        except control.Unreachable:
            continue
    return state
