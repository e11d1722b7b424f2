"""Constraints are compiled in turns by tenant, and one at a time."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from pipeline.protocol.messages import Constraint
from shm import step_ring as sh
from shm.step_ring import StepsGeometry
from stages.scheduler.constraints import frames as f
from stages.scheduler.constraints.compile_turns import CompileTurns
from stages.scheduler.constraints.mask_writer import MaskWriter

from . import vocabularies
from .vocabularies import SIZE

TENANTS = "abc"
EVENTS = st.lists(
    st.tuples(st.sampled_from(["add", "add", "take", "discard"]), st.sampled_from(TENANTS), st.integers(0, 5))
)


@given(EVENTS)
def test_no_tenant_has_two_turns_while_another_one_waits(events: list[tuple[str, str, int]]) -> None:
    turns = CompileTurns()
    waiting: dict[str, list[str]] = {tenant: [] for tenant in TENANTS}
    passed: dict[str, list[str]] = {tenant: [] for tenant in TENANTS}  # turns of others since it waits, or had its own
    latest = ""

    def take() -> None:
        nonlocal latest
        name = turns.take()
        if name is None:
            assert not any(waiting.values())
            return
        tenant = latest = name[0]
        assert waiting[tenant].pop(0) == name
        passed[tenant].clear()
        for other in TENANTS:
            if waiting[other] and other != tenant:
                assert tenant not in passed[other]
                passed[other].append(tenant)

    for what, tenant, number in events:
        name = f"{tenant}{number}"
        if what == "add":
            if not waiting[tenant]:
                passed[tenant][:] = [latest] * (latest != tenant)  # its compilation may not have ended
            if name not in waiting[tenant]:
                waiting[tenant].append(name)
            turns.add(tenant, name)
        elif what == "discard":
            if name in waiting[tenant]:
                waiting[tenant].remove(name)
            turns.discard(tenant, name)
        else:
            take()
    for _ in range(sum(map(len, waiting.values())) + 1):
        take()
    assert not turns._waiting


class Writer:
    """A mask writer whose compilations end when the test wants. Sequences are named by tenant and number."""

    def __init__(self) -> None:
        self.order: list[str] = []  # sequences whose constraints are compiled
        self.running: list[Callable[[], None]] = []
        self.steps = sh.blank_steps(StepsGeometry(16, 4, 2, 16, 2, mask_words=sh.mask_words(SIZE)))
        self.writer = MaskWriter(self._later, 4, 4)
        self.writer.set_vocabulary("m", vocabularies.vocabulary())
        self.writer.set_rows("m", self.steps)
        self.rows: dict[str, int] = {}

    def _later(self, sequence: str, function: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        self.order.append(sequence)
        self.running.append(lambda: future.set_result(function()))
        return future

    def ask(self, name: str, pattern: str) -> None:
        row = self.rows[name] = len(self.rows)
        self.writer.handle(f.Open(name, "m", name[0], Constraint("regex", pattern, "regex")))
        self.writer.handle(f.Mask(name, row, 0, 0, 1))

    def end_one(self) -> None:
        [end] = self.running
        self.running.clear()
        end()
        self.writer.compiled()

    def has_mask(self, name: str) -> bool:
        return bool(self.steps.mask_ready[self.rows[name], 0] == sh.mask_tag(1, 0))


def test_a_tenants_constraint_waits_for_one_of_another_tenant_at_most() -> None:
    writer = Writer()
    for number in range(4):
        writer.ask(f"a{number}", f"a{{{number + 1}}}")
    writer.ask("b0", "b")
    assert writer.order == ["a0"]
    writer.end_one()
    writer.end_one()
    assert writer.has_mask("b0")
    while writer.running:
        writer.end_one()
    assert writer.order == ["a0", "b0", "a1", "a2", "a3"]
    assert all(map(writer.has_mask, writer.order))


def test_a_constraint_that_two_tenants_share_has_the_turn_of_both_and_is_compiled_once() -> None:
    writer = Writer()
    for number in range(3):
        writer.ask(f"a{number}", f"a{{{number + 1}}}")
    writer.ask("b0", "a{3}")
    while writer.running:
        writer.end_one()
    assert writer.order == ["a0", "b0", "a1"]
    assert all(map(writer.has_mask, ("a0", "a1", "a2", "b0")))
    assert not writer.writer._turns._waiting


def test_what_was_compiled_for_another_tenant_takes_no_turn() -> None:
    writer = Writer()
    for name, pattern in (("x0", "x"), ("a0", "g"), ("b0", "g"), ("b1", "h"), ("c0", "c")):
        writer.ask(name, pattern)
    while writer.running:
        writer.end_one()
    assert writer.order == ["x0", "a0", "b1", "c0"]
    assert writer.has_mask("b0")


def test_what_no_sequence_waits_for_is_not_compiled() -> None:
    """Nor is it kept: a tenant may open and close sequences for as long as a compilation takes."""
    writer = Writer()
    writer.ask("a0", "a")
    for number in range(1, 12):
        writer.ask(f"a{number}", f"b{{{number}}}")
        writer.writer.handle(f.Close(f"a{number}"))
    assert not writer.writer._turns._waiting
    writer.writer.handle(f.Close("a0"))
    writer.ask("a12", "c")
    while writer.running:
        writer.end_one()
    assert writer.order == ["a0", "a12"]
    assert writer.has_mask("a12")


def test_versions_that_are_unloaded_are_not_compiled_for() -> None:
    writer = Writer()
    writer.ask("a0", "a")
    writer.ask("a1", "b")
    writer.writer.handle(f.Forget("m"))
    writer.end_one()
    assert writer.order == ["a0"]
    assert not writer.running
