"""Runs `starling pull` as users do, in processes of its own."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def environment(home: Path, **more: str) -> dict[str, str]:
    settings = {"PYTHONPATH": str(ROOT), "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HOME": str(home / "hf"), **more}
    return {**os.environ, "STARLING_HOME": str(home), **settings}


def pull(home: Path, *args: str, code: int = 0, **more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "starling", "pull", *args]
    done = subprocess.run(command, env=environment(home, **more), capture_output=True, text=True, timeout=120)
    assert done.returncode == code, (done.stdout, done.stderr)
    assert "Traceback" not in done.stderr
    return done


def pulled(home: Path, *args: str, **more: str) -> dict[str, Any]:
    (record,) = json.loads(pull(home, *args, "--json", **more).stdout)
    return dict(record)


def left(home: Path) -> list[str]:
    """What is in the models directory, apart from locks."""
    return sorted(path.name for path in (home / "models").iterdir() if not path.name.endswith(".lock"))
