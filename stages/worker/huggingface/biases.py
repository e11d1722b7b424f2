"""Which matrices have biases: as the configuration says, or the class.

`transformers` leaves out a bias that the class does not have, and sets one to 0 that a checkpoint lacks.  Here both are
refused: such a checkpoint and its configuration do not belong together.
"""

from __future__ import annotations

from collections.abc import Collection

from stages.worker.huggingface.config import CheckpointDirectoryError, Config
from stages.worker.huggingface.families import Family, part_of


def check_biases(config: Config, family: Family, names: Collection[str]) -> None:
    """Compare the biases of a checkpoint with its configuration. Raises `CheckpointDirectoryError`.

    names: of its tensors, as in GGUF files.
    """
    matrices = {part_of(name) for name in names if name.startswith("blk.") and name.endswith(".weight")}
    there = {part_of(name) for name in names if name.startswith("blk.") and name.endswith(".bias")}
    wanted = {part for part in family.biases if part in matrices}
    for key, flag in family.bias_flags.items():
        parts = [part for part in flag.parts if part in matrices]
        if config.flag(key, flag.default):
            wanted.update(parts)
            lacking = [part for part in parts if part not in there]
            if lacking:
                raise config.refuse(key, f"false: no tensor blk.N.{lacking[0]}.bias is there")
        elif found := [part for part in parts if part in there]:
            raise config.refuse(key, f"true: tensors blk.N.{found[0]}.bias are there")
    if lacking := sorted(wanted - there):
        raise CheckpointDirectoryError(
            f"{config.path.parent}: no tensor blk.N.{lacking[0]}.bias is there, which this class has; fetch it again"
        )
    if extra := sorted(part for part in there - wanted if not part.endswith("norm")):
        raise CheckpointDirectoryError(
            f"{config.path.parent}: tensors blk.N.{extra[0]}.bias are there, which this class has not; use another one"
        )
