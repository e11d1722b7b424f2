"""The fleet benchmark's instruments, with known answers: a real orchestrator before an engine that computes nothing."""

from __future__ import annotations

import pytest

from starling.bench.load import drive
from tools.bench.fleet import deaths, forwarding

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
