"""A real gateway whose system clock is set: journaled requests, ended answers and quotas stay as old as they are."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gateway.server import LONG_MINUTE, MakeServer, Server

BODY = {"prompt": "abc", "max_tokens": 100, "seed": 1, "ignore_eos": True}
# The system's clock of the process is off by the seconds in a file.
PREAMBLE = """
import os, time
_wall, _wall_ns, _path = time.time, time.time_ns, {path!r}
def _offset():
    try:
        return int(open(_path).read() or 0)
    except FileNotFoundError:
        return 0
time.time = lambda: _wall() + _offset()
time.time_ns = lambda: _wall_ns() + _offset() * 10**9
"""


def make(make_server: MakeServer, tmp_path: Path) -> tuple[Server, Path]:
    offset = tmp_path / "offset"
    preamble = f"{LONG_MINUTE}\n{PREAMBLE.format(path=str(offset))}"
    server = make_server(preamble=preamble, rate_limits={"requests_per_minute": 3})
    server.wait_ready()
    return server, offset


@pytest.mark.parametrize("jump_s", [86_400 * 365, -86_400 * 365])
@pytest.mark.parametrize("is_before_kill", [False, True])
def test_a_jump_changes_nothing(make_server: MakeServer, tmp_path: Path, jump_s: int, is_before_kill: bool) -> None:
    server, offset = make(make_server, tmp_path)
    server.peers.do(lambda: setattr(server.peers, "step_interval_s", 0.05))
    ended = server.post("/v1/generate", {**BODY, "max_tokens": 2})
    stream = server.stream("/v1/generate", BODY)
    events = stream.events()
    begun = next(events)
    if is_before_kill:
        offset.write_text(str(jump_s))
        next(events)
    assert server.post("/v1/generate", {**BODY, "max_tokens": 1}).status == 200
    server.process.kill()  # the successor starts after the jump
    offset.write_text(str(jump_s))
    server.kill_and_restart()
    stream.close()
    server.peers.do(server.peers.kill_scheduler)
    server.peers.do(server.peers.start_scheduler)
    server.wait_ready()
    server.peers.do(lambda: setattr(server.peers, "step_interval_s", 0.0))
    rest = server.resume(f"/v1/requests/{begun.id.partition(':')[0]}").all()
    assert rest[-1].data == "[DONE]"
    again = server.get(f"/v1/requests/{ended.headers['X-Request-Id']}")
    assert (again.status, again.json["choices"]) == (200, ended.json["choices"])
    assert server.post("/v1/generate", {**BODY, "max_tokens": 1}).status == 429  # the fourth of this minute
