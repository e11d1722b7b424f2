"""What orchestrators share of responses and conversations, where the fleet has a place for them."""

from __future__ import annotations

from collections.abc import Callable

from pipeline.coordination.interface import CoordinationStore
from stages.orchestrator.responses.conversation_store import ConversationStore
from stages.orchestrator.responses.jobs import Jobs
from stages.orchestrator.responses.keeper import ResponseKeeper
from stages.orchestrator.responses.store import ResponseStore
from stages.orchestrator.responses.tenant_blobs import TenantBlobs
from stages.orchestrator.responses.turns import ConversationTurns


class SharedResponses:
    """One per orchestrator. `wall`: s since 1970."""

    def __init__(self, place: TenantBlobs, jobs: Jobs, store: CoordinationStore, wall: Callable[[], float]) -> None:
        self.place = place
        self.jobs = jobs
        self.store = ResponseStore(place, wall)
        self.turns = ConversationTurns(store, jobs, self.store, wall)
        self.conversations = ConversationStore(place, wall)
        self.keeper = ResponseKeeper(self.store, self.conversations)
