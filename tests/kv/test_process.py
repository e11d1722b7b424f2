"""A real kv process: its frames, kills, clean stops and a reboot."""

from __future__ import annotations

import random
import select
import shutil
import signal
from array import array
from pathlib import Path

import msgspec
import pytest

from pipeline.config import paths
from pipeline.files import replace_file
from pipeline.models import versions
from pipeline.protocol import messages as m
from shm.pages import attach_kv, pages_offset
from stages.kv.stage import KvStage
from tests.kv.process import (
    PAGE_TOKENS,
    WAIT_S,
    Gateway,
    KvProcess,
    Scheduler,
    configure,
    load_config,
    n_saved,
    write_model,
)

pytestmark = pytest.mark.slow


def words(*numbers: int) -> list[int]:
    """A page of tokens for each number, and one token more."""
    return [number for number in numbers for _ in range(PAGE_TOKENS)] + [1]


@pytest.fixture
def home(tmp_path: Path) -> Path:
    configure(tmp_path)
    return tmp_path


def test_serves_over_its_socket(home: Path) -> None:
    digest = write_model(home)
    with KvProcess(home), Scheduler(home, digest) as s:
        ready = s.wait_ready()
        assert ready.page_tokens == PAGE_TOKENS
        assert ready.pages * ready.page_bytes <= 1 << 20
        assert s.run("a", words(1, 2, 3)).cached_tokens == 0
        assert s.run("b", words(1, 2, 4)).cached_tokens == 2 * PAGE_TOKENS
        assert s.run("c", words(1, 2, 3), salt="other").cached_tokens == 0
        assert s.run("d", words(1, 2, 3)[:-1]).cached_tokens == 2 * PAGE_TOKENS  # its last token is computed
        state = s.state()
        assert (state.leased, state.cached) == (0, 7)
        s.wait_total("starling_kv_cache_hits_total", 4)
        # More than the arena has.
        denied = s.acquire("e", words(9), ahead=1 << 20)
        assert isinstance(denied, m.Denied)
        assert not denied.fits


def test_lines_about_a_sequence_name_its_request(home: Path) -> None:
    digest = write_model(home)
    with KvProcess(home) as kv, Scheduler(home, digest) as s:
        name = s.wait_ready().model
        assert s.link.send(m.Acquire(900, name, "req-9/0", 1 << 20, 1, PAGE_TOKENS))
        s.take(m.Denied, id=900)
        assert s.link.send(m.Commit("no-such-model", "req-8/1", 1))
        s.wait(lambda: "not attached" in kv.log())
        lines = kv.log().splitlines()
    for event, ids in (
        ("row out of bounds", ("request_id=req-9 ", "sequence=req-9/0")),
        ("a frame for a model that is not attached", ("request_id=req-8 ", "sequence=req-8/1")),
    ):
        assert any(event in line and all(one in line for one in ids) for line in lines), lines


def test_grows_and_denies_when_full(home: Path) -> None:
    digest = write_model(home)
    with KvProcess(home), Scheduler(home, digest) as s:
        total = s.wait_ready().pages
        half = total // 2 * PAGE_TOKENS
        rest = (total - 4) * PAGE_TOKENS - half
        assert isinstance(s.acquire("a", words(1), ahead=half), m.Granted)
        assert isinstance(s.acquire("b", words(2), ahead=rest), m.Granted)
        s.link.send(m.Extend(900, s.ready.model, "a", total * PAGE_TOKENS))  # type: ignore[union-attr]
        denied = s.take(m.Denied, id=900)
        assert denied.fits
        assert denied.needed_pages > denied.free_pages
        s.release("b")
        s.link.send(m.Extend(901, s.ready.model, "a", total * PAGE_TOKENS))  # type: ignore[union-attr]
        assert len(s.take(m.Granted, id=901).pages) == total


