"""The self-test of a version: all of it the first time, two tokens of a version that has passed it before.

The gateway's service is real; tokenizer and scheduler answer at once, with the tokens that `Stages.model` gives.
"""

from __future__ import annotations

import asyncio
import math
from array import array
from pathlib import Path

import msgspec
import pytest

from pipeline.config.load import resolve
from pipeline.errors import InferenceError, ModelDamaged
from pipeline.models.versions import ModelVersion
from pipeline.protocol import messages as m
from stages.gateway.service import Service
from stages.gateway.versions.passed_tests import MAX_TESTS, PassedTests, ProbeToken
from stages.gateway.versions.self_test import MAX_TOKENS, SHORT_MAX_TOKENS, SHORT_TOKENS, SelfTest

DIGEST, KERNELS = "aa" * 32, "kernels-1"
PROMPT = tuple(range(3, 30))
SHORT, WHOLE = (SHORT_TOKENS, SHORT_MAX_TOKENS), (len(PROMPT), MAX_TOKENS)  # tokens of the prompt, and of the answer


class Stages:
    """What the gateway talks to. `asked`: tokens of each prompt and of its answer."""

    def __init__(self, home: Path) -> None:
        server = {"run_dir": str(home / "run"), "state_dir": str(home / "state")}
        config = resolve({"models": [{"name": "m", "path": "/m.gguf"}], "server": server}, {})
        self.path = home / "self-tests.json"
        self.service = Service(config, self._to_scheduler, self._to_tokenizer, self_tests_path=self.path)
        self.asked: list[tuple[int, int]] = []
        self.offset = 0  # of the tokens that the model gives
        self.logprob = -0.5
        self.damaged_answers = 1 << 30  # so many give `offset` and `logprob`, those after them what they were at first
        self.fails_after = 1 << 30  # answers; then the scheduler refuses
        self.settings, self.performance = config.models[0], config.performance
        self.ranks = 2

    def _to_tokenizer(self, frame: m.Frame) -> bool:
        if isinstance(frame, m.Encode):
            asyncio.get_running_loop().call_soon(self.service.on_tokenizer, m.Encoded(frame.id, PROMPT, b""))
        return True

    def _to_scheduler(self, frame: m.Frame) -> bool:
        if isinstance(frame, m.Submit):
            asyncio.get_running_loop().call_soon(self._answer, frame)
        return True

    def _answer(self, frame: m.Submit) -> None:
        prompt = array("i", frame.prompt)
        self.asked.append((len(prompt), frame.max_tokens))
        if len(self.asked) > self.fails_after:
            self.service.on_scheduler(m.Rejected(frame.sequence, "OVERLOADED", "no room"))
            return
        is_damaged = len(self.asked) <= self.damaged_answers
        offset, logprob = (self.offset, self.logprob) if is_damaged else (0, -0.5)
        tokens = tuple((len(prompt) + offset + i) % 9 for i in range(frame.max_tokens))
        logprobs = tuple(m.Logprob(logprob if i else -0.5) for i in range(len(tokens)))
        answer = m.SequenceTokens(frame.sequence, 0, tokens, logprobs, "length")
        self.service.on_scheduler(m.Tokens(frame.model, 1, [answer]))

    def version(self, serial: int = 1, kernels: str = KERNELS, digest: str = DIGEST) -> ModelVersion:
        """A version that is ready to be tested."""
        version = ModelVersion(name="m", serial=serial, settings=self.settings, digest=digest, state="loading")
        catalog = self.service.catalog
        others = tuple(one for one in catalog.all if one.id != version.id)
        catalog.version_table = msgspec.structs.replace(catalog.version_table, versions=(*others, version))
        ends = array("I", range(1, 10)).tobytes()
        described = m.Described("", version.id, digest, 9, 4096, (), True, pieces=b"abcdefghi", piece_ends=ends)
        self.service.loaded.on_description(version.id, described)
        state = m.ModelState(version.id, digest, True, "", 0, 0, 8, kernels=kernels, ranks=self.ranks)
        self.service.on_scheduler(m.SchedulerState([state]))
        return version

    def check(self, version: ModelVersion, reference: ModelVersion | None = None) -> list[tuple[int, int]]:
        """Test a version; what was asked for it."""

        async def test() -> None:
            service = self.service
            passed = PassedTests(self.path)  # as another gateway reads them
            await SelfTest(
                service.loaded,
                service.tokenizer,
                service.relay,
                service.embedder,
                service.clock,
                passed,
                self.performance,
            ).check(version, reference)

        self.asked.clear()
        asyncio.run(test())
        return list(self.asked)


