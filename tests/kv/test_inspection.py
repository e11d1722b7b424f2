"""`starling kv` and `starling kv check`: contents and damage of arenas, page files and sessions."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from rich.console import Console

from pipeline.config import paths
from pipeline.observe.metrics import Metrics
from shm import prefix_hash
from shm.pages import KvGeometry, create_kv
from stages.kv.cache_metrics import measure
from stages.kv.inspection import inspect
from stages.kv.lease import Grant
from stages.kv.manager import Manager
from stages.kv.model import ModelPages
from stages.kv.pool.page_headers import PageHeaders
from stages.kv.pool.page_pool import PagePool
from stages.kv.report import Report
from stages.kv.storage import disk_store, persist
from stages.kv.storage.page_file import BLOCK
from stages.kv.storage.threaded_store import ThreadedPageStore
from starling.cli import cli
from starling.cli.kv_tables import render
from tests.kv.process import MODEL, configure, load_config, write_model


@pytest.fixture
def pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModelPages:
    """A model with two prompts that share a prefix, and one sequence in progress."""
    monkeypatch.setenv("STARLING_HOME", str(tmp_path))
    monkeypatch.setattr(disk_store, "SLOW_S", 60.0)  # no pause on a loaded machine
    configure(tmp_path)
    digest = write_model(tmp_path)
    config = load_config(tmp_path)
    model = ModelPages(config, config.model(MODEL))
    manager = model.open(tmp_path / "models" / f"{digest}.idx")
    manager.reconcile([])
    run(manager, "a", [1, 2, 3])
    run(manager, "b", [1, 2, 4, 5])
    assert isinstance(manager.acquire("c", np.full(17, 1, np.int32), 40), Grant)
    return model


def run(manager: Manager, who: str, words: list[int]) -> None:
    tokens = np.repeat(np.array(words, np.int32), 16)
    tokens = np.append(tokens, np.int32(9))
    assert isinstance(manager.acquire(who, tokens, len(tokens)), Grant)
    manager.release(who, len(tokens))


def save_all(pages: ModelPages) -> tuple[Manager, ThreadedPageStore]:
    """Save all pages that can be saved to the state directory, and wait until they are in the file."""
    assert pages.manager is not None
    assert pages.saved is not None
    while pages.save_some() or pages.is_writing:
        pages.poll_stores()
    return pages.manager, pages.saved


def text(report: Report) -> str:
    console = Console(record=True, width=80, file=open(os.devnull, "w"))  # noqa: SIM115
    with console.file:
        console.print(render(report))
    return console.export_text()


def test_without_models_the_report_says_so() -> None:
    for is_checked in (False, True):
        assert text(Report(is_checked, [])).strip() == "no model is loaded: no arena, no prefixes, no sessions"


def test_shows_arena_prefixes_files_and_sessions(pages: ModelPages) -> None:
    manager, _ = save_all(pages)
    sessions = pages.sessions
    assert sessions is not None
    sessions.begin(b"g", "tenant", "chat-1", create=True)
    sessions.commit(b"g", "tenant", "chat-1", 1, 0, np.arange(40, dtype=np.int32).tobytes())
    report = inspect(pages.config, check=True)
    (m,) = report.models
    assert report.problems == []
    assert (m.total, m.free, m.cached, m.leased) == (
        manager.pool.total,
        manager.pool.free,
        manager.pool.cached,
        manager.pool.leased,
    )
    assert m.free + m.cached + m.leased == m.total
    assert [(run.first, run.pages, run.held) for run in m.runs] == [(0, 2, 1), (2, 2, 0), (2, 1, 0)]
    assert m.runs[1].parent == m.runs[2].parent == m.runs[0].digest
    assert [(s.id, s.tokens, s.turns) for s in m.sessions] == [("chat-1", 40, 1)]
    assert [(disk.kind, disk.pages) for disk in m.disks] == [("saved", 2)]
    shown = text(report)
    assert max(map(len, shown.splitlines())) <= 80
    for piece in ("tokens 0..32, 2 pages", "1 in use", "chat-1", "every checksum is correct"):
        assert piece in shown


def test_sessions_of_a_model_with_a_longer_name_are_not_those_of_this_one(pages: ModelPages) -> None:
    save_all(pages)
    other = paths.state_dir(pages.config) / "sessions" / f"{MODEL}-large-0123456789ab" / "x.session"
    other.parent.mkdir(parents=True)
    other.write_bytes(b"nonsense")
    assert inspect(pages.config, check=True).problems == []


def test_works_without_a_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STARLING_HOME", str(tmp_path))
    configure(tmp_path)
    report = inspect(load_config(tmp_path), check=True)
    assert not report.models[0].is_there
    assert "no arena" in text(report)


def test_check_finds_every_kind_of_damage(pages: ModelPages) -> None:
    manager, saved = save_all(pages)
    assert inspect(pages.config, check=True).problems == []
    cached = manager.pool.table.evictable_pages()
    manager.pool.arena.pages[cached[0], 100] ^= 1
    manager.pool.arena.headers[cached[1], 3] ^= 1
    os.pwrite(saved._store._fd, b"damage", 2 * BLOCK + 50)
    session = paths.state_dir(pages.config) / "sessions" / f"{MODEL}-{pages.tokenizer[:12]}" / "x.session"
    session.write_bytes(b"nonsense")
    problems = "\n".join(inspect(pages.config, check=True).problems)
    for piece in (
        f"page {cached[0]} fails its checksum",
        f"page {cached[1]} has a torn header",
        "cell 0 fails its checksum",
        "8 of 8 bytes are damaged",
    ):
        assert piece in problems
    assert f"page {cached[0]}" not in "\n".join(inspect(pages.config).problems)  # not without check


def test_a_page_in_the_middle_of_a_lease_is_not_damaged(pages: ModelPages, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kv stage evicts a page after the check has seen it, and has no core between two stores of its next lease."""
    assert pages.manager is not None
    pool, look = pages.manager.pool, PageHeaders.states_and_refs
    page = pool.table.evictable_pages()[0]

    def look_before(headers: PageHeaders) -> tuple[np.ndarray, ...]:
        found = tuple(one.copy() for one in look(headers))
        pool.headers.free(page)
        pool.arena.headers[page, :16] ^= 1  # the root
        return found

    monkeypatch.setattr(PageHeaders, "states_and_refs", look_before)
    assert inspect(pages.config, check=True).problems == []


