"""An agent that has no room for another adapter unloads the one that was used longest ago, and no model."""

from __future__ import annotations

import msgspec

from pipeline.api.error_response import error_response
from pipeline.blobs.folder import FolderStore
from pipeline.errors import ResourceError
from pipeline.fleet.bodies import LoadedAdapter
from pipeline.fleet.records import AgentRecord
from stages.orchestrator.fleet_api import EventLog
from stages.orchestrator.model_changes import AgentCalls, ModelChanges
from stages.orchestrator.policies import by_score
from stages.orchestrator.registry import Registry
from stages.orchestrator.router import Published, ScoreRouter
from stages.orchestrator.score import Weights
from stages.orchestrator.signed_urls import UrlSigner
from stages.orchestrator.upstream import Answer
from tests.orchestrator.agents import DIGEST, MODEL, engine, view


class Whole:
    """An answer whose body has come."""

    def __init__(self, status: int, body: bytes) -> None:
        self.status, self.headers = status, dict[str, str]()
        self._parts = [body, b""]

    async def read(self) -> bytes:
        return self._parts.pop(0)

    def close(self) -> None:
        return


class FullAgent:
    """An agent that has room for one adapter."""

    def __init__(self) -> None:
        self.held = {"first"}
        self.calls: list[tuple[str, str]] = []
        self.adapter_digests: list[str] = []

    async def open(self, method: str, url: str, headers: object, body: bytes, **more: object) -> Answer:
        asked = msgspec.json.decode(body)
        path, name = url.removeprefix("http://one"), asked["model_id"]
        self.calls.append((path, name))
        if path == "/unload_model":
            self.held.discard(name.partition(":")[2])
        else:
            self.adapter_digests.append(asked["adapter_digest"])
            if self.held:
                shown = error_response(ResourceError("too many", "adapters"))
                return Whole(shown.status, shown.body)  # type: ignore[return-value]
        return Whole(200, b"{}")  # type: ignore[return-value]


async def test_the_adapter_that_was_used_longest_ago_leaves(tmp_path: object) -> None:
    agent = FullAgent()
    registry = Registry(None, lambda: 0.0)  # type: ignore[arg-type]
    await registry.register_node(AgentRecord(agent_id="one", url="http://one", incarnation="1"))
    catalog = {MODEL: Published(DIGEST, 1), f"{MODEL}:second": Published(DIGEST, 2, "2" * 64)}
    routing = ScoreRouter(Weights(), 100, catalog.get, lambda: 0.0, order=by_score, names=catalog.keys)
    first = LoadedAdapter(name="first", digest="1" * 64, bytes=1, is_ready=True)
    routing.update_routing_table([view("one", engine(adapters=(first,)), engine("other"), serves_adapters=True)])
    checked: list[str] = []

    async def check(agent_id: str) -> bool:
        checked.append(agent_id)
        return len(checked) == 2  # the first answer is late

    changes = ModelChanges(
        AgentCalls(agent, "t" * 32),  # type: ignore[arg-type]
        registry,
        routing,
        EventLog(lambda: 0.0),
        catalog,
        1000,
        lambda: True,
        check,
        lambda: 0.0,
        UrlSigner(FolderStore(tmp_path), 600, checked.append, lambda: 0.0),  # type: ignore[arg-type]
    )
    await changes.load("one", f"{MODEL}:second")
    assert agent.calls == [
        ("/load_model", f"{MODEL}:second"),
        ("/unload_model", f"{MODEL}:first"),
        ("/load_model", f"{MODEL}:second"),
    ]
    assert agent.adapter_digests == ["2" * 64] * 2 and checked == ["one"] * 2
