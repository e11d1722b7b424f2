"""`starling ingest`: names, what other commands say of them, exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from pipeline.config.schema import ModelConfig
from pipeline.errors import ConfigError
from pipeline.models import registry, store
from shm.checkpoint import load_index
from stages.worker.checkpoint.prepare import prepare_checkpoint
from stages.worker.checkpoint.requantized import QUANTS
from starling.cli import cli
from starling.cli import ingest as command
from tools.tiny_gguf import SHAPES, write_model
from tools.tiny_hf import write_directory


def starling(*args: str) -> Result:
    return CliRunner().invoke(cli, list(args))


def failing(*args: str) -> tuple[int, str]:
    """Exit code and message of the real command."""
    done = subprocess.run([sys.executable, "-m", "starling", *args], capture_output=True, text=True)
    assert "Traceback" not in done.stderr
    return done.returncode, done.stderr


@pytest.fixture
def source(home: Path) -> Path:
    return write_model(home.parent / "tiny.gguf", SHAPES["small"], "F16")


@pytest.fixture
def directory(source: Path) -> Path:
    return write_directory(source, source.parent / "Tiny-HF")


def test_the_options_are_those_of_the_worker() -> None:
    assert set(command.QUANTS) == set(QUANTS)


@pytest.mark.parametrize(
    ("shape", "hint"),
    [
        ("small", "`starling run {} PROMPT` answers"),
        ("bert", "name {} in requests to /v1/embeddings"),
        ("reranker", "name {} in requests to /v1/rerank"),
    ],
)
def test_the_hint_is_what_the_model_can_do(home: Path, shape: str, hint: str) -> None:
    done = starling("ingest", str(write_model(home.parent / f"{shape}.gguf", SHAPES[shape], "F16")))
    assert done.exit_code == 0, done.output
    assert hint.format(shape) in done.stderr


def test_a_directory_gets_a_name(home: Path, directory: Path) -> None:
    done = starling("ingest", str(directory), "--quant", "q8_0", "--json")
    assert done.exit_code == 0, done.output
    record = json.loads(done.output)
    assert (record["name"], record["architecture"], record["quantization"]) == ("Tiny-HF-q8_0", "llama", "Q8_0")
    row = json.loads(starling("models", "Tiny-HF-q8_0", "--json").output)[0]
    assert (row["state"], row["source"], row["bytes"]) == ("ready", str(directory), record["nbytes"])
    assert row["bytes"] > 10_000 and row["digest"] == record["digest"]
    assert "intact" in starling("verify", "Tiny-HF-q8_0").output
    folder = home / "models"
    index_path = prepare_checkpoint(ModelConfig(name="Tiny-HF-q8_0"), folder)
    assert load_index(index_path).digest == record["digest"]
    assert starling("gc").output.startswith("0 MB")
    assert index_path.exists()
    assert starling("rm", "Tiny-HF-q8_0").exit_code == 0
    assert not index_path.exists() and not index_path.with_suffix(".bin").exists()


def test_a_gguf_file_is_not_copied(home: Path, source: Path) -> None:
    assert starling("ingest", str(source), "--name", "org/tiny").exit_code == 0
    folder = home / "models"
    assert not list(folder.glob("*.gguf"))
    by_name, by_path = ModelConfig(name="org/tiny"), ModelConfig(name="other", path=str(source))
    assert store.find_index(by_name, folder) == store.find_index(by_path, folder) is not None
    source.unlink()
    assert prepare_checkpoint(by_name, folder).exists()


def test_a_checkpoint_of_an_older_release_names_its_source(home: Path, directory: Path) -> None:
    starling("ingest", str(directory), "--name", "tiny")
    folder = home / "models"
    record = registry.read(folder, "tiny")
    assert record is not None
    registry.model_path(folder, record).write_bytes(b"\x91\x00")
    with pytest.raises(ConfigError, match=f"run `starling ingest {directory} --name tiny`, with the same --quant"):
        prepare_checkpoint(ModelConfig(name="tiny"), folder)


def test_errors(home: Path, directory: Path) -> None:
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")
    code, message = failing("ingest", str(directory))
    assert code == 78 and "pytorch_model.bin holds pickled weights" in message
    code, message = failing("ingest", str(directory / "nothing"))
    assert code == 2 and "nothing' does not exist" in message
    code, message = failing("ingest", str(directory / "config.json"))
    assert code == 78 and "not a GGUF file" in message
    code, message = failing("ingest", str(directory), "--name", "a b")
    assert code == 2 and "'a b' cannot be a model's name" in message
    with pytest.raises(ConfigError, match=f"is a directory; `starling ingest {directory} --name m` converts"):
        store.fetch(ModelConfig(name="m", path=str(directory)), home / "models")
