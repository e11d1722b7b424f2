"""Mixtures of experts: who computes a token is exact, the bytes are the reference's, and the files are checked by name.

test_architectures.py compares every such architecture with the reference, test_peer_logits.py with llama.cpp.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from pipeline.errors import ConfigError
from shm.checkpoint import Checkpoint, load_index
from stages.worker.checkpoint.gguf import GgufFile
from stages.worker.checkpoint.ingest import ingest
from stages.worker.checkpoint.layout import unpack
from stages.worker.checkpoint.prepare_source import prepare_source
from stages.worker.kernels.formats import FORMATS
from tests.worker.conftest import Ingested, TinyGguf
from tests.worker.huggingface_files import written
from tests.worker.kernel_logits import kernel_logits, same_bytes
from tools.reference.exact_forward import ExactModel, ExactSequence
from tools.step_runner import StepRunner
from tools.tiny_gguf import SHAPES, add_byte_level_vocabulary, write_model

LONG = 300
CROWDED = SHAPES["mixtral"]._replace(n_experts=4, n_experts_used=3)  # an expert gets about 225 of 300 tokens


def digest_of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def rewrite(path: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """Change tensors in place: `change` gets the file's arrays by name."""
    reader = gguf.GGUFReader(path, "r+")
    change({t.name: t.data for t in reader.tensors})
    reader.data.flush()
    return path


# ------------------------------------------------------------------ kernels


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "recipe"), [("qwen2moe", "F16"), ("qwen2moe", "Q4_K_M"), ("qwen3moe", "BF16"), ("mixtral", "Q8_0")]
)
def test_kernels_equal_the_reference(
    tiny_gguf: TinyGguf, ingested: Ingested, tmp_path: Path, shape: str, recipe: str
) -> None:
    path, tokens = tiny_gguf(shape, recipe), np.random.default_rng(5).integers(0, 260, 36)
    expected = ExactSequence(ExactModel(path)).extend(tokens)
    assert same_bytes(kernel_logits(ingested(path), tmp_path, tokens, chunk=32, ranks=2), expected), "in chunks"
    assert same_bytes(kernel_logits(ingested(path), tmp_path, tokens, chunk=3), expected), "with few tokens a step"


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 3])
def test_many_tokens_of_one_expert_in_one_step(ingested: Ingested, tmp_path: Path, ranks: int) -> None:
    index = ingested(write_model(tmp_path / "m.gguf", CROWDED, "Q4_0_M"))
    tokens = np.random.default_rng(6).integers(0, 260, LONG)
    single = kernel_logits(index, tmp_path, tokens, chunk=13)
    with StepRunner(index, tmp_path, ranks=ranks, max_rows=2, max_tokens=LONG + 1, step_tokens=LONG) as runner:
        runner.write_row(0, tokens)
        (logits,) = runner.prefill(0, LONG, LONG)
    assert logits.tobytes() == single[-1].tobytes()


@pytest.mark.slow
def test_of_equal_experts_the_first_ones_are_taken(ingested: Ingested, tmp_path: Path) -> None:
    tokens, used = np.arange(20, 40), SHAPES["mixtral"].n_experts_used

    def all_equal(tensors: dict[str, Any]) -> None:
        for layer in range(2):
            tensors[f"blk.{layer}.ffn_gate_inp.weight"][:] = 0

    def others_differ(tensors: dict[str, Any]) -> None:
        all_equal(tensors)
        for layer in range(2):
            tensors[f"blk.{layer}.ffn_up_exps.weight"][used:] = 0

    def first_differs(tensors: dict[str, Any]) -> None:
        all_equal(tensors)
        tensors["blk.1.ffn_up_exps.weight"][used - 1] = 0

    logits = [
        kernel_logits(
            ingested(rewrite(write_model(tmp_path / f"{i}.gguf", SHAPES["mixtral"]), change)), tmp_path, tokens
        )
        for i, change in enumerate((all_equal, others_differ, first_differs))
    ]
    assert same_bytes(logits[0], logits[1])
    assert not same_bytes(logits[0], logits[2])


# ------------------------------------------------------------------ files


@pytest.mark.parametrize(("name", "matrices"), [("mixtral", 4), ("qwen2moe", 8)])
def test_no_value_of_an_expert_changes(tiny_gguf: TinyGguf, ingested: Ingested, name: str, matrices: int) -> None:
    path = tiny_gguf(name, "Q4_0_M")
    model = Checkpoint(ingested(path))
    tensors = {t.name: gguf.dequantize(t.data, t.tensor_type) for t in gguf.GGUFReader(path).tensors}
    compared = 0
    for entry in model.index.tensors:
        if "exp" in entry.name or "gate_inp" in entry.name:
            found = unpack(model.view(entry.name), FORMATS[entry.format], entry.rows, entry.columns)
            assert np.array_equal(found, tensors[entry.name].reshape(entry.rows, entry.columns))
            compared += 1
    assert compared == matrices * 2
    assert model.index.parameters == sum(t.size for t in tensors.values())


def test_routers_are_not_quantized(tiny_gguf: TinyGguf, tmp_path: Path) -> None:
    index = prepare_source(tiny_gguf("qwen2moe", "F16"), tmp_path, "q4_0")
    formats = {t.name.removeprefix("blk.1."): t.format for t in index.tensors}
    assert (
        formats["ffn_gate_exps.weight"] == formats["ffn_down_exps.weight"] == formats["ffn_up_shexp.weight"] == "Q4_0"
    )
    assert formats["ffn_gate_inp.weight"] == formats["ffn_gate_inp_shexp.weight"] == "F32"


