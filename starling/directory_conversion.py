"""The conversion of a hub's safetensors, for commands and the engine.

Vocabularies are compared with the tokenizer's own, for which the worker has no tokenizer.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from stages.worker.checkpoint.directory_conversion import DirectoryConversion
from starling.vocabulary_check import check_vocabulary

log = logging.getLogger("starling.checkpoint")


def conversion_of(
    models_dir: Path, pretokenizer: str = "", note: Callable[[str], None] = log.info
) -> DirectoryConversion:
    """`note`: called with what will be done."""
    return DirectoryConversion(models_dir, pretokenizer, check_vocabulary, note)
