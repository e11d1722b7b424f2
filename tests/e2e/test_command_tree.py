"""Rules that every command keeps: what it prints as JSON, on terminals of 80 and 60 columns, and into pipes.

The whole tree of commands is walked, so that a new command is either in `READING` here, with its fields in
docs/operating.md, or among those that change or serve something.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import click
import pytest

from starling.cli import cli
from tests.e2e.server import ROOT, Server
from tests.starling.command_runner import Commands, Done
from tests.starling.test_help import commands as all_commands

pytestmark = pytest.mark.slow

REQUEST = "tree-request"
# Commands that read, with what they are called with.
READING: dict[str, tuple[str, ...]] = {
    "adapter list": (),
    "catalog": (),
    "config": (),
    "doctor": (),
    "gc": ("--dry-run",),
    "keys list": (),
    "kv": (),
    "kv check": (),
    "log-level": (),
    "logs": ("kv", "-n", "3"),
    "models": (),
    "show": ("smollm2-135m-instruct",),
    "status": (),
    "top": ("--count", "1", "--interval", "0.2"),
    "trace": (REQUEST,),
    "verify": ("smollm2-135m-instruct",),
}
# They need a fleet: tests/orchestrator/test_fleet_commands.py and tests/fleet run them.
OF_A_FLEET = {f"fleet {name}" for name in ("agents", "events", "launched", "logs", "models", "status", "why")}
OF_A_FLEET.add("fleet certificate show")
CHANGING = {
    *("agent", "bench", "chaos", "chat", "completion", "down", "drain", "fetch", "ingest", "load", "orchestrator"),
    *("prepare", "publish", "pull", "reload", "restart", "resume", "rm", "run", "stage", "supervise", "support-bundle"),
    *(
        "unload",
        "unpublish",
        "up",
        "fleet up",
        "fleet down",
        "fleet cordon",
        "fleet uncordon",
        "fleet drain",
        "fleet place",
        "fleet metrics-token",
        *(f"fleet certificate {name}" for name in ("authority", "agent", "orchestrator", "monitor")),
    ),
    *("adapter load", "adapter unload", "keys add", "keys revoke", "keys rotate", "kv clear", "kv warm"),
}
GROUPS = {"", "adapter", "fleet", "fleet certificate", "keys"}  # they only have subcommands
LINES = {"logs"}  # one JSON object a line, because it may follow
# Cursor movements and line ends separate what stands on one line; colours (m) do not.
_SEGMENT = re.compile(r"\x1b\[[0-9;?]*[A-La-lN-Zn-z]|[\r\n]")
_COLOUR = re.compile(r"\x1b\[([0-9;]*)m")


@pytest.fixture(scope="module")
def commands(demo_server: Server) -> Iterator[Commands]:
    """Runs commands against the demo server, which has answered a request."""
    body = {"prompt": "Once", "max_tokens": 2, "model": "smollm2-135m-instruct"}
    assert demo_server.request("POST", "/v1/completions", body, {"X-Request-Id": REQUEST})[0] == 200
    demo_server.wait_recorded()
    with Commands(demo_server.environment) as commands:
        yield commands


def words(name: str) -> tuple[str, ...]:
    return (*name.split(), *READING[name])


def documented_fields() -> dict[str, set[str]]:
    """The fields that docs/operating.md names for each command."""
    page = (ROOT / "docs" / "operating.md").read_text()
    found = {}
    for name, fields in re.findall(r"^\| `([a-z -]+) --json` \|[^|]*\| (.+) \|$", page, re.MULTILINE):
        found[name] = set(re.findall(r"`([a-z0-9_]+)`", fields))
    return found


def fields(value: object) -> set[str]:
    """Those of an object, or of the first object of a list."""
    if isinstance(value, list):
        return fields(value[0]) if value else set()
    return set(value) if isinstance(value, dict) else set()


def no_traceback(done: Done) -> bool:
    return "Traceback" not in done.output + done.errors


def test_every_command_is_one_that_reads_or_one_that_changes() -> None:
    names = {" ".join(words) for words in all_commands()}
    assert names - GROUPS == set(READING) | OF_A_FLEET | CHANGING
    assert not set(READING) & CHANGING


@pytest.mark.parametrize("name", sorted(set(READING) | OF_A_FLEET))
def test_every_reading_command_takes_json(name: str) -> None:
    command: click.Command = cli
    for word in name.split():
        assert isinstance(command, click.Group)
        found = command.get_command(click.Context(command), word)
        assert found is not None
        command = found
    assert "--json" in [option for one in command.params for option in one.opts]


@pytest.mark.parametrize("name", READING)
def test_json_is_one_document_with_the_documented_fields(name: str, commands: Commands) -> None:
    done = commands(*words(name), "--json")
    assert (done.code, done.errors) == (0, "")
    found = [json.loads(line) for line in done.output.splitlines()] if name in LINES else json.loads(done.output)
    expected = documented_fields()[name]
    if name in LINES:
        assert all(expected <= set(line) for line in found)
    elif fields(found) and expected:
        assert fields(found) == expected


@pytest.mark.parametrize("name", READING)
def test_it_fits_terminals_and_is_plain_in_pipes(name: str, commands: Commands, demo_server: Server) -> None:
    for columns in (80, 60):
        shown = commands(*words(name), columns=columns)
        assert shown.code == 0
        assert no_traceback(shown)
        if name not in LINES:  # a log line has what it has
            output = shown.output.replace(str(demo_server.home), "~")  # its length is not the command's
            segments = [_COLOUR.sub("", part).rstrip() for part in _SEGMENT.split(output)]
            assert max(map(len, segments)) <= columns, max(segments, key=len)
    plain = commands(*words(name), columns=80, environment={"NO_COLOR": "1"})
    codes = {int(one or 0) for found in _COLOUR.findall(plain.output) for one in found.split(";")}
    assert not [code for code in codes if code >= 30]
    piped = commands(*words(name))
    assert piped.code == 0
    assert "\x1b" not in piped.output + piped.errors


@pytest.mark.parametrize("name", READING)
def test_a_reader_that_leaves_is_no_error(name: str, commands: Commands) -> None:
    done = commands(*words(name), reader_leaves=True)
    assert done.code in (0, 1)
    assert done.errors == ""


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("reload nothing", 2),
        ("load nothing", 2),
        ("unload nothing", 2),
        ("drain nothing", 2),
        ("resume nothing", 2),
        ("restart nothing", 2),
        ("log-level nothing debug", 2),
        ("trace nothing", 2),
        ("kv clear --model nothing", 2),
        ("run nothing hi", 2),
        ("chat nothing", 2),
        ("bench --model nothing --requests 1", 2),
        ("reload smollm2-135m-instruct:nothing", 2),
        ("reload smollm2-135m-instruct --path LICENSE", 78),
        ("load other --path LICENSE", 78),
        ("load other --path absent.gguf", 78),
        ("support-bundle --output LICENSE", 2),
    ],
)
def test_exit_codes(line: str, code: int, commands: Commands) -> None:
    done = commands(*line.split())
    assert done.code == code, done
    assert no_traceback(done)
    assert done.errors.strip()
