"""The record of a file that is still downloaded."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from pipeline.errors import ModelUnavailable
from shm.arrival import ARRIVING, COMPLETE, FAILED, Arrival, ArrivalWriter, arrival_path
from shm.checkpoint import Tensor, load_index, write_index
from stages.worker import arriving_weights as aw
from tests.e2e import small_disk
from tests.fleet.checkpoints import write_checkpoint


def test_a_reader_sees_what_the_writer_stores(tmp_path: Path) -> None:
    path = arrival_path(tmp_path / "a.bin")
    with ArrivalWriter(path) as writer, Arrival(path) as reader:
        assert (reader.state, reader.verified) == (ARRIVING, 0)
        for verified, expected in ((4096, 4096), (100, 4096), (8192, 8192)):
            writer.advance(verified)
            assert reader.verified == expected
        writer.beat()
        assert 0.0 <= reader.silent_s < 60.0
        writer.finish(is_complete=True)
        writer.finish(is_complete=False)
        assert reader.state == COMPLETE
    with pytest.raises(FileExistsError):
        ArrivalWriter(path)


FULL = """
import errno, os, sys
from pathlib import Path
from shm.arrival import ArrivalWriter
folder = Path(sys.argv[1])
room = os.statvfs(folder)
fd = os.open(folder / "filler", os.O_WRONLY | os.O_CREAT)
os.posix_fallocate(fd, 0, room.f_bavail * room.f_frsize)
try:
    ArrivalWriter(folder / "a.arrival")
except OSError as error:
    sys.exit(error.errno != errno.ENOSPC)
sys.exit("it was made")
"""


def test_on_a_full_disk_no_record_is_made(tmp_path: Path) -> None:
    if reason := small_disk.why_not():
        pytest.skip(f"no file system can be mounted here: {reason}")
    subprocess.run([*small_disk.mounted(64, tmp_path), sys.executable, "-c", FULL, tmp_path], check=True, timeout=60)


@pytest.mark.parametrize("contents", [b"", bytes(32), b"\1" * 31, b"\1" * 33])
def test_a_record_of_another_layout_is_refused(tmp_path: Path, contents: bytes) -> None:
    (tmp_path / "a.arrival").write_bytes(contents)
    with pytest.raises(ValueError, match="load the model again"):
        Arrival(tmp_path / "a.arrival")


def tensor(name: str, offset: int, nbytes: int) -> Tensor:
    return Tensor(name, 1, nbytes // 4, "F32", "rows", offset, nbytes, "")


def test_a_layer_needs_all_that_is_read_before_it(tmp_path: Path) -> None:
    path, index = write_checkpoint(tmp_path, 4096)
    hyper = type(index.hyper)(3, *(getattr(index.hyper, name) for name in index.hyper.__struct_fields__[1:]))
    tensors = [
        tensor("rope.cos_lo", 0, 64),
        tensor("token_embd.weight", 64, 128),
        tensor("blk.0.attn_q.weight", 192, 64),
        tensor("blk.1.ffn_down.weight", 256, 64),
        tensor("blk.1.attn_q.weight", 320, 64),
        tensor("blk.2.attn_q.weight", 384, 64),
        tensor("output_norm.weight", 448, 64),
        tensor("output.weight", 512, 64),
    ]
    fields = {name: getattr(index, name) for name in index.__struct_fields__}
    made = type(index)(**fields | {"hyper": hyper, "tensors": tensors})
    assert aw.layer_ends(made) == [256, 384, 448]
    # Something that a step reads first lies at the end: no layer can be computed before.
    late = type(index)(**fields | {"hyper": hyper, "tensors": [*tensors, tensor("rope.local.cos_lo", 576, 64)]})
    assert aw.layer_ends(late) == [640, 640, 640]

    record = arrival_path(path)
    assert aw.arriving_weights(made, path) is None
    with ArrivalWriter(record) as writer:
        weights = aw.arriving_weights(made, path)
        assert weights is not None
        for verified, layers in ((0, 0), (255, 0), (256, 1), (383, 1), (384, 2), (448, 3)):
            writer.advance(verified)
            assert (weights.n_layers, weights.is_complete) == (layers, False)
            weights.check()
        # All layers are here, and the head is not.
        writer.finish(is_complete=True)
        assert not weights.is_complete
        writer.advance(made.bin_bytes)
        assert weights.is_complete
        assert aw.arriving_weights(made, path) is None
        weights.close()


class Interleaved(Arrival):
    """The reader's view, in which the download goes on between two of its loads."""

    after_state: Callable[[], object] = staticmethod(lambda: None)

    @property
    def state(self) -> int:
        found = super().state
        self.after_state()
        return found


def test_a_download_that_ends_while_it_is_checked_has_not_failed(tmp_path: Path) -> None:
    path, index = write_checkpoint(tmp_path, 4096)
    record = arrival_path(path)
    with ArrivalWriter(record) as writer, Interleaved(record) as reader:
        weights = aw.ArrivingWeights(index, reader)

        def complete() -> None:
            writer.advance(index.bin_bytes)
            writer.finish(is_complete=True)

        reader.after_state = complete
        weights.check()
        assert weights.is_complete
        weights.check()


@pytest.mark.parametrize("number", ["x", "1", "-1", "00", "9" * 5000])
def test_a_tensor_of_no_layer_is_named(tmp_path: Path, number: str) -> None:
    path, index = write_checkpoint(tmp_path, 4096)
    assert index.hyper.n_layers == 1
    tensors = [*index.tensors, tensor(f"blk.{number}.attn_q.weight", 4096, 64)]
    fields = {name: getattr(index, name) for name in index.__struct_fields__}
    write_index(path, type(index)(**fields | {"tensors": tensors, "bin_bytes": 8192}))
    with ArrivalWriter(arrival_path(path)), pytest.raises(ModelUnavailable, match="the model has 1 layers"):
        aw.open_arriving(path)


def test_a_download_that_has_ended_or_is_silent_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, index = write_checkpoint(tmp_path, 4096)
    with ArrivalWriter(arrival_path(path)) as writer:
        found = aw.open_arriving(path)
        assert found is not None
        checkpoint, weights = found
        assert np.array_equal(checkpoint.data, np.fromfile(path.with_suffix(".bin"), np.uint8))
        weights.check()
        with monkeypatch.context() as patched:
            patched.setattr(aw, "SILENT_S", -1.0)
            with pytest.raises(ModelUnavailable, match="no sign of life"):
                weights.check()
        writer.finish(is_complete=False)
        assert Arrival(arrival_path(path)).state == FAILED
        with pytest.raises(ModelUnavailable, match="has failed"):
            weights.check()
        with pytest.raises(ModelUnavailable, match="has failed"):
            aw.open_arriving(path)
        weights.close()
    os.truncate(arrival_path(path), 8)
    with pytest.raises(ModelUnavailable, match="8 bytes, expected 32"):
        aw.open_arriving(path)
    assert load_index(path).digest == index.digest