@pytest.mark.parametrize("quant", ["", "q4_0"])
def test_the_gate_of_the_shared_expert_may_be_a_matrix_of_one_row(tmp_path: Path, quant: str) -> None:
    """As llama.cpp's converter writes it, without the tool that quantizes."""
    path = write_model(tmp_path / "v.gguf", SHAPES["qwen2moe"]._replace(n_layers=4), "F16")
    raw, changed = path.read_bytes(), tmp_path / "m.gguf"
    for layer in range(4):  # the header grows by 4 times 8 bytes: by an alignment
        name = f"blk.{layer}.ffn_gate_inp_shexp.weight".encode()
        raw = raw.replace(name + struct.pack("<IQ", 1, 128), name + struct.pack("<IQQ", 2, 128, 1))
    changed.write_bytes(raw)
    assert GgufFile(changed).tensors["blk.3.ffn_gate_inp_shexp.weight"].shape == (1, 128)
    expected, found = prepare_source(path, tmp_path, quant), prepare_source(changed, tmp_path, quant)
    assert found.tensors == expected.tensors and found.hyper == expected.hyper
    assert written(tmp_path, found) == written(tmp_path, expected)


def test_the_mixture_comes_from_the_file(tiny_gguf: TinyGguf, ingested: Ingested) -> None:
    def mixture(shape: str) -> tuple[int, int, int, int, bool]:
        h = load_index(ingested(tiny_gguf(shape, "Q8_0"))).hyper
        return h.n_experts, h.n_experts_used, h.ffn_width, h.shared_ffn_width, h.normalizes_experts

    assert mixture("mixtral") == (8, 2, 96, 0, True)
    assert mixture("qwen2moe") == (12, 4, 96, 160, False)
    assert mixture("qwen3moe") == (40, 8, 64, 0, True)
    assert mixture("granitemoe") == (8, 3, 96, 64, True)
    assert mixture("olmoe") == (16, 5, 64, 0, False)
    assert mixture("small") == (0, 0, 96, 0, False)


def test_a_token_reads_the_experts_that_it_is_given_to(tiny_gguf: TinyGguf, ingested: Ingested) -> None:
    index = load_index(ingested(tiny_gguf("qwen3moe", "Q8_0")))
    experts = sum(t.nbytes for t in index.tensors if "_exps" in t.name)
    rest = sum(
        t.nbytes for t in index.tensors if "_exps" not in t.name and not t.name.startswith(("rope", "token_embd"))
    )
    assert index.decode_bytes == rest + experts * 8 // 40


CHANGES = {
    "no experts in the graph": ("biased", {"expert_count": 8}, "qwen2.expert_count is 8, expected 0 (no mixture"),
    "no experts in the file": ("qwen3moe", {"expert_count": 0}, "qwen3moe.expert_count is 0, expected 1 to 1024"),
    "too many experts": ("qwen3moe", {"expert_count": 1025}, "qwen3moe.expert_count is 1025, expected 0 to 1024"),
    "more used than there are": ("mixtral", {"expert_used_count": 9}, "llama.expert_used_count is 9, expected 1 to 8"),
    "another width": (
        "qwen3moe",
        {"expert_feed_forward_length": 96},
        "has shape [40, 64, 128], expected [40, 96, 128]",
    ),
    "an odd width": ("qwen3moe", {"expert_feed_forward_length": 72}, "is 72, expected a multiple of 32"),
    "an odd shared width": ("qwen2moe", {"expert_shared_feed_forward_length": 72}, "is 72, expected a multiple of 32"),
    "another router": ("olmoe", {"expert_gating_func": 2}, "expert_gating_func is 2, expected 1"),
    "scaled weights": ("olmoe", {"expert_weights_scale": 2.5}, "expert_weights_scale is 2.5, expected 1"),
}


@pytest.mark.parametrize("what", CHANGES)
def test_what_differs_is_named(what: str, tmp_path: Path) -> None:
    name, keys, message = CHANGES[what]
    shape = SHAPES[name]

    def add_keys(writer: gguf.GGUFWriter) -> None:
        add_byte_level_vocabulary(writer, shape.vocab_size, 0)
        for key, value in keys.items():
            full = f"{shape.architecture}.{key}"
            writer.kv_data[0].pop(full, None)
            (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(full, value)

    path = write_model(tmp_path / "m.gguf", shape, "Q8_0", add_vocabulary=add_keys)
    with pytest.raises(ConfigError) as caught:
        ingest(path, tmp_path / "m.idx", digest_of(path))
    assert message in str(caught.value)
    assert [p.name for p in tmp_path.iterdir()] == ["m.gguf"]


def test_experts_in_tensors_of_their_own_are_refused_with_the_name(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf", SHAPES["mixtral"], "Q8_0")
    path.write_bytes(path.read_bytes().replace(b"blk.1.ffn_up_exps.weight", b"blk.1.ffn_up.0000.weight"))
    with pytest.raises(ConfigError, match=r"'blk.1.ffn_up_exps.weight' is missing, expected \[8, 96, 64\]"):
        ingest(path, tmp_path / "m.idx", digest_of(path))
