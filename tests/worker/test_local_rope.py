"""Gemma 3 with a window of at least its context: no position is masked, and the layers with a window keep their RoPE.

Releases before this gave all layers the RoPE of those without a window.  Their checkpoints are made again, and their KV
pages have other names.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
import pytest

from pipeline.config.schema import ModelConfig
from pipeline.errors import ConfigError
from shm.checkpoint import Checkpoint, Hyper, Index, load_index, write_index
from shm.layer_groups import ONE_GROUP
from shm.pages import KvGeometry, attach_kv, create_kv
from shm.prefix_hash import root_hash
from stages.worker.checkpoint.gguf import GgufFile
from stages.worker.checkpoint.hyperparameters import HyperReader
from stages.worker.checkpoint.ingest import ingest
from stages.worker.checkpoint.one_pass import revision_of
from stages.worker.checkpoint.prepare import prepare_checkpoint
from stages.worker.checkpoint.prepare_source import prepare_source
from stages.worker.kernels import parameter_block as pb
from stages.worker.model import Arenas, Model, check_arenas
from stages.worker.rope import rope_tables
from tests.worker.conftest import Ingested, TinyGguf
from tests.worker.huggingface_files import change, folder_of
from tests.worker.kernel_logits import kernel_logits, same_bytes
from tools.reference.exact_forward import ExactModel, ExactSequence
from tools.tiny_gguf import SHAPES, write_model
from tools.tiny_hf import write_directory

SHAPE = SHAPES["gemma3"]._replace(window=300, context_length=300)
LOCAL = (300,) * 5 + (0,)
TOKENS = np.random.default_rng(3).integers(3, 260, 280)  # beyond a KV split


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose context is its window."""
    return write_model(tmp_path_factory.mktemp("short") / "short.gguf", SHAPE, "Q4_0")


def test_layers_with_a_window_have_the_tables_of_the_local_base(short: Path, ingested: Ingested) -> None:
    model = Model(Checkpoint(ingested(short)))
    for prefix, base, scale in (("rope.", SHAPE.rope_base, 4.0), ("rope.local.", 10000.0, 1.0)):
        tables = rope_tables(base, SHAPE.head_dim, SHAPE.context_length, None, scale)
        for name, table in tables._asdict().items():
            assert same_bytes(model.checkpoint.view(f"{prefix}{name}"), table), f"{prefix}{name}"
    assert [bool(angles) for angles in model.layers[:, pb.ANGLES]] == [True] * 5 + [False]
    assert not model.layers[:, pb.WINDOW].any()


def test_no_window_divides_the_pages(short: Path, ingested: Ingested) -> None:
    h = load_index(ingested(short)).hyper
    assert (h.windows, h.has_local_rope, h.kv_window, h.n_windowed) == (LOCAL, True, 0, 0)
    assert h.page_groups == KvGeometry.of(h, 32, "f16").groups == ONE_GROUP
    longer = msgspec.structs.replace(h, context_length=301)
    assert (longer.kv_window, longer.n_windowed) == (300, 5)


@pytest.mark.slow
def test_kernels_equal_the_reference(short: Path, ingested: Ingested, tmp_path: Path) -> None:
    expected = ExactSequence(ExactModel(short)).extend(TOKENS)
    assert same_bytes(kernel_logits(ingested(short), tmp_path, TOKENS, chunk=64), expected), "in large chunks"
    found = kernel_logits(ingested(short), tmp_path, TOKENS, chunk=7, ranks=2, others=3)
    assert same_bytes(found, expected), "among others"


@pytest.mark.slow
def test_a_longer_context_gives_the_same_bytes(short: Path, ingested: Ingested, tmp_path: Path) -> None:
    """There the window is smaller than the context, and masks none of these positions either."""
    longer = write_model(tmp_path / "longer.gguf", SHAPE._replace(context_length=2048), "Q4_0")
    expected = kernel_logits(ingested(longer), tmp_path, TOKENS, chunk=64)
    assert same_bytes(kernel_logits(ingested(short), tmp_path, TOKENS, chunk=64), expected)


@pytest.mark.slow
def test_windows_beyond_the_context_mask_nothing_in_other_graphs(ingested: Ingested, tmp_path: Path) -> None:
    """There the layers have one RoPE, and windows need not be kept."""
    shape = SHAPES["gemma2"]._replace(window=300, context_length=300)
    path = write_model(tmp_path / "m.gguf", shape, "Q4_0")
    h = load_index(ingested(path)).hyper
    assert (h.windows, h.has_local_rope, h.kv_revision) == ((), False, 0)
    expected = ExactSequence(ExactModel(path)).extend(TOKENS)
    assert same_bytes(kernel_logits(ingested(path), tmp_path, TOKENS, chunk=64), expected)


def test_a_directory_without_a_window_has_that_of_its_class(tiny_gguf: TinyGguf, tmp_path: Path) -> None:
    directory, folder = write_directory(tiny_gguf("gemma3", "F16"), tmp_path / "hf"), folder_of(tmp_path)
    change(directory / "config.json", sliding_window=None, max_position_embeddings=2048)
    index = prepare_source(directory, folder)
    assert (index.hyper.context_length, index.hyper.windows) == (2048, (4096,) * 5 + (0,))
    assert index.hyper.has_local_rope and index.has("rope.local.cos_hi") and index.hyper.kv_revision == 1


