"""What a module must not import, checked in a fresh process."""

from __future__ import annotations

import subprocess
import sys

import pytest

from pipeline.protocol.messages import FRAMES
from pipeline.protocol.topology import EDGES


@pytest.mark.parametrize(
    ("module", "unwanted"),
    [
        ("pipeline.observe.exposition", "zmq"),
        ("pipeline.observe.status", "zmq"),
        ("pipeline.config.load", "pipeline.protocol.messages"),
        ("pipeline.config.load", "zmq"),
        ("pipeline.protocol.messages", "zmq"),
        ("pipeline.procfs", "pipeline.config.schema"),
    ],
)
def test_importing_a_module_does_not_import(module: str, unwanted: str) -> None:
    script = f"import sys, {module}; sys.exit({unwanted!r} in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_every_edge_has_its_frames() -> None:
    assert list(FRAMES) == list(EDGES)
