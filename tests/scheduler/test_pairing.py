"""Which model drafts for which, as versions and workers come and go."""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec
import pytest

from pipeline.config.schema import ModelConfig
from pipeline.models.versions import ModelVersion, State, VersionTable
from stages.scheduler.core.engine import Settings
from stages.scheduler.core.model_version import Host
from stages.scheduler.draft.pairing import Pairs
from stages.scheduler.policy.core_sharing import Claim

LARGE = ModelConfig(name="large", path="l", draft_model="small")
SMALL = ModelConfig(name="small", path="s")


def instance(settings: ModelConfig, serial: int = 0, state: State = "serving") -> ModelVersion:
    return ModelVersion(name=settings.name, serial=serial, settings=settings, state=state)


def version_table(*instances: ModelVersion) -> VersionTable:
    return VersionTable("", 9, instances)


def host(name: str, vocabulary: str = "v", cores: frozenset[int] = frozenset()) -> Host:
    made = Host(Settings(name, 4), Path("/none"), 16, 0, 1.0, 0.0, lambda _: 1.0, lambda *_: True, lambda _: True)
    made.vocabulary, made.cores = vocabulary, cores
    return made


def draft_of(of: Host) -> object:
    link = of.engine.drafts.link
    return link.companions if link is not None else None


def test_the_version_that_serves_drafts() -> None:
    pairs = Pairs()
    hosts = {name: host(name) for name in ("large", "small", "small@1")}
    old, new = instance(SMALL), instance(SMALL, 1, "loading")
    pairs.look(version_table(instance(LARGE), old, new), hosts)
    assert draft_of(hosts["large"]) is hosts["small"].engine.companions
    assert draft_of(hosts["small"]) is draft_of(hosts["small@1"]) is None
    old, new = (msgspec.structs.replace(one, state=state) for one, state in ((old, "retiring"), (new, "serving")))
    pairs.look(version_table(instance(LARGE), old, new), hosts)
    assert draft_of(hosts["large"]) is hosts["small@1"].engine.companions
    pairs.look(version_table(instance(LARGE), instance(SMALL, 1, "retiring")), hosts)
    assert draft_of(hosts["large"]) is None


def test_another_vocabulary_is_said_once_and_an_unknown_one_is_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    pairs = Pairs()
    hosts = {"large": host("large"), "small": host("small", "other")}
    there = version_table(instance(LARGE), instance(SMALL))
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            pairs.look(there, hosts)
            assert draft_of(hosts["large"]) is None
    assert len(caplog.records) == 1
    for vocabulary, is_pair in (("", False), ("v", True), ("", False)):
        hosts["small"].vocabulary = vocabulary
        pairs.look(there, hosts)
        assert (draft_of(hosts["large"]) is not None) == is_pair
    assert len(caplog.records) == 1


@pytest.mark.parametrize(("cores", "is_allowed"), [(frozenset({0}), False), (frozenset({3}), True)])
def test_nobody_drafts_on_cores_that_a_third_model_wants(cores: frozenset[int], is_allowed: bool) -> None:
    pairs = Pairs()
    pair = {"large": host("large", cores=frozenset({1, 2})), "small": host("small", cores=frozenset({0, 1}))}
    for one in pair.values():
        one.reason, one.engine.is_attached, one.engine.leases.is_up = "", True, True
    hosts = {**pair, "third": host("third", cores=cores)}
    pairs.look(version_table(instance(LARGE), instance(SMALL)), hosts)
    own = [Claim(name, one.cores, 0.0, True) for name, one in pair.items()]
    pairs.mind(own, hosts)
    assert hosts["large"].engine.drafts.is_allowed
    pairs.mind([*own, Claim("third", cores, 0.0, False)], hosts)
    assert hosts["large"].engine.drafts.is_allowed == is_allowed
    hosts["small"].stands_for_s = 2.0
    pairs.mind(own, hosts)
    assert not hosts["large"].engine.drafts.is_allowed, "its worker stands"
