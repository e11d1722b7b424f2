"""Reads what the kv stage stores, from another process, for `starling kv` and `starling kv check`.

Reads arenas and state files and writes nothing; works with and without a running server.  A running server changes
pages meanwhile, so an apparent problem is read again before it is reported.  A check also requests an audit from the kv
stage, because only the stage can count pages while none of them changes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np

from pipeline.config import paths
from pipeline.config.schema import Config, ModelConfig
from pipeline.config.user_home import expand_user
from pipeline.errors import StarlingError
from pipeline.ipc import control
from pipeline.models import versions
from pipeline.models.versions import ModelVersion
from pipeline.observe.metrics import Snapshot
from pipeline.observe.status import read_all
from pipeline.runtime.steady_clock import clock_path, read_ns
from shm.arena import ArenaError
from shm.decoding import DECODE_ERRORS
from shm.layer_groups import LayerGroups
from shm.pages import PAGE_FULL, KvArena, attach_kv, unpack_ordinal
from shm.prefix_hash import PageHash, group_hash
from stages.kv.audit import PageAudit
from stages.kv.pool.page_headers import PageHeaders, PageIdentity, checksum, count_states
from stages.kv.report import DiskReport, ModelReport, Report, Run, SessionReport
from stages.kv.sessions.model_sessions import TAG_DIGITS
from stages.kv.sessions.session_files import SUFFIX, parse
from stages.kv.storage.page_file import PageFile
from stages.kv.storage.persist import page_files

AUDIT_TIMEOUT_S = 30.0  # for the kv stage's answer: it may be reserving an arena
READ_ATTEMPTS = 3  # for a page that looks damaged


def inspect(config: Config, check: bool = False, now_ns: int | None = None) -> Report:
    """Read all models. `check` verifies every checksum, in the arena and on disk, and requests an audit."""
    now = read_ns(clock_path(paths.state_dir(config), "kv")) if now_ns is None else now_ns
    report = Report(check, [_read_model(config, version, check, now) for version in versions.read(config).versions])
    if check:
        try:
            _add_audits(report, _request_audits(config))
        except StarlingError as error:
            report.audit_error = f"the page table is not checked: {error.message}"
    return report


def _request_audits(config: Config) -> dict[str, PageAudit]:
    """The audits of the running kv stage, by version; none when it does not run. Raises `StarlingError`."""
    run_dir = paths.run_dir(config)
    try:
        answer = control.call(run_dir, "kv", {"op": "audit"}, AUDIT_TIMEOUT_S)
    except control.Unreachable:
        if any(record.stage == "kv" and record.alive for record in read_all(run_dir)):
            raise
        return {}
    return {audit.model: audit for audit in msgspec.convert(answer["models"], list[PageAudit])}


def _add_audits(report: Report, audits: dict[str, PageAudit]) -> None:
    """Add the audits, except for versions that were loaded or removed in between and lack an arena or an audit."""
    for model in report.models:
        audit = model.audit = audits.get(model.model)
        if audit is None or not model.is_there:
            continue
        model.problems += audit.problems()
        if (audit.generation, audit.total) != (model.generation, model.total):
            model.problems.append(
                f"{model.model}: the kv stage has an arena of {audit.total} pages and generation "
                f"{audit.generation}, and {model.arena} has {model.total} and {model.generation}: restart kv"
            )


def _read_model(config: Config, version: ModelVersion, check: bool, now_ns: int) -> ModelReport:
    model = version.settings
    path = paths.arena_dir(config) / f"{version.slug}.kv"
    report = ModelReport(version.id, str(path), is_there=False)
    identities: dict[PageHash, PageIdentity] = {}
    try:
        arena, views, geometry = attach_kv(path)
    except FileNotFoundError:
        pass
    except (ArenaError, OSError) as error:
        report.problems.append(str(error))
    else:
        report.is_there = True
        report.fragmentation = _read_fragmentation(config, model.name)
        report.generation = arena.generation
        report.page_bytes, report.page_tokens = geometry.page_bytes, geometry.page_tokens
        identities = _read_arena(report, views, geometry.groups, check, now_ns)
        arena.close()
    if version.state != "serving":  # the serving version has the files
        return report
    folders = [("saved", paths.state_dir(config) / "kv")]
    if model.spill_path:
        folders.append(("spilled", expand_user(model.spill_path)))
    for kind, folder in folders:
        for file in page_files(folder, model.slug):
            report.disks.append(_read_disk(kind, file, check))
    report.unreachable = _count_unreachable(identities, report)
    report.sessions = list(_read_sessions(config, model, report, now_ns))
    return report


def _read_arena(
    report: ModelReport, views: KvArena, groups: LayerGroups, check: bool, now_ns: int
) -> dict[PageHash, PageIdentity]:
    """Add counts, runs and problems of one arena; returns the full pages of its first layer group by their hashes."""
    headers = PageHeaders(views.headers)
    report.total = len(views.pages)
    states, refs = headers.states_and_refs()
    full = states == PAGE_FULL
    report.free, report.cached, report.leased = count_states(states, refs)
    if report.free + report.cached + report.leased != report.total:
        report.problems.append(
            f"{report.model}: {report.free} free + {report.cached} cached + {report.leased} leased pages are not "
            f"{report.total}: {np.count_nonzero(states > PAGE_FULL)} are of no known state"
        )
    identities: dict[PageHash, PageIdentity] = {}
    pages: dict[PageHash, int] = {}
    for page in np.flatnonzero(full):
        identity = headers.identity(int(page))
        if identity is not None:
            identities[identity.page_hash] = identity
            pages[identity.page_hash] = int(page)
        problem = _find_damage(headers, views, int(page), check)
        if problem:
            report.problems.append(f"{report.model}: page {page} {problem}")
    first_group = {
        page_hash: identity for page_hash, identity in identities.items() if not unpack_ordinal(identity.ordinal)[1]
    }
    report.runs = _find_runs(first_group, pages, groups, headers, refs, now_ns)
    return first_group


def _find_damage(headers: PageHeaders, views: KvArena, page: int, check: bool) -> str:
    """What is wrong with a full page; "" when nothing is, or when it is no longer full."""
    problem = ""
    for _ in range(READ_ATTEMPTS):
        before = headers.record(page)
        identity = headers.identity(page)
        if identity is None:
            problem = "has a torn header"
        elif check and checksum(views.pages[page]) != identity.checksum:
            problem = "fails its checksum"
        else:
            return ""
        if headers.state(page) != PAGE_FULL or headers.record(page)[:72] != before[:72]:
            return ""  # it was evicted meanwhile, and may be in the middle of a lease
    return problem


def _read_fragmentation(config: Config, model: str) -> float | None:
    """Fragmentation from the kv stage's last metrics: page headers do not contain how far a leased page is filled."""
    family = "starling_kv_cache_fragmentation_ratio"
    try:
        raw = (paths.arena_dir(config) / "kv.metrics").read_bytes()
        series = msgspec.msgpack.decode(raw, type=Snapshot).families.get(family, [])
    except (OSError, *DECODE_ERRORS):
        return None
    return next((entry.value for entry in series if entry.labels == (model, "arena")), None)


