"""Tables of `starling kv`: arenas, prefix tree, page files and sessions. They fit 80 columns."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.tree import Tree

from stages.kv.pool.page_headers import PageCounts
from stages.kv.report import ModelReport, Report

MAX_RUNS = 20  # of the prefix tree, the largest first


def render(report: Report) -> RenderableType:
    """All tables, then the problems."""
    parts: list[RenderableType] = []
    for model in report.models:
        parts.append(_arena_table(model))
        if model.runs:
            parts.append(_prefix_tree(model))
        if model.sessions:
            parts.append(_session_table(model))
        if model.disks:
            parts.append(_disk_table(model))
    if not report.models:
        parts.append("no model is loaded: no arena, no prefixes, no sessions")
    for problem in report.problems:
        parts.append(f"[red]{problem}[/red]")
    if report.is_checked and report.models and not report.problems:
        ledgers = "headers and page table" if any(model.audit for model in report.models) else "headers"
        parts.append(f"free + cached + leased == total by the {ledgers}, every checksum is correct")
    return Group(*parts)


def _arena_table(m: ModelReport) -> Table:
    title = f"KV arena of {m.model}"
    table = Table(title=title, title_justify="left", min_width=min(len(title), 80))
    # With an audit, both counts are from the same moment.
    columns = ("pages", "number", "size") if m.audit is None else ("pages", "by headers", "by table", "size")
    for column in columns:
        table.add_column(column, justify="left" if column == "pages" else "right")
    if not m.is_there:
        table.add_row("no arena")
        return table
    if m.audit is None:
        for name, pages in (("free", m.free), ("cached", m.cached), ("leased", m.leased), ("total", m.total)):
            table.add_row(name, f"{pages:,}", _bytes(pages * m.page_bytes))
    else:
        headers, table_counts = m.audit.headers, m.audit.page_table
        for name, one, other in zip(PageCounts._fields, headers, table_counts, strict=True):
            table.add_row(name, f"{one:,}", f"{other:,}", _bytes(other * m.page_bytes))
        n_pages = sum(table_counts)
        table.add_row("sum", f"{sum(headers):,}", f"{n_pages:,}", _bytes(n_pages * m.page_bytes))
        table.add_row("total", f"{m.total:,}", f"{m.audit.total:,}", _bytes(m.total * m.page_bytes))
    rest = [""] * (len(columns) - 3)
    table.add_row(f"one page: {m.page_tokens} tokens", "", *rest, _bytes(m.page_bytes))
    if m.unreachable:
        table.add_row(
            "cached, previous page missing", f"{m.unreachable:,}", *rest, _bytes(m.unreachable * m.page_bytes)
        )
    if m.fragmentation is not None:
        table.add_row("leased positions without a token", "", *rest, f"{100 * m.fragmentation:.1f} %")
    return table


def _disk_table(m: ModelReport) -> Table:
    table = Table(title=f"Pages of {m.model} on disk", title_justify="left")
    for column in ("kind", "pages", "cells", "size", "holes"):
        table.add_column(column, justify="left" if column == "kind" else "right")
    table.add_column("file", overflow="fold")
    for disk in m.disks:
        table.add_row(
            disk.kind,
            f"{disk.pages:,}",
            f"{disk.cells:,}",
            _bytes(disk.file_bytes),
            _bytes(disk.hole_bytes),
            disk.path,
        )
    return table


def _prefix_tree(model: ModelReport) -> Tree:
    """The prefix tree: each branch is a run of consecutive pages."""
    tree = Tree(f"Prefixes of {model.model} ({len(model.runs)}, at most the largest {MAX_RUNS})")
    shown = {run.digest: run for run in model.runs[:MAX_RUNS]}
    branches: dict[str, Tree] = {}
    for run in sorted(shown.values(), key=lambda run: run.first):
        n_pages = run.pages + run.others
        size = _bytes(n_pages * model.page_bytes)
        held = f", {run.held} in use" if run.held else ""
        label = (
            f"{run.digest[:8]} tokens {run.first * model.page_tokens}.."
            f"{(run.first + run.pages) * model.page_tokens}, {n_pages} pages, {size}, "
            f"{run.uses} uses, idle {_age(run.idle_s)}{held}"
        )
        branches[run.digest] = branches.get(run.parent, tree).add(label)
    return tree


def _session_table(model: ModelReport) -> Table:
    table = Table(title=f"Sessions of {model.model}", title_justify="left")
    for column in ("session", "tenant", "tokens", "turns", "idle", "ttl"):
        table.add_column(column, justify="left" if column in ("session", "tenant") else "right")
    for s in model.sessions:
        table.add_row(
            s.id,
            s.tenant,
            f"{s.tokens:,}",
            str(s.turns),
            _age(s.idle_s),
            _age(s.ttl_s) if s.ttl_s else "none",
        )
    return table


def _bytes(n: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if n < 1024 or unit == "GiB":
            return f"{n:.0f} {unit}" if unit == "B" or n >= 100 else f"{n:.1f} {unit}"
        n /= 1024
    return ""


def _age(seconds: float) -> str:
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
