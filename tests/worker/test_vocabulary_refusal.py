"""A vocabulary that cannot be served is refused before the file is hashed, and nothing is written."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import gguf
import pytest

from pipeline.config.schema import ModelConfig
from pipeline.errors import ConfigError
from pipeline.models import store
from shm.checkpoint import load_index
from stages.tokenizer.opened_models import ModelSource, UnusableModel, build_model
from stages.worker.checkpoint.prepare import prepare_checkpoint
from tests.tokenizer.trained import byte_level_spec, sentencepiece_spec, unigram_spec
from tools.tiny_gguf import SHAPES, write_model
from tools.vocabulary_gguf import add_vocabulary

BYTE_LEVEL, SENTENCEPIECE = byte_level_spec(), sentencepiece_spec()


def without_merges(writer: gguf.GGUFWriter) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(["a", "b"])


def model(home: Path, vocabulary: Callable[[gguf.GGUFWriter], None], **settings: str) -> ModelConfig:
    shape = SHAPES["small"]._replace(vocab_size=1500)
    path = write_model(home / "m.gguf", shape, add_vocabulary=vocabulary)
    return ModelConfig(name="m", path=str(path), **settings)


@pytest.mark.parametrize(
    ("vocabulary", "message"),
    [
        (
            partial(add_vocabulary, spec=BYTE_LEVEL._replace(pre="mine")),
            r"tokenizer.ggml.pre is 'mine'; supported: .*qwen2, .*name it in models\[\].pretokenizer",
        ),
        (
            partial(add_vocabulary, spec=BYTE_LEVEL._replace(model="rwkv")),
            r"tokenizer.ggml.model is 'rwkv'; supported: 'gpt2' \(byte-level BPE\), 'llama' \(SentencePiece BPE\)",
        ),
        (partial(add_vocabulary, spec=SENTENCEPIECE._replace(scores=[])), "tokenizer.ggml.scores has 0 entries for"),
        (
            partial(add_vocabulary, spec=unigram_spec()._replace(charsmap=b"\x04\0\0\0abcd")),
            "tokenizer.ggml.precompiled_charsmap cannot be used: its trie has 4 bytes",
        ),
        (without_merges, "tokenizer.ggml.merges is missing"),
    ],
)
def test_refused_before_the_file_is_hashed(
    vocabulary: Callable[[gguf.GGUFWriter], None], message: str, tmp_path: Path
) -> None:
    models = tmp_path / "models"
    configured = model(tmp_path, vocabulary)
    with pytest.raises(ConfigError, match=message) as caught:
        prepare_checkpoint(configured, models)
    assert "m.gguf: tokenizer.ggml." in caught.value.message
    assert store.find(configured, models) is None  # its digest is not known
    assert not list(tmp_path.rglob("*.idx")) and not list(tmp_path.rglob("*.bin"))


def test_a_token_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    """As U+FFFD it would be the token of that character, which llama.cpp does not take it for."""
    spec = SENTENCEPIECE._replace(
        tokens=[*SENTENCEPIECE.tokens, "QQQQ"],
        types=[*SENTENCEPIECE.types, 4],
        scores=[*SENTENCEPIECE.scores, -1.0],
    )
    configured = model(tmp_path, partial(add_vocabulary, spec=spec))
    path = Path(configured.path)
    raw = path.read_bytes()
    assert raw.count(b"QQQQ") == 1
    path.write_bytes(raw.replace(b"QQQQ", b"\xff\xfeQQ"))
    message = r"m.gguf: metadata key 'tokenizer.ggml.tokens': text b'\\xff\\xfeQQ' is not UTF-8, as all tokens are"
    with pytest.raises(ConfigError, match=message):
        prepare_checkpoint(configured, tmp_path / "models")


def test_the_configuration_names_the_pretokenizer_of_an_unknown_one(tmp_path: Path) -> None:
    spec = BYTE_LEVEL._replace(pre="mine")
    configured = model(tmp_path, partial(add_vocabulary, spec=spec), pretokenizer="qwen2")
    index_path = prepare_checkpoint(configured, tmp_path / "models")
    assert load_index(index_path).tokenizer.pre == "mine"  # the file's: another model may choose otherwise
    text = "12 Éa 345's"
    assert build_model(ModelSource.of(index_path, configured)).vocabulary.decode(
        build_model(ModelSource.of(index_path, configured)).vocabulary.encode(text, False)
    ) == (text)
    with pytest.raises(UnusableModel, match="tokenizer.ggml.pre is 'mine'"):
        build_model(ModelSource(index_path))


def test_a_sentencepiece_vocabulary_is_kept_in_the_index(tmp_path: Path) -> None:
    spec = SENTENCEPIECE._replace(add_bos=None, add_space_prefix=None)
    index_path = prepare_checkpoint(model(tmp_path, partial(add_vocabulary, spec=spec)), tmp_path / "models")
    found = load_index(index_path).tokenizer
    assert (found.tokens, found.scores, found.types) == (spec.tokens, spec.scores, spec.types)
    assert (found.bos, found.eos, found.unknown) == (1, 2, 0)
    vocabulary = build_model(ModelSource(index_path)).vocabulary
    assert vocabulary.add_bos  # SentencePiece's default
    assert vocabulary.encode("the a", False) == vocabulary.encode("the a", False, add_bos=True)[1:]
    assert vocabulary.token_bytes(vocabulary.encode("the", False)[0]).startswith(b" ")
