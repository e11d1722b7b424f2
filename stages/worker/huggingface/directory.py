"""The files of a checkpoint directory: which hold the weights, and which tensor is in which.

Weights are `model.safetensors`, or several files that `model.safetensors.index.json` lists.  Pickled weights
(`pytorch_model.bin`, `*.pt`, ...) are refused by name, because reading a pickle can run any code.
"""

from __future__ import annotations

from pathlib import Path

from pipeline.models.model_directory import CONFIG, INDEX, MAX_WEIGHT_FILES, MODULES, SMALL_FILES
from stages.worker.huggingface import config as json_files
from stages.worker.huggingface.config import CheckpointDirectoryError, Config
from stages.worker.huggingface.safetensors import SafetensorsFile, Stored

_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl", "*.pickle")


class Directory:
    """An opened directory: `config`, and `tensors` by the names that they have in its files."""

    def __init__(self, path: Path) -> None:
        """Read the configuration and all headers. Raises `CheckpointDirectoryError`, `OSError`."""
        self.path = path
        config = json_files.read(path / CONFIG)
        if config is None:
            raise CheckpointDirectoryError(
                f"{path} has no {CONFIG}; a model is a GGUF file, or a directory with {CONFIG} and safetensors"
            )
        self.config: Config = config
        index = json_files.read(path / INDEX)
        self.files: list[SafetensorsFile] = []
        self.tensors: dict[str, Stored] = {}
        if index is None:
            self._open_all(self._single())
        else:
            self._open_listed(index)

    def _single(self) -> list[str]:
        names = sorted(one.name for one in self.path.glob("*.safetensors"))
        if "model.safetensors" in names:
            return ["model.safetensors"]
        if len(names) == 1:
            return names
        if names:
            raise CheckpointDirectoryError(
                f"{self.path} has {len(names)} safetensors files and no {INDEX}, which lists their tensors; fetch it"
            )
        pickled = sorted({one.name for pattern in _PICKLED for one in self.path.glob(pattern)})
        if pickled:
            raise CheckpointDirectoryError(
                f"{self.path / pickled[0]} holds pickled weights, which can run any code when they are read, and are "
                f"refused; expected model.safetensors: fetch that, or convert them where you trust their author"
            )
        raise CheckpointDirectoryError(f"{self.path} has no weights; expected model.safetensors or {INDEX}")

    def _open_all(self, names: list[str]) -> None:
        for name in names:
            file = SafetensorsFile(self.path / name)
            self.files.append(file)
            for tensor, stored in file.tensors.items():
                if tensor in self.tensors:
                    other = self.tensors[tensor].file.path.name
                    raise CheckpointDirectoryError(f"{file.path}: tensor {tensor[:120]!r} is also in {other}")
                self.tensors[tensor] = stored

    def _open_listed(self, index: Config) -> None:
        listed = index.table("weight_map").fields
        names = sorted({str(name) for name in listed.values()})
        if not names or len(names) > MAX_WEIGHT_FILES:
            raise CheckpointDirectoryError(
                f"{index.path}: weight_map names {len(names)} files, expected 1 to {MAX_WEIGHT_FILES}"
            )
        for name in names:
            if name != Path(name).name or not name.endswith(".safetensors"):
                raise CheckpointDirectoryError(
                    f"{index.path}: weight_map names {name[:120]!r}, expected a .safetensors file of the directory"
                )
            if not (self.path / name).is_file():
                raise CheckpointDirectoryError(f"{self.path / name} is missing, and {INDEX} lists it; fetch it")
        self._open_all(names)
        for tensor, name in listed.items():
            found = self.tensors.get(tensor)
            if found is None or found.file.path.name != name:
                raise CheckpointDirectoryError(
                    f"{self.path / str(name)} has no tensor {tensor[:120]!r}, and {INDEX} lists it there; fetch both"
                )

    @property
    def small_files(self) -> list[Path]:
        """Those of `SMALL_FILES` that are here and that a checkpoint's bytes depend on."""
        # What lists modules can only be refused.
        names = [name for name in SMALL_FILES if name != MODULES]
        return [self.path / name for name in names if (self.path / name).is_file()]