# Window, context, the windows of the layers, and the revisions of the K and V and of the conversion.
CASES = [
    (300, 2048, LOCAL, 0, 2),
    (300, 301, LOCAL, 0, 2),
    (300, 300, LOCAL, 1, 3),
    (300, 200, LOCAL, 1, 3),
    (0, 200, (0,) * 6, 0, 2),
]


@pytest.mark.parametrize(("window", "context", "windows", "of_kv", "of_conversion"), CASES)
def test_only_models_that_were_wrong_have_another_revision(
    tiny_gguf: TinyGguf, window: int, context: int, windows: tuple[int, ...], of_kv: int, of_conversion: int
) -> None:
    file = GgufFile(tiny_gguf("gemma3", "Q4_0"))
    file.metadata |= {"gemma3.attention.sliding_window": window, "gemma3.context_length": context}
    del file.metadata["gemma3.rope.scaling.type"]  # has revision 2, which must not hide this one
    h = HyperReader(file).hyper()
    assert (h.windows, h.has_local_rope, h.kv_revision) == (windows, any(windows), of_kv)
    assert revision_of(file) == of_conversion


# ------------------------------------------------------------------ what older releases have left


def older(index: Index) -> Index:
    """As an older release wrote it."""
    hyper = msgspec.structs.replace(index.hyper, windows=(), has_local_rope=False, kv_revision=0)
    return msgspec.structs.replace(index, hyper=hyper)


def test_pages_of_older_releases_have_other_names(short: Path, ingested: Ingested) -> None:
    index = load_index(ingested(short))
    digest = bytes.fromhex(index.digest)
    now, before = (KvGeometry.of(one.hyper, 32, "f16") for one in (index, older(index)))
    assert now.as_meta() == {**before.as_meta(), "revision": 1}
    assert root_hash(digest, now, "") != root_hash(digest, before, "")
    divided = before._replace(n_windowed=1)  # the same numbers, in their order
    assert root_hash(digest, now, "") != root_hash(digest, divided, "")


def test_an_arena_keeps_the_revision(short: Path, ingested: Ingested, tmp_path: Path) -> None:
    for revision in (0, 1):
        geometry = KvGeometry.of(load_index(ingested(short)).hyper, 32, "f16")._replace(revision=revision)
        arena, views = create_kv(tmp_path / "m.kv", geometry, 2, bytes(32), 1)
        attached, others, found = attach_kv(tmp_path / "m.kv")
        assert found == geometry
        del views, others
        for one in (arena, attached):
            one.close()


def test_an_arena_of_another_revision_is_refused_with_the_remedy(short: Path, ingested: Ingested) -> None:
    """The index of a loaded model was made again, and its workers have started again."""
    index, other = load_index(ingested(short)), cast("Any", None)
    arenas = Arenas(other, other, other, KvGeometry.of(older(index).hyper, 32, "f16"), other, other)
    with pytest.raises(ValueError, match="KV revision is 0, expected 1: .* reload the model"):
        check_arenas(index.hyper, arenas)


def test_kernels_have_another_name_with_the_revision(
    short: Path, ingested: Ingested, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that has passed its self-test must give the same token as long as its kernels have the same name."""
    monkeypatch.setattr("stages.worker.model.compiled.identity", lambda kv_type, extra: "kernels")
    model = Model(Checkpoint(ingested(short)))
    assert model.load_kernels("f16") == "kernels 1"
    model.hyper = older(model.index).hyper
    assert model.load_kernels("f16") == "kernels"


@pytest.mark.parametrize("window", [300, 0])
def test_a_checkpoint_of_an_older_release_is_made_again_once(tmp_path: Path, window: int) -> None:
    """Its index does not say whether it is affected: without a window it would be the same."""
    source, folder = write_model(tmp_path / "m.gguf", SHAPE._replace(window=window), "Q4_0"), tmp_path / "models"
    folder.mkdir()
    model = ModelConfig(name="m", path=str(source))
    path = prepare_checkpoint(model, folder)
    expected = load_index(path)
    write_index(path, older(expected))
    assert not load_index(path).is_current
    assert prepare_checkpoint(model, folder) == path
    assert load_index(path) == expected and expected.is_current
    inode = path.stat().st_ino
    assert prepare_checkpoint(model, folder) == path
    assert path.stat().st_ino == inode


def test_other_checkpoints_are_not_made_again(tiny_gguf: TinyGguf, ingested: Ingested) -> None:
    for shape in ("gemma2", "small", "windowed"):
        assert older(load_index(ingested(tiny_gguf(shape, "Q4_0")))).is_current
    assert load_index(ingested(tiny_gguf("gemma3", "Q4_0"))).is_current


def test_a_checkpoint_without_its_source_is_refused(short: Path, tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    digest = hashlib.sha256(short.read_bytes()).hexdigest()
    path = folder / f"{digest}.idx"
    write_index(path, older(ingest(short, path, digest)))
    with pytest.raises(ConfigError, match="is of an older release, and its source is not here"):
        prepare_checkpoint(ModelConfig(name="m", path=str(path)), folder)


def test_windows_of_an_index_without_any() -> None:
    h = Hyper(2, 32, 1, 1, 32, 32, 4, 4096, 1e-5, 32, "halves", "silu")
    assert h.masking_windows == () and h.kv_window == 0
