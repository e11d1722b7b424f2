"""Models whose attention factor an older release ignored are prepared again, others are not."""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import MagicMock

import gguf
import msgspec
import pytest

from pipeline.config.load import resolve
from pipeline.config.schema import ModelConfig
from pipeline.errors import ConfigError, ResourceError
from pipeline.models import attention_factor, store
from shm.checkpoint import Index, load_index, load_tables, write_index
from stages.worker.checkpoint.attention_factor import LoadedError, apply_factor
from stages.worker.checkpoint.hyperparameters import HyperReader
from stages.worker.checkpoint.prepare import open_verified, prepare_checkpoint
from stages.worker.stage import WorkerStage
from starling import embedded, loaded_revisions
from starling.cli import prepare_apart, publish
from starling.cli.prepare import prepare_all
from tools.tiny_gguf import SHAPES, add_byte_level_vocabulary, write_model


class Prepared:
    """A GGUF file, and the checkpoint that an older release made of it."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, factor: float, name: str = "m") -> None:
        def add_keys(writer: gguf.GGUFWriter) -> None:
            add_byte_level_vocabulary(writer, 300, 0)
            writer.add_float32("llama.rope.scaling.attn_factor", factor)

        self.gguf = write_model(tmp_path / f"{name}.gguf", SHAPES["small"], "Q4_0", add_vocabulary=add_keys)
        self.model = ModelConfig(name=name, path=str(self.gguf))
        self.loaded: Collection[tuple[str, int]] = ()
        (tmp_path / "models").mkdir(exist_ok=True)
        with monkeypatch.context() as patch:
            patch.setattr(HyperReader, "_magnitude", lambda reader: 1.0)
            self.path = prepare_checkpoint(self.model, tmp_path / "models")
        index = self.index
        hyper = msgspec.structs.replace(index.hyper, is_factor_read=False)
        write_index(self.path, msgspec.structs.replace(index, hyper=hyper), load_tables(self.path))

    @property
    def index(self) -> Index:
        return load_index(self.path)

    @property
    def magnitude(self) -> float:
        """The factor in the RoPE tables, of a verified checkpoint."""
        return float(open_verified(self.path).view("rope.cos_hi")[0, 0])

    def apply(self) -> bool:
        return apply_factor(self.model, self.path, lambda: self.loaded)


def test_a_factor_that_was_ignored_is_applied_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    old = Prepared(tmp_path, monkeypatch, 1.5)
    assert (old.magnitude, old.index.hyper.kv_revision) == (1.0, 0)
    with caplog.at_level(logging.WARNING):
        assert old.apply()
    assert "an older release ignored the attention factor of a model, ingesting it again" in caplog.text
    assert (old.magnitude, old.index.hyper.kv_revision) == (1.5, 1)
    inode = old.path.stat().st_ino
    assert not old.apply()
    assert old.path.stat().st_ino == inode


@pytest.fixture
def without_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let commands use the home `tmp_path`, and compile nothing."""
    monkeypatch.setenv("STARLING_HOME", str(tmp_path))
    monkeypatch.setattr("stages.tokenizer.kernels.compiled.compiling", nullcontext)

    def prepare_without_kernels(model: ModelConfig, folder: Path, *others: object, **more: object) -> Path:
        return prepare_checkpoint(model, folder)

    monkeypatch.setattr("stages.worker.checkpoint.prepare.prepare", prepare_without_kernels)
    monkeypatch.setattr(embedded, "prepare", prepare_without_kernels)


@pytest.mark.usefixtures("without_kernels")
@pytest.mark.parametrize("publishes", [False, True])
def test_the_commands_apply_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, publishes: bool) -> None:
    """`prepare`, `up`, which does that in a child, and `publish`."""
    old = Prepared(tmp_path, monkeypatch, 1.5)
    config = resolve({"models": [{"name": "m", "path": str(old.gguf)}]}, {})
    assert prepare_apart._is_new(old.model)
    if publishes:
        assert publish._prepare(config, old.model, store.no_progress) == old.path
    else:
        prepare_all(config)
    assert (old.magnitude, old.index.hyper.kv_revision) == (1.5, 1)
    assert not prepare_apart._is_new(old.model)


@pytest.mark.usefixtures("without_kernels")
@pytest.mark.parametrize("is_loaded", [False, True])
def test_an_engine_in_this_process_computes_what_the_server_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_loaded: bool
) -> None:
    monkeypatch.setattr(embedded.Embedded, "__init__", lambda *arguments: None)
    old = Prepared(tmp_path, monkeypatch, 1.5)
    monkeypatch.setattr(loaded_revisions, "read", lambda config: {(old.path.stem, 0)} if is_loaded else set())
    embedded.Embedded.load("m", config=resolve({"models": [{"name": "m", "path": str(old.gguf)}]}, {}))
    assert (old.magnitude, old.index.hyper.kv_revision) == ((1.0, 0) if is_loaded else (1.5, 1))


