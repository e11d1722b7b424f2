"""A conversion that is killed goes on where it was, takes little memory, and gives the same bytes."""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.errors import ConfigError
from pipeline.models import digests
from shm.checkpoint import Index, bin_path
from stages.worker.checkpoint import ingest as ingest_module
from stages.worker.checkpoint.prepare_source import prepare_source
from tools.tiny_hf import write_directory

# Converts until more than half is done, says so, and waits to be killed.
HALF = """
import sys
from pathlib import Path
from shm import chunked_file
from stages.worker.checkpoint.prepare_source import prepare_source

chunked_file.CHUNK_BYTES = 4096  # the model is smaller than a chunk

def progress(phase, done, total):
    if phase == "ingest" and 2 * done > total:
        print("half", flush=True)
        sys.stdin.read()

prepare_source(Path(sys.argv[1]), Path(sys.argv[2]), progress=progress)
"""
# Prints the greatest memory before and after a conversion, KiB.
MEMORY = """
import resource, sys
from pathlib import Path
from stages.worker.checkpoint.prepare_source import prepare_source

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

prepare_source(Path(sys.argv[1]), Path(sys.argv[2]))
before = peak()
prepare_source(Path(sys.argv[3]), Path(sys.argv[2]))
print(before, peak())
"""


def written(folder: Path, index: Index) -> bytes:
    return bin_path(folder / f"{index.digest}.idx").read_bytes()


