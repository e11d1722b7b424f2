"""tools/checks/layers.py reports each broken import rule and accepts what the rules allow."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.checks.layers import problems, violations

ROOT = Path(__file__).resolve().parents[2]


def test_this_repository_passes() -> None:
    assert list(problems(ROOT)) == []


@pytest.mark.parametrize(
    ("file", "source", "reason"),
    [
        ("shm/a.py", "import pipeline.errors", "shm must not import pipeline"),
        ("shm/a.py", "from pipeline import errors", "shm must not import pipeline"),
        ("pipeline/a.py", "def f():\n    from stages.kv import stage", "pipeline must not import stages"),
        ("pipeline/a.py", "import tests.x", "pipeline must not import tests"),
        ("pipeline/a.py", "import starling", "pipeline must not import starling"),
        ("stages/kv/a.py", "from starling.cli import main", "stages must not import starling"),
        ("starling/cli/a.py", "from stages.kv import view\nfrom pipeline.ipc import control", ""),
        ("pipeline/ipc/a.py", "from ...stages import kv", "pipeline must not import stages"),
        ("stages/kv/pool/a.py", "from stages.worker import rope", "stage kv must not import stage worker"),
        ("stages/kv/a.py", "from stages import worker", "stage kv must not import stage worker"),
        ("stages/kv/a.py", "from ..worker import rope", "stage kv must not import stage worker"),
        ("stages/kv/a.py", "import zmq", "only stage.py touches sockets"),
        ("stages/kv/a.py", "import socket as s", "only stage.py touches sockets"),
        ("stages/kv/a.py", "from pipeline.ipc.endpoint import Link", "only stage.py touches sockets"),
        ("stages/kv/a.py", "from pipeline.ipc import poll_loop", "only stage.py touches sockets"),
        ("stages/kv/a.py", "from aiohttp import web\nx = web.TCPSite", "only stage.py touches sockets"),
        ("stages/kv/a.py", "from aiohttp import web\nx = web.Response()", ""),
        (
            "stages/kv/a.py",
            "async def f(loop):\n    await loop.create_connection(g, 'h', 1)",
            "only stage.py touches sockets",
        ),
        (
            "stages/kv/a.py",
            "import asyncio\nasync def f():\n    await asyncio.start_server(g)",
            "only stage.py touches sockets",
        ),
        ("stages/kv/a.py", "from asyncio import open_unix_connection as f", "only stage.py touches sockets"),
        ("stages/kv/stage.py", "async def f(loop):\n    await loop.create_server(g)", ""),
        ("shm/a.py", "import numpy, shm.arena", ""),
        ("pipeline/a.py", "from shm.arena import Arena\nimport zmq", ""),
        ("stages/kv/a.py", "from stages.kv.b import c\nfrom . import b\nfrom pipeline.errors import X", ""),
        ("stages/kv/stage.py", "import zmq\nfrom pipeline.ipc.poll_loop import PollLoop", ""),
        ("starling/a.py", "import importlib\nimportlib.import_module('stages.kv')", "write an import statement"),
        ("stages/kv/a.py", "from importlib import import_module as load", "write an import statement"),
        ("pipeline/a.py", "__import__('stages.kv')", "write an import statement"),
        ("stages/kv/a.py", "import importlib.metadata", ""),
    ],
)
def test_rules(tmp_path: Path, file: str, source: str, reason: str) -> None:
    path = tmp_path / file
    path.parent.mkdir(parents=True)
    path.write_text(source)
    found = list(violations(path, tmp_path))
    assert [line.split(": ", 1)[1].split(", ")[0] for line in found] == ([reason] if reason else [])
