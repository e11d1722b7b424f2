"""Requests in flight: how many there may be, in all and for one client, and what counts as one after its client left.

A request holds a slot from its arrival to its end.  What goes on when its client leaves, because it must not be
interrupted, holds the same slot until it has ended: the store of its response, a change of a conversation.  So a client
that begins requests and leaves cannot have more of them than one that stays.

With its slot a request holds the bytes of its body, from which another agent goes on with it.  A body that is too much
is refused when it arrives, so that a request that was accepted keeps its own.  A whole answer is counted as it comes
from its engine, if it is large.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from functools import partial
from typing import Any, TypeVar

from pipeline.api.fair_shares import FairShares
from pipeline.api.fair_shares import Refusal as Bound
from pipeline.api.held_bytes import UNCOUNTED_BYTES, HeldBytes
from pipeline.api.keys import is_key
from pipeline.errors import Overloaded

T = TypeVar("T")
BODIES = "of requests in flight are held (server.body_buffer_mb)"
ANSWERS = "of answers wait for clients that have not read them (server.response_buffer_mb)"


class _Slot:
    """Of one request. It is given back when nothing holds it any more."""

    def __init__(self, give_back: Callable[[], object], body: HeldBytes, answer: HeldBytes) -> None:
        self._give_back = give_back
        self._body = body
        self._answer = answer
        self._n_holders = 1

    def hold(self) -> bool:
        """Hold it, too. False: it was given back."""
        if not self._n_holders:
            return False
        self._n_holders += 1
        return True

    def hold_body(self, n: int) -> None:
        """Hold bytes of a body with it. Raises `Overloaded`."""
        if self._n_holders:
            self._body.add(n)

    def hold_answer(self, size: int) -> None:
        """Hold a whole answer with it, of which `size` bytes have come. Raises `Overloaded`."""
        fresh = size - self._answer.count  # after an engine has died the answer begins anew
        if self._n_holders and size > UNCOUNTED_BYTES and fresh > 0:
            self._answer.add(fresh)

    def release(self) -> None:
        """One of those who hold it has ended."""
        self._n_holders -= 1
        if not self._n_holders:
            self._body.give_back()
            self._answer.give_back()
            self._give_back()


_SLOT: ContextVar[_Slot | None] = ContextVar("slot", default=None)  # of the request that this task serves


class RequestSlots:
    """One per orchestrator. A principal is a tenant or key, or a client's address where there are no keys."""

    def __init__(
        self,
        total: int,
        share: int,
        share_of: Callable[[str], int],
        bodies: FairShares | None = None,
        answers: FairShares | None = None,
        state: str = "in flight",
    ) -> None:
        """`share`: of one principal; `share_of` returns it where it is another one.

        `bodies`, `answers`: the bounds on their bytes; None: there are none. `state`: of those counted, for the error.
        """
        self._shares = FairShares(total, share, total // 8, share_of=share_of)
        self._bodies = bodies
        self._answers = answers
        self._state = state

    @property
    def held(self) -> int:
        """Requests that are being answered, and what they have left to be done."""
        return self._shares.held

    def counted(self, principal: str) -> Counted:
        """Count a request of a principal meanwhile. Raises `Overloaded`."""
        shares = self._shares
        refusal = shares.refusal(principal)
        if refusal is not None:
            bound, what, source = shares.total, "for all clients together", "fleet.orchestrator.max_concurrent_requests"
            if refusal is Bound.SHARE:
                bound, what = shares.share_of(principal), "for one client"
                if is_key(principal):
                    what, source = "with this API key", "the key's own limit"
            raise Overloaded(
                f"{bound} requests can be {self._state} {what} ({source}), and no more are taken now; try again",
                retry_after_s=1.0,
            )
        return Counted(self, principal)

    def take(self, principal: str) -> _Slot:
        """A slot, whatever the bounds are; see `counted`."""
        self._shares.take(principal)
        body, answer = HeldBytes(self._bodies, principal, BODIES), HeldBytes(self._answers, principal, ANSWERS)
        return _Slot(partial(self._shares.give_back, principal), body, answer)


class Counted:
    """A context manager that holds a request's slot. Every request enters one, so no generator."""

    __slots__ = ("_principal", "_slot", "_slots", "_token")

    def __init__(self, slots: RequestSlots, principal: str) -> None:
        self._slots = slots
        self._principal = principal

    def __enter__(self) -> None:
        self._slot = self._slots.take(self._principal)
        self._token = _SLOT.set(self._slot)

    def __exit__(self, *exception: object) -> None:
        _SLOT.reset(self._token)
        self._slot.release()


def hold_body(n: int) -> None:
    """Count bytes of a body until the present request has ended, if it has a slot. Raises `Overloaded`."""
    slot = _SLOT.get()
    if slot is not None:
        slot.hold_body(n)


def hold_answer(size: int) -> None:
    """Count the bytes of a whole answer so far until the present request has ended. Raises `Overloaded`."""
    slot = _SLOT.get()
    if slot is not None:
        slot.hold_answer(size)


def counts_until_done(task: asyncio.Future[Any]) -> None:
    """Let a task that may outlive the request of the present one count as that request until it is done."""
    slot = _SLOT.get()
    if slot is not None and slot.hold():
        task.add_done_callback(lambda done: slot.release())


async def to_its_end(work: Awaitable[T]) -> T:
    """Wait for what goes on if the caller, whose client has left, is cancelled. It counts as the request meanwhile."""
    task = asyncio.ensure_future(work)
    counts_until_done(task)
    task.add_done_callback(lambda done: done.cancelled() or done.exception())
    return await asyncio.shield(task)
