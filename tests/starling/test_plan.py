"""`starling models --plan`: sizes are those of the files, and the bound on speed follows from what a token reads."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import yaml
from click.testing import CliRunner

from pipeline.config.load import resolve
from pipeline.config.schema import Config
from pipeline.errors import ConfigError
from pipeline.models.arena_sizes import arena_sizes, most_positions
from pipeline.runtime.process import EXIT_CONFIG
from shm.checkpoint import Hyper, load_index
from stages.worker.adapters.memory import AdapterMemory
from stages.worker.checkpoint.prepare import prepare_adapters, prepare_checkpoint
from starling.cli import cli
from starling.cli.plan import Plan, attended, lines, plan, read_rate
from tools.tiny_adapter import write_adapter
from tools.tiny_gguf import SHAPES, write_model


@pytest.fixture
def config(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    """Two models, of which the first is prepared."""
    paths = [str(write_model(tmp_path / f"{name}.gguf", SHAPES[name], "Q8_0")) for name in ("gemma3", "odd")]
    fields = {"kv_cache_mb": 8, "max_batch_size": 4, "max_sequence_length": 512}
    values = {"models": [{"name": f"m{i}", "path": path, **fields} for i, path in enumerate(paths)]}
    (tmp_path / "starling.yaml").write_text(yaml.safe_dump(values))
    monkeypatch.setenv("STARLING_CONFIG", str(tmp_path / "starling.yaml"))
    found = resolve(values, {})
    (home / "models").mkdir(parents=True)
    prepare_checkpoint(found.models[0], home / "models")
    return found


def test_sizes_are_those_of_the_files(config: Config, home: Path) -> None:
    result = CliRunner().invoke(cli, ["models", "--plan", "--json"], catch_exceptions=False)
    (row,) = json.loads(result.output)
    (index_path,) = (home / "models").glob("*.idx")
    index = load_index(index_path)
    sizes = arena_sizes(config, config.models[0], index.hyper)
    assert (row["name"], row["weights"], row["context_length"]) == ("m0", index.bin_bytes, 512)
    assert row["weights"] == index_path.with_suffix(".bin").stat().st_size
    assert (row["kv_arena"], row["step_arena"], row["activations"]) == tuple(sizes)
    assert row["kv_per_position"] == 6 * 2 * 2 * 32 * 2, "6 layers, K and V of 2 heads of 32 values of 2 bytes"
    assert row["kv_behind_window"] == 2 * 2 * 32 * 2, "one layer attends to all positions"
    assert row["kv_sequence"] == 512, "steps are longer than what is behind the window"
    assert row["kv_sequences"] == row["kv_positions"] // 512
    assert 0 < row["kv_positions"] * row["kv_per_position"] <= 8 << 20
    assert row["weights_per_token"] < row["weights"], "RoPE tables are not read"
    rate = row["read_bytes_per_s"]
    assert row["tokens_per_s"] == pytest.approx(rate / row["weights_per_token"])
    read = row["weights_per_token"] + row["kv_per_position"] / 6 * (5 * 300 + 512)
    assert row["tokens_per_s_at_full_context"] == pytest.approx(rate / read)


def test_adapters_are_part_of_the_memory(config: Config, home: Path, tmp_path: Path) -> None:
    base = tmp_path / "gemma3.gguf"
    one = write_adapter(tmp_path / "one.gguf", base, 4)
    other = write_adapter(tmp_path / "other.gguf", base, 8, seed=2)
    fields: dict[str, object] = {
        "name": "m0",
        "path": str(base),
        "kv_cache_mb": 8,
        "max_batch_size": 4,
        "max_sequence_length": 512,
    }
    fields["adapters"] = [{"name": name, "path": str(path)} for name, path in (("a", one), ("b", other), ("c", one))]
    adapted = resolve({"models": [fields]}, {})
    model = adapted.models[0]
    (index_path,) = (home / "models").glob("*.idx")
    bare = plan(config, config.models[0], home / "models")
    found = plan(adapted, model, home / "models")
    index = load_index(index_path)
    loaded = AdapterMemory(index, list(prepare_adapters(model, index, home / "models").values()))
    assert bare is not None and found is not None
    assert (bare.adapters, found.adapters) == (0, loaded.nbytes)
    assert found.memory == bare.memory + loaded.nbytes + found.activations - bare.activations
    assert found.activations > bare.activations
    assert any(line.startswith("  adapters  ") for line in lines(found))


def test_a_plan_is_text_with_the_next_command(config: Config) -> None:
    shown = CliRunner().invoke(cli, ["models", "--plan"], catch_exceptions=False).output
    assert "tokens/s for one request" in shown
    assert "m1  not prepared: run `starling prepare m1` first" in shown
    alone = CliRunner().invoke(cli, ["models", "--plan", "m1"], catch_exceptions=False).output
    assert alone == "m1  not prepared: run `starling prepare m1` first\n"


def test_a_damaged_checkpoint_is_named_with_the_remedy(config: Config, home: Path) -> None:
    def refusal() -> str:
        error = CliRunner().invoke(cli, ["models", "--plan", "m0"]).exception
        assert isinstance(error, ConfigError)
        return error.message

    (index_path,) = (home / "models").glob("*.idx")
    weights = index_path.with_suffix(".bin")
    whole = weights.read_bytes()
    weights.unlink()
    assert refusal() == f"model 'm0': {weights} is missing; run `starling prepare m0`"
    weights.write_bytes(whole[:4096])
    assert f"{weights}: 4096 bytes, expected {len(whole)}; remove {index_path.name} to ingest again" in refusal()


def test_one_of_several_models_that_is_damaged_is_a_line_and_the_others_are_shown(config: Config, home: Path) -> None:
    (index_path,) = (home / "models").glob("*.idx")
    index_path.with_suffix(".bin").write_bytes(bytes(4096))
    prepare_checkpoint(config.models[1], home / "models")
    reason = f"{index_path.with_suffix('.bin')}: 4096 bytes, expected "
    shown = CliRunner().invoke(cli, ["models", "--plan"], standalone_mode=False)
    first, second, *_ = shown.output.splitlines()
    assert first.startswith(f"m0  cannot be used: {reason}") and index_path.name in first
    assert second.startswith("m1  ") and second.endswith(" of memory")
    assert "tokens/s for one request" in shown.output
    assert (shown.exception, shown.return_value) == (None, EXIT_CONFIG)
    as_json = CliRunner().invoke(cli, ["models", "--plan", "--json"], standalone_mode=False)
    assert [row["name"] for row in json.loads(as_json.stdout)] == ["m1"]
    assert as_json.stderr.startswith(f"starling: model 'm0': {reason}")
    assert (as_json.exception, as_json.return_value) == (None, EXIT_CONFIG)


def test_an_adapter_that_is_damaged_costs_its_own_model_the_plan(config: Config, home: Path, tmp_path: Path) -> None:
    written = yaml.safe_load((tmp_path / "starling.yaml").read_text())
    adapter = tmp_path / "a.gguf"
    adapter.write_bytes(b"GGUF")
    written["models"][0]["adapters"] = [{"name": "a", "path": str(adapter)}]
    (tmp_path / "starling.yaml").write_text(yaml.safe_dump(written))
    shown = CliRunner().invoke(cli, ["models", "--plan"], standalone_mode=False)
    first, second = shown.output.splitlines()
    assert first.startswith("m0  cannot be used: ") and str(adapter) in first
    assert second == "m1  not prepared: run `starling prepare m1` first"
    alone = CliRunner().invoke(cli, ["models", "--plan", "m0"], standalone_mode=False).exception
    assert isinstance(alone, ConfigError) and str(adapter) in alone.message


def test_a_window_bounds_what_a_layer_attends_to() -> None:
    h = Hyper(3, 32, 1, 1, 32, 32, 4, 4096, 1e-5, 32, "halves", "silu", windows=(100, 100, 0))
    assert (attended(h, 50), attended(h, 1000)) == (150, 1200)


def test_a_window_in_every_layer_bounds_what_a_sequence_holds() -> None:
    windows = (100, 300)
    h = Hyper(2, 32, 1, 1, 32, 32, 4, 1 << 20, 1e-5, 32, "halves", "silu", windows=windows)
    assert h.kv_window == 300
    assert most_positions(500, 300, 512, 32) == 500
    assert most_positions(1 << 20, 300, 512, 32) == 300 + 256 + 3 * 512 + 160 + 96
    assert most_positions(1 << 20, 0, 512, 32) == 1 << 20


def test_the_plan_of_a_window_in_some_layers_says_what_a_position_behind_it_takes() -> None:
    fields = dict.fromkeys(Plan.__struct_fields__, 1000)
    of_some = Plan(**{**fields, "name": "m", "kv_per_position": 600, "kv_behind_window": 100})  # type: ignore[arg-type]
    assert "600 bytes; 100 behind the last 1,000 of a sequence: 1,000 of 1,000 fit" in lines(of_some)[2]
    for behind in (0, 600):  # of every layer, of none
        shown = lines(Plan(**{**fields, "name": "m", "kv_per_position": 600, "kv_behind_window": behind}))[2]  # type: ignore[arg-type]
        assert "600 bytes; a sequence holds up to 1,000" in shown


def test_the_rate_is_bytes_by_time() -> None:
    """A clock that goes on 0.125 s at each look: two reads of all bytes, and six looks after the first one."""
    ticks = iter(range(1000))
    assert read_rate(np.zeros(1000, np.uint8), 1, lambda: next(ticks) * 0.125) == pytest.approx(2000 / 0.75)
