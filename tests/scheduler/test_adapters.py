"""LoRA adapters at the scheduler: rows name them by digest, and a sequence is computed with its own one or fails."""

from __future__ import annotations

from pipeline.api.adapter_salt import with_adapter
from shm.step_ring import ADAPTER, adapter_tag

from .peers import VOCAB, Submit, submission
from .world import World

FIRST, SECOND = "1a" * 32, "2b" * 32
LOADED = (("first", FIRST), ("second", SECOND))


def adapted(name: str, digest: str, n: int = 40) -> Submit:
    return submission(name, [3] * n, 30, adapter=digest, cache_salt=with_adapter("", digest))


def attach(world: World, adapters: tuple[tuple[str, str], ...]) -> None:
    world.engine.attach(world.context, VOCAB, adapters=adapters)


def test_rows_name_the_adapter_of_their_sequence() -> None:
    world = World()
    attach(world, LOADED)
    for name, digest in (("a", FIRST), ("b", ""), ("c", SECOND)):
        world.submit(adapted(name, digest))
    world.run_round()
    tags = {s.id: int(world.steps.row_ints[s.run.row, ADAPTER]) for s in world.engine.table.scheduled}
    assert tags == {"a": adapter_tag(FIRST), "b": 0, "c": adapter_tag(SECOND)}
    assert 0 < adapter_tag(FIRST) != adapter_tag(SECOND) < 1 << 63
    # Equal prompts of other adapters have no prefix in common.
    assert all(s.dedup_leader is None for s in world.engine.table.scheduled)
    world.run_until_idle()
    world.check_all()
    assert set(world.ends.values()) == {"length"}


def test_an_adapter_that_is_not_loaded_is_refused() -> None:
    world = World()
    attach(world, LOADED[:1])
    world.submit(adapted("a", SECOND))
    world.submit(adapted("b", FIRST))
    world.run_until_idle()
    assert world.ends == {"a": "rejected", "b": "length"}
    assert world.errors["a"] == "CONFLICT"


def test_sequences_whose_adapter_is_gone_end_when_the_worker_returns() -> None:
    world = World()
    attach(world, LOADED)
    for name, digest in (("a", FIRST), ("b", ""), ("c", SECOND)):
        world.submit(adapted(name, digest))
    for _ in range(4):
        world.exchange_with_kv()
        world.run_round()
        world.compute_step()
    world.engine.detached(world.now)
    world.generation += 1
    world.ring.start(world.generation)
    world.worker.attach(world.generation)
    attach(world, LOADED[:1])
    world.run_until_idle()
    assert world.ends == {"a": "length", "b": "length", "c": "error"}
    assert world.errors["c"] == "CONFLICT"
    assert world.engine.state("ab" * 32, "", 0).adapters == LOADED[:1]
