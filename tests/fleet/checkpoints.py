"""A small checkpoint of any size, without a model: what publication and downloads see of one."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np

from shm.checkpoint import Hyper, Index, TokenizerData
from shm.checkpoint_writer import CheckpointWriter

HYPER = Hyper(1, 64, 2, 1, 32, 96, 300, 2048, 1e-5, 32, "neighbours", "silu")
TOKENIZER = TokenizerData("gpt2", "default", ["a"], [1], [], [], -1, -1, -1, -1, -1, False, False, "")


def write_checkpoint(folder: Path, nbytes: int, seed: int = 1) -> tuple[Path, Index]:
    """Write `DIGEST.idx` and a `.bin` of about `nbytes` random bytes; the same arguments give the same bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256(f"{seed}/{nbytes}".encode()).hexdigest()
    path = folder / f"{digest}.idx"
    values = np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)
    with CheckpointWriter(path) as writer:
        writer.add("token_embd.weight", (1, nbytes // 4), "F32", "rows", [values[: nbytes // 4 * 4]])
        index = writer.finish(
            digest=digest,
            architecture="llama",
            name=f"model {seed}",
            parameters=nbytes,
            source_bytes=nbytes,
            hyper=HYPER,
            tokenizer=TOKENIZER,
        )
    return path, index
