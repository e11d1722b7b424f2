"""Submissions are refused only for a bound, or when they cannot meet their deadline."""

from __future__ import annotations

import logging
from array import array

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.protocol.messages import Sampling
from stages.scheduler.core.row_scheduler import PREFETCH
from stages.scheduler.policy.output_lengths import OutputLengths
from stages.scheduler.policy.tenant import Tenant
from stages.scheduler.policy.wait_estimate import Load

from .peers import submission
from .world import GATEWAY, World


def learned(world: World, steps: int = 40) -> None:
    """Run `steps` steps, after which waiting times are estimated."""
    world.submit(submission("first", [1, 2, 3], steps))
    world.run_until_idle()
    assert world.engine.stats.steps > 32
    world.collect()


@pytest.mark.parametrize("deadline_ms", [1, 200, 999, 1000])
def test_an_idle_model_refuses_no_short_deadline(deadline_ms: int) -> None:
    world = World()
    learned(world)
    world.submit(submission("short", [1, 2, 3], 4, deadline_ms=deadline_ms))
    assert "short" in world.engine.table.live
    world.run_until_idle()
    world.check_all()


def test_a_deadline_that_cannot_be_met_is_refused_with_the_time_to_retry() -> None:
    world = World(max_queue_depth=1000)
    learned(world)
    world.set_cost(4000.0, 1.0, 0.001)  # a second for about 1000 tokens of 4 at once
    for i in range(100):
        world.submit(submission(f"s{i}", [1, 2, 3], 50))
    wait_s = world.engine.waits.backlog_s(world.engine.queues.tenant("t"))
    assert wait_s > 2.0
    run_s = 0.004 * 50
    world.submit(submission("possible", [1, 2, 3], 50, deadline_ms=round(1000 * (wait_s + 1.1 * run_s))))
    world.submit(submission("impossible", [1, 2, 3], 50, deadline_ms=round(1000 * (wait_s + 0.9 * run_s))))
    assert "possible" in world.engine.table.live
    ((owner, refused),) = world.engine.outbox.rejected
    assert (owner, refused.sequence, refused.code) == (GATEWAY, "impossible", "OVERLOADED")
    assert wait_s <= refused.retry_after_s <= wait_s + 1.2


def test_a_request_that_can_begin_at_once_is_not_refused() -> None:
    world = World()
    learned(world, 390)
    world.set_cost(4000.0, 1.0, 0.001)
    world.engine.stats.output_lengths = OutputLengths(390.0)  # such an output takes more than a second
    assert world.engine.waits.run_s(submission("short", [1, 2, 3], 390)) > 1.0
    world.submit(submission("short", [1, 2, 3], 390, deadline_ms=1000))
    assert "short" in world.engine.table.live


@pytest.mark.parametrize("running", [0, 1])
def test_choices_that_fit_into_the_batch_are_not_refused(running: int) -> None:
    """They begin in one round: the estimate, which is for a full batch, would refuse the second."""
    world = World(batch=8)
    learned(world, 390)
    world.set_cost(400_000.0, 1.0, 0.001)
    world.engine.stats.output_lengths = OutputLengths(390.0)
    for i in range(running):
        world.submit(submission(f"r{i}", [1, 2, 3], 390))
        world.run_round()
    for i in range(8 - running):
        world.submit(submission(f"s{i}", [1, 2, 3], 390, deadline_ms=1000))
    assert world.engine.outbox.rejected == []
    world.submit(submission("ninth", [1, 2, 3], 390, deadline_ms=1000))
    assert [refused.sequence for _, refused in world.engine.outbox.rejected] == ["ninth"]


@pytest.mark.parametrize("ends", ["at their first token", "at their limit, as asked", "before their first token"])
def test_outputs_that_could_not_stop_refuse_no_other_tenants_request(ends: str) -> None:
    world = World()
    for i in range(200 if ends == "at their first token" else 4):
        frame = submission(f"c{i}", [1, 2, 3 + i % 50], 1 if ends == "at their first token" else 390)
        world.submit(msgspec.structs.replace(frame, sampling=Sampling(ignore_eos="as asked" in ends)))
        if ends == "before their first token":
            world.cancel(f"c{i}")
        world.run_until_idle()
        world.collect()
    assert 60 < world.engine.stats.expected_output < 80


