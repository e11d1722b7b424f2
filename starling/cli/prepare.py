"""`starling prepare`: fetch, ingest and compile before a start, and print the progress.

Phases that are complete already print nothing and cost no time.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
from collections.abc import Iterator

import click

from pipeline.catalog.pulled import published_name
from pipeline.config import paths
from pipeline.config.load import load
from pipeline.config.schema import Config, ModelConfig
from pipeline.errors import ConfigError, InternalError, ModelNotFound, ResourceError, StarlingError
from pipeline.files import replace_file
from pipeline.models import store
from pipeline.runtime import process
from shm.checkpoint import load_index
from starling import loaded_revisions, model_list
from starling.cli import completion, terminal
from starling.cli.options import exit_codes
from starling.cli.progress import shown

MAX_REASON = 300  # characters of a compiler's last line in a message

CODES = exit_codes(
    {
        0: "success",
        1: "failure that a retry may cure, for example of the network or of a compiler",
        2: "no such model is configured",
        78: "a file or the configuration is invalid, or there is not enough disk space or memory",
    }
)


@click.command(epilog=CODES)
@click.argument("name", required=False, shell_complete=completion.model_names)
@click.option("--kernels", multiple=True, hidden=True, help="Compile kernels of this type of KV cache, and no models.")
@click.option("--with-parent", is_flag=True, hidden=True, help="End when the process that started it ends.")
def prepare(name: str | None, kernels: tuple[str, ...], with_parent: bool) -> None:
    """Fetch, ingest and compile the models before a start.

    NAME is a configured or pulled model; the default is all configured ones. `starling up` does the same.
    """
    if with_parent:
        process.die_with_parent()
    if kernels:
        prepare_kernels(kernels)
    else:
        prepare_all(load(), name)


def prepare_kernels(kv_types: tuple[str, ...]) -> None:
    """Compile what no model is needed for, at the lowest priority: an agent does so before its first model."""
    os.nice(19)
    terminal.show_warnings()
    from stages.tokenizer.kernels.compiled import compiling
    from stages.worker.kernels.background_build import BackgroundBuild

    shown_last = (-1, -1)

    def report(phase: str, done: int, total: int) -> None:
        nonlocal shown_last
        if (done, total) != shown_last:
            shown_last = done, total
            click.echo(f"{phase} {done} of {total}")

    with compiling(), _compiler_failures():
        for kv_type in kv_types:
            with BackgroundBuild(kv_type, probe=True) as build:
                build.wait(report)


def prepare_all(config: Config, name: str | None = None) -> None:
    """Fetch, ingest and compile every model, or the one called `name`.

    Raises `LoadedError` after the others if models that lack their attention factor are loaded.
    """
    from stages.tokenizer.kernels.compiled import compiling
    from stages.worker.checkpoint import prepare as worker
    from stages.worker.checkpoint.attention_factor import LoadedError, apply_factor
    from starling.directory_conversion import conversion_of

    terminal.show_warnings()
    pull_published(config, name)
    allowed, folder = config.registry.sources, paths.models_dir()
    refused: list[str] = []
    with compiling(), _compiler_failures():
        for model in chosen_models(config, name):
            with shown(model.name) as progress:
                conversion = conversion_of(folder, model.pretokenizer, terminal.note)
                index_path = worker.prepare(model, folder, progress, "", allowed, conversion, probe=True)
                try:
                    apply_factor(model, index_path, lambda: loaded_revisions.read(config), progress)
                except LoadedError as error:
                    refused += error.models
                worker.prepare_adapters(model, load_index(index_path), folder)
    check_drafts(config)
    if refused:
        raise LoadedError(*refused)


@contextlib.contextmanager
def _compiler_failures() -> Iterator[None]:
    """A kernel that could not be compiled is one message, and the compiler's output a file."""
    from stages.worker.kernels.build import CompilerFailed

    try:
        yield
    except CompilerFailed as error:
        raise _refusal(error.entry, error.code, error.output) from None


def _refusal(entry: str, code: int | None, output: str) -> StarlingError:
    """The error of a compiler that has ended with `code`, or -signal, before the kernel `entry` was stored.

    code: None: it was not started, for the reason in `output`.
    """
    if code is None:
        remedy = "free memory, or end processes that are not needed, and run the command again"
        return InternalError(f"kernel {entry!r} could not be compiled: {output[:MAX_REASON]}; {remedy}")
    reason = output.rpartition("\n")[2].strip()[:MAX_REASON] or f"the compiler has ended with {code}"
    remedy, is_full = "run the command again", False
    if code < 0:
        reason = f"the compiler was ended by {signal.Signals(-code).name}"
    if code == -signal.SIGKILL:
        reason, remedy = f"{reason}, as happens when memory is short", "free memory and run the command again"
    elif any(os.strerror(number) in reason for number in (errno.ENOSPC, errno.EDQUOT)):
        remedy, is_full = f"free space for {paths.cache_dir()} and run the command again", True
    message = f"kernel {entry!r} could not be compiled: {reason}; {remedy}{_kept_output(output)}"
    return ResourceError(message) if is_full else InternalError(message)


def _kept_output(output: str) -> str:
    """Where the output of a compiler is, for a message: in a file, or printed on stderr if none can be written."""
    if not output:
        return ""
    path = paths.logs_dir() / "kernel-compiler.log"
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        replace_file(path, f"{output}\n".encode())
    except OSError:
        terminal.print_error(terminal.visible(output))
        return "; the compiler's output is above"
    return f"; the compiler's output is in {path}"


def pull_published(config: Config, name: str | None) -> None:
    """Bring the configured models with a path `catalog:NAME` that are not here."""
    models = chosen_models(config, name)
    if any(published_name(model.path) for model in models):
        # It imports asyncio and an HTTP client, which few servers need.
        from starling.cli.pull_published import pull_configured

        pull_configured(config, models, shown)


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
    """All configured models, or the configured or pulled one called `name`. Raises `ModelNotFound`."""
    if not name:
        return config.models
    known = model_list.known(config)
    model = next((model for model in known if model.name == name), None)
    if model is None:
        names = ", ".join(model.name for model in known)
        raise ModelNotFound(f"no model {name!r} is configured or pulled; there are {names}", param="name")
    return (model,)
