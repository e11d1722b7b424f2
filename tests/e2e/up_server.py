"""A test server that `starling up` starts."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Sequence

from tests.e2e.server import ROOT, Server


class Up(Server):
    """A server started with `starling up` instead of `honcho start`; `command` may name another way to it."""

    command: Sequence[str] = (sys.executable, "-m", "starling", "up")
    directory = ROOT

    def start(self) -> Up:
        self.process = subprocess.Popen(
            self.command,
            cwd=self.directory,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        threading.Thread(target=self._read, args=(self.process, self._lines), daemon=True).start()
        return self

    def wait_ready(self) -> Up:
        self.wait_for(rf"Starling is ready at http://127\.0\.0\.1:{self.port} ")
        return self
