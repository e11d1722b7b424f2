"""Random adapters of the model `tiny`, and their publication into a folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from starling.cli import cli
from tools.tiny_adapter import write_adapter, write_peft


class PublishedAdapters:
    """Adapters of `tiny`, which `publish_tiny` has written to `folder`: `second` is a directory of the PEFT library."""

    def __init__(self, folder: Path, blobs: Path) -> None:
        self.folder = folder
        self.blobs = blobs
        self.digests: dict[str, str] = {}  # of those that were published
        model = folder / "tiny.gguf"
        if not model.exists():
            from tools.tiny_gguf import SHAPES, write_model

            write_model(model, SHAPES["small"], "Q8_0", seed=1)
        self.paths = {
            "first": write_adapter(folder / "first.gguf", model, rank=4, seed=1),
            "second": write_peft(folder / "second", model, rank=9, seed=2, dtype="F16"),
            "third": write_adapter(folder / "third.gguf", model, rank=6, seed=11),
        }

    def publish(self, name: str) -> dict[str, Any]:
        """Publish an adapter under its own name; what the command prints."""
        done = self.run("publish", str(self.paths[name]), "--name", f"tiny:{name}", "--json")
        assert done.exit_code == 0, done.output
        found: dict[str, Any] = json.loads(done.stdout)
        self.digests[name] = found["digest"]
        return found

    def run(self, *words: str) -> Any:
        """A command with the store."""
        env = {"STARLING_HOME": str(self.folder / "publisher"), "STARLING_FLEET__BLOBS": str(self.blobs)}
        return CliRunner().invoke(cli, list(words), env=env)
