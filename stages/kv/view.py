"""What the kv stage holds, read from outside: `starling kv` and `starling kv check`.

Reads arenas and state files, writes nothing, and works whether the server runs or not.  A running server
changes pages meanwhile, so what looks wrong is looked at again before it is reported; a check asks its kv stage as
well, which alone can count while nothing changes.

    inspect(config, check)   -> Report, plain data for JSON
    show(report)             -> rich renderables
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
from rich.console import Group, RenderableType
from rich.table import Table
from rich.tree import Tree

from pipeline.config import paths
from pipeline.config.schema import Config, ModelConfig
from pipeline.errors import StarlingError
from pipeline.ipc import control
from pipeline.models import versions
from pipeline.models.versions import ModelVersion
from pipeline.observe.metrics import Snapshot
from pipeline.observe.status import read_all
from shm.arena import ArenaError
from shm.pages import PAGE_FULL, PAGE_LEASED, KvArena, attach_kv
from stages.kv.pool.audit import Books
from stages.kv.pool.headers import Count, Headers, PageName, checksum, count
from stages.kv.sessions.session_files import SUFFIX, parse
from stages.kv.storage.page_file import PageFile
from stages.kv.storage.persist import stores_of

ASK_S = 30.0  # for the kv stage's answer: it may have an arena to reserve first
LOOKS = 3  # at something that seems wrong, before it is reported
MAX_RUNS = 20  # of the prefix tree that are shown, the largest first


class Run(msgspec.Struct):
    """Pages that follow one another without a branch."""

    digest: str  # of the last page, hex
    parent: str  # digest before the first page, hex; "": the chain starts here
    first: int  # ordinal of the first page
    pages: int
    held: int  # of them in use by sequences
    uses: int  # most sequences that have held one of them
    idle_s: float  # since the last use


class DiskReport(msgspec.Struct):
    kind: str  # "saved" or "spilled"
    path: str
    file_bytes: int
    pages: int
    slots: int
    hole_bytes: int = 0  # of slots without a page
    problems: list[str] = []


class SessionReport(msgspec.Struct):
    id: str
    tenant: str
    tokens: int
    turns: int
    idle_s: float
    ttl_s: int


class ModelReport(msgspec.Struct):
    model: str
    arena: str
    is_there: bool
    total: int = 0
    free: int = 0
    cached: int = 0
    leased: int = 0
    page_bytes: int = 0
    page_tokens: int = 0
    generation: int = 0  # of the arena
    books: Books | None = None  # the kv stage's own count; None: it does not run, or was not asked
    fragmentation: float | None = None  # share of leased positions that hold no token; None: no stage says it
    unreachable: int = 0  # cached pages whose predecessor is nowhere
    runs: list[Run] = []
    disks: list[DiskReport] = []
    sessions: list[SessionReport] = []
    problems: list[str] = []


class Report(msgspec.Struct):
    is_checked: bool
    models: list[ModelReport]
    silence: str = ""  # why a kv stage that runs has not told its books

    @property
    def problems(self) -> list[str]:
        found = [self.silence] if self.silence else []
        for model in self.models:
            found += [*model.problems, *(problem for disk in model.disks for problem in disk.problems)]
        return found


# ------------------------------------------------------------------ reading


def inspect(config: Config, check: bool = False, now_ns: int | None = None) -> Report:
    """All models. With `check` every checksum is computed, in the arena and on disk, and a kv stage is asked."""
    now = time.time_ns() if now_ns is None else now_ns
    report = Report(check, [_model(config, one, check, now) for one in versions.read(config).versions])
    if check:
        try:
            _compare(report, _ask(config))
        except StarlingError as error:
            report.silence = f"the books are not checked: {error.message}"
    return report


def _ask(config: Config) -> dict[str, Books]:
    """The books of the running kv stage, by instance; none when it does not run. Raises `StarlingError`."""
    run_dir = paths.run_dir(config)
    try:
        told = control.call(run_dir, "kv", {"op": "books"}, ASK_S)
    except control.Unreachable:
        if any(record.stage == "kv" and record.alive for record in read_all(run_dir)):
            raise
        return {}
    return {books.model: books for books in msgspec.convert(told["models"], list[Books])}


def _compare(report: Report, books: dict[str, Books]) -> None:
    """A model that was loaded or unloaded in between has either no arena or no books, and is left alone."""
    for model in report.models:
        model.books = books.get(model.model)
        if model.books is None or not model.is_there:
            continue
        model.problems += model.books.problems()
        if (model.books.generation, model.books.total) != (model.generation, model.total):
            model.problems.append(
                f"{model.model}: the kv stage has an arena of {model.books.total} pages and generation "
                f"{model.books.generation}, and {model.arena} has {model.total} and {model.generation}: restart kv"
            )


def _model(config: Config, instance: ModelVersion, check: bool, now_ns: int) -> ModelReport:
    model = instance.settings
    path = paths.arena_dir(config) / f"{instance.slug}.kv"
    report = ModelReport(instance.id, str(path), is_there=False)
    names: dict[bytes, PageName] = {}
    try:
        arena, views, geometry = attach_kv(path)
    except FileNotFoundError:
        pass
    except (ArenaError, OSError) as error:
        report.problems.append(str(error))
    else:
        report.is_there = True
        report.fragmentation = _fragmentation(config, model.name)
        report.generation = arena.generation
        report.page_bytes, report.page_tokens = geometry.page_bytes, geometry.page_tokens
        names = _read_arena(report, views, check, now_ns)
        arena.close()
    if instance.state != "serving":  # the files are with the one that serves
        return report
    folders = [("saved", paths.state_dir(config) / "kv")]
    if model.spill_path:
        folders.append(("spilled", Path(model.spill_path).expanduser()))
    for kind, folder in folders:
        for file in stores_of(folder, model.slug):
            report.disks.append(_read_disk(kind, file, check))
    report.unreachable = _count_unreachable(names, report)
    report.sessions = list(_read_sessions(config, model, report, now_ns))
    return report


def _read_arena(report: ModelReport, views: KvArena, check: bool, now_ns: int) -> dict[bytes, PageName]:
    """Counts, runs and problems of one arena; returns the full pages by name."""
    headers = Headers(views.headers)
    report.total = len(views.pages)
    states, refs = headers.states_and_refs()
    full = states == PAGE_FULL
    report.free, report.cached, report.leased = count(states, refs)
    if report.free + report.cached + report.leased != report.total:
        report.problems.append(
            f"{report.model}: {report.free} free + {report.cached} cached + {report.leased} leased pages are not "
            f"{report.total}: {np.count_nonzero(states > PAGE_FULL)} are of no known state"
        )
    names: dict[bytes, PageName] = {}
    pages: dict[bytes, int] = {}
    for page in np.flatnonzero(full):
        name = headers.name(int(page))
        if name is not None:
            names[name.digest] = name
            pages[name.digest] = int(page)
        problem = _problem(headers, views, int(page), check)
        if problem:
            report.problems.append(f"{report.model}: page {page} {problem}")
    report.runs = _runs(names, pages, headers, refs, now_ns)
    return names


def _problem(headers: Headers, views: KvArena, page: int, check: bool) -> str:
    """What is wrong with a full page; "" when nothing is, or when it is not full any more."""
    problem = ""
    for _ in range(LOOKS):
        before = headers.record(page)
        name = headers.name(page)
        if name is None:
            problem = "has a torn header"
        elif check and checksum(views.pages[page]) != name.checksum:
            problem = "fails its checksum"
        else:
            return ""
        if headers.state(page) == PAGE_LEASED or headers.record(page)[:72] != before[:72]:
            return ""  # it was given away while we looked
    return problem


def _fragmentation(config: Config, model: str) -> float | None:
    """As the kv stage last said it in its metrics; no header tells how far a leased page is filled."""
    family = "starling_kv_cache_fragmentation_ratio"
    try:
        raw = (paths.arena_dir(config) / "kv.metrics").read_bytes()
        series = msgspec.msgpack.decode(raw, type=Snapshot).families.get(family, [])
    except (OSError, msgspec.MsgspecError):
        return None
    return next((entry.value for entry in series if entry.labels == (model, "arena")), None)


def _runs(
    names: dict[bytes, PageName], pages: dict[bytes, int], headers: Headers, refs: np.ndarray, now_ns: int
) -> list[Run]:
    """The prefix tree, its unbranched stretches as one, the largest first."""
    children: dict[bytes, list[bytes]] = {}
    for digest, name in names.items():
        children.setdefault(name.parent, []).append(digest)
    runs = []
    for digest, name in names.items():
        starts = name.parent not in names or len(children[name.parent]) > 1
        if not starts:
            continue
        members = [digest]
        while len(next_ones := children.get(members[-1], [])) == 1:
            members.append(next_ones[0])
        ids = [pages[member] for member in members]
        runs.append(
            Run(
                members[-1].hex(),
                "" if name.ordinal == 0 else name.parent.hex(),
                name.ordinal,
                len(members),
                sum(int(refs[page]) > 0 for page in ids),
                max(headers.uses(page) for page in ids),
                max(0, now_ns - max(headers.last_use_ns(page) for page in ids)) / 1e9,
            )
        )
    return sorted(runs, key=lambda run: (-run.pages, run.first, run.digest))


def _read_disk(kind: str, path: Path, check: bool) -> DiskReport:
    report = DiskReport(kind, str(path), 0, 0, 0)
    try:
        with PageFile(path) as file:
            report.file_bytes, report.slots = file.file_bytes, file.slots
            for slot, name in file.records():
                report.pages += 1
                if name is None:
                    report.problems.append(f"{path}: slot {slot} has a torn record")
                elif check and not file.is_sound(slot, name):
                    report.problems.append(f"{path}: slot {slot} fails its checksum")
            report.hole_bytes = (report.slots - report.pages) * file.page_bytes
    except (OSError, ValueError) as error:
        report.problems.append(f"{path}: {error}")
    return report


def _count_unreachable(names: dict[bytes, PageName], report: ModelReport) -> int:
    """Full pages whose predecessor is neither in the arena nor on disk."""
    missing = {d for d, name in names.items() if name.ordinal and name.parent not in names}
    if not missing:
        return 0
    on_disk: set[bytes] = set()
    for disk in report.disks:
        try:
            with PageFile(Path(disk.path)) as file:
                on_disk.update(name.digest for _, name in file.records() if name is not None)
        except (OSError, ValueError):
            continue
    return sum(names[digest].parent not in on_disk for digest in missing)


def _read_sessions(config: Config, model: ModelConfig, report: ModelReport, now_ns: int) -> Iterator[SessionReport]:
    folder = paths.state_dir(config) / "sessions"
    for path in sorted(folder.glob(f"{model.slug}-*/*{SUFFIX}")):
        try:
            raw = path.read_bytes()
        except OSError:
            continue
        session, good = parse(raw)
        if (session is None or good < len(raw)) and _stands_still(path, raw):
            report.problems.append(f"{path}: {len(raw) - good} of {len(raw)} bytes are damaged")
        if session is not None:
            yield SessionReport(
                session.id,
                session.tenant,
                len(session.tokens),
                session.turns,
                max(0.0, now_ns / 1e9 - session.last_use),
                session.ttl_s,
            )


def _stands_still(path: Path, raw: bytes) -> bool:
    """Are these still the file's bytes? Otherwise its writer was at it."""
    try:
        return path.read_bytes() == raw
    except OSError:
        return False


