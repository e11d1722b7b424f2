"""`starling stage` and `starling supervise`: run one stage, without or with a supervisor that restarts it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from types import ModuleType

import click

from pipeline.config import paths
from pipeline.config.load import load, resolve
from pipeline.config.schema import Config
from pipeline.errors import ConfigError
from pipeline.models import control_cores, versions
from pipeline.observe import logs, status
from pipeline.runtime import process
from pipeline.supervise import cleanup, listen_fd, worker_pool
from pipeline.supervise.restart_count import RESTARTS_VARIABLE, RestartCount, open_count
from pipeline.supervise.supervisor import guarded
from pipeline.supervise.supervisor import supervise as keep_alive
from pipeline.tls.skipped_trust import without_certificates
from starling.cli.options import exit_codes

STAGES = ("gateway", "tokenizer", "scheduler", "kv", "worker")

_COMMAND = (sys.executable, "-P", "-m", "starling", "stage")  # starts a stage as a new program
_STAGE = click.Choice(STAGES)

CODES = exit_codes(
    {
        0: "ended on request",
        1: "failure that a restart may cure",
        70: "the parent process has ended",
        78: "the configuration or the machine must be changed first",
    }
)


@click.command(epilog=CODES)
@click.argument("name", type=_STAGE, metavar="STAGE")
@click.option("--model", default="", metavar="NAME", help="For worker: the model; default: the first one.")
def stage(name: str, model: str) -> int:
    """Run STAGE in this process, unsupervised.

    STAGE is tokenizer, scheduler, kv, worker or gateway.
    """
    process.die_with_parent()  # before the imports, which take time in which the parent may die
    if (config := _config_of_unit()) is None:
        return process.EXIT_FATAL
    run = _program(name, model, config)
    logs.setup(name, config, in_background=True, is_held=name == "worker")
    if "NOTIFY_SOCKET" not in os.environ:
        return guarded(run)
    # Under systemd no supervisor of the project counts the restarts, and none removes the files of the last stage.
    count = open_count(config, name) if RESTARTS_VARIABLE not in os.environ else RestartCount()
    count.started()
    os.environ.setdefault(RESTARTS_VARIABLE, str(count.number))
    code = guarded(run)
    if code == process.EXIT_CONFIG and count.follows_death:
        # It has run, so the cause may be temporary; the unit does not restart a stage after 78.
        code = process.EXIT_FATAL
    if code in (process.EXIT_OK, process.EXIT_CONFIG):
        count.stopped()
    cleanup.sweep(paths.run_dir(config), paths.arena_dir(config))
    return code


@click.command(epilog=CODES)
@click.argument("name", type=_STAGE, metavar="STAGE")
@click.option("--model", default="", metavar="NAME", help="For worker: only this model; default: all models.")
def supervise(name: str, model: str) -> int:
    """Run STAGE and restart it when it dies.

    STAGE is tokenizer, scheduler, kv, worker or gateway. A stage that dies too often is given up, with an error.
    `worker` runs a group of workers for each loaded model and follows `starling load`, `reload` and `unload`.
    """
    config = _config_of_unit()
    return process.EXIT_FATAL if config is None else supervise_stage(name, model, config)


def _config_of_unit() -> Config | None:
    """The configuration. None: its file cannot be used while other stages run, so systemd must try again.

    It may be half saved; after code 78 a unit does not start its process again. Raises `ConfigError`.
    """
    try:
        return load()
    except ConfigError as error:
        if "NOTIFY_SOCKET" not in os.environ:
            raise
        run_dir = paths.run_dir(resolve({}, os.environ))  # the file may name another one, and is not known then
        if not any(record.alive for record in status.read_all(run_dir)):
            raise
        click.echo(f"Error: {error.message}", err=True)
        return None


def supervise_stage(name: str, model: str, config: Config) -> int:
    """What `starling supervise` does."""
    if name == "worker":
        if model and config.model(model) is None:
            raise _unknown(model, [known.name for known in config.models])
        code = worker_pool.run_worker_pool(
            config,
            lambda version: _program(name, version.group_id, config),
            lambda version: [*_COMMAND, name, "--model", version.group_id],
            lambda: _preload(name, config),
            model,
            lambda in_child, finish: import_stage(name).prepare_spare(config, in_child, finish),
        )
    else:
        run = _program(name, model, config)
        command = [*_COMMAND, name]
        held = listen_fd.bind_listener(config) if name == "gateway" else None
        held_unix = listen_fd.bind_unix_listener(config) if name == "gateway" else None
        if name == "gateway":
            listen_fd.keep_certificate(config)  # for as long as this process lives
        code = keep_alive(name, command, config, run, lambda: _preload(name, config))
        if held is not None:
            held.close()
        if held_unix is not None:
            held_unix.close()
    cleanup.sweep(paths.run_dir(config), paths.arena_dir(config))
    return code


def _program(name: str, model: str, config: Config) -> Callable[[], int]:
    """The function that the stage's process runs. It imports the stage when it is called."""
    if name != "worker":
        if model:
            raise click.UsageError(f"--model is only for worker; the stage {name} serves every model")
        return lambda: _run_control(name, config)
    table = versions.read(config)
    known = [version.id for version in table.versions]
    if not known or (model and table.find_group(model) is None):
        raise _unknown(model, known)
    return lambda: int(import_stage(name).main(config, model or known[0]) or 0)


def _run_control(name: str, config: Config) -> int:
    """Run a stage of the control plane on the cores that it has."""
    module = import_stage(name)
    control_cores.keep(config)
    return int(module.main(config) or 0)


def import_stage(name: str) -> ModuleType:
    """Import the module `stages.NAME.stage` and no other stage."""
    match name:
        case "tokenizer":
            from stages.tokenizer import stage as tokenizer

            return tokenizer
        case "scheduler":
            from stages.scheduler import stage as scheduler

            return scheduler
        case "kv":
            from stages.kv import stage as kv

            return kv
        case "worker":
            from stages.worker import stage as worker

            return worker
        case "gateway":
            with without_certificates():
                from stages.gateway import stage as gateway

            return gateway
    raise ValueError(f"no stage {name!r}")


def _unknown(model: str, known: list[str]) -> ConfigError:
    return ConfigError(
        f"--model {model}: no such model is configured; the configured models are {', '.join(known) or 'none'}"
    )


def _preload(name: str, config: Config) -> None:
    """Import the stage and call its `preload(config)`, which loads compiled kernels, if it has one."""
    module = import_stage(name)
    if hasattr(module, "preload"):
        module.preload(config)
