"""The plots of the forward pass from a report: throughput by batch, time to first token, roofline.

tools/bench/page_plots.py draws those of docs/performance.md with it, from the page's tables.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tools.bench.offline.results import Figure, Report

CANDIDATE, BASELINE, BOUND = "#0b6e4f", "#c1666b", "#555555"


def can_plot() -> bool:
    """matplotlib is installed."""
    return find_spec("matplotlib") is not None


def write_plots(report: Report, directory: Path, title: str, description: str = "") -> list[Path]:
    """SVG files into `directory`; needs matplotlib. Returns what was written. `title`: what was measured, and when."""
    directory.mkdir(parents=True, exist_ok=True)
    plots: dict[str, Callable[[Any, Report], None]] = {"batch": _batch, "prompt": _prompt, "roofline": _roofline}
    paths = []
    for name, draw in plots.items():
        figure = new_figure(6, 4)
        axes = figure.subplots()
        draw(axes, report)
        axes.set_title(title, fontsize=10)
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
        paths.append(save(figure, directory / f"{name}.svg", description))
    return paths


def new_figure(width: float, height: float) -> Any:
    """An empty figure of so many inches."""
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure as Plot

    figure = Plot(figsize=(width, height), layout="tight")
    FigureCanvasSVG(figure)
    return figure


def save(figure: Any, path: Path, description: str = "") -> Path:
    """Write an SVG; the same figures give the same file. `description` is stored in it."""
    import matplotlib

    with matplotlib.rc_context({"svg.hashsalt": "starling"}):
        figure.savefig(path, metadata={"Date": None, **({"Description": description} if description else {})})
    return path


def label_ticks(axis: Any, values: Sequence[float]) -> None:
    """Ticks of a logarithmic axis at these values, written in full."""
    axis.set_ticks(values, [f"{value:,g}" for value in values])
    axis.set_ticks([], minor=True)


def _curves(axes: Any, figures: list[Figure], x: list[float], y: Any) -> None:
    for label, colour, of in (("Starling", CANDIDATE, "candidate"), ("llama.cpp", BASELINE, "baseline")):
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
    most = max((f.work.batch for f in figures), default=1)
    label_ticks(axes.xaxis, [2**n for n in range(most.bit_length())])
    axes.set(xlabel="batch (sequences)", ylabel="decode, tokens/s of all together", ylim=(0, None))


def _prompt(axes: Any, report: Report) -> None:
    figures = [f for f in report.figures if f.work.kind == "prefill"]
    lengths = [f.work.tokens for f in figures]
    _curves(axes, figures, list(map(float, lengths)), lambda f, rate: 1000 * f.work.tokens / rate)
    axes.set(xscale="log", yscale="log", xlabel="prompt (tokens)", ylabel="time to first token, ms")
    label_ticks(axes.xaxis, lengths)
    low, high = axes.get_ylim()
    label_ticks(axes.yaxis, [tick for n in range(-1, 7) for tick in (10.0**n, 3 * 10.0**n) if low <= tick <= high])


def _roofline(axes: Any, report: Report) -> None:
    figures = [f for f in report.figures if f.bandwidth_share and f.work.batch == 1]
    x = [f.work.cached for f in figures]
    bounds = [f.candidate.median / (f.bandwidth_share or 1) for f in figures]
    axes.plot(x, bounds, "--", color=BOUND, label="measured read bandwidth / bytes of a step")
    _curves(axes, figures, list(map(float, x)), lambda _, rate: rate)
    axes.set(xlabel="cached tokens", ylabel="decode at batch 1, tokens/s", ylim=(0, None))