# ------------------------------------------------------------------ showing


def show(report: Report) -> RenderableType:
    """Tables of arenas, prefix tree, files and sessions; problems last. They fit 80 columns."""
    parts: list[RenderableType] = []
    for model in report.models:
        parts.append(_arena(model))
        if model.runs:
            parts.append(_tree(model))
        if model.sessions:
            parts.append(_sessions(model))
        if model.disks:
            parts.append(_disks(model))
    if not report.models:
        parts.append("no model is loaded: no arena, no prefixes, no sessions")
    for problem in report.problems:
        parts.append(f"[red]{problem}[/red]")
    if report.is_checked and report.models and not report.problems:
        whose = "headers and books" if any(model.books for model in report.models) else "headers"
        parts.append(f"free + cached + leased == total by the {whose}, every checksum holds")
    return Group(*parts)


def _arena(m: ModelReport) -> Table:
    title = f"KV arena of {m.model}"
    table = Table(title=title, title_justify="left", min_width=min(len(title), 80))
    # With books: all three as the kv stage counted them at one moment.
    columns = ("pages", "number", "size") if m.books is None else ("pages", "by headers", "by books", "size")
    for column in columns:
        table.add_column(column, justify="left" if column == "pages" else "right")
    if not m.is_there:
        table.add_row("no arena")
        return table
    if m.books is None:
        for name, pages in (("free", m.free), ("cached", m.cached), ("leased", m.leased), ("total", m.total)):
            table.add_row(name, f"{pages:,}", _bytes(pages * m.page_bytes))
    else:
        headers, books = m.books.headers, m.books.books
        for name, one, other in zip(Count._fields, headers, books, strict=True):
            table.add_row(name, f"{one:,}", f"{other:,}", _bytes(other * m.page_bytes))
        table.add_row("their sum", f"{sum(headers):,}", f"{sum(books):,}", _bytes(sum(books) * m.page_bytes))
        table.add_row("total", f"{m.total:,}", f"{m.books.total:,}", _bytes(m.total * m.page_bytes))
    rest = [""] * (len(columns) - 3)
    table.add_row(f"one: {m.page_tokens} tokens", "", *rest, _bytes(m.page_bytes))
    if m.unreachable:
        table.add_row("cached, the page before gone", f"{m.unreachable:,}", *rest, _bytes(m.unreachable * m.page_bytes))
    if m.fragmentation is not None:
        table.add_row("leased positions without a token", "", *rest, f"{100 * m.fragmentation:.1f} %")
    return table


