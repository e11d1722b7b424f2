"""Small Hugging Face directories: changes of their files, the checkpoints that they give, and their refusals."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from pipeline.errors import ConfigError
from shm.checkpoint import Index, bin_path
from stages.worker.checkpoint.prepare_source import prepare_source
from stages.worker.huggingface.safetensors import SafetensorsFile
from tools.tiny_hf import write_safetensors


def folder_of(tmp_path: Path) -> Path:
    folder = tmp_path / "models"
    folder.mkdir(exist_ok=True)
    return folder


def written(folder: Path, index: Index) -> bytes:
    return bin_path(folder / f"{index.digest}.idx").read_bytes()


def change(path: Path, **fields: object) -> None:
    """Replace fields of a JSON file; None removes one."""
    values = json.loads(path.read_text()) | fields
    path.write_text(json.dumps({key: value for key, value in values.items() if value is not None}))


def refusal(directory: Path, quant: str = "") -> str:
    folder = directory.parent / "models"
    folder.mkdir(exist_ok=True)
    with pytest.raises(ConfigError) as caught:
        prepare_source(directory, folder, quant)
    assert not list(folder.glob("*.bin")) and not list(folder.glob("*.idx"))
    return caught.value.message


def stored_tensors(directory: Path) -> dict[str, tuple[str, np.ndarray]]:
    """The weights of a directory of one file."""
    kinds = {"F16": "<f2", "F32": "<f4", "BF16": "<u2"}
    return {
        name: (
            stored.dtype,
            np.ascontiguousarray(stored.data).reshape(-1).view(kinds[stored.dtype]).reshape(stored.shape),
        )
        for name, stored in SafetensorsFile(directory / "model.safetensors").tensors.items()
    }


def replace_weights(directory: Path, **changes: tuple[str, np.ndarray] | None) -> None:
    """Write the weights again with some tensors changed or (None) left out; `__` stands for a dot."""
    tensors = stored_tensors(directory)
    for name, value in changes.items():
        tensors.pop(name.replace("__", "."), None)
        if value is not None:
            tensors[name.replace("__", ".")] = value
    path = directory / "model.safetensors"
    path.unlink()  # the map of the old file stays as it is
    write_safetensors(path, tensors)
