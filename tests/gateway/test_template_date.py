"""The date that a chat template shows: given by the request, else that of `created`, and kept by the journal."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest

from tests.gateway.peers import MODEL
from tests.gateway.server import MakeServer, Server
from tests.gateway.server_journal import journaled, prompt

PATH = "/v1/chat/completions"
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "{now}"}], "max_tokens": 9, "seed": 3}


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("2024-02-29", "Thursday 29 February 2024 00:00"),
        ("2026-03-01T23:59:07", "Sunday 01 March 2026 23:59"),
    ],
)
def test_a_request_pins_the_date(server: Server, given: str, shown: str) -> None:
    first, second = (server.post(PATH, {**CHAT, "template_date": given}) for _ in range(2))
    assert first.status == 200, first.error
    specs = [spec for spec in journaled(server) if shown in prompt(spec)]
    assert len(specs) == 2
    assert specs[0].prompts == specs[1].prompts
    assert {spec.generation.template_date for spec in specs} == {datetime.fromisoformat(given).isoformat()}
    assert first.json["choices"] == second.json["choices"]


def test_without_a_date_the_template_shows_the_time_of_created(server: Server) -> None:
    request_id = server.post(PATH, CHAT).headers["X-Request-Id"]
    (spec,) = (spec for spec in journaled(server) if spec.id == request_id)
    created = datetime.fromtimestamp(spec.created)
    assert f"{created:%A %d %B %Y %H:%M}" in prompt(spec)
    assert spec.generation.template_date == created.isoformat()


def test_an_answer_after_a_restart_is_of_the_pinned_date(make_server: MakeServer) -> None:
    server = make_server()
    server.wait_ready()
    expected = server.post(PATH, {**CHAT, "template_date": "2024-02-29"})
    request_id = expected.headers["X-Request-Id"]
    server.kill_and_restart()
    again = server.get(f"/v1/requests/{request_id}")  # generated again
    assert (again.status, again.json["choices"]) == (200, expected.json["choices"])
    assert all("29 February 2024" in prompt(spec) for spec in journaled(server))
    assert {spec.generation.template_date for spec in journaled(server)} == {"2024-02-29T00:00:00"}


@pytest.mark.parametrize(
    "value", ["", "today", "2026-13-01", "2026-02-30", "2026-03-01T25:00:00", "2026-03-01T10:00:00Z", 20260301, ["x"]]
)
def test_another_form_is_refused(server: Server, value: Any) -> None:
    answer = server.post(PATH, {**CHAT, "template_date": value})
    assert (answer.status, answer.error["param"]) == (400, "template_date")
    assert "like 2026-03-01 or 2026-03-01T12:30:00" in answer.error["message"]


def test_other_endpoints_have_no_template(server: Server) -> None:
    answer = server.post("/v1/generate", {"prompt": "x", "template_date": "2026-03-01"})
    assert (answer.status, answer.error["param"]) == (400, "template_date")
