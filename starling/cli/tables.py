"""Tables: by rich on a terminal, aligned text without colours elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Literal

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from starling.cli.terminal import visible

STYLES = {"loaded": "green", "ready": "green", "changed": "red", "to be fetched": "yellow"}
GAP = 2  # between columns of a terminal
FOLDED = 24  # columns for a text that may take several lines
PIPE_COLUMNS = 10_000  # nothing is cut or wrapped for a program that reads it


def print_table(
    titles: Sequence[str],
    rows: Sequence[Sequence[str]],
    right: Sequence[str] = (),
    leave: Sequence[str] = (),
    fold: Sequence[str] = (),
) -> None:
    """Print a table; columns in `right` are aligned to the right. On a terminal it takes at most its width.

    leave: columns that a terminal without room for all does without, the least important one first. fold: columns whose
    texts take several lines of a terminal instead of being cut. Control characters become symbols: texts may come from
    other hosts.
    """
    is_terminal = sys.stdout.isatty()
    rows = [[visible(cell.replace("\n", " ")) for cell in row] for row in rows]
    console = Console(highlight=False) if is_terminal else Console(width=PIPE_COLUMNS, highlight=False, no_color=True)
    shown = list(range(len(titles)))
    for title in leave:
        if is_terminal and _width(titles, rows, shown, fold) > console.width:
            shown.remove(titles.index(title))
    box, padding = (SIMPLE_HEAD, (0, 1, 0, 0)) if is_terminal else (None, (0, 1))  # this box adds a column
    table = Table(box=box, pad_edge=False, show_edge=False, padding=padding)
    for number in shown:
        title = titles[number]
        justify: Literal["left", "right"] = "right" if title in right else "left"
        is_folded = title in fold or number == 0
        table.add_column(title, justify=justify, no_wrap=not is_folded, overflow="fold" if is_folded else "ellipsis")
    for row in rows:
        table.add_row(*(Text(row[number], style=STYLES.get(row[number], "")) for number in shown))
    with console.capture() as captured:
        console.print(table)
    for line in captured.get().splitlines():
        sys.stdout.write(line.rstrip() + "\n")


def _width(titles: Sequence[str], rows: Sequence[Sequence[str]], shown: Sequence[int], fold: Sequence[str]) -> int:
    """Columns of the terminal that the table takes if nothing of it is cut, and folded columns have `FOLDED`."""
    total = GAP * (len(shown) - 1)
    for number in shown:
        longest = max(cell_len(line[number]) for line in (titles, *rows))
        total += min(longest, FOLDED) if titles[number] in fold else longest
    return total