@pytest.fixture
def stages(tmp_path: Path) -> Stages:
    return Stages(tmp_path)


def test_a_version_that_has_passed_before_computes_a_prompt_and_a_decode_step(stages: Stages) -> None:
    assert stages.check(stages.version()) == [WHOLE, SHORT]
    assert stages.check(stages.version(2)) == [SHORT]


@pytest.mark.parametrize("change", [{"kernels": "kernels-2"}, {"digest": "bb" * 32}])
def test_another_file_and_other_kernels_get_the_whole_test(stages: Stages, change: dict[str, str]) -> None:
    stages.check(stages.version())
    assert stages.check(stages.version(2, **change)) == [WHOLE, SHORT]
    assert stages.check(stages.version(3)) == [SHORT]


def test_other_settings_get_the_whole_test(stages: Stages) -> None:
    stages.check(stages.version())
    stages.settings = msgspec.structs.replace(stages.settings, kv_type="q8")
    assert stages.check(stages.version(2)) == [WHOLE, SHORT]
    stages.ranks = 3
    assert stages.check(stages.version(3)) == [WHOLE, SHORT]
    stages.performance = msgspec.structs.replace(stages.performance, use_mmap=False)
    assert stages.check(stages.version(4)) == [WHOLE, SHORT]
    stages.settings = msgspec.structs.replace(stages.settings, max_sequence_length=64)
    assert stages.check(stages.version(5)) == [WHOLE, SHORT]
    assert stages.check(stages.version(6)) == [SHORT]


def test_without_the_name_of_its_kernels_nothing_is_remembered(stages: Stages) -> None:
    for serial in (1, 2):
        assert stages.check(stages.version(serial, kernels="")) == [WHOLE]


@pytest.mark.parametrize(("name", "value"), [("offset", 1), ("logprob", -0.5000001)])
def test_another_token_or_logprob_twice_is_damage(stages: Stages, name: str, value: float) -> None:
    """Of which the whole test would find nothing: its values are finite."""
    stages.check(stages.version())
    original = getattr(stages, name)
    setattr(stages, name, value)
    for serial in (2, 3):
        with pytest.raises(ModelDamaged, match="starling verify m"):
            stages.check(stages.version(serial))
        assert stages.asked == [SHORT, SHORT]
    setattr(stages, name, original)
    assert stages.check(stages.version(4)) == [SHORT], "what was recorded has not been replaced"


def test_other_tokens_once_are_repeated(stages: Stages) -> None:
    stages.check(stages.version())
    stages.offset, stages.damaged_answers = 1, 1
    assert stages.check(stages.version(2)) == [SHORT, SHORT]


def test_a_passed_test_stays_passed_when_its_record_cannot_be_made(stages: Stages) -> None:
    stages.fails_after = 1
    assert stages.check(stages.version()) == [WHOLE, SHORT]
    stages.fails_after = 1 << 30
    assert stages.check(stages.version(2)) == [WHOLE, SHORT]


def test_a_logprob_that_is_not_finite_is_refused_in_both(stages: Stages) -> None:
    stages.logprob = math.nan
    with pytest.raises(InferenceError, match="the self-test of m@1 requested 8 tokens"):
        stages.check(stages.version())
    stages.logprob = -0.5
    stages.check(stages.version())
    stages.logprob = math.nan
    with pytest.raises(InferenceError, match="the self-test of m@2 requested 2 tokens"):
        stages.check(stages.version(2))


def test_a_version_beside_one_of_the_same_file_gets_the_whole_test(stages: Stages) -> None:
    first = stages.version()
    stages.check(first)
    assert stages.check(stages.version(2), first) == [WHOLE, WHOLE]


def test_what_is_remembered_is_bounded_and_survives_damage(tmp_path: Path) -> None:
    path = tmp_path / "self-tests.json"
    passed = PassedTests(path)
    for i in range(MAX_TESTS + 1):
        passed.add(str(i), (ProbeToken(i, -0.1),))
    passed.add("1", (ProbeToken(7, -0.7),))  # too late
    again = PassedTests(path)
    assert again.find("0") is None
    assert [again.find(str(i)) for i in range(1, MAX_TESTS + 1)] == [
        (ProbeToken(i, -0.1),) for i in range(1, MAX_TESTS + 1)
    ]
    for content in (b"{", b'{"1": [1]}', b'{"1": [1, "x"]}', bytes(1 << 20)):
        path.write_bytes(content)
        assert PassedTests(path).find("1") is None
    PassedTests(tmp_path / "no" / "directory.json").add("1", (ProbeToken(1, -0.1),))  # only a warning