@pytest.mark.parametrize("is_late", [False, True])
def test_the_work_of_shedding_grows_with_the_number_of_tenants(monkeypatch: pytest.MonkeyPatch, is_late: bool) -> None:
    """Each tenant's waiting work is summed up a few times, however many tenants there are."""
    world = World(batch=1, max_queue_depth=1000)
    learned(world)
    n_sums = 0
    work_us = Load.work_us

    def counted(load: Load, tenant: Tenant) -> float:
        nonlocal n_sums
        n_sums += 1
        return work_us(load, tenant)

    monkeypatch.setattr(Load, "work_us", counted)
    n_tenants = 60
    for i in range(n_tenants):
        world.submit(submission(f"s{i}", [1, 2, 3], 50, tenant=f"t{i}", deadline_ms=200_000))
    world.run_round()
    if is_late:
        world.set_cost(10_000_000.0, 1.0, 0.001)
    n_sums, n_waiting = 0, world.engine.queues.depth
    assert n_waiting > n_tenants / 2
    world.engine.submissions.shed(world.now)
    assert n_tenants / 2 < n_sums <= 4 * n_tenants
    assert (world.engine.queues.depth < n_waiting) == is_late


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 60), st.booleans()), max_size=12), st.data())
def test_a_load_follows_removed_sequences(sequences: list[tuple[int, int, bool]], data: st.DataObject) -> None:
    """What `changed` leaves is what a new sum has."""
    world = World(batch=1, max_queue_depth=1000)
    world.set_cost(4000.0, 10.0, 0.001)
    for i, (tenant, outputs, endless) in enumerate(sequences):
        frame = submission(f"s{i}", [1, 2, 3], outputs, tenant=f"t{tenant}")
        world.submit(msgspec.structs.replace(frame, sampling=Sampling(ignore_eos=endless)))
    queues, waits = world.engine.queues, world.engine.waits
    load = waits.load()
    for tenant in list(queues.tenants.values()):
        for waiting in queues.in_order(tenant):
            if data.draw(st.booleans()):
                world.cancel(waiting.id)
        load.changed(tenant)
    for tenant in queues.tenants.values():
        assert waits.backlog_s(tenant, load) == pytest.approx(waits.backlog_s(tenant), abs=1e-9)


@pytest.mark.parametrize("place", ["new", "waiting", "scheduled"])
def test_an_output_that_cannot_stop_is_as_long_as_its_limit(place: str) -> None:
    estimates = []
    for ignore_eos in (False, True):
        world = World(batch=4, max_queue_depth=1000)
        learned(world)
        world.set_cost(4000.0, 1.0, 0.001)
        frame = msgspec.structs.replace(submission("", [1, 2, 3], 390), sampling=Sampling(ignore_eos=ignore_eos))
        if place == "new":
            estimates.append(world.engine.waits.run_s(frame))
            continue
        for name in "abcd":
            world.submit(msgspec.structs.replace(frame, sequence=name))
        if place == "scheduled":
            world.run_round()
        world.submit(submission("mine", [1, 2, 3], 390))
        tenant = world.engine.queues.tenant("t")
        estimates.append(world.engine.waits.backlog_s(tenant))
        for name in list(world.engine.table.live):
            world.cancel(name)
        assert (tenant.waiting, tenant.output_backlog, tenant.endless, tenant.endless_backlog) == (0, 0, 0, 0)
    assert world.engine.stats.expected_output < 100
    assert estimates[1] > 1.5 * estimates[0]


def test_one_output_that_cannot_stop_does_not_hold_the_whole_batch() -> None:
    waits = []
    for ignore_eos in (False, True):
        world = World(batch=4, max_queue_depth=1000)
        learned(world)
        world.set_cost(4000.0, 1.0, 0.001)
        for i in range(4):
            frame = submission(f"r{i}", [1, 2, 3], 390)
            world.submit(msgspec.structs.replace(frame, sampling=Sampling(ignore_eos=ignore_eos and i == 0)))
        world.run_round()
        world.submit(submission("mine", [1, 2, 3], 1))
        waits.append(world.engine.waits.backlog_s(world.engine.queues.tenant("t")))
    assert waits[0] < waits[1] < 1.4 * waits[0]


@pytest.mark.parametrize("waits_for", ["a worker", "a batch"])
def test_choices_that_wait_for_a_worker_or_a_batch_are_not_refused(waits_for: str) -> None:
    """They were accepted because they begin at once, and will; those behind them have the estimate of a full batch."""
    world = World(batch=8, batch_timeout_s=0.5 if waits_for == "a batch" else 0.0)
    learned(world, 390)
    world.set_cost(400_000.0, 1.0, 0.001)
    world.engine.stats.output_lengths = OutputLengths(390.0)
    if waits_for == "a worker":
        world.engine.detached(world.now, 1)
    for i in range(8):
        world.submit(submission(f"s{i}", [1, 2, 3], 390, deadline_ms=100_000))
    world.submit(submission("ninth", [1, 2, 3], 390))
    world.engine.tick(world.now + 0.1)
    assert world.engine.outbox.rejected == []
    ninth = world.engine.table.live["ninth"]
    ninth.deadline = world.now + 100.0  # of a time at which its wait was not known to be so long
    world.engine.tick(world.now + 0.7)
    assert [refused.sequence for _, refused in world.engine.outbox.rejected] == ["ninth"]


