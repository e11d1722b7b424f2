"""`starling keys`: the key is shown once, and every change is in the file that the server follows."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from pipeline.api.key_file import KeyFile, key_path
from pipeline.api.keys import Keys
from pipeline.config.schema import Config
from pipeline.errors import Unauthenticated
from pipeline.runtime.steady_clock import SteadyClock, clock_path
from starling.cli import cli
from starling.doctor.home import api_keys


def starling(*args: str) -> Result:
    return CliRunner().invoke(cli, ["keys", *args])


def followed(home: Path) -> Keys:
    return Keys(Config(), KeyFile(key_path(home / "state")))


def test_a_key_is_made_listed_replaced_and_revoked(home: Path) -> None:
    made = starling("add", "alice", "--scope", "metrics", "--scope", "models", "--tokens-per-day", "1000")
    assert made.exit_code == 0
    key = made.stdout.strip()
    assert key.startswith("sk-") and "\n" not in key
    assert "not shown again" in made.stderr and "requests need a key from now on" in made.stderr
    caller = followed(home).caller(f"Bearer {key}")
    assert (caller.tenant, caller.scopes, caller.is_admin) == ("alice", ("models", "metrics"), False)
    listed = starling("list").output
    assert key not in listed
    assert "alice" in listed and "models,metrics" in listed and "1000 tokens/day" in listed
    shown = json.loads(starling("list", "--json").output)
    assert shown[0]["limits"] == {"tokens_per_day": 1000}
    assert "sha256" not in shown[0]

    replaced = json.loads(starling("rotate", "alice", "--json").stdout)
    assert replaced["id"] == shown[0]["id"]
    keys = followed(home)
    with pytest.raises(Unauthenticated):
        keys.caller(f"Bearer {key}")
    assert keys.caller(f"Bearer {replaced['key']}").scopes == ("models", "metrics")
    third = starling("rotate", "alice", "--overlap", "3600").stdout.strip()
    keys = followed(home)
    assert keys.caller(f"Bearer {third}") == keys.caller(f"Bearer {replaced['key']}")

    assert starling("revoke", "alice").exit_code == 0
    with pytest.raises(Unauthenticated):
        followed(home).caller(f"Bearer {third}")
    assert starling("list", "--json").output == "[]\n"


def test_an_overlap_ends_by_the_clock_of_the_server(home: Path) -> None:
    """It is steady, and here two hours behind the system's, which was set after the server's start."""
    old = starling("add", "alice").stdout.strip()
    wall_ns = time.time_ns() - 7200 * 10**9
    clock = SteadyClock(clock_path(home / "state", "gateway"), lambda: wall_ns)
    starling("rotate", "alice", "--overlap", "3600")
    now = clock.seconds()
    keys = Keys(Config(), KeyFile(key_path(home / "state"), lambda: now))
    assert keys.caller(f"Bearer {old}").tenant == "alice"
    now += 3601
    with pytest.raises(Unauthenticated):
        keys.caller(f"Bearer {old}")


def test_wrong_names_are_refused_with_exit_code_2(home: Path) -> None:
    assert starling("add", "a").exit_code == 0
    before = key_path(home / "state").read_bytes()
    for args, reason in (
        (("add", "a"), "there is a key 'a'"),
        (("add", "a b"), "NAME is 'a b'"),
        (("add", "b", "--tenant", "x" * 65), "--tenant is"),
        (("add", "b", "--scope", "root"), "'root' is not one of"),
        (("add", "b", "--tokens-total", "-1"), "--tokens-total"),
        (("revoke", "a", "none"), "no key 'none'; there are a"),
        (("rotate", "none"), "no key 'none'"),
    ):
        refused = starling(*args)
        assert (refused.exit_code, reason in refused.output) == (2, True), refused.output
    assert key_path(home / "state").read_bytes() == before


def test_damage_is_reported(home: Path) -> None:
    assert starling("add", "a").exit_code == 0
    assert api_keys(Config()).state == "ok"
    key_path(home / "state").write_bytes(b"{}")
    done = subprocess.run(
        [sys.executable, "-m", "starling", "keys", "add", "b"], capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout) == (78, "")
    assert "is damaged" in done.stderr and "Traceback" not in done.stderr
    assert key_path(home / "state").read_bytes() == b"{}"
    assert api_keys(Config()).state == "problem"
