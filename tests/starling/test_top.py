"""`starling top`: rates from the metrics of stages, in 80 columns, and the same figures as JSON."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.config import paths
from pipeline.config.load import load
from pipeline.config.schema import Config
from pipeline.ipc.poll_loop import PollLoop
from pipeline.observe import status as records
from pipeline.observe.metrics import Metrics
from starling.activity import MAX_TENANTS, Activity, ModelActivity, Reading, compare, read
from starling.cli import status
from starling.cli.status import Row
from starling.cli.top import Report, lines, measure

MODEL = "m"


class Scheduler:
    """Counts as a scheduler does. `publish` is what a scrape sees."""

    def __init__(self, directory: Path) -> None:
        self.metrics = Metrics("scheduler", directory)

    def work(self, output: float, prompt: float, cached: float, batches: list[int], tenant: str = "a") -> None:
        self.metrics.add("starling_tokens_generated_total", MODEL, amount=output)
        self.metrics.add("starling_prompt_tokens_total", MODEL, "computed", amount=prompt)
        self.metrics.add("starling_prompt_tokens_total", MODEL, "cached", amount=cached)
        self.metrics.add("starling_tenant_tokens_total", tenant, amount=output + prompt)
        for size in batches:
            self.metrics.add("starling_steps_total", MODEL)
            self.metrics.observe("starling_batch_size", size, MODEL)
        self.metrics.set("starling_running_sequences", len(batches), MODEL)
        self.metrics.set("starling_queue_depth", 7, MODEL)
        self.metrics.publish()


@pytest.fixture
def running(home: Path) -> Iterator[Config]:
    """The record of a stage that runs, which is this process, and its pages."""
    config = load()
    loop = PollLoop("kv", config)
    loop.ready = True
    for state, pages in (("free", 50), ("cached", 30), ("leased", 20)):
        loop.metrics.set("starling_kv_cache_pages", pages, MODEL, state)
    loop.tick()
    yield config
    loop.close()
    shutil.rmtree(paths.arena_dir(config))


def reading(directory: Path, at: float) -> Reading:
    return read(directory, lambda: at)


def test_rates_are_means_between_two_readings(tmp_path: Path) -> None:
    scheduler = Scheduler(tmp_path)
    scheduler.work(1000, 500, 0, [1, 1])
    before = reading(tmp_path, 10.0)
    scheduler.work(80, 40, 20, [4, 4, 2, 2], "b")
    found = compare(before, reading(tmp_path, 14.0))
    (model,) = found.models
    assert (model.output_tokens_per_s, model.prompt_tokens_per_s, model.cached_prompt_tokens_per_s) == (20, 10, 5)
    assert (model.steps_per_s, model.batch, model.running, model.queued) == (1, 3, 4, 7)
    assert [(one.tenant, one.tokens_per_s, one.tokens) for one in found.tenants] == [("b", 30, 120), ("a", 0, 1500)]
    (idle,) = compare(reading(tmp_path, 14.0), reading(tmp_path, 15.0)).models
    assert (idle.output_tokens_per_s, idle.steps_per_s, idle.batch) == (0, 0, 0)


def test_a_server_that_was_started_again_has_no_negative_rates(tmp_path: Path) -> None:
    Scheduler(tmp_path).work(1000, 500, 0, [8] * 9)
    before = reading(tmp_path, 10.0)
    for path in tmp_path.iterdir():
        path.unlink()
    Scheduler(tmp_path).work(30, 0, 0, [2])
    (model,) = compare(before, reading(tmp_path, 11.0)).models
    assert (model.output_tokens_per_s, model.steps_per_s, model.batch) == (30, 1, 2)


def test_tenants_are_bounded(tmp_path: Path) -> None:
    scheduler = Scheduler(tmp_path)
    before = reading(tmp_path, 0.0)
    for number in range(100):
        scheduler.work(number, 0, 0, [], f"t{number}")
    found = compare(before, reading(tmp_path, 1.0))
    assert [one.tenant for one in found.tenants] == [f"t{number}" for number in range(99, 99 - MAX_TENANTS, -1)]


def test_a_report_of_running_stages(running: Config) -> None:
    scheduler = Scheduler(paths.arena_dir(running))

    def work(seconds: float) -> None:
        scheduler.work(100 * seconds, 0, 0, [2])

    first, second = measure(running, 2.0, 2, work)
    for report in (first, second):
        (model,) = report.activity.models
        assert model.kv_pages == {"leased": 20, "cached": 30, "free": 50}
        assert model.output_tokens_per_s > 0 and model.batch == 2
        text = "\n".join(lines(report))
        assert "leased 20  cached 30  free 50  of 100 pages" in text
        assert next(line for line in text.splitlines() if line.startswith("kv")).endswith("ready")
    assert first.stages[0].stage == "gateway" and first.stages[0].pid is None


def test_a_stage_that_is_stopped_is_not_ready(running: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGSTOP, also of its supervisor, so that the record in the run directory stays as it was."""
    (record,) = records.read_all(paths.run_dir(running))
    assert record.ready
    with subprocess.Popen(["sleep", "1000"]) as child:
        monkeypatch.setattr(records, "read_all", lambda _: [msgspec.structs.replace(record, pid=child.pid)])
        states = []
        for number, change in ((signal.SIGSTOP, os.WSTOPPED), (signal.SIGCONT, os.WCONTINUED)):
            child.send_signal(number)
            os.waitid(os.P_PID, child.pid, change)
            (row,) = (row for row in status.look(running, lambda _: None) if row.stage == "kv")
            states.append((row.state, row.reason))
        child.kill()
    assert states == [("not ready", status.STOPPED), ("ready", "")]
    assert len(status.STOPPED) <= 78  # in the table it is indented