def test_a_scheduler_that_attaches_before_the_arena_of_a_load_is_open_is_not_refused(home: Path) -> None:
    """It would report the refusal, and ask again only after a while."""
    digest = write_model(home)
    config = load_config(home)
    table = versions.initial(config)
    with KvProcess(home), Scheduler(home, digest) as s:
        s.wait_ready()
        for serial in range(1, 6):
            serving = table.versions[0]
            loading = msgspec.structs.replace(serving, serial=serial, state="loading", digest=digest)
            versions.write(config, msgspec.structs.replace(table, serial=serial, versions=(serving, loading)))
            s.link.send(m.KvAttach(loading.id, digest, str(s.steps_path)))
            ready = s.take(m.KvReady, model=loading.id)
            assert ready.error == ""
            # The first pages have memory before the request comes that the version is loaded for.
            arena, _, _ = attach_kv(Path(ready.arena_path), bytes.fromhex(digest))
            assert arena.reserved >= pages_offset(ready.pages) + ready.page_bytes
            arena.close()


def test_a_scheduler_that_replaces_its_step_arena_gets_an_answer_for_the_new_one(home: Path) -> None:
    """It waits for that before it attaches a worker. The leases stay; tokens are read from the new rows."""
    digest = write_model(home)
    with KvProcess(home), Scheduler(home, digest) as s:
        s.wait_ready()
        held = s.acquire("held", words(1, 2))
        s.frames.clear()
        s.replace_steps(generation=2)
        assert s.take(m.KvReady).reconciled
        s.run("old", words(5, 6))
        assert s.acquire("next", words(5, 6, 7)).cached_tokens == 2 * PAGE_TOKENS
        assert set(held.pages).isdisjoint(s.sequences["next"]["pages"])


