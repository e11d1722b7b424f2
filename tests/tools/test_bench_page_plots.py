"""The plots of the documentation: what is read from its tables, and that the files were drawn from these tables."""

from __future__ import annotations

from html import unescape
from pathlib import Path

import pytest
from click.testing import CliRunner

from tools.bench import page_plots
from tools.bench.offline.plots import can_plot
from tools.bench.offline.results import Rate, Work

PAGE = """
## One

| work | Starling | llama.cpp |
|---|---|---|
| a | 1,415 (1,401-1,524) | |

Text.

| b |
|---|
| 0.84 |

### Two

| c |
|---|
"""


def test_tables_are_those_up_to_the_next_heading() -> None:
    first, second = page_plots.tables(PAGE, "One")
    assert first == [["work", "Starling", "llama.cpp"], ["a", "1,415 (1,401-1,524)", ""]]
    assert second == [["b"], ["0.84"]]
    assert page_plots.tables(PAGE, "Two") == [[["c"]]]


def test_rates_have_a_range_or_none() -> None:
    assert page_plots.rate("1,415 (1,401-1,524)") == Rate(1415, 1401, 1524)
    assert page_plots.rate("31 / 37") == Rate(31, 31, 31)
    assert page_plots.rate("0.39 s") == Rate(0.39, 0.39, 0.39)
    assert page_plots.rate("") is None


def test_the_tables_of_the_pages_are_read_as_they_are() -> None:
    page, fleet = ((page_plots.DOCS / name).read_text() for name in ("performance.md", "fleet.md"))
    works = [figure.work for figure in page_plots.forward(page)]
    assert works[0] == Work("prefill", tokens=64)
    assert works[-1] == Work("decode", batch=1, cached=2048)
    assert sum(figure.bandwidth_share is not None for figure in page_plots.forward(page)) == 4
    for engines in page_plots.contexts(page).values():
        assert [[row[0] for row in rows] for rows in engines.values()] == 2 * [[8192, 32768, 130000]]
    for works_over_http in page_plots.over_http(page):
        assert len(works_over_http) == 6
        assert all(
            ours < theirs for _, (ours, theirs) in (list(kinds.items())[1] for kinds in works_over_http.values())
        )
    found = page_plots.policies(fleet)
    assert list(found["policies"]) == ["score", "least queue", "round robin", "random"]
    assert max(one["hit_rate"] for one in found["policies"].values()) < found["repeats"]


@pytest.mark.parametrize("name", list(page_plots.stored()))
def test_the_plots_are_drawn_from_the_tables(name: str) -> None:
    """If this fails, a table has changed since: draw them again by `python -m tools.bench.page_plots`."""
    plot = unescape((page_plots.DOCS / "performance" / f"{name}.svg").read_text())
    assert page_plots.stored()[name] in plot


def test_all_plots_are_written(tmp_path: Path) -> None:
    result = CliRunner().invoke(page_plots.main, ["--into", str(tmp_path)], catch_exceptions=False)
    if not can_plot():
        assert "make peers" in result.output
        return
    assert {path.stem for path in tmp_path.iterdir()} == set(page_plots.stored())
