"""A coordination store of several machines on this one: etcd or Redis, which can be killed and started again."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Self

from pipeline.runtime.process import die_with_parent
from tools.ports import free_port

START_S = 60.0
POLL_S = 0.05
# Program and client.
STORES = {"etcd": ("etcd", "aetcd"), "redis": ("redis-server", "redis")}
PLACES = (str(Path(sys.executable).parent), "/usr/sbin", "/usr/local/sbin")


def program(name: str) -> str | None:
    """Path of an installed program."""
    return shutil.which(name) or shutil.which(name, path=os.pathsep.join(PLACES))


def installed() -> list[str]:
    """The stores that can be run here."""
    return [name for name, (server, client) in STORES.items() if program(server) and importlib.util.find_spec(client)]


class StoreUnderTest:
    """A running store. A context manager."""

    def __init__(self, name: str) -> None:
        """`name`: one of `installed`."""
        found = program(STORES[name][0])
        assert found is not None
        self.name = name
        self._folder = tempfile.TemporaryDirectory(prefix="starling-store-")
        self._port = free_port()
        self.address = f"{name}://127.0.0.1:{self._port}"
        self._process: subprocess.Popen[bytes] | None = None
        folder = self._folder.name
        if name == "etcd":
            client, peer = f"http://127.0.0.1:{self._port}", f"http://127.0.0.1:{free_port()}"
            self._command = [
                *(found, f"--data-dir={folder}/data", f"--listen-client-urls={client}"),
                *(f"--advertise-client-urls={client}", f"--listen-peer-urls={peer}"),
                *(f"--initial-advertise-peer-urls={peer}", f"--initial-cluster=default={peer}"),
            ]
        else:
            self._command = [
                *(found, "--bind", "127.0.0.1", "--port", str(self._port), "--dir", folder, "--save", ""),
                *("--daemonize", "no", "--appendonly", "yes", "--appendfsync", "always"),
            ]

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self._folder.cleanup()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self.kill()
        self._folder.cleanup()

    def start(self) -> None:
        """Start it on its files, and wait until it accepts connections."""
        log = Path(self._folder.name, "log")
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                preexec_fn=functools.partial(die_with_parent, os.getpid()),
            )
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline and self._process.poll() is None:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self._port), 1.0):
                return
            time.sleep(POLL_S)
        self.kill()
        raise RuntimeError(f"{self.name} has not started: {log.read_text(errors='replace')[-2000:]}")

    @property
    def is_running(self) -> bool:
        """Whether it was started, and not killed."""
        return self._process is not None

    def kill(self) -> None:
        """SIGKILL. Idempotent."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
