"""Runs the tagged blocks of a page of the documentation, in the order of the page.

    with Pages(folder) as pages:
        pages.run(page, blocks)     # raises AssertionError with the block's text and output

A `serve` block starts a server with a home of its own; the blocks after it use that server until the next `serve` block
or the end of the page, where Ctrl-C ends it. Blocks before it, and pages without one, share a server of the demo model.
What the text says of this machine is replaced: port 8080 and 9000 by the server's port, the folder `/data/` by one with
small models of the names that the page uses, the address of a server by a store in a file, `~` by a folder of the page.
"""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from pipeline.config.schema import DEMO_MODEL
from tests.docs import system_copy
from tests.e2e.conftest import share_caches
from tests.e2e.server import ROOT, START_S, Server
from tests.e2e.up_server import Up
from tools.checks import markdown
from tools.ports import free_port
from tools.tiny_adapter import write_adapter, write_peft
from tools.tiny_gguf import SHAPES, write_model
from tools.tiny_hf import write_directory

TIMEOUT_S = 240
DEPLOY_S = 3000  # installation, download and compilation before a block tagged `deploy` serves, beside other work
# An error answer; the API's description also has properties of this name.
ERROR = re.compile(r'"error":\s*\{\s*"(?:message|type|code)":\s*"(?!object")')
# Servers of the page: small, because a page may start several of them.
FLEET_MODELS = [{"name": DEMO_MODEL, "kv_cache_mb": 64, "ranks": 1}]


def _models_to_publish(data: Path) -> None:
    write_model(data / "my-model-q4_0.gguf", SHAPES["small"])


def _models_to_ingest(data: Path) -> None:
    plain = write_model(data / "plain.gguf", SHAPES["qwen3"], recipe="F16")
    write_directory(plain, data / "Qwen3-0.6B")
    write_model(data / "model-f16.gguf", SHAPES["small"], recipe="F16")
    model = write_model(data / "my-model-q4_0.gguf", SHAPES["small"])
    write_adapter(data / "support-lora.gguf", model, seed=1)
    write_peft(data / "legal-lora", model, seed=2)
    page = (ROOT / "docs/models.md").read_text()
    (config,) = [
        one.text for one in markdown.blocks(page) if one.language == "yaml" and "/data/support-lora" in one.text
    ]
    (data / "starling.yaml").write_text(config.replace("/data/", f"{data}/"))


# What the folder /data/ of a page has.
DATA: Mapping[str, Callable[[Path], None]] = {
    "docs/fleet.md": _models_to_publish,
    "docs/models.md": _models_to_ingest,
}


class ServeBlock(Up):
    """A server, an agent or an orchestrator that a shell block starts, in a shell of its own."""

    start_s: float = START_S  # time limit of everything before it is ready

    def __init__(self, home: Path, text: str, config: Mapping[str, Any], folder: Path) -> None:
        super().__init__(home, config)
        self.command = ["bash", "-euc", translated(text, self.port, folder)]
        # The port also holds for a configuration that the block names.
        self.environment |= {"HOME": str(folder), "STARLING_SERVER__PORT": str(self.port)}

    def wait_ready(self) -> ServeBlock:
        self.wait_for(r"\bis ready at \S+", self.start_s)
        return self


def translated(text: str, port: int, folder: Path) -> str:
    """The text of a block with the addresses and folders of the test."""
    text = re.sub(r"(127\.0\.0\.1|localhost):8080\b", rf"\1:{port}", text)
    text = text.replace("PORT=9000", f"PORT={port}").replace("127.0.0.1:9000", f"127.0.0.1:{port}")
    text = re.sub(r"(?:etcd|redis)://\d+\.\d+\.\d+\.\d+:\d+", f"sqlite:{folder / 'fleet.db'}", text)
    return text.replace("/data/", f"{folder / 'data'}/")


def missing(block: markdown.Block) -> list[str]:
    """The programs that a block needs beside ours, by its tag, and that this machine lacks."""
    lacking = [name for name in block.info.split()[2:] if not shutil.which(name)]
    if block.info == "sh machine" and (reason := system_copy.why_not()):
        lacking.append(f"a copy of the system ({reason})")
    return lacking


class Pages:
    """Runs pages against one shared server."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._shared: Server | None = None
        self._n_folders = 0

    def __enter__(self) -> Pages:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end_shared()

    def run(self, page: str, blocks: Sequence[markdown.Block]) -> list[str]:
        """Run the blocks. Returns the programs whose absence left blocks out."""
        folder = self._new_folder()
        (folder / "data").mkdir()
        DATA.get(page, lambda data: None)(folder / "data")
        own: ServeBlock | None = None
        left_out: list[str] = []
        try:
            for block in blocks:
                if lacking := missing(block):
                    left_out += lacking
                elif block.info.split()[1] == "serve":
                    if own is not None:
                        _end(own)
                    own = ServeBlock(self._home(), block.text, self._settings(page, folder), folder)
                    own.start().wait_ready()
                else:
                    run(block, own or self.shared(), folder)
            if own is not None:
                _end(own)
        finally:
            if own is not None:
                own.stop()
            if self._shared is not None and (self._shared.home / "state" / "keys.json").exists():
                self._end_shared()  # it admits only clients with a key from now on
        return left_out

    def shared(self) -> Server:
        """The server of the demo model that pages share."""
        if self._shared is None:
            self._shared = Server(self._home(), {})
            self._shared.start().wait_ready().wait_recorded()
        return self._shared

    def _end_shared(self) -> None:
        if self._shared is not None:
            self._shared.stop()
            self._shared = None

    def _new_folder(self) -> Path:
        """Its path is short, because sockets are made below it."""
        self._n_folders += 1
        folder = self._folder / str(self._n_folders)
        folder.mkdir()
        return folder

    def _home(self) -> Path:
        """A home with the prepared demo model and the compiled kernels."""
        home = self._new_folder()
        share_caches(home, models=True)
        return home

    def _settings(self, page: str, folder: Path) -> dict[str, Any]:
        if page != "docs/fleet.md":
            return {}
        blobs, port = folder / "blobs", free_port()
        return {"models": FLEET_MODELS, "fleet": {"blobs": str(blobs), "orchestrator": {"port": port}}}


def _end(server: ServeBlock) -> None:
    """Ctrl-C leaves nothing."""
    assert server.stop(signal.SIGINT) in (0, -signal.SIGINT)  # a shell ends by the signal that its job received
    assert server.leftovers() == []


def run(block: markdown.Block, server: Server, folder: Path) -> None:
    """Run one block; it must exit with 0, without a traceback and without an error answer of the server."""
    tag = block.info.split()[1]
    text = translated(block.text, server.port, folder)
    program = ["bash", "-euo", "pipefail", "-c", text] if block.language == "sh" else [sys.executable, "-c", text]
    environment = {**server.environment, "HOME": str(folder)}
    if tag == "dry-run":
        environment |= {"MAKEFLAGS": "--dry-run", "PIP_DRY_RUN": "1", "PIP_NO_BUILD_ISOLATION": "1"}
    elif tag == "machine":
        program, environment = system_copy.inside(text, folder, environment)
    done = subprocess.run(
        program,
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, f"{text}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    assert "Traceback" not in done.stderr
    assert not ERROR.search(done.stdout), done.stdout[-2000:]
