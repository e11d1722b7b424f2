"""`StepOwner` without an engine: Ctrl-C anywhere leaves no owner, and no call of `on_token` is lost or repeated."""

from __future__ import annotations

import itertools
import linecache
import sys
from collections import deque
from types import FrameType
from typing import Any, cast

import pytest

from starling import step_owner
from starling.generation import Delta, LocalRequest
from starling.step_owner import StepOwner


class Request:
    """The part of a request that an owner uses."""

    call_back = LocalRequest.call_back

    def __init__(self, owner: StepOwner) -> None:
        self._owner = owner
        self.deltas: deque[Delta] = deque()
        self.calls: list[Delta] = []
        self.on_token = self.calls.append

    def add(self, *numbers: int) -> None:
        for number in numbers:
            delta = Delta(id="request", text="", tokens=(number,), logprobs=(), finish_reason="")
            with self._owner.lock:
                self._owner.add_due(cast(LocalRequest, self))
                self.deltas.append(delta)

    @property
    def numbers(self) -> list[int]:
        """Of the calls that have been made."""
        return [delta.tokens[0] for delta in self.calls]


def fail(request: LocalRequest, error: Exception) -> None:
    raise AssertionError(request, error)


class Interrupt:
    """Raises `KeyboardInterrupt` at one of the places of `starling/step_owner.py` that a thread passes.

    A place is the begin of a line, of a function of the module, or of a function that it calls. The end of a `with`
    is none: Python handles no signal between the block and the release of the lock.
    """

    def __init__(self, place: int) -> None:
        """`place`: its number, from 0 on."""
        self._left = place
        self._before = sys.gettrace()

    def __enter__(self) -> Interrupt:
        sys.settrace(self._trace)
        return self

    def __exit__(self, *exception: object) -> None:
        sys.settrace(self._before)

    @property
    def has_come(self) -> bool:
        return self._left < 0

    def _trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        here, caller = frame.f_code.co_filename, frame.f_back
        is_ours = here == step_owner.__file__
        is_called = event == "call" and caller is not None and caller.f_code.co_filename == step_owner.__file__
        is_place = is_called or (is_ours and event in ("call", "line"))
        if is_place and not (event == "line" and self._is_leaving(frame)):
            self._left -= 1
            if self.has_come:
                sys.settrace(None)
                raise KeyboardInterrupt
        return self._trace if is_ours else None

    @staticmethod
    def _is_leaving(frame: FrameType) -> bool:
        """The line is that of a `with` whose lock is taken."""
        text = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
        return text == "with self.lock:" and frame.f_locals["self"].lock.locked()


def passes(is_step: bool, place: int) -> bool:
    """Interrupt an owner, and check what is left. False: it passes fewer places."""
    owner = StepOwner(fail)
    request = Request(owner)
    request.add(0)
    interrupt = Interrupt(place)
    try:
        with interrupt:
            if is_step:
                owner.own(lambda: request.add(1, 2), wait=True)
            else:
                owner.call_due()
    except KeyboardInterrupt:
        assert interrupt.has_come
    assert not owner.is_this_thread, place
    assert not owner.lock.locked(), place
    added = len(request.numbers) + len(request.deltas)
    request.add(3)
    assert owner.own(lambda: None, wait=False), place
    assert request.numbers == [*range(added), 3], place
    assert not request.deltas
    return interrupt.has_come


@pytest.mark.parametrize("is_step", [True, False])
def test_an_interrupt_anywhere_leaves_no_owner_and_loses_no_call(is_step: bool) -> None:
    n_places = next(place for place in itertools.count() if not passes(is_step, place))
    assert n_places > 20


def test_an_owner_makes_the_calls_of_an_action_that_raises() -> None:
    owner = StepOwner(fail)
    request = Request(owner)

    def action() -> None:
        request.add(0, 1)
        raise MemoryError

    with pytest.raises(MemoryError):
        owner.own(action, wait=True)
    assert request.numbers == [0, 1]
    assert not owner.is_this_thread
