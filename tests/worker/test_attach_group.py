"""All ranks of a group are attached to the same arenas, or none is; a KV page without memory gets none by that."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.worker.conftest import Ingested, TinyGguf

pytestmark = pytest.mark.slow

# Attaches two ranks to arenas, of which the KV arena has no memory for pages.  "replace": while rank 1 is stopped,
# after rank 0 has mapped it, another KV arena takes its place.
GROUP = """
import os, signal, sys
from pathlib import Path
from shm import step_ring as sh
from shm.arena import ArenaError
from shm.checkpoint import Checkpoint
from shm.pages import KvGeometry, create_kv
from stages.worker import activations_arena as act
from stages.worker import ranks as rank_processes
from stages.worker.model import Model
from stages.worker.rank_places import RankPlaces
from stages.worker.ranks import ArenaPaths, attach_group, attach_ranks, spawn

rank_processes.ACK_S = 3000.0  # these processes run on what others leave of the cores
index_path, folder, what = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
checkpoint, cpus = Checkpoint(index_path), sorted(os.sched_getaffinity(0))
model = Model(checkpoint)
model.load_kernels("f16")
rank = spawn(model, 1, 2, cpus)
steps_geometry, kv_geometry = sh.StepsGeometry(1, 1, 1, 8, 4), KvGeometry.of(model.hyper, 32, "f16")
paths = ArenaPaths(*(str(folder / f"m.{kind}") for kind in ("steps", "kv", "act")))
steps, _ = sh.create_steps(Path(paths.steps), steps_geometry, model.digest)
kv, _ = create_kv(Path(paths.kv), kv_geometry, 4, model.digest, 1, grows=True)
geometry = act.geometry_for(steps_geometry, model.hyper, 8, 2)
activations = act.create_activations(Path(paths.activations), geometry, model.hyper, model.digest, [])

def begin():
    words = act.control_words(activations)
    act.set_up(words, 2, RankPlaces(cpus).clusters, [])

def replace():
    create_kv(Path(paths.kv), kv_geometry, 4, model.digest, 2, grows=True)
    os.kill(rank.pid, signal.SIGCONT)

begin()
if what == "replace":
    os.kill(rank.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, rank.pid, os.WSTOPPED)
    try:
        attach_group(model, [rank], paths, activations, replace).close()
    except ArenaError as error:
        print(error)
    begin()
before = os.stat(paths.kv).st_blocks
attachment = attach_group(model, [rank], paths, activations, lambda: None)
print(attachment.is_current, os.stat(paths.kv).st_blocks - before)
act.announce(attachment.words, 1, 2)
attach_ranks([rank], ArenaPaths())
attachment.close()
"""


@pytest.fixture
def shm_path() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="starling-") as folder:
        yield Path(folder)


def attach(index_path: Path, folder: Path, what: str) -> list[str]:
    """Lines of what the group has written."""
    found = subprocess.run(
        [sys.executable, "-c", GROUP, str(index_path), str(folder), what],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
        check=True,
    )
    return found.stdout.splitlines()


def test_a_group_whose_arenas_are_replaced_meanwhile_is_not_attached(
    tiny_gguf: TinyGguf, ingested: Ingested, shm_path: Path
) -> None:
    """Rank 0 would have one file and the others another; the next attempt finds the same in all."""
    refused, attached = attach(ingested(tiny_gguf("small", "Q8_0")), shm_path, "replace")
    assert "was replaced while the worker group attached to it" in refused
    assert attached == "True 0"


def test_a_page_without_memory_gets_none(tiny_gguf: TinyGguf, ingested: Ingested, shm_path: Path) -> None:
    """The kv stage counts what it reserves alone."""
    assert attach(ingested(tiny_gguf("small", "Q8_0")), shm_path, "") == ["True 0"]