@pytest.mark.usefixtures("without_kernels")
@pytest.mark.parametrize(
    "error",
    [ResourceError("no room for a second copy"), ConfigError("the source has changed"), PermissionError(13, "denied")],
    ids=lambda error: type(error).__name__,
)
def test_an_engine_in_this_process_uses_a_checkpoint_that_cannot_be_prepared_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    """A release that ignored the factor loaded the model, so this one does too."""
    monkeypatch.setattr(embedded.Embedded, "__init__", lambda *arguments: None)
    monkeypatch.setattr("stages.worker.checkpoint.attention_factor.ingest", MagicMock(side_effect=error))
    old = Prepared(tmp_path, monkeypatch, 1.5)
    embedded.Embedded.load("m", config=resolve({"models": [{"name": "m", "path": str(old.gguf)}]}, {}))
    assert (old.magnitude, old.index.hyper.kv_revision) == (1.0, 0)
    [record] = [one for one in caplog.records if "using its checkpoint as it is" in one.message]
    assert (vars(record)["model"], vars(record)["reason"]) == ("m", str(error))


@pytest.mark.usefixtures("without_kernels")
def test_one_error_names_the_loaded_models_after_the_others_were_prepared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("a", "b", "c")
    old = [Prepared(tmp_path, monkeypatch, factor, name) for name, factor in zip(names, (1.5, 1.25, 2.0), strict=True)]
    monkeypatch.setattr(loaded_revisions, "read", lambda config: {(one.path.stem, 0) for one in old[:2]})
    config = resolve({"models": [{"name": one.model.name, "path": str(one.gguf)} for one in old]}, {})
    with pytest.raises(LoadedError, match="models 'a', 'b': .* `starling unload a`, `starling unload b` first"):
        prepare_all(config)
    assert [one.magnitude for one in old] == [1.0, 1.0, 2.0]


def test_a_model_without_a_factor_keeps_its_checkpoint_and_is_asked_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STARLING_HOME", str(tmp_path))
    old = Prepared(tmp_path, monkeypatch, 1.0)
    before = old.path.read_bytes()
    assert prepare_apart._is_new(old.model)
    assert not old.apply()
    assert old.path.read_bytes() == before  # a published index is known by its bytes
    assert not prepare_apart._is_new(old.model)
    monkeypatch.delattr(HyperReader, "kv_revision")
    assert not old.apply()


def test_a_comparison_that_cannot_be_remembered_is_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a models directory that is read-only, where no lock can be made either."""
    old = Prepared(tmp_path, monkeypatch, 1.0)
    (old.path.parent / ".digests.lock").mkdir()  # cannot be opened for writing, by root neither
    for _ in range(2):
        assert not old.apply()
        assert attention_factor.may_be_missing(old.model, old.path)


def test_the_index_of_a_loaded_model_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = Prepared(tmp_path, monkeypatch, 1.5)
    before, old.loaded = old.path.read_bytes(), [(old.path.stem, 0)]
    with pytest.raises(ConfigError, match="`starling unload m` first"):
        old.apply()
    assert old.path.read_bytes() == before
    looks = iter([(), [(old.path.stem, 0)]])  # a server starts while the file is read
    with pytest.raises(LoadedError):
        apply_factor(old.model, old.path, lambda: next(looks))
    assert old.path.read_bytes() == before and len(list(old.path.parent.glob(f"*{old.path.stem}*"))) == 2
    old.loaded = [(old.path.stem, 1), ("cd" * 32, 0)]  # it has started with the new one, another model has not
    assert old.apply()


@pytest.mark.parametrize(("factor", "is_warned"), [(1.5, True), (1.0, False)])
def test_a_worker_names_the_remedy_and_keeps_the_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, factor: float, is_warned: bool
) -> None:
    """Without `starling up`: stages of systemd, and models that are loaded on demand."""
    monkeypatch.setenv("STARLING_HOME", str(tmp_path))
    monkeypatch.setattr("stages.worker.stage.pin", lambda *arguments: None)
    old = Prepared(tmp_path, monkeypatch, factor)
    before = old.path.read_bytes()
    stage = MagicMock(model_config=old.model, _index=old.index)
    stage.version.group = 0

    def start() -> None:
        WorkerStage._finish_start(stage)
        for thread in threading.enumerate():
            if thread.name == "attention-factor":
                thread.join()

    start()
    found = [record for record in caplog.records if "using its checkpoint as it is" in record.message]
    assert [(vars(one)["model"], "`starling prepare m`" in vars(one)["remedy"]) for one in found] == [
        ("m", True)
    ] * is_warned
    assert old.path.read_bytes() == before
    if not is_warned:  # the answer is remembered
        monkeypatch.delattr(HyperReader, "kv_revision")
        start()
    stage._index = msgspec.structs.replace(
        old.index, hyper=msgspec.structs.replace(old.index.hyper, is_factor_read=True)
    )
    monkeypatch.setattr("stages.worker.stage.warn_if_ignored", lambda *arguments: pytest.fail("it is read again"))
    start()


def test_a_checkpoint_without_its_file_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = Prepared(tmp_path, monkeypatch, 1.5)
    old.model = ModelConfig(name="m", path=str(old.path))
    before = old.path.read_bytes()
    assert not old.apply()
    assert old.path.read_bytes() == before


def test_a_file_that_this_release_refuses_leaves_the_checkpoint_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    old = Prepared(tmp_path, monkeypatch, 0.0)
    before = old.path.read_bytes()
    assert not old.apply()
    assert "keeping the checkpoint as it is" in caplog.text
    assert old.path.read_bytes() == before
