"""Adapters in the configuration, in cache salts and in the names that requests give."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.api.adapter_salt import with_adapter, without_adapter
from pipeline.api.keys import Caller
from pipeline.api.page_owner import owner_of
from pipeline.config.load import resolve
from pipeline.errors import ConfigError, ModelNotFound, ResourceError
from pipeline.models import capacity, versions
from pipeline.models.capacity import FreeMemory, MemoryPlan
from pipeline.models.collect import collect
from stages.gateway.versions.catalog import VersionCatalog

DIGESTS = st.sampled_from(["", "ab" * 32, "cd" * 32])
TENANT_SALTS = st.one_of(st.just(""), st.text(st.characters(exclude_characters="\0"), max_size=6))
REQUEST_SALTS = st.text(st.characters(exclude_characters="\0"), max_size=6)


def full(tenant: str, request: str, digest: str) -> str:
    caller = Caller("k", "t", salt=tenant)
    return with_adapter(caller.salted(request), digest)


@given(
    st.tuples(TENANT_SALTS, REQUEST_SALTS, DIGESTS),
    st.tuples(TENANT_SALTS, REQUEST_SALTS, DIGESTS),
)
def test_salts_are_equal_only_for_the_same_adapter(one: tuple[str, str, str], other: tuple[str, str, str]) -> None:
    salts = full(*one), full(*other)
    assert without_adapter(salts[0]) == (full(*one[:2], ""), one[2])
    if one[2] != other[2]:
        assert salts[0] != salts[1]
    assert owner_of(salts[0]) == owner_of(full(*one[:2], ""))


def config_of(**model: Any) -> Any:
    return resolve({"models": [{"name": "m", "path": "/m.gguf", **model}]}, {})


@pytest.mark.parametrize(
    ("adapters", "message"),
    [
        ([{"name": "a:b", "path": "/a"}], "models.0.adapters.0.name"),
        ([{"name": "", "path": "/a"}], "models.0.adapters.0.name"),
        ([{"name": "x" * 65, "path": "/a"}], "expected up to 64 letters"),
        ([{"name": "a", "path": ""}], "models.0.adapters.0.path"),
        ([{"name": "a", "path": "https://host/a.gguf"}], "expected a GGUF file, or a PEFT directory, of this machine"),
        ([{"name": "a", "path": "/a"}, {"name": "a", "path": "/b"}], "models.0.adapters.0 has this name already"),
        ([{"name": f"a{i}", "path": "/a"} for i in range(65)], "a model has at most 64 adapters"),
        ([{"name": "a", "path": "/a", "scale": 2}], "scale"),
    ],
)
def test_what_is_wrong_is_named(adapters: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config_of(adapters=adapters)


def test_names_of_requests(tmp_path: Path) -> None:
    config = config_of(adapters=[{"name": "a", "path": "/a"}, {"name": "b", "path": "/b"}])
    catalog = VersionCatalog(config, versions.initial(config), lambda table: None)
    assert catalog.resolve_adapter("m") == catalog.resolve_adapter("") == ("m", "")
    assert catalog.resolve_adapter("m:b") == ("m", "b")
    for name, message in (
        ("m:c", "model 'm' has no adapter 'c'; it has: m:a, m:b"),
        ("m:", "model 'm' has no adapter ''"),
        ("n:a", "there is no model 'n'"),
        (":a", "there is no model ':a'"),
    ):
        with pytest.raises(ModelNotFound, match=message):
            catalog.resolve_adapter(name)
    catalog.pin("m", "ab" * 32, (("a", "cd" * 32),))
    catalog.pin("m", "ab" * 32)
    assert catalog.get("m").adapters == (("a", "cd" * 32),)  # type: ignore[union-attr]


def test_prepared_adapters_that_no_version_uses_are_removed(tmp_path: Path) -> None:
    folder = tmp_path / "adapters"
    folder.mkdir()
    used, unused = (folder / f"{digest * 32}.lora" for digest in ("ab", "cd"))
    used.write_bytes(b"x")
    unused.write_bytes(b"y")
    for is_dry in (True, False):
        removed = collect(tmp_path, (), is_dry, adapters_in_use=(used.stem,))
        assert [item.path for item in removed] == [str(unused)]
    assert used.exists()
    assert not unused.exists()
    assert collect(tmp_path, (), is_dry=False, with_downloads=False) == []


def test_capacity_checks_count_adapters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STARLING_HOME", str(tmp_path))
    gguf, peft = tmp_path / "a.gguf", tmp_path / "b"
    peft.mkdir()
    gguf.write_bytes(bytes(3 << 20))
    (peft / "adapter_model.safetensors").write_bytes(bytes(2 << 20))
    (peft / "README.md").write_bytes(bytes(100))
    paths = [{"name": one.stem, "path": str(one)} for one in (gguf, peft, tmp_path / "missing")]
    config = config_of(adapters=paths)
    model = config.models[0]
    assert capacity.adapters_need(model) == capacity.plan(config, model).adapters == 5 << 20
    small = config_of(adapters=paths, adapters_mb=4)
    assert capacity.adapters_need(small.models[0]) == 4 << 20, "workers refuse more"
    arenas = capacity.need(config, model)
    assert arenas == capacity.need(config_of(), config_of().models[0]), "adapters are in no arena"
    capacity.check(config, model, FreeMemory(arenas, arenas + (5 << 20)))
    with pytest.raises(ResourceError, match="needs 5,242,880 bytes for its adapters") as raised:
        capacity.check(config, model, FreeMemory(arenas, arenas + (5 << 20) - 1))
    assert raised.value.param == "models.adapters"
    wanted = MemoryPlan(100, 50, 10, adapters=7)
    capacity.check_plan(config, "m", wanted, FreeMemory(60, 167), 0)
    with pytest.raises(ResourceError, match="needs 167 bytes .* and 7 of adapters"):
        capacity.check_plan(config, "m", wanted, FreeMemory(60, 166), 0)
