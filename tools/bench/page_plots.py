"""`python -m tools.bench.page_plots`: draws the plots of docs/performance.md and docs/fleet.md from their tables.

A plot of other figures than those of its table would be wrong, so each file stores the figures that it was drawn from,
and a test compares them with the page.  Run this after a table has changed.  Needs matplotlib (`make peers`).
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import click

from tools.bench.fleet import routing
from tools.bench.offline.plots import BASELINE, BOUND, CANDIDATE, can_plot, label_ticks, new_figure, save, write_plots
from tools.bench.offline.results import Figure, Rate, Report, Work

DOCS = Path(__file__).parents[2] / "docs"
FORWARD = "On a CPU with AVX-512"
CONTEXTS = "How fast is it behind long contexts?"
HTTP = "How fast is the server over HTTP?"
FIRST = 16  # cached tokens of a row that names none
NUMBER = re.compile(r"([\d,.]+)(?: \(([\d,.]+)-([\d,.]+)\))?")
# What was measured, and when: change the date when a table is replaced.
FORWARD_TITLE = "SmolLM2-135M Q4_1, two cores of Zen 5, 21 November 2026"
CONTEXTS_TITLE = "Llama 3.2 1B shape, Q4_K_M, two cores of Ice Lake, 29 November 2026"
HTTP_TITLES = ("Zen 5, 21 November 2026", "Ice Lake, 30 November 2026")
ROUTING_TITLE = "four agents on two cores of Zen 3, 28 November 2026"
Table = list[list[str]]


def tables(text: str, heading: str) -> list[Table]:
    """The tables below a heading, up to the next one: their cells, without the line below the header."""
    [section] = re.findall(rf"^#+ {re.escape(heading)}\n(.*?)(?=^#|\Z)", text, re.M | re.S)
    found = re.findall(r"(?:^\|.*\n?)+", section, re.M)
    return [
        [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if "|---" not in line]
        for table in found
    ]


def rate(cell: str) -> Rate | None:
    """A figure with or without a range; None for an empty cell."""
    match = NUMBER.match(cell)
    if match is None:
        return None
    median, low, high = (float(one.replace(",", "")) if one else None for one in match.groups())
    assert median is not None
    return Rate(median, low or median, high or median)


def _figure(row: list[str]) -> Figure | None:
    """A row of the table of the forward pass."""
    title, ours, theirs, share = row
    candidate, baseline = rate(ours), rate(theirs)
    numbers = [int(number.replace(",", "")) for number in re.findall(r"\d[\d,]*\d|\d", title)]
    if candidate is None:
        return None
    if title.startswith("prefill"):
        return Figure(Work("prefill", tokens=numbers[0]), candidate, baseline)
    work = Work("decode", batch=numbers[0], cached=numbers[1] if len(numbers) > 1 else FIRST)
    percent = re.match(r"(\d+) %", share)
    return Figure(work, candidate, baseline, bandwidth_share=int(percent[1]) / 100 if percent else None)


def forward(page: str) -> list[Figure]:
    """The figures of the forward pass on Zen 5."""
    [table] = tables(page, FORWARD)
    return [figure for row in table[1:] if (figure := _figure(row))]


def contexts(page: str) -> dict[str, dict[str, list[list[float]]]]:
    """Tokens/s of prompts and output behind long contexts, by engine: positions, median, lowest, highest."""
    table = tables(page, CONTEXTS)[1]
    found: dict[str, dict[str, list[list[float]]]] = {"prompt": {}, "output": {}}
    shape = ""
    for row in table[1:]:
        shape = row[0] or shape
        model, _, positions = shape.partition(", ")
        ours, *theirs = (rate(cell) for cell in row[2:5])
        if model != "1B" or ours is None:
            continue
        fastest = max((one for one in theirs if one), key=lambda one: one.median)
        for engine, one in (("Starling", ours), ("llama.cpp, the faster attention", fastest)):
            values = [float(positions.replace(",", "")), one.median, one.low, one.high]
            found[row[1]].setdefault(engine, []).append(values)
    return found


def over_http(page: str) -> list[dict[str, dict[str, list[float]]]]:
    """For each machine and workload: tokens/s of both servers, and ms to their first tokens."""
    zen_speeds, zen_times, ice = tables(page, HTTP)
    machines = []
    for speeds, times, first in ((zen_speeds, zen_times, 1), (ice, ice, 4)):
        found: dict[str, dict[str, list[float]]] = {}
        for fast, slow in zip(speeds[1:], times[1:], strict=True):
            pairs = {"tokens/s": fast[1:3], "first token, ms (p50)": slow[first : first + 2]}
            found[fast[0]] = {name: [_median(cell) for cell in cells] for name, cells in pairs.items()}
        machines.append(found)
    return machines


def policies(page: str) -> dict[str, Any]:
    """What tools.bench.fleet.routing has found, as its table says."""
    [table] = tables(page, "Routing")
    found: dict[str, Any] = {}
    for name, p50, p99, hits, *_ in table[1:]:
        times = {"p50": 1000 * _median(p50), "p99": 1000 * _median(p99)}
        found[name] = {"first_token_ms": times, "hit_rate": _median(hits) / 100}
    [most] = re.findall(r"No policy can find more than (\d+)%", page)
    return {"policies": found, "repeats": int(most) / 100}


def _median(cell: str) -> float:
    one = rate(cell)
    assert one is not None, cell
    return one.median


def stored(directory: Path = DOCS) -> dict[str, str]:
    """What each plot's file must contain: the figures of its table, as JSON."""
    page, fleet = ((directory / name).read_text() for name in ("performance.md", "fleet.md"))
    of_forward = [[*figure.work, figure.candidate.median, figure.bandwidth_share] for figure in forward(page)]
    of_forward += [[figure.baseline.median for figure in forward(page) if figure.baseline]]
    figures: dict[str, Any] = dict.fromkeys(("batch", "prompt", "roofline"), of_forward)
    figures |= {"contexts": contexts(page), "http": over_http(page), "routing": policies(fleet)}
    return {name: json.dumps(value) for name, value in figures.items()}


