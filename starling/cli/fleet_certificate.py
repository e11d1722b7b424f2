"""`starling fleet certificate`: the authority of a fleet, and certificates of its hosts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import msgspec

from pipeline.fleet.peer_tls import Role
from starling.cli.options import exit_codes, json_option
from starling.fleet_certificates import MAX_AUTHORITY_DAYS, MAX_DAYS, describe, issue, make_authority

CODES = exit_codes(
    {
        0: "success",
        1: "a file exists already",
        2: "wrong usage, or a value cannot be used",
        78: "a file cannot be used, or a package is missing",
    }
)
_FOLDER = click.Path(file_okay=False, path_type=Path)


def _days(default: int, most: int) -> Any:
    text = f"How long it is valid, up to {most}."
    return click.option(
        "--days", type=click.IntRange(1, most), default=default, show_default=True, metavar="N", help=text
    )


@click.group(epilog=CODES)
def certificate() -> None:
    """Make certificates for fleet.tls."""


@certificate.command(epilog=CODES)
@click.option("--out", type=_FOLDER, default=Path(), metavar="DIR", help="Directory of the files; default: this one.")
@_days(3650, MAX_AUTHORITY_DAYS)
def authority(out: Path, days: int) -> None:
    """Make an authority, authority.pem and authority.key.

    All hosts need authority.pem (fleet.tls.ca). Keep authority.key where certificates are issued, and nowhere else.
    """
    click.echo(make_authority(out, days))


def _issuing(role: Role, what: str, argument: str) -> click.Command:
    @certificate.command(role, epilog=CODES, help=f"Issue a certificate for {what}: {argument}.pem and {argument}.key.")
    @click.argument("name", metavar=argument)
    @click.option(
        "--authority", type=_FOLDER, default=Path(), metavar="DIR", help="Of authority.pem; default: this directory."
    )
    @click.option("--out", type=_FOLDER, default=Path(), metavar="DIR", help="Directory of the files.")
    @_days(365, MAX_DAYS)
    def run(name: str, authority: Path, out: Path, days: int) -> None:
        click.echo(issue(authority, out, role, name, days))

    return run


agent = _issuing("agent", "the host of the agent with this id", "ID")
orchestrator = _issuing("orchestrator", "an orchestrator", "NAME")
monitor = _issuing("monitor", "a reader of metrics", "NAME")


@certificate.command(
    epilog=exit_codes({0: "success", 2: "wrong usage", 78: "FILE cannot be used, or a package is missing"})
)
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@json_option()
def show(file: Path, as_json: bool) -> None:
    """Show whose certificate FILE is, its serial number and its end.

    A line with the serial number, or with the holder, in fleet.tls.denied revokes it.
    """
    found = describe(file)
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(found._asdict())).decode())
        return
    click.echo(f"{found.holder}, serial number {found.serial}, until {found.not_after}")