def test_only_the_table_of_versions_wakes_it(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other stages replace their records in the same directory twice a second."""
    write_model(home)
    monkeypatch.setenv("STARLING_HOME", str(home))
    config = load_config(home)
    stage = KvStage(config)
    try:
        replace_file(paths.run_dir(config) / "scheduler.status", b"{}")
        assert not select.select([stage._changes], [], [], 0)[0]
        table = versions.initial(config)
        loading = msgspec.structs.replace(table.versions[0], serial=1, state="loading")
        versions.write(config, msgspec.structs.replace(table, serial=1, versions=(*table.versions, loading)))
        while set(stage.versions.by_id) != {"tiny", loading.id}:
            stage.loop.poll(60.0)
            stage._work()
        assert not select.select([stage._changes], [], [], 0)[0]
    finally:
        stage.loop.quit(0)
        assert stage.run() == 0


def test_a_successor_continues_the_leases(home: Path) -> None:
    digest = write_model(home)
    with Scheduler(home, digest) as s:
        with KvProcess(home) as kv:
            s.wait_ready()
            s.run("old", words(1, 2))
            held = s.acquire("held", words(1, 2, 3, 4), ahead=40)
            assert held.cached_tokens == 2 * PAGE_TOKENS
            s.compute("held", 3 * PAGE_TOKENS)
            s.acquire("fresh", words(7, 8))
            s.state()
            kv.kill()
            s.wait(lambda: s.ready is None)
        with KvProcess(home):
            s.wait_ready()
            # Computed while no kv process ran, with tokens that kv has not read before.
            s.compute("held")
            s.compute("fresh")
            s.release("fresh")
            assert s.acquire("next", words(1, 2, 3, 4, 5)).cached_tokens == 4 * PAGE_TOKENS
            s.check("next", 4 * PAGE_TOKENS)
            assert s.acquire("again", words(7, 8, 9)).cached_tokens == 2 * PAGE_TOKENS
            assert set(s.sequences["next"]["pages"][4:]).isdisjoint(held.pages)
            for name in ("held", "next", "again"):
                s.release(name)
            assert s.state().leased == 0


def test_a_row_that_was_taken_over_is_not_read(home: Path) -> None:
    """A late frame of a sequence whose row has a new sequence must not cache pages under wrong hashes."""
    digest = write_model(home)
    with KvProcess(home), Scheduler(home, digest) as s:
        s.wait_ready()
        s.acquire("a", [1], ahead=40)
        s.sequences["a"]["tokens"] = words(5, 6)  # its output
        row = s.sequences["a"]["row"]
        s.compute("a")  # commits 33 tokens, of which the row has one
        s.steps.row_ints[row, 10] += 1000
        s.steps.tokens[row, :33] = words(8, 8)
        s.release("a")
        assert s.run("b", words(8, 8, 8)).cached_tokens == 0


@pytest.mark.parametrize("seed", range(3))
def test_killed_at_random_moments(home: Path, seed: int) -> None:
    """Pages are conserved, and no sequence receives a page of other tokens."""
    chance = random.Random(seed)
    digest = write_model(home)
    with Scheduler(home, digest) as s:
        count = 0
        for _ in range(4):
            with KvProcess(home) as kv:
                s.wait_ready()
                for _ in range(chance.randrange(1, 25)):
                    count += 1
                    tokens = words(*(chance.randrange(3) for _ in range(chance.randrange(1, 5))))
                    names = list(s.sequences)
                    if len(names) > 3 or (names and chance.random() < 0.3):
                        name = chance.choice(names)
                        s.compute(name)
                        s.release(name)
                    elif isinstance(answer := s.acquire(f"s{count}", tokens), m.Granted):
                        s.check(f"s{count}", answer.cached_tokens)
                        if chance.random() < 0.5:
                            s.compute(f"s{count}", chance.randrange(answer.cached_tokens, len(tokens)))
                # Some frames are in transit, some are being read, and one answer is never received.
                pending = f"p{count}"
                s.ask(pending, words(1, 2))
                for name in list(s.sequences)[:2]:
                    if s.sequences[name]["pages"]:
                        s.compute(name)
                        s.release(name)
                kv.kill()
                s.rows.append(s.sequences.pop(pending)["row"])
                s.wait(lambda: s.ready is None)
        with KvProcess(home):
            s.wait_ready()
            for name in list(s.sequences):
                s.compute(name)
                s.release(name)
            assert s.state().leased == 0
            for first in range(3):
                for second in range(3):
                    s.run(f"end{first}{second}", words(first, second))


def test_the_next_start_finds_the_pages_that_a_clean_stop_saved(home: Path) -> None:
    digest = write_model(home)
    tokens = words(*range(1, 7))
    with KvProcess(home) as kv, Scheduler(home, digest) as s:
        s.wait_ready()
        s.run("a", tokens)
        s.state()
        s.stopping = True  # the whole server ends
        s.turn()
        s.state()  # kv has read the heartbeat that says so, for which it would wait a moment only
        assert kv.process is not None
        kv.process.send_signal(signal.SIGTERM)
        s.wait(lambda: "stopping" in (s.link.last_heartbeat.reason if s.link.last_heartbeat else ""))
        s.close()
        assert kv.process.wait(60) == 0
    shutil.rmtree(home / "shm")  # a reboot, or the end of the last stage
    with KvProcess(home), Scheduler(home, digest) as s:
        s.wait_ready()
        s.wait_total("starling_kv_cache_warmed_pages_total", 6)  # before a request comes
        assert s.run("b", tokens).cached_tokens == 6 * PAGE_TOKENS
        s.wait_total("starling_kv_cache_warm_hits_total", 6)
        assert s.total("starling_kv_cache_restored_pages_total") == 0


def test_proven_pages_survive_a_power_cut(home: Path) -> None:
    """Others follow when no sequence runs."""
    digest = write_model(home)
    with KvProcess(home) as kv, Scheduler(home, digest) as s:
        s.wait_ready()
        s.acquire("runs", [7])
        s.run("a", words(1, 2, 3))
        s.run("b", words(1, 2, 4))
        s.wait(lambda: n_saved(home) == 2)
        kv.kill()
    shutil.rmtree(home / "shm")
    with KvProcess(home), Scheduler(home, digest) as s:
        s.wait_ready()
        assert s.run("c", words(1, 2, 5)).cached_tokens == 2 * PAGE_TOKENS


def test_all_pages_survive_a_power_cut_after_an_idle_period(home: Path) -> None:
    digest = write_model(home)
    with KvProcess(home) as kv, Scheduler(home, digest) as s:
        s.wait_ready()
        s.acquire("runs", [7])
        s.run("a", words(1, 2, 3))

        s.release("runs")
        s.wait(lambda: n_saved(home) == 3)
        kv.kill()
    shutil.rmtree(home / "shm")
    with KvProcess(home), Scheduler(home, digest) as s:
        s.wait_ready()
        assert s.run("c", words(1, 2, 3, 4)).cached_tokens == 3 * PAGE_TOKENS


def test_evicted_pages_are_restored_from_the_spill_file(home: Path) -> None:
    configure(home, spill_path=str(home / "spill"), spill_mb=8)
    digest = write_model(home)
    with KvProcess(home), Scheduler(home, digest) as s:
        total = s.wait_ready().pages
        s.run("a", words(1, 2, 3))
        assert isinstance(s.acquire("flood", [5], ahead=total * PAGE_TOKENS - 1), m.Granted)
        s.release("flood")
        s.wait_total("starling_kv_cache_spilled_pages_total", 3)
        assert s.run("b", words(1, 2, 3, 4)).cached_tokens == 3 * PAGE_TOKENS


def test_a_full_disk_only_costs_the_copies(home: Path) -> None:
    configure(home, spill_path=str(home / "spill"), spill_mb=8)
    digest = write_model(home)
    with KvProcess(home, "disk:enospc@spill, disk:eio@saved") as kv, Scheduler(home, digest) as s:
        total = s.wait_ready().pages
        n_runs = 0

        def run_and_evict() -> int:
            """Tokens that a sequence has found. Its pages go to the spill file afterwards, if they can."""
            nonlocal n_runs
            n_runs += 1
            found: int = s.run(f"a{n_runs}", words(1, 2, 3)).cached_tokens
            s.acquire("flood", [5], ahead=total * PAGE_TOKENS - 1)
            s.release("flood")
            return found

        assert run_and_evict() == 0
        s.wait(lambda: "No space left on device" in kv.log())
        # Until the thread has tried, the copies that wait to be written answer for the pages.
        s.wait(lambda: run_and_evict() == 0)

        def found_or_missing() -> float:
            return s.total("starling_kv_cache_hits_total") + s.total("starling_kv_cache_misses_total")

        s.wait(lambda: found_or_missing() == 3 * n_runs)  # the metrics are of now
        assert s.total("starling_kv_cache_spilled_pages_total") == 0
        assert s.total("starling_kv_cache_disk_errors_total") > 0
        assert kv.kill(signal.SIGTERM) == 0


@pytest.mark.parametrize("page", [1, 2, 3])
def test_killed_while_it_caches_a_page(home: Path, page: int) -> None:
    digest = write_model(home)
    with Scheduler(home, digest) as s:
        with KvProcess(home, f"kv:kill@page={page}") as kv:
            s.wait_ready()
            s.acquire("a", words(1, 2, 3))
            s.compute("a")
            assert kv.process is not None
            assert kv.process.wait(WAIT_S) == -signal.SIGKILL
            s.wait(lambda: s.ready is None)
        with KvProcess(home):
            s.wait_ready()
            assert s.state().cached == 0  # the reconciled lease holds them
            s.release("a")
            assert s.run("b", words(1, 2, 3)).cached_tokens == 3 * PAGE_TOKENS


def test_another_version_of_the_model_starts_empty(home: Path) -> None:
    first = write_model(home)
    with KvProcess(home) as kv, Scheduler(home, first) as s:
        s.wait_ready()
        s.run("a", words(1, 2))
        kv.kill()
    second = write_model(home, seed=1)
    assert second != first
    with KvProcess(home) as kv, Scheduler(home, second) as s:
        s.wait_ready()
        assert s.run("b", words(1, 2)).cached_tokens == 0
        s.wait(lambda: "belongs to model" in kv.log())


def test_an_arena_that_does_not_fit_is_reported(home: Path) -> None:
    configure(home, kv_cache_mb=16_000_000)
    digest = write_model(home)
    with KvProcess(home) as kv, Scheduler(home, digest) as s:
        reason = "free; make the arena smaller (kv_cache_mb"
        s.wait(lambda: any(isinstance(f, m.KvReady) and reason in f.error for f in s.frames))
        s.wait(lambda: (last := s.link.last_heartbeat) and "kv_cache_mb" in last.reason)
        assert not s.link.last_heartbeat.ready  # type: ignore[union-attr]
        assert kv.process is not None
        assert kv.process.poll() is None  # it keeps running


def test_sessions_over_the_socket(home: Path) -> None:
    digest = write_model(home)
    gateway = Gateway(home)
    tokens = words(1, 2)
    with Scheduler(home, digest) as s:
        with KvProcess(home) as kv:
            s.wait_ready()
            gateway.wait(is_up=True)
            held = gateway.ask(m.SessionBegin(1, "tiny", "t", create=True))
            assert isinstance(held, m.SessionHeld)
            assert (held.turn, held.tokens) == (1, b"")
            s.run("turn", tokens)
            raw = array("i", tokens).tobytes()
            done = gateway.ask(m.SessionCommit(2, "tiny", "t", held.session, 1, 0, raw))
            assert done == m.SessionDone(2, held.session, len(tokens))
            gateway.ask(m.SessionBegin(3, "tiny", "t", held.session))
            refused = gateway.ask(m.SessionBegin(4, "tiny", "t", held.session))
            assert isinstance(refused, m.SessionRefused)
            assert refused.code == "CONFLICT"
            kv.kill()
            s.wait(lambda: s.ready is None)
            gateway.wait(is_up=False)
        with KvProcess(home):
            s.wait_ready()
            gateway.wait(is_up=True)
            again = gateway.ask(m.SessionBegin(5, "tiny", "t", held.session, resume=2))
            assert again == m.SessionHeld(5, held.session, 2, raw)
            gateway.link.send(m.SessionAbort("tiny", "t", held.session, 2))
            assert s.state().cached == 2
            closed = gateway.ask(m.SessionClose(6, "tiny", "t", held.session))
            assert closed == m.SessionDone(6, held.session, 0)
            assert s.state().cached == 0  # freed at once
            gone = gateway.ask(m.SessionBegin(7, "tiny", "t", held.session))
            assert isinstance(gone, m.SessionRefused)
            assert gone.code == "NOT_FOUND"
    gateway.link.close()


def test_a_session_is_closed_while_its_model_is_not_loaded(home: Path) -> None:
    digest = write_model(home)
    gateway = Gateway(home)
    with Scheduler(home, digest) as s, KvProcess(home):
        s.wait_ready()
        gateway.wait(is_up=True)
        gateway.ask(m.SessionBegin(1, "tiny", "t", "s", create=True))
        gateway.ask(m.SessionCommit(2, "tiny", "t", "s", 1, 0, array("i", words(1, 2)).tobytes()))
    gateway.wait(is_up=False)
    files = home / "state" / "sessions"
    assert len(list(files.rglob("*.session"))) == 1
    configure(home, preload=False)
    with KvProcess(home):
        gateway.wait(is_up=True)
        assert gateway.ask(m.SessionClose(3, "tiny", "t", "s")) == m.SessionDone(3, "s", 0)
        assert not list(files.rglob("*.session"))
        gone = gateway.ask(m.SessionClose(4, "tiny", "t", "s"))
        assert isinstance(gone, m.SessionRefused)
        assert gone.code == "NOT_FOUND"
    gateway.link.close()


def test_the_first_frame_finds_its_sessions(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is read before the first round of `_work`, as after a start while a gateway waits."""
    write_model(home)
    monkeypatch.setenv("STARLING_HOME", str(home))
    gateway = Gateway(home)
    stage = KvStage(load_config(home))
    try:
        while gateway.link.peer is None:
            gateway.turn()
            stage.loop.poll(0)
        gateway.link.send(m.SessionBegin(1, "tiny", "t", create=True))
        answers: list[m.Frame] = []
        while not answers:
            stage.loop.poll(0)
            if stage.loop.progress:  # the frame was read
                stage._work()
            answers = gateway.turn()
        assert isinstance(answers[0], m.SessionHeld)
        gateway.link.send(m.SessionBegin(2, "other", "t", create=True))
        while len(answers) < 2:
            stage.loop.poll(0)
            answers += gateway.turn()
        assert isinstance(answers[1], m.SessionRefused)
        assert answers[1].code == "MODEL_UNAVAILABLE"
    finally:
        stage.loop.quit(0)
        assert stage.run() == 0
        gateway.link.close()
