"""State of the previous release is read by this one, and on the way back the previous one reads what this one wrote.

The code of v0.1.0 runs in processes of its own, from git, with the packages of this environment. It writes what its
stages write: sessions, quotas, a journal, prepared models. No stage starts, so that no kernels of v0.1.0 are compiled.
"""

from __future__ import annotations

import subprocess
import sys
import time
from array import array
from pathlib import Path

import pytest
import yaml

from pipeline.api.quota_file import QuotaFile
from pipeline.api.quotas import Quotas
from pipeline.config.load import load
from pipeline.config.schema import ModelConfig, RateLimitsConfig
from pipeline.errors import RateLimited
from pipeline.models import store
from shm.checkpoint import VERSION, load_index
from shm.prefix_hash import PageHash
from stages.gateway.requests.journal import Journal
from stages.kv.sessions.model_sessions import ModelSessions
from stages.kv.sessions.session_bounds import SessionBounds
from stages.kv.sessions.session_store import SessionStore
from stages.worker.checkpoint.prepare import open_verified, prepare_checkpoint
from tests.e2e import previous_release
from tests.e2e.previous_release import LIMIT_S
from tests.e2e.server import ROOT
from tools.tiny_gguf import SHAPES, write_model

pytestmark = pytest.mark.slow

TOKENIZER = "ab" * 32
NOW = 1e9  # of the journal that v0.1.0 has written

# What the old code does with a home: `write` as its stages do, `read` what is there and say what it found, as JSON.
OLD = """
import json, sys, time
from array import array
from pathlib import Path
from pipeline.config_schema import ModelConfig, RateLimitsConfig
from pipeline.errors import RateLimited
from stages.gateway.journal import Journal
from stages.gateway.limits import Quotas
from stages.gateway.quota_file import QuotaFile
from stages.kv.book import Book
from stages.worker.prepare import prepare_checkpoint
from shm.checkpoint import Checkpoint

action, home, gguf = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
quotas = Quotas(RateLimitsConfig(tokens_per_minute=1), time.monotonic, QuotaFile(home / "state/quotas/levels.table"))
sessions = Book(home / "state/sessions", "m").open(TOKENIZER, lambda salt: bytes(16), 32, 8, 4096)
found = {}


def may_send(tenant):
    try:
        quotas.take_prompt(tenant, 1)
    except RateLimited:
        return False
    return True


def turn(name, tokens):
    session = sessions.begin(b"gateway", "tenant", name, create=True, ttl_s=0)
    sessions.commit(b"gateway", "tenant", name, session.turn, len(session.tokens), array("i", tokens).tobytes())


if action == "write":
    turn("long", [1, 2, 3])
    turn("long", [4, 5])
    turn("other", [9])
    assert may_send("busy")
    quotas.charge_output("busy", 100_000)
else:
    found["sessions"] = {one.id: [one.turns, list(one.tokens)] for one in sessions.all()}
    found["may send"] = [tenant for tenant in ("busy", "later", "idle") if may_send(tenant)]
journal = Journal(home / "state/journal", 1 << 20, lambda: NOW)
found["journal"] = sorted(entry.opened.id for entry in journal.take_entries())
index = prepare_checkpoint(ModelConfig(name="m", path=gguf), home / "models")
Checkpoint(index)
found["index"] = index.name
print(json.dumps(found))
""".replace("TOKENIZER", repr(TOKENIZER)).replace("NOW", str(NOW))


