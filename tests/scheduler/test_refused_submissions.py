"""A submission that is refused changes nothing about any other sequence."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.protocol.messages import Constraint, Sampling, Submit
from stages.scheduler.constraints import constraints as constraints_module
from stages.scheduler.constraints import vetting as vetting_module
from stages.scheduler.constraints.vetting import Vetting
from tests.properties import examples

from .peers import submission
from .world import World

DEPTH = 4  # of the queue
MAX_HELD = 3


class Site(World):
    """A model whose only place in the batch is taken, with estimates of waiting times. Its clock stands still."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(batch=1, pages=8, max_queue_depth=DEPTH, vetting=Vetting(limit_s=10.0), **settings)
        self.engine.constraints.set_vocabulary("vocabulary")
        self.submit(submission("first", [1, 2, 3], 40))
        self.run_until_idle()
        assert self.engine.stats.steps > 32
        self.set_cost(4000.0, 1.0, 0.001, is_fixed=True)

    def fill(self, tenants: list[str]) -> None:
        """Submit a sequence for each; the first three get rows."""
        for number, tenant in enumerate(tenants):
            self.submit(submission(f"s{number}", [number + 1, 2, 3], 50, tenant=tenant))
            self.run_round()
        self.exchange_with_kv()
        self.collect()

    def others(self, name: str) -> tuple[Any, ...]:
        """The state of all sequences but one."""
        engine, table = self.engine, self.engine.table
        queues = engine.queues
        return (
            {id: (sequence, sequence.phase, sequence.run.row) for id, sequence in table.live.items() if id != name},
            {id: one.waiting for id, one in queues.tenants.items() if one.is_active},
            {id: queues.in_order(one) for id, one in queues.tenants.items() if one.waiting},
            list(table.scheduled),
            [id for id in engine.constraints._held if id != name],
            list(engine.constraints._vetting._jobs),  # type: ignore[union-attr]
            {gateway: list(parts) for gateway, parts in engine.outbox.tokens.items()},
            list(engine.leases.frames),
        )

    def refused(self) -> list[str]:
        """The sequences that have been refused since the last `collect`."""
        return [rejected.sequence for _, rejected in self.engine.outbox.rejected]

    def is_accepted(self, name: str) -> bool:
        """The sequence waits, for a row or for its constraint."""
        return name in self.engine.table.live or self.engine.constraints.is_held(name)


def regex(pattern: str) -> Constraint:
    return Constraint("regex", pattern, "regex")


def late(frame: Submit) -> Submit:
    return msgspec.structs.replace(frame, max_tokens=100, deadline_ms=100, sampling=Sampling(ignore_eos=True))


@pytest.mark.parametrize("why", ["the KV arena", "the vocabulary", "the deadline"])
def test_a_full_queue_keeps_its_sequences_when_the_new_one_is_refused(why: str) -> None:
    site = Site()
    site.fill(["a"] * (3 + DEPTH))
    assert site.engine.queues.depth == DEPTH
    before = site.others("new")
    frame = submission("new", [1000 if why == "the vocabulary" else 1], 20, tenant="b")
    if why == "the deadline":
        frame = late(frame)
    elif why == "the KV arena":
        frame = msgspec.structs.replace(frame, max_tokens=200)
    for _ in range(3):
        site.submit(frame)
    assert site.refused() == ["new"] * 3
    assert site.others("new") == before
    code = {"the KV arena": "INSUFFICIENT_RESOURCES", "the vocabulary": "INVALID_REQUEST", "the deadline": "OVERLOADED"}
    assert {rejected.code for _, rejected in site.engine.outbox.rejected} == {code[why]}
    site.engine.outbox.rejected.clear()
    site.submit(submission("fits", [1], 20, tenant="b"))
    assert site.refused() == [f"s{2 + DEPTH}"], "one that is admitted gets the place of the newest"
    assert site.is_accepted("fits")


