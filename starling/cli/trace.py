"""`starling trace`: what happened to a request, and where its time went."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import click
import msgspec

from pipeline.config import paths
from pipeline.config.load import load
from pipeline.errors import StarlingError
from pipeline.ipc import control
from pipeline.runtime.process import EXIT_OK, EXIT_USAGE
from starling.cli.options import exit_codes, json_option
from starling.cli.terminal import complain, print_wrapped

FACTS_INDENT = 26  # of facts that do not fit on the line of their event
_KNOWN = ("at_ms", "stage", "pid", "event", "choice")


@click.command(
    epilog=exit_codes({0: "printed", 1: "no gateway answers", 2: "no timeline of that request is kept"}),
)
@click.argument("request_id")
@json_option("Print the timeline as JSON.")
def trace(request_id: str, as_json: bool) -> int:
    """Show the timeline of a request, also while it runs.

    REQUEST_ID is the value of X-Starling-Request, of X-Request-Id, or the id of the response object (chatcmpl-...).

    Each line has the time since the request was received, the stage and its process, and what happened. The last lines
    say how long the request was in each phase. Timelines of requests that have ended are kept in memory
    (tracing.buffer_mb); after a restart of the gateway those of requests in flight begin again.
    """
    try:
        answer = control.call(paths.run_dir(load()), "gateway", {"op": "trace", "request": request_id})
    except StarlingError as error:
        if error.code != "NOT_FOUND":
            raise
        complain(error.message)
        return EXIT_USAGE
    found = answer["trace"]
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(found)).decode())
    else:
        for line in lines(found):
            print_wrapped(line, FACTS_INDENT)
    return EXIT_OK


def lines(found: dict[str, Any]) -> Iterator[str]:
    """The timeline as text."""
    received = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(found["received"]))
    yield f"{found['id']}  {found['outcome']} after {found['duration_ms']:.1f} ms"
    yield f"model {found['model']}, tenant {found['tenant']}, received {received}"
    yield (
        f"{found['prompt_tokens']} prompt tokens ({found['cached_tokens']} cached), "
        f"{found['completion_tokens']} output tokens"
    )
    yield ""
    for event in found["events"]:
        facts = [f"{name}={_rounded(value)}" for name, value in event.items() if name not in _KNOWN]
        if "choice" in event:
            facts.insert(0, f"choice={event['choice']}")
        pid = event["pid"] or "-"
        head = f"{event['at_ms']:>11.1f} ms  {event['stage']:<9} {pid:>7}  {event['event']}"
        yield f"{head:<50} {' '.join(facts)}".rstrip()
    if found["omitted_events"]:
        yield f"{found['omitted_events']} more events are not kept"
    yield ""
    for name, took_ms in found["phases_ms"].items():
        if took_ms:
            share = 100 * took_ms / found["duration_ms"] if found["duration_ms"] else 0.0
            yield f"{took_ms:>11.1f} ms  {name:<10} {share:>5.1f} %"


def _rounded(value: Any) -> Any:
    """A time in ms with its microseconds, and no more digits than are known."""
    return round(value, 3) if isinstance(value, float) else value
