"""`starling kv check` with a running kv process: its page table and the page headers must agree and add up."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from pipeline.errors import StarlingError
from pipeline.ipc import control
from pipeline.protocol import messages as m
from shm.pages import HEADER, PAGE_FULL
from stages.kv import inspection
from stages.kv.audit import audit
from stages.kv.lease import Grant
from stages.kv.model import ModelPages
from stages.kv.pool.page_headers import PageCounts
from starling.cli import cli
from tests.kv.process import MODEL, PAGE_TOKENS, KvProcess, Scheduler, configure, load_config, write_model

Served = tuple[KvProcess, Scheduler]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    configure(tmp_path)
    monkeypatch.setenv("STARLING_HOME", str(tmp_path))
    monkeypatch.setenv("STARLING_CONFIG", str(tmp_path / "starling.yaml"))
    return tmp_path


@pytest.fixture
def served(home: Path) -> Iterator[Served]:
    """A kv process with pages of each state: 3 cached, 2 leased, the rest free."""
    digest = write_model(home)
    with KvProcess(home) as kv, Scheduler(home, digest) as s:
        s.wait_ready()
        s.run("a", words(1, 2, 3))
        s.acquire("b", words(7))
        s.wait(lambda: s.state().leased == 2)
        yield kv, s


def words(*numbers: int) -> list[int]:
    """A page of tokens for each number, and one token more."""
    return [number for number in numbers for _ in range(PAGE_TOKENS)] + [1]


def check(s: Scheduler, exit_code: int) -> dict[str, Any]:
    """Run `starling kv check --json`: its report, with the text of the tables as `shown`."""
    runner = CliRunner(env={"COLUMNS": "80"})
    s.turn()  # a command takes long on a busy machine, and kv would discard a scheduler that is silent
    shown = runner.invoke(cli, ["kv", "check"], standalone_mode=False)
    s.turn()
    answer = runner.invoke(cli, ["kv", "check", "--json"], standalone_mode=False)
    assert shown.return_value == answer.return_value == exit_code, shown.output
    assert max(map(len, shown.output.splitlines())) <= 80
    report: dict[str, Any] = json.loads(answer.output)
    return {**report, "shown": " ".join(shown.output.split())}


def fields(s: Scheduler) -> Any:
    assert s.kv is not None
    return s.kv.headers.view(HEADER)[:, 0]


def a_cached_page(s: Scheduler) -> int:
    found = fields(s)
    return int(np.flatnonzero((found["state"] == PAGE_FULL) & (found["refs"] == 0))[0])


@pytest.mark.slow
def test_both_counts_agree_and_add_up(served: Served) -> None:
    _, s = served
    report = check(s, 0)
    (model,) = report["models"]
    audit_ = model["audit"]
    total = model["total"]
    assert audit_["page_table"] == audit_["headers"] == [total - 5, 3, 2]
    assert audit_["total"] == total
    assert audit_["is_reconciled"]
    assert "by headers" in report["shown"]
    assert "free + cached + leased == total by the headers and page table" in report["shown"]


@pytest.mark.slow
def test_headers_with_other_counts_are_found(served: Served) -> None:
    _, s = served
    page = a_cached_page(s)
    fields(s)["refs"][page] = 1
    report = check(s, 1)
    (model,) = report["models"]
    assert (model["audit"]["page_table"][1:], model["audit"]["headers"][1:]) == ([3, 2], [2, 3])
    assert "the headers say" in report["shown"]
    fields(s)["refs"][page] = 0
    check(s, 0)


@pytest.mark.slow
def test_headers_that_do_not_add_up_are_found(served: Served) -> None:
    _, s = served
    fields(s)["state"][a_cached_page(s)] = 9
    report = check(s, 1)
    assert sum(report["models"][0]["audit"]["headers"]) == report["models"][0]["total"] - 1
    assert "by the page headers" in report["shown"]


@pytest.mark.slow
def test_an_arena_that_is_not_the_stages_own_is_found(served: Served, home: Path) -> None:
    _, s = served
    assert check(s, 0)["models"][0]["is_there"]
    path = next((home / "shm").rglob("*.kv"))
    copy = bytearray(path.read_bytes())
    copy[24] ^= 1  # its generation
    path.unlink()
    path.write_bytes(copy)
    assert "restart kv" in check(s, 1)["shown"]


@pytest.mark.slow
def test_pages_that_a_successor_took_over_add_up(served: Served, home: Path) -> None:
    kv, s = served
    assert isinstance(s.acquire("c", words(1, 2, 3, 4)), m.Granted)  # shares the cached pages
    kv.kill()
    s.sequences.clear()  # the scheduler is a new one too, and holds no leases
    s.wait(lambda: s.ready is None)
    with KvProcess(home):
        s.wait_ready()
        (model,) = check(s, 0)["models"]
        assert model["audit"]["page_table"] == model["audit"]["headers"] == [model["total"] - 3, 3, 0]


@pytest.mark.slow
def test_without_the_stage_the_files_are_checked(served: Served) -> None:
    kv, s = served
    kv.kill()
    report = check(s, 0)
    assert report["models"][0]["audit"] is None
    assert "by the headers, every" in report["shown"]
    fields(s)["state"][a_cached_page(s)] = 9
    check(s, 1)


@pytest.mark.slow
def test_a_stage_that_does_not_answer_is_reported(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    kv, s = served
    monkeypatch.setattr(inspection, "AUDIT_TIMEOUT_S", 0.2)
    assert kv.process is not None
    kv.process.send_signal(signal.SIGSTOP)
    try:
        assert "the page table is not checked" in check(s, 1)["shown"]
    finally:
        kv.process.send_signal(signal.SIGCONT)
    monkeypatch.undo()


@pytest.mark.slow
def test_other_requests_are_refused(served: Served, home: Path) -> None:
    _, s = served
    with pytest.raises(StarlingError, match="'op': 'audit'"):
        control.call(home / "run", "kv", {"op": "drop everything"})
    check(s, 0)


def test_a_lease_that_lost_a_page_is_found(home: Path) -> None:
    digest = write_model(home)
    config = load_config(home)
    pages = ModelPages(config, config.model(MODEL))
    assert audit(pages) is None
    manager = pages.open(home / "models" / f"{digest}.idx")
    manager.reconcile([])
    assert isinstance(manager.acquire("a", np.ones(17, np.int32), 17), Grant)
    found = audit(pages)
    assert found is not None
    assert found.problems() == []
    manager.leases["a"].pages.pop()  # the table still counts it as leased
    found = audit(pages)
    assert found is not None
    assert found.page_table == PageCounts(found.total - 2, 0, 1)
    assert any("by the page table" in problem for problem in found.problems())
    assert any("wrong reference count" in problem for problem in found.problems())
    pages.close()
