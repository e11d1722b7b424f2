"""The dummy passes of a new group are sound steps of every kind of model, and leave no file."""

from __future__ import annotations

from pathlib import Path

import pytest

from shm.checkpoint import Checkpoint
from stages.worker.model import Model
from stages.worker.rank_places import RankPlaces
from stages.worker.warm_up import warm_up
from tests.worker.conftest import Ingested, TinyGguf

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("shape", ["small", "bert", "reranker"])
def test_no_entry_is_refused(tiny_gguf: TinyGguf, ingested: Ingested, tmp_path: Path, shape: str) -> None:
    model = Model(Checkpoint(ingested(tiny_gguf(shape, "Q8_0"))))
    assert warm_up(model, [], RankPlaces([0]), "f16", 32, tmp_path / "m.act") == 0
    assert list(tmp_path.iterdir()) == []
