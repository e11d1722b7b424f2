"""How hidden states become an embedding, by the files of sentence-transformers.

`modules.json` lists what a text goes through, each module with a folder of its own.  The engine has three of them: the
transformer, the pooling, and the division by the length.  A model with others is refused by their names.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipeline.models.model_directory import MODULES, POOLING
from stages.worker.checkpoint.source import REVISED
from stages.worker.huggingface import config as json_files
from stages.worker.huggingface.config import CheckpointDirectoryError, Config

_NUMBERS = {"mean": 1, "cls": 2, "lasttoken": 3}  # as in GGUF files
_PACKAGE = "sentence_transformers."
_FOLDERS = {"Transformer": "", "Pooling": str(Path(POOLING).parent)}  # of modules whose files are read
_WITHOUT_FILES = ("Normalize",)
# Of files that were written before they had `pooling_mode`.
_FLAGS = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_lasttoken": "lasttoken",
    "pooling_mode_max_tokens": "",
    "pooling_mode_mean_sqrt_len_tokens": "",
    "pooling_mode_weightedmean_tokens": "",
}


def read_pooling(directory: Path, architecture: str) -> dict[str, Any]:
    """The GGUF key of the pooling, where the directory states it. Raises `CheckpointDirectoryError`, `OSError`."""
    modules = json_files.read_list(directory / MODULES) or []
    # Without a pooling they make no embedding: they may score what a model generates.
    pools = any(module.text("type").endswith("Pooling") for module in modules)
    for module in modules if pools else []:
        _check(module)
    config = json_files.read(directory / POOLING)
    if config is None:
        if pools:
            raise CheckpointDirectoryError(f"{directory / POOLING} is missing, and {MODULES} lists it; fetch it")
        return {}
    mode, is_revised = _mode(config)
    if mode != "lasttoken" and not config.flag("include_prompt", True):
        raise config.refuse("include_prompt", "true, or the mode lasttoken")
    return {f"{architecture}.pooling_type": _NUMBERS[mode]} | ({REVISED: True} if is_revised else {})


def _check(module: Config) -> None:
    """Raise `CheckpointDirectoryError` for a module that the engine has not."""
    package, _, kind = module.text("type").rpartition(".")
    if not f"{package}.".startswith(_PACKAGE) or kind not in (*_FOLDERS, *_WITHOUT_FILES):
        raise module.refuse("type", f"{', '.join(_FOLDERS)} or {', '.join(_WITHOUT_FILES)} of {_PACKAGE}*")
    if kind in _FOLDERS and module.text("path", "") != _FOLDERS[kind]:
        raise module.refuse("path", repr(_FOLDERS[kind]))


def _mode(config: Config) -> tuple[str, bool]:
    """The mode, and whether older releases found none."""
    if config.has("pooling_mode"):
        given = config.fields["pooling_mode"]
        modes = given if isinstance(given, list) else [given]
        if len(modes) != 1 or modes[0] not in list(_NUMBERS):
            raise config.refuse("pooling_mode", f"one of {', '.join(_NUMBERS)}")
        return modes[0], True
    found = [key for key in _FLAGS if config.flag(key, False)]
    for key in found:
        if not _FLAGS[key]:
            raise config.refuse(key, "false")
    if len(found) > 1:
        raise config.refuse(found[1], f"false beside {found[0]}")
    return (_FLAGS[found[0]], False) if found else ("mean", True)
