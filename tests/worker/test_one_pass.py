"""A configured GGUF file of this machine is read once: hashed while it is converted."""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path

import pytest

from pipeline.config.schema import ModelConfig
from pipeline.errors import ConfigError, ModelDamaged
from pipeline.models import digests, registry
from pipeline.models.pull import pull
from pipeline.models.sources import FileSource
from stages.worker.checkpoint import one_pass
from stages.worker.checkpoint.gguf import GgufFile
from stages.worker.checkpoint.prepare import prepare_checkpoint
from stages.worker.checkpoint.prepare_source import prepare_source
from tools.tiny_gguf import SHAPES, write_model


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_model(tmp_path / "m.gguf", SHAPES["small"], "Q4_0")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "models").mkdir()
    return tmp_path / "models"


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def forbid_hashing(monkeypatch: pytest.MonkeyPatch) -> None:
    def compute(*_: object) -> None:
        raise AssertionError("the file is hashed apart")

    monkeypatch.setattr(digests, "compute", compute)


def test_it_is_hashed_while_it_is_converted(source: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forbid_hashing(monkeypatch)
    model, phases = ModelConfig(name="m", path=str(source)), set[str]()
    index_path = prepare_checkpoint(model, folder, lambda phase, done, total: phases.add(phase))
    assert index_path == folder / f"{sha256(source)}.idx"
    assert phases == {"ingest"}
    other = folder.parent / "other"
    other.mkdir()
    shutil.copy(source, other / "copy.gguf")
    assert prepare_source(other / "copy.gguf", other).digest == index_path.stem
    assert (other / f"{index_path.stem}.bin").read_bytes() == index_path.with_suffix(".bin").read_bytes()
    monkeypatch.setattr(one_pass, "convert_and_hash", None)  # all of it is known now
    assert prepare_checkpoint(model, folder) == index_path


def test_a_file_with_other_times_alone_is_not_converted_again(
    source: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = ModelConfig(name="m", path=str(source))
    index_path = prepare_checkpoint(model, folder)
    os.utime(source, (1, 1))
    monkeypatch.setattr(one_pass, "convert_and_hash", None)
    assert prepare_checkpoint(model, folder) == index_path
    # Nor one that the configuration names by its digest.
    shutil.copy(source, source.with_name("copy.gguf"))
    copy = ModelConfig(name="m", path=str(source.with_name("copy.gguf")), sha256=index_path.stem)
    assert prepare_checkpoint(copy, folder) == index_path


def test_a_file_with_another_digest_than_the_configured_leaves_nothing(source: Path, folder: Path) -> None:
    model = ModelConfig(name="m", path=str(source), sha256="0" * 64)
    for _ in range(2):
        with pytest.raises(
            ConfigError, match=f"has SHA-256 {sha256(source)}, expected {'0' * 64}; correct models.sha256"
        ):
            prepare_checkpoint(model, folder)
        assert not list(folder.rglob("*.idx")) + list(folder.rglob("*.bin")) + list(folder.rglob("tensors"))


def test_a_stored_file_that_was_changed_is_named_without_its_path(source: Path, folder: Path) -> None:
    """Whether it is another model or no model at all. The text is for clients of the server, too."""
    record = pull(FileSource(source), folder, "mine")
    model = ModelConfig(name="mine@3", path=str(registry.blob_path(folder, record.digest)), sha256=record.digest)
    blob = Path(model.path)
    blob.chmod(0o600)
    for content in (write_model(folder / "other", SHAPES["small"], seed=9).read_bytes(), b"GGUF and no more"):
        blob.write_bytes(content)
        expected = f"model 'mine': its stored file has SHA-256 {sha256(blob)}, expected {record.digest}"
        for known in (model, ModelConfig(name="mine")):
            with pytest.raises(ModelDamaged, match=f"^{expected}.*`starling verify mine`") as refused:
                prepare_checkpoint(known, folder)
            assert str(folder) not in refused.value.message
    # A pull stores the right one again.
    assert pull(FileSource(source), folder, "mine").digest == record.digest
    assert prepare_checkpoint(model, folder).stem == record.digest


def test_a_process_that_waited_for_another_uses_its_result(
    source: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = GgufFile(source)
    lock = one_pass.lock

    def lock_after_another(*arguments: object) -> object:
        monkeypatch.setattr(one_pass, "lock", lock)
        made.append(one_pass.prepare_file(GgufFile(source), folder).digest)
        monkeypatch.setattr(one_pass, "convert_and_hash", None)
        return lock(*arguments)  # type: ignore[arg-type]

    made: list[str] = []
    monkeypatch.setattr(one_pass, "lock", lock_after_another)
    assert one_pass.prepare_file(file, folder).digest == made[0] == sha256(source)


def test_a_file_that_is_replaced_meanwhile_is_read_again(source: Path, folder: Path) -> None:
    model, changed = ModelConfig(name="m", path=str(source)), list[str]()

    def write_once(phase: str, done: int, total: int) -> None:
        if not changed:
            changed.append(phase)
            os.replace(write_model(source.with_name("new"), SHAPES["small"], "Q8_0", seed=5), source)

    index_path = prepare_checkpoint(model, folder, write_once)
    assert changed == ["ingest"]
    assert index_path.stem == sha256(source)
    assert not list((folder / ".fetch").rglob("tensors"))
