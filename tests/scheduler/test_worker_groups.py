"""Several worker groups behind one engine: every order of steps, deaths and restarts gives the tokens of one group."""

from __future__ import annotations

import random

import pytest

from shm import words
from shm.step_ring import DONE, WORKER_GENERATION, blank_steps
from shm.step_rings import join
from stages.scheduler.core.ring import Ring
from stages.scheduler.policy.group_choice import least_loaded
from stages.scheduler.recovery.quarantine import DEATH

from .peers import VOCAB, Poisoned, Worker, reference, submission
from .world import GATEWAY, World

EVENTS = ("step",) * 10 + ("round",) * 6 + ("kv",) * 4 + ("kill", "half", "start", "restart kv", "cancel")


class GroupsWorld(World):
    """A world in which several workers compute the rows of one engine, each with a ring of its own."""

    def __init__(self, groups: int = 2, **options) -> None:
        self.workers: list[Worker] = []
        self.n_groups = groups
        super().__init__(worker_groups=groups, **options)

    def attach(self) -> None:
        """Called once, by the base class."""
        for number in range(self.n_groups):
            views = join(self.steps, blank_steps(self.geometry._replace(max_rows=0))) if number else self.steps
            ring = self.ring if number == 0 else Ring(views, self.geometry, serial=1)
            self.engine.set_ring(number, ring)
            self.workers.append(Worker(views, self.geometry, self.pages))
            self.start(number)

    def start(self, number: int) -> None:
        """A worker is attached to the ring of its group."""
        group = self.engine.groups[number]
        assert not group.link.is_attached and not group.steps.unacknowledged
        self.generation += 1
        group.link.ring.start(self.generation)
        self.serve(number, self.generation)
        self.workers[number].period = self.period
        self.engine.attach(self.context, VOCAB, window=self.window, groups=self.groups, number=number)

    def serve(self, number: int, generation: int) -> None:
        """The worker has mapped the arenas."""
        self.workers[number].attach(generation)
        words.store(self.workers[number].s.control, WORKER_GENERATION, generation)

    def kill(self, number: int, half_way: bool = False) -> None:
        """Kill a worker, perhaps in the middle of a step. Its group stays without one."""
        worker = self.workers[number]
        if half_way and worker.waiting:
            try:
                worker.compute(int(worker.s.control[DONE]) + 1)
            except Poisoned:
                pass
        self.engine.detached(self.now, DEATH, number)
        self.collect()

    def step(self, number: int) -> bool:
        """A worker computes a step. A poisoned one kills it, and it starts again."""
        try:
            return self.workers[number].step()
        except Poisoned:
            self.kill(number)
            self.start(number)
            return True

    def compute_step(self) -> bool:
        """Each worker computes a step."""
        attached = [n for n, group in enumerate(self.engine.groups) if group.link.is_attached]
        computed = [self.step(number) for number in attached]
        return any(computed)

    def run_round(self) -> int:
        published = sum(group.steps.run_round(self.now) for group in self.engine.groups)
        self.check_bounds()
        return published

    def check_bounds(self) -> None:
        """A row is in the published steps of one ring at most; groups and the table have the same sequences."""
        engine, table = self.engine, self.engine.table
        members = [sequence for group in engine.groups for sequence in group.members]
        assert sorted(map(id, members)) == sorted(map(id, table.scheduled))
        assert sorted([s.run.row for s in members] + list(table.free_rows)) == list(range(self.settings.n_rows))
        for number, group in enumerate(engine.groups):
            assert group.members == sorted(group.members, key=lambda s: s.key)
            for step in group.steps.unacknowledged:
                assert all(entry.sequence.run.group == number for entry in step.entries)
            for s in group.members:
                run = s.run
                assert run.group == number
                assert run.inflight == sum(e.sequence is s for step in group.steps.unacknowledged for e in step.entries)
                assert run.computed <= run.planned <= min(run.leased, run.end - 1) or not run.pages
        assert engine.worker.is_attached == any(group.link.is_attached for group in engine.groups)


@pytest.mark.parametrize("seed", range(40))
def test_any_order_of_events_gives_the_tokens_of_one_group(seed: int) -> None:
    rng = random.Random(seed)
    world = GroupsWorld(rng.choice((2, 3)), batch=rng.choice((2, 5)), pages=rng.choice((24, 64)), period=seed % 3)
    prefix = [rng.randrange(VOCAB) for _ in range(70)]
    for i in range(rng.randrange(4, 14)):
        prompt = prefix[: rng.choice((0, 30, 70))] + [i + 1] * rng.randrange(1, 40)
        world.submit(submission(f"s{i}", prompt, rng.randrange(1, 60), seed=i, tenant=f"t{i % 3}", stop=i % 2 == 0))
    down: set[int] = set()
    for _ in range(rng.randrange(50, 400)):
        number = rng.randrange(world.n_groups)
        event = rng.choice(EVENTS)
        match event:
            case "step" if number not in down:
                world.step(number)
            case "round":
                world.run_round()
                world.exchange_with_kv(rng.randrange(5))
            case "kv":
                world.exchange_with_kv()
            case "kill" | "half" if number not in down:
                world.kill(number, half_way=event == "half")
                down.add(number)
            case "start" if number in down:
                world.start(number)
                down.discard(number)
            case "restart kv" if rng.random() < 0.2:
                world.restart_kv()
            case "cancel" if rng.random() < 0.2:
                world.cancel(f"s{rng.randrange(14)}")
        world.collect()
    for number in down:
        world.start(number)
    world.run_until_idle()
    world.check_all()


