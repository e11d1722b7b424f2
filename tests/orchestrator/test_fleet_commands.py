"""`starling fleet ...`: its tables on terminals and in pipes, its JSON, its exit codes and its completion."""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.shell_completion import ShellComplete

from pipeline.fleet import token
from pipeline.fleet.records import AgentRecord, agent_key, encode
from starling.cli import cli
from tests.e2e.test_command_tree import _COLOUR, _SEGMENT, documented_fields, fields
from tests.gateway.peers import MODEL
from tests.orchestrator.fleet import Fleet
from tests.orchestrator.streams import BODY, MINE
from tests.starling.command_runner import Commands, Done

READING = ("status", "agents", "models", "events", "why")
LONG = "http://an-agent-with-a-rather-long-name.region-1.example.invalid:18090"


@pytest.fixture(scope="module")
def run(fleet: Fleet) -> Iterator[Commands]:
    """Commands of an operator; an agent that does not answer has a long address."""
    fleet.wait(lambda state: all(one["health"] == "READY" for one in state["agents"]))
    hostile = AgentRecord(agent_id="three", url=LONG, incarnation="1")
    fleet.write(agent_key("three"), encode(hostile))
    fleet.wait(lambda state: any(one["reason"] for one in state["agents"]))
    environment = {
        "PATH": "/usr/bin:/bin",
        "HOME": str(fleet.home),
        "STARLING_HOME": str(fleet.home),
        "STARLING_CONFIG": str(fleet.home / "starling.yaml"),
        "STARLING_FLEET__ORCHESTRATOR__PORT": str(fleet.port),
    }
    with Commands(environment) as commands:
        yield commands
    fleet.write(agent_key("three"), None)


@pytest.fixture(scope="module")
def request_id(fleet: Fleet) -> str:
    """Of a request that was routed."""
    return str(fleet.post("/v1/generate", BODY, MINE).headers["X-Starling-Request"])


def words(name: str, request_id: str) -> tuple[str, ...]:
    return ("fleet", name, request_id) if name == "why" else ("fleet", name)


def shown(done: Done) -> list[str]:
    """The lines of a terminal without their colours."""
    return [_COLOUR.sub("", part).rstrip() for part in _SEGMENT.split(done.output)]


def test_the_log_has_changes_of_the_fleet_and_no_reads(run: Commands, fleet: Fleet) -> None:
    """`starling fleet up` reads the state several times a second until the model is there."""
    fleet.state()
    assert run("fleet", "uncordon", "one").code == 0
    assert run("fleet", "events", "--after", "x" * 3).code == 2
    deadline = time.monotonic() + 60
    while not (found := done_fleet_requests(fleet)):
        assert time.monotonic() < deadline
    assert {one["endpoint"] for one in found} == {"/v1/fleet/cordon"}


def done_fleet_requests(fleet: Fleet) -> list[dict[str, Any]]:
    """The lines about requests of the fleet's API that were not refused: other tests make some that are."""
    found = [json.loads(line) for line in list(fleet.lines) if '"fleet request"' in line]
    return [one for one in found if one["status"] < 400]


@pytest.mark.parametrize("name", READING)
def test_a_terminal_of_80_columns_shows_everything(name: str, run: Commands, request_id: str) -> None:
    for columns in (80, 60):
        done = run(*words(name, request_id), columns=columns)
        assert done.code == 0, done.output
        assert max(map(len, shown(done))) <= columns, done.output
        text = "".join("".join(shown(done)).split())
        assert "…" not in text, done.output
        if name in ("status", "agents"):
            assert all(part in text for part in ("one", "two", "three", LONG, f"{MODEL}(READY)")), done.output
    plain = run(*words(name, request_id), columns=80, environment={"NO_COLOR": "1"})
    codes = {int(one or 0) for found in _COLOUR.findall(plain.output) for one in found.split(";")}
    assert not [code for code in codes if code >= 30]


@pytest.mark.parametrize("name", READING)
def test_a_pipe_gets_plain_lines_and_json_the_documented_fields(name: str, run: Commands, request_id: str) -> None:
    done = run(*words(name, request_id))
    assert (done.code, done.errors) == (0, "")
    assert "\x1b" not in done.output and "…" not in done.output
    found = run(*words(name, request_id), "--json")
    assert (found.code, found.errors) == (0, "")
    assert fields(json.loads(found.output)) == documented_fields()[f"fleet {name}"]
    assert run(*words(name, request_id), reader_leaves=True).errors == ""