@pytest.mark.parametrize("batch_timeout_s", [0.0, 0.5])
@pytest.mark.parametrize("depth", [1, 3])
def test_requests_that_arrive_together_at_an_idle_model_get_rows_first(depth: int, batch_timeout_s: float) -> None:
    batch = 4
    world = World(batch=batch, max_queue_depth=depth, batch_timeout_s=batch_timeout_s)
    fit = batch + PREFETCH + depth
    for i in range(fit + 3):  # before the first round of the engine
        world.submit(submission(f"s{i}", [i + 1, 2, 3], 20))
    assert [rejected.sequence for _, rejected in world.engine.outbox.rejected] == [f"s{fit + i}" for i in range(3)]
    assert world.engine.queues.depth == depth
    world.run_until_idle()
    world.check_all()
    assert list(world.ends.values()).count("length") == fit


def test_the_estimate_includes_the_time_between_steps() -> None:
    """Time between two steps, such as steps of other models, is part of the wait."""

    def backlog_s(pause_s: float) -> float:
        world = World(max_queue_depth=1000)
        world.set_cost(1000.0, 1.0, 0.001)
        world.submit(submission("s", [1, 2, 3], 300))
        while world.engine.is_busy:
            world.run_round()
            world.exchange_with_kv()
            while world.compute_step():
                world.now += 0.001 + pause_s
                world.run_round()
            world.collect()
        for i in range(100):
            world.submit(submission(f"s{i}", [1, 2, 3], 50))
        return world.engine.waits.backlog_s(world.engine.queues.tenant("t"))

    assert backlog_s(0.004) > 3 * backlog_s(0.0)


def test_outputs_that_a_deadline_cut_off_raise_the_mean_output() -> None:
    world = World(batch=4)
    for round_ in range(12):
        for i in range(4):
            world.submit(submission(f"s{round_}.{i}", [i + 1, 2, 3], 390, deadline_ms=1000))
        while any(s.outputs < 100 for s in world.engine.table.live.values()):
            world.run_round()
            world.exchange_with_kv()
            world.compute_step()
        world.advance(1.5)
        world.run_until_idle()
    assert set(world.ends.values()) == {"timeout"}
    assert world.engine.stats.mean_output > 90


def test_the_time_to_retry_is_a_whole_number_of_seconds_and_at_least_one() -> None:
    world = World()
    tenant = world.engine.queues.tenant("t")
    assert world.engine.waits.backlog_s(tenant) < 1.0
    assert world.engine.waits.retry_after_s(tenant) == 1.0


def test_the_estimate_includes_attention_over_long_outputs() -> None:
    """Where attention takes most of a step, the fixed cost of a step contributes little."""

    def backlog_s(position_us: float) -> float:
        world = World(max_queue_depth=1000)
        world.set_cost(1000.0, 1.0, position_us)
        world.engine.stats.mean_output = 300.0
        for i in range(100):
            world.submit(submission(f"s{i}", [1, 2, 3], 300))
        return world.engine.waits.backlog_s(world.engine.queues.tenant("t"))

    # A step of 4 sequences at half of their length attends to 600 positions.
    assert backlog_s(5.0) == pytest.approx(4 * backlog_s(0.0001), rel=0.1)


def test_the_estimate_excludes_cached_prompt_tokens() -> None:
    def backlog_s(others: int) -> float:
        world = World(max_queue_depth=1000, pages=256)
        for i in range(100):
            world.submit(submission(f"s{i}", [others and i] * 64 + [7] * 96 + [i], 2))
            world.run_until_idle()
        world.set_cost(1.0, 100.0, 0.0001)
        for i in range(100):
            world.submit(submission(f"t{i}", [others and i] * 64 + [7] * 96 + [i], 2))
        return world.engine.waits.backlog_s(world.engine.queues.tenant("t"))

    assert backlog_s(0) < 0.5 * backlog_s(1)


