"""A real kv process whose system clock is set: its sessions and cached pages stay as old as they are."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pipeline.protocol import messages as m
from tests.kv.process import PAGE_TOKENS, KvProcess, configure, write_model
from tests.kv.process_peers import Peers, words

pytestmark = pytest.mark.slow

# The system's clock of the process is off by the seconds in a file.
CUSTOMIZE = """
import time
_wall, _wall_ns, _path = time.time, time.time_ns, {path!r}
def _offset():
    try:
        return int(open(_path).read() or 0)
    except FileNotFoundError:
        return 0
time.time = lambda: _wall() + _offset()
time.time_ns = lambda: _wall_ns() + _offset() * 10**9
"""


@pytest.mark.parametrize("jump_s", [86_400 * 365, -86_400 * 365])
def test_a_jump_ends_no_session_and_drops_no_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jump_s: int) -> None:
    configure(tmp_path, cache={"ttl_s": 600})
    offset = tmp_path / "offset"
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(CUSTOMIZE.format(path=str(offset)))
    digest = write_model(tmp_path)
    with Peers(tmp_path, digest) as peers:
        kv = KvProcess(tmp_path, site=tmp_path / "site")

        def check() -> None:
            peers.idle(2.2)  # two rounds of expiry
            held = peers.gateway.ask(m.SessionBegin(3, "tiny", "t", "a"))
            assert isinstance(held, m.SessionHeld)
            assert held.turn == 2
            peers.gateway.link.send(m.SessionAbort("tiny", "t", "a", 2))
            name = f"check-{os.urandom(4).hex()}"
            assert peers.scheduler.run(name, words(1, 2, 3)).cached_tokens == 3 * PAGE_TOKENS

        with kv:
            peers.wait_up()
            gateway = peers.gateway
            begun = m.SessionBegin(1, "tiny", "t", "a", create=True, ttl_s=600)
            assert isinstance(gateway.ask(begun), m.SessionHeld)
            assert isinstance(gateway.ask(m.SessionCommit(2, "tiny", "t", "a", 1, 0, bytes(64))), m.SessionDone)
            peers.scheduler.run("first", words(1, 2, 3))
            check()
            offset.write_text(str(jump_s))
            check()
            kv.kill()
            peers.wait_down()
        with kv:
            peers.wait_up()
            check()
            offset.unlink()
            check()
