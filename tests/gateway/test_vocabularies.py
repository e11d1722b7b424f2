"""Which vocabularies the gateway keeps: those of its versions, and those that answers were written in last."""

from __future__ import annotations

import pytest

from pipeline.config.schema import Config, ModelConfig
from pipeline.protocol import messages as m
from stages.gateway.endpoints.generation_request import GenerationRequest
from stages.gateway.requests.event_cursor import FanOutSink
from stages.gateway.requests.state import Outcome, RequestState
from stages.gateway.requests.token_bytes import TokenBytes
from stages.gateway.service import Service


@pytest.fixture
def service() -> Service:
    return Service(Config(models=(ModelConfig(name="m", path="m.gguf"),)), lambda frame: True, lambda frame: True)


def describe(service: Service, instance: str, tokenizer: str, bare: bool = False) -> None:
    table = {} if bare else {"pieces": b"x", "piece_ends": b"\1\0\0\0"}
    described = m.Described("", instance, "ab" * 32, 1, 64, (), True, tokenizer=tokenizer, **table)
    service.on_description(instance, described)


def answer(service: Service, instance: str, tokenizer: str) -> None:
    request = RequestState("req-1", GenerationRequest(endpoint="generate", model="m"), "m", "t", 1e9, instance=instance)
    request.tokenizer = tokenizer
    request.sink = FanOutSink()
    service.relay.open(request)
    service.relay.complete(request)
    assert request.outcome is Outcome.FINISHED


def test_versions_that_never_answered_leave_nothing(service: Service) -> None:
    describe(service, "m", "a")
    answer(service, "m", "a")
    for instance, tokenizer in (("m@1", "b"), ("m@2", "c"), ("m@3", "d")):
        describe(service, instance, tokenizer)
    service.forget("m@1")
    service.forget("m@2")
    assert list(service.relay.pieces) == ["a", "d"]
    service.forget("m")
    assert list(service.relay.pieces) == ["a", "d"], "answers in it are still kept"


def test_the_vocabularies_used_last_are_kept(service: Service) -> None:
    for i in range(5):
        describe(service, f"m@{i}", f"v{i}")
        answer(service, f"m@{i}", f"v{i}")
    answer(service, "m@0", "v0")
    for i in range(5):
        service.forget(f"m@{i}")
    assert list(service.relay.pieces) == ["v4", "v0"]


def test_versions_share_a_vocabulary(service: Service) -> None:
    describe(service, "m", "a")
    pieces = service.relay.pieces["a"]
    describe(service, "m@1", "a", bare=True)
    service.forget("m")
    assert service.relay.pieces["a"] is pieces
    assert service.described["m@1"].pieces == b""


def test_a_vocabulary_that_went_while_its_version_was_described_is_asked_for_again(service: Service) -> None:
    describe(service, "m", "a")
    service.forget("m")
    describe(service, "m@1", "a", bare=True)
    assert "m@1" not in service.described
    describe(service, "m@1", "a")
    assert service.described["m@1"].tokenizer == "a"
    assert service.relay.pieces["a"]


def test_a_reader_that_waits_for_a_vocabulary_gets_it(service: Service) -> None:
    waited = [service.relay.pieces.setdefault(name, TokenBytes()) for name in ("a", "b", "c", "d")]
    describe(service, "m", "z")
    service.forget("m")
    describe(service, "m@1", "a")
    assert waited[0].get(0) == b"x"