@pytest.mark.parametrize("bound", ["submissions", "constraints"])
@pytest.mark.parametrize("why", ["the KV arena", "the deadline", "the queue"])
def test_constraints_that_wait_stay_when_the_new_submission_is_refused(
    why: str, bound: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if bound == "submissions":
        monkeypatch.setattr(constraints_module, "MAX_HELD", MAX_HELD)
    else:
        monkeypatch.setattr(vetting_module, "MAX_JOBS", MAX_HELD)
    site = Site()
    names = [f"c{number}" for number in range(MAX_HELD)]
    for name in names:
        site.submit(submission(name, [1], 5, tenant="a", constraint=regex(name)))
    site.fill(["b" if why == "the queue" else "a"] * (3 + DEPTH))
    assert [name for name in names if site.is_accepted(name)] == names
    before = site.others("new")
    frame = submission("new", [1], 20, tenant="b", constraint=regex("new"))
    if why == "the deadline":
        frame = late(frame)
    elif why == "the KV arena":
        frame = msgspec.structs.replace(frame, max_tokens=200)
    site.submit(frame)
    assert site.refused() == ["new"]
    assert site.others("new") == before
    site.submit(submission("fits", [1], 20, tenant="c", constraint=regex("fits")))
    assert site.refused() == ["new", names[-1]]


def test_a_sequence_that_ends_at_once_takes_no_place() -> None:
    site = Site()
    site.fill(["a"] * (3 + DEPTH))
    before = site.others("new")
    site.submit(submission("new", [1], 0, tenant="b"))
    ((part,),) = site.engine.outbox.tokens.values()
    assert (part.sequence, part.finish) == ("new", "length")
    assert not site.refused()
    site.collect()
    assert site.others("new") == before


def test_a_waiting_submission_is_not_kept_when_it_is_refused_at_its_repetition() -> None:
    """Its gateway receives one terminal event alone."""
    site = Site()
    frame = submission("new", [1], 20, tenant="b", constraint=regex("new"))
    site.submit(frame)
    assert site.engine.constraints.is_held("new")
    site.submit(msgspec.structs.replace(frame, max_tokens=200))
    assert site.refused() == ["new"]
    assert not site.is_accepted("new")


@settings(max_examples=examples(100))
@given(
    waiting=st.lists(st.sampled_from("ab"), min_size=DEPTH, max_size=3 + 2 * DEPTH),
    constrained=st.lists(st.sampled_from("ab"), max_size=MAX_HELD + 1),
    tenant=st.sampled_from("acc"),
    prompt=st.sampled_from([[1], [1] * 60, [1] * 200, [1000], []]),
    max_tokens=st.sampled_from([0, 1, 20, 60, 200]),
    deadline_ms=st.sampled_from([0, 0, 1, 100, 1500, 100_000]),
    ignore_eos=st.booleans(),
    pattern=st.sampled_from(["", "", "c0", "new"]),
    max_tenant_depth=st.sampled_from([0, 2]),
)
def test_a_refused_submission_changes_nothing_about_others(
    waiting: list[str],
    constrained: list[str],
    tenant: str,
    prompt: list[int],
    max_tokens: int,
    deadline_ms: int,
    ignore_eos: bool,
    pattern: str,
    max_tenant_depth: int,
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(constraints_module, "MAX_HELD", MAX_HELD)
        patch.setattr(vetting_module, "MAX_JOBS", MAX_HELD)
        patch.setattr(vetting_module, "MAX_TENANT_JOBS", 2)
        site = Site(max_tenant_depth=max_tenant_depth)
        for number, one in enumerate(constrained):
            site.submit(submission(f"c{number}", [1], 5, tenant=one, constraint=regex(f"c{number}")))
        site.fill(waiting)
        before = site.others("new")
        constraint = regex(pattern) if pattern else None
        fields = {"tenant": tenant, "deadline_ms": deadline_ms, "constraint": constraint}
        frame = submission("new", prompt, max_tokens, **fields)  # type: ignore[arg-type]
        site.submit(msgspec.structs.replace(frame, sampling=Sampling(ignore_eos=ignore_eos)))
        if "new" in site.refused():
            assert site.refused() == ["new"]
            assert not site.is_accepted("new")
            assert site.others("new") == before
        elif site.refused():
            assert site.is_accepted("new"), "the place that was made is used"