def _find_runs(
    identities: dict[PageHash, PageIdentity],
    pages: dict[PageHash, int],
    groups: LayerGroups,
    headers: PageHeaders,
    refs: np.ndarray,
    now_ns: int,
) -> list[Run]:
    """The prefix tree with each unbranched path as one run, the largest first."""
    children: dict[PageHash, list[PageHash]] = {}
    for page_hash, identity in identities.items():
        children.setdefault(identity.parent, []).append(page_hash)
    runs = []
    for page_hash, identity in identities.items():
        starts_run = identity.parent not in identities or len(children[identity.parent]) > 1
        if not starts_run:
            continue
        members = [page_hash]
        while len(following := children.get(members[-1], [])) == 1:
            members.append(following[0])
        ids = [pages[member] for member in members]
        others = (group_hash(member, group) for member in members for group in range(1, groups.n_groups))
        runs.append(
            Run(
                members[-1].hex(),
                "" if identity.ordinal == 0 else identity.parent.hex(),
                identity.ordinal,
                len(members),
                sum(int(refs[page]) > 0 for page in ids),
                max(headers.uses(page) for page in ids),
                max(0, now_ns - max(headers.last_use_ns(page) for page in ids)) / 1e9,
                sum(other in pages for other in others),
            )
        )
    return sorted(runs, key=lambda run: (-run.pages, run.first, run.digest))


def _read_disk(kind: str, path: Path, check: bool) -> DiskReport:
    report = DiskReport(kind, str(path), 0, 0, 0)
    try:
        with PageFile(path) as file:
            report.file_bytes, report.cells = file.file_bytes, file.n_cells
            for cell, identity in file.records():
                report.pages += 1
                if identity is None:
                    report.problems.append(f"{path}: cell {cell} has a torn record")
                elif check and not file.is_intact(cell, identity):
                    report.problems.append(f"{path}: cell {cell} fails its checksum")
            report.hole_bytes = (report.cells - report.pages) * file.page_bytes
    except (OSError, ValueError) as error:
        report.problems.append(f"{path}: {error}")
    return report


def _count_unreachable(identities: dict[PageHash, PageIdentity], report: ModelReport) -> int:
    """Number of full pages whose previous page is neither in the arena nor on disk."""
    missing = {h for h, identity in identities.items() if identity.ordinal and identity.parent not in identities}
    if not missing:
        return 0
    on_disk: set[PageHash] = set()
    for disk in report.disks:
        try:
            with PageFile(Path(disk.path)) as file:
                on_disk.update(identity.page_hash for _, identity in file.records() if identity is not None)
        except (OSError, ValueError):
            continue
    return sum(identities[page_hash].parent not in on_disk for page_hash in missing)


def _read_sessions(config: Config, model: ModelConfig, report: ModelReport, now_ns: int) -> Iterator[SessionReport]:
    folder = paths.state_dir(config) / "sessions"
    own = re.compile(re.escape(model.slug) + rf"-[0-9a-f]{{{TAG_DIGITS}}}")
    for path in sorted(folder.glob(f"{model.slug}-*/*{SUFFIX}")):
        if not own.fullmatch(path.parent.name):
            continue  # of a model whose name begins with this one's
        try:
            raw = path.read_bytes()
        except OSError:
            continue
        session, n_intact = parse(raw)
        if (session is None or n_intact < len(raw)) and _is_unchanged(path, raw):
            report.problems.append(f"{path}: {len(raw) - n_intact} of {len(raw)} bytes are damaged")
        if session is not None:
            yield SessionReport(
                session.id,
                session.tenant,
                len(session.tokens),
                session.turns,
                max(0.0, now_ns / 1e9 - session.last_use),
                session.ttl_s,
            )


def _is_unchanged(path: Path, raw: bytes) -> bool:
    """Whether these are still the file's bytes; otherwise its writer is appending to it."""
    try:
        return path.read_bytes() == raw
    except OSError:
        return False
