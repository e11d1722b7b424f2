"""How long an unused model stays loaded: times as requests and the configuration give them, and whose time counts."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.api.generation_fields import read_keep_alive
from pipeline.config.load import resolve
from pipeline.durations import MAX_SECONDS, seconds_of
from pipeline.errors import ConfigError, InvalidRequest
from stages.gateway.service import Service
from stages.gateway.versions.model_use import MAX_TENANTS, ModelUse


@given(st.integers(0, 99), st.integers(0, 59), st.integers(0, 59))
@settings(deadline=None)
def test_times(hours: int, minutes: int, seconds: int) -> None:
    total = 3600 * hours + 60 * minutes + seconds
    assert seconds_of(f"{hours}h{minutes}m{seconds}s") == seconds_of(total) == seconds_of(str(total)) == total
    assert seconds_of(f"-{1 + total}s") == seconds_of(-1 - total) == math.inf


@pytest.mark.parametrize("value", ["", "5 m", "m", "1e3", "5x", "1h-2m", "nan", MAX_SECONDS + 1, "367d", math.nan])
def test_wrong_times(value: Any) -> None:
    with pytest.raises(ValueError, match="never"):
        seconds_of(value)
    with pytest.raises(InvalidRequest, match="keep_alive"):
        read_keep_alive(value, "keep_alive")


@pytest.mark.parametrize("value", [True, None, [5], {}])
def test_what_is_no_time(value: Any) -> None:
    with pytest.raises(InvalidRequest, match="keep_alive"):
        read_keep_alive(value, "keep_alive")


def test_wrong_times_in_the_configuration() -> None:
    raw = {"models": [{"name": "m", "path": "/m", "keep_alive": "soon"}], "on_demand": {"keep_alive": "5 min"}}
    with pytest.raises(ConfigError) as error:
        resolve(raw, {})
    assert "on_demand.keep_alive" in error.value.message
    assert "models.0.keep_alive" in error.value.message


@given(st.lists(st.tuples(st.sampled_from("xyz"), st.floats(0, 100), st.floats(0, 10)), max_size=30))
@settings(deadline=None)
def test_a_model_stays_until_the_last_time_ends(uses: list[tuple[str, float, float]]) -> None:
    now = 0.0
    use = ModelUse(lambda: now, lambda: now)
    use.loaded("m", "m@1", 1.0)
    last: dict[str, float] = {}
    for tenant, keep_alive_s, pause_s in uses:
        now += pause_s
        use.used("m", "m@1", tenant, keep_alive_s)
        last[tenant] = now + keep_alive_s
        assert use.end("m") == max(last.values())
        assert use.idle_since("m") == now


def test_the_tenants_of_a_model_are_bounded() -> None:
    use = ModelUse(lambda: 0.0, lambda: 0.0)
    for number in range(MAX_TENANTS + 10):
        use.used("m", "m@1", str(number), number)
    assert len(use._holds["m"]) == MAX_TENANTS
    assert use.end("m") == MAX_TENANTS + 9


@pytest.mark.parametrize(
    ("keys", "enabled", "preload", "stays"),
    [
        (False, True, True, False),
        (True, True, True, True),
        (True, True, False, False),
        (False, False, True, True),
    ],
)
def test_who_may_shorten_the_configured_time(
    tmp_path: Path, keys: bool, enabled: bool, preload: bool, stays: bool
) -> None:
    server = {name: str(tmp_path / name) for name in ("run_dir", "arena_dir", "state_dir")}
    (tmp_path / "m.gguf").touch()
    names = {"m": preload, "other": True}
    models = [{"name": name, "path": str(tmp_path / "m.gguf"), "preload": names[name]} for name in names]
    auth = {"api_keys": [{"key": f"sk-{one}", "tenant": one} for one in ("ann", "bob")] if keys else []}
    config = resolve({"models": models, "server": server, "auth": auth, "on_demand": {"enabled": enabled}}, {})
    service = Service(config, lambda frame: True, lambda frame: True, clock=lambda: 5.0)
    if not preload:
        service.catalog.switch(service.catalog.begin(config.models[0], "change", "demand", 1e10).id)
    assert service.catalog.serving("m")
    service.on_demand.used("m", "ann", 0.0)
    assert service.use.end("m") == (math.inf if stays else 5.0)
    service.on_demand.used("m", "ann", math.inf)
    assert service.use.end("m") == math.inf


def test_what_requests_asked_of_one_version_does_not_hold_for_the_next() -> None:
    use = ModelUse(lambda: 5.0, lambda: 5.0)
    use.used("m", "m@1", "x", 0.0)
    use.unloaded("m")
    use.asked("m")  # a request that ended after its model was unloaded
    use.loaded("m", "m@2", 10.0)
    assert (use.end("m"), use.last_used("m")) == (15.0, 5.0)
    use.used("m", "m@3", "x", 1.0)
    assert use.end("m") == 6.0
