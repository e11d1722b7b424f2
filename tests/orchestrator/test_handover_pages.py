"""A successor to which the pages of a stream are being sent has that stream already, as routing sees it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from stages.orchestrator.forward import Forward, Tries
from stages.orchestrator.handover import Handovers
from stages.orchestrator.output_record import OutputRecord
from stages.orchestrator.upstream import Unreachable
from tests.orchestrator.agents import MODEL, engine, request, router, view


@pytest.mark.parametrize("ends", ["sent", "left"])
async def test_a_successor_is_busy_while_pages_are_on_their_way(ends: str) -> None:
    """Of two streams that move at once the second one sees the first: they do not go to the same agent."""
    found = router(*(view(name, engine(can_continue=True)) for name in ("old", "new", "other")))
    may_come, wanted = asyncio.Event(), asyncio.Queue[str]()
    sent: list[tuple[str, int]] = []
    released: list[str] = []

    async def bring(source: str, route: Any, forward: Forward, copy_id: str, n_output: int) -> None:
        wanted.put_nowait(route.agent_id)
        await may_come.wait()

    async def send(route: Any, forward: Forward, output: bytes) -> Any:
        sent.append((route.agent_id, found.under_way(route.agent_id)))
        raise Unreachable("the test ends here")

    handovers = Handovers(found, send, lambda route, copy: released.append(copy.id), lambda: 0.0, bring)
    for name in ("req-1", "req-2"):
        forward = Forward(routed=request(name), path="/v1/completions", body=b"", headers={})
        assert handovers.begin(name, "old", forward, OutputRecord(), Tries(lambda: 0.0), lambda: None)
    chosen = {await wanted.get(), await wanted.get()}
    assert chosen == {"new", "other"}
    assert [found.under_way(one, MODEL) for one in sorted(chosen)] == [1, 1]
    if ends == "sent":
        may_come.set()
        while len(released) < 2:
            await asyncio.sleep(0)
        assert sorted(sent) == [("new", 1), ("other", 1)]
    await handovers.close()
    assert [found.under_way(one) for one in sorted(chosen)] == [0, 0]
    assert bool(released) == (ends == "sent")  # an engine that has got nothing is not called
