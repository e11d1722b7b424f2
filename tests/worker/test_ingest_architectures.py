"""Files of every architecture become checkpoints; files that differ from its row in the table are refused by name."""

from __future__ import annotations

import hashlib
import struct
from pathlib import Path

import gguf
import msgspec
import numpy as np
import pytest

from pipeline.errors import ConfigError, ModelUnavailable
from shm.checkpoint import Checkpoint
from stages.tokenizer.opened_models import ModelSource, build_model
from stages.tokenizer.vocabulary import Vocabulary
from stages.worker.checkpoint.gguf import GgufError, GgufFile
from stages.worker.checkpoint.hyperparameters import MAX_GROUP, HyperReader
from stages.worker.checkpoint.ingest import ingest
from stages.worker.checkpoint.layout import unpack
from stages.worker.checkpoint.one_pass import revision_of
from stages.worker.kernels import buffer_sizes
from stages.worker.kernels.formats import FORMATS
from stages.worker.model import Model
from tests.tokenizer.trained import unigram_spec
from tests.worker.conftest import Ingested, TinyGguf
from tools.tiny_adapter import write_adapter
from tools.tiny_gguf import SHAPES, SPECIALS, Shape, add_byte_level_vocabulary, write_model
from tools.vocabulary_gguf import add_vocabulary


def digest_of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def values(model: Checkpoint, name: str) -> np.ndarray:
    entry, found = model.index.tensor(name), model.view(name)
    return unpack(found, FORMATS[entry.format], entry.rows, entry.columns) if entry.layout == "groups" else found


@pytest.mark.parametrize("shape", ["phi3", "gpt2"])
def test_fused_tensors_are_taken_apart(tiny_gguf: TinyGguf, ingested: Ingested, shape: str) -> None:
    path, s = tiny_gguf(shape, "Q4_K_M"), SHAPES[shape]
    model = Checkpoint(ingested(path))
    tensors = {t.name: gguf.dequantize(t.data, t.tensor_type) for t in gguf.GGUFReader(path).tensors}
    parts = {"attn_qkv": ("attn_q", "attn_k", "attn_v")} | (
        {"ffn_up": ("ffn_gate", "ffn_up")} if shape == "phi3" else {}
    )
    for layer in range(s.n_layers):
        for fused, names in parts.items():
            for kind in ("weight", "bias") if shape == "gpt2" else ("weight",):
                whole = [values(model, f"blk.{layer}.{name}.{kind}") for name in names]
                joined = np.concatenate(whole, axis=0 if kind == "weight" else 1)
                assert np.array_equal(joined.squeeze(), tensors[f"blk.{layer}.{fused}.{kind}"].squeeze())
    assert model.index.parameters == sum(t.size for t in tensors.values())


def test_switches_come_from_the_table_and_the_file(tiny_gguf: TinyGguf, ingested: Ingested) -> None:
    def hyper(shape: str):  # type: ignore[no-untyped-def]
        return Checkpoint(ingested(tiny_gguf(shape, "Q8_0"))).index.hyper

    h = hyper("gemma2")
    assert (h.windows, h.has_local_rope, h.attention_cap, h.logit_cap, h.activation) == ((24, 0), False, 2, 8, "gelu")
    assert h.embedding_scale == float(np.sqrt(np.float32(128)))
    h = hyper("gemma3")
    assert (h.windows, h.has_local_rope, h.attention_cap) == ((300,) * 5 + (0,), True, 0)
    h = hyper("granite")
    assert (h.attention_scale, h.logit_scale, h.embedding_scale) == (0.125, 0.5, 12)
    assert h.residual_scale == float(np.float32(0.22))
    h = hyper("gpt2")
    assert (h.norm, h.n_rot, h.rope_pairing, h.windows) == ("layer", 0, "", ())
    assert (hyper("windowed").windows, hyper("small").windows) == ((300, 300), ())


def with_window(architecture: str, context: int = 2048) -> Shape:
    return SHAPES["small"]._replace(architecture=architecture, window=100, context_length=context)