def kill_halfway(directory: Path, folder: Path) -> None:
    folder.mkdir()
    with subprocess.Popen(
        [sys.executable, "-c", HALF, str(directory), str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"half\n"
        os.kill(child.pid, signal.SIGKILL)
    assert not list(folder.glob("*.idx")) and not list(folder.glob("*.bin"))


@pytest.fixture
def directory(tiny_gguf, tmp_path: Path) -> Path:  # type: ignore[no-untyped-def]
    return write_directory(tiny_gguf("super", "F16"), tmp_path / "hf")


@pytest.fixture
def converted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the tensors that are converted from here on."""
    names: list[str] = []
    plain = ingest_module._write

    def write(writer, file, part, pool, report):  # type: ignore[no-untyped-def]
        names.append(part.name)
        plain(writer, file, part, pool, report)

    monkeypatch.setattr(ingest_module, "_write", write)
    return names


@pytest.mark.parametrize("damage", ["none", "torn", "flipped", "other"])
def test_a_killed_conversion_goes_on(directory: Path, tmp_path: Path, converted: list[str], damage: str) -> None:
    (tmp_path / "whole").mkdir()
    expected = prepare_source(directory, tmp_path / "whole")
    n_all = len(converted)
    converted.clear()
    folder = tmp_path / "killed"
    kill_halfway(directory, folder)
    (partial,) = (folder / ".fetch").glob("ingest-*")
    tensors, data = partial / "tensors", partial / "bin"
    listed = tensors.read_bytes().splitlines()
    if damage == "torn":  # what a write that was cut off leaves
        tensors.write_bytes(b"\n".join(listed) + b'\n["blk.1.attn_')
        data.write_bytes(data.read_bytes() + b"\x01" * 1000)
    elif damage == "flipped":  # in the last complete tensor
        at = json.loads(listed[-1])[5]
        raw = bytearray(data.read_bytes())
        raw[at] ^= 1
        data.write_bytes(raw)
    elif damage == "other":
        tensors.write_bytes(b"\n".join([b'"another conversion"', *listed[1:], b""]))
    found = prepare_source(directory, folder)
    assert written(folder, found) == written(tmp_path / "whole", expected)
    assert found == expected
    assert not (folder / ".fetch").exists() or not list((folder / ".fetch").iterdir())
    n_skipped = len(listed) - 1 - 4  # without the line of what is converted and the RoPE tables
    left_out = {"none": n_skipped, "torn": n_skipped, "flipped": n_skipped - 1, "other": 0}[damage]
    assert len(converted) == n_all - left_out
    assert n_skipped > n_all // 4


def test_a_killed_conversion_of_a_file_goes_on(tiny_gguf, tmp_path: Path, converted: list[str]) -> None:  # type: ignore[no-untyped-def]
    """Its digest is not known before the end."""
    source, folder = tiny_gguf("super", "Q4_K_M"), tmp_path / "killed"
    kill_halfway(source, folder)
    found = prepare_source(source, folder)
    assert 0 < len(converted) < len(found.tensors) // 2 + 1
    assert found.digest == hashlib.sha256(source.read_bytes()).hexdigest()
    (tmp_path / "whole").mkdir()
    expected = ingest_module.ingest(source, tmp_path / "whole" / f"{found.digest}.idx", found.digest)
    assert found == expected and written(folder, found) == written(tmp_path / "whole", expected)
    assert prepare_source(source, folder) == found  # its digest is known now


def test_a_file_that_is_written_meanwhile_is_refused(tiny_gguf, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    source, folder = tmp_path / "m.gguf", tmp_path / "models"
    source.write_bytes(tiny_gguf("small", "Q8_0").read_bytes())
    folder.mkdir()

    def write(phase: str, done: int, total: int) -> None:
        if done == total:
            with source.open("r+b") as file:
                file.write(b"GGUF")

    with pytest.raises(ConfigError, match="was changed while it was read"):
        prepare_source(source, folder, progress=write)
    assert not list(folder.glob("*.idx")) and not list(folder.glob("*.bin"))
    assert digests.read_all(folder) == {}


def test_an_error_leaves_nothing(directory: Path, tmp_path: Path) -> None:
    folder = tmp_path / "models"
    folder.mkdir()

    def fail(phase: str, done: int, total: int) -> None:
        if phase == "ingest":
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        prepare_source(directory, folder, progress=fail)
    assert not list(folder.glob("*.bin")) and not list((folder / ".fetch").iterdir())


def test_memory_stays_below_the_size_of_the_model(directory: Path, tmp_path: Path) -> None:
    """A model of 15 matrices of 32 MiB, which are holes in its file."""
    width, layers = 4096, 2
    large = write_sparse_llama(directory, tmp_path / "large", width, layers)
    matrix = width * width * 2
    assert (large / "model.safetensors").stat().st_size > 14 * matrix
    (tmp_path / "models").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, str(directory), str(tmp_path / "models"), str(large)],
        capture_output=True,
        check=True,
        text=True,
    )
    before, after = (int(number) * 1024 for number in done.stdout.split())
    assert after - before < matrix + (128 << 20)


def write_sparse_llama(source: Path, directory: Path, width: int, layers: int) -> Path:
    """A llama of zeros, with the vocabulary of another directory; its weights take no blocks of the disk."""
    directory.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source / name, directory / name)
    numbers = dict.fromkeys(("hidden_size", "intermediate_size", "vocab_size"), width)
    numbers |= {"num_attention_heads": 32, "num_hidden_layers": layers, "max_position_embeddings": 128}
    config = {"architectures": ["LlamaForCausalLM"], "tie_word_embeddings": True, "rms_norm_eps": 1e-5, **numbers}
    (directory / "config.json").write_text(json.dumps(config))
    shapes = {"model.embed_tokens": (width, width), "model.norm": (width,)}
    attention = [f"self_attn.{name}_proj" for name in "qkvo"]
    for layer in range(layers):
        parts = dict.fromkeys((*attention, *(f"mlp.{name}_proj" for name in ("gate", "up", "down"))), (width, width))
        parts |= dict.fromkeys(("input_layernorm", "post_attention_layernorm"), (width,))
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in parts.items()}
    header, at = {}, 0
    for name, shape in shapes.items():
        end = at + 2 * math.prod(shape)
        header[f"{name}.weight"] = {"dtype": "F16", "shape": shape, "data_offsets": [at, end]}
        at = end
    raw = json.dumps(header).encode()
    with (directory / "model.safetensors").open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        file.truncate(8 + len(raw) + at)
    return directory