def test_events_have_a_time(run: Commands) -> None:
    lines = run("fleet", "events").output.splitlines()
    assert lines[0].split() == ["number", "time", "event", "agent", "model", "details"]
    assert re.fullmatch(r" *\d+  (\d\d:\d\d:\d\d|\d\d-\d\d \d\d:\d\d)  \S.*", lines[1]), lines[1]


@pytest.mark.parametrize(
    ("line", "code", "message"),
    [
        ("place nothing", 2, "there is no model 'nothing'"),
        ("drain nothing", 2, "there is no agent 'nothing'"),
        ("cordon nothing", 2, "there is no agent 'nothing'"),
        ("uncordon nothing", 2, "there is no agent 'nothing'"),
        ("uncordon UPPER!", 2, "agent is 'UPPER!'"),
        ("why req-nothing", 2, "has routed no request 'req-nothing'"),
        ("events --after -1", 2, "'--after'"),
        ("place nothing --replicas 1001", 2, "'--replicas'"),
        ("status --url nonsense", 2, "--url 'nonsense'"),
        ("logs nothing", 2, "there is no log of an agent 'nothing'"),
        ("nothing", 2, "No such command"),
    ],
)
def test_exit_codes(line: str, code: int, message: str, run: Commands) -> None:
    done = run("fleet", *line.split())
    assert (done.code, message in done.errors) == (code, True), done
    assert "Traceback" not in done.errors


def test_without_an_orchestrator_nothing_is_made(run: Commands, tmp_path: Path) -> None:
    """The token is made by a process of the fleet. One that a command makes would be unknown to all of them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        done = run("fleet", "status", "--url", url, environment={"STARLING_HOME": str(tmp_path / "home")})
    assert done.code == 1
    assert f"no orchestrator answers at {url}" in done.errors
    assert not (tmp_path / "home").exists()


def test_a_home_without_the_token_names_the_file(run: Commands, fleet: Fleet, tmp_path: Path) -> None:
    home = {"STARLING_HOME": str(tmp_path)}
    done = run("fleet", "status", environment=home)
    assert (done.code, list(tmp_path.iterdir())) == (78, [])
    assert f"{tmp_path / 'fleet-token'} does not exist: copy the file" in done.errors
    token.load_or_create(tmp_path / "fleet-token")
    done = run("fleet", "status", environment=home)
    assert done.code == 78
    assert f"does not accept {tmp_path / 'fleet-token'}" in done.errors


def test_the_shell_completes_agents_and_models(
    run: Commands, fleet: Fleet, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def names(line: str, incomplete: str = "") -> list[str]:
        found = ShellComplete(cli, {}, "starling", "_STARLING_COMPLETE").get_completions(line.split(), incomplete)
        return [item.value for item in found]

    monkeypatch.setenv("STARLING_HOME", str(fleet.home))
    url = f"http://127.0.0.1:{fleet.port}"
    for command in ("drain", "cordon", "uncordon"):
        assert names(f"fleet {command} --url {url}", "t") == ["three", "two"]
    assert names(f"fleet place --url {url}") == [MODEL]
    monkeypatch.setenv("STARLING_FLEET__ORCHESTRATOR__PORT", str(fleet.port))
    assert names("fleet drain", "o") == ["one"]
    monkeypatch.setenv("STARLING_HOME", str(tmp_path / "none"))
    assert names("fleet drain") == []  # no token, no names, and no error
    assert not (tmp_path / "none").exists()


def test_a_tab_sends_the_token_to_no_other_host(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    class Client:
        def __init__(self, config: object, url: str, **options: object) -> None:
            asked.append(url)

        def get(self, path: str) -> dict[str, list[dict[str, str]]]:
            return {"agents": [{"agent_id": "one"}]}

    monkeypatch.setattr("starling.client.fleet.FleetClient", Client)
    for url, known in (("http://127.0.0.1:1", ["one"]), ("http://half-typed-host", []), ("http://[", [])):
        found = ShellComplete(cli, {}, "starling", "_STARLING_COMPLETE").get_completions(
            ["fleet", "drain", "--url", url], ""
        )
        assert [item.value for item in found] == known
    assert asked == ["http://127.0.0.1:1"]