def test_a_window_that_the_graph_does_not_have_is_refused(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf", with_window("qwen2"), "Q8_0")
    with pytest.raises(ConfigError, match="qwen2.attention.sliding_window is 100, expected 0 or at least the context"):
        ingest(path, tmp_path / "m.idx", digest_of(path))
    write_model(path, with_window("qwen2", context=100), "Q8_0")
    assert ingest(path, tmp_path / "m.idx", digest_of(path)).hyper.windows == ()


def test_too_many_heads_of_a_kv_head_are_refused(tmp_path: Path) -> None:
    assert buffer_sizes.MAX_GROUP_ROWS == MAX_GROUP
    shape = SHAPES["small"]._replace(n_heads=2 * (MAX_GROUP + 1), n_kv_heads=2)
    path = write_model(tmp_path / "m.gguf", shape, "Q8_0")
    with pytest.raises(
        ConfigError, match="head_count_kv is 2, so that 25 query heads share a KV head, expected at most 24"
    ):
        ingest(path, tmp_path / "m.idx", digest_of(path))


@pytest.mark.parametrize("group", [MAX_GROUP + 1, buffer_sizes.BLOCK_ROWS, buffer_sizes.BLOCK_ROWS + 1])
def test_too_many_heads_of_a_stored_index_are_refused(tiny_gguf: TinyGguf, ingested: Ingested, group: int) -> None:
    checkpoint = Checkpoint(ingested(tiny_gguf("small", "Q8_0")))
    hyper = checkpoint.index.hyper
    changed = msgspec.structs.replace(hyper, n_heads=group * hyper.n_kv_heads)
    checkpoint.index = msgspec.structs.replace(checkpoint.index, hyper=changed)
    with pytest.raises(ModelUnavailable, match=f"{group} query heads share a KV head; the kernels support at most 24"):
        Model(checkpoint)


CHANGES = {
    "a missing norm": (
        "qwen3",
        b"blk.1.attn_q_norm",
        b"blk.1.attn_x_norm",
        "'blk.1.attn_q_norm.weight' is missing, ex",
    ),
    "a missing bias": (
        "gpt2",
        b"blk.0.ffn_up.bias",
        b"blk.0.ffn_xx.bias",
        "'blk.0.ffn_up.bias' is missing, expected [256]",
    ),
    "a bias in one layer only": (
        "biased",
        b"blk.1.attn_q.bias",
        b"blk.1.attn_x.bias",
        "'blk.1.attn_q.bias' is missing",
    ),
    "another graph": ("gemma3", b"gemma3", b"gemma2", "'blk.0.attn_k_norm.weight' is not part of this architecture"),
    "a graph with norms": (
        "qwen2-as-qwen3",
        b"qwen2",
        b"qwen3",
        "'blk.0.attn_q_norm.weight' is missing, expected [32]",
    ),
    "another RoPE": (
        "yarn",
        b"\x04\0\0\0\0\0\0\0yarn",
        b"\x04\0\0\0\0\0\0\0tarn",
        "rope.scaling.type is 'tarn'; supported: ",
    ),
    "layer norm": (
        "stablelm",
        b"layer_norm_epsilon",
        b"layer_norm_epsilox",
        "attention.layer_norm_epsilon' is missing",
    ),
}


@pytest.mark.parametrize("what", CHANGES)
def test_what_differs_is_named(what: str, tiny_gguf: TinyGguf, tmp_path: Path) -> None:
    shape, old, new, message = CHANGES[what]
    path = tmp_path / "bad.gguf"
    raw = tiny_gguf("biased" if shape == "qwen2-as-qwen3" else shape, "Q8_0").read_bytes()
    assert old in raw
    path.write_bytes(raw.replace(old, new))
    with pytest.raises(ConfigError) as caught:
        ingest(path, tmp_path / "bad.idx", digest_of(path))
    assert message in str(caught.value)
    assert [p.name for p in tmp_path.iterdir()] == ["bad.gguf"]


def with_key(raw: bytes, key: str, kind: int, value: bytes) -> bytes:
    """A file with one more metadata key. Tensors may move, so it is only good for being refused by its metadata."""
    (n_keys,) = struct.unpack_from("<Q", raw, 16)
    entry = struct.pack("<Q", len(key)) + key.encode() + struct.pack("<I", kind) + value
    return raw[:16] + struct.pack("<Q", n_keys + 1) + entry + raw[24:] + bytes(256)


def test_a_part_of_a_model_is_refused(tiny_gguf: TinyGguf, tmp_path: Path) -> None:
    path = tmp_path / "m-00001-of-00003.gguf"
    path.write_bytes(with_key(tiny_gguf("small", "Q8_0").read_bytes(), "split.count", 2, struct.pack("<H", 3)))
    with pytest.raises(ConfigError, match="split.count is 3: .* join them with llama-gguf-split --merge"):
        ingest(path, tmp_path / "m.idx", digest_of(path))


def test_an_adapter_is_no_model(tiny_gguf: TinyGguf, tmp_path: Path) -> None:
    path = write_adapter(tmp_path / "adapter.gguf", tiny_gguf("small", "Q8_0"))
    with pytest.raises(ConfigError, match=r"general.type is 'adapter', expected a model; name the file in models\[\]"):
        ingest(path, tmp_path / "m.idx", digest_of(path))


def test_granite_without_rope_is_refused(tiny_gguf: TinyGguf, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(with_key(tiny_gguf("granite", "Q8_0").read_bytes(), "granite.rope.scaling.finetuned", 7, b"\0"))
    with pytest.raises(ConfigError, match="granite.rope.scaling.finetuned is False, expected true"):
        ingest(path, tmp_path / "m.idx", digest_of(path))


# The keys of a file's scaling, its scale as llama.cpp reads it, and the revision of its conversion.
SCALINGS: list[tuple[dict[str, object], float, int]] = [
    ({"scaling.type": "linear", "scaling.factor": 4.0}, 4.0, 1),
    ({"scaling.factor": 4.0}, 4.0, 2),
    ({"scaling.factor": 0.0}, 1.0, 2),
    ({"scale_linear": 2.0}, 2.0, 1),
    ({"scaling.factor": 4.0, "scale_linear": 2.0}, 4.0, 2),
    ({"scaling.type": "linear", "scale_linear": 2.0}, 2.0, 2),
    ({"scaling.type": "none", "scale_linear": 2.0}, 1.0, 2),
    ({"scaling.type": "none", "scaling.factor": 4.0}, 1.0, 1),
    ({"scaling.type": "yarn", "scaling.factor": 4.0}, 4.0, 1),
    ({"scaling.type": "yarn", "scale_linear": 2.0}, 2.0, 2),
    ({}, 1.0, 1),
]


@pytest.mark.parametrize(("keys", "scale", "revision"), SCALINGS)
def test_rope_is_scaled_as_in_llama_cpp(
    tiny_gguf: TinyGguf, keys: dict[str, object], scale: float, revision: int
) -> None:
    file = GgufFile(tiny_gguf("small", "Q8_0"))
    file.metadata |= {f"llama.rope.{name}": value for name, value in keys.items()}
    assert (HyperReader(file).hyper().rope_scale, revision_of(file)) == (scale, revision)


# The keys of a file's scaling, its magnitude as llama.cpp applies it, and the revision of its K.
MAGNITUDES: list[tuple[str, dict[str, object], float, int]] = [
    ("small", {}, 1.0, 0),
    ("small", {"attn_factor": 1.0}, 1.0, 0),
    ("small", {"attn_factor": 1.5}, 1.5, 1),
    ("small", {"attn_factor": 1.5, "type": "none"}, 1.5, 1),
    ("small", {"attn_factor": 1.5, "type": "linear", "factor": 4.0}, 1.5, 1),
    ("small", {"attn_factor": 1.5, "type": "longrope"}, 1.5, 0),
    ("phi3-long", {"attn_factor": 1.5}, 1.5, 0),
    ("gemma3", {"attn_factor": 1.5}, 1.5, 1),
    ("gemma3", {"attn_factor": 1.5, "type": "longrope"}, 1.5, 1),
    ("gpt2", {"attn_factor": 1.5}, 1.0, 0),
]


@pytest.mark.parametrize(("shape", "keys", "magnitude", "revision"), MAGNITUDES)
def test_an_attention_factor_counts_with_every_scaling(
    tiny_gguf: TinyGguf, shape: str, keys: dict[str, object], magnitude: float, revision: int
) -> None:
    file = GgufFile(tiny_gguf(shape, "Q8_0"))
    arch = file.metadata["general.architecture"]
    for name in ("attn_factor", "type"):
        file.metadata.pop(f"{arch}.rope.scaling.{name}", None)
    file.metadata |= {f"{arch}.rope.scaling.{name}": value for name, value in keys.items()}
    reader = HyperReader(file)
    h = reader.hyper()
    tables = reader.rope(h)
    assert {name for name in tables if name.endswith("cos_hi")} == (
        set() if shape == "gpt2" else {"rope.cos_hi", *(["rope.local.cos_hi"] if shape == "gemma3" else [])}
    )
    for name, table in tables.items():
        if name.endswith("cos_hi"):
            assert (table[0] == np.float32(magnitude)).all(), name
    assert h.kv_revision == revision
    assert (revision_of(file) == 3) == bool(revision)


def test_an_attention_factor_out_of_bounds_is_refused(tiny_gguf: TinyGguf) -> None:
    file = GgufFile(tiny_gguf("linear", "Q8_0"))
    file.metadata["llama.rope.scaling.attn_factor"] = 0.0
    with pytest.raises(GgufError, match="llama.rope.scaling.attn_factor is 0.0, expected 0.001 to 1000"):
        HyperReader(file).rope(HyperReader(file).hyper())


def test_a_factor_without_a_type_gives_the_tables_of_linear_scaling(tiny_gguf: TinyGguf, tmp_path: Path) -> None:
    typed, untyped = tiny_gguf("linear", "Q8_0"), tmp_path / "untyped.gguf"
    untyped.write_bytes(typed.read_bytes().replace(b"llama.rope.scaling.type", b"llama.rope.scaling.kind"))
    tables = []
    for path in (typed, untyped):
        ingest(path, index_path := tmp_path / f"{digest_of(path)}.idx", digest_of(path))
        model = Checkpoint(index_path)
        tables.append({t.name: model.view(t.name).tobytes() for t in model.index.tensors if t.name.startswith("rope.")})
    assert len(tables[0]) == 4
    assert tables[0] == tables[1]


def test_a_fused_tensor_of_another_size_is_refused(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf", SHAPES["phi3"], "Q8_0")
    raw = path.read_bytes()
    name = b"blk.1.attn_qkv.weight"
    at = raw.index(name) + len(name) + 4 + 8  # behind the number of dimensions and the columns
    path.write_bytes(raw[:at] + (256).to_bytes(8, "little") + raw[at + 8 :])
    with pytest.raises(ConfigError, match=r"'blk.1.attn_qkv.weight' has shape \[256, 96\], expected \[288, 96\]"):
        ingest(path, tmp_path / "m.idx", digest_of(path))


@pytest.mark.parametrize(
    ("kind", "pooling"), [("NONE", ""), ("MEAN", "mean"), ("CLS", "cls"), ("LAST", "last"), ("RANK", "")]
)
def test_how_to_pool_is_in_the_index_and_the_description(tmp_path: Path, kind: str, pooling: str) -> None:
    ends_texts = kind == "LAST"

    def add_keys(writer: gguf.GGUFWriter) -> None:
        add_byte_level_vocabulary(writer, 300, 0)
        writer.add_pooling_type(gguf.PoolingType[kind])
        writer.add_add_eos_token(ends_texts)

    path = write_model(tmp_path / "m.gguf", SHAPES["small"], add_vocabulary=add_keys)
    index = ingest(path, tmp_path / f"{digest_of(path)}.idx", digest_of(path))
    assert (index.pooling, index.adds_eos) == (pooling, ends_texts)
    described = build_model(ModelSource(tmp_path / f"{digest_of(path)}.idx")).described
    eos = SPECIALS.index("<|im_end|>") if ends_texts else -1
    assert (described.pooling, described.width, described.end_id) == (pooling, SHAPES["small"].width, eos)


@pytest.mark.parametrize("says", [None, False])
def test_a_unigram_vocabulary_comes_with_its_table_and_ends_texts(tmp_path: Path, says: bool | None) -> None:
    spec = unigram_spec(True, True)

    def add_keys(writer: gguf.GGUFWriter) -> None:
        add_vocabulary(writer, spec)
        if says is not None:
            writer.add_add_eos_token(says)

    shape = SHAPES["bert"]._replace(vocab_size=len(spec.tokens))
    path = write_model(tmp_path / "m.gguf", shape, add_vocabulary=add_keys)
    index = ingest(path, tmp_path / f"{digest_of(path)}.idx", digest_of(path))
    assert (index.tokenizer.charsmap, index.tokenizer.merges_spaces) == (spec.charsmap, True)
    assert index.adds_eos == (says is None) and index.has_current_vocabulary
    model = build_model(ModelSource(tmp_path / f"{digest_of(path)}.idx"))
    assert model.described.end_id == (spec.eos if says is None else -1)
    assert model.vocabulary.encode("ﬁn  Ａ", False) == Vocabulary(spec).encode("fin A", False)
