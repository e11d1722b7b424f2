"""Every help page: its layout at 80 columns and the parts that it must have."""

from __future__ import annotations

from collections.abc import Iterator

import click
import pytest
from click.testing import CliRunner

from starling.cli import cli

COLUMNS = 80


def commands() -> list[tuple[str, ...]]:
    """The words of every command, subcommands included."""

    def below(command: click.Command, words: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
        yield words
        if isinstance(command, click.Group):
            context = click.Context(command)
            for name in command.list_commands(context):
                subcommand = command.get_command(context, name)
                assert subcommand is not None
                yield from below(subcommand, (*words, name))

    return list(below(cli, ()))


def help_page(words: tuple[str, ...]) -> str:
    shown = CliRunner().invoke(cli, [*words, "--help"], env={"COLUMNS": str(COLUMNS)})
    assert shown.exit_code == 0
    return shown.output


def command_of(words: tuple[str, ...]) -> click.Command:
    command: click.Command = cli
    for word in words:
        assert isinstance(command, click.Group)
        found = command.get_command(click.Context(command), word)
        assert found is not None
        command = found
    return command


@pytest.mark.parametrize("words", commands(), ids=lambda words: " ".join(words) or "starling")
def test_a_help_page(words: tuple[str, ...]) -> None:
    page = help_page(words)
    assert max(map(len, page.splitlines())) <= COLUMNS
    summary = page.split("\n\n")[1]
    assert summary.startswith("  ") and "\n" not in summary, "a summary of one line"
    assert summary.endswith(".")
    exit_codes = page.split("  Exit codes:\n")[1].splitlines()
    assert [line.split()[0] for line in exit_codes if line[4] != " "] == sorted(
        (line.split()[0] for line in exit_codes if line[4] != " "), key=int
    )
    assert exit_codes[0].startswith("    0 ")
    assert any(line.startswith("    130 ") for line in exit_codes)


@pytest.mark.parametrize("words", commands(), ids=lambda words: " ".join(words) or "starling")
def test_every_option_has_a_help_text(words: tuple[str, ...]) -> None:
    command = command_of(words)
    for parameter in command.params:
        if isinstance(parameter, click.Option):
            assert parameter.help, parameter.name
            assert parameter.help.endswith("."), parameter.help


@pytest.mark.parametrize("words", commands(), ids=lambda words: " ".join(words) or "starling")
def test_every_argument_is_explained(words: tuple[str, ...]) -> None:
    page = help_page(words)
    for parameter in command_of(words).params:
        if isinstance(parameter, click.Argument):
            name = (parameter.metavar or (parameter.name or "").upper()).strip("[]").partition("|")[0]
            assert page.count(name) >= 2, f"{name} stands only in the usage line"


@pytest.mark.parametrize("words", [(), ("kv",)], ids=["starling", "kv"])
def test_no_summary_is_cut_in_the_list_of_commands(words: tuple[str, ...]) -> None:
    listing = help_page(words).split("Commands:\n")[1].split("\n\n")[0]
    assert "..." not in listing


@pytest.mark.parametrize(
    ("words", "codes", "absent"),
    [
        (("show",), "0 2 78 130", "in use"),
        (("fleet", "metrics-token"), "0 78 130", "orchestrator answers"),
        (("fleet", "certificate", "show"), "0 2 78 130", "exists already"),
    ],
)
def test_a_command_has_no_exit_code_of_another(words: tuple[str, ...], codes: str, absent: str) -> None:
    lines = help_page(words).split("  Exit codes:\n")[1].splitlines()
    assert " ".join(line.split()[0] for line in lines if line[4] != " ") == codes
    assert absent not in " ".join(lines)


def test_clearing_for_a_tenant_is_described_as_it_is() -> None:
    page = " ".join(help_page(("kv", "clear")).split())
    assert "everything is dropped that is not certainly another tenant's" in page
