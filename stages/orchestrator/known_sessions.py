"""Which agent has a session, as answers and moves have said. Without sockets."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence

from pipeline.errors import StarlingError
from stages.orchestrator.forward import Out

MAX_SESSIONS = 100_000  # whose agent is remembered; of others, the agents are asked
_SESSION = re.compile(rb'"session_id":"([^"\\]{1,256})"')


def session_in(data: bytes) -> str:
    """The session that an answer names; "": none."""
    match = _SESSION.search(data)
    return match[1].decode() if match is not None else ""


class KnownSessions:
    """One per orchestrator. `has_emptied`: see registry.py."""

    def __init__(self, has_emptied: Callable[[str], bool]) -> None:
        self._has_emptied = has_emptied
        self._agents: OrderedDict[tuple[str, str], str] = OrderedDict()  # by tenant and session
        self._moved: OrderedDict[tuple[str, str], bool] = OrderedDict()  # of those, without a turn since their move

    def agent_of(self, tenant: str, session: str | None) -> str:
        """The agent that has the session, as far as is known; "" if it is not."""
        agent = self._agents.get((tenant, session), "") if session else ""
        return "" if agent and self._has_emptied(agent) else agent

    def bind(self, tenant: str, session: str, agent_id: str) -> None:
        """The session is at this agent."""
        self._agents[tenant, session] = agent_id
        self._agents.move_to_end((tenant, session))
        if len(self._agents) > MAX_SESSIONS:
            self._agents.popitem(last=False)

    def bind_moved(self, tenant: str, session: str, agent_id: str) -> None:
        """The session has moved to this agent."""
        self.bind(tenant, session, agent_id)
        self._moved[tenant, session] = True
        if len(self._moved) > MAX_SESSIONS:
            self._moved.popitem(last=False)

    def take_moved(self, tenant: str, session: str) -> bool:
        """Whether this is the first turn since the session has moved."""
        return self._moved.pop((tenant, session), False)

    def forget(self, tenant: str, session: str) -> None:
        """The session has ended."""
        self._agents.pop((tenant, session), None)


class SessionReader:
    """An `Out` that passes a stream on, and reads its session. `session`: "" until an event names it."""

    def __init__(self, out: Out) -> None:
        self.session = ""
        self._out = out

    @property
    def is_begun(self) -> bool:
        """See `Out`."""
        return self._out.is_begun

    def begin(self, status: int, headers: Mapping[str, str]) -> None:
        """See `Out`."""
        self._out.begin(status, headers)

    async def write(self, data: bytes) -> None:
        """See `Out`."""
        self.session = self.session or session_in(data)
        await self._out.write(data)

    def write_now(self, data: bytes) -> bool:
        """See `Out`."""
        self.session = self.session or session_in(data)
        return self._out.write_now(data)

    async def fail(self, error: StarlingError, open_choices: Sequence[int]) -> None:
        """See `Out`."""
        await self._out.fail(error, open_choices)
