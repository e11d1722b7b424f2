"""Files of models and versions that are not served: which are removed, and when."""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.config.schema import Config, ModelConfig, ServerConfig
from shm.pages import KvGeometry
from stages.kv.model import prune
from stages.kv.sessions.session_files import Session, SessionFiles
from stages.kv.storage import persist
from stages.kv.storage.prune import PAGES_S, SESSION_S, prune_pages, prune_sessions
from tests.kv.process import KvProcess, Scheduler, configure, write_model

GEOMETRY = KvGeometry(1, 1, 32, 16, "f16")
NOW = 1_800_000_000.0
DAY = 86_400


def pages(folder: Path, slug: str, age_s: float) -> Path:
    path = persist.store_path(folder, slug, "ab" * 32, GEOMETRY)
    path.write_bytes(b"x")
    os.utime(path, (NOW - age_s, NOW - age_s))
    return path


def test_pages_of_models_that_are_not_served_are_removed_after_a_week(tmp_path: Path) -> None:
    old, young = pages(tmp_path, "gone", PAGES_S), pages(tmp_path, "left", PAGES_S - 1)
    served = pages(tmp_path, "mine", 100 * DAY)
    longer, other = pages(tmp_path, "mine-2", 100 * DAY), tmp_path / "notes.pages"
    other.write_bytes(b"not a file of Starling")
    os.utime(other, (0, 0))
    assert list(prune_pages([tmp_path, tmp_path, tmp_path / "none"], ["mine"], NOW)) == [old, longer]
    assert sorted(tmp_path.iterdir()) == sorted([young, served, other])


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Path]:
    """Create a session of a version of a model, last used `age_s` ago."""

    def made(version: str, name: str, age_s: float, ttl_s: int) -> Path:
        files = SessionFiles(tmp_path / version)
        session = Session(name, "t", "", ttl_s, NOW - age_s, NOW - age_s)
        files.create(session)
        files.append(session, 0, array("i", [1, 2]), NOW - age_s)
        path = files.path("t", name)
        os.utime(path, (NOW - age_s, NOW - age_s))
        os.utime(path.parent, (NOW - age_s, NOW - age_s))
        return path

    return made


def test_expired_sessions_of_other_versions_are_removed(tmp_path: Path, make: Callable[..., Path]) -> None:
    mine, other = "m-" + "a" * 12, "m-" + "b" * 12
    kept = [
        make(mine, "expired, in use", 2 * DAY, 60),
        make(other, "young", DAY, 2 * DAY),
        make(other, "without an end", SESSION_S - 1, 0),
    ]
    gone = [
        make(other, "over", 61, 60),
        make(other, "without an end, old", SESSION_S, 0),
        make("x-" + "c" * 12, "of a model that is not served", DAY, 60),
    ]
    torn = tmp_path / other / "torn.session"
    torn.write_bytes(b"\0" * 40)
    removed = list(prune_sessions(tmp_path, [tmp_path / mine], ["m"], ["m"], NOW))
    assert sorted(removed) == sorted([*gone, torn])
    assert all(path.exists() for path in kept)
    assert sorted(path.name for path in tmp_path.iterdir()) == [mine, other]


def test_of_a_served_model_one_other_version_stays(tmp_path: Path, make: Callable[..., Path]) -> None:
    for age, letter in enumerate("abcd"):
        make("m-" + letter * 12, "s", age, 0)
    make("n-" + "e" * 12, "s", 50, 0)
    list(prune_sessions(tmp_path, [tmp_path / ("m-" + "c" * 12)], ["m"], ["m"], NOW))
    left = ["m-" + "a" * 12, "m-" + "c" * 12, "n-" + "e" * 12]
    assert sorted(path.name for path in tmp_path.iterdir()) == left


def test_sessions_of_a_model_that_is_not_loaded_stay_until_their_time_to_live_ends(
    tmp_path: Path, make: Callable[..., Path]
) -> None:
    """It may be loaded again on demand; with an older tokenizer as well, of which it would keep the sessions."""
    kept = [
        make("m-" + "a" * 12, "without an end", 31 * DAY, 0),
        make("m-" + "b" * 12, "without an end", 90 * DAY, 0),
        make("m-" + "b" * 12, "young", 59, 60),
    ]
    over = make("m-" + "a" * 12, "over", 61, 60)
    assert list(prune_sessions(tmp_path, [], ["other"], ["other", "m"], NOW)) == [over]
    assert all(path.exists() for path in kept)


def test_files_of_a_configured_model_that_is_not_loaded_are_kept(tmp_path: Path, make: Callable[..., Path]) -> None:
    """And those of a model that was added to the file, loaded and unloaded since the start."""
    state = tmp_path / "state"
    models = tuple(ModelConfig(name=name, path=f"{name}.gguf") for name in ("served", "unloaded"))
    config = Config(models=models, server=ServerConfig(state_dir=str(state)))
    (state / "kv").mkdir(parents=True)
    stored = {name: pages(state / "kv", name, 8 * DAY) for name in ("served", "unloaded", "added", "gone")}
    held = {
        name: make(f"state/sessions/{name}-" + "a" * 12, "s", 31 * DAY, 0)
        for name in ("served", "unloaded", "added", "gone")
    }
    threads: Any = {name: SimpleNamespace(directories=[held[name].parent]) for name in ("served", "added")}
    loaded: Any = SimpleNamespace(config=config, slug="served", model=models[0])
    prune([loaded], threads, NOW)
    assert [name for name, path in stored.items() if not path.exists()] == ["gone"]
    assert [name for name, path in held.items() if not path.exists()] == ["gone"]


def test_a_missing_folder_is_ignored(tmp_path: Path) -> None:
    assert list(prune_sessions(tmp_path / "none", [], [], [], NOW)) == []


@pytest.mark.slow
def test_the_stage_prunes_when_its_models_are_open(tmp_path: Path) -> None:
    home = tmp_path
    configure(home)
    digest = write_model(home)
    folder = home / "state" / "kv"
    folder.mkdir(parents=True, exist_ok=True)
    stranger = pages(folder, "stranger", 0)
    os.utime(stranger, (1, 1))
    with KvProcess(home) as kv, Scheduler(home, digest) as s:
        s.wait_ready()
        s.wait(lambda: not stranger.exists())
        s.wait(lambda: "not served" in kv.log())  # the line comes after the file has gone
