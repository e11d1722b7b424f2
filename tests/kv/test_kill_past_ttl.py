"""A kv process is killed when what is in use is older than its time to live: streams and turns lose nothing."""

from __future__ import annotations

from array import array
from pathlib import Path

import pytest

from pipeline.protocol import messages as m
from tests.kv.process import PAGE_TOKENS, KvProcess, Scheduler, configure, write_model
from tests.kv.process_peers import Peers, words

pytestmark = pytest.mark.slow

TTL_S = 1


def test_pages_that_a_stream_holds_longer_than_the_time_to_live(tmp_path: Path) -> None:
    configure(tmp_path, {"ttl_s": TTL_S})
    digest = write_model(tmp_path)
    with KvProcess(tmp_path) as kv, Scheduler(tmp_path, digest) as s:
        s.wait_ready()
        held = s.acquire("long", words(1, 2, 3))
        s.compute("long")
        s.run("later", words(7))
        s.wait(lambda: s.state().cached == 0)  # used after the stream began, and expired: the stream is older
        kv.kill()
        s.wait(lambda: s.ready is None)
        kv.start()
        s.wait_ready()
        assert [frame for frame in s.frames if isinstance(frame, m.Denied) and not frame.id] == []
        s.run("after", words(8))
        s.wait(lambda: s.state().cached == 0)  # pages have expired here, too
        assert s.state().leased == len(held.pages)
        s.check("long", 3 * PAGE_TOKENS)
        assert s.acquire("next", words(1, 2, 3)).cached_tokens == 3 * PAGE_TOKENS


def test_a_session_whose_turn_takes_longer_than_its_time_to_live(tmp_path: Path) -> None:
    configure(tmp_path)
    digest = write_model(tmp_path)
    tokens, more = (array("i", words(number)).tobytes() for number in (1, 2))
    with KvProcess(tmp_path) as kv, Peers(tmp_path, digest) as peers:
        peers.wait_up()
        ask = peers.gateway.ask
        for name in ("long", "unused"):
            ask(m.SessionBegin(1, "tiny", "t", name, create=True, ttl_s=TTL_S))
            assert isinstance(ask(m.SessionCommit(2, "tiny", "t", name, 1, 0, tokens)), m.SessionDone)
            if name == "long":
                assert isinstance(ask(m.SessionBegin(3, "tiny", "t", name)), m.SessionHeld)
        sessions = tmp_path / "state" / "sessions"
        peers.wait(lambda: len(list(sessions.glob("*/*.session"))) == 1)  # the one that was used later has expired
        kv.kill()
        peers.wait_down()
        kv.start()
        peers.wait_up()
        again = ask(m.SessionBegin(4, "tiny", "t", "long", resume=2))
        assert again == m.SessionHeld(4, "long", 2, tokens)
        done = ask(m.SessionCommit(5, "tiny", "t", "long", 2, len(tokens) // 4, more))
        assert done == m.SessionDone(5, "long", len(tokens + more) // 4)