def _write_contexts(found: dict[str, dict[str, list[list[float]]]], path: Path, description: str) -> None:
    figure = new_figure(9, 4)
    figure.suptitle(CONTEXTS_TITLE, fontsize=10)
    for axes, (work, engines) in zip(figure.subplots(1, 2), found.items(), strict=True):
        for colour, (engine, rows) in zip((CANDIDATE, BASELINE), engines.items(), strict=True):
            positions, medians, low, high = zip(*rows, strict=True)
            axes.plot(positions, medians, "o-", color=colour, label=engine)
            axes.fill_between(positions, low, high, color=colour, alpha=0.2)
            for x, y in zip(positions, medians, strict=True):
                axes.annotate(f"{y:g}", (x, y), textcoords="offset points", xytext=(0, 6), ha="center", fontsize=8)
        axes.set(xscale="log", yscale="log", xlabel="cached tokens", ylabel=f"{work}, tokens/s")
        axes.margins(0.12, 0.15)
        label_ticks(axes.xaxis, positions)
        low_end, high_end = axes.get_ylim()
        steps = [m * 10.0**n for n in range(-1, 4) for m in (1, 2, 5)]
        label_ticks(axes.yaxis, [one for one in steps if low_end <= one <= high_end])
        axes.grid(alpha=0.3)
        axes.legend(frameon=False, fontsize=8)
    save(figure, path, description)


def _write_http(machines: list[dict[str, dict[str, list[float]]]], path: Path, description: str) -> None:
    figure = new_figure(10, 7)
    figure.suptitle("SmolLM2-135M Q4_1 over HTTP, two cores, 16 slots", fontsize=10)
    grid = figure.subplots(2, 2)
    for column, (title, works) in enumerate(zip(HTTP_TITLES, machines, strict=True)):
        for axes, kind in zip(grid[:, column], next(iter(works.values())), strict=True):
            for offset, server, colour in ((-0.2, "Starling", CANDIDATE), (0.2, "llama-server", BASELINE)):
                values = [works[work][kind][0 if offset < 0 else 1] for work in works]
                bars = axes.bar([at + offset for at in range(len(works))], values, 0.4, label=server, color=colour)
                axes.bar_label(bars, [f"{value:,.0f}" for value in values], fontsize=7, color=BOUND)
            axes.set_xticks(range(len(works)), [_short(work) for work in works], fontsize=7)
            axes.set_title(f"{title}: {kind}", fontsize=9)
            axes.spines[["top", "right"]].set_visible(False)
            axes.margins(y=0.2)
            if "ms" in kind:
                axes.set_yscale("log")
                label_ticks(axes.yaxis, [10, 100, 1000, 10000])
            axes.set_xlabel("clients, tokens of each prompt", fontsize=8)
            axes.legend(frameon=False, fontsize=8, loc="upper left", ncols=2)
    save(figure, path, description)


def _short(work: str) -> str:
    """The name of a workload in two lines."""
    return work.replace(" (queueing)", "").replace(" after 400 shared", "\nafter 400\nshared")


@click.command()
@click.option("--into", type=click.Path(path_type=Path), default=DOCS / "performance", help="Directory of the plots.")
def main(into: Path) -> None:
    """Draw the plots of the documentation from its tables."""
    if not can_plot():
        raise click.UsageError("this needs matplotlib, which is not installed here: `make peers` installs it")
    page, fleet = ((DOCS / name).read_text() for name in ("performance.md", "fleet.md"))
    descriptions = stored()
    report = Report({}, {}, forward(page), {})
    write_plots(report, into, FORWARD_TITLE, descriptions["batch"])
    _write_contexts(contexts(page), into / "contexts.svg", descriptions["contexts"])
    _write_http(over_http(page), into / "http.svg", descriptions["http"])
    routing.write_plot(policies(fleet), into / "routing.svg", ROUTING_TITLE, descriptions["routing"])


if __name__ == "__main__":
    main()