@pytest.fixture(scope="module")
def old_tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of v0.1.0."""
    return previous_release.unpack(tmp_path_factory.mktemp("v0.1.0"))


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.gguf"
    write_model(path, SHAPES["small"], "Q4_0", 1)
    return path


def open_sessions(home: Path) -> SessionStore:
    def root(salt: str) -> PageHash:
        return PageHash(bytes(16))

    found = ModelSessions(home / "state/sessions", "m", time.time).open(TOKENIZER, root, 32, SessionBounds(8, 4096))
    assert found is not None
    return found


def may_send(quotas: Quotas, tenant: str) -> bool:
    try:
        quotas.take_prompt(tenant, 1)
    except RateLimited:
        return False
    return True


def turn(sessions: SessionStore, name: str, tokens: list[int]) -> None:
    session = sessions.begin(b"gateway", "tenant", name, create=True)
    base = len(session.tokens)
    sessions.commit(b"gateway", "tenant", name, session.turn, base, array("i", tokens).tobytes())


def test_state_survives_the_upgrade_and_the_way_back(old_tree: Path, tmp_path: Path, gguf: Path) -> None:
    home = tmp_path / "home"
    journal_file = home / "state/journal/requests.journal"
    journal_file.parent.mkdir(parents=True)
    journal_file.write_bytes((ROOT / "tests/gateway/data/v0.1.0.journal").read_bytes())
    (home / "models").mkdir()
    before = previous_release.run(old_tree, OLD, "write", home, gguf)
    assert len(before["journal"]) == 5
    index_path = home / "models" / before["index"]
    old_weights = index_path.with_suffix(".bin").read_bytes()

    # The upgrade.
    sessions = open_sessions(home)
    assert {one.id: (one.turns, list(one.tokens)) for one in sessions.all()} == {
        "long": (2, [1, 2, 3, 4, 5]),
        "other": (1, [9]),
    }
    file = QuotaFile(home / "state/quotas/levels.table")
    quotas = Quotas(RateLimitsConfig(tokens_per_minute=1), time.monotonic, file)
    assert [may_send(quotas, tenant) for tenant in ("busy", "later")] == [False, True]
    journal = Journal(home / "state/journal", 1 << 20, lambda: NOW)
    assert sorted(spec.id for spec, _ in journal.take_entries()) == before["journal"]
    assert prepare_checkpoint(ModelConfig(name="m", path=str(gguf)), home / "models") == index_path
    assert load_index(index_path).version == VERSION
    assert index_path.with_suffix(".bin").read_bytes() == old_weights  # migrated, not converted again
    open_verified(index_path)

    # It writes.
    turn(sessions, "long", [6])
    turn(sessions, "new", [7, 8])
    quotas.charge_output("later", 100_000)
    file.close()
    journal.close()

    # The way back: the old release goes on with all of it.
    after = previous_release.run(old_tree, OLD, "read", home, gguf)
    assert after["sessions"] == {"long": [3, [1, 2, 3, 4, 5, 6]], "other": [1, [9]], "new": [1, [7, 8]]}
    assert after["may send"] == ["idle"]
    assert after["journal"] == before["journal"]
    assert after["index"] == before["index"]
    assert index_path.with_suffix(".bin").read_bytes() == old_weights

    # And forward again.
    assert prepare_checkpoint(ModelConfig(name="m", path=str(gguf)), home / "models") == index_path
    assert store.find_index(ModelConfig(name="m", path=str(gguf)), home / "models") == index_path
    assert {one.id: one.turns for one in open_sessions(home).all()} == {"long": 3, "other": 1, "new": 1}


def test_each_release_reads_the_configuration_of_the_other_or_says_why_not(old_tree: Path, tmp_path: Path) -> None:
    file = old_tree / "configs" / "default.yaml"
    config = load(env={"STARLING_CONFIG": str(file), "STARLING_HOME": str(tmp_path)})
    given = yaml.safe_load(file.read_text())
    assert config.server.port == given["server"]["port"]
    assert config.cache.max_sequences == given["cache"]["max_sequences"]

    newer = tmp_path / "newer.yaml"
    newer.write_text("server: {port: 18080}\nregistry: {sources: ['hf:*']}\n")
    done = subprocess.run(
        [sys.executable, "-m", "pipeline.cli", "--config", str(newer), "config"],
        cwd=old_tree,
        env=previous_release.environment(old_tree, tmp_path),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 78
    assert "registry" in done.stderr
    assert "Traceback" not in done.stderr
