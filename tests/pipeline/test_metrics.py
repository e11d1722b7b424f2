"""Metrics from a stage's dictionaries to the text of /metrics."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from pipeline.config import paths
from pipeline.config.schema import Config, ServerConfig
from pipeline.ipc.poll_loop import PollLoop
from pipeline.observe import exposition
from pipeline.observe.exemplars import Exemplars, Source
from pipeline.observe.metric_families import FAMILIES
from pipeline.observe.metrics import IDLE_INTERVAL_S, IDLE_MAX_AGE_S, INTERVAL_S, MAX_SERIES, OTHER, Metrics
from pipeline.observe.phase_times import PhaseTimes
from pipeline.observe.rate import Rate


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return Config(server=ServerConfig(run_dir=str(tmp_path / "run"), arena_dir=str(tmp_path / "shm")))


@pytest.fixture
def directory(config: Config) -> Path:
    found = paths.arena_dir(config)
    found.mkdir(parents=True)
    paths.run_dir(config).mkdir()
    return found


Sample = tuple[str, tuple[tuple[str, str], ...]]  # name, labels


def scrape(config: Config, own: Metrics | None = None) -> dict[Sample, float]:
    text = exposition.prepare(config, own)().decode()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_tenants_are_added_up_where_they_are_hidden(config: Config, directory: Path) -> None:
    own = Metrics("gateway", None)
    for tenant, tokens in (("a", 3.0), ("b", 4.0)):
        own.add("starling_tenant_tokens_total", tenant, amount=tokens)
    assert scrape(config, own)["starling_tenant_tokens_total", (("tenant", "a"),)] == 3
    hidden = exposition.prepare(config, own, shows_tenants=False)().decode()
    assert 'starling_tenant_tokens_total{tenant="all"} 7.0' in hidden
    assert 'tenant="a"' not in hidden
    assert scrape(config, own)["starling_tenant_tokens_total", (("tenant", "b"),)] == 4


def test_public_names_exist() -> None:
    asked = {
        "starling_requests_total": ("endpoint", "status"),
        "starling_request_duration_seconds": ("endpoint",),
        "starling_tokens_generated_total": None,
        "starling_tokens_per_second": None,
        "starling_kv_cache_bytes": ("state",),
        "starling_kv_cache_evictions_total": None,
        "starling_queue_depth": ("model",),
        "starling_batch_size": None,
    }
    for name, labels in asked.items():
        assert labels is None or FAMILIES[name].labels == labels
    assert {name: FAMILIES[name].kind for name in asked if FAMILIES[name].kind == "histogram"} == {
        "starling_request_duration_seconds": "histogram",
        "starling_batch_size": "histogram",
    }


@pytest.mark.parametrize("family", FAMILIES.values(), ids=lambda family: family.name)
def test_families_are_well_formed(family: exposition.Family) -> None:
    assert family.name.startswith("starling_")
    assert family.name.endswith("_total") == (family.kind == "counter")
    assert family.help.endswith(".")
    assert bool(family.bounds) == (family.kind == "histogram")
    assert list(family.bounds) == sorted(set(family.bounds))


def test_snapshots_are_merged_with_the_gateways_metrics(config: Config, directory: Path) -> None:
    scheduler = Metrics("scheduler", directory)
    scheduler.add("starling_tokens_generated_total", "m", amount=12)
    scheduler.set("starling_queue_depth", 3, "m")
    for value in (1, 2, 3, 200):
        scheduler.observe("starling_batch_size", value, "m")
    scheduler.write()
    gateway = Metrics("gateway", directory)
    gateway.add("starling_requests_total", "/v1/generate", "200")
    gateway.add("starling_requests_total", "/v1/generate", "200")
    found = scrape(config, gateway)
    assert found["starling_tokens_generated_total", (("model", "m"),)] == 12
    assert found["starling_queue_depth", (("model", "m"),)] == 3
    assert found["starling_requests_total", (("endpoint", "/v1/generate"), ("status", "200"))] == 2
    assert found["starling_batch_size_count", (("model", "m"),)] == 4
    assert found["starling_batch_size_sum", (("model", "m"),)] == 206
    for bound, below in (("1.0", 1), ("2.0", 2), ("4.0", 3), ("128.0", 3), ("+Inf", 4)):
        assert found["starling_batch_size_bucket", (("le", bound), ("model", "m"))] == below


def test_series_of_several_stages_are_added_up(config: Config, directory: Path) -> None:
    for name, amount in (("worker-a", 2.0), ("worker-b", 3.0)):
        stage = Metrics(name, directory)
        stage.add("starling_kv_cache_evictions_total", amount=amount)
        stage.observe("starling_kv_cache_restore_seconds", amount)
        stage.write()
    found = scrape(config)
    assert found["starling_kv_cache_evictions_total", ()] == 5
    assert found["starling_kv_cache_restore_seconds_count", ()] == 2
    assert found["starling_kv_cache_restore_seconds_sum", ()] == 5


def test_a_successor_continues_the_counters(config: Config, directory: Path) -> None:
    """Counters and histograms never go back: a stage is killed twice and then stopped in order."""
    tokens, sizes = ("starling_tokens_generated_total", (("model", "m"),)), "starling_batch_size"
    total = 0.0
    for life in range(1, 4):
        stage = Metrics("scheduler", directory)
        stage.set("starling_queue_depth", life, "m")
        assert scrape(config).get(tokens, 0.0) == total, "before the successor has written"
        stage.publish()
        assert scrape(config).get(tokens, 0.0) == total, "before the successor has counted"
        for count in (1.0, 5.0):  # a total that the stage maintains, from 0 in each life
            stage.set("starling_tokens_generated_total", count, "m")
            stage.observe(sizes, 2 * count, "m")
            stage.publish()
            assert scrape(config)[tokens] == total + count
        total += 5.0
        assert scrape(config)[f"{sizes}_count", (("model", "m"),)] == 2 * life
        assert scrape(config)[f"{sizes}_sum", (("model", "m"),)] == 12 * life
        assert scrape(config)["starling_queue_depth", (("model", "m"),)] == life, "gauges are not added"
        if life == 2:
            stage.close()
    assert scrape(config)[tokens] == total


def test_what_was_scraped_is_there_for_the_gateways_successor(config: Config, directory: Path) -> None:
    for answered in (1, 2, 3):
        gateway = Metrics("gateway", directory)
        gateway.add("starling_requests_total", "/v1/generate", "200")
        found = scrape(config, gateway)
        assert found["starling_requests_total", (("endpoint", "/v1/generate"), ("status", "200"))] == answered


def test_a_peak_stays_over_many_lives(config: Config, directory: Path) -> None:
    """Whatever lower values come after it, and while no process measures it."""
    peak = ("starling_context_tokens_max", (("model", "m"),))
    for value, highest in ((30, 30), (70, 70), (50, 70), (90, 90)):
        gateway = Metrics("gateway", directory)
        gateway.raise_to("starling_context_tokens_max", value, "m")
        gateway.raise_to("starling_context_tokens_max", 1, "m")
        gateway._ticks += 1  # as if its process had ended
        gateway.publish()
        assert scrape(config)[peak] == highest


def test_label_sets_are_bounded_over_many_lives(directory: Path) -> None:
    lives = 3
    for life in range(lives):
        metrics = Metrics("scheduler", directory)
        for number in range(MAX_SERIES):
            metrics.add("starling_tenant_tokens_total", f"{life}-{number}")
        metrics.publish()
    series = metrics.snapshot().families["starling_tenant_tokens_total"]
    assert len(series) == MAX_SERIES + 1
    assert sum(one.value for one in series) == MAX_SERIES * lives


def test_every_family_is_exported_and_counters_begin_at_zero(config: Config, directory: Path) -> None:
    text = exposition.prepare(config)().decode()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert {f"{name}_total" if one.type == "counter" else name for name, one in families.items()} == set(FAMILIES)
    found = scrape(config)
    assert found["starling_kv_cache_evictions_total", ()] == 0
    assert found["starling_kv_cache_restore_seconds_count", ()] == 0
    assert ("starling_requests_in_flight", ()) not in found, "a gauge of a process that does not run"


@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(0, 100)), max_size=20))
def test_phases_add_up_to_the_whole(steps: list[tuple[str, float]]) -> None:
    now = 10.0
    times = PhaseTimes(lambda: now)
    for phase, seconds in steps:
        times.enter(phase)
        now += seconds
    times.end()
    now += 5.0
    times.end()
    assert set(times.seconds) == {phase for phase, _ in steps}
    for name in times.seconds:
        assert times.seconds[name] == pytest.approx(sum(s for phase, s in steps if phase == name))


def test_gauges_of_a_dead_stage_are_dropped(config: Config, directory: Path) -> None:
    stage = Metrics("kv", directory)
    stage.set("starling_kv_cache_bytes", 10, "resident")
    stage.add("starling_kv_cache_evictions_total")
    stage._ticks += 1  # as if its process had been another one
    stage.write()
    found = scrape(config)
    assert found["starling_kv_cache_evictions_total", ()] == 1
    assert ("starling_kv_cache_bytes", (("state", "resident"),)) not in found


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@example(b"\x94\xa1\xff\x01\x01\x80")  # a name that is not UTF-8
@example(b"\x91" * 100_000)  # nested beyond the interpreter's limit
@given(st.binary(max_size=100))
def test_an_invalid_snapshot_is_skipped(config: Config, directory: Path, invalid: bytes) -> None:
    (directory / "a.metrics").write_bytes(b"")
    (directory / "b.metrics").write_bytes(b"\x94\xa1b\x01\x01\x81\xa7unknown\x90")
    (directory / "c.metrics").write_bytes(invalid)
    (directory / "kv.metrics").write_bytes(invalid)  # of a predecessor
    stage = Metrics("kv", directory)
    stage.add("starling_kv_cache_evictions_total")
    stage.write()
    assert scrape(config)["starling_kv_cache_evictions_total", ()] == 1


def test_label_values_of_any_kind_survive(config: Config, directory: Path) -> None:
    name = 'quo"te\\ back\nline é'
    own = Metrics("gateway", None)
    own.set("starling_queue_depth", 1, name)
    assert scrape(config, own)["starling_queue_depth", (("model", name),)] == 1


def test_label_sets_are_bounded() -> None:
    metrics = Metrics("scheduler", None)
    for i in range(MAX_SERIES * 3):
        metrics.add("starling_tenant_tokens_total", f"tenant-{i}")
    series = {s.labels: s.value for s in metrics.snapshot().families["starling_tenant_tokens_total"]}
    assert len(series) == MAX_SERIES + 1
    assert series[OTHER,] == MAX_SERIES * 2
    assert sum(series.values()) == MAX_SERIES * 3


def test_wrong_names_and_labels_raise() -> None:
    metrics = Metrics("kv", None)
    with pytest.raises(KeyError):
        metrics.add("starling_no_such_thing_total")
    with pytest.raises(ValueError, match="has the labels"):
        metrics.add("starling_kv_cache_evictions_total", "extra")


@given(st.lists(st.floats(0, 300), max_size=50))
def test_a_histogram_of_the_stage_is_converted(values: list[float]) -> None:
    bounds = FAMILIES["starling_batch_size"].bounds
    counts = [0] * (len(bounds) + 1)
    kept, poured = Metrics("a", None), Metrics("b", None)
    for value in values:
        kept.observe("starling_batch_size", value, "m")
        counts[next((i for i, bound in enumerate(bounds) if value <= bound), len(bounds))] += 1
    poured.put("starling_batch_size", bounds, counts, sum(values), "m")
    if values:
        one, other = (m.snapshot().families["starling_batch_size"][0] for m in (kept, poured))
        assert one.counts == other.counts
        assert one.value == pytest.approx(other.value)


def test_stages_report_readiness_and_resource_use(config: Config) -> None:
    loop = PollLoop("kv", config)
    loop.ready = True
    loop.bind("scheduler-kv", lambda peer, frame: None)
    loop.tick()
    found = scrape(config)
    kv = ("stage", "kv")
    assert found["starling_stage_up", (kv,)] == 1
    assert found["starling_stage_ready", (kv,)] == 1
    hung = exposition.prepare(config, unready={"kv"})().decode()
    assert 'starling_stage_up{stage="kv"} 1.0' in hung
    assert 'starling_stage_ready{stage="kv"} 0.0' in hung
    assert found["starling_process_resident_bytes", (kv,)] > 1e6
    assert found["starling_process_open_fds", (kv,)] > 3
    assert found["starling_process_private_bytes", (kv,)] > 1e6
    assert found["starling_process_io_bytes_total", (("direction", "written"), kv)] >= 0
    assert found["starling_frames_dropped_total", (("edge", "scheduler-kv"), kv)] == 0
    assert found["starling_heartbeats_total", (("edge", "scheduler-kv"), kv)] == 0
    assert found["starling_edge_bytes_total", (("direction", "sent"), ("edge", "scheduler-kv"), kv)] == 0
    loop.close()
    assert ("starling_stage_up", (kv,)) not in scrape(config)
    missing = exposition.prepare(config, unready={"kv"})().decode()
    assert 'starling_stage_up{stage="kv"} 0.0' in missing
    assert 'starling_stage_ready{stage="kv"} 0.0' in missing


def test_a_gauge_may_be_set_to_a_truth_value(config: Config, directory: Path) -> None:
    stage = Metrics("kv", directory)
    stage.set("starling_fleet_leader", True)
    stage.add("starling_kv_cache_evictions_total")
    stage.publish()
    found = scrape(config)
    assert (found["starling_fleet_leader", ()], found["starling_kv_cache_evictions_total", ()]) == (1, 1)


def test_a_full_disk_keeps_the_previous_snapshot(tmp_path: Path) -> None:
    now = [0.0]
    stage = Metrics("kv", tmp_path, clock=lambda: now[0])
    stage.write()
    before = (tmp_path / "kv.metrics").read_bytes()
    (tmp_path / ".kv.metrics.new").mkdir()  # nothing can be written there
    now[0] = 10.0
    stage.add("starling_kv_cache_evictions_total")
    stage.write()
    assert (tmp_path / "kv.metrics").read_bytes() == before


def test_an_idle_stage_writes_when_a_value_has_changed(tmp_path: Path) -> None:
    now = 100.0
    metrics = Metrics("kv", tmp_path, clock=lambda: now)
    files: list[tuple[float, int]] = []  # when, and which

    def live(seconds: float) -> list[float]:
        nonlocal now
        begun, files[:] = now, []
        while now < begun + seconds:
            now += 0.1
            metrics.write()
            which = metrics.path.stat().st_ino if metrics.path is not None else 0
            if not files or files[-1][1] != which:
                files.append((now - begun, which))
        return [when for when, _ in files[1:]]

    metrics.write()
    assert live(3.5) == pytest.approx([INTERVAL_S * i for i in range(1, 4)], abs=0.35)
    metrics.is_idle = True
    assert len(live(2.2 * IDLE_MAX_AGE_S)) == 2, "what the process uses"
    metrics.add("starling_kv_cache_evictions_total")
    assert live(IDLE_MAX_AGE_S / 2)[0] <= IDLE_INTERVAL_S + 0.1
    metrics.is_idle = False
    assert len(live(5.0)) in (4, 5)


def test_a_rate_is_over_its_window() -> None:
    now = [0.0]
    rate = Rate(5.0, lambda: now[0])
    assert rate.value() == 0
    for _ in range(100):  # 10 events a second for 10 s
        now[0] += 0.1
        rate.add(1)
    assert rate.value() == pytest.approx(10, rel=0.1)
    now[0] += 2.5
    assert rate.value() == pytest.approx(5, rel=0.2)
    now[0] += 10
    assert rate.value() == 0


def test_what_is_counted_while_a_text_is_rendered_is_in_the_next_one(config: Config, directory: Path) -> None:
    """It is rendered in a thread, from copies."""
    own, exemplars = Metrics("gateway", directory), Exemplars(lambda: 5.0)
    name = "starling_request_duration_seconds"

    def count(seconds: float, number: int) -> None:
        own.observe(name, seconds, "/v1/generate")
        own.add("starling_tenant_tokens_total", f"tenant-{number}")
        exemplars.add(name, seconds, Source("request_id", f"req-{number}"), "/v1/generate")

    count(0.2, 0)
    text = exposition.prepare(config, own, exemplars=exemplars)
    expected = text()
    count(0.2, 1)
    count(0.3, 2)
    assert text() == expected
    assert b"req-0" in expected
    assert b"req-2" in exposition.prepare(config, own, exemplars=exemplars)()
