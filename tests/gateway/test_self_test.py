"""The self-test of a version: all of it the first time, one token of a version that has passed it before.

The gateway's service is real; tokenizer and scheduler answer at once, with the tokens that `Stages.model` gives.
"""

from __future__ import annotations

import asyncio
import math
import time
from array import array
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from pipeline.config.load import resolve
from pipeline.errors import InferenceError, ModelDamaged, ModelUnavailable, StarlingError
from pipeline.models import versions
from pipeline.models.versions import ModelVersion
from pipeline.protocol import messages as m
from stages.gateway.service import Service
from stages.gateway.versions.passed_tests import MAX_TESTS, PassedTests, ProbeToken
from stages.gateway.versions.self_test import MAX_TOKENS, SHORT_MAX_TOKENS, SHORT_TOKENS, SelfTest

DIGEST, KERNELS = "aa" * 32, "kernels-1"
PROMPT = tuple(range(3, 30))
WAIT_S = 60.0
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
        self.damaged_after = 0  # answers before give what `offset` and `logprob` were at first
        self.damaged_answers = 1 << 30  # so many give `offset` and `logprob`, those after them what they were at first
        self.fails_after = self.fails_until = 1 << 30  # answers; between them the scheduler refuses
        self.answers_after = 0  # questions; those before get no answer
        self.settings, self.performance = config.models[0], config.performance
        self.ranks = 2
        self.attachment = self.answered_by = 7  # of the workers that are attached, and of those that answer

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
        if len(self.asked) <= self.answers_after:
            return
        if self.fails_after < len(self.asked) <= self.fails_until:
            self.service.on_scheduler(m.Rejected(frame.sequence, "OVERLOADED", "no room"))
            return
        is_damaged = self.damaged_after < len(self.asked) <= self.damaged_answers
        offset, logprob = (self.offset, self.logprob) if is_damaged else (0, -0.5)
        tokens = tuple((len(prompt) + offset + i) % 9 for i in range(frame.max_tokens))
        logprobs = tuple(m.Logprob(logprob) for _ in tokens)
        answer = m.SequenceTokens(frame.sequence, 0, tokens, logprobs, "length", attachment=self.answered_by)
        self.service.on_scheduler(m.Tokens(frame.model, 1, [answer]))

    def version(
        self, serial: int = 1, kernels: str = KERNELS, digest: str = DIGEST, revision: str = ""
    ) -> ModelVersion:
        """A version that is ready to be tested."""
        version = self.described(serial, digest, revision)
        self.set_ready(version, kernels)
        return version

    def described(self, serial: int = 1, digest: str = DIGEST, revision: str = "") -> ModelVersion:
        """A version whose worker still starts."""
        until = time.time() + WAIT_S
        version = ModelVersion(
            name="m", serial=serial, settings=self.settings, digest=digest, state="loading", until=until
        )
        catalog = self.service.catalog
        others = tuple(one for one in catalog.all if one.id != version.id)
        catalog.version_table = msgspec.structs.replace(catalog.version_table, versions=(*others, version))
        ends = array("I", range(1, 10)).tobytes()
        described = m.Described("", version.id, digest, 9, 4096, (), True, pieces=b"abcdefghi", piece_ends=ends)
        described = msgspec.structs.replace(described, revision=revision)
        self.service.loaded.on_description(version.id, described)
        return version

    def set_ready(self, version: ModelVersion, kernels: str = KERNELS) -> None:
        """Its worker has started."""
        state = m.ModelState(version.id, version.digest, True, "", 0, 0, 8, kernels=kernels, ranks=self.ranks)
        state = msgspec.structs.replace(state, attachments=(self.attachment,))
        self.service.on_scheduler(m.SchedulerState([state]))

    def check(
        self, version: ModelVersion, reference: ModelVersion | None = None, is_early: bool = False
    ) -> list[tuple[int, int]]:
        """Test a version, begun before if `is_early`; what was asked for it."""

        async def test() -> None:
            service = self.service
            passed = PassedTests(self.path)  # as another gateway reads them
            tested = SelfTest(
                service.loaded,
                service.tokenizer,
                service.relay,
                service.embedder,
                service.clock,
                passed,
                self.performance,
            )
            early = tested.begin(version, reference) if is_early else None
            await tested.check(version, reference, early)

        self.asked.clear()
        asyncio.run(test())
        return list(self.asked)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():
            await asyncio.sleep(0.01)


@pytest.fixture
def stages(tmp_path: Path) -> Stages:
    return Stages(tmp_path)


def test_a_version_that_has_passed_before_computes_one_step(stages: Stages) -> None:
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


