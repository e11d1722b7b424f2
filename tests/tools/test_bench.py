"""The benchmark's report (table, JSON, plots), and a run on a tiny model."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import numpy as np
import pytest
from click.testing import CliRunner

from stages.worker.kernels.buffer_sizes import PHASES
from tools.bench.http.first_byte import first_byte
from tools.bench.offline import shapes
from tools.bench.offline.bandwidth import read_bandwidth
from tools.bench.offline.command import chosen_works, decode_tokens, instances, main, works
from tools.bench.offline.plots import can_plot, write_plots
from tools.bench.offline.results import Figure, Rate, Report, Work, machine
from tools.bench.phases import attention, runner, sampler, sampler_shapes, shared_prefix, static_cycles, steps
from tools.tiny_gguf import SHAPES, write_model

DECODE = Work("decode", batch=1, cached=16)


@pytest.fixture
def report() -> Report:
    figures = [
        Figure(Work("prefill", tokens=512), Rate.of([3000.0, 2000.0, 2500.0]), Rate.of([500.0])),
        Figure(DECODE, Rate(400, 390, 410), None, read_gb_s=40.0, bandwidth_share=0.8),
        Figure(Work("decode", batch=4, cached=16), Rate(800, 790, 810), Rate(100, 90, 110), read_gb_s=20.0),
    ]
    return Report(machine([0]), {"name": "m"}, figures, {"isa": "vnni"})


def test_rates_are_medians_with_range() -> None:
    assert Rate.of([3.0, 1.0, 2.0, 10.0]) == Rate(2.5, 1.0, 10.0)
    assert str(Rate(1234.4, 1000, 2000)) == "1,234 (1,000-2,000)"


def test_the_table_leaves_unmeasured_cells_empty(report: Report) -> None:
    lines = report.lines()
    assert lines[1].split() == ["prefill", "512", "2,500", "(2,000-3,000)", "500", "(500-500)", "5.00"]
    assert lines[2].split()[-4:] == ["(390-410)", "40.0", "80", "%"]


def test_further_engines_have_columns_and_the_best_of_all_counts(report: Report) -> None:
    report.peers = {"one": {}, "two": {}}
    report.figures[0].peers = {"one": Rate.of([1000.0])}
    report.figures[2].peers = {"one": Rate.of([50.0]), "two": Rate.of([400.0])}
    lines = report.lines()
    assert "one tokens/s" in lines[0] and "two tokens/s" in lines[0] and "ratio to best" in lines[0]
    assert [f.ratio_to_best for f in report.figures] == [2.5, None, 2.0]
    assert lines[1].split()[-1] == "2.50" and lines[3].split()[-2:] == ["2.00", "20.0"]


def test_json_is_one_line_with_every_figure(report: Report) -> None:
    raw = report.as_json()
    assert b"\n" not in raw
    value = json.loads(raw)
    assert value["figures"][0]["work"] == {"kind": "prefill", "tokens": 512, "batch": 1}
    assert [f["ratio"] for f in value["figures"]] == [5.0, None, 8.0]


def test_plots(report: Report, tmp_path: Path) -> None:
    if not can_plot():  # matplotlib is in the group `peers`
        with pytest.raises(ImportError):
            write_plots(report, tmp_path, "m, Zen 5, 1 May 2026")
        return
    paths = write_plots(report, tmp_path, "m, Zen 5, 1 May 2026")
    assert [p.name for p in paths] == ["batch.svg", "prompt.svg", "roofline.svg"]
    assert all(p.read_text().startswith("<?xml") and "m, Zen 5, 1 May 2026" in p.read_text() for p in paths)


def test_plots_without_matplotlib_are_refused_before_measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tools.bench.offline.command.can_plot", lambda: False)
    result = CliRunner().invoke(main, ["--plots", "there"])
    assert result.exit_code == 2
    assert "--plots needs matplotlib" in result.output
    assert not Path("there").exists()


def test_the_table_of_shapes_has_the_share_of_the_bandwidth_and_what_disturbed_it() -> None:
    found = []
    for is_compared in (False, True):
        baseline = Rate(5.0, 4.0, 6.0) if is_compared else None
        figures = [
            Figure(Work("decode", batch=4, cached=16), Rate(30, 30, 30), read_gb_s=9.9),
            Figure(DECODE, Rate(10.0, 9.5, 11.0), baseline, read_gb_s=18.2),
        ]
        figures[1].compare(1.82e9, [9.5, 10.0, 11.0], [19e9, 20e9, 20.5e9])
        watch = {"disturbed": int(is_compared), "worst": "stolen 3 %"}
        report = Report(machine([0]) | watch, {"name": "m", "weights_mb": 1822.0}, figures, {})
        found.append(json.loads(report.as_json()))
    head, alone, compared = (line.split("  ") for line in shapes.table(found))
    assert [cell.strip() for cell in alone if cell] == ["m", "1,822", "10.0 (9.5-11.0)", "18.2", "91 % (91-98)", "0"]
    assert compared[-1].strip() == "1 (stolen 3 %)" and "2.00" in "".join(compared)
    assert "of bandwidth" in "".join(head)


def test_a_share_of_the_bandwidth_is_that_of_one_round() -> None:
    figure = Figure(DECODE, Rate(10.0, 5.0, 20.0))
    figure.compare(1e9, [5.0, 10.0, 20.0], [10e9, 20e9, 25e9])  # the machine was slow, then fast
    assert (figure.bandwidth_share, figure.bandwidth_shares) == (0.5, (0.5, 0.8))


def test_unknown_shapes_are_refused_before_anything_runs() -> None:
    result = CliRunner().invoke(shapes.main, ["--shapes", "llama-1b,huge"])
    assert result.exit_code == 2 and "shape 'huge' is none of small, odd" in result.output
    result = CliRunner().invoke(shapes.main, ["--formats", "Q9"])
    assert result.exit_code == 2 and "format 'Q9' is none of" in result.output


def test_little_of_a_large_model_is_quick() -> None:
    assert {work.title for work in works(True, is_large=True)} == {"prefill 64", "decode, batch 1", "decode, batch 4"}
    assert len(works(False, is_large=True)) == len(works(False)) > len(works(True))
    assert decode_tokens(DECODE, 100 << 20) == 64
    assert decode_tokens(DECODE, 1 << 30) == 10
    assert decode_tokens(DECODE, 8 << 30) == 8


def test_lists_of_works_can_be_asked_for() -> None:
    assert chosen_works("", "", "") == []
    titles = [work.title for work in chosen_works("64, 512", "4", "2048")]
    assert titles == ["prefill 64", "prefill 512", "decode, batch 4", "decode, batch 1, 2,048 cached"]
    with pytest.raises(click.BadParameter, match="'0' is no number above 0"):
        chosen_works("", "1,0", "")


@pytest.mark.parametrize(
    ("prompts", "batches", "cached", "expected"),
    [
        ("64", "1,4", "", [(4, 128)]),
        ("64,512", "1,4", "2048", [(4, 128), (1, 2176)]),
        ("512,4096", "", "", [(1, 4224)]),
        ("", "8", "", [(8, 128)]),
    ],
)
def test_an_engine_has_an_instance_for_the_planned_work_alone(
    prompts: str, batches: str, cached: str, expected: list[tuple[int, int]]
) -> None:
    """Each may copy the weights."""
    assert instances(chosen_works(prompts, batches, cached)) == expected


class _Streams(BaseHTTPRequestHandler):
    """Streams as /v1/generate does; refuses a prompt of one token."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        refused = len(body["prompt"]) == 1
        self.send_response(429 if refused else 200)
        self.end_headers()
        self.wfile.write(b"busy" if refused else b': hello\n\ndata: {"index": 0}\n\ndata: [DONE]\n\n')

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def streaming_url() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), _Streams) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_time_to_the_first_byte(streaming_url: str) -> None:
    found = first_byte(streaming_url, repeats=3)
    assert found is not None
    assert 0 <= found["low_ms"] <= found["median_ms"] <= found["high_ms"]
    with pytest.raises(RuntimeError, match="429 busy"):
        first_byte(streaming_url, prompt_tokens=1)


