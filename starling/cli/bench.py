"""`starling bench`: measure any OpenAI-compatible server under load."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import sys
import time
from collections.abc import Iterator
from http import HTTPStatus
from pathlib import Path
from typing import Any, NamedTuple

import click
import msgspec

from pipeline.config.load import load
from pipeline.errors import InvalidRequest, ModelNotFound, ModelUnavailable, StarlingError
from pipeline.runtime.process import EXIT_FATAL, EXIT_OK, EXIT_USAGE
from starling.bench import plots
from starling.bench.connection import TIMEOUT_S, Sender, Target
from starling.bench.distribution import Lengths
from starling.bench.figures import COLUMNS, Figures, Record, lines, measure
from starling.bench.load import Run, closed_loop, open_loop
from starling.bench.plan import Plan, TraceLine, read_trace
from starling.bench.response import ClientRequest, Response
from starling.cli import terminal
from starling.cli.generation_options import Choice, choose_key, choose_model, server_for
from starling.cli.options import Number, Seconds, cacert_option, exit_codes
from starling.cli.result_file import claimed, make_directory, write, writing
from starling.cli.run_command import EXIT_INTERRUPTED
from starling.client import address as addresses
from starling.client.address import ServerAddress
from starling.client.answer import get_json

PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
MAX_CLIENTS = 10_000
MAX_REQUESTS = 1_000_000
MAX_RATE = 100_000.0
REQUESTS = 100  # without --requests and --duration
SHOW_S = 1.0  # between two lines of progress
INDENT = 8  # of what continues a line of the report


class LengthsType(click.ParamType):
    """A distribution of lengths."""

    name = "lengths"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Lengths:
        """The distribution."""
        if isinstance(value, Lengths):
            return value
        try:
            return Lengths.parse(value)
        except InvalidRequest as error:
            self.fail(error.message, param, ctx)


class Loop(NamedTuple):
    """How requests are sent. `rate` is 0 for a closed loop, and for a trace."""

    clients: int
    rate: float
    trace: list[TraceLine]
    requests: int
    duration_s: float  # 0: until all requests are sent
    max_in_flight: int

    @property
    def is_open(self) -> bool:
        """Whether requests have times of their own."""
        return bool(self.rate or self.trace)

    def __str__(self) -> str:
        if self.trace:
            return f"trace of {len(self.trace):,} requests"
        if self.rate:
            return f"open loop, {self.rate:g} requests/s"
        return f"closed loop, {self.clients} client" + "s" * (self.clients > 1)


class Report(msgspec.Struct):
    """What --json writes."""

    url: str
    model: str
    endpoint: str
    load: str
    seed: int
    began: float  # s since 1970
    interrupted: bool
    figures: Figures
    requests: list[Record]


@click.command(
    epilog=exit_codes(
        {
            0: "measured; some requests may have failed, as the report says",
            1: "no server answers, or no request is complete",
            2: "wrong usage, or no such model",
            78: "the configuration must be changed first",
        }
    )
)
@click.argument("url", required=False)
@cacert_option
@click.option("--model", metavar="NAME", help="The model; default: the server's first.")
@click.option("--endpoint", type=click.Choice(list(PATHS)), default="chat", show_default=True, help="What is asked.")
@click.option(
    "--clients",
    type=click.IntRange(1, MAX_CLIENTS),
    metavar="N",
    help="Closed loop: clients that send a request after the other; default: 8.",
)
@click.option(
    "--rate",
    type=Number(0, MAX_RATE, min_open=True),
    metavar="R",
    help="Open loop: R requests a second at random times (Poisson).",
)
@click.option(
    "--trace",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    metavar="FILE",
    help="Replay JSON lines: at_s, prompt or prompt_tokens, max_tokens.",
)
@click.option(
    "--requests", type=click.IntRange(1, MAX_REQUESTS), metavar="N", help=f"Requests in all; default: {REQUESTS}."
)
@click.option("--duration", type=Seconds(0.001), metavar="SECONDS", help="Send no request after this time.")
@click.option(
    "--prompt-tokens",
    type=LengthsType(),
    default="128",
    show_default=True,
    metavar="LENGTHS",
    help="Words of a prompt, nearly all of them one token.",
)
@click.option(
    "--max-tokens",
    type=LengthsType(),
    default="64",
    show_default=True,
    metavar="LENGTHS",
    help="Most tokens of an answer.",
)
@click.option(
    "--shared-prefix",
    type=click.IntRange(0, 1_000_000),
    default=0,
    metavar="N",
    help="Words that prompts have in common, before their own.",
)
@click.option(
    "--prefixes",
    type=click.IntRange(1, 10_000),
    default=1,
    show_default=True,
    metavar="N",
    help="Different shared prefixes.",
)
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Of prompts, lengths and arrivals.")
@click.option("--temperature", type=Number(0, 2), default=0.0, show_default=True, help="Of the sampling.")
@click.option(
    "--field",
    "fields",
    multiple=True,
    metavar="NAME=JSON",
    help="A field of every request, for example ignore_eos=true. Repeatable.",
)
@click.option(
    "--warmup", type=click.IntRange(0, 1000), default=1, show_default=True, help="Requests before the measured ones."
)
@click.option(
    "--timeout",
    "timeout_s",
    type=Seconds(0.001),
    default=TIMEOUT_S,
    show_default=True,
    metavar="SECONDS",
    help="For a whole answer; then the request has failed.",
)
@click.option(
    "--max-in-flight",
    type=click.IntRange(1, MAX_CLIENTS),
    default=1000,
    show_default=True,
    help="Requests at a time in an open loop.",
)
@click.option("--key", envvar="STARLING_API_KEY", metavar="KEY", help="API key; default: $STARLING_API_KEY.")
@click.option(
    "--json",
    "json_file",
    type=click.Path(path_type=Path, dir_okay=False, writable=True),
    metavar="FILE",
    help="Write all figures and a record of each request.",
)
@click.option(
    "--plots",
    "plots_dir",
    type=click.Path(path_type=Path, file_okay=False, writable=True),
    metavar="DIR",
    help="Write PNG files: latencies, pauses, time line.",
)
def bench(url: str | None, model: str | None, seed: int, key: str | None, **options: Any) -> int:
    """Measure an OpenAI-compatible server under load.

    URL is http://HOST:PORT, https://HOST:PORT or unix:/PATH. Without it the server of this home is measured; if none
    runs, one is started for the command.

    Latencies of an open loop and of a trace count from the moment at which a request is due, not from when it could
    be sent. LENGTHS is N, uniform:LOW:HIGH, normal:MEAN:DEVIATION, lognormal:MEDIAN:SIGMA or exponential:MEAN. Ctrl-C
    ends the run and prints the figures so far.
    """
    if options["plots_dir"] and not plots.can_plot():
        raise click.UsageError(plots.missing_packages())
    fields = {"temperature": options["temperature"], **read_fields(options["fields"])}
    drawings: list[Path] = []
    if options["plots_dir"]:
        make_directory("--plots", options["plots_dir"])
        drawings = [options["plots_dir"] / name for name in plots.FILES]
    with claimed("--json", *filter(None, [options["json_file"]])), claimed("--plots", *drawings):
        return _measure(url, model, seed, key, fields, options)


def _measure(
    url: str | None, model: str | None, seed: int, key: str | None, fields: dict[str, Any], options: dict[str, Any]
) -> int:
    """The measurement, its report and the exit code."""
    config = load()
    try:
        loop = read_loop(options)
        choice = Choice(model or "", {}) if url else choose_model(config, model or config.models[0].name)
        api_key = choose_key(config, key, url)
        if url:
            addresses.parse(url, "URL", options["cacert"])
        with server_for(config, choice, url, options["cacert"]) as address:
            plan = Plan(
                choice.name or first_model(address, api_key),
                address.target(PATHS[options["endpoint"]]),
                options["endpoint"] == "chat",
                options["prompt_tokens"],
                options["max_tokens"],
                options["shared_prefix"],
                options["prefixes"],
                seed,
                api_key,
                fields,
            )
            began = time.time()
            run, is_interrupted = execute(address, plan, loop, options["warmup"], options["timeout_s"])
    except InvalidRequest as error:
        terminal.complain(error.message)
        return EXIT_USAGE
    found = measure(run)
    report = Report(
        str(address),
        plan.model,
        options["endpoint"],
        str(loop),
        seed,
        round(began, 3),
        is_interrupted,
        found,
        [Record.of(response, run.began) for response in run.responses],
    )
    try:
        show(report, loop)
    finally:  # also for a reader of the report that has left: the measurement took its time
        write_files(report, run, options)
    if is_interrupted:
        terminal.complain("interrupted")
        return EXIT_INTERRUPTED
    return EXIT_OK if found.complete else EXIT_FATAL


def write_files(report: Report, run: Run, options: dict[str, Any]) -> None:
    """Write the files that were asked for. Raises `StarlingError`."""
    if options["json_file"]:
        write(options["json_file"], msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")
    if options["plots_dir"]:
        with writing(options["plots_dir"]):
            paths = plots.write_plots(run, options["plots_dir"])
        for path in paths:
            click.echo(f"wrote {path}")


# ------------------------------------------------------------------ options


def read_fields(texts: tuple[str, ...]) -> dict[str, Any]:
    """The values of --field. Raises `click.UsageError`."""
    found = {}
    for text in texts:
        name, equals, value = text.partition("=")
        try:
            found[name] = msgspec.json.decode(value)
        except msgspec.DecodeError:
            name = ""
        if not name or not equals:
            raise click.UsageError(f"--field {text!r}: expected NAME=JSON, for example ignore_eos=true")
    return found


def read_loop(options: dict[str, Any]) -> Loop:
    """How requests are sent. Raises `click.UsageError`, and `InvalidRequest` for a trace."""
    given = [name for name in ("clients", "rate", "trace") if options[name] is not None]
    if len(given) > 1:
        raise click.UsageError(f"--{given[0]} and --{given[1]} exclude each other")
    duration_s = options["duration"] or 0.0
    requests = options["requests"] or (MAX_REQUESTS if duration_s or options["trace"] else REQUESTS)
    trace = read_trace(options["trace"]) if options["trace"] else []
    return Loop(options["clients"] or 8, options["rate"] or 0.0, trace, requests, duration_s, options["max_in_flight"])


def first_model(address: ServerAddress, key: str) -> str:
    """The first model that the server lists. Raises `ModelUnavailable`."""
    listed = get_json(address, "/v1/models", key)
    try:
        return str(listed["data"][0]["id"])
    except (KeyError, IndexError, TypeError):
        raise ModelUnavailable(f"{address} lists no model; name one with --model") from None


# ------------------------------------------------------------------ the run


def execute(address: ServerAddress, plan: Plan, loop: Loop, warmup: int, timeout_s: float) -> tuple[Run, bool]:
    """Run the load. Returns what came, and whether Ctrl-C ended it. Raises `ModelUnavailable`."""
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_execute(Target.of(address), plan, loop, warmup, timeout_s))


async def _execute(target: Target, plan: Plan, loop: Loop, warmup: int, timeout_s: float) -> tuple[Run, bool]:
    async with Sender(target, timeout_s) as warm:
        for request in itertools.islice(plan.requests("warmup"), warmup):
            response = await warm.send(request)
            response.parse()
            if response.failure:
                raise _refused(response)
    async with Sender(target, timeout_s) as sender:
        if not loop.is_open:
            try:
                await sender.open(min(loop.clients, loop.requests))
            except OSError as error:
                raise ModelUnavailable(f"no server answers at {target.authority}: {error.strerror or error}") from None
        progress = asyncio.create_task(_show_progress(sender)) if sys.stderr.isatty() else None
        began = time.perf_counter()
        is_interrupted = False
        try:
            await _send_all(sender, plan, loop, began)
        except asyncio.CancelledError:  # Ctrl-C
            is_interrupted = True
        finally:
            if progress is not None:
                progress.cancel()
        ended = time.perf_counter()
    return Run(sender.parse(), began, ended), is_interrupted


def _refused(response: Response) -> StarlingError:
    """The error of a first request that failed: the server's message, if its answer has one."""
    reason = response.error
    with contextlib.suppress(ValueError, KeyError, TypeError):
        reason = str(json.loads(reason)["error"]["message"])
    kind = ModelNotFound if response.status == HTTPStatus.NOT_FOUND else ModelUnavailable
    name = f" ({response.id})" if response.id else ""
    return kind(f"the first request{name} failed: {reason}")


