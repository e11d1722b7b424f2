"""`starling.Embedded` in several threads, its callbacks, states, time limits and latencies."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.config.load import resolve
from pipeline.errors import InternalError, InvalidRequest, StarlingError
from starling.embedded import Embedded
from starling.engine_stats import KEPT, Durations, Latency
from starling.generation import Delta, Generation
from tools.tiny_gguf import SHAPES, write_model

pytestmark = pytest.mark.slow

SHAPE = SHAPES["odd"]
FIELDS: dict[str, Any] = {"max_tokens": 40, "ignore_eos": True}


def prompt(seed: int, n: int = 40) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(3, SHAPE.vocab_size, n)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    directory = tmp_path_factory.mktemp("models")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pipeline.config.paths.models_dir", lambda env=None: directory)
        yield write_model(directory / "tiny.gguf", SHAPE, "Q4_0")


@pytest.fixture
def engine(model: Path) -> Iterator[Embedded]:
    with Embedded.load(model, kv_cache_mb=4, ranks=2, page_tokens=16, max_batch_size=4) as loaded:
        yield loaded
        if loaded._parts is not None:
            loaded._parts.kv.check()
            assert loaded.stats().kv_pages_leased == loaded.stats().requests_running == 0


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as threads:
        yield threads


@pytest.fixture
def many_switches() -> Iterator[None]:
    """Python's threads take turns as often as possible."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


class Clock:
    """The engine's clock, which stands still."""

    def __init__(self, engine: Embedded) -> None:
        self.now = time.monotonic()
        engine._clock = lambda: self.now


def joined(deltas: list[Delta]) -> tuple[str, tuple[int, ...], tuple[Any, ...], list[str]]:
    """Text, tokens and logprobs of all deltas, and each one's finish reason."""
    tokens = tuple(token for delta in deltas for token in delta.tokens)
    logprobs = tuple(one for delta in deltas for one in delta.logprobs)
    return "".join(delta.text for delta in deltas), tokens, logprobs, [delta.finish_reason for delta in deltas]


# ------------------------------------------------------------------ threads


@pytest.mark.usefixtures("many_switches")
def test_polling_beside_a_thread_that_runs_changes_no_output(engine: Embedded, pool: ThreadPoolExecutor) -> None:
    fields = FIELDS | {"max_tokens": 200}
    alone = [engine.generate(prompt(i), seed=i, **fields) for i in range(4)]
    for _ in range(3):
        ids = [engine.submit(prompt(i), seed=i, **fields) for i in range(4)]
        seen = [""] * 4
        running = pool.submit(engine.run)
        while not running.done():
            for i, request_id in enumerate(ids):
                text = engine.poll(request_id).text
                assert text.startswith(seen[i])
                seen[i] = text
        running.result()
        found = [engine.release(request_id) for request_id in ids]
        assert [(one.text, one.tokens) for one in found] == [(one.text, one.tokens) for one in alone]


@pytest.mark.usefixtures("many_switches")
def test_threads_submit_poll_cancel_and_release_beside_one_that_runs(
    engine: Embedded, pool: ThreadPoolExecutor
) -> None:
    alone = [engine.generate(prompt(i), seed=i, **FIELDS) for i in range(12)]
    submitted, is_over = threading.Semaphore(0), threading.Event()

    def compute() -> None:
        while submitted.acquire() and not is_over.is_set():
            engine.run()

    def use(begin: int) -> list[tuple[int, bool, Generation, list[Delta]]]:
        results = []
        for i in range(begin, 12, 3):
            for is_cancelled in (False, True):
                deltas: list[Delta] = []
                first, last = threading.Event(), threading.Event()

                def on_token(delta: Delta, deltas: list[Delta] = deltas, first: Any = first, last: Any = last) -> None:
                    deltas.append(delta)
                    first.set()
                    if delta.finish_reason:
                        last.set()

                request_id = engine.submit(prompt(i), seed=i, on_token=on_token, **FIELDS)
                submitted.release()
                assert first.wait()
                if is_cancelled:
                    engine.cancel(request_id)
                assert last.wait()
                assert engine.poll(request_id).is_finished
                results.append((i, is_cancelled, engine.release(request_id), deltas))
        return results

    running = pool.submit(compute)
    users = [pool.submit(use, begin) for begin in range(3)]
    results = [result for user in users for result in user.result()]
    is_over.set()
    submitted.release()
    running.result()
    assert len(results) == 24
    for i, is_cancelled, found, deltas in results:
        text, tokens, _, reasons = joined(deltas)
        assert (text, tokens) == (found.text, found.tokens)
        assert reasons == [""] * (len(reasons) - 1) + [found.finish_reason]
        if found.finish_reason == "cancelled":
            assert is_cancelled
            assert found.tokens == alone[i].tokens[: len(found.tokens)]
        else:
            assert (found.text, found.tokens) == (alone[i].text, alone[i].tokens)


