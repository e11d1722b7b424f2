"""Plots of a run as PNG files, by matplotlib, which is the extra `bench`.

A plot is drawn in memory: a file that exists is complete, also when the process ends meanwhile.
"""

from __future__ import annotations

import io
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pipeline.extras import how_to_install
from pipeline.files import replace_file
from starling.bench.load import Run
from starling.bench.response import Response

INK, SECOND = "#0b6e4f", "#c1666b"
BINS = 100  # of the time line
FILES = ("latency.png", "between_tokens.png", "timeline.png")


def missing_packages() -> str:
    """The error where it is not."""
    return f"--plots needs matplotlib, which is not installed here: {how_to_install('bench')}"


def can_plot() -> bool:
    """matplotlib is installed."""
    return find_spec("matplotlib") is not None


def write_plots(run: Run, directory: Path) -> list[Path]:
    """The `FILES` in `directory`. Returns what was written."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    directory.mkdir(parents=True, exist_ok=True)
    complete = [response for response in run.responses if response.is_complete]
    paths = []
    for name, draw in zip(FILES, (_latency, _between, _timeline), strict=True):
        figure = Figure(figsize=(6, 4))
        FigureCanvasAgg(figure)
        draw(figure.subplots(), run, complete)
        figure.tight_layout()
        drawn = io.BytesIO()
        figure.savefig(drawn, format="png", dpi=120)
        paths.append(directory / name)
        replace_file(paths[-1], drawn.getvalue())
    return paths


def _distribution(axes: Any, seconds: list[float], label: str, colour: str) -> None:
    """The share of values that do not exceed x."""
    if not seconds:
        return
    ordered = sorted(1e3 * value for value in seconds)
    axes.step(ordered, [(i + 1) / len(ordered) for i in range(len(ordered))], where="post", color=colour, label=label)


def _latency(axes: Any, run: Run, complete: list[Response]) -> None:
    _distribution(axes, [response.first_s for response in complete if response.times], "first token", INK)
    _distribution(axes, [response.total_s for response in complete], "end to end", SECOND)
    axes.set(xlabel="milliseconds", ylabel="share of requests", xlim=(0, None), ylim=(0, 1.01))
    _finish(axes)


def _between(axes: Any, run: Run, complete: list[Response]) -> None:
    _distribution(axes, [gap for response in complete for gap in response.gaps_s], "between tokens", INK)
    axes.set(xlabel="milliseconds", ylabel="share of pauses", xlim=(0, None), ylim=(0, 1.01))
    _finish(axes)


def _timeline(axes: Any, run: Run, complete: list[Response]) -> None:
    """Output by time, and the requests that were under way."""
    width = max(run.seconds, 1e-9) / BINS
    events = [0.0] * BINS
    changes = []
    for response in run.responses:
        share = response.tokens / len(response.times) if response.times else 0.0  # tokens of an event
        for when in response.times:
            events[min(BINS - 1, max(0, int((when - run.began) / width)))] += share / width
        changes += [(response.sent - run.began, 1), ((response.ended or run.ended) - run.began, -1)]
    axes.step([width * i for i in range(BINS)], events, where="post", color=INK, label="tokens/s")
    axes.set(xlabel="seconds", ylabel="output, tokens/s", ylim=(0, None))
    times, counts, count = [0.0], [0], 0
    for when, change in sorted(changes):
        count += change
        times.append(when)
        counts.append(count)
    other = axes.twinx()
    other.step(times, counts, where="post", color=SECOND, alpha=0.7)
    other.set_ylabel("requests under way", color=SECOND)
    other.set_ylim(0, None)
    axes.grid(alpha=0.3)


def _finish(axes: Any) -> None:
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False)
