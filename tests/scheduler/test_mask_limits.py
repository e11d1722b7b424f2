"""Constraints that are made to take memory or work: bounds hold, and what fails does not depend on what came before."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest

from pipeline.protocol.messages import Constraint
from shm import step_ring as sh
from stages.scheduler.constraints import frames as f
from stages.scheduler.constraints import grammar, mask_writer

from .masks import PLAIN, TEXT, Masks

HOSTILE = Constraint("regex", "[ab]*a[ab]{24}", "regex")  # a state for each combination of the last 24 letters


def alone(constraint: Constraint, length: int) -> bytes | None:
    """The mask of a new process, which has computed no other one."""
    return Masks(constraint).at(0, length)


@pytest.fixture
def few_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """Enough for the text and one mask, and used up by some masks."""
    monkeypatch.setitem(grammar._LIMITS, "max_lexer_states", 400)


@pytest.mark.usefixtures("few_states")
def test_what_the_masks_before_have_used_up_fails_no_sequence() -> None:
    """Neither those of the sequence itself nor those of another one with the same constraint."""
    masks = Masks(HOSTILE, HOSTILE)
    for length in range(0, len(TEXT), 3):
        for row in (0, 1):
            assert masks.at(row, length - row * (length % 2)) is not None, (length, row, masks.failed)
        if length % 30 == 0:
            assert masks.at(0, length) == alone(HOSTILE, length)
    assert masks.n_compiled > 1


@pytest.mark.usefixtures("few_states")
def test_a_turn_whose_constraint_is_compiled_meanwhile_for_one_sequence_alone_writes_its_mask(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The compilation of a sequence that has reached a limit becomes that of all when its mask is written."""
    used, begun = 0, list[tuple[Future[Any], Callable[[], Any]]]()

    def later(sequence: str, function: Callable[[], Any]) -> Future[Any]:
        begun.append((Future(), function))
        return begun[-1][0]

    masks = Masks(HOSTILE, HOSTILE, max_bytes=1000, used_bytes=lambda: used)
    assert masks.at(0, 0) is not None
    monkeypatch.setattr(masks.writer, "_compile_later", later)
    for length in range(0, len(TEXT), 3):
        masks.writer.handle(f.Mask("1", 1, 0, length, 1, ()))
        if begun:
            break
    used = 5000
    masks.writer.limit_memory()  # drops what the other one has
    masks.writer.handle(f.Mask("0", 0, 0, 1, 1, ()))
    while begun:
        future, function = begun.pop()
        future.set_result(function())
        masks.writer.compiled()
    assert not masks.writer.answers
    for row, wanted in ((0, 1), (1, length)):
        assert masks.steps.mask_ready[row, wanted % sh.MASK_SLOTS] == sh.mask_tag(1, wanted)


@pytest.mark.usefixtures("few_states")
def test_draft_tokens_use_up_no_limit() -> None:
    masks = Masks(HOSTILE)
    for length in range(0, len(TEXT) - 16, 5):
        assert masks.at(0, length, tuple(TEXT[length : length + 8])) is not None
        assert 0 <= masks.kept["0"] <= 8
        if length % 50 == 0:
            assert masks.at(0, length) == alone(HOSTILE, length)
    assert not masks.failed
    assert masks.n_compiled > 1


def test_what_is_beyond_the_limits_by_itself_fails_by_name_alone_and_at_the_same_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(grammar._LIMITS, "max_lexer_states", 200)
    masks = Masks(HOSTILE, PLAIN)
    masks.at(1, 0)
    for length in range(0, 300, 4):
        if masks.at(0, length) is None:
            break
    assert masks.failed["0"].code == "INVALID_REQUEST"
    assert "too many states" in masks.failed["0"].reason and "<" not in masks.failed["0"].reason
    assert (alone(HOSTILE, length - 4) is None, alone(HOSTILE, length) is None) == (False, True)
    monkeypatch.undo()
    assert all(masks.at(1, length) is not None for length in range(0, 300, 10))


def test_automata_are_made_again_when_they_take_too_much_memory() -> None:
    used = 0
    masks = Masks(HOSTILE, PLAIN, max_bytes=1000, used_bytes=lambda: used)
    made: list[int] = []
    for length in range(0, 100, 5):
        matchers = [one.matcher for one in masks.writer._sequences.values()]
        made += [length for matcher in matchers if matcher is None]
        used += 300
        for row, constraint in enumerate((HOSTILE, PLAIN)):
            assert masks.at(row, length) == alone(constraint, length)
    assert 4 <= len(made) < 40


