"""The models that other tests stand on: reproducible, valid, of the shape they say."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from gguf import GGUFReader

from tools.reference.exact_forward import ExactModel, ExactSequence
from tools.tiny_gguf import RECIPES, SHAPES, main, rope_factors, tensor_plan, vocabulary, write_model


def test_the_same_arguments_give_the_same_bytes(tmp_path: Path) -> None:
    a, b, c = (write_model(tmp_path / f"{i}.gguf", SHAPES["odd"], "Q4_K_M", seed) for i, seed in enumerate((1, 1, 2)))
    assert a.read_bytes() == b.read_bytes() != c.read_bytes()


@pytest.mark.parametrize("recipe", list(RECIPES))
def test_every_tensor_has_the_format_of_the_plan(tmp_path: Path, recipe: str) -> None:
    shape = SHAPES["super"]
    reader = GGUFReader(write_model(tmp_path / "m.gguf", shape, recipe))
    found = [(t.name, t.tensor_type, *t.shape.tolist()) for t in reader.tensors]
    expected = [
        (name, kind, columns, rows) if rows else (name, kind, columns)
        for name, kind, rows, columns in tensor_plan(shape, recipe)
    ]
    assert found == expected


def test_the_experts_of_a_layer_are_one_tensor(tmp_path: Path) -> None:
    reader = GGUFReader(write_model(tmp_path / "m.gguf", SHAPES["qwen2moe"], "Q4_1"))
    shapes = {t.name.removeprefix("blk.1."): t.shape.tolist() for t in reader.tensors}
    assert shapes["ffn_gate_exps.weight"] == shapes["ffn_up_exps.weight"] == [128, 96, 12]
    assert shapes["ffn_down_exps.weight"] == [96, 128, 12]
    assert (shapes["ffn_gate_inp.weight"], shapes["ffn_gate_inp_shexp.weight"]) == ([128, 12], [128])


def test_merges_build_every_token_from_earlier_ones() -> None:
    tokens, types, merges = vocabulary(1000)
    assert len(tokens) == len(set(tokens)) == len(types) == 1000
    known = set(tokens[:259])
    assert len(merges) == 1000 - 259
    for merge, token in zip(merges, tokens[259:], strict=True):
        left, right = merge.split(" ")
        assert left in known
        assert right in known
        assert left + right == token
        known.add(token)


def test_a_vocabulary_below_its_bytes_is_refused() -> None:
    with pytest.raises(ValueError, match="vocab_size is 259, expected at least 260"):
        vocabulary(259)


def test_idle_layers_add_nothing(tmp_path: Path) -> None:
    shallow = SHAPES["odd"]._replace(n_layers=1)
    files = [
        write_model(tmp_path / "deep.gguf", SHAPES["odd"], seed=5, real_layers=1),
        write_model(tmp_path / "shallow.gguf", shallow, seed=5),
        write_model(tmp_path / "busy.gguf", SHAPES["odd"], seed=5),
    ]
    deep, alone, busy = (ExactSequence(ExactModel(path)).extend([1, 2, 3]) for path in files)
    assert (deep == alone).all()
    assert not (busy == alone).all()


def test_frequency_factors_of_a_long_context() -> None:
    factors = rope_factors(SHAPES["llama-1b"])
    assert factors[0] == 1
    assert factors[-1] == 32
    assert (np.diff(factors) >= 0).all()


def test_command(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, [str(tmp_path / "m.gguf"), "--shape", "wide", "--format", "Q6_K"])
    assert result.exit_code == 0, result.output
    assert "shape wide, Q6_K, seed 0" in result.output
