"""The benchmark of the KV cache: it runs, reports every figure, and bookkeeping stays under its bound."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from starling.bench.response import ClientRequest, Response
from tools.bench.kv.command import main
from tools.bench.kv.over_http import first_ms, ratio, spread


def test_a_first_token_is_the_first_bytes_of_its_stream() -> None:
    response = Response(ClientRequest({}), 10.0)
    response.head_at = 10.25
    assert first_ms(response) == pytest.approx(250.0)


def test_figures_are_medians_with_their_range() -> None:
    assert spread([3.0, 1.0, 2.0]) == {"median": 2.0, "low": 1.0, "high": 3.0}
    assert ratio([1.0, 2.0, 3.0], [4.0, 8.0, 100.0]) == 0.25


@pytest.mark.slow
def test_it_runs(tmp_path: Path) -> None:
    done = CliRunner().invoke(main, ["--rounds", "1", "--no-http", "--directory", str(tmp_path)])
    assert done.exit_code == 0, done.output
    figures = json.loads(done.output.splitlines()[-1])["kv"]
    assert {
        "acquire_4096_us",
        "acquire_4096_evicting_us",
        "acquire_4096_all_cached_ms",
        "restore_2048_ms",
        "restore_2048_from_disk_ms",
        "sequential_read_same_bytes_ms",
    } <= set(figures)
    assert figures["bookkeeping_10000_prefixes_mb"] < 50  # memory, not time: the bound holds on any machine
    assert list(tmp_path.iterdir()) == []
