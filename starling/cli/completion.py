"""`starling completion SHELL`: the script by which a shell completes commands, options and names.

The functions complete arguments: each takes what click passes and returns the items that begin with `incomplete`. What
cannot be asked has no names: a Tab never shows an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import click

from pipeline.errors import StarlingError
from starling.cli.options import exit_codes

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

VARIABLE = "_STARLING_COMPLETE"  # click's name for the program's completion
FLEET_TIMEOUT_S = 2.0  # for an orchestrator, while a Tab waits


@click.command(epilog=exit_codes({0: "success", 2: "no such shell"}))
@click.argument("shell", type=click.Choice(("bash", "zsh", "fish")), metavar="SHELL")
def completion(shell: str) -> None:
    """Print the completion script for SHELL.

    \b
    bash   eval "$(starling completion bash)"        in ~/.bashrc
    zsh    eval "$(starling completion zsh)"         in ~/.zshrc
    fish   starling completion fish | source         in ~/.config/fish/config.fish
    """
    from click.shell_completion import get_completion_class

    program = click.get_current_context().find_root().command
    kind = get_completion_class(shell)
    assert kind is not None
    click.echo(kind(program, {}, "starling", VARIABLE).source())


Completer = Callable[[click.Context, click.Parameter, str], "list[CompletionItem]"]


def _completer(find: Callable[[click.Context], Iterable[str]]) -> Completer:
    """A completer of the names that `find` returns."""

    def complete(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
        from click.shell_completion import CompletionItem

        try:
            names = find(context)
        except (StarlingError, OSError, LookupError, TypeError):  # also of an answer of another server
            return []
        return [CompletionItem(name) for name in names if name.startswith(incomplete)]

    return complete


def _models(context: click.Context) -> Iterable[str]:
    from pipeline.config.load import load
    from starling import model_list

    return [model.name for model in model_list.known(load())]


def models_or_files(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Names of models; if none begins so, files."""
    from click.shell_completion import CompletionItem

    return model_names(context, parameter, incomplete) or [CompletionItem(incomplete, type="file")]


def _stages(context: click.Context) -> list[str]:
    """The stages of the running server; of a stopped one those that it would have."""
    from pipeline.config import paths
    from pipeline.config.load import load
    from pipeline.observe.status import read_all
    from starling.cli.stage import STAGES

    running = [record.stage for record in read_all(paths.run_dir(load())) if record.alive]
    return list(dict.fromkeys([*STAGES, *running]))


def _levels(context: click.Context) -> Iterable[str]:
    from pipeline.observe.log_levels import LEVELS

    return (*LEVELS, "reset")


def _keys(context: click.Context) -> Iterable[str]:
    from pipeline.api import key_file
    from pipeline.config import paths
    from pipeline.config.load import load

    return [key.name for key in key_file.read_keys(paths.state_dir(load()))]


def _of_fleet(part: str, name: str) -> Callable[[click.Context], Iterable[str]]:
    """The names in a part of what the orchestrator answers to /v1/fleet, of --url if that is this machine."""

    def find(context: click.Context) -> Iterable[str]:
        from pipeline.config.load import load
        from starling.client.fleet import FleetClient

        given: dict[str, Any] = context.params
        url = given.get("url") or ""
        if url and not _is_local(url):  # a Tab sends the fleet's token to no host that is only half typed
            return []
        client = FleetClient(load(), url, timeout_s=FLEET_TIMEOUT_S)
        return [str(one[name]) for one in client.get("/v1/fleet")[part]]

    return find


def _is_local(url: str) -> bool:
    from urllib.parse import urlsplit

    try:
        return urlsplit(url).hostname in ("127.0.0.1", "::1", "localhost")
    except ValueError:
        return False


def _launched(context: click.Context) -> Iterable[str]:
    from pipeline.config.load import load
    from starling.launchers.select import open_launcher

    return [one.agent_id for one in open_launcher(load(), context.params.get("launcher")).list()]


def _published(context: click.Context) -> Iterable[str]:
    import asyncio

    from pipeline.blobs.address import open_store
    from pipeline.catalog import adapters, contents
    from pipeline.config.load import load

    async def read() -> list[str]:
        async with open_store(load()) as blobs, asyncio.timeout(FLEET_TIMEOUT_S):
            models = [entry.name for entry in await contents.entries(blobs)]
            return models + [entry.name for entry in await adapters.entries(blobs)]

    return asyncio.run(read())


model_names = _completer(_models)
published_models = _completer(_published)
drain_targets = _completer(lambda context: ["all", *_models(context), *_stages(context)])
restart_targets = _completer(lambda context: ["all", *_stages(context)])
log_level_stages = _completer(lambda context: ["all", *_stages(context), *_levels(context)])
log_levels = _completer(_levels)
key_names = _completer(_keys)
fleet_agents = _completer(_of_fleet("agents", "agent_id"))
fleet_models = _completer(_of_fleet("models", "id"))
launched_agents = _completer(_launched)