def test_sequences_of_a_dead_group_go_on_in_the_other_one() -> None:
    world = GroupsWorld(batch=4)
    for i in range(4):
        world.submit(submission(f"s{i}", [i + 1] * 30, 40, seed=i))
    for _ in range(12):
        world.run_round()
        world.exchange_with_kv()
        world.compute_step()
    first, second = world.engine.groups
    assert (len(first.members), len(second.members)) == (2, 2)
    world.engine.halt(world.now, 0)
    moved = list(first.members)
    for _ in range(3):
        world.run_round()
        world.step(1)
    assert first.members == moved, "the group may still compute them"
    computed = [sequence.run.computed for sequence in moved]
    second.link.pid = 77
    world.kill(0)
    assert not first.members and len(second.members) == 4
    started = [event for event in world.engine.outbox.events[GATEWAY] if event.name == "started"]
    assert {(event.sequence, event.pid) for event in started} == {(sequence.id, 77) for sequence in moved}
    world.run_round()
    assert [sequence.run.computed for sequence in moved] == computed, "nothing is computed again"
    assert world.engine.stats.preemptions == 0
    world.run_until_idle()
    world.check_all()
    assert set(world.ends.values()) == {"length"}


def test_the_end_of_an_answer_names_the_attachment_that_computed_it() -> None:
    world = GroupsWorld(batch=2)
    for i in range(2):
        world.submit(submission(f"s{i}", [i + 1] * 5, 3, seed=i))
    world.run_until_idle()
    rings = [group.link.ring for group in world.engine.groups]
    assert set(world.attachments.values()) == {ring.generation for ring in rings if ring is not None}
    world.submit(submission("refused", [1] * 500, 3))
    world.collect()
    assert "refused" not in world.attachments


def test_sequences_wait_while_no_group_is_attached_and_go_on_in_the_first_one_that_is() -> None:
    world = GroupsWorld(batch=4)
    for i in range(4):
        world.submit(submission(f"s{i}", [i + 1] * 30, 40, seed=i))
    for _ in range(12):
        world.run_round()
        world.exchange_with_kv()
        world.compute_step()
    world.kill(1)
    world.kill(0)
    assert not world.engine.is_ready
    assert world.run_round() == 0
    world.start(1)
    assert len(world.engine.groups[1].members) == 4
    world.run_until_idle()
    world.check_all()


def test_a_poisoned_sequence_ends_with_an_error_and_no_other_one() -> None:
    world = GroupsWorld(batch=8)
    for worker in world.workers:
        worker.poison = {100}
    for i in range(6):
        world.submit(submission(f"s{i}", [10 + i] * 20 + ([100] if i == 3 else []) + [7], 30, seed=i))
    world.run_until_idle()
    assert world.ends.pop("s3") == "error"
    assert world.errors["s3"] == "INFERENCE"
    for name in world.ends:
        assert world.tokens[name] == reference(world.submitted[name])[0]
    assert world.engine.stats.culprits == 1


def test_the_group_with_the_least_work_gets_the_next_sequence() -> None:
    world = GroupsWorld(3, batch=6)
    world.submit(submission("long", [1] * 200, 10, seed=1))
    world.run_round()
    for i in range(4):
        world.submit(submission(f"s{i}", [2 + i] * 20, 10, seed=i))
        world.run_round()
    assert [len(group.members) for group in world.engine.groups] == [1, 2, 2]
    members = [group.members for group in world.engine.groups]
    assert least_loaded(members, [0, 1], 64.0) == 1
    assert least_loaded([[], []], [0, 1], 64.0) == 0
    world.run_until_idle()
    world.check_all()


@pytest.mark.parametrize("cause", ["halted", "stalled"])
def test_no_sequence_waits_for_a_prefix_that_a_stuck_group_computes(cause: str) -> None:
    world = GroupsWorld(batch=4, max_step_tokens=32)
    world.submit(submission("leader", [7] * 200, 10, seed=1))
    world.run_round()
    world.exchange_with_kv()
    world.run_round()
    stuck = next(number for number, group in enumerate(world.engine.groups) if group.members)
    world.submit(submission("before", [7] * 200, 10, seed=2))
    world.run_round()
    assert world.engine.table.live["before"].dedup_leader is world.engine.table.live["leader"]
    get_stuck(world, stuck, cause)
    world.submit(submission("after", [7] * 200, 10, seed=3))
    for _ in range(100):
        world.run_round()
        world.exchange_with_kv()
        world.step(1 - stuck)
    world.collect()
    assert world.ends == {"before": "length", "after": "length"}
    recover(world, stuck, cause)
    world.run_until_idle()
    world.check_all()


