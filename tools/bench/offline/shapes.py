"""`python -m tools.bench.offline.shapes`: the share of the read bandwidth that decoding reaches, by size and format.

Runs `python -m tools.bench --quick` for each shape and format in a process of its own, which ends before the next one
begins: the weights of two models would not fit beside each other.  The last line is one JSON object: all reports.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import click

from tools.bench.offline.results import share_text
from tools.tiny_gguf import LARGE, RECIPES, SHAPES

HEAD = (
    "model",
    "weights MB",
    "decode tokens/s",
    "read GB/s",
    "of bandwidth",
    "llama.cpp tokens/s",
    "ratio",
    "disturbed",
)


def row(report: dict[str, Any]) -> tuple[str, ...]:
    """The table's cells of a report: decoding of one sequence."""
    figure = next(one for one in report["figures"] if one["work"] == {"kind": "decode", "batch": 1, "cached": 16})
    baseline, ratio = figure["baseline"], figure["ratio"]
    worst = f" ({report['machine']['worst']})" if report["machine"]["disturbed"] else ""
    return (
        report["model"]["name"],
        f"{report['model']['weights_mb']:,.0f}",
        _text(figure["candidate"]),
        f"{figure['read_gb_s']:.1f}",
        share_text(figure["bandwidth_share"], figure["bandwidth_shares"]),
        _text(baseline) if baseline else "",
        f"{ratio:.2f}" if ratio else "",
        f"{report['machine']['disturbed']}{worst}",
    )


def _text(rate: dict[str, float]) -> str:
    return f"{rate['median']:.1f} ({rate['low']:.1f}-{rate['high']:.1f})"


def table(reports: Sequence[dict[str, Any]]) -> list[str]:
    """Lines of a table."""
    rows = [HEAD, *(row(report) for report in reports)]
    widths = [max(len(cells[i]) for cells in rows) for i in range(len(HEAD))]
    return ["  ".join(cell.ljust(w) for cell, w in zip(cells, widths, strict=True)).rstrip() for cells in rows]


def measured(shape: str, recipe: str, arguments: Sequence[str]) -> dict[str, Any]:
    """The report of one run, whose other output is shown. Raises `RuntimeError` if it fails."""
    command = [sys.executable, "-m", "tools.bench", "--shape", shape, "--format", recipe, "--quick", "--no-http"]
    with subprocess.Popen([*command, *arguments], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        last = ""
        try:
            for line in process.stdout:
                if last:
                    click.echo(f"{shape} {recipe}: {last}")
                last = line.rstrip()
        except BaseException:
            process.terminate()
            raise
    if process.returncode:
        raise RuntimeError(f"{shape} {recipe}: the benchmark ended with code {process.returncode}: {last}")
    report: dict[str, Any] = json.loads(last)
    return report


def chosen(text: str, known: Sequence[str], what: str) -> list[str]:
    """The names in a comma separated list. Raises `BadParameter` for an unknown one."""
    names = text.split(",")
    for name in names:
        if name not in known:
            raise click.BadParameter(f"{what} {name!r} is none of {', '.join(known)}")
    return names


@click.command()
@click.option("--shapes", default=",".join(LARGE), show_default=True, help="Comma separated, of tools.tiny_gguf.")
@click.option("--formats", default="Q4_K_M,Q8_0", show_default=True, help="Comma separated.")
@click.option("--rounds", default=3, show_default=True, help="Repetitions of each unit of work.")
@click.option(
    "--baseline/--no-baseline", default=True, show_default=True, help="Compare with llama.cpp if it is installed."
)
def main(shapes: str, formats: str, rounds: int, baseline: bool) -> None:
    """Decoding by size and format of the model, as a share of the read bandwidth."""
    pairs = [(s, f) for s in chosen(shapes, list(SHAPES), "shape") for f in chosen(formats, list(RECIPES), "format")]
    arguments = ["--rounds", str(rounds), "--baseline" if baseline else "--no-baseline"]
    reports = [measured(shape, recipe, arguments) for shape, recipe in pairs]
    click.echo("\n".join(table(reports)))
    click.echo(json.dumps(reports))


if __name__ == "__main__":
    # Context managers remove the arenas and end the children: turn SIGTERM into an exception, so that they run.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    main()
