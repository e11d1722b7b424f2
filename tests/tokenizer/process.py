"""A real tokenizer process, and a minimal gateway that sends it requests."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Collection
from pathlib import Path

import msgspec
import yaml

from pipeline.config import addresses
from pipeline.ipc.endpoint import Link
from pipeline.models import store
from pipeline.models.vocabulary_tables import make_tables
from pipeline.protocol import messages as m
from pipeline.protocol.topology import EDGES
from shm import checkpoint
from tests.kv.process import HEARTBEAT_MS, MODEL, ROOT, WAIT_S, load_config
from tests.tokenizer.byte_vocabulary import byte_spec


def configure(home: Path, names: Collection[str]) -> None:
    """Write `home`/starling.yaml with these models."""
    settings = {
        "server": {"run_dir": str(home / "run"), "arena_dir": str(home / "shm"), "heartbeat_ms": HEARTBEAT_MS},
        "models": [{"name": name, "path": str(home / f"{name}.gguf")} for name in names],
    }
    (home / "starling.yaml").write_text(yaml.safe_dump(settings))


def write_model(home: Path, name: str = MODEL, template: str = "") -> Path:
    """Write an index with a vocabulary of bytes; the tokenizer needs no weights. Returns the index's path."""
    gguf = home / f"{name}.gguf"
    gguf.write_bytes(b"GGUF" + name.encode().ljust(64, b"\0"))
    model = load_config(home).model(name)
    assert model is not None
    digest = store.fetch(model, home / "models").digest
    spec = byte_spec(pre="llama3")
    tokenizer = checkpoint.TokenizerData(
        spec.model,
        spec.pre,
        list(spec.tokens),
        list(spec.types),
        list(spec.merges),
        [],
        0,
        1,
        -1,
        -1,
        -1,
        False,
        False,
        template,
    )
    hyper = checkpoint.Hyper(2, 64, 2, 2, 32, 64, 128, 4096, 1e-5, 32, "halves", "silu")
    index = checkpoint.Index(
        checkpoint.VERSION, digest, "llama", name, 1, 68, 0, hyper, msgspec.Raw(msgspec.msgpack.encode(tokenizer)), []
    )
    path = home / "models" / f"{digest}.idx"
    checkpoint.write_index(path, index, make_tables(tokenizer))
    return path


class TokenizerProcess:
    """A tokenizer process of the configuration in `home`, and a minimal gateway that sends it requests."""

    def __init__(self, home: Path) -> None:
        environment = {
            **os.environ,
            "STARLING_HOME": str(home),
            "PYTHONPATH": str(ROOT),
            "STARLING_CONFIG": str(home / "starling.yaml"),
        }
        with open(home / "tokenizer.log", "ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "starling", "stage", "tokenizer"],
                env=environment,
                cwd=ROOT,
                stdout=log,
                stderr=log,
            )
        address = addresses.edge_address(load_config(home), "gateway-tokenizer", {"STARLING_HOME": str(home)})
        self.link = Link(EDGES["gateway-tokenizer"], address, "gateway", heartbeat_ms=HEARTBEAT_MS)
        self.replies: list[m.Frame] = []

    def close(self) -> None:
        self.link.close()
        self.process.kill()
        self.process.wait(WAIT_S)

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + WAIT_S
        while not condition():
            assert time.monotonic() < deadline
            self.link.tick(m.Heartbeat("gateway", self.link.epoch, 1, False, True))
            select.select([self.link.fd], [], [], 0.02)
            self.replies += self.link.receive()

    def request(self, frame: m.Frame) -> m.Frame:
        """Send `frame` and return its reply."""
        assert self.link.send(frame)
        self.until(lambda: bool(self.of(frame.id)))  # type: ignore[attr-defined]
        return self.of(frame.id)[0]  # type: ignore[attr-defined]

    def of(self, key: str) -> list[m.Frame]:
        return [frame for frame in self.replies if getattr(frame, "id", "") == key]

    def peak_mb(self) -> float:
        """Return the peak of the resident memory since the last call, in MB."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        (kb,) = [line.split()[1] for line in status.splitlines() if line.startswith("VmHWM")]
        Path(f"/proc/{self.process.pid}/clear_refs").write_text("5")
        return int(kb) / 1024
