"""`starling kv clear` on a real kv process: what is dropped, what stays, and that a page is never another tenant's."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline.config import paths
from pipeline.errors import StarlingError
from pipeline.ipc import control
from pipeline.protocol import messages as m
from starling.cli.kv_clear import cleared
from tests.kv.process import PAGE_TOKENS, WAIT_S, KvProcess, Scheduler, configure, load_config, n_saved, write_model
from tests.kv.process_peers import words

pytestmark = pytest.mark.slow

KEYS = [{"key": f"sk-{name}", "tenant": name} for name in ("one", "two", "three")]


@pytest.fixture
def home(tmp_path: Path) -> Path:
    configure(tmp_path, spill_path=str(tmp_path / "spill"), spill_mb=8)
    path = tmp_path / "starling.yaml"
    settings = yaml.safe_load(path.read_text())
    path.write_text(yaml.safe_dump({**settings, "auth": {"api_keys": KEYS}}))
    return tmp_path


def salt(home: Path, tenant: str, of_request: str = "") -> str:
    """What the gateway sends for a tenant's request with this `cache_salt`."""
    return f"{load_config(home).tenant_salt(tenant)}\0{of_request}"


def clear(home: Path, s: Scheduler, model: str = "", tenant: str = "") -> dict[str, Any]:
    """Clear, and return what is reported of the model, while the scheduler goes on sending heartbeats."""
    request = {"op": "clear", "model": model, "tenant": tenant}
    report = cleared(paths.run_dir(load_config(home)), request, WAIT_S, pause=lambda _: s.turn())
    assert report["done"]
    (found,) = report["models"]
    return found


def fill(s: Scheduler, first: int, salt: str = "", n: int = 3, count: int = 6) -> list[list[int]]:
    """Run `count` sequences of `n` pages each. Returns their tokens."""
    prompts = [words(*range(first + n * i, first + n * (i + 1))) for i in range(count)]
    for i, tokens in enumerate(prompts):
        s.run(f"fill-{first}-{i}", tokens, salt)
    return prompts


def test_pages_that_nobody_uses_are_dropped_in_memory_and_on_disk(home: Path) -> None:
    digest = write_model(home)
    with KvProcess(home), Scheduler(home, digest) as s:
        total = s.wait_ready().pages
        prompts = fill(s, 100, n=3, count=total)  # three times the arena: the others are spilled
        held = words(7, 8)
        granted = s.acquire("held", held)
        s.compute("held")
        s.wait(lambda: s.state().leased > 0)
        report = clear(home, s)
        assert report["arena"] > 0
        assert report["disk"] > 0
        assert report["in_use"] == 2
        state = s.state()
        assert (state.cached, state.leased) == (0, len(granted.pages))
        # The sequence goes on with its pages, and others find what it has computed.
        s.check("held", 2 * PAGE_TOKENS)
        assert s.run("again", held).cached_tokens == 2 * PAGE_TOKENS
        s.release("held")
        # Nothing else is found, in memory or on disk.
        assert [s.run(f"new-{i}", tokens).cached_tokens for i, tokens in enumerate(prompts[:4])] == [0] * 4
        assert s.state().leased == 0  # the last release has come: a command may overtake frames
        again = clear(home, s)
        assert again["in_use"] == 0
        audit = control.call(paths.run_dir(load_config(home)), "kv", {"op": "audit"})
        assert [one["violation"] for one in audit["models"]] == [""]


def test_saved_pages_do_not_come_back_after_a_restart(home: Path) -> None:
    digest = write_model(home)
    with KvProcess(home) as kv, Scheduler(home, digest) as s:
        s.wait_ready()
        prompts = fill(s, 100, count=2)
        n = len(words(1, 2, 3)) // PAGE_TOKENS * len(prompts)
        s.wait(lambda: n_saved(home) == n)  # they are copied while no sequence runs
        assert clear(home, s)["disk"] == n
        kv.kill()
        kv.start()
        s.wait(lambda: s.ready is None)
        s.wait_ready()
        assert [s.run(f"new-{i}", tokens).cached_tokens for i, tokens in enumerate(prompts)] == [0, 0]


@pytest.mark.parametrize("restarts", [False, True])
def test_a_tenants_pages_are_dropped_and_no_others(home: Path, restarts: bool) -> None:
    """After a restart as well, when the salts of earlier requests are not known any more."""
    digest = write_model(home)
    with KvProcess(home) as kv, Scheduler(home, digest) as s:
        s.wait_ready()
        tokens = words(1)
        salts = {
            "own": salt(home, "one"),
            "of a request": salt(home, "one", "user-17"),
            "other": salt(home, "two"),
            "shared": "",
        }
        for name, one in salts.items():
            s.run(name, tokens, one)
        s.wait(lambda: s.state().cached == len(salts))
        if restarts:
            kv.kill(signal.SIGKILL)
            kv.start()
            s.wait(lambda: s.ready is None)
            s.wait_ready()
        clear(home, s, tenant="one")
        found = {name: s.run(f"again-{name}", tokens, one).cached_tokens for name, one in salts.items()}
        assert found == {"own": 0, "of a request": 0, "other": PAGE_TOKENS, "shared": PAGE_TOKENS}


def test_requests_that_cannot_be_served_are_refused(home: Path) -> None:
    digest = write_model(home)
    run_dir = paths.run_dir(load_config(home))
    with KvProcess(home), Scheduler(home, digest) as s:
        s.wait_ready()
        with pytest.raises(StarlingError, match="nothing was cleared"):
            control.call(run_dir, "kv", {"op": "clear_progress"})
        assert cleared(run_dir, {"op": "clear", "model": "another", "tenant": ""}, WAIT_S)["models"] == []
        # Without keys all share their pages.
        config = home / "starling.yaml"
        config.write_text(yaml.safe_dump({**yaml.safe_load(config.read_text()), "auth": {}}))
    with KvProcess(home), Scheduler(home, digest) as s:
        s.wait_ready()
        with pytest.raises(StarlingError, match="shares its cached pages"):
            control.call(run_dir, "kv", {"op": "clear", "tenant": "default"})
        assert isinstance(s.acquire("a", words(1)), m.Granted)
