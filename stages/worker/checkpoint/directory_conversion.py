"""Converts the directory of a hub's repository: as `starling ingest DIRECTORY --quant TYPE`, to the same digest.

What reads directories is imported when it is used: the library of tokenizers takes memory in every worker.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

from pipeline.errors import ConfigError
from pipeline.models import store
from pipeline.models.model_directory import CONFIG
from shm.checkpoint import Index

if TYPE_CHECKING:
    from stages.worker.checkpoint.prepare_source import CheckVocabulary
    from stages.worker.checkpoint.source import Source

log = logging.getLogger("starling.checkpoint")


class DirectoryConversion:
    """Implements `pipeline.models.conversion.Conversion`."""

    def __init__(
        self,
        models_dir: Path,
        pretokenizer: str = "",
        check_vocabulary: CheckVocabulary | None = None,
        note: Callable[[str], None] = log.info,
    ) -> None:
        """`check_vocabulary`: as of `prepare_source`; None: none. `note`: called with what will be done."""
        self.pretokenizer = pretokenizer
        self._models_dir, self._check_vocabulary, self._note = models_dir, check_vocabulary, note

    def note(self, text: str) -> None:
        """As `Conversion.note`."""
        self._note(text)

    def check(self, directory: Path) -> None:
        """As `Conversion.check`: the class, its numbers, the pooling and the vocabulary."""
        from stages.worker.checkpoint.gguf import GgufError
        from stages.worker.checkpoint.vocabulary import read_vocabulary as read_tokenizer
        from stages.worker.huggingface import config as json_files
        from stages.worker.huggingface.config import CheckpointDirectoryError
        from stages.worker.huggingface.metadata import family_of, hyper_parameters
        from stages.worker.huggingface.pooling import read_pooling
        from stages.worker.huggingface.vocabulary import read_vocabulary

        try:
            config = json_files.read(directory / CONFIG)
            if config is None:
                raise CheckpointDirectoryError(f"{directory} has no {CONFIG}")
            _, family = family_of(config)
            hyper_parameters(config, family)
            read_pooling(directory, family.architecture)
            if config.has("vocab_size"):  # otherwise the embedding says how many ids there are
                rows = config.integer("vocab_size")
                keys = read_vocabulary(directory, config, rows, self.pretokenizer)
                embedding = SimpleNamespace(shape=(rows, 0))
                head = SimpleNamespace(path=directory, metadata=keys, tensors={"token_embd.weight": embedding})
                data = read_tokenizer(cast("Source", head), self.pretokenizer)
                if self._check_vocabulary is not None:
                    self._check_vocabulary(data, directory)
        except (CheckpointDirectoryError, GgufError) as error:
            raise ConfigError(str(error), param="model") from None

    def convert(
        self, directory: Path, quant: str, progress: store.Progress, check_digest: Callable[[str], None]
    ) -> Index:
        """As `Conversion.convert`."""
        from stages.worker.checkpoint.prepare_source import accept_vocabulary, prepare_source

        check = self._check_vocabulary or accept_vocabulary
        return prepare_source(directory, self._models_dir, quant, self.pretokenizer, progress, check, check_digest)
