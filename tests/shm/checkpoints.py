"""Small checkpoints without a model."""

from __future__ import annotations

from shm.checkpoint import Hyper, Index, TokenizerData
from shm.checkpoint_writer import CheckpointWriter

HYPER = Hyper(1, 32, 1, 1, 32, 32, 4, 64, 1e-5, 32, "neighbours", "silu")
TOKENIZER = TokenizerData("gpt2", "x", ["a", "b"], [1, 1], [], [], -1, 1, -1, -1, -1, False, False, "")


def finish(writer: CheckpointWriter) -> Index:
    """Finish a checkpoint whose tensors have been added."""
    return writer.finish(
        digest="00" * 32,
        architecture="llama",
        name="n",
        parameters=134,
        source_bytes=1,
        hyper=HYPER,
        tokenizer=TOKENIZER,
    )
