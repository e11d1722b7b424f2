"""`starling fetch` and `starling prepare`: fetch, ingest and compile before a start, and print the progress.

On a terminal each phase is a progress bar, elsewhere lines of text. Phases that are complete already print nothing and
cost no time.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import click

from pipeline.config import paths
from pipeline.config.load import load
from pipeline.config.schema import Config, ModelConfig
from pipeline.errors import ConfigError, ModelNotFound
from pipeline.models import store
from shm.checkpoint import load_index
from starling.cli.options import exit_codes

REPORT_S = 5.0  # between two lines about one phase
BYTES = 1_000_000  # a total above this is a number of bytes, one below it a count


CODES = exit_codes(
    {
        0: "success",
        1: "failure that a retry may cure, for example of the network",
        2: "no such model is configured",
        78: "a file or the configuration is invalid, or there is not enough disk space or memory",
    }
)


@click.command(epilog=CODES)
@click.argument("name", required=False)
def fetch(name: str | None) -> None:
    """Fetch the model files and verify them.

    NAME is a configured model; the default is all of them.
    """
    resolved = load()
    for model in chosen_models(resolved, name):
        with shown(model.name) as progress:
            found = store.fetch(model, paths.models_dir(), progress)
        click.echo(f"{model.name}: {found.path}")


@click.command(epilog=CODES)
@click.argument("name", required=False)
def prepare(name: str | None) -> None:
    """Fetch, ingest and compile the models before a start.

    NAME is a configured model; the default is all of them. `starling up` does the same.
    """
    prepare_all(load(), name)


def prepare_all(config: Config, name: str | None = None) -> None:
    """Fetch, ingest and compile every model, or the one called `name`."""
    from stages.worker.checkpoint import prepare as worker

    for model in chosen_models(config, name):
        with shown(model.name) as progress:
            worker.prepare(model, paths.models_dir(), progress)
    check_drafts(config)


def check_drafts(config: Config) -> None:
    """Check that each model and its draft model have the same vocabulary, if both have been ingested.

    Raises `ConfigError`.
    """
    for number, model in enumerate(config.models):
        draft = config.model(model.draft_model) if model.draft_model else None
        if draft is None:
            continue
        indexes = [store.find_index(one, paths.models_dir()) for one in (model, draft)]
        known = [load_index(path) for path in indexes if path is not None]
        if len(known) == 2 and known[0].vocabulary_digest != known[1].vocabulary_digest:
            sizes = [one.hyper.vocab_size for one in known]
            raise ConfigError(
                f"models.{number}.draft_model = {draft.name!r}: its vocabulary ({sizes[1]:,} ids) is not that of "
                f"{model.name} ({sizes[0]:,} ids), and drafts are token ids; name a smaller model of the same family, "
                f"or remove the key",
                param=f"models.{number}.draft_model",
            )


def chosen_models(config: Config, name: str | None) -> tuple[ModelConfig, ...]:
    """All configured models, or the one called `name`. Raises `ModelNotFound`."""
    if not name:
        return config.models
    model = config.model(name)
    if model is None:
        known = ", ".join(model.name for model in config.models)
        raise ModelNotFound(f"no model {name!r} is configured; the configured models are {known}", param="name")
    return (model,)


@contextmanager
def shown(subject: str) -> Iterator[store.Progress]:
    """Yields a progress function: bars on a terminal, lines of text elsewhere."""
    if sys.stdout.isatty():
        with _bars(subject) as progress:
            yield progress
    else:
        lines = _Lines(subject)
        yield lines
        lines.finish()


class _Lines:
    """Prints a line when a phase begins, every `REPORT_S`, and when it ends."""

    def __init__(self, subject: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.subject = subject
        self.clock = clock
        self.phase = ""
        self.total = 0
        self.begun = self.reported = 0.0

    def __call__(self, phase: str, done: int, total: int) -> None:
        now = self.clock()
        if phase != self.phase:
            self.finish()
            self.phase, self.begun, self.reported = phase, now, now
            click.echo(f"{self.subject}: {phase} ...")
        elif now - self.reported >= REPORT_S and done < total:
            self.reported = now
            click.echo(f"{self.subject}: {phase} {_amount(done, total)}")
        self.total = total

    def finish(self) -> None:
        if self.phase:
            size = f"{self.total / 1e6:.0f} MB, " if self.total > BYTES else ""
            click.echo(f"{self.subject}: {self.phase} done ({size}{self.clock() - self.begun:.1f} s)")
        self.phase = ""


def _amount(done: int, total: int) -> str:
    return f"{done / 1e6:.0f}/{total / 1e6:.0f} MB" if total > BYTES else f"{done}/{total}" if total else ""


@contextmanager
def _bars(subject: str) -> Iterator[store.Progress]:
    from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=30),
        TextColumn("{task.fields[amount]:>16}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns) as bars:
        tasks: dict[str, TaskID] = {}

        def show(phase: str, done: int, total: int) -> None:
            amount = _amount(done, total)
            if phase not in tasks:
                for task in tasks.values():
                    bars.stop_task(task)
                tasks[phase] = bars.add_task(f"{subject}: {phase}", total=total or None, amount=amount)
            bars.update(tasks[phase], completed=done, total=total or None, amount=amount)

        yield show
