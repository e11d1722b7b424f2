"""The fleet benchmark's instruments, with known answers: a real orchestrator before an engine that computes nothing."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest

from shm.checkpoint import PIECE_BYTES
from starling.bench.load import drive
from tools.bench.fleet import cold_start, deaths, forwarding
from tools.bench.fleet.fleet_under_test import FleetUnderTest
from tools.bench.fleet.limited_store import BURST_S, LimitedStore, limited_store, link
from tools.bench.fleet.overhead import body

pytestmark = pytest.mark.slow


def test_every_event_is_forwarded_and_a_delay_is_seen() -> None:
    with forwarding.Front(has_nginx=False) as front:
        assert set(front.targets) == {"engine", "orchestrator"}
        for target in (*front.targets.values(), front.tls):
            clients = [[forwarding.request(30, delay_ms=5)], [forwarding.request(7)]]
            delayed, prompt = drive(target, clients).responses
            assert [len(one.times) for one in (delayed, prompt)] == [30, 7]
            assert all(one.is_good and one.finish == "length" for one in (delayed, prompt))
            assert delayed.first_s >= 0.0045  # timers round to their clock
        found = forwarding.tiny_requests(front, 32)
        assert set(found) == set(front.targets) and found["orchestrator"]["requests_per_s"] > 0


def test_events_are_compared_byte_by_byte_and_answers_by_their_text() -> None:
    def event(text: str, finish: str = "null", name: str = "ab" * 12) -> str:
        return f'{{"id":"req-{name}","created":7,"choices":[{{"index":0,"text":"{text}","finish_reason":{finish}}}]}}'

    one = [event("a"), event("b"), event("c", '"length"'), "[DONE]"]
    grouped = [event("a", name="cd" * 12), event("bc", '"length"'), "[DONE]"]
    assert deaths.plain(one) != deaths.plain(grouped)
    assert deaths.answer(one) == deaths.answer(grouped) == ("abc", "length")
    assert deaths.answer(one[:-2]) != deaths.answer(one)
    assert deaths.plain([event("a")]) == deaths.plain([event("a", name="cd" * 12)])
    # What is lost or differs by one event, by the kind of death.
    for kind in deaths.KINDS:
        assert deaths.verdict(kind, one, one) == (False, False)
        assert deaths.verdict(kind, one[:1] + one[2:], one) == (False, True)
        assert deaths.verdict(kind, one[:-1], one)[0] and deaths.verdict(kind, [], one) == (True, True)
    assert deaths.verdict("orchestrator", grouped, one) == (False, False)
    assert deaths.verdict("host", grouped, one) == (False, True)


@pytest.mark.skipif(not Path(forwarding.NGINX).exists(), reason=f"{forwarding.NGINX} is not installed")
def test_the_rate_of_one_connection_is_measured(tmp_path: Path) -> None:
    """A link whose bound holds for every request is the known answer; nginx's own bound is not."""
    digest, blobs = "d" * 64, tmp_path / "blobs"
    folder = blobs / "models" / digest
    folder.mkdir(parents=True)
    for number, nbytes in enumerate((PIECE_BYTES + 1, 1 << 20)):  # three pieces
        (folder / f"{number}.bin").write_bytes(bytes(nbytes))
    with limited_store(tmp_path / "nginx", blobs) as store, link(store.port, 20) as url:
        behind = LimitedStore(int(url.rpartition(":")[2]), tmp_path / "nginx/sent.log", blobs)
        found, seconds = behind.one_connection_s(digest)
        assert found == PIECE_BYTES + 1 + (1 << 20) and seconds >= found / 20e6 - BURST_S
        with pytest.raises(RuntimeError, match="no weights"):
            behind.one_connection_s("e" * 64)
    assert [line.split()[0] for line in (tmp_path / "nginx/sent.log").read_text().splitlines()] == [
        str(PIECE_BYTES),
        "1",
        str(1 << 20),
    ]


def test_a_cold_start_is_divided_by_the_measured_rate() -> None:
    ways = {"download, then load": [3.0, 9.0, 4.0], "layers as they arrive": [2.2], "page cache": [0.5]}
    found = cold_start.summary(110, (50, 1.0), ways)
    assert (found["size_over_rate_s"], found["medians"]["download, then load"]) == (2.2, 4.0)
    assert found["of_size_over_rate"] == {"download, then load": 1.818, "layers as they arrive": 1.0}


def test_a_stream_that_was_over_when_its_only_orchestrator_died_was_not_struck() -> None:
    """On a busy machine the kill may come too late: such a stream is neither lost nor kept."""
    reading = deaths.Reading()
    for last, is_reached in (("a", True), ("[DONE]", False)):
        reading.events = ["a", last]
        with nullcontext() if is_reached else pytest.raises(deaths.MissedError):
            deaths._check_reached(None, "orchestrator", "r", "a", 0, reading, has_other=False)  # type: ignore[arg-type]


def test_a_kill_that_misses_its_stream_is_refused_and_a_host_may_die() -> None:
    with FleetUnderTest(1) as fleet:
        bench = deaths.Bench(fleet, 0)
        bench.check_instrument()
        found = bench.measure("host", 1)
        assert (found["lost"], found["different"]) == (0, 0)
        assert found["pause_ms"]["max"] > 0
        # A stream that is over when its engine dies: nothing was struck.
        (agent,) = fleet.processes("-m starling agent")
        struck = fleet.tree(agent)
        with pytest.raises(deaths.MissedError, match="does not run"):
            deaths.once(fleet, "engine", body(deaths.PROMPT, 3))
        assert set(struck) <= set(fleet.tree(agent))
