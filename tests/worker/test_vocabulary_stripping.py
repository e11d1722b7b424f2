"""Which special tokens take white space: by the name of a GGUF file, by the files of a Hugging Face directory."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from pipeline.errors import ConfigError
from shm.checkpoint import STRIPPING_REVISION, VERSION, VOCABULARY_REVISION, Hyper, Index, TokenizerData
from stages.tokenizer.opened_models import spec_of
from stages.tokenizer.vocabulary import TokenizerSpec, Vocabulary
from stages.worker.checkpoint.prepare_source import _digest
from stages.worker.checkpoint.vocabulary import read_vocabulary as read_tokenizer
from stages.worker.huggingface.config import CheckpointDirectoryError, Config
from stages.worker.huggingface.vocabulary import read_vocabulary
from starling.vocabulary_check import check_vocabulary
from tests.tokenizer.trained import byte_level_spec, sentencepiece_spec
from tests.worker.test_huggingface_vocabulary import sentencepiece_file, sentencepiece_vocabulary, tokenizer_json

NAMES = {3: "<|user|>", 4: "<|end|>", 5: "<mask>"}  # behind the vocabulary's own three


def source(spec: TokenizerSpec, name: str | None, path: str = "m.gguf") -> Any:
    """What is read of a GGUF file."""
    keys: dict[str, Any] = {"model": spec.model, "pre": spec.pre, "tokens": list(spec.tokens)}
    keys |= {"token_type": np.array(spec.types, np.int32), "merges": list(spec.merges)}
    keys |= {"scores": np.array(spec.scores, np.float32)} if len(spec.scores) else {}
    metadata = {f"tokenizer.ggml.{key}": value for key, value in keys.items()}
    if name is not None:
        metadata["general.name"] = name
    rows = SimpleNamespace(shape=(len(spec.tokens), 8))
    return SimpleNamespace(path=Path(path), metadata=metadata, tensors={"token_embd.weight": rows})


def renamed(spec: TokenizerSpec, **names: str) -> TokenizerSpec:
    return spec._replace(tokens=[names.get(token, token) for token in spec.tokens])


def texts_of(spec: TokenizerSpec, ids: tuple[int, ...]) -> list[str]:
    return [spec.tokens[i] for i in ids]


@pytest.mark.parametrize("name", ["Phi-3 Mini 4k", "my PHI3.5"])
def test_phi_3_strips_right_as_llama_cpp(name: str) -> None:
    spec = renamed(sentencepiece_spec(), **{"<|im_end|>": "<|endoftext|>"})
    data = read_tokenizer(source(spec, name))
    assert texts_of(spec, data.strips_right) == ["</s>", "<|im_start|>", "<tool>", "[INST]"]
    assert (data.strips_left, data.strips_unicode, data.revision) == ((), None, STRIPPING_REVISION)
    ours, plain = Vocabulary(spec_of(data)), Vocabulary(spec)
    start = spec.tokens.index("<|im_start|>")
    assert ours.encode("<|im_start|>\n the", True) == [start, *plain.encode("the", False)]
    assert plain.encode("<|im_start|>\n the", True) != ours.encode("<|im_start|>\n the", True)


@pytest.mark.parametrize(
    ("name", "pre", "mask", "left"),
    [
        ("m", "jina-v2-code", "<mask>", ["<mask>"]),
        ("phi-3", "jina-v2-es", "<mask>", ["<mask>"]),
        ("Modern-BERT", "gpt-2", "[MASK]", ["[MASK]"]),
        ("Modern-BERT", "gpt-2", "<mask>", []),
        ("m", "gpt-2", "<mask>", []),
    ],
)
def test_mask_tokens_strip_left_as_in_llama_cpp(name: str, pre: str, mask: str, left: list[str]) -> None:
    spec = renamed(byte_level_spec(pre), **{"<|im_end|>": mask})
    data = read_tokenizer(source(spec, name))
    assert (data.strips_right, texts_of(spec, data.strips_left)) == ((), left)


def index_of(data: TokenizerData, name: str) -> Index:
    hyper = Hyper(2, 64, 2, 2, 32, 64, 128, 4096, 1e-5, 32, "halves", "silu")
    return Index(VERSION, "ab" * 32, "phi3", name, 1, 68, 0, hyper, msgspec.Raw(data.packed()), [])


@pytest.mark.parametrize("spec", [sentencepiece_spec(), byte_level_spec()], ids=["llama", "gpt2"])
def test_only_indexes_of_such_names_are_made_again(spec: TokenizerSpec) -> None:
    other = read_tokenizer(source(spec, "Llama"))
    assert len(msgspec.msgpack.decode(other.packed())) == 15 and other.revision == VOCABULARY_REVISION
    assert index_of(other, "Llama").has_current_vocabulary
    assert not index_of(other, "Phi-3 Mini").has_current_vocabulary  # of an older release
    for name, path in (("Phi-3 Mini", "m.gguf"), (None, "Phi-3-mini.gguf")):
        data = read_tokenizer(source(spec, name, path))
        assert bool(data.strips_right) == (name is not None)
        assert index_of(data, name or "Phi-3-mini").has_current_vocabulary
    described = {"revision": 1, "files": {}, "quant": "", "pre": other.pre}  # as older releases have it
    assert _digest({}, "", other, 1) == hashlib.sha256(msgspec.json.encode(described)).hexdigest()
    assert _digest({}, "", data, 1) != _digest({}, "", other, 1)


def phi_json(prefix: bool = True, **flags: Any) -> dict[str, Any]:
    """A SentencePiece vocabulary with tokens that take white space."""
    file = tokenizer_json(prefix)
    base = {"special": True, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    n = len(file["model"]["vocab"])
    own = {"<|user|>": {"rstrip": True}, "<|end|>": {"rstrip": True, "lstrip": True}, "<mask>": {"lstrip": True}}
    for i, (name, stated) in enumerate(own.items()):
        file["model"]["vocab"][name] = n + i
        file["added_tokens"].append({"id": n + i, "content": name, **base, **stated, **flags})
    return file


def read_json(directory: Path, file: dict[str, Any]) -> TokenizerData:
    (directory / "tokenizer.json").write_text(json.dumps(file))
    rows = len(file["model"]["vocab"])
    keys = read_vocabulary(directory, Config(directory / "config.json", {}), rows)
    tensors = {"token_embd.weight": SimpleNamespace(shape=(rows, 8))}
    made: Any = SimpleNamespace(path=directory, metadata=keys | {"general.name": "phi-3"}, tensors=tensors)
    return read_tokenizer(made)


@pytest.fixture(scope="module", params=[True, False])
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Vocabulary]:
    directory = tmp_path_factory.mktemp("phi")
    data = read_json(directory, phi_json(request.param))
    assert data.strips_unicode and data.revision == STRIPPING_REVISION
    check_vocabulary(data, directory)
    return Tokenizer.from_file(str(directory / "tokenizer.json")), Vocabulary(spec_of(data))


@settings(deadline=None)
@given(
    text=st.lists(
        st.sampled_from([*NAMES.values(), "<s>", "</s>", " ", "\n", "\u3000", "\x1c", "the ", "he", "你"]), max_size=20
    ).map("".join)
)
@example("<|user|>\nthe<|end|>\n<|user|>")
def test_ids_are_the_librarys_with_special_tokens(both: tuple[Tokenizer, Vocabulary], text: str) -> None:
    theirs, ours = both
    assert ours.encode(text, True) == theirs.encode(text, add_special_tokens=False).ids


def test_the_check_compares_special_tokens(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    data = read_json(tmp_path, phi_json())
    check_vocabulary(data, tmp_path)
    assert not caplog.records
    for field in ("strips_right", "strips_left"):
        with pytest.raises(ConfigError, match=r"special token '<.*' is not found as the file says: 'word<.* has the"):
            check_vocabulary(msgspec.structs.replace(data, **{field: ()}), tmp_path)
    # Models that have been served so far have normalized names.
    check_vocabulary(read_json(tmp_path, phi_json(normalized=True)), tmp_path)
    assert {record.message for record in caplog.records} == {"a special token has other ids"}


def test_a_directorys_name_implies_nothing(tmp_path: Path) -> None:
    data = read_json(tmp_path, tokenizer_json(True))
    assert (data.strips_right, data.strips_left, data.strips_unicode) == ((), (), None)
    assert index_of(data, "phi-3").has_current_vocabulary


def test_a_token_of_single_words_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointDirectoryError, match=r"'<\|user\|>' has single_word, expected false"):
        read_json(tmp_path, phi_json(single_word=True))


def test_flags_come_with_a_sentencepiece_file(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(sentencepiece_file())
    n = len(sentencepiece_vocabulary()[0])
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<|user|>": n, "<tool>": n + 1}))
    decoder = {
        "2": {"content": "</s>", "special": True, "rstrip": True},
        "5": {"content": "a normal token", "special": False, "rstrip": True},
        str(n): {"content": "<|user|>", "special": True, "rstrip": True},
        str(n + 1): {"content": "<tool>", "special": False, "lstrip": True},
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": decoder}))
    keys = read_vocabulary(tmp_path, Config(tmp_path / "config.json", {}), n + 2)
    assert keys["starling.tokenizer.strips_right"] == (2, n) and keys["starling.tokenizer.strips_left"] == (n + 1,)