def test_the_command_prints_plain_text_and_json(running: Config) -> None:
    Scheduler(paths.arena_dir(running)).work(5, 5, 5, [1])
    command = [sys.executable, "-m", "starling", "top", "--interval", "0.2"]
    plain = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (plain.returncode, plain.stderr) == (0, "")
    assert "\x1b" not in plain.stdout and max(map(len, plain.stdout.splitlines())) <= 80
    assert "MODEL" in plain.stdout and "TENANT" in plain.stdout and "STAGE" in plain.stdout
    done = subprocess.run([*command, "--json", "--count", "2"], capture_output=True, text=True, timeout=120)
    reports = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(reports) == 2
    assert reports[1]["activity"]["models"][0]["model"] == MODEL
    assert {row["stage"] for row in reports[1]["stages"]} >= {"kv", "gateway"}


def test_a_narrow_terminal_loses_no_figure() -> None:
    model = ModelActivity(MODEL * 40, 1.0, 2.0, 3.0, 4.0, 1.5, 5, 6, {"free": 1})
    row = Row("worker-" + MODEL * 40, "ready", "", 1, 1, 60.0, 0, 1.0, 1 << 20, 1)
    report = Report(0.0, Activity(1.0, 0, [model], []), [row])
    wide, narrow = (list(lines(report, columns)) for columns in (80, 60))
    assert max(map(len, narrow)) <= 60
    assert narrow[2].split() == wide[2].split()
    assert narrow[3].split()[1:] == wide[3].split()[1:]  # all but the name
    assert narrow[-1].endswith("ready")


def test_without_a_server(home: Path) -> None:
    for args, shown in (((), "no stage is running\n"), (("--json",), None)):
        command = [sys.executable, "-m", "starling", "top", "--interval", "0.2", *args]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert (done.returncode, done.stderr) == (1, "")
        assert shown is None or done.stdout == shown
        if shown is None:
            assert json.loads(done.stdout)["activity"]["models"] == []


COUNTS = st.floats(0, 1e15)
NAMES = st.text(min_size=1, max_size=60)


@given(st.lists(st.tuples(NAMES, COUNTS, COUNTS), max_size=4), st.integers(0, 10**6))
def test_no_line_is_longer_than_80_columns(rows: list[tuple[str, float, float]], in_flight: int) -> None:
    def merged(factor: float) -> Reading:
        metrics = Metrics("scheduler", None)
        metrics.set("starling_requests_in_flight", in_flight)
        for name, output, prompt in rows:
            metrics.set("starling_tokens_generated_total", output * factor, name)
            metrics.set("starling_prompt_tokens_total", prompt * factor, name, "computed")
            metrics.set("starling_running_sequences", in_flight, name)
            metrics.set("starling_queue_depth", in_flight, name)
            metrics.set("starling_kv_cache_pages", 10**9, name, "free")
            metrics.set("starling_tenant_tokens_total", output * factor, name)
        families = {name: {one.labels: one for one in many} for name, many in metrics.snapshot().families.items()}
        return Reading(factor, families)

    report = Report(1e9, compare(merged(1.0), merged(2.0)), [_ready()])
    assert max(map(len, lines(report))) <= 80
    assert all(line.isprintable() for line in lines(report))


def _ready() -> Row:
    return Row("kv", "ready", pid=1)