def test_memory_that_grammars_in_use_take_drops_automata_once() -> None:
    used = 0
    masks = Masks(PLAIN, max_bytes=1000, used_bytes=lambda: used)
    masks.at(0, 0)
    used = 5000
    masks.at(0, 1)
    assert masks.writer._sequences["0"].matcher is None
    masks.at(0, 2)
    masks.at(0, 3)
    assert masks.writer._sequences["0"].matcher is not None
    used = 100  # they are gone
    masks.at(0, 4)
    used = 1200
    masks.at(0, 5)
    assert masks.writer._sequences["0"].matcher is None


def test_grammars_that_no_sequence_uses_are_dropped_with_the_automata() -> None:
    used = 0
    masks = Masks(HOSTILE, PLAIN, max_bytes=1000, used_bytes=lambda: used)
    for row in (0, 1):
        masks.at(row, 0)
    masks.writer.handle(f.Close("0"))
    assert len(masks.writer._grammars) == 2
    used = 2000
    masks.at(1, 1)
    assert [key[2] for key in masks.writer._grammars] == [PLAIN.text]


def test_tokens_that_no_mask_allowed_are_a_fault_of_the_server() -> None:
    masks = Masks(PLAIN)
    masks.steps.tokens[0, 5] = ord("A")
    assert masks.at(0, 8) is None
    assert masks.failed["0"].code == "INFERENCE"
    assert masks.n_compiled == 1


def test_a_preempted_sequence_is_not_checked_against_its_rows_next_one() -> None:
    """Its grammar is compiled when the row has another sequence already."""
    masks = Masks(PLAIN)
    masks.steps.row_ints[0, sh.SERIAL] = 7
    ready: list[Callable[[], None]] = []

    def compile_later(sequence: str, function: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        ready.append(lambda: future.set_result(function()))
        return future

    masks.writer._compile_later = compile_later
    masks.writer.handle(f.Mask("0", 0, 0, 20, 1, (), 7))
    masks.steps.row_ints[0, sh.SERIAL] = 8
    masks.steps.tokens[0, :20] = list(b"12345678901234567890")
    masks.steps.mask_ready[0, :] = 5
    ready.pop()()
    masks.writer.compiled()
    assert masks.writer.answers == []
    assert set(masks.steps.mask_ready[0]) == {5}
    masks.steps.tokens[1, : len(TEXT)] = TEXT  # it is scheduled again, in another row
    masks.steps.row_ints[1, sh.SERIAL] = 9
    masks.writer.handle(f.Mask("0", 1, 0, 20, 2, (), 9))
    assert masks.writer.answers == []
    assert masks.steps.mask_ready[1, 20 % sh.MASK_SLOTS] == sh.mask_tag(2, 20)


@pytest.mark.parametrize("failures", [1, 2])
def test_a_compilation_that_fails_once_fails_no_later_sequence(failures: int) -> None:
    """It may have lacked memory for a moment. A sequence fails at the second one."""
    masks = Masks(PLAIN, PLAIN)
    left = [failures]
    compile_now = masks.writer._compile_later

    def fail_first(sequence: str, function: Callable[[], Any]) -> Future[Any]:
        if not left[0]:
            return compile_now(sequence, function)
        left[0] -= 1
        future: Future[Any] = Future()
        future.set_exception(MemoryError("no memory"))
        return future

    masks.writer._compile_later = fail_first
    assert (masks.at(0, 20) is None) == (failures == 2)
    assert masks.at(1, 20) == alone(PLAIN, 20)
    assert {name: failed.code for name, failed in masks.failed.items()} == ({"0": "INFERENCE"} if failures == 2 else {})


def test_memory_that_is_missing_for_drafts_fails_no_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    masks = Masks(PLAIN, PLAIN)
    plain = mask_writer.write_mask

    def fail(matcher: Any, steps: Any, row: int, known: int, epoch: int) -> None:
        if known > 8:
            raise MemoryError
        plain(matcher, steps, row, known, epoch)

    with monkeypatch.context() as patch:
        patch.setattr(mask_writer, "write_mask", fail)
        assert masks.at(0, 8, tuple(TEXT[8:12])) is not None
    assert masks.kept["0"] == 0
    assert [masks.at(row, 9) for row in (0, 1)] == [alone(PLAIN, 9)] * 2