@pytest.mark.parametrize("cause", ["halted", "stalled"])
def test_a_group_goes_on_without_the_pages_of_a_stuck_one(cause: str) -> None:
    """Another sequence than one in a step of the stuck group is preempted, and requests are admitted again."""
    world = GroupsWorld(batch=4, pages=20, page_tokens=16)
    for i in range(4):
        world.submit(submission(f"s{i}", [i + 1] * 30, 120, seed=i))
    for _ in range(12):
        world.run_round()
        world.exchange_with_kv()
        world.compute_step()
    world.run_round()
    youngest = max(world.engine.table.scheduled, key=lambda sequence: sequence.key)
    stuck = youngest.run.group
    healthy = {sequence.id for sequence in world.engine.groups[1 - stuck].members}
    assert youngest.run.inflight
    assert len(healthy) == 2
    get_stuck(world, stuck, cause)
    world.submit(submission("new", [99] * 5, 3, seed=9))
    for _ in range(400):
        world.run_round()
        world.exchange_with_kv()
        world.step(1 - stuck)
    world.collect()
    assert set(world.ends) == healthy | {"new"}
    assert world.engine.stats.preemptions == 1
    recover(world, stuck, cause)
    world.run_until_idle()
    world.check_all()


def get_stuck(world: GroupsWorld, number: int, cause: str) -> None:
    """A group is disconnected and may compute a step, or is connected and does not complete its step."""
    if cause == "halted":
        world.engine.halt(world.now, number)
    world.engine.groups[number].link.is_stalled = cause == "stalled"


def recover(world: GroupsWorld, number: int, cause: str) -> None:
    """The stuck group is killed and another one follows, or it computes again."""
    if cause == "halted":
        world.kill(number)
        world.start(number)
    world.engine.groups[number].link.is_stalled = False


def test_a_group_that_starts_again_gets_the_new_sequences() -> None:
    """Running ones stay where they are, and new ones even out the work, of which the running ones have done a part."""
    world = GroupsWorld(batch=8)
    for i in range(4):
        world.submit(submission(f"s{i}", [i + 1] * 30, 60, seed=i))
    for _ in range(8):
        world.run_round()
        world.exchange_with_kv()
        world.compute_step()
    world.kill(0)
    world.start(0)
    assert [len(group.members) for group in world.engine.groups] == [0, 4]
    for i in range(4, 8):
        world.submit(submission(f"s{i}", [i + 1] * 30, 60, seed=i))
    world.run_round()
    assert [len(group.members) for group in world.engine.groups] == [3, 5]
    world.run_until_idle()
    world.check_all()


def test_a_sequence_goes_to_a_group_that_computes_before_one_that_maps_its_arenas() -> None:
    world = GroupsWorld(batch=4)
    second = world.engine.groups[1].link.ring
    assert second is not None
    second.start(world.generation + 1)  # the worker has not read the generation yet
    assert not second.has_worker
    for i in range(4):
        world.submit(submission(f"s{i}", [1 + i] * 20, 5, seed=i))
    world.run_round()
    assert [len(group.members) for group in world.engine.groups] == [4, 0]
    world.serve(1, world.generation + 1)
    world.run_until_idle()
    world.check_all()


def test_a_tenant_that_is_left_out_in_one_group_keeps_its_place() -> None:
    """Steps of another group, in which no tenant is left out, do not count as its turn."""
    world = GroupsWorld(batch=4)
    seen: list[set[str]] = []
    settle = world.engine.queues.settle
    world.engine.groups[0].members.append(None)  # type: ignore[arg-type]
    world.engine.queues.settle = lambda waiting: seen.append({tenant.name for tenant in waiting})  # type: ignore[method-assign]
    tenant = world.engine.queues.tenant("left out")
    world.engine.groups[0].steps.settle([tenant])
    world.engine.groups[1].steps.settle([])
    world.engine.groups[0].members.clear()
    world.engine.groups[1].steps.settle([])
    assert seen == [{"left out"}, {"left out"}, set()]
    assert settle is not None


def test_no_step_is_published_early_while_the_sequences_are_divided_among_groups() -> None:
    """All groups have `max_batch_size` places together: the end of a stream in one is a place in each."""
    world = GroupsWorld(batch=4, pages=128)
    world.set_cost(60_000.0, 1.0, 0.001, is_fixed=True)
    for i in range(4):
        world.submit(submission(f"s{i}", [1, 2, 3 + i], 40, seed=i))
    groups = world.engine.groups
    while any(s.outputs < 2 for s in world.engine.table.live.values()):
        world.run_round()
        world.exchange_with_kv()
        world.now += max(group.steps.publish_wait_s(world.now) for group in groups)
        world.run_round()
        world.compute_step()
    world.run_round()
    assert [len(group.members) for group in groups] == [2, 2]
    assert [len(group.steps.unacknowledged) for group in groups] == [1, 1]
    world.kill(1)
    for _ in range(3):
        world.run_round()
        world.step(0)
    world.run_round()
    assert [len(group.members) for group in groups] == [4, 0]
    assert len(groups[0].steps.unacknowledged) == 2
    world.start(1)
    world.run_until_idle()
    world.check_all()
