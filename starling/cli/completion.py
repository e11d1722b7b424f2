"""`starling completion SHELL`: the script by which a shell completes commands, options and names of models."""

from __future__ import annotations

import click
from click.shell_completion import CompletionItem, get_completion_class

from pipeline.errors import StarlingError
from starling.cli.options import exit_codes

VARIABLE = "_STARLING_COMPLETE"  # click's name for the program's completion


@click.command(epilog=exit_codes({0: "success", 2: "no such shell"}))
@click.argument("shell", type=click.Choice(("bash", "zsh", "fish")), metavar="SHELL")
def completion(shell: str) -> None:
    """Print the completion script for SHELL.

    \b
    bash   eval "$(starling completion bash)"        in ~/.bashrc
    zsh    eval "$(starling completion zsh)"         in ~/.zshrc
    fish   starling completion fish | source         in ~/.config/fish/config.fish
    """
    program = click.get_current_context().find_root().command
    kind = get_completion_class(shell)
    assert kind is not None
    click.echo(kind(program, {}, "starling", VARIABLE).source())


def model_names(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """The models that begin with `incomplete`."""
    from pipeline.config.load import load
    from starling import model_list

    try:
        names = [model.name for model in model_list.known(load())]
    except StarlingError:
        return []
    return [CompletionItem(name) for name in names if name.startswith(incomplete)]
