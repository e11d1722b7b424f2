"""Adapters as files: GGUF and PEFT give the same adapter, and what cannot be used is refused by name."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import msgspec
import numpy as np
import pytest

from pipeline.errors import ConfigError
from shm.checkpoint import Index, load_index
from shm.step_ring import adapter_tag
from stages.worker.adapters.memory import AdapterMemory
from stages.worker.adapters.prepared import Prepared, open_prepared, prepare_adapter
from stages.worker.checkpoint.layout import matrix_bytes, unpack
from stages.worker.kernels import adapter_table as t
from stages.worker.kernels.formats import BY_ID, F32
from tests.worker.conftest import Ingested, TinyGguf
from tools.reference.adapter import Adapter
from tools.reference.source import Source
from tools.tiny_adapter import write_adapter, write_peft

ROOT = Path(__file__).parents[2]
MAX_RANK, MAX_BYTES = 64, 1 << 30


def prepare(source: Path, base: Index, folder: Path) -> Prepared:
    return prepare_adapter(source, base, folder / "adapters", MAX_RANK, MAX_BYTES)


@pytest.mark.parametrize(
    "shape",
    [
        "small",
        "biased",
        "qwen3",
        "gemma",
        "gemma2",
        "gemma3",
        "phi3",
        "granite",
        "olmo2",
        "stablelm",
        "starcoder2",
        "gpt2",
    ],
)
@pytest.mark.parametrize("dtype", ["F32", "BF16"])
def test_both_kinds_of_files_give_one_adapter(
    tiny_gguf: TinyGguf, ingested: Ingested, tmp_path: Path, shape: str, dtype: str
) -> None:
    model = tiny_gguf(shape, "Q8_0")
    base = load_index(ingested(model))
    one = prepare(write_adapter(tmp_path / "a.gguf", model, rank=5, dtype=dtype), base, tmp_path)
    other = prepare(write_peft(tmp_path / "peft", model, rank=5, dtype=dtype), base, tmp_path)
    assert one.digest == other.digest
    assert {(pair.layer, t.TARGETS[pair.target]) for pair in one.header.pairs} == {
        (layer, name)
        for layer in range(base.hyper.n_layers)
        for name in t.TARGETS
        if base.has(f"blk.{layer}.{name}.weight")
    }


@pytest.mark.parametrize("shape", ["grouped", "phi3", "mixtral"])
def test_no_value_changes(tiny_gguf: TinyGguf, ingested: Ingested, tmp_path: Path, shape: str) -> None:
    model = tiny_gguf(shape, "Q8_0")
    source = write_adapter(tmp_path / "a.gguf", model, rank=9, dtype="F16", alpha=12.0)
    prepared = prepare(source, load_index(ingested(model)), tmp_path)
    expected = Adapter(source, Source(model)).added
    assert len(prepared.header.pairs) == len(expected)
    for pair in prepared.header.pairs:
        added = expected[f"blk.{pair.layer}.{t.TARGETS[pair.target]}.weight"]
        for values, kind, offset in (
            (added.a, pair.a_format, pair.a_offset),
            (added.b, pair.b_format, pair.b_offset),
        ):
            rows, columns = values.shape
            raw = prepared.data[offset : offset + matrix_bytes(BY_ID[kind], rows, columns)]
            assert np.array_equal(unpack(raw, BY_ID[kind], rows, columns), values)
        assert np.float32(pair.scale) == added.scale


def test_a_prepared_adapter_is_found_by_its_digest(tiny_gguf: TinyGguf, ingested: Ingested, tmp_path: Path) -> None:
    model = tiny_gguf()
    prepared = prepare(write_adapter(tmp_path / "a.gguf", model), load_index(ingested(model)), tmp_path)
    folder = tmp_path / "adapters"
    found = open_prepared(folder, prepared.digest)
    assert found is not None
    assert found.header == prepared.header
    assert open_prepared(folder, "ab" * 32) is None
    path = folder / f"{prepared.digest}.lora"
    raw = bytearray(path.read_bytes())
    raw[-5] ^= 1
    path.write_bytes(raw)
    assert open_prepared(folder, prepared.digest) is None, "it is damaged"


def test_the_scale(tiny_gguf: TinyGguf, ingested: Ingested, tmp_path: Path) -> None:
    model = tiny_gguf()
    base = load_index(ingested(model))

    def scales(source: Path) -> set[float]:
        return {pair.scale for pair in prepare(source, base, tmp_path).header.pairs}

    assert scales(write_adapter(tmp_path / "a.gguf", model, rank=4, alpha=6.0)) == {1.5}
    assert scales(write_adapter(tmp_path / "b.gguf", model, rank=4, alpha=0.0)) == {1.0}
    assert scales(write_peft(tmp_path / "c", model, rank=4, alpha=6.0)) == {1.5}
    assert scales(write_peft(tmp_path / "d", model, rank=4, alpha=6.0, use_rslora=True)) == {3.0}


def test_memory_holds_each_adapter_once(tiny_gguf: TinyGguf, ingested: Ingested, tmp_path: Path) -> None:
    model = tiny_gguf()
    base = load_index(ingested(model))
    one, two = (prepare(write_adapter(tmp_path / f"{seed}.gguf", model, seed=seed), base, tmp_path) for seed in (1, 2))
    memory = AdapterMemory(base, [one, two, one])
    assert memory.digests == [one.digest, two.digest]
    assert memory.max_rank == 8
    assert len({adapter_tag(one.digest), adapter_tag(two.digest), adapter_tag("")}) == 3
    other = load_index(ingested(tiny_gguf("odd")))
    with pytest.raises(ConfigError, match="is of another model"):
        AdapterMemory(other, [one])


# ------------------------------------------------------------------ refusals


def set_keys(path: Path, model: Path, **keys: Any) -> Path:
    """An adapter with other metadata; None removes a key."""
    source = gguf.GGUFReader(write_adapter(path.with_suffix(".before"), model))
    values = {"general.type": "adapter", "adapter.type": "lora", "adapter.lora.alpha": 16.0} | keys
    writer = gguf.GGUFWriter(path, values.pop("general.architecture", "llama"))
    for key, value in values.items():
        if value is not None:
            (writer.add_float32 if isinstance(value, float) else writer.add_string)(key, value)
    for tensor in source.tensors:
        writer.add_tensor(tensor.name, tensor.data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


GGUF_REFUSALS = {
    "a model": ({"general.type": "model"}, "general.type is 'model', expected 'adapter'"),
    "no type": ({"general.type": None}, "general.type is 'None', expected 'adapter'"),
    "another kind": ({"adapter.type": "control_vector"}, "adapter.type is 'control_vector', expected 'lora'"),
    "another architecture": ({"general.architecture": "qwen2"}, "general.architecture is 'qwen2', expected 'llama'"),
    "no alpha": ({"adapter.lora.alpha": None}, "adapter.lora.alpha is None, expected a number"),
    "a text as alpha": ({"adapter.lora.alpha": "16"}, "adapter.lora.alpha is 16, expected a number"),
    "an infinite alpha": ({"adapter.lora.alpha": float("inf")}, "the scale is inf, which is no f32 number"),
}


@pytest.mark.parametrize("what", GGUF_REFUSALS)
def test_metadata_is_checked(tiny_gguf: TinyGguf, ingested: Ingested, tmp_path: Path, what: str) -> None:
    keys, message = GGUF_REFUSALS[what]
    model = tiny_gguf()
    with pytest.raises(ConfigError) as caught:
        prepare(set_keys(tmp_path / "a.gguf", model, **keys), load_index(ingested(model)), tmp_path)
    assert message in caught.value.message
    assert str(tmp_path / "a.gguf") in caught.value.message
    assert caught.value.param == "models.adapters"


Tensors = dict[str, np.ndarray]


def with_tensors(path: Path, model: Path, change: Callable[[Tensors], object]) -> Path:
    source = gguf.GGUFReader(write_adapter(path.with_suffix(".before"), model, targets=("attn_q",)))
    tensors = {tensor.name: np.array(tensor.data) for tensor in source.tensors}
    change(tensors)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", 8.0)
    for name, values in tensors.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


Q = "blk.0.attn_q.weight"


def rename(tensors: Tensors, to: str) -> None:
    for half in ("lora_a", "lora_b"):
        tensors[f"{to}.{half}"] = tensors.pop(f"{Q}.{half}")


TENSOR_REFUSALS: dict[str, tuple[Callable[[Tensors], object], str]] = {
    "half a pair": (lambda x: x.pop(f"{Q}.lora_b"), f"tensor '{Q}.lora_b' is missing, the other one of"),
    "no LoRA": (lambda x: x.update(extra=np.zeros((2, 2), np.float32)), "tensor 'extra' is no LoRA matrix"),
    "a layer too many": (lambda x: rename(x, "blk.7.attn_q.weight"), "is of layer 7, and the model has 2"),
    "an embedding": (lambda x: rename(x, "token_embd.weight"), "changes 'token_embd'; adapters may change attn_q"),
    "a norm": (lambda x: rename(x, "blk.0.attn_norm.weight"), "changes 'blk.0.attn_norm'; adapters may change"),
    "other rows": (
        lambda x: x.update({f"{Q}.lora_b": np.zeros((32, 8), np.float32)}),
        "changes a matrix of 32 rows and 64 columns, and the model's 'blk.0.attn_q' has 64 and 64",
    ),
    "two ranks": (
        lambda x: x.update({f"{Q}.lora_b": np.zeros((64, 4), np.float32)}),
        "A has 8 rows and B 4 columns, which must be the same",
    ),
    "a large rank": (
        lambda x: x.update(
            {f"{Q}.lora_a": np.zeros((65, 64), np.float32), f"{Q}.lora_b": np.zeros((64, 65), np.float32)}
        ),
        "rank is 65, expected 1 to 64 (models.max_adapter_rank)",
    ),
    "no number": (
        lambda x: x.update({f"{Q}.lora_a": np.full((8, 64), np.nan, np.float32)}),
        "A has values that are not finite",
    ),
    "a vector": (
        lambda x: x.update({f"{Q}.lora_a": np.zeros(64, np.float32)}),
        f"tensor '{Q}.lora_a' is F32 [64], expected a matrix of F32, F16 or BF16",
    ),
}


@pytest.mark.parametrize("what", TENSOR_REFUSALS)
def test_tensors_are_checked(tiny_gguf: TinyGguf, ingested: Ingested, tmp_path: Path, what: str) -> None:
    change, message = TENSOR_REFUSALS[what]
    model = tiny_gguf()
    with pytest.raises(ConfigError) as caught:
        prepare(with_tensors(tmp_path / "a.gguf", model, change), load_index(ingested(model)), tmp_path)
    assert message in caught.value.message


def test_experts_are_refused(tiny_gguf: TinyGguf, ingested: Ingested, tmp_path: Path) -> None:
    def experts(tensors: Tensors) -> None:
        rename(tensors, "blk.0.ffn_up.weight")

    model = tiny_gguf("mixtral", "Q8_0")
    with pytest.raises(ConfigError, match=r"changes 'blk.0.ffn_up', which the model does not have"):
        prepare(with_tensors(tmp_path / "a.gguf", model, experts), load_index(ingested(model)), tmp_path)


PEFT_REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    "another method": ({"peft_type": "LOHA"}, "peft_type is 'LOHA', expected 'LORA'"),
    "DoRA": ({"use_dora": True}, "use_dora is True; DoRA is not supported"),
    "modules": ({"modules_to_save": ["lm_head"]}, "modules_to_save is ['lm_head']; whole modules cannot be replaced"),
    "biases": ({"bias": "lora_only"}, "bias is 'lora_only', expected 'none'"),
    "LoRA biases": ({"lora_bias": True}, "lora_bias is True; biases of adapters are not supported"),
    "several alphas": ({"alpha_pattern": {"q_proj": 3}}, "alpha_pattern is {'q_proj': 3}; one lora_alpha"),
    "PiSSA": (
        {"init_lora_weights": "pissa_niter_4"},
        "init_lora_weights is 'pissa_niter_4', for which PEFT also",
    ),
    "LoftQ": ({"init_lora_weights": "loftq"}, "init_lora_weights is 'loftq', for which PEFT also"),
    "an unknown beginning": (
        {"init_lora_weights": "lora_ga"},
        "expected true, false or one of gaussian, eva, orthogonal; save the adapter as a plain one",
    ),
    "no rank": ({"r": 0}, "r is 0, expected at least 1"),
    "a text as rank": ({"r": "8"}, "r is '8', expected a whole number"),
    "no alpha": ({"lora_alpha": None}, "lora_alpha is missing, expected a number"),
}


@pytest.mark.parametrize("what", PEFT_REFUSALS)
def test_the_configuration_is_checked(tiny_gguf: TinyGguf, ingested: Ingested, tmp_path: Path, what: str) -> None:
    fields, message = PEFT_REFUSALS[what]
    model = tiny_gguf()
    source = write_peft(tmp_path / "peft", model, **fields)
    with pytest.raises(ConfigError) as caught:
        prepare(source, load_index(ingested(model)), tmp_path)
    assert message in caught.value.message
    assert "adapter_config.json" in caught.value.message


def test_directories_are_checked(tiny_gguf: TinyGguf, ingested: Ingested, tmp_path: Path) -> None:
    model = tiny_gguf()
    base = load_index(ingested(model))
    source = write_peft(tmp_path / "peft", model)
    weights = source / "adapter_model.safetensors"
    with pytest.raises(ConfigError, match="not a GGUF file; give the directory that it is in"):
        prepare(weights, base, tmp_path)
    raw = weights.read_bytes()
    for change, message in (
        (raw[: len(raw) // 2], "truncated or corrupt"),
        (raw.replace(b"q_proj.lora_A", b"q_proj.lora_C"), "is no matrix of LoRA; it is not supported"),
        (raw.replace(b"self_attn.q_proj.lora", b"self_attn.x_proj.lora"), "which no llama model has"),
    ):
        weights.write_bytes(change)
        with pytest.raises(ConfigError, match=message):
            prepare(source, base, tmp_path)
    weights.rename(source / "adapter_model.bin")
    with pytest.raises(ConfigError, match="adapter_model.bin is pickled, which can run any code, and is refused"):
        prepare(source, base, tmp_path)
    (source / "adapter_config.json").unlink()
    with pytest.raises(ConfigError, match=r"has no adapter_config\.json"):
        prepare(source, base, tmp_path)
    with pytest.raises(ConfigError, match="cannot be read: No such file or directory"):
        prepare(tmp_path / "missing.gguf", base, tmp_path)


def test_memory_is_bounded(tiny_gguf: TinyGguf, ingested: Ingested, tmp_path: Path) -> None:
    model = tiny_gguf()
    with pytest.raises(ConfigError, match=r"takes more than 4,096 bytes in memory \(models\.adapters_mb\)"):
        prepare_adapter(
            write_adapter(tmp_path / "a.gguf", model), load_index(ingested(model)), tmp_path, MAX_RANK, 4096
        )


def test_names_of_modules_may_have_the_adapter_s(tiny_gguf: TinyGguf, ingested: Ingested, tmp_path: Path) -> None:
    """PEFT writes `lora_A.weight`, and `lora_A.NAME.weight` in other versions."""
    model = tiny_gguf()
    base = load_index(ingested(model))
    expected = prepare(write_peft(tmp_path / "a", model), base, tmp_path).digest
    source = write_peft(tmp_path / "b", model)
    raw = (source / "adapter_model.safetensors").read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = {
        name.replace(".weight", ".default.weight"): entry
        for name, entry in json.loads(raw[8 : 8 + length]).items()
        if name != "__metadata__"
    }
    head = json.dumps(header).encode()
    (source / "adapter_model.safetensors").write_bytes(len(head).to_bytes(8, "little") + head + raw[8 + length :])
    assert prepare(source, base, tmp_path).digest == expected
    assert BY_ID[0] is F32


def test_workers_import_no_reader_before_they_need_one() -> None:
    """They are forked from a process that has imported the stage, and share its memory."""
    code = "import sys, stages.worker.stage as _; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    found = done.stdout.split()
    assert "stages.worker.adapters.prepared" in found
    assert [name for name in found if "huggingface" in name or name == "tokenizers"] == []


def test_a_prepared_file_is_an_adapter_too(tiny_gguf: TinyGguf, ingested: Ingested, tmp_path: Path) -> None:
    """As a fleet publishes it: with the same digest, and refused for another model or with other bytes."""
    model = tiny_gguf()
    base = load_index(ingested(model))
    expected = prepare(write_adapter(tmp_path / "a.gguf", model, rank=5), base, tmp_path)
    stored = tmp_path / "adapters" / f"{expected.digest}.lora"
    named, elsewhere = tmp_path / "mine.lora", tmp_path / "elsewhere"
    named.write_bytes(stored.read_bytes())
    for source in (stored, named):
        found = prepare(source, base, elsewhere)
        assert (found.digest, found.header) == (expected.digest, expected.header)
    assert (elsewhere / "adapters" / stored.name).read_bytes() == stored.read_bytes()
    with pytest.raises(ConfigError, match=r"rank is 5, expected 1 to 4 \(models\.max_adapter_rank\)"):
        prepare_adapter(named, base, elsewhere, 4, MAX_BYTES)
    with pytest.raises(ConfigError, match=r"of which 100 are left \(models\.adapters_mb\)"):
        prepare_adapter(named, base, elsewhere, MAX_RANK, 100)
    other = msgspec.structs.replace(base, hyper=msgspec.structs.replace(base.hyper, n_layers=base.hyper.n_layers + 1))
    with pytest.raises(ConfigError, match=f"is of a model of {base.hyper.n_layers} layers"):
        prepare(named, other, elsewhere)
    raw = bytearray(stored.read_bytes())
    raw[-1] ^= 1
    stored.write_bytes(raw)
    with pytest.raises(ConfigError, match="does not have the SHA-256 in its name"):
        prepare(stored, base, elsewhere)