@pytest.mark.parametrize(
    ("waiting", "out"), [((("p", 0), ("r", 2)), "p/0"), ((("r", 2), ("p", 0)), "p/0"), ((("r", 2), ("x", 1)), "x/1")]
)
def test_a_full_queue_removes_a_request_that_has_not_begun(waiting: tuple[tuple[str, int], ...], out: str) -> None:
    """A request fails with all its choices: first one without output, else the newest."""
    world = World(batch=1, max_queue_depth=2)
    for request, choice in (("r", 0), ("r", 1), ("x", 0), *waiting):
        frame = submission(f"{request}/{choice}", [1, 2, 3], 20, choice=choice)
        world.submit(msgspec.structs.replace(frame, request=request))
    world.run_round()
    assert world.engine.queues.depth == 2
    world.submit(submission("quiet", [1, 2, 3], 20, tenant="quiet"))
    assert [rejected.sequence for _, rejected in world.engine.outbox.rejected] == [out]


@pytest.mark.parametrize(("asked", "most"), [(0, 4), (-1, 0), (2, 2)])
def test_a_request_changes_the_number_of_draft_tokens(asked: int, most: int) -> None:
    world = World(speculate=4)
    world.submit(submission("s", [1, 2, 3], 4, speculate=asked))
    assert world.engine.table.live["s"].max_draft_tokens == most


def test_a_later_revision_replaces_a_live_sequence_and_keeps_its_age() -> None:
    """As when its reasoning is ended: other tokens are forced, and what is computed of the earlier ones is dropped."""
    world = World(batch=2, max_queue_depth=3)
    frame = submission("a", [1, 2, 3], 60, seed=3)
    world.submit(frame)
    for _ in range(6):
        world.run_round()
        world.exchange_with_kv()
        world.compute_step()
    world.now += 1.0
    for name in ("b", "c", "d"):
        world.submit(submission(name, [4, 5], 60))
    world.engine.outbox.tokens.clear()
    before = world.engine.table.live["a"]
    forced = [90, 91, 92]
    second = msgspec.structs.replace(frame, forced=array("i", forced).tobytes(), revision=1)
    world.submit(second)
    after = world.engine.table.live["a"]
    assert after is not before
    assert after.key[0] == before.key[0]
    assert after.arrival == before.arrival
    assert world.engine.outbox.tokens == {}, "the earlier one ends without an event"
    parts = []
    for _ in range(200):
        world.run_round()
        world.exchange_with_kv()
        world.compute_step()
        for batch in world.engine.outbox.tokens.values():
            parts += [part for part in batch if part.sequence == "a"]
        world.engine.outbox.tokens.clear()
    assert {part.revision for part in parts} == {1}
    assert parts[0].start == len(forced)
    assert sum(len(part.tokens) for part in parts) == 60 - len(forced)
    assert [part.finish for part in parts if part.finish] == ["length"]


def test_an_earlier_revision_does_not_take_over_a_later_one() -> None:
    """A new gateway begins with the first tokens: those that it has not replaced must not be sent to it."""
    world = World()
    frame = submission("a", [1, 2, 3], 60, seed=3, revision=1, forced=[90, 91])
    world.submit(frame)
    later = world.engine.table.live["a"]
    world.submit(msgspec.structs.replace(frame, forced=b"", revision=0))
    assert world.engine.table.live["a"] is not later


def test_limits_are_refused_with_code_and_field():
    world = World(max_prompt_tokens=100, max_output_tokens=50, pages=8, page_tokens=16)
    refused = {
        "long": (submission("long", [1] * 101, 5), "INVALID_REQUEST"),
        "much": (submission("much", [1], 51), "INVALID_REQUEST"),
        "id": (submission("id", [1, 1000], 5), "INVALID_REQUEST"),
        "fit": (submission("fit", [1] * 100, 40), "INSUFFICIENT_RESOURCES"),
        "none": (submission("none", [], 40), "INVALID_REQUEST"),
    }
    for frame, _ in refused.values():
        world.submit(frame)
    world.collect()
    assert world.errors == {name: code for name, (_, code) in refused.items()}
    world.submit(submission("exact", [1] * 99, 30))
    world.run_until_idle()
    assert world.ends["exact"] == "length"


def test_a_context_is_filled_to_its_last_position():
    world = World(context=64)
    world.submit(submission("over", [1] * 40, 25))
    world.submit(submission("full", [1] * 40, 24))
    world.run_until_idle()
    assert world.errors["over"] == "CONTEXT_LENGTH_EXCEEDED"
    assert world.ends["full"] == "length"
    assert len(world.tokens["full"]) == 24


