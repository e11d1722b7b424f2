"""`starling kv clear`: drop cached prefixes that no sequence uses."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import msgspec

from pipeline.config import paths
from pipeline.config.load import load
from pipeline.errors import ModelNotFound
from pipeline.ipc import control
from pipeline.models import versions
from pipeline.runtime.process import EXIT_FATAL, EXIT_OK
from starling.cli import completion
from starling.cli.options import exit_codes, json_option, timeout_option
from starling.cli.terminal import complain, print_wrapped

TIMEOUT_S = 120.0
POLL_S = 0.05


@click.command(
    epilog=exit_codes(
        {
            0: "every unused page is dropped, or will be when it is known to be unused",
            1: "no kv stage answers, another clearing is under way, or it has not ended within --timeout",
            2: "no such model",
        }
    )
)
@click.option("--model", default="", metavar="MODEL", help="Only this model.", shell_complete=completion.model_names)
@click.option("--tenant", default="", metavar="TENANT", help="Only what may be this tenant's.")
@timeout_option(TIMEOUT_S, "How long it may take.")
@json_option()
def clear(model: str, tenant: str, timeout: float, as_json: bool) -> int:
    """Drop cached prefixes, in memory and on disk.

    Pages that running sequences hold stay, and no answer changes: what is dropped is computed again when it is needed.
    Spilled pages and those saved in the state directory are dropped as well; conversations of sessions stay.

    With --tenant, everything is dropped that is not certainly another tenant's: also prefixes whose tenant is not known
    any more. Prefixes that tenants share (share_cache, or no API keys) have no tenant, and stay.
    """
    config = load()
    run_dir = paths.run_dir(config)
    names = sorted({version.name for version in versions.read(config).versions})
    if model and model not in names:
        raise ModelNotFound(f"there is no model {model!r}; there are {', '.join(names)}")
    report = cleared(run_dir, {"op": "clear", "model": model, "tenant": tenant}, timeout)
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(report)).decode())
    else:
        for one in report["models"]:
            megabytes = (one["arena"] + one["disk"]) * one["page_bytes"] / (1 << 20)
            print_wrapped(
                f"{one['model']}: dropped {one['arena']} pages in memory and {one['disk']} on disk "
                f"({megabytes:.1f} MB); {one['in_use']} in use stay",
                2,
            )
            if one.get("later"):  # a stage of an older release has none
                print_wrapped(
                    f"{one['model']}: {one['later']} more in memory, of before a restart, are dropped when the "
                    "scheduler has a ready worker and has named those in use",
                    2,
                )
        if not report["done"]:
            complain(f"not complete within {timeout:g} s; it goes on")
    return EXIT_OK if report["done"] else EXIT_FATAL


def cleared(
    run_dir: Path,
    request: dict[str, Any],
    timeout_s: float,
    clock: Callable[[], float] = time.monotonic,
    pause: Callable[[float], None] = time.sleep,
) -> dict[str, Any]:
    """Start the clearing and wait for its end, at most `timeout_s`. Returns the last report."""
    deadline = clock() + timeout_s
    report = control.call(run_dir, "kv", request)
    while not report["done"] and clock() < deadline:
        pause(POLL_S)
        report = control.call(run_dir, "kv", {"op": "clear_progress"})
    return report
