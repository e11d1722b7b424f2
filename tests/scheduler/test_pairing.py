"""Pairs of models and draft models follow the loaded versions and their workers."""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec
import pytest

from pipeline.config.schema import ModelConfig
from pipeline.models.versions import ModelVersion, State, VersionTable
from stages.scheduler.core.settings import Settings
from stages.scheduler.core.version_runner import VersionRunner
from stages.scheduler.draft.pairing import DraftPairs
from stages.scheduler.policy.core_sharing import Claim

LARGE = ModelConfig(name="large", path="l", draft_model="small")
SMALL = ModelConfig(name="small", path="s")


def version(settings: ModelConfig, serial: int = 0, state: State = "serving") -> ModelVersion:
    return ModelVersion(name=settings.name, serial=serial, settings=settings, state=state)


def versions(*loaded: ModelVersion) -> VersionTable:
    return VersionTable("", 9, loaded)


def runner(name: str, vocabulary: str = "v", cores: frozenset[int] = frozenset()) -> VersionRunner:
    made = VersionRunner(
        Settings(name, 4), Path("/none"), 16, 0, 1.0, 0.0, lambda _: 1.0, lambda *_: True, lambda _: True
    )
    made.vocabulary, made.cores = vocabulary, cores
    return made


def draft_of(of: VersionRunner) -> object:
    link = of.engine.proposer.link
    return link.pool if link is not None else None


def test_the_serving_version_drafts() -> None:
    pairs = DraftPairs()
    runners = {name: runner(name) for name in ("large", "small", "small@1")}
    old, new = version(SMALL), version(SMALL, 1, "loading")
    pairs.update(versions(version(LARGE), old, new), runners)
    assert draft_of(runners["large"]) is runners["small"].engine.drafts
    assert draft_of(runners["small"]) is draft_of(runners["small@1"]) is None
    old, new = (msgspec.structs.replace(one, state=state) for one, state in ((old, "retiring"), (new, "serving")))
    pairs.update(versions(version(LARGE), old, new), runners)
    assert draft_of(runners["large"]) is runners["small@1"].engine.drafts
    pairs.update(versions(version(LARGE), version(SMALL, 1, "retiring")), runners)
    assert draft_of(runners["large"]) is None


def test_a_different_vocabulary_is_logged_once_and_an_unknown_one_is_waited_for(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pairs = DraftPairs()
    runners = {"large": runner("large"), "small": runner("small", "other")}
    there = versions(version(LARGE), version(SMALL))
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            pairs.update(there, runners)
            assert draft_of(runners["large"]) is None
    assert len(caplog.records) == 1
    for vocabulary, is_pair in (("", False), ("v", True), ("", False)):
        runners["small"].vocabulary = vocabulary
        pairs.update(there, runners)
        assert (draft_of(runners["large"]) is not None) == is_pair
    assert len(caplog.records) == 1


@pytest.mark.parametrize(("cores", "is_allowed"), [(frozenset({0}), False), (frozenset({3}), True)])
def test_no_model_drafts_on_cores_that_a_third_model_wants(cores: frozenset[int], is_allowed: bool) -> None:
    pairs = DraftPairs()
    pair = {"large": runner("large", cores=frozenset({1, 2})), "small": runner("small", cores=frozenset({0, 1}))}
    for one in pair.values():
        one.reason, one.engine.worker.is_attached, one.engine.leases.is_up = "", True, True
    runners = {**pair, "third": runner("third", cores=cores)}
    pairs.update(versions(version(LARGE), version(SMALL)), runners)
    own = [Claim(name, one.cores, 0.0, True) for name, one in pair.items()]
    pairs.update_allowed(own, runners)
    assert runners["large"].engine.proposer.is_allowed
    pairs.update_allowed([*own, Claim("third", cores, 0.0, False)], runners)
    assert runners["large"].engine.proposer.is_allowed == is_allowed
    runners["small"].groups[0].stalled_s = 2.0
    pairs.update_allowed(own, runners)
    assert not runners["large"].engine.proposer.is_allowed, "the worker of the draft model is stalled"