def test_a_full_queue_answers_with_the_time_to_wait():
    world = World(max_queue_depth=3, batch=1)
    for i in range(7):  # one computes, two have rows, three wait
        world.submit(submission(f"s{i}", [1, 2], 100))
    rejected = world.engine.outbox.rejected[-1][1]
    assert rejected.code == "OVERLOADED"
    assert rejected.retry_after_s >= 1
    for name in ("one", "another"):  # its first sequence gets a row at once
        world.submit(submission(name, [1], 5, tenant="quiet"))
    assert [frame.sequence for _, frame in world.engine.outbox.rejected] == ["s6", "s5"], "the newest makes room"


def test_a_request_of_several_sequences_gets_places_in_a_queue_that_another_tenant_has_filled() -> None:
    world = World(batch=1, max_queue_depth=8)
    world.engine.detached(world.now)
    for i in range(8):
        world.submit(submission(f"a{i}", [1, 2], 100))
    for name in ("b/0", "b/1"):
        world.submit(submission(name, [1], 5, tenant="b"))
    assert [frame.sequence for _, frame in world.engine.outbox.rejected] == ["a7", "a6"]
    assert "b/0" in world.engine.table.live and "b/1" in world.engine.table.live


@pytest.mark.parametrize(("n_others", "n", "accepted"), [(1, 8, True), (1, 9, False), (4, 3, True), (4, 4, False)])
def test_a_request_that_is_more_than_its_part_of_a_full_queue_removes_no_others(
    n_others: int, n: int, accepted: bool
) -> None:
    """It would fail with the first sequence that gets no place, and the removed ones would be lost for nothing."""
    world = World(batch=1, max_queue_depth=16)
    world.engine.detached(world.now)
    for i in range(16):
        world.submit(submission(f"a{i}", [1, 2], 100, tenant=f"a{i % n_others}"))
    names = [f"b/{i}" for i in range(n)]
    for i, name in enumerate(names):
        world.submit(submission(name, [1], 5, tenant="b", following=n - 1 - i))
        if world.engine.outbox.rejected and not accepted:
            break  # the gateway cancels the request
    rejected = [frame.sequence for _, frame in world.engine.outbox.rejected]
    if accepted:
        assert len(rejected) == n and not set(names) & set(rejected)
    else:
        assert rejected == ["b/0"]


def test_a_full_queue_of_one_tenant_does_not_affect_others():
    world = World(max_queue_depth=100, max_tenant_depth=3, batch=1)
    for i in range(8):  # one computes, two have rows, three wait
        world.submit(submission(f"s{i}", [1, 2], 100))
    rejected = [frame for _, frame in world.engine.outbox.rejected]
    assert [frame.sequence for frame in rejected] == ["s6", "s7"]
    assert rejected[0].code == "OVERLOADED" and "at most 3" in rejected[0].message
    assert rejected[0].retry_after_s >= 1
    for i in range(3):
        world.submit(submission(f"q{i}", [1], 5, tenant="quiet"))
    assert len(world.engine.outbox.rejected) == 2
    world.run_until_idle()
    assert sorted(world.ends.values()) == ["length"] * 9 + ["rejected"] * 2
    world.submit(submission("later", [1], 5))
    world.run_until_idle()
    assert world.ends["later"] == "length", "the queue has room again"


def test_the_time_to_wait_follows_the_backlog():
    waits = []
    for depth in (10, 100, 1000):
        world = World(max_queue_depth=5000, max_tenant_depth=depth, batch=4, context=400)
        world.set_cost(20_000.0, 100.0, 0.001)
        for i in range(world.settings.max_batch_size + PREFETCH + depth + 1):
            world.submit(submission(f"s{i}", [1, 2] * 20, 100))
        waits.append(world.engine.outbox.rejected[0][1].retry_after_s)
    assert waits[0] < waits[1] < waits[2]
    assert 5 < waits[2] / waits[1] < 15


def test_lines_about_a_sequence_name_its_request(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "starling.scheduler")
    world = World()
    for name in ("failed", "long"):
        tokens = 10_000 if name == "long" else 4
        world.submit(msgspec.structs.replace(submission(f"req-{name}/0", [1, 2, 3], tokens), request=f"req-{name}"))
    table = world.engine.table
    if "req-failed/0" in table.live:
        table.fail(table.live["req-failed/0"], "INTERNAL", "why")
    lines = {record.getMessage(): vars(record) for record in caplog.records}
    failed = lines["a sequence has failed"]
    assert (failed["request_id"], failed["sequence"]) == ("req-failed", "req-failed/0")
    assert (failed["code"], failed["reason"]) == ("INTERNAL", "why")
    refused = lines["a sequence is refused"]
    assert (refused["request_id"], refused["sequence"]) == ("req-long", "req-long/0")