def test_several_threads_generate_at_once(engine: Embedded, pool: ThreadPoolExecutor) -> None:
    alone = [engine.generate(prompt(i), seed=i, **FIELDS) for i in range(6)]

    def generate(i: int) -> tuple[Generation, list[Delta]]:
        deltas: list[Delta] = []
        return engine.generate(prompt(i), seed=i, on_token=deltas.append, **FIELDS), deltas

    for i, (found, deltas) in enumerate(pool.map(generate, range(6))):
        assert (found.text, found.tokens) == (alone[i].text, alone[i].tokens)
        assert joined(deltas)[:2] == (found.text, found.tokens)
        assert deltas[-1].finish_reason == "length"
    assert engine.stats().requests_kept == 0


def test_closing_ends_a_run_in_another_thread_and_all_requests(engine: Embedded, pool: ThreadPoolExecutor) -> None:
    """After its step and the calls of that step. Each request has its last call by then."""
    begun, may_return = threading.Event(), threading.Event()
    deltas: list[Delta] = []

    def on_token(delta: Delta) -> None:
        deltas.append(delta)
        begun.set()
        assert may_return.wait()

    ids = [engine.submit(prompt(i), on_token=on_token, **FIELDS) for i in range(6)]  # four fit into a batch
    running, generating = pool.submit(engine.run), pool.submit(engine.generate, prompt(6), on_token=on_token, **FIELDS)
    assert begun.wait()
    while engine.stats().requests_kept < 7:
        pass
    closing = pool.submit(engine.close)
    while engine._parts is not None:
        pass
    may_return.set()
    assert closing.result() is running.result() is None
    with pytest.raises(StarlingError, match="the engine was closed before the request had ended"):
        generating.result()
    for request_id in ids:
        found = engine.poll(request_id)
        assert (found.state, found.finish_reason) == ("failed", "error")
        assert found.error is not None
        assert found.error.code == "DRAINING"
        _, tokens, _, reasons = joined([delta for delta in deltas if delta.id == request_id])
        assert (tokens, reasons) == (found.tokens, [""] * (len(reasons) - 1) + ["error"])
        engine.cancel(request_id)
        assert engine.release(request_id) == found
    with pytest.raises(RuntimeError, match="the engine is closed"):
        engine.run()


