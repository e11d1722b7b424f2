"""Pieces from agent to agent over TLS, and in fleets of which some hosts have no certificate yet."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from pipeline.coordination.memory import MemoryStore
from pipeline.fleet.peer_tls import PeerTls
from stages.agent.peers import sharing
from tests.fleet.certificates import Authority
from tests.fleet.coordination_stores import Clock
from tests.fleet.members import TOKEN, member
from tests.fleet.site import Site

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(autouse=True)
def no_haste(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine an answer may take long: no agent is dropped or overlooked for that."""
    monkeypatch.setattr(sharing, "FIRST_LOOK_S", 600.0)
    monkeypatch.setattr("stages.agent.peers.client.STATE_S", 600.0)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture
async def store(clock: Clock) -> AsyncIterator[MemoryStore]:
    async with MemoryStore(clock, 100) as made:
        yield made


@pytest.mark.parametrize(
    ("holder", "asker"), [("both", "both"), ("none", "both"), ("none", "required"), ("required", "none")]
)
async def test_agents_of_a_roll_out_give_each_other_what_they_may(
    site: Site, store: MemoryStore, authority: Authority, holder: str, asker: str
) -> None:
    received: list[dict[str, str]] = []
    first_tls, second_tls = opened(authority, "a", holder), opened(authority, "b", asker)
    async with (
        member(site, store, "a", tls=first_tls, received=received) as first,
        member(site, store, "b", tls=second_tls) as second,
    ):
        await first.pull()
        arrival = await second.pull()
        assert second.is_right()
        assert arrival.report is not None
        given, _ = arrival.report.by_source.get("agent a", (0, 0))
    if "required" in (holder, asker) and "none" in (holder, asker):
        assert (given, received) == (0, [])  # the store has all of it
        return
    assert given
    is_tls = "none" not in (holder, asker)
    assert {one["Scheme"] for one in received} == {"https" if is_tls else "http"}
    assert {one.get("Authorization") for one in received} == {None if is_tls else f"Bearer {TOKEN}"}


def opened(authority: Authority, name: str, mode: str) -> PeerTls | None:
    return authority.open("agent", name, required=mode == "required") if mode != "none" else None


async def test_a_host_that_pretends_to_be_another_agent_gives_nothing(
    site: Site, store: MemoryStore, authority: Authority
) -> None:
    received: list[dict[str, str]] = []
    own, other = opened(authority, "a", "both"), opened(authority, "c", "both")
    async with (
        member(site, store, "a", tls=own, shown=other, received=received) as first,
        member(site, store, "b", tls=opened(authority, "b", "both")) as second,
    ):
        await first.pull()
        arrival = await second.pull()
        assert second.is_right()
        assert arrival.report is not None
        assert arrival.report.by_source.get("agent a", (0, 0)) == (0, 0)
    assert not received
