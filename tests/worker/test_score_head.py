"""The head that scores pairs (`cls.*`): kernels, references and llama.cpp agree; bad heads are refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from pipeline.errors import ConfigError
from shm.checkpoint import load_index
from shm.step_ring import POOL_SCALE
from stages.tokenizer.opened_models import ModelSource, build_model
from stages.worker.checkpoint.ingest import check_source
from tests.tokenizer.trained import unigram_spec
from tests.worker.conftest import Ingested, TinyGguf
from tests.worker.peer_embeddings import peer_scores
from tests.worker.peer_logits import is_installed
from tools.reference.exact_forward import ExactModel, ExactSequence
from tools.reference.float_forward import FloatModel
from tools.step_runner import StepRunner
from tools.tiny_gguf import SHAPES, WORDPIECE_SPECIALS, write_model
from tools.vocabulary_gguf import add_vocabulary

Reranker = Callable[[int, str], Path]

DENSE, PLAIN = 2, 1  # layers of a head
LENGTHS = (3, 25, 90)


def pair(n: int) -> np.ndarray:
    return np.random.default_rng(n).integers(5, 260, n)


@pytest.fixture(scope="session")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> Reranker:
    """`reranker(layers, recipe)`: path of a model whose head has so many layers."""
    directory = tmp_path_factory.mktemp("rerankers")

    def get(layers: int, recipe: str) -> Path:
        path = directory / f"{layers}-{recipe}.gguf"
        shape = SHAPES["reranker"]._replace(score_layers=layers)
        return path if path.exists() else write_model(path, shape, recipe)

    return get


@pytest.mark.parametrize("layers", [DENSE, PLAIN])
def test_exact_and_float_reference_agree(reranker: Reranker, layers: int) -> None:
    path = reranker(layers, "F32")
    found = [float(ExactSequence(ExactModel(path), "f32").score(pair(n))) for n in LENGTHS]
    assert found == pytest.approx([FloatModel(path).score(pair(n)) for n in LENGTHS], abs=1e-4)
    assert len(set(found)) == len(LENGTHS)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(("layers", "recipe"), [(DENSE, "Q4_0_M"), (DENSE, "F16"), (PLAIN, "Q8_0")])
def test_kernels_equal_the_reference(
    reranker: Reranker, ingested: Ingested, tmp_path: Path, layers: int, recipe: str, ranks: int
) -> None:
    path = reranker(layers, recipe)
    scores = [ExactSequence(ExactModel(path)).score(pair(n)) for n in LENGTHS]
    expected = [round(float(score) * 2.0**POOL_SCALE) for score in scores]
    with StepRunner(ingested(path), tmp_path, ranks=ranks, max_rows=4, max_tokens=100, step_tokens=256) as runner:
        for row, n in enumerate(LENGTHS):
            runner.write_row(row, pair(n))
        together = runner.pool([(row, 0, n, 0, 1) for row, n in enumerate(LENGTHS)])
        assert together[:, 0].tolist() == expected, "in one step"
        assert not together[:, 1:].any()
        for row, n in enumerate(LENGTHS):
            assert runner.pool([(row, 0, n, 0, 1)])[0, 0] == expected[row], "alone"


@pytest.mark.slow
@pytest.mark.skipif(not is_installed(), reason="llama.cpp is not installed; `make peers` does that")
@pytest.mark.parametrize("layers", [DENSE, PLAIN])
def test_scores_agree_with_llama_cpp(reranker: Reranker, ingested: Ingested, layers: int) -> None:
    """Of texts: both make the same prompt of a pair."""
    path = reranker(layers, "F16")
    query, documents = "the quick fox", ["the warm sun of the afternoon", "the quick fox", "one two three"]
    model = build_model(ModelSource(ingested(path)))
    described, encode = model.described, model.vocabulary.encode
    found = []
    for document in documents:
        first = encode(query, parse_special=False, add_bos=True)
        tokens = [*first, *described.pair_separator, *encode(document, parse_special=False), described.end_id]
        found.append(float(ExactSequence(ExactModel(path)).score(tokens)))
    assert found == pytest.approx(peer_scores(path, query, documents).tolist(), abs=3e-3)


def test_ingest_stores_the_head(reranker: Reranker, tiny_gguf: TinyGguf, ingested: Ingested) -> None:
    dense, plain = ["cls.weight", "cls.bias"], ["cls.output.weight", "cls.output.bias"]
    for path, names in (
        (reranker(DENSE, "Q4_0"), dense + plain),
        (reranker(PLAIN, "Q4_0"), plain),
        (tiny_gguf("bert", "Q4_0"), []),
    ):
        index = load_index(ingested(path))
        assert [tensor.name for tensor in index.tensors if tensor.name.startswith("cls.")] == names
        assert (index.pooling, index.hyper.scores_pairs) == (("rank", True) if names else ("mean", False))
        described = build_model(ModelSource(ingested(path))).described
        separator = WORDPIECE_SPECIALS.index("[SEP]")
        assert (described.pooling, described.end_id) == (index.pooling, separator)
        assert described.pair_separator == ((separator,) if names else ())


def test_pairs_of_a_roberta_have_two_ends_between_them(tmp_path: Path, ingested: Ingested) -> None:
    spec = unigram_spec()
    shape = SHAPES["reranker"]._replace(vocab_size=len(spec.tokens))
    path = write_model(tmp_path / "xlm-r.gguf", shape, "Q4_0", add_vocabulary=partial(add_vocabulary, spec=spec))
    described = build_model(ModelSource(ingested(path))).described
    assert (described.pair_separator, described.end_id) == ((spec.eos, spec.eos), spec.eos)


def test_a_head_of_several_classes_is_refused(tmp_path: Path) -> None:
    path = write_model(tmp_path / "classes.gguf", SHAPES["reranker"]._replace(score_classes=3), "Q4_0")
    with pytest.raises(ConfigError, match=r"'cls.output.weight' has shape \[3, 128\], expected \[128\]"):
        check_source(path)