def _disks(m: ModelReport) -> Table:
    table = Table(title=f"Pages of {m.model} on disk", title_justify="left")
    for column in ("kind", "pages", "slots", "size", "holes"):
        table.add_column(column, justify="left" if column == "kind" else "right")
    table.add_column("file", overflow="fold")
    for disk in m.disks:
        table.add_row(
            disk.kind,
            f"{disk.pages:,}",
            f"{disk.slots:,}",
            _bytes(disk.file_bytes),
            _bytes(disk.hole_bytes),
            disk.path,
        )
    return table


def _tree(model: ModelReport) -> Tree:
    """Prefixes: each branch is a stretch of pages that follow one another."""
    tree = Tree(f"Prefixes of {model.model} ({len(model.runs)}, the largest {MAX_RUNS})")
    shown = {run.digest: run for run in model.runs[:MAX_RUNS]}
    branches: dict[str, Tree] = {}
    for run in sorted(shown.values(), key=lambda run: run.first):
        size = _bytes(run.pages * model.page_bytes)
        held = f", {run.held} in use" if run.held else ""
        label = (
            f"{run.digest[:8]} tokens {run.first * model.page_tokens}.."
            f"{(run.first + run.pages) * model.page_tokens}, {run.pages} pages, {size}, "
            f"{run.uses} uses, idle {_age(run.idle_s)}{held}"
        )
        branches[run.digest] = branches.get(run.parent, tree).add(label)
    return tree


def _sessions(model: ModelReport) -> Table:
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
