"""Why a request went where it went: the last decisions, with each agent's score and its terms. Bounded."""

from __future__ import annotations

from collections import OrderedDict

import msgspec

from stages.orchestrator.score import Terms

MAX_DECISIONS = 2000  # requests; some 2 KiB each with four agents
MAX_MOVES = 16  # of one request


class AgentScore(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """An agent as routing saw it."""

    agent_id: str
    score_s: float
    terms: Terms
    level: str
    ahead: int
    matched_bytes: int
    state: str = ""  # of the model there; "": not loaded
    is_candidate: bool = True
    reason: str = ""  # why it is none


class Choice(msgspec.Struct, kw_only=True, gc=False):
    """One choice of an agent."""

    agent_id: str
    at: float  # s since 1970
    cause: str  # "new", "moved", "cold", "overloaded": a further copy is loaded
    predicted_s: float  # until the first token
    scores: tuple[AgentScore, ...]


class PageTransfer(msgspec.Struct, kw_only=True, gc=False):
    """What was done with the KV pages of a request that moves."""

    source: str  # agents
    target: str
    computing_s: float  # estimates
    sending_s: float = 0.0  # 0: the pages were not counted
    pages: int = 0
    bytes: int = 0
    outcome: str = ""  # "sent"; "computed": that is faster; "failed", and computed
    reason: str = ""
    took_s: float = 0.0


class Decision(msgspec.Struct, kw_only=True, gc=False):
    """All choices of one request."""

    request_id: str
    model: str
    choices: list[Choice] = []
    first_token_s: float = 0.0  # what happened; 0: not yet
    outcome: str = ""  # "": running
    transfers: list[PageTransfer] = []  # of its KV pages


class DecisionLog:
    """The last `MAX_DECISIONS` requests."""

    def __init__(self, most: int = MAX_DECISIONS) -> None:
        self._most = most
        self._decisions: OrderedDict[str, Decision] = OrderedDict()

    def __len__(self) -> int:
        return len(self._decisions)

    def add(self, request_id: str, model: str, choice: Choice) -> None:
        """A choice was made."""
        decision = self._decisions.get(request_id)
        if decision is None:
            decision = self._decisions[request_id] = Decision(request_id=request_id, model=model)
            while len(self._decisions) > self._most:
                self._decisions.popitem(last=False)
        decision.choices.append(choice)
        del decision.choices[1:-MAX_MOVES]  # the first one stays

    def add_transfer(self, request_id: str, transfer: PageTransfer) -> None:
        """KV pages of a request were sent, or not."""
        decision = self._decisions.get(request_id)
        if decision is not None:
            decision.transfers.append(transfer)
            del decision.transfers[:-MAX_MOVES]

    def find(self, request_id: str) -> Decision | None:
        """The decision of a request; None if it is unknown or forgotten."""
        return self._decisions.get(request_id)

    def last(self, count: int) -> list[Decision]:
        """The last decisions, latest first."""
        return [self._decisions[name] for name in list(reversed(self._decisions))[:count]]
