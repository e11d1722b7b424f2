"""The manual page starling(1), made of the commands' help pages.

    python -m tools.man_page >starling.1

Its date is SOURCE_DATE_EPOCH, by default today's, so that a package can be built again with the same bytes.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator

import click

from starling import __version__
from starling.cli import cli

COLUMNS = 78  # of a help page: with the indentation below, a terminal of 80 shows it unbroken
# Characters that roff reads as requests, or prints as others that cannot be copied into a shell.
_ESCAPED = str.maketrans({"\\": r"\e", "-": r"\-", "'": r"\(aq", "`": r"\(ga", "^": r"\(ha", "~": r"\(ti"})
_END = r"""
.SH ENVIRONMENT
.TP
.B STARLING_HOME
The directory of models, state and compiled kernels; by default \(ti/.starling.
.TP
.B STARLING_CONFIG
The configuration file, as with
.BR \-\-config .
.TP
.B STARLING_\fISECTION\fB__\fIKEY\fR
A key of the configuration, for example STARLING_SERVER__PORT.
.SH SEE ALSO
The documentation in /usr/share/doc/starling/docs.
"""


def help_pages(command: click.Command, context: click.Context) -> Iterator[tuple[str, str]]:
    """The name of a command with the names before it, and its help page; then those of its subcommands."""
    yield context.command_path, command.get_help(context)
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            subcommand = command.get_command(context, name)
            assert subcommand is not None
            below = click.Context(
                subcommand, context, info_name=name, terminal_width=COLUMNS, **subcommand.context_settings
            )
            yield from help_pages(subcommand, below)


def escaped(text: str) -> str:
    """The text as roff prints it unchanged."""
    lines = text.translate(_ESCAPED).splitlines()
    return "\n".join(f"\\&{line}" if line.startswith(".") else line for line in lines)


def man_page(date: str) -> str:
    """The page in the format of man(7); `date` is YYYY-MM-DD."""
    context = click.Context(cli, info_name="starling", terminal_width=COLUMNS, **cli.context_settings)
    [(_, first), *others] = help_pages(cli, context)
    lines = [
        f'.TH STARLING 1 "{date}" "starling {__version__}" "User Commands"',
        *(".SH NAME", escaped("starling - LLM inference server for CPUs with OpenAI's API")),
        *(".SH SYNOPSIS", ".B starling", "[OPTIONS] COMMAND [ARGS]..."),
        *(".SH DESCRIPTION", *_unfilled(first)),
        ".SH COMMANDS",
    ]
    for name, text in others:
        lines += [f'.SS "{escaped(name)}"', *_unfilled(text)]
    return "\n".join(lines) + _END


def _unfilled(text: str) -> tuple[str, ...]:
    """A block that keeps its line breaks, at the left edge."""
    return ".in 1n", ".nf", escaped(text), ".fi", ".in"


if __name__ == "__main__":
    epoch = float(os.environ.get("SOURCE_DATE_EPOCH") or time.time())
    sys.stdout.write(man_page(time.strftime("%Y-%m-%d", time.gmtime(epoch))))
