"""The plots of docs/performance.md from a report: throughput by batch, time to first token, roofline."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tools.bench.offline.results import Figure, Report

CANDIDATE, BASELINE, BOUND = "#0b6e4f", "#c1666b", "#555555"


def can_plot() -> bool:
    """matplotlib is installed."""
    return find_spec("matplotlib") is not None


def write_plots(report: Report, directory: Path) -> list[Path]:
    """SVG files into `directory`; needs matplotlib. Returns what was written."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "starling"  # the same figures give the same file
    from matplotlib import pyplot

    directory.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, draw in (("batch", _batch), ("prompt", _prompt), ("roofline", _roofline)):
        figure, axes = pyplot.subplots(figsize=(6, 4))
        draw(axes, report)
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
        figure.tight_layout()
        paths.append(directory / f"{name}.svg")
        figure.savefig(paths[-1], metadata={"Date": None})
        pyplot.close(figure)
    return paths


def _curves(axes: Any, figures: list[Figure], x: list[float], y: Any) -> None:
    for label, colour, of in (("starling", CANDIDATE, "candidate"), ("llama.cpp", BASELINE, "baseline")):
        rates = [getattr(f, of) for f in figures]
        if not rates or None in rates:
            continue
        axes.plot(x, [y(f, r.median) for f, r in zip(figures, rates, strict=True)], "o-", color=colour, label=label)
        low = [y(f, r.low) for f, r in zip(figures, rates, strict=True)]
        high = [y(f, r.high) for f, r in zip(figures, rates, strict=True)]
        axes.fill_between(x, low, high, color=colour, alpha=0.2)


def _batch(axes: Any, report: Report) -> None:
    figures = [f for f in report.figures if f.work.kind == "decode" and f.work.cached <= 64]
    _curves(axes, figures, [f.work.batch for f in figures], lambda _, rate: rate)
    axes.set_xscale("log", base=2)
    axes.set(xlabel="batch (sequences)", ylabel="decode, tokens/s of all together", ylim=(0, None))


def _prompt(axes: Any, report: Report) -> None:
    figures = [f for f in report.figures if f.work.kind == "prefill"]
    _curves(axes, figures, [f.work.tokens for f in figures], lambda f, rate: 1000 * f.work.tokens / rate)
    axes.set(xlabel="prompt (tokens)", ylabel="time to first token, ms", xlim=(0, None), ylim=(0, None))


def _roofline(axes: Any, report: Report) -> None:
    figures = [f for f in report.figures if f.bandwidth_share and f.work.batch == 1]
    x = [f.work.cached for f in figures]
    bounds = [f.candidate.median / (f.bandwidth_share or 1) for f in figures]
    axes.plot(x, bounds, "--", color=BOUND, label="bytes of a step / measured read bandwidth")
    _curves(axes, figures, list(map(float, x)), lambda _, rate: rate)
    axes.set(xlabel="cached tokens", ylabel="decode at batch 1, tokens/s", ylim=(0, None))
