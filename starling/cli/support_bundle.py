"""`starling support-bundle`: one file with what others need to see, without secrets."""

from __future__ import annotations

import os
import time
from pathlib import Path

import click

from pipeline.errors import ResourceError
from starling.cli.options import exit_codes


@click.command(
    "support-bundle",
    epilog=exit_codes({0: "the file is written", 2: "a file of that name exists", 78: "the file cannot be written"}),
)
@click.option(
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    help="The file to write [starling-support-DATE-TIME.tar.gz]. It must not exist.",
)
@click.option(
    "--log-kb", type=click.IntRange(0, 65_536), default=512, show_default=True, help="KiB of each log, from its end."
)
def support_bundle(output: Path | None, log_kb: int) -> None:
    """Write a file that others need to see what is wrong.

    It has the versions, the machine, the configuration, what `doctor`, `models` and `status` show, metrics and the
    end of each log. API keys, credentials, names of tenants, of the user and of the host are replaced. Prompts and
    answers are not in it, nor what plugins print. Read it before you send it: `tar -xzf FILE`.
    """
    from starling.support.bundle import collect, pack

    now = time.time()
    path = output or Path(time.strftime("starling-support-%Y%m%d-%H%M%S.tar.gz", time.gmtime(now)))
    files = collect(log_kb << 10)
    try:
        # Readable by its owner only: what a pattern does not know may still be in it.
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with os.fdopen(fd, "wb") as file:
                file.write(pack(files, now))
        except BaseException:
            path.unlink(missing_ok=True)  # a part of it is of no use, and would be in the way of the next attempt
            raise
    except FileExistsError:
        raise click.BadParameter(f"{path} exists; name another file", param_hint="--output") from None
    except OSError as error:
        raise ResourceError(f"{path} cannot be written: {error.strerror}") from None
    for name in sorted(files):
        click.echo(f"  {name:<24} {len(files[name]):>10,} bytes")
    click.echo(f"{path} is written; read it before you send it")
