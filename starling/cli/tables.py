"""Tables: by rich on a terminal, aligned text without colours elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Literal

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

STYLES = {"loaded": "green", "ready": "green", "changed": "red", "to be fetched": "yellow"}
PIPE_COLUMNS = 10_000  # nothing is cut or wrapped for a program that reads it


def print_table(titles: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[str] = ()) -> None:
    """Print a table; columns in `right` are aligned to the right. On a terminal it takes at most its width."""
    is_terminal = sys.stdout.isatty()
    console = Console(highlight=False) if is_terminal else Console(width=PIPE_COLUMNS, highlight=False, no_color=True)
    table = Table(box=SIMPLE_HEAD if is_terminal else None, pad_edge=False, show_edge=False, padding=(0, 1))
    for number, title in enumerate(titles):
        justify: Literal["left", "right"] = "right" if title in right else "left"
        table.add_column(title, justify=justify, no_wrap=number > 0, overflow="fold" if number == 0 else "ellipsis")
    for row in rows:
        table.add_row(*(Text(cell, style=STYLES.get(cell, "")) for cell in row))
    with console.capture() as captured:
        console.print(table)
    for line in captured.get().splitlines():
        sys.stdout.write(line.rstrip() + "\n")