async def _send_all(sender: Sender, plan: Plan, loop: Loop, began: float) -> None:
    end_s = loop.duration_s or float("inf")
    if loop.is_open:
        arrivals = plan.replay(loop.trace) if loop.trace else plan.poisson(loop.rate)
        within = itertools.takewhile(lambda arrival: arrival.at_s < end_s, arrivals)
        await open_loop(sender, itertools.islice(within, loop.requests), began, loop.max_in_flight)
        return

    def requests() -> Iterator[ClientRequest]:
        for request in itertools.islice(plan.requests(), loop.requests):
            if time.perf_counter() - began >= end_s:
                return
            yield request

    shared = requests()
    await closed_loop(sender, [shared] * min(loop.clients, loop.requests))


async def _show_progress(sender: Sender) -> None:
    """A line on the terminal that is replaced every second."""
    while True:
        line = f"{sender.ended:,} requests have ended, {len(sender.responses) - sender.ended:,} are under way"
        room = terminal.error_width() - 2
        click.echo(f"\r{line[:room]:<{room}}\r", nl=False, err=True)
        await asyncio.sleep(SHOW_S)


def show(report: Report, loop: Loop) -> None:
    """Print the figures."""
    found = report.figures
    head = (
        f"{report.url}, {report.endpoint}, model {report.model}",
        f"{report.load}, seed {report.seed}",
        f"{found.complete:,} of {found.requests:,} requests complete in {found.seconds:,.2f} s",
        "",
    )
    for line in [*head, *lines(found, loop.is_open, terminal.width())]:
        terminal.print_wrapped(terminal.visible(line)[:COLUMNS], INDENT)
