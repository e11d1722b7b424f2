"""`starling log-level`: show or change what the stages of a running server log."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import click
import msgspec

from pipeline.config import paths
from pipeline.config.file import level_named
from pipeline.config.load import load
from pipeline.errors import ModelNotFound
from pipeline.observe import log_levels
from pipeline.observe.status import StageStatus, read_all
from pipeline.runtime.process import EXIT_FATAL, EXIT_OK
from starling.cli import completion, terminal
from starling.cli.options import exit_codes, json_option, timeout_option

TIMEOUT_S = 60.0
POLL_S = 0.05
RESET = "reset"


@click.command(
    "log-level",
    epilog=exit_codes(
        {
            0: "every stage that runs logs as it should",
            1: "no stage runs, or one has not followed within --timeout",
            2: "no such stage or level",
        }
    ),
)
@click.argument("stage", default="", metavar="[STAGE]", shell_complete=completion.log_level_stages)
@click.argument("level", default="", metavar="[LEVEL]", shell_complete=completion.log_levels)
@timeout_option(TIMEOUT_S, "How long stages may take to follow.")
@json_option("Print the levels as JSON.")
def log_level(stage: str, level: str, timeout: float, as_json: bool) -> int:
    """Show or change the log level of a running server.

    STAGE is tokenizer, scheduler, kv, gateway, worker (of all models) or worker-MODEL; by default all stages. LEVEL is
    debug, info, warning or error; "reset" returns to the configured one. Without LEVEL the levels are printed.

    A level lasts until the server stops, also across restarts of the stage.
    """
    config = load()
    run_dir = paths.run_dir(config)
    running = [record for record in read_all(run_dir) if record.alive]
    if not running:
        terminal.complain("no stage is running")
        return EXIT_FATAL
    stage, level = _parse(stage, level, [record.stage for record in running])
    late: list[str] = []
    if level:
        levels = log_levels.change(run_dir, stage, "" if level == RESET else level)
        running, late = followed(run_dir, levels, config.logging.level, timeout)
    shown = {record.stage: record.log_level for record in running if not stage or _is_of(record.stage, stage)}
    if as_json:
        click.echo(msgspec.json.encode(shown))
    else:
        longest = max(map(len, shown), default=0)
        click.echo("\n".join(f"{name:<{longest}}  {now}" for name, now in shown.items()))
    if late:
        terminal.complain(f"not followed within {timeout:g} s: {', '.join(late)}")
    return EXIT_FATAL if late else EXIT_OK


def _parse(stage: str, level: str, stages: list[str]) -> tuple[str, str]:
    """(stage or "", level or ""): a level may stand alone. Raises `UsageError` or `ModelNotFound`."""
    levels = (*log_levels.LEVELS, RESET)
    level = _level_of(level)
    if not level and _level_of(stage) in levels:
        stage, level = "", _level_of(stage)
    if level and level not in levels:
        raise click.UsageError(f"{level!r} is not a level; they are {', '.join(levels)}")
    stage = "" if stage == "all" else stage
    if stage and not any(_is_of(name, stage) for name in stages):
        raise ModelNotFound(f"no stage {stage!r} is running; there are {', '.join(stages)}")
    return stage, level


def _level_of(word: str) -> str:
    return RESET if word.lower() == RESET else level_named(word)


def _is_of(name: str, stage: str) -> bool:
    return name == stage or (stage == "worker" and name.startswith("worker-"))


def followed(
    run_dir: Path,
    levels: dict[str, str],
    configured: str,
    timeout_s: float,
    clock: Callable[[], float] = time.monotonic,
    pause: Callable[[float], None] = time.sleep,
) -> tuple[list[StageStatus], list[str]]:
    """Wait until every stage that runs has its level. Returns their records and the names of those that have not."""
    deadline = clock() + timeout_s
    while True:
        running = [record for record in read_all(run_dir) if record.alive]
        late = [one.stage for one in running if one.log_level != log_levels.level_of(levels, one.stage, configured)]
        if not late or clock() >= deadline:
            return running, late
        pause(POLL_S)