def test_counts_unreachable_pages(tmp_path: Path) -> None:
    geometry = KvGeometry(1, 1, 32, 16, "f16")
    configure(tmp_path)
    config = load_config(tmp_path)
    path = paths.arena_dir(config) / f"{MODEL}.kv"
    arena, views = create_kv(path, geometry, 6, bytes(32), 1)
    roots = prefix_hash.root_hasher(bytes(32), geometry)
    manager = Manager(PagePool(views), 16, roots, lambda *_: None)
    run(manager, "a", [1, 2, 3])
    assert inspect(config).models[0].unreachable == 0
    manager.pool.remove(prefix_hash.page_hashes(roots(""), np.full(16, 1, np.int32), 16))
    assert inspect(config).models[0].unreachable == 1
    arena.close()


def test_identity_is_in_the_name_of_the_file(tmp_path: Path) -> None:
    geometry = KvGeometry(1, 1, 32, 16, "f16")
    names = {
        persist.store_path(tmp_path, "m", digest, g)
        for digest in ("a" * 64, "b" * 64)
        for g in (geometry, geometry._replace(kv_type="f32"), geometry._replace(page_tokens=32))
    }
    assert len(names) == 6


@pytest.mark.parametrize("what", ["digest", "numerics"])
def test_pages_of_another_version_are_not_used(pages: ModelPages, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file's name has twelve digits of the digest; its identity has all, and the numerics version."""
    assert len(save_all(pages)[1]) == 2
    pages.close_files()
    digest = pages.digest
    if what == "digest":
        pages.digest = digest[:12] + digest[12:][::-1]
        assert pages.digest != digest
    else:
        monkeypatch.setattr(persist, "NUMERICS", persist.NUMERICS + 1)
    pages.open_files()
    assert pages.saved is not None
    pages.saved.wait_opened(60)
    pages.poll_stores()
    assert pages.saved is not None
    assert pages.saved.is_open
    assert len(pages.saved) == 0
    pages.close()


def test_files_of_old_versions_are_removed(tmp_path: Path) -> None:
    geometry = KvGeometry(1, 1, 32, 16, "f16")
    paths_ = [persist.store_path(tmp_path, "m", f"{i:064x}"[::-1], geometry) for i in range(5)]
    other = persist.store_path(tmp_path, "m-2", "f" * 64, geometry)
    for age, path in enumerate([*paths_, other]):
        path.write_bytes(b"x")
        os.utime(path, (age, age))
    assert persist.page_files(tmp_path, "m") == paths_
    assert persist.remove_old_versions(tmp_path, "m", paths_[1]) == [paths_[0], paths_[2], paths_[3]]
    assert sorted(tmp_path.iterdir()) == sorted([paths_[1], paths_[4], other])


def test_idle_pages_are_saved_and_replace_none(pages: ModelPages) -> None:
    manager, saved = save_all(pages)
    assert len(saved) == 2  # "c" runs: only pages that two sequences have held
    manager.release("c", 17)
    save_all(pages)
    assert len(saved) == manager.pool.cached == 5
    run(manager, "d", [7, 8])
    saved._store._max_extents = 0  # no room
    assert not pages.save_some()
    assert saved.counters.replaced == 0


def test_the_command(pages: ModelPages, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STARLING_CONFIG", str(tmp_path / "starling.yaml"))
    runner = CliRunner()
    shown = runner.invoke(cli, ["kv", "--json"], standalone_mode=False)
    assert json.loads(shown.output)["models"][0]["cached"] == 4
    assert runner.invoke(cli, ["kv", "check"], standalone_mode=False).return_value == 0
    assert pages.manager is not None
    pool = pages.manager.pool
    pool.arena.pages[pool.table.evictable_pages()[0], 5] ^= 1
    damaged = runner.invoke(cli, ["kv", "check"], standalone_mode=False)
    assert damaged.return_value == 1
    assert "fails its checksum" in damaged.output


def test_fragmentation_is_shown(pages: ModelPages, tmp_path: Path) -> None:
    assert inspect(pages.config).models[0].fragmentation is None  # there are no metrics yet
    manager, saved = save_all(pages)
    metrics = Metrics("kv", paths.arena_dir(pages.config))
    measure([pages], metrics)
    metrics.write()
    (m,) = inspect(pages.config).models
    assert m.fragmentation == pytest.approx(manager.fragmentation())
    assert m.fragmentation > 0  # "c" has 17 tokens in 3 pages
    (disk,) = m.disks
    assert disk.hole_bytes == saved.hole_bytes == (disk.cells - disk.pages) * m.page_bytes
    shown = text(inspect(pages.config))
    assert f"{100 * m.fragmentation:.1f} %" in shown


def test_an_unloaded_model_has_no_fragmentation(pages: ModelPages) -> None:
    metrics = Metrics("kv", None)

    def shown(models: list[ModelPages]) -> frozenset[tuple[str, ...]]:
        measure(models, metrics)
        return metrics.label_sets("starling_kv_cache_fragmentation_ratio")

    assert (MODEL, "arena") in shown([pages])
    assert shown([]) == set()


def test_the_number_of_spilled_pages_does_not_fall_when_the_file_is_empty(pages: ModelPages) -> None:
    _, store = save_all(pages)
    pages.spilled, pages.saved = store, None
    metrics, stored = Metrics("kv", None), store.counters.stored

    def shown() -> list[float]:
        measure([pages], metrics)
        return [one.value for one in metrics.snapshot().families["starling_kv_cache_spilled_pages_total"]]

    assert shown() == [stored]
    for page_hash in store.hashes():
        store.remove(page_hash)
    while len(store):
        store.poll()
    assert shown() == [stored] != [0]


def test_states_that_do_not_add_up_are_reported(pages: ModelPages) -> None:
    assert pages.manager is not None
    pages.manager.pool.arena.headers[pages.manager.pool.table.evictable_pages()[0], 72] = 9
    (problem, *_) = inspect(pages.config).problems
    assert "are not" in problem
    assert "1 are of no known state" in problem
