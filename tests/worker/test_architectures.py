"""Every architecture: the kernels equal the exact reference byte for byte, whatever is computed with a prompt and how.

The reference implementation is a second reading of the files; test_peer_logits.py compares with an independent engine.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from stages.worker.checkpoint.architectures import ARCHITECTURES
from tests.worker.conftest import Ingested, TinyGguf
from tests.worker.kernel_logits import kernel_logits, same_bytes
from tools.reference.exact_forward import ExactModel, ExactSequence
from tools.tiny_gguf import SHAPES

pytestmark = pytest.mark.slow

# Shapes that differ from a plain llama, and how many positions show it: beyond a window, and across a KV split.
LENGTHS = {
    "partial": 20,
    "windowed": 570,
    "linear": 20,
    "yarn": 270,
    "qwen3": 40,
    "gemma": 20,
    "gemma2": 70,
    "gemma3": 330,
    "phi3": 20,
    "phi3-long": 20,
    "granite": 20,
    "olmo2": 40,
    "stablelm": 20,
    "starcoder2": 20,
    "gpt2": 20,
    "mixtral": 40,
    "qwen2moe": 70,
    "qwen3moe": 40,
    "granitemoe": 20,
    "olmoe": 20,
}
RECIPE = "Q4_0_M"  # seven formats; of the output projection and the head unquantized ones


def prompt(shape: str) -> np.ndarray:
    """The same for every process."""
    return np.random.default_rng(7).integers(0, 260, LENGTHS[shape])


def test_every_architecture_has_a_shape() -> None:
    elsewhere = {"llama", "qwen2", "bert", "nomic-bert"}  # the last two: test_bert.py
    assert {SHAPES[name].architecture for name in LENGTHS} | elsewhere == set(ARCHITECTURES)


@pytest.mark.parametrize("shape", LENGTHS)
def test_kernels_equal_the_reference(tiny_gguf: TinyGguf, ingested: Ingested, tmp_path: Path, shape: str) -> None:
    path, tokens = tiny_gguf(shape, RECIPE), prompt(shape)
    expected = ExactSequence(ExactModel(path)).extend(tokens)
    index = ingested(path)
    assert same_bytes(kernel_logits(index, tmp_path, tokens, chunk=64), expected), "in large chunks"
    assert same_bytes(kernel_logits(index, tmp_path, tokens, chunk=7, ranks=2, others=5), expected), "among others"
    assert same_bytes(kernel_logits(index, tmp_path, tokens, chunk=1, ranks=2), expected), "by single positions"


@pytest.mark.parametrize("kv_type", ["int8", "f32"])
@pytest.mark.parametrize("shape", ["gemma2", "gemma3", "qwen3"])
def test_kernels_equal_the_reference_with_other_kv_types(
    tiny_gguf: TinyGguf, ingested: Ingested, tmp_path: Path, shape: str, kv_type: str
) -> None:
    path, tokens = tiny_gguf(shape, "Q4_K_M"), prompt(shape)
    expected = ExactSequence(ExactModel(path), kv_type).extend(tokens)
    assert same_bytes(kernel_logits(ingested(path), tmp_path, tokens, kv_type, chunk=60), expected)
    found = kernel_logits(ingested(path), tmp_path, tokens, kv_type, chunk=33, ranks=2, others=5)
    assert same_bytes(found, expected), "among others"


@pytest.mark.timeout(3000)  # it may compile every kernel for another CPU, on what others leave of the cores
def test_portable_instructions_give_the_same_bytes(tiny_gguf: TinyGguf, ingested: Ingested, tmp_path: Path) -> None:
    given = [f"{shape}={ingested(tiny_gguf(shape, RECIPE))}" for shape in LENGTHS]
    command = [sys.executable, "-W", "ignore", "-m", "tests.worker.test_architectures", str(tmp_path), *given]
    environment = os.environ | {"STARLING_ISA": "portable", "NPY_DISABLE_CPU_FEATURES": "AVX2 FMA3"}
    root = Path(__file__).parents[2]
    done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    expected = [digests(index, tmp_path) for index in given]
    assert done.stdout.splitlines() == expected


def digests(shape_and_index: str, directory: Path) -> str:
    """Shape and digest of the logits of a prompt."""
    shape, _, index = shape_and_index.partition("=")
    logits = kernel_logits(Path(index), directory, prompt(shape), chunk=50, ranks=2)
    return f"{shape} {hashlib.sha256(logits.tobytes()).hexdigest()}"


if __name__ == "__main__":
    for argument in sys.argv[2:]:
        print(digests(argument, Path(sys.argv[1])))