def test_a_test_that_was_begun_early_is_not_repeated(stages: Stages) -> None:
    """It is part of the first one, and all of the next."""
    assert sorted(stages.check(stages.version(), is_early=True)) == sorted([SHORT, WHOLE])
    assert stages.check(stages.version(2), is_early=True) == [SHORT]
    assert stages.check(stages.version(3)) == [SHORT]


def test_damage_that_an_early_test_finds_is_asked_for_twice(stages: Stages) -> None:
    stages.check(stages.version())
    stages.offset = 1
    with pytest.raises(ModelDamaged):
        stages.check(stages.version(2), is_early=True)
    assert stages.asked == [SHORT, SHORT]


def test_an_early_test_that_was_refused_is_repeated(stages: Stages) -> None:
    """Its time begins before the worker is ready."""
    stages.check(stages.version())
    stages.fails_after, stages.fails_until = 0, 1
    assert stages.check(stages.version(2), is_early=True) == [SHORT, SHORT]


def test_an_early_test_of_workers_that_have_been_replaced_is_repeated(stages: Stages) -> None:
    """Their successors have mapped the weights again; the scheduler may be another one, too."""
    stages.check(stages.version())
    stages.attachment = 8
    assert stages.check(stages.version(2), is_early=True) == [SHORT, SHORT]


def test_an_early_test_that_names_no_worker_is_repeated(stages: Stages) -> None:
    stages.check(stages.version())
    stages.attachment = stages.answered_by = 0
    assert stages.check(stages.version(2), is_early=True) == [SHORT, SHORT]


def test_an_early_test_whose_computation_fails_is_not_repeated(stages: Stages) -> None:
    """The value that is not finite is the first answer; a repetition would find nothing."""
    stages.check(stages.version())
    stages.logprob, stages.damaged_answers = math.nan, 1
    with pytest.raises(InferenceError, match=f"requested {SHORT_MAX_TOKENS} tokens"):
        stages.check(stages.version(2), is_early=True)
    assert stages.asked == [SHORT]


def test_a_short_test_whose_computation_fails_is_not_ignored_after_the_whole_one(stages: Stages) -> None:
    stages.damaged_after, stages.logprob = 1, math.nan
    with pytest.raises(InferenceError, match=f"requested {SHORT_MAX_TOKENS} tokens"):
        stages.check(stages.version())
    assert stages.asked == [WHOLE, SHORT]


def test_a_version_beside_one_of_the_same_file_has_no_early_test(stages: Stages) -> None:
    first = stages.version()
    stages.check(first)
    assert stages.check(stages.version(2), first, is_early=True) == [WHOLE, WHOLE]


async def test_a_load_asks_for_the_test_before_the_worker_is_ready(stages: Stages) -> None:
    version = stages.described()
    loading = asyncio.create_task(stages.service.loader._steps.finish(version))
    await until(lambda: stages.asked == [SHORT])
    assert not loading.done()
    stages.set_ready(version)
    await loading
    assert stages.asked == [SHORT, WHOLE]
    assert stages.service.catalog.serving("m") is not None


async def test_a_load_that_fails_leaves_no_test_behind(stages: Stages, tmp_path: Path) -> None:
    stages.answers_after = 1 << 30  # its worker never computes
    version = stages.described()
    loading = asyncio.create_task(stages.service.loader._steps.finish(version))
    await until(lambda: stages.asked == [SHORT])
    assert stages.service.relay.requests
    (tmp_path / "run").mkdir(mode=0o700)
    versions.write_failure(tmp_path / "run", version.stage, ModelUnavailable("too little memory"))
    with pytest.raises(StarlingError, match="too little memory"):
        await loading
    await until(lambda: not stages.service.relay.requests)


def test_a_logprob_that_is_not_finite_is_refused_in_both(stages: Stages) -> None:
    stages.logprob = math.nan
    with pytest.raises(InferenceError, match="the self-test of m@1 requested 8 tokens"):
        stages.check(stages.version())
    stages.logprob = -0.5
    stages.check(stages.version())
    stages.logprob = math.nan
    with pytest.raises(InferenceError, match=f"the self-test of m@2 requested {SHORT_MAX_TOKENS} tokens"):
        stages.check(stages.version(2))


def test_a_version_beside_one_of_the_same_file_gets_the_whole_test(stages: Stages) -> None:
    first = stages.version()
    stages.check(first)
    assert stages.check(stages.version(2), first) == [WHOLE, WHOLE]


def test_a_version_of_the_same_file_that_answers_differently_is_not_compared(stages: Stages) -> None:
    """Its checkpoint was made again by a release that computes another K from the file."""
    first = stages.version()
    stages.check(first)
    assert stages.check(stages.version(2, revision="-kv1"), first) == [SHORT]


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
