"""Further copies of a model whose agents are all full: which agents may load one, and who gets room that comes earlier.

A copy is loaded where nothing is computed, queued or loading.  Requests that wait for it stand in a line for the
agents that have the model: when one of their requests ends, the first in the line is woken, and chooses an agent again;
if that room is at an agent that cannot serve it, as with an answer that another version has begun, the next one is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Mapping

from pipeline.fleet.bodies import HeartbeatResponse
from pipeline.fleet.model_states import LOADING_STATES
from stages.orchestrator.decisions import AgentScore
from stages.orchestrator.interfaces import NodeView, RoutedRequest
from stages.orchestrator.memory_pressure import HIGH

ABSENT = ("", "UNLOADED")


def is_idle(details: HeartbeatResponse) -> bool:
    """Whether the agent has nothing to do, by its own report, and is not short of memory."""
    if details.state != "IDLE" or details.vllm_queue_length or details.memory_available < HIGH:
        return False
    return not any(
        one.running or one.vllm_queue_length or one.model_state in LOADING_STATES for one in details.loaded_models
    )


def full(scored: Collection[AgentScore]) -> list[AgentScore]:
    """The agents that have the model ready, and too many requests."""
    return [one for one in scored if one.state == "READY" and "under way" in one.reason]


def are_wanted(request: RoutedRequest, scored: Collection[AgentScore]) -> bool:
    """Whether a further copy would serve the request: agents are full, and no session or answer ties it to one."""
    if request.pinned or request.is_held or request.begins:
        return False
    # A release that takes no conversations would take none on the next agent either.
    return bool(full(scored)) and not any("takes no conversations" in one.reason for one in scored)


def places(
    scored: Collection[AgentScore], table: Mapping[str, NodeView], begun: Collection[str], busy: Collection[str]
) -> list[AgentScore]:
    """The agents where a copy may be loaded: those that are loading it, or else those that are idle.

    `begun`: agents that load it for a request; `busy`: those that have other work, as far as is known here.
    """
    fit = [one for one in scored if one.is_candidate]
    if loading := [one for one in fit if one.agent_id in begun or one.state in LOADING_STATES]:
        return loading
    fit = [one for one in fit if one.agent_id not in busy and one.state in ABSENT]
    return [one for one in fit if is_idle(table[one.agent_id].details)]


class Turn:
    """Of a request in a line."""

    def __init__(self, model: str) -> None:
        self.model = model
        self.come = asyncio.get_running_loop().create_future()

    def reset(self) -> None:
        """The request has looked for room: the next call wakes it again."""
        if self.come.done():
            self.come = asyncio.get_running_loop().create_future()


class RoomLines:
    """Requests that wait for room at an agent of their model, in the order in which they came."""

    def __init__(self) -> None:
        self._lines: dict[str, dict[Turn, None]] = {}

    def join(self, model: str) -> Turn:
        """A new turn, the last one of the model. Its owner must leave."""
        turn = Turn(model)
        self._lines.setdefault(model, {})[turn] = None
        return turn

    def leave(self, turn: Turn) -> None:
        """The request waits no more. If it was woken and has not looked for room, the next one is woken."""
        line = self._lines[turn.model]
        del line[turn]
        if not line:
            del self._lines[turn.model]
        if turn.come.done():
            self.wake(turn.model)

    def wake(self, model: str) -> None:
        """An agent has room for one request of the model."""
        _wake_first(self._lines.get(model, ()))

    def pass_on(self, turn: Turn) -> None:
        """The request was woken for room that it cannot use: the next one behind it is woken."""
        behind = iter(self._lines[turn.model])
        for one in behind:
            if one is turn:
                break
        _wake_first(behind)


def _wake_first(turns: Iterable[Turn]) -> None:
    """Wake the first one that is not woken."""
    for turn in turns:
        if not turn.come.done():
            turn.come.set_result(None)
            return