def test_a_step_of_a_second_thread_waits_for_the_step_of_the_first(
    engine: Embedded, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Meanwhile a third one submits, polls, cancels and reads figures."""
    group = engine._open_parts().group
    compute, is_computing, may_end = group.compute, threading.Event(), threading.Event()

    def held(step: int) -> int:
        is_computing.set()
        assert may_end.wait()
        return compute(step)

    monkeypatch.setattr(group, "compute", held)
    first = engine.submit(prompt(1), **FIELDS)
    stepping = pool.submit(engine.step)
    assert is_computing.wait()
    second = engine.submit(prompt(2), **FIELDS)
    waiting = pool.submit(engine.step)
    assert (engine.poll(first).state, engine.poll(second).state) == ("prefilling", "pending")
    engine.cancel(first)
    assert engine.poll(first).finish_reason == "cancelled"
    assert engine.stats().requests_waiting == 1
    may_end.set()
    assert stepping.result()
    assert waiting.result()
    engine.run()
    assert engine.release(first).tokens == ()
    assert len(engine.release(second).tokens) == FIELDS["max_tokens"]


# ------------------------------------------------------------------ callbacks


@pytest.mark.parametrize("fields", [{}, {"logprobs": 2}, {"stop": True}, {"stop_token_ids": True}])
def test_the_deltas_of_a_request_are_its_output(engine: Embedded, fields: dict[str, Any]) -> None:
    whole = engine.generate(prompt(3), seed=1, **FIELDS)
    if "stop" in fields:
        fields = {"stop": ["never", whole.text[20:23]]}
    if "stop_token_ids" in fields:
        fields = {"stop_token_ids": [whole.tokens[20]], "ignore_eos": False}
    deltas: list[Delta] = []
    request_id = engine.submit(prompt(3), seed=1, on_token=deltas.append, **FIELDS | fields)
    assert deltas == []
    engine.run()
    found = engine.release(request_id)
    text, tokens, logprobs, reasons = joined(deltas)
    assert (text, tokens, logprobs) == (found.text, found.tokens, found.logprobs)
    assert reasons == [""] * (len(reasons) - 1) + [found.finish_reason]
    assert {delta.id for delta in deltas} == {request_id}
    assert len(deltas) > 1


def test_the_last_call_of_a_cancelled_request_is_made_at_once(engine: Embedded) -> None:
    deltas: list[Delta] = []
    ids = [engine.submit(prompt(i), on_token=deltas.append, **FIELDS) for i in range(2)]
    engine.step()
    deltas.clear()
    engine.cancel(ids[0])
    engine.cancel(ids[0])
    engine.release(ids[1])
    assert [(delta.id, delta.finish_reason) for delta in deltas] == [(one, "cancelled") for one in ids]
    assert not engine.step()
    assert len(deltas) == 2


def test_calls_are_made_by_one_thread_at_a_time_and_in_order(engine: Embedded, pool: ThreadPoolExecutor) -> None:
    """A cancel beside a call that has not returned leaves its own call to the other thread."""
    calls: list[tuple[str, str, int]] = []
    is_called, may_return = threading.Event(), threading.Event()

    def on_token(delta: Delta) -> None:
        is_called.set()
        assert may_return.wait()
        calls.append((delta.id, delta.finish_reason, threading.get_ident()))

    first, second = [engine.submit(prompt(i), on_token=on_token, **FIELDS | {"max_tokens": 2}) for i in range(2)]

    def run() -> int:
        engine.run()
        return threading.get_ident()

    running = pool.submit(run)
    assert is_called.wait()
    engine.cancel(second)
    assert engine.poll(second).finish_reason == "cancelled"
    assert calls == []
    may_return.set()
    thread = running.result()
    assert [call[1:] for call in calls if call[0] == first] == [("", thread), ("length", thread)]
    assert [call[1:] for call in calls if call[0] == second][-1] == ("cancelled", thread)
    assert {call[2] for call in calls} == {thread}


def test_a_callback_may_submit_poll_cancel_and_release(engine: Embedded) -> None:
    results: list[Generation] = []
    other = engine.submit(prompt(9), **FIELDS)

    def on_token(delta: Delta) -> None:
        if len(engine.poll(delta.id).tokens) == 3:
            engine.cancel(other)
            engine.cancel(delta.id)
        if delta.finish_reason:
            results.append(engine.release(delta.id))
            if len(results) < 3:
                engine.submit(prompt(len(results)), on_token=on_token, **FIELDS)

    engine.submit(prompt(0), on_token=on_token, **FIELDS)
    engine.run()
    assert [(one.finish_reason, len(one.tokens)) for one in results] == [("cancelled", 3)] * 3
    assert engine.release(other).finish_reason == "cancelled"
    assert engine.generate(prompt(1), max_tokens=2, on_token=_release_at_the_end(engine)).finish_reason == "length"
    assert engine.stats().requests_kept == 0


def _release_at_the_end(engine: Embedded) -> Callable[[Delta], object]:
    return lambda delta: delta.finish_reason and engine.release(delta.id)


def test_a_callback_that_would_wait_for_itself_is_refused(engine: Embedded) -> None:
    refused: list[str] = []
    calls = {"step": engine.step, "run": engine.run, "generate": lambda: engine.generate([1]), "close": engine.close}

    def on_token(delta: Delta) -> None:
        for name, call in calls.items():
            with pytest.raises(RuntimeError, match=f"on_token has called {name}"):
                call()
            refused.append(name)

    assert engine.generate(prompt(1), max_tokens=1, ignore_eos=True, on_token=on_token).finish_reason == "length"
    assert refused == list(calls)


@pytest.mark.parametrize("raises_at", [1, 5, 40])
def test_a_callback_that_raises_ends_its_request_alone(
    engine: Embedded, raises_at: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Also in its last call. Requests beside it get their own output and all their calls."""
    alone = engine.generate(prompt(1), seed=1, **FIELDS)
    deltas: list[Delta] = []
    calls: list[Delta] = []

    def on_token(delta: Delta) -> None:
        calls.append(delta)
        if len(calls) == raises_at:
            raise ValueError("the disk is full")

    other = engine.submit(prompt(1), seed=1, on_token=deltas.append, **FIELDS)
    failing = engine.submit(prompt(2), seed=2, on_token=on_token, **FIELDS)
    third = engine.submit(prompt(1), seed=1, **FIELDS)
    engine.run()
    found = engine.release(failing)
    assert (found.state, found.finish_reason, len(calls)) == ("failed", "error", raises_at)
    assert isinstance(found.error, InternalError)
    assert found.error.message == "on_token raised ValueError: the disk is full"
    assert isinstance(found.error.__cause__, ValueError)
    assert found.tokens == joined(calls)[1]
    assert [record.levelname for record in caplog.records if "on_token" in record.message] == ["ERROR"]
    for one in (engine.release(other), engine.release(third)):
        assert (one.text, one.tokens, one.finish_reason) == (alone.text, alone.tokens, "length")
    assert joined(deltas)[:2] == (alone.text, alone.tokens)
    calls.clear()
    with pytest.raises(InternalError, match="the disk is full"):
        engine.generate(prompt(2), seed=2, on_token=on_token, **FIELDS)
    assert engine.stats().requests_kept == 0


def test_an_interrupt_in_a_callback_leaves_step_and_loses_no_other_call(engine: Embedded) -> None:
    deltas: list[Delta] = []

    def interrupt(delta: Delta) -> None:
        if not delta.finish_reason:
            raise KeyboardInterrupt

    first = engine.submit(prompt(1), on_token=interrupt, **FIELDS)
    second = engine.submit(prompt(2), on_token=deltas.append, **FIELDS)
    with pytest.raises(KeyboardInterrupt):
        engine.run()
    engine.cancel(first)
    engine.run()
    assert engine.release(first).finish_reason == "cancelled"
    assert joined(deltas)[1] == engine.release(second).tokens
    with pytest.raises(KeyboardInterrupt):
        engine.generate(prompt(1), on_token=interrupt, **FIELDS)
    assert engine.stats().requests_kept == 0


# ------------------------------------------------------------------ states, time limits, latencies


def test_a_request_passes_through_its_states(model: Path) -> None:
    config = resolve({"scheduler": {"max_step_tokens": 16}, "performance": {"batch_size": 4}}, {})
    with Embedded.load(model, config=config, kv_cache_mb=4, ranks=1, page_tokens=16, max_batch_size=1) as engine:
        ids = [engine.submit(prompt(i, 60), max_tokens=3, ignore_eos=True) for i in range(2)]
        seen: list[list[str]] = [["pending"], ["pending"]]
        is_busy = True
        while is_busy:
            is_busy = engine.step()
            for states, request_id in zip(seen, ids, strict=True):
                if (state := engine.poll(request_id).state) != states[-1]:
                    states.append(state)
        assert seen == [["pending", "prefilling", "decoding", "finished"]] * 2
        cancelled = engine.submit(prompt(3), max_tokens=3)
        engine.cancel(cancelled)
        assert engine.poll(cancelled).state == "finished"


def test_a_request_ends_with_an_error_when_its_time_is_over(engine: Embedded) -> None:
    clock, deltas = Clock(engine), list[Delta]()
    whole = engine.generate(prompt(0), seed=0, **FIELDS)
    ids = [engine.submit(prompt(0), seed=0, timeout_s=5, on_token=deltas.append, **FIELDS)]
    ids += [engine.submit(prompt(i), seed=i, timeout_s=5 if i == 15 else None, **FIELDS) for i in range(1, 16)]
    while len(engine.poll(ids[0]).tokens) < 2:
        engine.step()
    clock.now += 4.9
    engine.step()
    assert [engine.poll(one).state for one in (ids[0], ids[15])] == ["decoding", "pending"]
    clock.now += 0.2
    engine.step()
    found = engine.poll(ids[0])
    assert (found.state, found.finish_reason, found.tokens) == ("failed", "error", whole.tokens[:3])
    assert found.error is not None
    assert (found.error.code, found.error.message) == (
        "TIMEOUT",
        "the request's time was over after 5.1 s (computing, 3 tokens of output)",
    )
    assert joined(deltas)[1:] == (found.tokens, (), ["", "", "", "error"])
    assert "(waiting, 0 tokens of output)" in str(engine.poll(ids[15]).error)
    engine.run()
    assert [engine.release(one).finish_reason for one in ids] == ["error"] + ["length"] * 14 + ["error"]


def test_a_request_that_will_probably_be_late_is_computed_all_the_same(model: Path) -> None:
    with Embedded.load(model, kv_cache_mb=4, ranks=1, max_batch_size=1) as engine:
        clock = Clock(engine)
        for _ in range(2):  # then the costs of a step are known
            engine.generate(prompt(0), **FIELDS)
        ids = [engine.submit(prompt(i), timeout_s=0.001, **FIELDS) for i in range(4)]
        clock.now += 0.0005
        engine.run()  # the clock stands still
        assert [engine.release(one).finish_reason for one in ids] == ["length"] * 4


@pytest.mark.parametrize("timeout_s", [0, -1.0, float("nan"), float("inf"), 86_401, True, "5"])
def test_a_wrong_time_limit_is_refused(engine: Embedded, timeout_s: Any) -> None:
    with pytest.raises(InvalidRequest, match="timeout_s is .*: expected seconds, above 0 and at most 86400"):
        engine.submit(prompt(1), timeout_s=timeout_s)
    with pytest.raises(InvalidRequest, match="on_token is 5: expected a function"):
        engine.submit(prompt(1), on_token=5)  # type: ignore[arg-type]
    assert engine.stats().requests_kept == 0


def test_latencies_are_those_of_the_engines_clock(engine: Embedded) -> None:
    clock = Clock(engine)
    for wait in (1, 3):
        request_id = engine.submit(prompt(wait, 3), max_tokens=5, ignore_eos=True)
        clock.now += wait
        while engine.step():
            clock.now += 0.25
        assert engine.release(request_id).finish_reason == "length"
    engine.release(engine.submit(prompt(1), max_tokens=5))  # is cancelled: it has none of the latencies
    late = engine.submit(prompt(1), timeout_s=1, max_tokens=5)
    clock.now += 2
    engine.run()
    assert engine.release(late).state == "failed"
    stats = engine.stats()
    assert (stats.requests_finished, stats.requests_failed, stats.tokens_generated) == (3, 1, 10)
    assert stats.tokens_per_second == pytest.approx(10 / stats.step_seconds)
    assert values(stats.queue_wait_seconds) == [2, 2, 1, 3, 3]
    assert values(stats.time_to_first_token_seconds) == [2, 2, 1, 3, 3]
    assert values(stats.time_per_output_token_seconds) == [2, 0.25, 0.25, 0.25, 0.25]
    assert values(stats.request_duration_seconds) == [2, 3, 2, 4, 4]


def values(found: Latency) -> list[float]:
    return [found.count, *(round(value, 6) for value in (found.mean, found.p50, found.p95, found.max))]


def test_a_latency_is_of_the_last_requests() -> None:
    durations = Durations()
    assert values(durations.latency()) == [0, 0, 0, 0, 0]
    for i in range(KEPT + 10):
        durations.add(float(i))
    assert values(durations.latency()) == [1010, 509.5, 509, 959, 1009]
