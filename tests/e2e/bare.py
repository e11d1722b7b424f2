"""A server without supervisors, as under systemd: a dead stage stays dead, so that a test can observe its peers."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.e2e.server import ROOT, STOP_S, Server


class BareServer(Server):
    """Runs `starling stage NAME` for each stage and merges their output."""

    def __init__(self, home: Path, config: Mapping[str, Any], environment: Mapping[str, str] | None = None) -> None:
        super().__init__(home, config, environment)
        self.stages: dict[str, subprocess.Popen[bytes]] = {}
        self._reader: threading.Thread | None = None
        self._out, self._into = os.pipe()

    def start(self) -> BareServer:
        self._reader = threading.Thread(target=self._read_pipe, daemon=True)
        self._reader.start()
        for name in ("tokenizer", "scheduler", "kv", "worker", "gateway"):
            self.start_stage(name)
        return self

    def start_stage(self, name: str, environment: Mapping[str, str] | None = None) -> None:
        """Start a stage. Call it from the main thread: the stage dies with the thread that forked it."""
        self.stages[name] = subprocess.Popen(
            [sys.executable, "-m", "starling", "stage", name],
            cwd=ROOT,
            env={**self.environment, **(environment or {})},
            stdout=self._into,
            stderr=self._into,
        )

    def _read_pipe(self) -> None:
        with os.fdopen(self._out, errors="replace") as lines:
            for line in lines:
                self._add(line)
                self._lines.put(line)
        self._lines.put(None)

    def __exit__(self, *exc: object) -> None:
        self.stop()
        shutil.rmtree(self.arenas, ignore_errors=True)  # no later server uses this home

    def stop(self, number: int = 9) -> int:
        """Send a signal to all stages, by default SIGKILL: then sockets and arenas stay, as after a crash."""
        for process in self.stages.values():
            process.send_signal(number)
        codes = [process.wait(STOP_S) for process in self.stages.values()]
        self.stages.clear()
        if self._into >= 0:
            os.close(self._into)
            self._into = -1
        if self._reader is not None:
            self._reader.join(STOP_S)
        return max(codes, default=0)
