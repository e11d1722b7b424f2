"""On a disk that the kernel reports as full (ENOSPC) pages are not stored, and answers keep their bytes."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.e2e import small_disk
from tests.e2e.conftest import share_caches
from tests.e2e.server import Server
from tools.tiny_gguf import SHAPES, write_model

pytestmark = pytest.mark.slow

PROMPTS = [random.Random(seed).choices(range(5, 330), k=900) for seed in range(8)]
ARENA_MB = 2  # pages of 32 KiB: room for two prompts; the others go to the disk
EXTENT_KIB = 32 * 32 + 4  # page files grow by 32 pages at a time
SMALL_KIB = {"from the start": 512, "while files grow": 2 << 10}


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Server]:
    """Makes a server of a tiny model, with a folder `disk` in its home."""
    path = write_model(tmp_path_factory.mktemp("model") / "tiny.gguf", SHAPES["wide"])

    def make(home: Path, server: Mapping[str, Any], model: Mapping[str, Any], launcher: list[str]) -> Server:
        share_caches(home)
        (home / "disk").mkdir()
        settings = {"name": "tiny", "path": str(path), "kv_cache_mb": ARENA_MB, "kv_type": "f32"}
        return Server(home, {"server": dict(server), "models": [{**settings, **model}]}, launcher=launcher)

    return make


def answers(server: Server) -> list[Any]:
    """The answers to all prompts, each sent twice: the second time pages are read back or computed again."""
    sampling = {"max_tokens": 8, "temperature": 0.8, "seed": 5, "logprobs": 2}
    return [server.post("/v1/generate", prompt=prompt, **sampling)["choices"] for prompt in PROMPTS * 2]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, start: Callable[..., Server]) -> list[Any]:
    with start(tmp_path_factory.mktemp("whole"), {}, {}, []) as server:
        return answers(server)


@contextlib.contextmanager
def small(home: Path, size_kib: int) -> Iterator[tuple[Path, list[str]]]:
    """A directory of `size_kib` as the server sees it, and the launcher that mounts it there."""
    reason = small_disk.why_not()
    if not reason:
        yield home / "disk", small_disk.mounted(size_kib, home / "disk")
        return
    folder = small_disk.found(size_kib)
    if folder is None:
        pytest.skip(f"no file system can be mounted here ({reason}), and there is no small one that can be written")
    try:
        yield folder, []
    finally:
        shutil.rmtree(folder)


def room(server: Server, disk: Path) -> int:
    """Free bytes on the disk, as the kv stage sees it."""
    found = os.statvfs(f"/proc/{server.pid_of('kv')}/root{disk}")
    return found.f_bavail * found.f_frsize


@pytest.mark.parametrize("when", SMALL_KIB)
@pytest.mark.parametrize("place", ["spill", "state"])
def test_a_full_disk_changes_no_answer(
    tmp_path: Path, start: Callable[..., Server], undisturbed: list[Any], place: str, when: str
) -> None:
    with contextlib.ExitStack() as stack:
        disk, launcher = stack.enter_context(small(tmp_path, SMALL_KIB[when]))
        settings: tuple[dict[str, Any], dict[str, Any]] = ({}, {"spill_path": str(disk), "spill_mb": 64})
        if place == "state":
            settings = ({"state_dir": str(disk)}, {})
        server = stack.enter_context(start(tmp_path, *settings, launcher))
        assert answers(server) == undisturbed
        server.wait_metrics("starling_kv_cache_disk_errors_total", lambda found: found.get("", 0) > 0)
        server.wait_output("No space left on device", ".pages")
        assert room(server, disk) < EXTENT_KIB << 10
        server.wait_metrics("starling_kv_cache_evictions_total", lambda found: found.get("", 0) > 100)
        kind = 'state="spilled"' if place == "spill" else 'state="saved"'
        kept = server.metrics("starling_kv_cache_bytes")[kind]
        assert (kept > 0) == (when == "while files grow")
        assert answers(server) == undisturbed
        server.stop()
        assert server.leftovers() == []
    assert not any((tmp_path / "disk").iterdir()), "what is mounted is the server's alone"
