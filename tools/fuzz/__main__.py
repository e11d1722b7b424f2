"""The command: `python -m tools.fuzz run|save|replay [TARGET ...]`."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import click

from tools.fuzz import corpus
from tools.fuzz.coverage import minimized
from tools.fuzz.guard import ROOT, guarded
from tools.fuzz.runner import fuzz
from tools.fuzz.target import load, names

WORKSPACE = ROOT / "build" / "fuzz"
_UNITS_S = {"": 1, "s": 1, "m": 60, "h": 3600}


def _duration(context: click.Context, parameter: click.Parameter, value: str) -> float:
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([smh]?)", value)
    if match is None:
        raise click.BadParameter(f"{value!r} is not a duration; give seconds, or 90s, 5m, 1h")
    return float(match[1]) * _UNITS_S[match[2]]


def _chosen(context: click.Context, parameter: click.Parameter, value: tuple[str, ...]) -> list[str]:
    unknown = [name for name in value if name not in names() and "." not in name]
    if unknown:
        raise click.BadParameter(f"{unknown[0]!r} is no target; there are {', '.join(names())}")
    return list(value) or names()


_targets = click.argument("targets", nargs=-1, callback=_chosen)
_workspace = click.option(
    "--workspace", type=click.Path(path_type=Path, file_okay=False), default=WORKSPACE, help="corpus and findings"
)


@click.group()
def main() -> None:
    """Fuzz the parsers of bodies, files, frames and configuration."""


@main.command()
@_targets
@_workspace
@click.option("--time", "seconds", default="5m", show_default=True, callback=_duration, help="for each target")
def run(targets: list[str], workspace: Path, seconds: float) -> None:
    """Fuzz TARGETS (default: all) in turn; exits 1 if there are findings."""
    has_findings = False
    for name in targets:
        result = fuzz(name, seconds, workspace)
        click.echo(result.line)
        for finding in result.findings:
            has_findings = True
            click.echo("  " + finding.strip().replace("\n", "\n  "))
    if has_findings:
        click.echo(f"the inputs are in {workspace}/TARGET/findings")
    sys.exit(has_findings)


@main.command()
@_targets
@_workspace
def save(targets: list[str], workspace: Path) -> None:
    """Minimize what `run` collected and store it in the repository."""
    for name in targets:
        target = load(name)
        directory = workspace / name / "corpus"
        found = corpus.read_directory(directory) if directory.is_dir() else []
        kept, coverage = minimized(
            target, [*target.seeds(), *found, *corpus.read_archive(name)], corpus.MAX_ARCHIVE_BYTES
        )
        path = corpus.write_archive(name, kept)
        click.echo(
            f"{name:18} {len(found):6} inputs -> {len(kept):4}, {path.stat().st_size:,} bytes; "
            f"{len(coverage.reached)} of {len(coverage.lines)} lines of {', '.join(target.modules)}"
        )


@main.command()
@_targets
def replay(targets: list[str]) -> None:
    """Run the stored corpus and the seeds of TARGETS once."""
    has_findings = False
    for name in targets:
        target = load(name)
        inputs = [*target.seeds(), *corpus.read_archive(name)]
        with guarded(target) as guard:
            for data in inputs:
                finding = guard.check(data)
                if finding is not None:
                    has_findings = True
                    click.echo(f"{name} {corpus.input_name(data)}: {finding.key}\n{finding.text}")
        click.echo(f"{name:18} {len(inputs):6} inputs")
    sys.exit(has_findings)


if __name__ == "__main__":
    main()
