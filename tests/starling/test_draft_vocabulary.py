"""A draft model of another vocabulary is refused before anything is served, once both are known."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.config import paths
from pipeline.config.schema import Config, ModelConfig
from pipeline.errors import ConfigError
from shm.checkpoint import load_index
from stages.worker.checkpoint.prepare import prepare_checkpoint
from starling.cli.prepare import check_drafts
from tools.tiny_gguf import SHAPES, write_model


def test_vocabularies_are_compared_where_both_are_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STARLING_HOME", str(tmp_path))
    paths.models_dir().mkdir(parents=True)
    # Of "odd" the vocabulary is smaller; other seeds have other weights and the same short vocabulary.
    shapes = {"large": ("small", 1), "small": ("small", 2), "other": ("odd", 1)}
    models = {
        name: ModelConfig(name=name, path=str(write_model(tmp_path / f"{name}.gguf", SHAPES[shape], seed=seed)))
        for name, (shape, seed) in shapes.items()
    }

    def config(draft: str) -> Config:
        large = ModelConfig(name="large", path=models["large"].path, draft_model=draft)
        return Config(models=(large, models["small"], models["other"]))

    digests = {
        load_index(prepare_checkpoint(models[name], paths.models_dir())).vocabulary_digest
        for name in ("large", "small")
    }
    assert len(digests) == 1
    check_drafts(config("small"))
    check_drafts(config("other"))  # not ingested yet: not known
    prepare_checkpoint(models["other"], paths.models_dir())
    with pytest.raises(ConfigError, match=r"models\.0\.draft_model = 'other': .*\(261 ids\).*\(300 ids\)") as error:
        check_drafts(config("other"))
    assert error.value.param == "models.0.draft_model"
