"""Quota levels survive a restart; a damaged record affects only its own tenant."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from pipeline.api import quota_file
from pipeline.api.quota_file import RECORD_BYTES, Level, QuotaFile, bucket_key
from pipeline.api.quotas import Quotas
from pipeline.config.schema import RateLimitsConfig
from pipeline.errors import RateLimited
from tests.gateway.server import LONG_MINUTE, MakeServer, Server


class Restarts:
    """Consecutive gateways with one quota file. `now` drives both clocks; the monotonic one restarts with a gateway."""

    def __init__(self, path: Path, **limits: int) -> None:
        self.path = path
        self.limits = limits
        self.now = 1_700_000_000.0
        self.begin()

    def begin(self, **limits: int) -> None:
        begun = self.now
        self.file = QuotaFile(self.path)
        config = RateLimitsConfig(**(limits or self.limits))
        self.quotas = Quotas(config, lambda: self.now - begun, self.file, lambda: self.now)

    def wait_s(self, tenant: str, tokens: int) -> float:
        try:
            self.quotas.take_prompt(tenant, tokens)
        except RateLimited as refused:
            return refused.retry_after_s or 0.0
        return 0.0


def test_levels_survive_a_restart_and_refill_with_time(tmp_path: Path) -> None:
    gateway = Restarts(tmp_path / "q", tokens_per_minute=600, requests_per_minute=2)
    assert gateway.wait_s("a", 400) == 0
    gateway.quotas.charge_output("a", 500)
    for _ in range(2):
        gateway.quotas.take_request("a")
    gateway.begin()
    assert gateway.wait_s("a", 100) == pytest.approx(40.0)
    assert gateway.wait_s("b", 600) == 0
    with pytest.raises(RateLimited):
        gateway.quotas.take_request("a")
    # Buckets refill while no gateway runs.
    gateway.now += 39.0
    gateway.begin()
    assert gateway.wait_s("a", 100) == pytest.approx(1.0)
    gateway.now += 1.0
    gateway.begin()
    assert gateway.wait_s("a", 100) == 0


def test_a_changed_limit_keeps_the_used_amount(tmp_path: Path) -> None:
    gateway = Restarts(tmp_path / "q", tokens_per_minute=600)
    assert gateway.wait_s("a", 300) == 0
    gateway.begin(tokens_per_minute=1200)
    assert gateway.wait_s("a", 901) == pytest.approx(0.05, abs=0.01)
    assert gateway.wait_s("a", 900) == 0


def test_a_clock_set_back_refills_nothing(tmp_path: Path) -> None:
    gateway = Restarts(tmp_path / "q", tokens_per_minute=600)
    assert gateway.wait_s("a", 600) == 0
    gateway.now -= 86_400
    gateway.begin()
    assert gateway.wait_s("a", 60) == pytest.approx(6.0)
    gateway.now += 6
    assert gateway.wait_s("a", 60) == 0


def test_a_damaged_record_is_ignored(tmp_path: Path) -> None:
    gateway = Restarts(tmp_path / "q", tokens_per_minute=600)
    for tenant in "ab":
        assert gateway.wait_s(tenant, 600) == 0
    raw = bytearray((tmp_path / "q").read_bytes())
    raw[RECORD_BYTES + 20] ^= 1
    (tmp_path / "q").write_bytes(raw)
    gateway.begin()
    assert gateway.wait_s("a", 600) == 0
    assert gateway.wait_s("b", 600) > 0


@pytest.mark.parametrize(
    "raw", [b"", b"x", b"STRLQUO2" + bytes(200), b"STRLQUO1", b"STRLQUO1" + bytes(77), bytes(1 << 20)]
)
def test_any_file_content_is_accepted(tmp_path: Path, raw: bytes) -> None:
    (tmp_path / "q").write_bytes(raw)
    gateway = Restarts(tmp_path / "q", tokens_per_minute=600)
    assert gateway.wait_s("a", 600) == 0
    gateway.begin()
    assert gateway.wait_s("a", 600) > 0


def test_the_file_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quota_file, "MAX_RECORDS", 4)
    file = QuotaFile(tmp_path / "q")
    keys = [bucket_key("tokens", f"tenant-{n}") for n in range(10)]
    for n, key in enumerate(keys):
        file.put(key, Level(600, 0.0, float(n)))
        file.put(keys[0], Level(600, 1.0, float(n)))  # used after each of the others
    again = QuotaFile(tmp_path / "q")
    assert set(again.levels) == {keys[0], *keys[7:]}
    assert (tmp_path / "q").stat().st_size == 5 * RECORD_BYTES


def test_after_a_disk_error_quotas_stay_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("STARLING_FAULTS", "disk:enospc@quotas")
    gateway = Restarts(tmp_path / "q", tokens_per_minute=600)
    for _ in range(3):
        assert gateway.wait_s("a", 200) == 0
    assert gateway.wait_s("a", 200) > 0
    assert len([record for record in caplog.records if record.levelname == "ERROR"]) == 1


def test_levels_survive_a_kill(make_server: MakeServer) -> None:
    limits = {"requests_per_minute": 3, "tokens_per_minute": 100_000}
    server: Server = make_server(rate_limits=limits, preamble=LONG_MINUTE)
    server.wait_ready()
    body = {"prompt": "x", "max_tokens": 5}
    assert [server.post("/v1/generate", body).status for _ in range(4)] == [200, 200, 200, 429]
    server.kill_and_restart()
    server.wait_ready()
    refused = server.post("/v1/generate", body)
    assert (refused.status, refused.error["code"]) == (429, "RATE_LIMITED")


def test_a_level_that_cannot_be_is_damage(tmp_path: Path) -> None:
    path = tmp_path / "q"
    key = bucket_key("tokens", "a")
    for number, level in enumerate(
        [
            Level(100, float("nan"), 1.0),
            Level(100, -1e300, 1.0),
            Level(100, 1.0, float("inf")),
            Level(100, 1.0, -1e300),
            Level(1 << 62, 1.0, 1.0),
        ]
    ):
        file = QuotaFile(path)
        file.put(bytes([number]) * 16 if number else key, level)
        file.close()
    reopened = QuotaFile(path)
    reopened.close()
    assert not reopened.levels


def test_of_two_records_of_a_bucket_the_newer_one_is_kept(tmp_path: Path) -> None:
    """The other one must not come back when the bucket is charged by a clock that was set back."""
    path = tmp_path / "q"
    a, b = bucket_key("tokens", "a"), bucket_key("tokens", "b")
    with closing(QuotaFile(path)) as file:
        file.put(a, Level(100, 7.0, 2000.0))
        file.put(b, Level(100, 8.0, 3000.0))
    raw = path.read_bytes()
    path.write_bytes(raw + raw[RECORD_BYTES : 2 * RECORD_BYTES])  # a again
    with closing(QuotaFile(path)) as file:
        assert dict(file.levels) == {a: Level(100, 7.0, 2000.0), b: Level(100, 8.0, 3000.0)}
        file.put(a, Level(100, 1.0, 1000.0))
    with closing(QuotaFile(path)) as file:
        assert file.levels[a] == Level(100, 1.0, 1000.0)
