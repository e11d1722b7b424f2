"""Log lines of the scheduler: which requests a step computed, and whose requests they are."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pipeline.observe import logs
from pipeline.observe.log_format import JsonFormatter
from pipeline.observe.log_output import RotatingFile
from pipeline.protocol.messages import Acquire, Reconcile
from shm import step_ring as sh
from stages.scheduler.core.step_log import LINE_S, MAX_REQUESTS

from .peers import submission
from .world import World

LOGGER = "starling.scheduler"


def submit(world: World, name: str, tokens: int = 4, **fields: Any) -> None:
    frame = submission(f"{name}/0", [1, 2, 3], tokens, **fields)
    world.submit(msgspec.structs.replace(frame, request=name))


def lines(caplog: pytest.LogCaptureFixture, event: str) -> list[dict[str, Any]]:
    return [vars(record) for record in caplog.records if record.getMessage() == event]


def test_a_line_names_the_requests_of_its_steps(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, LOGGER)
    world = World()
    submit(world, "req-1", tenant="a", session="s-1")
    submit(world, "req-2", tenant="b")
    world.run_until_idle()
    first = int(world.steps.control[sh.DONE])
    world.advance(LINE_S)
    submit(world, "req-3", tenant="a")
    world.run_until_idle()
    world.advance(LINE_S)
    both, last = lines(caplog, "requests of steps")
    assert both["requested_by"] == [
        {"request_id": "req-1", "tenant": "a", "session_id": "s-1"},
        {"request_id": "req-2", "tenant": "b", "session_id": None},
    ]
    assert (both["model"], both["generation"], both["first"], both["last"]) == ("m", world.generation, 1, first)
    assert [one["request_id"] for one in last["requested_by"]] == ["req-3"]
    assert (last["first"], last["last"]) == (first + 1, int(world.steps.control[sh.DONE]))
    world.advance(LINE_S)
    assert len(lines(caplog, "requests of steps")) == 2  # none without steps


def test_steps_of_two_attachments_have_lines_of_their_own(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, LOGGER)
    world = World()
    submit(world, "req-1")
    world.run_until_idle()
    world.kill_worker()
    submit(world, "req-2")
    world.run_until_idle()
    world.advance(LINE_S)
    found = lines(caplog, "requests of steps")
    assert [line["generation"] for line in found] == [world.generation - 1, world.generation]
    assert [[one["request_id"] for one in line["requested_by"]] for line in found] == [["req-1"], ["req-2"]]


@pytest.mark.parametrize("names", ["x", "\x00"])
def test_a_line_stays_whole_whatever_requests_are_called(
    names: str, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    caplog.set_level(logging.DEBUG, LOGGER)
    world = World(batch=64, pages=512)
    for i in range(64):
        submit(world, f"req-{i}", tenant=names * 64, session=names * 128)
    world.run_until_idle()
    world.advance(LINE_S)
    (record,) = (one for one in caplog.records if one.getMessage() == "requests of steps")
    file = RotatingFile(tmp_path / "scheduler.log", 1 << 20, 1)
    logs.LineHandler(file, JsonFormatter("scheduler")).emit(record)
    file.close()
    (text,) = (tmp_path / "scheduler.log").read_text().splitlines()
    line = json.loads(text)
    assert "cut_bytes" not in line
    assert line["n_requests"] == 64
    assert 8 <= len(line["requested_by"]) <= MAX_REQUESTS
    assert line["requested_by"][0]["session_id"] == names * 128


def test_nothing_is_gathered_unless_lines_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, LOGGER)
    world = World()
    submit(world, "req-1")
    world.run_until_idle()
    caplog.set_level(logging.DEBUG, LOGGER)
    world.advance(LINE_S)
    assert lines(caplog, "requests of steps") == []


def test_lines_about_a_sequence_name_whose_it_is(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, LOGGER)
    world = World()
    submit(world, "req-1", tenant="a", session="s-1")
    submit(world, "req-2", tokens=10_000, tenant="b", session="s-2")  # refused
    world.run_until_idle()
    for event, name in (
        ("a sequence is admitted", "1"),
        ("a sequence has ended", "1"),
        ("a sequence is refused", "2"),
    ):
        (line,) = lines(caplog, event)
        tenant = "ab"[int(name) - 1]
        assert (line["request_id"], line["tenant"], line["session_id"]) == (f"req-{name}", tenant, f"s-{name}")
        assert (line["model"], line["sequence"]) == ("m", f"req-{name}/0")


def test_kv_learns_whose_leases_they_are() -> None:
    """With the request for pages, and again when it has restarted."""
    world = World()
    submit(world, "req-1", tokens=40, tenant="a", session="s-1")
    world.run_round()
    (acquire,) = (frame for frame in world.engine.leases.frames if isinstance(frame, Acquire))
    assert (acquire.tenant, acquire.session) == ("a", "s-1")
    world.exchange_with_kv()
    world.engine.kv_down()
    world.kv.fresh()
    world.kv_up()
    (reconcile,) = (frame for frame in world.engine.leases.frames if isinstance(frame, Reconcile))
    assert [lease[0] for lease in reconcile.leases] == ["req-1/0"]
    assert reconcile.owners == (("a", "s-1"),)
    world.exchange_with_kv()
    world.run_until_idle()
    assert world.ends == {"req-1/0": "length"}