def test_without_a_server_there_is_no_figure() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound but not listening: refuses connections
        assert first_byte(f"http://127.0.0.1:{unused.getsockname()[1]}") is None


@pytest.mark.slow
def test_the_bandwidth_is_plausible_and_the_affinity_is_restored() -> None:
    cores = sorted(os.sched_getaffinity(0))[:2]
    assert 1e8 < read_bandwidth(1 << 20, cores, seconds=0.01, rounds=2) < 1e13
    assert sorted(os.sched_getaffinity(0))[:2] == cores


@pytest.mark.slow
def test_it_runs_on_a_tiny_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the compiled kernels of the developer's cache and a separate model directory."""
    cache = tmp_path / "cache"
    cache.mkdir()
    monkeypatch.setattr("pipeline.config.paths.models_dir", lambda: tmp_path / "models")
    monkeypatch.setattr("pipeline.config.paths.cache_dir", lambda: cache)
    before = os.sched_getaffinity(0)
    arguments = [
        "--shape",
        "small",
        "--quick",
        "--rounds",
        "1",
        "--no-baseline",
        "--no-http",
        "--url",
        "http://127.0.0.1:9",
    ]
    result = CliRunner().invoke(main, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    value = json.loads(result.output.splitlines()[-1])
    assert {f["work"]["kind"] for f in value["figures"]} == {"prefill", "decode"}
    assert all(f["candidate"]["median"] > 0 for f in value["figures"])
    assert value["baseline"] is None
    assert os.sched_getaffinity(0) == before


@pytest.mark.slow
def test_phases_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A flat distribution makes the sampler work; twice as many FMAs take about twice as long."""
    result = CliRunner().invoke(sampler.main, ["--vocabulary", "4096", "--repeats", "5"], catch_exceptions=False)
    found = json.loads(result.output.splitlines()[-1])["us"]
    assert 0 < found["greedy"] < found["top-p 0.9 of a flat distribution"]
    arguments = ["--vocabulary", "65536", "--repeats", "5", "--only", "peaked", "--only", "flat", "-p", "0.5"]
    arguments += ["--case", "top-p", "--case", "typical-p, penalties", "--case", "XTC"]
    result = CliRunner().invoke(sampler_shapes.main, arguments, catch_exceptions=False)
    shapes_us = json.loads(result.output.splitlines()[-1])["us"]
    assert shapes_us.keys() == {"top-p", "typical-p, penalties", "XTC"} and shapes_us["XTC"]["flat"]["us"][0] > 0
    for of_case in (shapes_us["top-p"], shapes_us["typical-p, penalties"]):
        assert 0 < of_case["peaked"]["p 0.5"][0] < of_case["flat"]["p 0.5"][0]  # one candidate, and thousands
    arguments = ["--contexts", "64,2048", "--heads", "64", "--groups", "2", "--repeats", "3"]
    result = CliRunner().invoke(attention.main, arguments, catch_exceptions=False)
    report = json.loads(result.output.splitlines()[-1])
    short, long = report["rows"]
    assert long["query_us"] > short["query_us"] > 0
    assert 0 < long["of_peak"] < 1.1 and report["peak_gmac_s"] > 1


@pytest.mark.slow
def test_attention_is_timed_with_the_cache_that_is_named(tmp_path: Path) -> None:
    sizes = {}
    for kv_type in ("f16", "f32", "int8"):
        folder = tmp_path / kv_type
        folder.mkdir()
        with runner.candidate_of(SHAPES["wide"], folder, [0], 1, 8192, kv_type):
            sizes[kv_type] = (folder / "runner.kv").stat().st_size
    assert sizes["int8"] < sizes["f16"] < sizes["f32"]


@pytest.mark.slow
def test_each_phase_of_a_step_is_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.config.paths.models_dir", lambda: tmp_path / "models")
    shape = SHAPES["small"]._replace(context_length=4096)
    path = write_model(tmp_path / "m.gguf", shape, "Q4_0")
    result = CliRunner().invoke(steps.main, ["--gguf", str(path), "--repeats", "9"], catch_exceptions=False)
    *_, last = result.output.splitlines()
    found = json.loads(last)
    assert list(found) == ["batch 1", "batch 16", "batch 32", "batch 1, 2,048 cached", "prefill 512"]
    for work, us in found.items():
        rates = set() if work.startswith("prefill") else {"kv_bytes", "kv_gb_s", "read_gb_s"}
        assert set(us) == {*PHASES, "all"} | rates
        assert 0 < us["attention"] < us["all"]
    assert found["batch 32"]["kv_bytes"] == 32 * found["batch 1"]["kv_bytes"] > 0
    assert found["batch 1, 2,048 cached"]["attention"] > found["batch 1"]["attention"]
    assert found["batch 1"]["keys"] == 0 < found["prefill 512"]["keys"]


def test_a_phase_is_not_shorter_for_what_others_computed_during_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of 4 ms, of which attention takes 3: other programs have the core for 36 ms, before, in and after it."""
    place, timing = PHASES.index("attention"), np.zeros((1, 4), np.int64)
    counts = np.zeros(len(PHASES))
    group = SimpleNamespace(tables=[SimpleNamespace(phases=counts)])
    candidate: Any = SimpleNamespace(
        runner=SimpleNamespace(group=group, steps=SimpleNamespace(timing=timing), step=0),
    )
    used_ns = 0
    monkeypatch.setattr(runner.time, "thread_time_ns", lambda: used_ns)

    def measured(in_attention_ms: float, in_others_ms: float) -> float:
        def step() -> None:
            nonlocal used_ns
            used_ns += 4_000_000
            counts[place], counts[place - 1] = 3 + in_attention_ms, 1 + in_others_ms
            timing[0, 2] = round(1e6 * counts.sum())

        return runner.phase_us(candidate, "attention", step, 1)

    assert [measured(0, 0), measured(0, 36)] == [3000, 3000]
    assert 3000 < measured(36, 0) < 4000


@pytest.mark.slow
def test_shared_prefixes_are_timed_beside_their_bounds() -> None:
    arguments = ["--rows", "16", "--shared", "2048", "--heads", "2x4x64", "--repeats", "3", "--rounds", "3"]
    result = CliRunner().invoke(shared_prefix.main, arguments, catch_exceptions=False)
    (row,) = json.loads(result.output.splitlines()[-1])
    lowest = {way: row[way][1] for way in shared_prefix.WAYS}
    assert 0 < lowest["block"] < lowest["apart"]
    assert lowest["shared"] < lowest["apart"]


def test_tile_instructions_are_replaced_by_their_loads_and_stores() -> None:
    loop = [
        "tdpbsud\t%tmm4, %tmm2, %tmm0",
        "tileloadd\t(%r8,%r15), %tmm3",
        "tileloadd\t(%rdx,%r12), %tmm5",
        "vpaddd\t(%rbx), %zmm17, %zmm3",
        "tilestored\t%tmm1, (%rdx,%r12)",
        "jne\t.LBB0_3",
    ]
    load, stored, kept = "prefetcht0 (%rax)", "movq %rax, (%rax)", loop[3]
    assert static_cycles.without_tiles(loop, False) == [load] * 24 + [kept] + [stored] * 16
    assert static_cycles.without_tiles(loop, True) == [load] * 20 + [kept] + [stored] * 16


def test_assembly_is_cut_at_labels_and_jumps() -> None:
    two = ["tilestored %tmm0, (%rax)", "tilestored %tmm1, (%rax)"]
    lines = ["\t.text", "main:", "\tnop", "\tjne\t.L1 # back", "\tret", ".L1:", *two]
    text = "\n".join(lines)
    assert [block for block in static_cycles.basic_blocks(text) if block] == [["nop", "jne\t.L1"], ["ret"], two]
    assert static_cycles.main_loop(text) == two


def test_without_llvm_mca_nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    result = CliRunner().invoke(static_cycles.main, [])
    assert result.exit_code == 2
    assert "llvm-19" in result.output
