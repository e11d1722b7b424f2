"""The gateway keeps the vocabularies of loaded versions and the most recently used ones of unloaded versions."""

from __future__ import annotations

import pytest

from pipeline.config.schema import Config, ModelConfig
from pipeline.protocol import messages as m
from stages.gateway.requests.readers import FanOutSink
from stages.gateway.requests.state import Outcome
from stages.gateway.requests.token_bytes import TokenBytes
from stages.gateway.service import Service
from tests.gateway.request_states import make_state


@pytest.fixture
def service() -> Service:
    return Service(Config(models=(ModelConfig(name="m", path="m.gguf"),)), lambda frame: True, lambda frame: True)


def describe(service: Service, instance: str, tokenizer: str, bare: bool = False) -> None:
    table = {} if bare else {"pieces": b"x", "piece_ends": b"\1\0\0\0"}
    described = m.Described("", instance, "ab" * 32, 1, 64, (), True, tokenizer=tokenizer, **table)
    service.loaded.on_description(instance, described)


def answer(service: Service, instance: str, tokenizer: str) -> None:
    request = make_state(model="m", version=instance, tokenizer=tokenizer, sequences=())
    request.sink = FanOutSink()
    service.relay.open(request)
    service.relay.complete(request)
    assert request.outcome is Outcome.FINISHED


def test_a_vocabulary_that_was_never_used_goes_with_its_version(service: Service) -> None:
    describe(service, "m", "a")
    answer(service, "m", "a")
    for instance, tokenizer in (("m@1", "b"), ("m@2", "c"), ("m@3", "d")):
        describe(service, instance, tokenizer)
    service.loaded.forget("m@1")
    service.loaded.forget("m@2")
    assert list(service.relay.vocabularies) == ["a", "d"]
    service.loaded.forget("m")
    assert list(service.relay.vocabularies) == ["a", "d"], "answers in it can still be read"


def test_the_most_recently_used_vocabularies_stay(service: Service) -> None:
    for i in range(5):
        describe(service, f"m@{i}", f"v{i}")
        answer(service, f"m@{i}", f"v{i}")
    answer(service, "m@0", "v0")
    for i in range(5):
        service.loaded.forget(f"m@{i}")
    assert list(service.relay.vocabularies) == ["v4", "v0"]


def test_versions_share_a_vocabulary(service: Service) -> None:
    describe(service, "m", "a")
    vocabulary = service.relay.vocabularies["a"]
    describe(service, "m@1", "a", bare=True)
    service.loaded.forget("m")
    assert service.relay.vocabularies["a"] is vocabulary
    assert service.loaded.described["m@1"].pieces == b""


def test_a_description_without_its_vocabulary_is_dropped(service: Service) -> None:
    describe(service, "m", "a")
    service.loaded.forget("m")
    describe(service, "m@1", "a", bare=True)
    assert "m@1" not in service.loaded.described
    describe(service, "m@1", "a")
    assert service.loaded.described["m@1"].tokenizer == "a"
    assert service.relay.vocabularies["a"]


def test_a_reader_that_waits_for_a_vocabulary_receives_it(service: Service) -> None:
    waited = [service.relay.vocabularies.setdefault(name, TokenBytes()) for name in ("a", "b", "c", "d")]
    describe(service, "m", "z")
    service.loaded.forget("m")
    describe(service, "m@1", "a")
    assert waited[0].get(0) == b"x"
